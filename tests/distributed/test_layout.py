"""Layouts without any process group: sizes of messages, blocks and runs, against blocks moved one by one in plain Python."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serrate.distributed import layout
from serrate.errors import PartitionError

PAPER = torch.tensor([[4, 6, 4, 2], [2, 4, 8, 2]])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Counts [ranks][partitions] with many zeros, and how many partitions each rank owns."""
    ranks = draw(st.integers(1, 8))
    owned = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(any))
    row = st.lists(st.integers(0, 5) | st.just(0), min_size=sum(owned), max_size=sum(owned))
    return draw(st.lists(row, min_size=ranks, max_size=ranks)), owned


def block(rank: int, partition: int, length: int) -> list[Any]:
    return [(rank, partition, k) for k in range(length)]


def unaligned(counts: list[list[int]], rank: int) -> list[Any]:
    return [at for p, n in enumerate(counts[rank]) for at in block(rank, p, n)]


def full(counts: list[list[int]]) -> list[Any]:
    return [at for p in range(len(counts[0])) for r in range(len(counts)) for at in block(r, p, counts[r][p])]


def aligned(counts: list[list[int]], owned: list[int], rank: int) -> list[Any]:
    first = sum(owned[:rank])
    mine = range(first, first + owned[rank])
    return [at for p in mine for r in range(len(counts)) for at in block(r, p, counts[r][p])]


def cut(sequence: list[Any], sizes: Any) -> list[list[Any]]:
    bounds = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    assert bounds[-1] == len(sequence)
    return [sequence[a:b] for a, b in pairwise(bounds)]


def packed(sequence: list[Any], runs: layout.Runs) -> list[Any]:
    """Run by run; the index and the slices of the same runs must say the same."""
    found = [at for s, n in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True) for at in sequence[s : s + n]]
    assert runs.total == len(found) and [sequence[at] for at in runs.index.tolist()] == found
    assert [at for each in runs.slices for at in sequence[each]] == found and all(each.start < each.stop for each in runs.slices)
    return found


def test_the_worked_example() -> None:
    first, second = (layout.exchange_of(PAPER, (2, 2), rank) for rank in range(2))
    assert (first.send, first.receive) == ((10, 6), (10, 6))
    assert (second.send, second.receive) == ((6, 10), (6, 10))
    # The paper's [4,6,2,4] and [4,2,8,2], as matrices of source rank by partition; then the aligned order.
    assert first.blocks.tolist() == [[4, 6], [2, 4]] and second.blocks.tolist() == [[4, 2], [8, 2]]
    assert first.aligned_splits == (4, 2, 6, 4) and second.aligned_splits == (4, 8, 2, 2)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_exchanging_and_transposing_blocks_aligns_partitions(case: tuple[list[list[int]], list[int]]) -> None:
    counts, owned = case
    matrix, ranks = torch.tensor(counts), range(len(counts))
    plans = [layout.exchange_of(matrix, owned, rank) for rank in ranks]
    wire = [cut(unaligned(counts, rank), plans[rank].send) for rank in ranks]
    for rank in ranks:
        assert [len(wire[source][rank]) for source in ranks] == list(plans[rank].receive)
        got = [at for source in ranks for at in wire[source][rank]]
        assert packed(got, plans[rank].transpose) == aligned(counts, owned, rank)
        # The way back starts with the transposed matrix.
        assert packed(aligned(counts, owned, rank), plans[rank].transpose_back) == got
        assert plans[rank].unaligned_size == len(unaligned(counts, rank))
        assert plans[rank].aligned_size == len(aligned(counts, owned, rank))


@given(layouts(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_parts_of_the_full_tensor(case: tuple[list[list[int]], list[int]], slack: int) -> None:
    counts, owned = case
    matrix, ranks, whole = torch.tensor(counts), range(len(counts)), full(counts)
    for rank in ranks:
        assert packed(whole, layout.runs_of_rank(matrix, rank)) == unaligned(counts, rank)
        first, last = layout.own_range(matrix, owned, rank)
        assert whole[first:last] == aligned(counts, owned, rank)
    for is_aligned, shards in (
        (False, [unaligned(counts, r) for r in ranks]),
        (True, [aligned(counts, owned, r) for r in ranks]),
    ):
        assert layout.shard_sizes(matrix, owned, is_aligned) == [len(shard) for shard in shards]
    room = max(map(len, (unaligned(counts, r) for r in ranks))) + slack
    gathered = [at for r in ranks for at in unaligned(counts, r) + ["hole"] * (room - len(unaligned(counts, r)))]
    assert packed(gathered, layout.gathered_runs(matrix, room)) == whole
    sizes = layout.shard_sizes(matrix, owned, True)
    room = max(sizes) + slack
    gathered = [at for r in ranks for at in aligned(counts, owned, r) + ["hole"] * (room - sizes[r])]
    assert packed(gathered, layout.gathered_shards(sizes, room)) == whole


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_contiguous_ranges_move_in_one_exchange(case: tuple[list[list[int]], list[int]]) -> None:
    counts, owned = case
    matrix, ranks, whole = torch.tensor(counts), len(counts), full(counts)
    before, after = layout.aligned_bounds(matrix, owned), layout.chunk_bounds(len(whole), ranks)
    chunks = [chunk.tolist() for chunk in torch.arange(len(whole)).chunk(ranks)]
    for rank in range(ranks):
        assert list(range(*after[rank : rank + 2])) == (chunks[rank] if rank < len(chunks) else [])
    sizes = [layout.range_sizes(before, after, rank) for rank in range(ranks)]
    wire = [cut(whole[before[r] : before[r + 1]], sizes[r][0]) for r in range(ranks)]
    for rank in range(ranks):
        assert [len(wire[source][rank]) for source in range(ranks)] == sizes[rank][1]
        assert [at for source in range(ranks) for at in wire[source][rank]] == whole[after[rank] : after[rank + 1]]


def test_owners() -> None:
    assert layout.owned_partitions(8, 2) == (4, 4)
    assert layout.owned_partitions(8, 2, [5, 3]) == (5, 3)
    with pytest.raises(PartitionError, match=r"6 partitions cannot be shared out equally to 4 ranks.*\(2, 2, 1, 1\)"):
        layout.owned_partitions(6, 4)
    for wrong in ((5, 2), (5, 3, 0), (9, -1)):
        with pytest.raises(PartitionError, match="2 non-negative ints that sum to 8"):
            layout.owned_partitions(8, 2, wrong)


def test_counts_that_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"counts\[1\]\[0\] = -1"):
        layout.check_counts(torch.tensor([[1, 2], [-1, 0]]), 2, 2)
    with pytest.raises(PartitionError, match=r"integers, got torch\.float32"):
        layout.check_counts(torch.ones(2, 2), 2, 2)
    with pytest.raises(PartitionError, match=r"3 ranks x 2 partitions, got shape \(2, 2\)"):
        layout.check_counts(torch.ones(2, 2, dtype=torch.int32), 3, 2)
