"""The ground truth: conversions on real gloo processes, and what every rank raises when one of them fails or stops."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from serrate.distributed import PartitionedShard, PartitionedTensor, convert, layout
from tests.distributed.ranks import Failure, on_processes, on_threads
from tests.distributed.test_convert import tensor, world
from tests.distributed.test_layout import PAPER, aligned, full, unaligned
from tests.distributed.test_tensor import partitioned

CASES = {
    2: [([[4, 6, 4, 2], [2, 4, 8, 2]], [2, 2]), ([[0, 0, 0], [0, 5, 0]], [3, 0]), ([[300, 0], [200, 700]], [1, 1])],
    4: [([[1, 0, 2, 3, 0], [0, 0, 0, 0, 0], [5, 1, 0, 0, 2], [0, 0, 9, 0, 1]], [2, 0, 1, 2])],
}


def every_conversion(rank: int, ranks: int) -> int:
    mesh = init_device_mesh("cpu", (ranks,))
    checked = 0
    for counts, owned in CASES[ranks]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            for dim in (0, 1):
                mine = tensor(unaligned(counts, rank), dim, dtype)
                ours = tensor(aligned(counts, owned, rank), dim, dtype)
                whole = tensor(full(counts), dim, dtype)
                if dtype.is_floating_point:
                    mine.requires_grad_()
                here = PartitionedShard(dim, sum(owned), counts[rank], partitions_per_rank=tuple(owned))
                t = PartitionedTensor.from_local(mine, mesh, here)
                there = partitioned(t.redistribute(PartitionedShard(dim, sum(owned), aligned=True)))
                assert torch.equal(there.to_local(), ours)
                back = partitioned(there.redistribute(PartitionedShard(dim, sum(owned))))
                assert torch.equal(back.to_local(), mine)
                assert torch.equal(t.full_tensor(), whole) and torch.equal(there.full_tensor(), whole)
                shard: Any = there.redistribute(Shard(dim))
                assert torch.equal(shard.full_tensor(), whole)
                if dtype.is_floating_point:
                    (there.to_local() * ours).sum().backward()
                    assert torch.equal(mine.grad, mine.detach())
                checked += 1
    return checked


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_conversion_on_processes(ranks: int) -> None:
    assert on_processes(ranks, every_conversion) == [8 * len(CASES[ranks])] * ranks


def wrong_counts_then_dead(rank: int, ranks: int) -> Any:
    """Counts that do not fit on one rank; other numbers of partitions, few and many; then a rank that does not come."""
    messages = []
    local = torch.zeros(int(PAPER[rank].sum()), 2)
    began = time.monotonic()
    many = torch.ones(3000 if rank else 4, dtype=torch.int64)
    cases: list[tuple[torch.Tensor, tuple[int, int]]] = [
        (PAPER[rank] + rank, (2, 2)),
        (PAPER[rank][: 4 - rank], (2, 2 - rank)),
        (many, (len(many) // 2,) * 2),
    ]
    for row, owned in cases:
        mine = local if row.sum() == PAPER[rank].sum() + 4 * rank else torch.zeros(int(row.sum()), 2)
        for exchanged in (convert.gathered_counts, convert.plan_exchange):
            try:
                exchanged(mine, row, owned, world())
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
    if rank == 1:
        raise ValueError("this rank stops")
    try:
        plan = layout.exchange_of(PAPER, (2, 2), rank)
        convert.unaligned_to_aligned(local, plan, world())
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    return messages, time.monotonic() - began


def test_all_ranks_fail_with_a_message_within_the_timeout() -> None:
    (messages, took), dead = on_processes(2, wrong_counts_then_dead, timeout=6.0)
    assert isinstance(dead, Failure) and dead.kind == "ValueError"
    for failed in messages[:2]:
        assert failed.startswith("ExchangeError: rank 1 of the group failed before an exchange with rank 0")
    for there, differing in ((3, messages[2:4]), (3000, messages[4:6])):
        for message in differing:
            assert (
                message == f"ExchangeError: rank 0 and rank 1 do not agree about an exchange: partitions: 4 here, {there} there"
            )
    assert messages[6].startswith("ExchangeError: the exchange of rows failed on rank 0 of 2: another rank stopped")
    assert took < 20


def alone(rank: int, ranks: int) -> None:
    """One rank: nothing is sent, and tensors come back as they are."""
    mesh = init_device_mesh("cpu", (1,))
    t = PartitionedTensor.from_local(torch.arange(6.0), mesh, PartitionedShard(0, 3, [[1, 0, 5]]))
    there = partitioned(t.redistribute(PartitionedShard(0, 3, aligned=True)))
    assert there.to_local().data_ptr() == t.to_local().data_ptr()
    assert torch.equal(there.full_tensor(), torch.arange(6.0)) and dist.get_world_size() == 1


def test_one_rank() -> None:
    on_threads(1, alone)
