"""Conversions of plain tensors and their gradients, on threads; every element carries its own coordinates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serrate.distributed import convert
from serrate.distributed.blocks import pack_runs
from serrate.distributed.layout import transposed_runs
from serrate.errors import ExchangeError, PartitionError
from tests.distributed.ranks import on_threads
from tests.distributed.test_layout import PAPER, aligned, full, layouts, unaligned

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool, torch.complex64)


def tensor(blocks: list[Any], dim: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A number for every (rank, partition, position), twice for each of two features; the sharded dim in place `dim`."""
    flat = torch.tensor([r * 97 + p * 13 + k + 1 for r, p, k in blocks], dtype=torch.int64)
    return torch.stack([flat, flat * 2 % 7], 1).to(dtype)[:, :, None].movedim(0, dim)


def world() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def test_the_worked_example_in_both_directions_and_through_replicate() -> None:
    # Shard 0 holds P00 P01 P02 P03, shard 1 holds P10 ...; an element is 100 * shard + 10 * partition + position.
    def shard(r: int) -> Tensor:
        return torch.tensor([100 * r + 10 * p + k for p in range(4) for k in range(int(PAPER[r, p]))])

    parts = [[list(range(100 * r + 10 * p, 100 * r + 10 * p + int(PAPER[r, p]))) for p in range(4)] for r in range(2)]
    wanted = [
        parts[0][0] + parts[1][0] + parts[0][1] + parts[1][1],
        parts[0][2] + parts[1][2] + parts[0][3] + parts[1][3],
    ]

    def work(rank: int, ranks: int) -> None:
        local, group, owned = shard(rank), world(), (2, 2)
        plan = convert.plan_exchange(local, PAPER[rank], owned, group)
        assert plan.aligned_splits == ((4, 2, 6, 4), (4, 8, 2, 2))[rank]
        there = convert.unaligned_to_aligned(local, plan, group)
        assert there.tolist() == wanted[rank]
        assert convert.aligned_to_unaligned(there, plan, group).tolist() == local.tolist()
        counts = convert.gathered_counts(local, PAPER[rank], owned, group)
        assert counts.tolist() == PAPER.tolist()
        again = convert.gathered_counts(there, torch.tensor(plan.aligned_splits), owned, group, aligned=True)
        assert again.tolist() == PAPER.tolist()
        for source, is_aligned in ((local, False), (there, True)):
            whole = convert.to_replicate(source, counts, owned, group, aligned=is_aligned)
            assert whole.tolist() == wanted[0] + wanted[1]
            assert convert.from_replicate(whole, counts, owned, group, aligned=is_aligned).tolist() == source.tolist()

    on_threads(2, work)


