"""Every dtype through loads, math, reductions and stores of compiled kernels.

In: kernels of a few lines, run on every dtype they make sense for. Out: a failure where numbers or dtypes are not torch's.
Sixteen-bit sums carry float32 and round once, so the reference is float64, within the dtype's tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import KernelError
from tests.language.kinds import TILES, ran

LENGTHS = [3, 0, 70, 1, 7]
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WHOLE = (torch.int32, torch.int64)
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6, torch.float64: 1e-12}
WAYS = tuple(t for t in TILES if t not in (1, 3))


def ragged(dtype: torch.dtype, *inner: int) -> JaggedTensor:
    torch.manual_seed(4)
    made = torch.randn(sum(LENGTHS), *inner) * 3
    return JaggedTensor.from_lengths(made > 0 if dtype == torch.bool else made.to(dtype), LENGTHS)


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Equal within a few units in the last place; whole numbers and bools exactly."""
    assert found.dtype == dtype
    wanted = wanted.to(dtype)
    if not dtype.is_floating_point:
        assert torch.equal(found, wanted)
        return
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@serrate.kernel
def sums(jt: JaggedTensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(jt.num_rows, dtype=dtype)
    for b in hl.tile(jt.num_rows):
        total = hl.zeros([b], dtype=dtype)
        for t in hl.tile(jt.max_length):
            total = total + jt[b, t].sum(1)
        out[b] = total
    return out


@serrate.kernel
def rounded_sums(jt: JaggedTensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(jt.num_rows, dtype=dtype)
    for b in hl.tile(jt.num_rows):
        total = hl.zeros([b], dtype=dtype)
        for t in hl.tile(jt.max_length):
            total = (total + jt[b, t].to(torch.float32).sum(1)).to(dtype)
        out[b] = total
    return out


@serrate.kernel
def extremes(jt: JaggedTensor, low: Any, high: Any) -> tuple[torch.Tensor, torch.Tensor]:
    top, bottom = torch.empty(jt.num_rows, dtype=jt.dtype), torch.empty(jt.num_rows, dtype=jt.dtype)
    for b in hl.tile(jt.num_rows):
        most, least = hl.full([b], low, dtype=jt.dtype), hl.full([b], high, dtype=jt.dtype)
        for t in hl.tile(jt.max_length):
            most = torch.maximum(most, jt[b, t].amax(1))
            least = torch.minimum(least, jt[b, t].amin(1))
        top[b], bottom[b] = most, least
    return top, bottom


@serrate.kernel
def places(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, last = torch.empty(x.size(0), dtype=torch.int64), torch.empty(x.size(0), dtype=torch.int64)
    for b in hl.tile(x.size(0)):
        first[b], last[b] = x[b, :].argmax(1), x[b, :].argmin(1)
    return first, last


@serrate.kernel
def moved(jt: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.tile(jt.num_rows):
        for t in hl.tile(jt.max_length):
            out[b, t] = jt[b, t]
    return out


@serrate.kernel
def mathematics(jt: JaggedTensor, row: torch.Tensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.tile(jt.num_rows):
        for t in hl.tile(jt.max_length):
            x = jt[b, t]
            out[b, t] = torch.where(x > 0, x * 2 + row[b][:, None], x.clamp(-2, 2) - 1)
    return out


@serrate.kernel
def converted(jt: JaggedTensor, dtype: torch.dtype) -> JaggedTensor:
    out = jt.with_values(torch.empty(jt.values.shape, dtype=dtype))
    for b in hl.tile(jt.num_rows):
        for t in hl.tile(jt.max_length):
            out[b, t] = jt[b, t]
    return out


@serrate.kernel
def products(jt: JaggedTensor, weight: torch.Tensor) -> JaggedTensor:
    out = jt.with_values(torch.empty([jt.total_elements, weight.size(1)], dtype=jt.dtype))
    for b in hl.grid(jt.num_rows):
        for t, u in hl.tile([jt.max_length, weight.size(1)]):
            acc = hl.zeros([t, u], dtype=torch.float64 if jt.dtype == torch.float64 else torch.float32)
            for k in hl.tile(weight.size(0)):
                acc = acc + jt[b, t, k] @ weight[k, u]
            out[b, t, u] = acc.to(out.dtype)
    return out


@serrate.kernel
def softmax(jt: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.tile(jt.num_rows):
        top, total = hl.full([b], float("-inf")), hl.zeros([b])
        for t in hl.tile(jt.max_length):
            x = jt[b, t].to(torch.float32)
            new = torch.maximum(top, x.amax(1))
            total = total * torch.exp(top - new) + torch.exp(x - new[:, None]).sum(1)
            top = new
        for t in hl.tile(jt.max_length):
            out[b, t] = torch.exp(jt[b, t].to(torch.float32) - top[:, None]) / total[:, None]
    return out


@serrate.kernel
def truths(jt: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    some, every = torch.empty(jt.num_rows, dtype=torch.bool), torch.empty(jt.num_rows, dtype=torch.bool)
    for b in hl.tile(jt.num_rows):
        one, none = hl.full([b], False, dtype=torch.bool), hl.full([b], True, dtype=torch.bool)
        for t in hl.tile(jt.max_length):
            one = one | jt[b, t].any(1)
            none = none & jt[b, t].all(1)
        some[b], every[b] = one, none
    return some, every


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, torch.bool])
def test_loads_and_stores(dtype: torch.dtype, way: Any) -> None:
    jt = ragged(dtype)
    assert torch.equal(ran(moved, way)(jt).values, jt.values)


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, torch.bool])
def test_sums(dtype: torch.dtype, way: Any) -> None:
    """Whole numbers and bools are summed in int64, as torch does."""
    jt, result = ragged(dtype), dtype if dtype.is_floating_point else torch.int64
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    wanted = torch.stack([row.to(wide).sum() for row in jt.unbind()])
    if way in ("reference", "cpp") or dtype not in (torch.bfloat16, torch.float16):
        near(ran(sums, way)(jt, result), wanted, result, scale=10)


def test_sixteen_bit_sums_are_rounded_once() -> None:
    """Ones beyond the numbers that sixteen bits can count: a sum that is rounded on the way stops."""
    jt = JaggedTensor.from_lengths(torch.ones(3000, dtype=torch.bfloat16), [3000])
    for backend in ("reference", "cpp"):
        for lanes in ({}, {"b": 1, "t": 8}, {"b": 4, "t": 1}):
            made = serrate.kernel(sums.fn, **({"lanes": lanes} if lanes else {}))
            assert made.on(backend)(jt, torch.bfloat16).tolist() == [torch.tensor(3000.0).bfloat16().item()], (backend, lanes)


def test_sums_that_a_kernel_rounds_itself_depend_on_the_tile() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3000, dtype=torch.bfloat16), [3000])
    with pytest.raises(KernelError, match=r"total, carried around the tile of line .*, depends on how rows are cut into tiles"):
        rounded_sums.on("cpp")(jt, torch.bfloat16)


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_extremes(dtype: torch.dtype, way: Any) -> None:
    jt = ragged(dtype)
    low, high = (-torch.inf, torch.inf) if dtype.is_floating_point else (-100, 100)
    top, bottom = ran(extremes, way)(jt, low, high)
    near(top, torch.stack([row.amax() if len(row) else torch.tensor(low) for row in jt.unbind()]), dtype)
    near(bottom, torch.stack([row.amin() if len(row) else torch.tensor(high) for row in jt.unbind()]), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_the_largest_and_the_smallest(dtype: torch.dtype, way: Any) -> None:
    jt = ragged(dtype)
    jt.values[5] = torch.nan
    top, bottom = ran(extremes, way)(jt, -torch.inf, torch.inf)
    assert torch.isnan(torch.stack([top, bottom])).tolist() == [[False, False, True, False, False]] * 2


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_places_of_extremes(dtype: torch.dtype, way: Any) -> None:
    """The first of those that are equal, as torch."""
    x = torch.tensor([[1, 5, 5, -2, -2], [0, 0, 0, 0, 0], [3, 2, 1, 0, 9]]).to(dtype)
    first, last = ran(places, way)(x)
    assert first.tolist() == [1, 0, 4] and last.tolist() == [3, 0, 3]


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_mathematics(dtype: torch.dtype, way: Any) -> None:
    jt, row = ragged(dtype), torch.arange(len(LENGTHS)).to(dtype)
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    rows = []
    for own, r in zip(jt.unbind(), row, strict=True):
        x = own.to(wide)
        rows.append(torch.where(x > 0, x * 2 + r.to(wide), x.clamp(-2, 2) - 1))
    near(ran(mathematics, way)(jt, row).values, torch.cat(rows), dtype, scale=10)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("to", [*FLOATS, *WHOLE, torch.bool])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, torch.bool])
