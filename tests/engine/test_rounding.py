"""Every operation is rounded once, as torch rounds it, and everything that reads its result reads the same number.

In: small programs whose results are known to the last bit. Out: failures against plain torch, row by row, on every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, jit, settings
from tests.conftest import INTERPRETED
from tests.engine.oracle import BACKENDS

pytestmark = pytest.mark.sampled(2)

LENGTHS = [1, 0, 5, 1, 40, 2, 1, 97]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SERRATE_BACKEND", request.param)
    settings.reload()
    return request.param


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
    factors = torch.randn(12, generator=torch.Generator().manual_seed(1))
    lengths = [1, 2, 3, 4] * 3
    a = JaggedTensor.from_lengths(factors.repeat_interleave(torch.tensor(lengths)), lengths)
    assert torch.equal(jit(lambda a: (a * 0.1).var(1, correction=0))(a), torch.zeros(12))
    assert torch.equal(jit(lambda a: (a * a - (a * a).amax(1, keepdim=True)).abs().amax(1))(a), torch.zeros(12))


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
    assert all(launch.kernel._options["enable_fp_fusion"] is False for launch in executable._launches)


def test_triton_divides_with_correct_rounding() -> None:
    """Its operator for division of float32 is an approximation on a GPU."""
    source = jit(lambda a, b: a / b, backend="triton").source(*(rows(LENGTHS, seed=n) for n in range(2)))
    assert "tl.div_rn(" in source


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


# --- intermediates are one number --------------------------------------------------------------------------------------------

SIXTEEN = [torch.bfloat16, torch.float16]
TRUNCATED = [("triton", torch.bfloat16)] if INTERPRETED else []
"""What Triton's interpreter does not round, as the device does."""
sixteen = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)


