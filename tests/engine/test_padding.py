"""Padding and unpadding in traced programs: every composition, backend and strategy, against the container's own by torch.

In: one ragged tensor of each composition. Out: failures that name the composition and the backend.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, ir, jit, ops
from serrate.errors import DtypeError, ShapeError
from tests.engine.oracle import BACKENDS, ONE_LEVEL, STRATEGIES
from tests.engine.test_compositions import COMPOSITIONS, WAYS, tensor_of

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTHS = torch.tensor([3, 0, 7, 1])


def rows(*inner: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    values = torch.arange(11 * torch.Size(inner).numel()).reshape(11, *inner)
    return JaggedTensor.from_lengths(values.to(dtype), LENGTHS)


@COMPOSITIONS
@pytest.mark.parametrize(("backend", "strategy"), WAYS)
def test_every_composition(name: str, backend: str, strategy: str | None) -> None:
    jt = tensor_of(name)
    if name == "columns of the next dim":
        jt = jt.contiguous()
    got = jit(lambda x: x.to_padded(-2), backend=backend, strategy=strategy)(jt)
    assert torch.equal(got, jt.to_padded(-2))


@pytest.mark.parametrize("fill", [0, 1.5, -0.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fills(backend: str, dtype: torch.dtype, fill: float) -> None:
    jt = rows(3, dtype=dtype)
    got, want = jit(lambda x: x.to_padded(fill), backend=backend)(jt), jt.to_padded(fill)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # Bit for bit, so that -0.0 is told from 0.0; a NaN is any NaN.
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num().view(bits), want.nan_to_num().view(bits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fill_that_is_a_tensor(backend: str) -> None:
    for inner in ((), (3,)):
        jt = rows(*inner)
        program = jit(lambda x, fill: x.to_padded(fill), backend=backend)
        for fill in (2.5, -1.0):
            assert torch.equal(program(jt, torch.tensor([fill])), jt.to_padded(fill))


@pytest.mark.parametrize("structure", ONE_LEVEL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_from_padded(structure: str, strategy: str) -> None:
    lengths = torch.tensor(ONE_LEVEL[structure].lengths, dtype=torch.int64)
    x = torch.randn(len(lengths), max(ONE_LEVEL[structure].lengths, default=0) + 2, 5)
    want = [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    for given, kind in ((lengths, "lengths"), (offsets, "offsets")):
        with ir.Fusion() as f:
            dense, told = f.input((None, None, 5), torch.float32), f.input((None,), torch.int64)
            f.output(ops.from_padded(dense, **{kind: told}))
        for backend in ("reference", "cpp"):
            found = f.compile(backend, strategy)(x, given).unbind()
            assert len(found) == len(want) and all(map(torch.equal, found, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [(), (3,), (64,), (2, 3)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_jagged_plus_dense_is_one_program(backend: str, inner: tuple[int, ...], dtype: torch.dtype) -> None:
    """Past a row the dense value is written (rule 4), and nothing padded is kept in between."""
    jt = rows(*inner, dtype=dtype)
    dense = torch.randn(4, 7, *inner).to(dtype)
    for program in (jit(_after, backend=backend), jit(_before, backend=backend)):
        # Triton's interpreter rounds to sixteen bits in its own way.
        close = {"rtol": 2.0**-7, "atol": 0.0} if (backend, dtype) == ("triton", torch.bfloat16) else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(program(jt, dense), dense + jt.to_padded(), **close)
        (executable,) = program.compiled(jt, dense)[0].executables(*program.compiled(jt, dense)[1])
        assert len(executable.program.kernels) == 1 and not executable.program.scratch


def _after(jt: Any, dense: Any) -> Any:
    return dense + jt.to_padded()


def _before(jt: Any, dense: Any) -> Any:
    return jt.to_padded() + dense


def test_what_is_padded_may_be_computed() -> None:
    """In a hole there is the fill, not what a function makes of it."""
    jt = rows(3)
    assert torch.equal(jit(lambda x: torch.exp(x * 0).to_padded(5))(jt), torch.exp(jt * 0).to_padded(5))
    assert torch.equal(jit(lambda x: torch.exp(x.to_padded() * 0))(jt), torch.ones(4, 7, 3))


def test_a_given_length() -> None:
    jt, program = rows(2), jit(lambda x: ops.to_padded(x, 1, longest=9))
    want = torch.cat([jt.to_padded(1), torch.ones(4, 2, 2)], 1)
    assert torch.equal(program(jt), want)
    with pytest.raises(ShapeError, match="to_padded: longest has 5 positions; the longest row has 7"):
        jit(lambda x: ops.to_padded(x, longest=5))(jt)


def test_a_dense_operand_of_another_length_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"differ: 9 and 7|differ: 7 and 9"):
        jit(_after)(rows(2), torch.zeros(4, 9, 2))


def test_mistakes() -> None:
    integers = JaggedTensor.from_lengths(torch.arange(11), LENGTHS)
    with pytest.raises(DtypeError, match="cannot be held"):
        jit(lambda x: x.to_padded(0.5))(integers)
    with pytest.raises(ShapeError, match="no ragged dim"):
        jit(lambda x: ops.to_padded(x.sum(1)))(integers)
    with pytest.raises(ShapeError, match="either offsets or lengths"), ir.Fusion() as f:
        ops.from_padded(f.input((None, 3), torch.float32))
    with ir.Fusion() as f:
        x, lengths = f.input((None, None), torch.float32), f.input((None,), torch.int64)
        f.output(ops.from_padded(x, lengths=lengths))
    with pytest.raises(ShapeError, match="the longest row has 4"):
        f.evaluate(torch.zeros(1, 3), torch.tensor([4]))


def test_no_lane_asks_whether_it_exists() -> None:
    """The block is cut where the row ends: inside there are copies, behind there is the fill."""
    source = jit(lambda x: x.to_padded(7.0), backend="cpp").source(rows(64))
    assert "?" not in source.split("for (i64 d")[-2] and "stream_copy" in source
    copied: Tensor = rows(64).values
    with ir.Fusion() as f:
        x, lengths = f.input((None, None, 64), torch.float32), f.input((None,), torch.int64)
        f.output(ops.from_padded(x, lengths=lengths))
    text = f.compile("cpp").source(copied.reshape(1, 11, 64), torch.tensor([11]))  # type: ignore[attr-defined]
    assert "copy_bytes" in text and "load(" not in text
