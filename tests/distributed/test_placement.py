"""`PartitionedShard` as a placement of torch: a frozen value, validated, with the six conversions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from serrate.distributed import PartitionedShard
from serrate.errors import PartitionError
from tests.distributed.ranks import on_threads
from tests.distributed.test_convert import tensor
from tests.distributed.test_layout import PAPER, aligned, full, unaligned

COUNTS = PAPER.tolist()


def test_it_is_a_value() -> None:
    one, other = PartitionedShard(0, 4, [4, 6, 4, 2]), PartitionedShard(0, 4, torch.tensor([4, 6, 4, 2]))
    assert isinstance(one, Placement) and one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert one != PartitionedShard(0, 4, [4, 6, 4, 2], aligned=True) and one != PartitionedShard(0, 4) and one != Shard(0)
    assert pickle.loads(pickle.dumps(one)) == one and copy.deepcopy(one) == one
    assert not one.is_replicate() and not one.is_partial() and one != Replicate()
    assert "splits=(4, 6, 4, 2)" in repr(one)
    with pytest.raises(AttributeError):
        one.dim = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "at least one partition"),
        ((-1, 4), "not negative"),
        ((0, 4, [1, 2, 3]), "one count for each of 4 partitions, got 3"),
        ((0, 2, [1, -2]), "must not be negative"),
        ((0, 2, [1.5, 2]), "must be ints"),
        ((0, 2, [[1, 2], [3]]), r"splits\[1\] must have one count"),
        ((0, 8, None, True, (5, 2)), "sum to 8 partitions"),
    ],
)
def test_wrong_placements_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        PartitionedShard(*arguments)


def test_the_six_conversions() -> None:
    def work(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        mine, ours, whole = tensor(unaligned(COUNTS, rank)), tensor(aligned(COUNTS, [2, 2], rank)), tensor(full(COUNTS))
        row, blocks = COUNTS[rank], ((4, 2, 6, 4), (4, 8, 2, 2))[rank]
        for splits, own in ((row, blocks), (COUNTS, COUNTS)):
            here, there = PartitionedShard(0, 4, splits), PartitionedShard(0, 4, own, aligned=True)
            _same(here._unaligned_to_aligned_shard(mine, mesh, 0), ours)
            _same(there._aligned_to_unaligned_shard(ours, mesh, 0), mine)
            _same(here._unaligned_to_replicate(mine, mesh, 0, whole.shape), whole)
            _same(there._aligned_to_replicate(ours, mesh, 0, whole.shape), whole)
        everything = PartitionedShard(0, 4, COUNTS)
        _same(everything._replicate_to_unaligned_shard(whole, mesh, 0, rank), mine)
        _same(everything._replicate_to_aligned_shard(whole, mesh, 0, rank), ours)
        with pytest.raises(PartitionError, match="replicated tensor has no splits"):
            PartitionedShard(0, 4)._replicate_to_aligned_shard(whole, mesh, 0, rank)
        with pytest.raises(PartitionError, match="describe unaligned blocks"):
            PartitionedShard(0, 4, row)._aligned_to_replicate(ours, mesh, 0, whole.shape)
        with pytest.raises(PartitionError, match="needs splits"):
            PartitionedShard(0, 4)._unaligned_to_aligned_shard(mine, mesh, 0)

    on_threads(2, work)


def test_partitions_that_ranks_cannot_share_equally() -> None:
    def work(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        with pytest.raises(PartitionError, match=r"3 partitions cannot be shared out equally to 2 ranks.*partitions_per_rank"):
            PartitionedShard(0, 3, [1, 1, 1])._unaligned_to_aligned_shard(torch.zeros(3), mesh, 0)
        uneven = PartitionedShard(0, 3, [1, 1, 1], partitions_per_rank=(2, 1))
        got = uneven._unaligned_to_aligned_shard(torch.tensor([0, 1, 2]) + 10 * rank, mesh, 0)
        assert got.tolist() == ([0, 10, 1, 11], [2, 12])[rank]

    on_threads(2, work)


def _same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)
