"""The rules of meaning, one by one, on kernels of a few lines.

In: small kernels. Out: a failure for a rule that does not hold at some tile size.
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

LENGTHS = [2, 0, 5, 1]


def ragged(*inner: int, lengths: list[int] = LENGTHS) -> JaggedTensor:
    torch.manual_seed(1)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *inner), lengths)


@pytest.fixture(params=TILES)
def tile(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- rule 1: zero outside ---


def test_reading_past_a_row_or_a_tensor_gives_zero(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, past = torch.full([jt.num_rows, n], 9.0), torch.full([n], 9.0)
        for tile_b, tile_k in hl.tile([jt.num_rows, n]):
            rows[tile_b, tile_k] = jt[tile_b, tile_k]
        for tile_k in hl.tile(n):
            past[tile_k] = x[tile_k]
        return rows, past

    jt, x = ragged(), torch.arange(1.0, 4.0)
    rows, past = ran(k, tile)(jt, x, 7)
    assert torch.equal(rows, jt.to_padded(0.0, max_length=7))
    assert past.tolist() == [1, 2, 3, 0, 0, 0, 0]


def test_computed_indices_outside_read_zero_and_write_nothing(tile: Any) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for t in hl.tile(out.size(0)):
            out[t.index + 1] = x[t.index - 2] + 10
        return out

    out = ran(k, tile, check=False)(torch.tensor([1.0, 2.0]), torch.zeros(5))
    assert out.tolist() == [0, 10, 10, 11, 12]


# --- rule 2: existence ---


def test_conditions_are_joined(tile: Any) -> None:
    """Two ragged tensors of different rows in one sum: only positions that both have count."""

    @serrate.kernel
    def k(a: JaggedTensor, b: JaggedTensor, n: int) -> torch.Tensor:
        out = torch.empty(a.num_rows)
        for tile_b in hl.tile(a.num_rows):
            total = hl.zeros([tile_b])
            for tile_k in hl.tile(n):
                total = total + (a[tile_b, tile_k] + b[tile_b, tile_k] + 1).sum(1)
            out[tile_b] = total
        return out

    a, b = ragged(lengths=[2, 0, 5, 1]), ragged(lengths=[3, 2, 1, 1])
    both = [min(len(x), len(y)) for x, y in zip(a.unbind(), b.unbind(), strict=True)]
    wanted = [float((x[:n] + y[:n] + 1).sum()) for x, y, n in zip(a.unbind(), b.unbind(), both, strict=True)]
    torch.testing.assert_close(ran(k, tile)(a, b, 6), torch.tensor(wanted))


def test_lanes_under_an_extra_mask_exist_and_hold_zero(tile: Any) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(1)
        for _ in hl.grid(1):
            total = hl.zeros([])
            for t in hl.tile(x.size(0)):
                total = total + (hl.load(x, [t], extra_mask=t.index < 2) + 1).sum()
            out[0] = total
        return out

    assert ran(k, tile)(torch.tensor([5.0, 6.0, 7.0, 8.0])).tolist() == [5 + 6 + 4]


def test_everything_indexed_by_a_jagged_tile_carries_its_condition(tile: Any) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums, ones = torch.empty(lengths.size(0)), torch.empty(lengths.size(0))
        for b in hl.tile(lengths.size(0)):
            total, count = hl.zeros([b]), hl.zeros([b])
            for t in hl.jagged_tile(lengths[b]):
                total = total + x[b, t].sum(1)
                count = count + hl.full([b, t], 1.0).sum(1)
            sums[b], ones[b] = total, count
        return sums, ones

    x, lengths = torch.randn(4, 6), torch.tensor(LENGTHS)
    sums, ones = ran(k, tile)(x, lengths)
    torch.testing.assert_close(sums, torch.stack([row[:n].sum() for row, n in zip(x, LENGTHS, strict=True)]))
    assert ones.tolist() == LENGTHS


def test_an_integer_division_in_a_hole_is_zero(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.full([jt.num_rows, 4], -1)
        for b, t in hl.tile([jt.num_rows, 4]):
            out[b, t] = 12 // jt[b, t]
        return out

    jt = JaggedTensor.from_lengths(torch.tensor([1, 2, 3]), [1, 0, 2])
    assert ran(k, tile)(jt).tolist() == [[12, 0, 0, 0], [0, 0, 0, 0], [6, 4, 0, 0]]


# --- rule 3: holes never count ---


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "mean", "any", "all", "argmax", "argmin", "logsumexp"])
def test_reductions_skip_holes(name: str, tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, out: torch.Tensor, n: int) -> torch.Tensor:
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(n, block_size=8):
                x = jt[b, t] + 3 if name in ("sum", "prod", "mean") else jt[b, t]
                out[b] = getattr(x > 0 if name in ("any", "all") else x, name)(1)
        return out

    jt = ragged()
    dtype = torch.bool if name in ("any", "all") else torch.int64 if name[:3] == "arg" else torch.float32
    got = ran(k, tile)(jt, torch.zeros(4, dtype=dtype), 8)
    empty = {
        "sum": 0,
        "prod": 1,
        "amax": -torch.inf,
        "amin": torch.inf,
        "mean": torch.nan,
        "any": 0,
        "all": 1,
        "logsumexp": -torch.inf,
    }
    for row, value in zip(jt.unbind(), got, strict=True):
        row = row + 3 if name in ("sum", "prod", "mean") else row > 0 if name in ("any", "all") else row
        wanted = getattr(row, name)(0) if len(row) else torch.tensor(empty.get(name, -1))
        torch.testing.assert_close(value, wanted.to(dtype), equal_nan=True)


def test_a_reduction_drops_only_the_conditions_that_mention_its_axis(tile: Any) -> None:
    """A sum over features keeps the condition of the row; one over positions drops it, and every row counts then."""

    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(2)
        for _ in hl.grid(1):
            for b, t, m in hl.tile([4, 8, 3], block_size=[4, 8, 4]):
                x = jt[b, t, m] * 0 + 1
                out[0] = x.sum(2).sum()
                out[1] = (x.sum(1).sum(1) * 0 + 1).sum()
        return out

    assert ran(k, tile)(ragged(3)).tolist() == [3 * sum(LENGTHS), 4]


def test_a_product_zeroes_both_operands_where_the_contracted_axis_does_not_exist(tile: Any) -> None:
    """A NaN that one operand holds where the other has no element does not come in."""

    @serrate.kernel
    def k(a: JaggedTensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.num_rows, a.size(2), b.size(2))
        for g in hl.grid(a.num_rows):
            for i, j in hl.tile([a.size(2), b.size(2)]):
                acc = hl.zeros([i, j])
                for t in hl.tile(b.size(1)):
                    acc = acc + a[g, t, i].T @ b[g, t, j]
                out[g, i, j] = acc
        return out

    a, b = ragged(3), torch.randn(4, 6, 2)
    for row, length in zip(b, LENGTHS, strict=True):
        row[length:] = torch.nan
    wanted = torch.stack([x.T @ y[: len(x)] for x, y in zip(a.unbind(), b, strict=True)])
    torch.testing.assert_close(ran(k, tile)(a, b), wanted)


def test_scans_skip_holes(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums, backwards = torch.zeros(4, 8), torch.zeros(4, 8)
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(8, block_size=8):
                x = jt[b, t] + 1
                sums[b, t] = hl.fill(x.cumsum(1), -1)
                backwards[b, t] = hl.associative_scan(lambda left, right: left + right, x, 1, reverse=True)
        return sums, backwards

    jt = ragged()
    sums, backwards = ran(k, tile)(jt)
    for n, row in enumerate(jt.unbind()):
        torch.testing.assert_close(sums[n, : len(row)], (row + 1).cumsum(0))
        assert (sums[n, len(row) :] == -1).all()
        torch.testing.assert_close(backwards[n, : len(row)], (row + 1).flip(0).cumsum(0).flip(0))


def test_fill_makes_every_lane_exist(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b])
            for t in hl.tile(6):
                total = total + hl.fill(jt[b, t], 100.0).sum(1)
            out[b] = total
        return out

    jt = ragged()
    wanted = torch.stack([row.sum() + 100 * (6 - len(row)) for row in jt.unbind()])
    torch.testing.assert_close(ran(k, tile)(jt), wanted)


# --- rule 4: stores go by address ---


def test_a_dense_store_writes_past_the_row_and_a_ragged_one_does_not(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, dense: torch.Tensor) -> tuple[torch.Tensor, JaggedTensor]:
        out, rows = torch.full_like(dense, 9.0), torch.zeros_like(jt)
        for b, t in hl.tile([dense.size(0), dense.size(1)]):
            out[b, t] = dense[b, t] * 2 - jt[b, t]
            rows[b, t] = dense[b, t]
        return out, rows

    jt, dense = ragged(), torch.randn(4, 6)
    out, rows = ran(k, tile)(jt, dense)
    torch.testing.assert_close(out, dense * 2 - jt.to_padded(0.0, max_length=6))
    for row, own in zip(rows.unbind(), dense, strict=True):
        assert torch.equal(row, own[: len(row)])


def test_a_store_by_an_index_that_is_a_hole_writes_nothing(tile: Any) -> None:
    @serrate.kernel
    def k(index: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(6)
        for b, t in hl.tile([index.num_rows, 5]):
            out[index[b, t]] = 1.0
        return out

    assert ran(k, tile)(JaggedTensor.from_lengths(torch.tensor([4, 2, 5]), [2, 0, 1])).tolist() == [0, 0, 1, 0, 1, 1]


# --- rule 5: a finished row rests ---


def test_a_finished_row_rests(tile: Any) -> None:
    """Every iteration doubles, so a row shows how many of them it lived through."""

    @serrate.kernel
    def k(jt: JaggedTensor, n: int) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.full([b], 1.0)
            for t in hl.tile(n, block_size=2):
                acc = acc * 2 + jt[b, t].sum(1) * 0
            out[b] = acc
        return out

    assert ran(k, tile)(ragged(), 20).tolist() == [2, 1, 8, 2]


def test_something_dense_keeps_a_row_from_resting(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(dense.size(1)):
                acc = acc + jt[b, t].sum(1) + dense[b, t].sum(1)
            out[b] = acc
        return out

    jt, dense = ragged(), torch.randn(4, 9)
    torch.testing.assert_close(ran(k, tile)(jt, dense), jt.sum(dim=1) + dense.sum(1))


def test_resting_is_of_one_value_and_one_loop(tile: Any) -> None:
    """A reduction before the loop does not count as one of the loop; an inner loop's does for the outer one."""

    @serrate.kernel
    def k(jt: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts, outer = torch.empty(jt.num_rows), torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            one = (jt.lengths[b][:, None] * 0 + 1).amax(1)
            count = hl.zeros([b])
            total = hl.zeros([b])
            for _ in hl.grid(3):
                count = count + one
                inner = hl.zeros([b])
                for t in hl.tile(8):
                    inner = inner + jt[b, t].sum(1) * 0
                total = total + inner + 1
            counts[b], outer[b] = count, total
        return counts, outer

    counts, outer = ran(k, tile)(ragged())
    assert counts.tolist() == [3, 3, 3, 3]
    assert outer.tolist() == [3, 0, 3, 3]


def test_a_python_loop_repeats_its_statements_and_carries_nothing(tile: Any) -> None:
    """A row rests in iterations of loops over tiles. Conditions may differ between the repetitions."""

    @serrate.kernel
    def k(jt: JaggedTensor) -> tuple[torch.Tensor, JaggedTensor]:
        counts, sums = torch.empty(3, jt.num_rows), torch.empty_like(jt)
        for b in hl.tile(jt.num_rows):
            alone, inside, around = hl.zeros([b]), hl.zeros([b]), hl.zeros([b])
            for j in (0, 2, 4):
                alone = alone + 1 + jt[b, j + hl.arange(2)].sum(1) * 0
            for t in hl.tile(6, block_size=2):
                for _ in range(2):
                    inside = inside + 1 + jt[b, t].sum(1) * 0
            for _ in range(3):
                for t in hl.tile(6, block_size=2):
                    around = around + 1 + jt[b, t].sum(1) * 0
            counts[0, b], counts[1, b], counts[2, b] = alone, inside, around
            for t in hl.tile(jt.max_length):
                near = hl.zeros([b, t])
                for j in range(3):
                    near = near + jt[b, t.index - j]
                sums[b, t] = near
        return counts, sums

    jt = ragged()
    counts, sums = ran(k, tile)(jt)
    assert counts.tolist() == [[3, 3, 3, 3], [2, 0, 6, 2], [3, 0, 9, 3]]
    wanted = [torch.stack([row[max(i - 2, 0) : i + 1].sum() for i in range(len(row))]) for row in jt.unbind() if len(row)]
    torch.testing.assert_close(sums.values, torch.cat(wanted))


def test_a_carried_value_keeps_conditions_that_do_not_change(tile: Any) -> None:
    """Positions of a row as rows of a product, by an index made anew in every iteration."""

    @serrate.kernel
    def k(jt: JaggedTensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows, w.size(1))
        for b in hl.grid(jt.num_rows):
            for n in hl.tile(w.size(1)):
                total = hl.zeros([n])
                for t in hl.tile(7):
                    acc = hl.zeros([t, n])
                    for i in hl.tile(w.size(0)):
                        acc = acc + (jt[b, t.index + 0, i] + 1) @ w[i, n]
                    total = total + acc.sum(0)
                out[b, n] = total
        return out

    jt, w = ragged(4), torch.randn(4, 3)
    wanted = torch.stack([((row + 1) @ w).sum(0) for row in jt.unbind()])
    torch.testing.assert_close(ran(k, tile)(jt, w), wanted)


def test_lanes_that_are_positions_rest_by_themselves(tile: Any) -> None:
    """A dense store shows what a product's lanes past the row hold: as before, whichever lanes share a tile."""

    @serrate.kernel
    def k(jt: JaggedTensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows, 6)
        for b, t in hl.tile([jt.num_rows, 6]):
            acc = hl.full([b, t, 1], 1.0)
            for i in hl.tile(4, block_size=2):
                acc = acc * 2 + (jt[b, t, i] @ w[i, :]) * 0
            out[b, t] = acc.squeeze(2)
        return out

    got = ran(k, tile)(ragged(4), torch.randn(4, 1))
    assert got.tolist() == [[4.0] * n + [1.0] * (6 - n) for n in LENGTHS]


def test_statistics_of_a_finished_row_do_not_become_nan(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            top, total = hl.full([b], -torch.inf), hl.zeros([b])
            for t in hl.tile(9):
                x = jt[b, t]
                new = torch.maximum(top, x.amax(1))
                total = total * torch.exp(top - new) + torch.exp(x - new[:, None]).sum(1)
                top = new
            out[b] = top + torch.log(total)
        return out

    jt = ragged()
    wanted = torch.stack([torch.logsumexp(row, 0) for row in jt.unbind()])
    torch.testing.assert_close(ran(k, tile)(jt), wanted)


# --- rule 8: torch's numbers ---


def test_dtypes_ties_and_nans_are_those_of_torch() -> None:
    @serrate.kernel
    def k(x: torch.Tensor, i: torch.Tensor) -> tuple[Any, ...]:
        for t in hl.tile(x.size(0)):
            v, w = x[t], i[t]
            kinds = (w.sum().dtype, (v + w).dtype, (w / 2).dtype, (v > 0).dtype, v.to(torch.bfloat16).sum().dtype)
            numbers = (torch.where(v.isnan(), 1.0, v).argmax().item(), v.amax().item())
        return kinds + numbers

    x, i = torch.tensor([1.0, 3.0, 3.0, torch.nan]), torch.arange(4, dtype=torch.int32)
    *kinds, first, nan = k.interpreted(tile=8)(x, i)
    assert kinds == [i.sum().dtype, (x + i).dtype, (i / 2).dtype, torch.bool, torch.bfloat16]
    assert first == 1 and nan != nan


def test_sixteen_bits_are_summed_in_float32() -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2, dtype=torch.float32)
        for t in hl.tile(x.size(0)):
            out[0] = x[t].sum()
            out[1] = hl.dot(x[t][None, :], x[t][:, None]).sum()
        return out

    # In bfloat16, 256 + 1 is 256.
    assert k.interpreted(tile="whole")(torch.ones(512, dtype=torch.bfloat16)).tolist() == [512, 512]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_the_compiler_chooses_no_tile_that_would_mean_something(backend: str) -> None:
    @serrate.kernel
    def halving(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc * 0.5 + jt[b, t].sum(1)
            out[b] = acc
        return out

    with pytest.raises(KernelError, match=r"acc, carried around the tile of line \d+, depends on how rows are cut"):
        halving.on(backend)(ragged())


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_carried_value_that_is_read_inside_its_loop_depends_on_the_tile(backend: str) -> None:
    @serrate.kernel
    def stored(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for b in hl.tile(x.size(0)):
            acc = hl.zeros([b])
            for t in hl.tile(x.size(1)):
                acc = acc + x[b, t].sum(1)
                out[b, t] = x[b, t] * acc[:, None]
        return out

    @serrate.kernel
    def summed(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for b in hl.tile(x.size(0)):
            acc, total = hl.zeros([b]), hl.zeros([b])
            for t in hl.tile(x.size(1)):
                acc = acc + x[b, t].sum(1)
                total = total + (x[b, t] * acc[:, None]).sum(1)
            out[b] = total
        return out

    @serrate.kernel
    def fixed(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for b in hl.tile(x.size(0)):
            acc = hl.zeros([b])
            for t in hl.tile(x.size(1), block_size=1):
                acc = acc + x[b, t].sum(1)
                out[b, t] = x[b, t] * acc[:, None]
        return out

    x = torch.randn(3, 11)
    for kernel in (stored, summed):
        with pytest.raises(KernelError, match="depends on how rows are cut into tiles"):
            kernel.on(backend)(x)
    torch.testing.assert_close(fixed.on(backend)(x), x * x.cumsum(1))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_what_the_last_tile_leaves_in_memory_depends_on_the_tile(backend: str) -> None:
    @serrate.kernel
    def last(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(jt.max_length):
                out[b] = jt[b, t].sum(1)
        return out

    @serrate.kernel
    def fixed(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for b in hl.tile(x.size(0)):
            for t in hl.tile(x.size(1), block_size=4):
                out[b] = x[b, t].sum(1)
        return out

    @serrate.kernel
    def running(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for b in hl.tile(x.size(0)):
            total = hl.zeros([b])
            for t in hl.tile(x.size(1)):
                total = total + x[b, t].sum(1)
                out[b] = total
        return out

    @serrate.kernel
    def begins(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for b in hl.tile(x.size(0)):
            for t in hl.tile(x.size(1)):
                out[b] = hl.zeros([b]) + t.begin
        return out

    with pytest.raises(KernelError, match=r"in the tile of line \d+, it is computed from a reduction or scan of one tile"):
        last.on(backend)(ragged())
    x = torch.randn(3, 11)
    with pytest.raises(KernelError, match=r"every iteration of the tile of line \d+ stores to the same elements of out, so"):
        begins.on(backend)(x)
    torch.testing.assert_close(fixed.on(backend)(x), x[:, 8:].sum(1))
    torch.testing.assert_close(running.on(backend)(x), x.sum(1))


def _kernel_of_tiles(how: str) -> Any:
    @serrate.kernel
    def sums(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for t in hl.tile(x.size(0)):
            out[t] = x[t].sum()
        return out

    @serrate.kernel
    def centred(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            mean = x[t].mean()
            out[t] = x[t] - mean
        return out

    @serrate.kernel
    def running(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = x[t].cumsum(0)
        return out

    @serrate.kernel
    def chained(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            both = x[t][:, None] - x[t].mean() + hl.arange(2)[None, :]
            out[t] = both.exp().sum(1)
        return out

    return {"sums": sums, "centred": centred, "running": running, "chained": chained}[how]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("how", ["sums", "centred", "running", "chained"])
def test_values_of_one_tile_are_not_stored(how: str, backend: str) -> None:
    """What is reduced over the lanes of an open tile depends on its size, unless all tiles are combined."""
    with pytest.raises(KernelError, match="what is stored to out depends on how rows are cut into tiles"):
        _kernel_of_tiles(how).on(backend)(torch.randn(11))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_values_of_tiles_that_are_combined_or_fixed(backend: str) -> None:
    @serrate.kernel
    def added(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(1)
        for t in hl.tile(x.size(0)):
            hl.atomic_add(out, [0], x[t].sum())
        return out

    @serrate.kernel
    def parts(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0))
        for t in hl.tile(x.size(0)):
            out[t.id] = x[t].sum()
        return out.sum()[None]

    @serrate.kernel
    def fixed(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for t in hl.tile(x.size(0), block_size=4):
            out[t] = x[t].sum()
        return out

    x = torch.randn(11)
    for kernel in (added, parts):
        torch.testing.assert_close(kernel.on(backend)(x), x.sum()[None])
    wanted = torch.cat([part.sum().expand(len(part)) for part in x.split(4)])
    torch.testing.assert_close(fixed.on(backend)(x), wanted)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_what_agrees_with_itself_is_tested_and_not_proven(backend: str) -> None:
    @serrate.kernel
    def roundabout(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = (acc * 2 + jt[b, t].sum(1) * 2) / 2
            out[b] = acc
        return out

    jt = ragged()
    torch.testing.assert_close(roundabout.on(backend)(jt), torch.stack([row.sum() for row in jt.unbind()]))
    assert "acc: tested, not proven" in str(roundabout.on(backend).variants(jt)[0].plan)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_call_that_cannot_tell_tiles_apart_tests_nothing(backend: str) -> None:
    """A later call with longer rows is tested instead; before, the first call decided for all."""

    @serrate.kernel
    def fading(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc * 0.5 + jt[b, t].sum(1)
            out[b] = acc
        return out

    @serrate.kernel
    def shortened(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for b in hl.tile(x.size(0)):
            acc = hl.zeros([b])
            for t in hl.tile(lengths[b].amax()):
                acc = acc * 0.5 + x[b, t].sum(1)
            out[b] = acc
        return out

    kernel = fading.on(backend)
    for lengths in ([], [0, 0], [1, 0, 1]):
        jt = JaggedTensor.from_lengths(torch.ones(sum(lengths)), lengths)
        for _ in range(3):
            assert kernel(jt).tolist() == lengths
    assert "acc: not tested yet" in str(kernel.variants(jt)[0].plan)
    with pytest.raises(KernelError, match="depends on how rows are cut into tiles"):
        kernel(JaggedTensor.from_lengths(torch.ones(5), [5, 0]))

    dense = shortened.on(backend)
    assert dense(torch.ones(0, 6), torch.zeros(0, dtype=torch.int64)).tolist() == []
    assert dense(torch.ones(2, 6), torch.tensor([1, 0])).tolist() == [1, 1]
    with pytest.raises(KernelError, match="depends on how rows are cut into tiles"):
        dense(torch.ones(2, 6), torch.tensor([1, 5]))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_tiles_are_tested_for_other_float_arguments_too(backend: str) -> None:
    @serrate.kernel
    def decayed(jt: JaggedTensor, decay: float) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc * decay + jt[b, t].sum(1)
            out[b] = acc
        return out

    with pytest.raises(KernelError, match="depends on how rows are cut into tiles"):
        decayed.on(backend)(ragged(), 1.0)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_reduction_of_one_tile_depends_on_the_tile(backend: str) -> None:
    @serrate.kernel
    def summed(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc + (jt[b, t] - jt[b, t].mean(1)[:, None]).square().sum(1)
            out[b] = acc
        return out

    @serrate.kernel
    def stored(jt: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(jt)
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(jt.max_length):
                out[b, t] = jt[b, t].cumsum(1)
        return out

    @serrate.kernel
    def added(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(jt.max_length):
                hl.atomic_add(out, [b], jt[b, t].sum(1))
        return out

    jt = ragged()
    with pytest.raises(KernelError, match=r"^acc, carried around .* depends on how rows are cut into tiles"):
        summed.on(backend)(jt)
    with pytest.raises(KernelError, match=r"^what is stored to out depends on how rows are cut into tiles"):
        stored.on(backend)(jt)
    torch.testing.assert_close(added.on(backend)(jt), torch.stack([row.sum() for row in jt.unbind()]))
    assert "tested" not in str(added.on(backend).variants(jt)[0].plan)
