"""The smaller elementwise functions on every backend, against torch: on rows, on infinities and NaN, at awkward numbers.

In: the cases of `elementwise_cases.py`. Out: failures that name the first bad coordinate and both values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
from serrate import JaggedTensor, ir
from serrate.frontend import ops
from tests.engine.elementwise_cases import EDGES, ELEMENTWISE, SPECIAL_ELEMENTWISE
from tests.engine.matrix import POINT, Options, points, run
from tests.engine.oracle import BACKENDS, ONE_LEVEL, Features, arguments, compare, recorded, wanted

pytestmark = pytest.mark.sampled(2)


@pytest.mark.parametrize(POINT, points(ELEMENTWISE, "elementwise"))
def test_elementwise(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(ELEMENTWISE[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize(POINT, points(SPECIAL_ELEMENTWISE, "special"))
def test_infinities_and_nan(
    case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features
) -> None:
    run(SPECIAL_ELEMENTWISE[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_result_dtypes(name: str) -> None:
    case = ELEMENTWISE[name]
    for dtype in case.dtypes:
        given = arguments(case, ONE_LEVEL["single"], dtype, case.features[0], name)
        want = [w.dtype for w in wanted(case, given)]
        assert [v.dtype for v in recorded(case, dtype, case.features[0]).outputs] == want, f"{name} of {dtype}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(EDGES))
def test_awkward_numbers(name: str, backend: str) -> None:
    operation, function, numbers = EDGES[name]
    for dtype in (torch.float32, torch.float64):
        operands = [torch.tensor(x, dtype=dtype) for x in numbers]
        got = _computed(operation, backend, operands)
        # Relative to tiny results too.
        compare(got, function(*operands), f"{name} of {operands}", tolerance=(3e-5 if dtype == torch.float32 else 1e-10, 1e-37))


@pytest.mark.parametrize("backend", BACKENDS)
def test_arithmetic_of_truth_values(backend: str) -> None:
    """As in torch, a sum is true where either operand is, and a product where both are."""
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    x, y = (JaggedTensor.from_lengths(each, [3, 0, 1]) for each in (a, b))
    for function in (lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x + True, lambda x, y: (x + y).float() + (x * y)):
        assert torch.equal(serrate.jit(function, backend=backend)(x, y).values, function(a, b))


LOWEST = {dtype: torch.iinfo(dtype).min for dtype in (torch.int32, torch.int64)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", LOWEST)
def test_the_lowest_integer_by_minus_one(dtype: torch.dtype, backend: str) -> None:
    """The quotient is one more than the largest: it wraps, and nothing traps."""
    a = torch.tensor([LOWEST[dtype], LOWEST[dtype], 7, 0], dtype=dtype)
    b = torch.tensor([-1, 0, -1, 0], dtype=dtype)
    assert _computed(ops.floor_divide, backend, [a, b]).tolist() == [LOWEST[dtype], 0, -7, 0]
    assert _computed(ops.remainder, backend, [a, b]).tolist() == [0, 0, 0, 0]


def _computed(operation: Any, backend: str, operands: list[torch.Tensor]) -> torch.Tensor:
    with ir.Fusion("awkward") as fusion:
        fusion.output(operation(*(fusion.input((None,), x.dtype) for x in operands)))
    found: torch.Tensor = fusion.compile(backend)(*operands)
    return found


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("function", [lambda x: x // 3, lambda x: x % 7, lambda x: torch.fmod(x, 4)], ids=["//", "%", "fmod"])
def test_bytes_are_divided_by_numbers(function: Callable[[Any], Any], backend: str) -> None:
    values = torch.tensor([200, 7, 9, 255, 0], dtype=torch.uint8)
    found = serrate.jit(function, backend=backend)(JaggedTensor.from_lengths(values, [2, 3]))
    assert torch.equal(found.values, function(values))