def test_stores_convert(dtype: torch.dtype, to: torch.dtype, way: Any) -> None:
    jt = ragged(dtype)
    near(ran(converted, way)(jt, to).values, jt.values.to(to), to)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", FLOATS)
def test_products(dtype: torch.dtype, way: Any) -> None:
    jt, weight = ragged(dtype, 5), torch.randn(5, 3).to(dtype)
    near(ran(products, way)(jt, weight).values, jt.values.double() @ weight.double(), dtype, scale=20)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(dtype: torch.dtype, way: Any) -> None:
    jt = ragged(dtype)
    wanted = torch.cat([row.double().softmax(0) for row in jt.unbind()])
    found = ran(softmax, way)(jt).values
    tolerance = max(TOLERANCE[dtype], TOLERANCE[torch.float32])
    torch.testing.assert_close(found, wanted.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bool])
def test_truths(dtype: torch.dtype, way: Any) -> None:
    some, every = ran(truths, way)(ragged(dtype))
    rows = ragged(dtype).unbind()
    assert some.tolist() == [bool(r.any()) for r in rows] and every.tolist() == [bool(r.all()) for r in rows]


@serrate.kernel
def rows_by_a_weight(jt: JaggedTensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(jt.values.shape[0], weight.shape[1], dtype=dtype)
    for t in hl.tile(jt.values.shape[0]):
        out[t, :] = jt.values[t, :] @ weight[:, :]
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, *WHOLE], ids=str)
def test_products_of_integers_wrap_as_in_torch(dtype: torch.dtype) -> None:
    jt, weight = JaggedTensor.from_lengths(torch.arange(12).reshape(3, 4).to(dtype), [2, 1]), torch.arange(100, 120).reshape(4, 5)
    for found in (rows_by_a_weight, rows_by_a_weight.interpreted()):
        near(found(jt, weight.to(dtype), dtype), jt.values @ weight.to(dtype), dtype)


