"""Gathers, slices, padding, joining and views on every backend, against plain torch row by row.

In: the cases of `movement_cases.py`. Out: failures that name the structure, the first bad coordinate and both values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, jit
from serrate.errors import ShapeError
from tests.engine.matrix import POINT, Options, points, run
from tests.engine.movement_cases import MOVEMENT, STRUCTURE
from tests.engine.oracle import ONE_LEVEL, Features, arguments, recorded, wanted

pytestmark = pytest.mark.sampled(2)


@pytest.mark.parametrize(POINT, points(MOVEMENT, "movement"))
def test_movement(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(MOVEMENT[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize(POINT, points(STRUCTURE, "structure"))
def test_structure(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(STRUCTURE[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize("name", [*MOVEMENT, *STRUCTURE])
def test_result_dtypes(name: str) -> None:
    case = (MOVEMENT | STRUCTURE)[name]
    for dtype in case.dtypes:
        given = arguments(case, ONE_LEVEL["single"], dtype, case.features[0], name)
        want = [w.dtype for w in wanted(case, given)]
        assert [v.dtype for v in recorded(case, dtype, case.features[0]).outputs] == want, f"{name} of {dtype}"


JOINED: dict[str, tuple[Any, list[int], int, Any]] = {
    "one position after every row": (lambda x, y: torch.cat([x, y], 1), [4, 1, 3], 1, lambda r, d: [*r, *d]),
    "two positions before every row": (lambda x, y: torch.cat([y, x], 1), [4, 2, 3], 1, lambda r, d: [*d, *r]),
    "no position": (lambda x, y: torch.cat([x, y], 1), [4, 0, 3], 1, lambda r, d: [*r, *d]),
    "on both sides": (lambda x, y: torch.cat([y, x, y], -2), [4, 2, 3], 1, lambda r, d: [*d, *r, *d]),
    "rows after rows": (lambda x, y: torch.cat([x, y]), [2, 5, 3], 0, None),
    "rows before rows": (lambda x, y: torch.cat([y, x]), [1, 0, 3], 0, None),
}


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", JOINED)
def test_dense_tensors_join_rows(name: str, backend: str) -> None:
    """As outside of traced functions: a cache of keys, and the key of a new token for every row."""
    function, shape, dim, row = JOINED[name]
    values, dense = torch.randn(8, 3, requires_grad=True), torch.randn(shape, requires_grad=True)
    jt = JaggedTensor.from_lengths(values, [3, 0, 4, 1])
    rows: list[Tensor] = [*values.split([3, 0, 4, 1])]
    if dim:
        wanted = [torch.stack(found) if (found := row(*pair)) else values[:0] for pair in zip(rows, dense, strict=True)]
    else:
        wanted = [*rows, *dense] if name == "rows after rows" else [*dense, *rows]
    got = jit(function, backend=backend)(jt, dense)
    assert got.lengths.tolist() == [len(each) for each in wanted]
    assert torch.equal(got.values, torch.cat(wanted))
    upstream = torch.randn_like(got.values)
    given = (values, dense) if dense.numel() else (values,)
    found = torch.autograd.grad(got.values, given, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(torch.cat(wanted), given, upstream))


def test_dense_tensors_join_rows_of_heads() -> None:
    jt, dense = JaggedTensor.from_lengths(torch.randn(8, 2, 3), [3, 0, 4, 1]), torch.randn(4, 2, 1, 3)
    got = jit(lambda x, y: torch.cat([x.transpose(1, 2), y], 2))(jt, dense).transpose(1, 2)
    for own, row, new in zip(got.unbind(), jt.unbind(), dense, strict=True):
        assert torch.equal(own, torch.cat([row, new.transpose(0, 1)]))


@pytest.mark.parametrize(("shape", "dim"), [((3, 1, 3), 1), ((4, 1, 2), 1), ((4, 3, 3), 2), ((2, 4, 2), 0)])
def test_dense_tensors_that_do_not_fit_rows(shape: tuple[int, ...], dim: int) -> None:
    jt = JaggedTensor.from_lengths(torch.randn(8, 3), [3, 0, 4, 1])
    with pytest.raises(ShapeError, match="cat of"):
        jit(lambda x, y: torch.cat([x, y], dim))(jt, torch.randn(shape))