@given(layouts(), st.integers(0, 2), st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_every_conversion_has_the_right_elements(case: Any, dim: int, dtype: torch.dtype) -> None:
    counts, owned = case
    matrix, whole = torch.tensor(counts), tensor(full(counts), dim, dtype)

    def work(rank: int, ranks: int) -> None:
        group = world()
        mine, ours = tensor(unaligned(counts, rank), dim, dtype), tensor(aligned(counts, owned, rank), dim, dtype)
        plan = convert.plan_exchange(mine, matrix[rank], owned, group, dim)
        assert torch.equal(convert.unaligned_to_aligned(mine, plan, group, dim), ours)
        assert torch.equal(convert.aligned_to_unaligned(ours, plan, group, dim), mine)
        for local, is_aligned in ((mine, False), (ours, True)):
            assert torch.equal(convert.to_replicate(local, matrix, owned, group, dim, aligned=is_aligned), whole)
            assert torch.equal(convert.from_replicate(whole, matrix, owned, group, dim, aligned=is_aligned), local)

    on_threads(len(counts), work)


@given(layouts(), st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_gradients_are_the_conversions_back(case: Any, dim: int) -> None:
    counts, owned = case
    matrix, whole = torch.tensor(counts), tensor(full(counts), dim)

    def work(rank: int, ranks: int) -> None:
        group = world()
        mine, ours = tensor(unaligned(counts, rank), dim), tensor(aligned(counts, owned, rank), dim)
        plan = convert.plan_exchange(mine, matrix[rank], owned, group, dim)

        def gradient(function: Any, x: Tensor, given: Tensor) -> Tensor:
            """The gradient of <function(x)^2, given> / 2: x times the conversion back of `given`."""
            leaf = x.clone().requires_grad_()
            out = function(leaf)
            (found,) = torch.autograd.grad((out.square() * given).sum() / 2, leaf)
            return found

        to = gradient(lambda x: convert.unaligned_to_aligned(x, plan, group, dim), mine, ours)
        assert torch.equal(to, mine * mine)
        back = gradient(lambda x: convert.aligned_to_unaligned(x, plan, group, dim), ours, mine)
        assert torch.equal(back, ours * ours)
        for local, is_aligned in ((mine, False), (ours, True)):
            rest = {"aligned": is_aligned}
            got = gradient(lambda x, rest=rest: convert.to_replicate(x, matrix, owned, group, dim, **rest), local, whole)
            assert torch.equal(got, local * local)
            got = gradient(lambda x, rest=rest: convert.from_replicate(x, matrix, owned, group, dim, **rest), whole, local)
            assert torch.equal(got, whole * whole)

    on_threads(len(counts), work)


def test_gradients_of_gradients() -> None:
    def work(rank: int, ranks: int) -> None:
        group = world()
        local = torch.rand(int(PAPER[rank].sum()), 2, dtype=torch.float64, requires_grad=True)
        plan = convert.plan_exchange(local, PAPER[rank], (2, 2), group)
        out = convert.unaligned_to_aligned(local, plan, group)
        (first,) = torch.autograd.grad((out**3).sum(), local, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), local)
        torch.testing.assert_close(second, 6 * local.detach())

    on_threads(2, work)


def test_counts_that_do_not_fit_fail_on_every_rank() -> None:
    messages: dict[int, Exception] = {}

    def work(rank: int, ranks: int) -> None:
        row = PAPER[rank] + (rank == 1)
        with pytest.raises((PartitionError, ExchangeError)) as caught:
            convert.plan_exchange(torch.zeros(int(PAPER[rank].sum())), row, (2, 2), world())
        messages[rank] = caught.value
        with pytest.raises((PartitionError, ExchangeError)):
            convert.gathered_counts(torch.zeros(int(PAPER[rank].sum())), row, (2, 2), world())

    on_threads(2, work)
    assert isinstance(messages[0], ExchangeError) and "rank 1 of the group failed" in str(messages[0])
    assert isinstance(messages[1], PartitionError) and "sum to 20, but the local tensor has 16" in str(messages[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "dtype: torch.float32 here, torch.float64 there"),
        ({"dtype": torch.int32}, "dtype: torch.float32 here, torch.int32 there"),
        ({"features": (4,)}, "width: 6 here, 4 there"),
        ({"features": (3, 2)}, "the shape besides the sharded dim"),
        ({"features": (6,)}, "the shape besides the sharded dim"),
        ({"owned": (3, 1)}, "how many partitions each rank owns"),
        ({"requires_grad": True}, "gradients are recorded there only"),
        ({"counts": 4000}, "partitions: 4 here, 4000 there"),
    ],
)
@pytest.mark.parametrize("exchanged", [convert.plan_exchange, convert.gathered_counts])
def test_ranks_that_disagree_fail(exchanged: Any, change: Any, message: str) -> None:
    caught: dict[int, str] = {}

    def work(rank: int, ranks: int) -> None:
        options = {"dtype": torch.float32, "features": (2, 3), "counts": 4, **(change if rank else {})}
        row = torch.ones(options["counts"], dtype=torch.int64)
        local = torch.zeros(options["counts"], *options["features"], dtype=options["dtype"])
        local.requires_grad_(options.get("requires_grad", False))
        with pytest.raises(ExchangeError) as error:
            exchanged(local, row, options.get("owned", (options["counts"] // 2,) * 2), world())
        caught[rank] = str(error.value)

    on_threads(2, work)
    assert message in caught[0] and "do not agree" in caught[1]


def test_ranks_in_different_layouts_fail() -> None:
    def work(rank: int, ranks: int) -> None:
        with pytest.raises(ExchangeError, match=r"aligned: [01] here, [01] there"):
            convert.gathered_counts(torch.zeros(4), torch.tensor([2, 2]), (1, 1), world(), aligned=rank == 1)

    on_threads(2, work)


@pytest.mark.parametrize("partitions", [6, 1100])
def test_counts_that_do_not_fit_a_message_follow_in_a_second_one(partitions: int) -> None:
    counts = torch.randint(0, 3, (3, partitions), generator=torch.Generator().manual_seed(0)).tolist()
    owned = [partitions - 4, 0, 4]

    def work(rank: int, ranks: int) -> None:
        mine, ours = tensor(unaligned(counts, rank)), tensor(aligned(counts, owned, rank))
        plan = convert.plan_exchange(mine, torch.tensor(counts[rank]), owned, world())
        assert torch.equal(convert.unaligned_to_aligned(mine, plan, world()), ours)
        assert convert.gathered_counts(mine, torch.tensor(counts[rank]), owned, world()).tolist() == counts
        row = torch.tensor(plan.aligned_splits, dtype=torch.int64)
        assert convert.gathered_counts(ours, row, owned, world(), aligned=True).tolist() == counts

    on_threads(3, work)


def test_dims_count_from_the_end_too() -> None:
    def work(rank: int, ranks: int) -> None:
        mine, ours = tensor(unaligned(PAPER.tolist(), rank), 2), tensor(aligned(PAPER.tolist(), [2, 2], rank), 2)
        plan = convert.plan_exchange(mine, PAPER[rank], (2, 2), world(), -1 if rank else 2)
        assert torch.equal(convert.unaligned_to_aligned(mine, plan, world(), -1), ours)
        with pytest.raises(PartitionError, match="has 3 dims, and dim 3 cannot be partitioned"):
            convert.unaligned_to_aligned(mine, plan, world(), 3)

    on_threads(2, work)


def test_views_that_promise_a_conjugate_are_computed_before_they_are_sent() -> None:
    def work(rank: int, ranks: int) -> None:
        whole = torch.complex(torch.arange(8.0).view(4, 2), torch.ones(4, 2))
        plan = convert.plan_exchange(whole, torch.tensor([4, 0]), (1, 1), world())
        got = convert.unaligned_to_aligned(whole.conj(), plan, world())
        assert torch.equal(got, torch.cat([whole, whole]).conj().resolve_conj() if rank == 0 else whole[:0])

    on_threads(2, work)


def test_sizes_are_checked_before_data_moves() -> None:
    def work(rank: int, ranks: int) -> None:
        plan = convert.plan_exchange(torch.zeros(16), PAPER[rank], (2, 2), world())
        with pytest.raises(PartitionError, match="unaligned tensor has 15 positions in dim 0, but its counts sum to 16"):
            convert.unaligned_to_aligned(torch.zeros(15), plan, world())
        with pytest.raises(PartitionError, match="full tensor has 33 positions"):
            convert.from_replicate(torch.zeros(33), PAPER, (2, 2), world(), aligned=True)

    on_threads(2, work)


@pytest.mark.parametrize("width", [1, 8, 32, 4096])
@pytest.mark.parametrize("scale", [1, 40, 4000])
def test_wide_and_narrow_rows_in_long_and_short_blocks_are_moved_alike(width: int, scale: int) -> None:
    """Wide rows are copied by index, long blocks of narrow ones one by one, short ones by a program: with more than a megabyte, a
    compiled one."""
    blocks = torch.randint(0, 40, (3, 50), generator=torch.Generator().manual_seed(2)) * max(scale // width, 1)
    rows = torch.randn(int(blocks.sum()), width)
    parts = rows.split(blocks.flatten().tolist())
    want = torch.cat([parts[r * 50 + c] for c in range(50) for r in range(3)])
    runs = transposed_runs(blocks)
    assert torch.equal(pack_runs(rows, runs), want) and torch.equal(pack_runs(rows, runs), want)