@pytest.mark.parametrize(
    ("left", "right"),
    [(torch.int64, torch.float32), (torch.float64, torch.float32), (torch.float16, torch.bfloat16), (torch.bool, torch.bool)],
    ids=str,
)
def test_products_of_two_dtypes_are_refused(left: torch.dtype, right: torch.dtype) -> None:
    jt, weight = JaggedTensor.from_lengths(torch.ones(3, 4, dtype=left), [2, 1]), torch.ones(4, 5, dtype=right)
    for found in (rows_by_a_weight, rows_by_a_weight.interpreted()):
        with pytest.raises(serrate.errors.KernelError, match="a matrix product"):
            found(jt, weight, torch.float32)


@pytest.mark.parametrize("strategy", [None, "masked", "persistent_dynamic"])
def test_a_wider_carried_value(strategy: str | None) -> None:
    @serrate.kernel(strategy=strategy)
    def k(jt: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        top, total = torch.zeros(jt.num_rows, dtype=torch.float64), torch.zeros(jt.num_rows, dtype=torch.float64)
        for b in hl.tile(jt.num_rows):
            most = hl.full([b], -torch.inf, dtype=torch.float64)
            acc = hl.zeros([b], dtype=torch.float64)
            for t in hl.tile(jt.max_length):
                most = torch.maximum(most, jt[b, t].amax(1))
                acc = acc + jt[b, t].sum(1)
            top[b], total[b] = most, acc
        return top, total

    jt = JaggedTensor.from_lengths(torch.arange(20.0) / 7, [3, 1, 6, 10])
    top, total = k(jt)
    torch.testing.assert_close(top, torch.stack([r.amax().double() for r in jt.unbind()]))
    torch.testing.assert_close(total, torch.stack([r.double().sum() for r in jt.unbind()]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wider_accumulator_of_a_product(dtype: torch.dtype) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0), w.size(1), dtype=torch.float64)
        for m, n in hl.tile([x.size(0), w.size(1)]):
            acc = hl.zeros([m, n], dtype=torch.float64)
            for c in hl.tile(x.size(1)):
                acc = acc + x[m, c].to(torch.float32) @ w[c, n].to(torch.float32)
            for c in hl.tile(x.size(1)):
                acc = hl.dot(x[m, c], w[c, n], acc)
            out[m, n] = acc
        return out

    x, w = torch.randn(20, 33).to(dtype), torch.randn(33, 32).to(dtype)
    torch.testing.assert_close(k(x, w), 2 * (x.double() @ w.double()), rtol=1e-4, atol=1e-4)


def test_an_integer_accumulator_of_floats() -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, dtype=torch.int32)
        for b in hl.tile(4):
            acc = hl.zeros([b], dtype=torch.int32)
            for t in hl.tile(x.size(0)):
                acc = acc + x[t].sum()
            out[b] = acc
        return out

    @serrate.kernel
    def rounded(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, dtype=torch.int32)
        for b in hl.tile(4):
            acc = hl.zeros([b], dtype=torch.int32)
            for t in hl.tile(x.size(0)):
                acc = acc + x[t].sum().to(torch.int32)
            out[b] = acc
        return out

    @serrate.kernel
    def number(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4)
        for b in hl.tile(4):
            acc = 0
            for _ in hl.grid(2):
                for t in hl.tile(x.size(0)):
                    acc = acc + x[t].sum()
            out[b] = acc
        return out

    x = torch.full((200,), 0.1)
    for run in (k, k.on("reference"), k.interpreted(tile=3)):
        with pytest.raises(KernelError, match=r"acc is torch.int32 before the loop and torch.float32 after an iteration"):
            run(x)
    with pytest.raises(KernelError, match="depends on how rows are cut into tiles"):
        rounded(x)
    torch.testing.assert_close(number(x), torch.full((4,), 40.0))


