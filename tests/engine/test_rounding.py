"""Every operation is rounded once, as torch rounds it, and everything that reads its result reads the same number.

In: small programs whose results are known to the last bit. Out: failures against plain torch, row by row, on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, jit, settings
from tests.engine.oracle import BACKENDS

LENGTHS = [1, 0, 5, 1, 40, 2, 1, 97]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with monkeypatch.context() as patch:
        patch.setenv("SERRATE_BACKEND", request.param)
        settings.reload()
        yield request.param
    settings.reload()


def rows(lengths: list[int], *width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> JaggedTensor:
    values = torch.randn(sum(lengths), *width, generator=torch.Generator().manual_seed(seed))
    return JaggedTensor.from_lengths(values.to(dtype), lengths)


# --- products and sums stay apart ------------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "product and sum": lambda a, b, c: a * b + c,
    "sum and product": lambda a, b, c: c + a * b,
    "difference of products": lambda a, b, c: a * a - b * c,
    "product less sum": lambda a, b, c: (a + b) * c - a,
    "square less product": lambda a, b, c: torch.square(a) - a * a,
    "scaled": lambda a, b, c: a * 0.1 + b * 0.3 - c,
    "quotient": lambda a, b, c: (a * b - c) / (1 + a * a),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_math_has_the_bits_of_torch(name: str, dtype: torch.dtype, backend: str) -> None:
    function = ELEMENTWISE[name]
    a, b, c = (rows(LENGTHS, 3, dtype=dtype, seed=k) for k in range(3))
    assert torch.equal(jit(function)(a, b, c).values, function(a.values, b.values, c.values))


def test_a_row_of_one_element_has_no_variance(backend: str) -> None:
    a = rows([1] * 50, 3)
    spread = jit(lambda a: torch.sqrt((a * a).mean(1) - a.mean(1) ** 2))(a)
    assert torch.equal(spread, torch.zeros(50, 3))
    assert torch.equal(jit(lambda a: (a * a).var(1, correction=0))(a), torch.zeros(50, 3))
    assert jit(lambda a: (a * a).var(1))(a).isnan().all()
    assert jit(lambda a: (a * a + a).var(1))(a).isnan().all()


def test_rows_of_equal_products_have_no_variance(backend: str) -> None:
    factors = torch.randn(40, generator=torch.Generator().manual_seed(1))
    lengths = [1, 2, 3, 4] * 10
    a = JaggedTensor.from_lengths(factors.repeat_interleave(torch.tensor(lengths)), lengths)
    assert torch.equal(jit(lambda a: (a * 0.1).var(1, correction=0))(a), torch.zeros(40))
    assert torch.equal(jit(lambda a: (a * a - (a * a).amax(1, keepdim=True)).abs().amax(1))(a), torch.zeros(40))


def test_a_sum_of_one_product_is_the_product(backend: str) -> None:
    a, b = rows([1] * 50, 3), rows([1] * 50, 3, seed=1)
    assert torch.equal(jit(lambda a, b: (a * b).sum(1, keepdim=True) - a * b)(a, b).values, torch.zeros(50, 3))


def test_kernels_have_the_bits_of_torch() -> None:
    @serrate.kernel
    def combined(a: JaggedTensor, b: JaggedTensor, c: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(a)
        for row, at in hl.tile([a.num_rows, a.max_length]):
            x, y, z = a[row, at], b[row, at], c[row, at]
            out[row, at] = x * y - z * z + (x + 1) * y
        return out

    a, b, c = (rows(LENGTHS, seed=k) for k in range(3))
    x, y, z = a.values, b.values, c.values
    assert torch.equal(combined(a, b, c).values, x * y - z * z + (x + 1) * y)


def test_kernels_know_that_one_element_has_no_variance() -> None:
    @serrate.kernel
    def spread(a: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(a.num_rows)
        for row in hl.tile(a.num_rows):
            first = hl.zeros([row])
            second = hl.zeros([row])
            for at in hl.tile(a.max_length):
                x = a[row, at]
                first = first + x.sum(1)
                second = second + (x * x).sum(1)
            out[row] = second - first * first
        return out

    assert torch.equal(spread(rows([1] * 50)), torch.zeros(50))


def test_triton_is_told_to_contract_nothing() -> None:
    a = rows(LENGTHS, 3)
    with serrate.ir.Fusion() as fusion:
        x, offsets = fusion.input((None, 3), torch.float32), fusion.input((None,), torch.int64)
        fusion.output(serrate.ops.sum(serrate.ops.as_nested(x, offsets) * 2.0 + 1.0, 1))
    (executable,) = fusion.compile("triton").executables(a.values, a.offsets)
    assert all(launch.options["enable_fp_fusion"] is False for launch in executable._launches)


@pytest.mark.parametrize("exponent", [2, 3, 2.0, 0.5, -0.5, -1, -2, 1, 0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_powers_are_those_of_torch(exponent: float, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point and exponent < 0 and isinstance(exponent, int):
        pytest.skip("torch refuses integers to negative powers")
    values = torch.tensor([0.5, -1.5, 3.0, 0.1, 7.0, -0.0]).to(dtype)
    found = jit(lambda a: a**exponent)(JaggedTensor.from_lengths(values, [2, 0, 4])).values
    torch.testing.assert_close(found, values**exponent, rtol=3e-7, atol=0, equal_nan=True)
    if exponent in (2, 3):
        assert torch.equal(found, values**exponent)