def close(found: Any, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding apart, at most: the wanted numbers are those of float32, rounded."""
    values = found.values if isinstance(found, JaggedTensor) else found
    assert values.dtype == dtype
    torch.testing.assert_close(values.float(), wanted.float(), rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@sixteen
def test_the_largest_element_is_one_of_the_elements(dtype: torch.dtype, backend: str) -> None:
    a = rows(LENGTHS, dtype=dtype)

    @jit
    def how_many_are_largest(a: Any) -> Any:
        e = torch.exp(a)
        return (e == e.amax(1, keepdim=True)).sum(1)

    wanted = [(row.float().exp() == row.float().exp().amax()).sum() if len(row) else torch.tensor(0) for row in a.unbind()]
    assert how_many_are_largest(a).tolist() == [int(n) for n in wanted]


@sixteen
def test_positions_of_running_extremes(dtype: torch.dtype, backend: str) -> None:
    a = rows(LENGTHS, dtype=dtype)
    for name in ("cummax", "cummin"):
        found = jit(lambda a, name=name: getattr(torch, name)(torch.exp(a), 1).indices)(a)
        for row, places in zip(a.unbind(), found.unbind(), strict=True):
            assert torch.equal(places, getattr(torch, name)(row.float().exp(), 0).indices)


@sixteen
def test_results_that_are_read_too(dtype: torch.dtype, backend: str) -> None:
    """The result is rounded; whoever reads it inside the program reads it unrounded."""
    a = rows(LENGTHS, dtype=dtype)

    @jit
    def both(a: Any) -> Any:
        e = torch.exp(a)
        top = e.amax(1, keepdim=True)
        return e, top, (e - top).abs().amin(1), e.sum(1)

    e, top, least, total = both(a)
    close(e, a.values.float().exp(), dtype)
    nonempty = [k for k, n in enumerate(LENGTHS) if n]
    assert torch.equal(least[nonempty], torch.zeros(len(nonempty), dtype=dtype))
    close(
        top.values if isinstance(top, JaggedTensor) else top[nonempty, 0],
        torch.stack([r.float().exp().max() for r in a.unbind() if len(r)]),
        dtype,
    )
    close(total, torch.stack([r.float().exp().sum() for r in a.unbind()]), dtype)


@sixteen
def test_a_result_that_is_rounded_is_read_unrounded(dtype: torch.dtype, backend: str) -> None:
    """The first integer that a dtype has not: rounded where it is handed out, and exact for whoever computes with it."""
    whole = 2 / torch.finfo(dtype).eps
    a = JaggedTensor.from_lengths(torch.full((5,), whole).to(dtype), [2, 0, 3])
    one = a.with_values(torch.ones(5).to(dtype))
    odd = {"sum": lambda a, b: a + b, "difference": lambda a, b: b - (-a)}
    for name, function in odd.items():
        found, *rest = jit(lambda a, b, f=function: (e := f(a, b), e - a, torch.flip(e, [1]) - a))(a, one)
        assert found.values.tolist() == [whole] * 5, name
        assert [r.values.tolist() for r in rest] == [[1] * 5] * 2, name


@sixteen
def test_differences_of_what_is_equal_are_zero(dtype: torch.dtype, backend: str) -> None:
    a = rows([1] * 6, 3, dtype=dtype)
    for name, f in {
        "mean": lambda a: torch.sin(a).mean(1, keepdim=True) - torch.sin(a),
        "sum": lambda a: (a * 1.1).sum(1, keepdim=True) - a * 1.1,
        "softmax": lambda a: torch.softmax(a, 1) - 1,
        "cumsum": lambda a: torch.cumsum(torch.exp(a), 1) - torch.exp(a),
        "matmul": lambda a: (a @ torch.eye(3, dtype=a.dtype)) - a,
        "max": lambda a: torch.exp(a).max(1, keepdim=True).values - torch.exp(a),
        "logsumexp": lambda a: torch.logsumexp(a, 1, keepdim=True) - a,
        "mean of both": lambda a: (
            torch.exp(a).mean((1, 2), keepdim=True) - torch.exp(a).mean(2, keepdim=True).mean(1, keepdim=True)
        ),
    }.items():
        found = jit(f)(a)
        values = found.values if isinstance(found, JaggedTensor) else found
        limit = 1e-6 if name in ("logsumexp", "mean of both") else 0.0
        assert values.abs().max() <= limit, name


@sixteen
def test_explicit_casts_round(dtype: torch.dtype, backend: str) -> None:
    a = rows(LENGTHS, 3, dtype=dtype)
    e = a.values.float().exp()
    there_and_back = jit(lambda a: torch.exp(a).to(dtype).float())(a).values
    assert torch.equal(there_and_back, there_and_back.to(dtype).float())
    assert not torch.equal(there_and_back, e)
    wide = jit(lambda a: torch.exp(a).float())(a).values
    torch.testing.assert_close(wide, e, rtol=3e-7, atol=0)
    through = jit(lambda a: torch.exp(a.float()).to(dtype).float() - torch.exp(a.float()).to(dtype).float())(a).values
    assert torch.equal(through, torch.zeros_like(through))
    if (backend, dtype) in TRUNCATED:
        return
    rounded = jit(lambda a: (torch.exp(a).float(), torch.exp(a).to(dtype).float()))(a)
    assert torch.equal(rounded[0].values.to(dtype).float(), rounded[1].values)


MEETING: dict[str, Callable[..., Any]] = {
    "lt": lambda x, n: x < n,
    "le": lambda x, n: x <= n,
    "gt": lambda x, n: n < x,
    "eq": lambda x, n: x == n,
    "ne": lambda x, n: n != x,
    "remainder": lambda x, n: x % n,
    "fmod": torch.fmod,
    "pow": torch.pow,
}


@sixteen
@pytest.mark.parametrize("number", [0.1, -0.3, 257, 3001])
def test_numbers_are_rounded_where_torch_rounds_them(dtype: torch.dtype, number: float, backend: str) -> None:
    """Beside the number as the dtype holds it; between it and the number itself there is nothing else to tell them apart."""
    if (backend, dtype) in TRUNCATED:
        pytest.skip("Triton's interpreter does not round to bfloat16, it truncates")
    own = torch.tensor([number]).to(dtype)
    a = JaggedTensor.from_lengths(torch.cat([own, own * 1.01, own * 0.99, own / 2, -own / 8]), [2, 0, 3])

    def meet(a: Any, number: Any) -> list[Any]:
        return [meeting(a, number) for meeting in MEETING.values()]

    found = jit(meet)(a, number)
    # Numbers that a program reads from memory, and tensors without dims, are rounded like those in its code.
    read = jit(meet)(a, torch.tensor(number, dtype=torch.float32))
    for name, one, other in zip(MEETING, found, read, strict=True):
        wanted = MEETING[name](a.values, number)
        if name == "pow":
            close(one, wanted, dtype)
            continue
        assert torch.equal(one.values, wanted), name
        assert torch.equal(other.values, wanted), name
    if backend == "cpp":
        for name in ("lt", "eq"):
            assert torch.equal(MEETING[name](a, number).values, MEETING[name](a.values, number)), name


@sixteen
def test_numbers_between_stages_are_not_rounded(dtype: torch.dtype, backend: str) -> None:
    """A sort needs its input complete, so that what it sorts goes through memory."""
    a = rows([40, 0, 97, 1], dtype=dtype)

    @jit
    def sorted_away(a: Any) -> Any:
        e = torch.exp(a)
        values, places = torch.sort(e, 1)
        return values.amax(1) - e.amax(1), torch.gather(e, 1, places) - values, values

    top, moved, values = sorted_away(a)
    assert torch.equal(top.nan_to_num(), torch.zeros_like(top)) and torch.equal(moved.values, torch.zeros_like(moved.values))
    close(values, torch.cat([r.float().exp().sort().values for r in a.unbind()]), dtype)


@sixteen
def test_products_round_their_operands(dtype: torch.dtype, backend: str) -> None:
    if (backend, dtype) in TRUNCATED:
        pytest.skip("Triton's interpreter does not round to bfloat16, it truncates")
    a, w = rows([5, 0, 9, 33], 16, dtype=dtype), torch.randn(16, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    found = jit(lambda a, w: (a * 1.5) @ w)(a, w)
    wanted = (a.values.float() * 1.5).to(dtype).double() @ w.double()
    torch.testing.assert_close(found.values.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=2e-2)
    chained = jit(lambda a, w: ((a @ w).relu() @ w.T).sum(1))(a, w)
    inner = (a.values.double() @ w.double()).relu().to(dtype).double() @ w.T.double()
    wanted = torch.stack([part.sum(0) for part in inner.split([5, 0, 9, 33])])
    torch.testing.assert_close(chained.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=0.2)


@sixteen
def test_kernels_read_one_number(dtype: torch.dtype) -> None:
    @serrate.kernel
    def how_many(a: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(a.num_rows, dtype=torch.int64)
        explicit = torch.zeros(a.num_rows)
        for row in hl.tile(a.num_rows):
            e = torch.exp(a[row, :])
            out[row] = (e == e.amax(1)[:, None]).sum(1)
            explicit[row] = (e.to(a.dtype).float() - e).abs().amax(1)
        return out, explicit

    a = rows([5, 1, 40, 97], dtype=dtype)
    found, explicit = how_many(a)
    assert found.tolist() == [int((r.float().exp() == r.float().exp().max()).sum()) for r in a.unbind()]
    wanted = torch.stack([(r.float().exp().to(dtype).float() - r.float().exp()).abs().max() for r in a.unbind()])
    torch.testing.assert_close(explicit, wanted, rtol=1e-2, atol=1e-6)