@pytest.mark.parametrize("tile", [7, "whole"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_where_they_are_stored_or_cast_and_nowhere_else(dtype: torch.dtype, tile: Any) -> None:
    @serrate.kernel
    def sums(jt: JaggedTensor, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out = torch.empty(jt.num_rows, dtype=jt.dtype)
        exact = torch.empty(jt.num_rows, dtype=torch.float32)
        cast = torch.empty(jt.num_rows, dtype=torch.float32)
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b], dtype=jt.dtype)
            for k in hl.tile(jt.max_length):
                total = total + jt[b, k].sum(1)
            out[b] = total
            exact[b] = (total + small[b]).to(torch.float32)
            cast[b] = (total + small[b]).to(jt.dtype).to(torch.float32)
        return out, exact, cast

    jt, small = JaggedTensor.from_lengths(torch.ones(602, dtype=dtype), [601, 1]), torch.full((2,), 0.0078125, dtype=dtype)
    wanted = torch.tensor([601.0, 1.0])
    for run in (sums, sums.interpreted(tile=tile)):
        out, exact, cast = run(jt, small)
        assert torch.equal(out, wanted.to(dtype))
        assert torch.equal(exact, wanted + 0.0078125)
        assert torch.equal(cast, (wanted + 0.0078125).to(dtype).float())


@serrate.kernel
def against(x: torch.Tensor, given: float) -> torch.Tensor:
    out = torch.empty([x.size(0), 4], dtype=torch.bool)
    for t in hl.tile(x.size(0)):
        v = x[t]
        out[t, 0], out[t, 1], out[t, 2], out[t, 3] = v == 0.1, v > 0.1, v == given, given < v
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", WAYS, ids=str)
def test_numbers_are_rounded_where_they_are_compared(dtype: torch.dtype, tile: Any) -> None:
    x = torch.tensor([0.1, 0.1001, 0.0999, -0.1, 0.3, 0.2999, 0.3001]).to(dtype)
    wanted = torch.stack([x == 0.1, x > 0.1, x == 0.3, x > 0.3], 1)
    assert torch.equal(ran(against, tile)(x, 0.3), wanted)


@serrate.kernel
def limited(jt: JaggedTensor, limit: float, fill: Any) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.tile(jt.num_rows):
        for t in hl.tile(jt.max_length):
            x = jt[b, t]
            out[b, t] = x.masked_fill(x > limit, value=fill)
    return out


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_numbers_that_fill(dtype: torch.dtype, backend: str) -> None:
    jt = ragged(dtype)
    for fill in (-1, 2.5, torch.tensor(4.0)):
        wanted = jt.values.masked_fill(jt.values > 0.5, fill)
        assert torch.equal(limited.on(backend)(jt, 0.5, fill).values, wanted)


def test_only_numbers_fill() -> None:
    with pytest.raises(KernelError, match="value must be a number or a 0-dim tensor, got a value with 1 dims"):
        limited(ragged(torch.float32), 0.5, torch.ones(1))
