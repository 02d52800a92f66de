"""Conversions between layouts, on plain tensors, with gradients.

In: a rank's local tensor, and an exchange (`layout.Exchange`) or the counts of all ranks. Out: its local tensor in another
layout. Each conversion is one collective and at most one local copy. Counts are exchanged only if the caller does not have them.

A conversion is linear and only moves elements, so its gradient is the inverse conversion. As in DTensor, the gradient of a
replicated tensor is assumed to be replicated: the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from serrate.distributed.blocks import pack_runs, transpose_back, transpose_received
from serrate.distributed.collectives import CheckedRow, exchange_rows, gather_counts, gather_rows, header_of, swap_counts
from serrate.distributed.layout import (
    Exchange,
    exchange_from,
    gathered_runs,
    gathered_shards,
    own_range,
    range_sizes,
    runs_of_rank,
    shard_sizes,
)
from serrate.errors import PartitionError
from serrate.tensor.torch_private import in_dual_level, is_transformed


def plan_exchange(
    local: Tensor, row: Tensor, owned: Sequence[int], group: dist.ProcessGroup, dim: int = 0, expected: int | None = None
) -> Exchange:
    """The exchange of this rank, from its own counts: one exchange of counts, and on a device one copy to the host.

    `expected` is the size that the counts must sum to; by default that of `local`, which is unaligned.
    """
    partitions, dim = sum(owned), own_dim(local, dim)
    checked = CheckedRow.of(row, partitions, local.shape[dim] if expected is None else expected, local.device)
    own, received = swap_counts(checked, owned, header_of(local, dim, owned, aligned=False), group)
    return exchange_from(own, received, owned)


def gathered_counts(
    local: Tensor, row: Tensor, owned: Sequence[int], group: dist.ProcessGroup, dim: int = 0, aligned: bool = False
) -> Tensor:
    """The counts of all ranks, [ranks, partitions], from what each rank holds in storage order: one collective."""
    rank, ranks, partitions, dim = group.rank(), len(owned), sum(owned), own_dim(local, dim)
    width = owned[rank] * ranks if aligned else partitions
    checked = CheckedRow.of(row, width, local.shape[dim], local.device)
    room = max(owned) * ranks if aligned else partitions
    rows = gather_counts(checked, room, header_of(local, dim, owned, aligned), group)
    if not aligned:
        return rows
    return torch.cat([rows[r, : n * ranks].view(n, ranks) for r, n in enumerate(owned)]).T.contiguous()


def unaligned_to_aligned(local: Tensor, exchange: Exchange, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """One exchange of data, then a transpose of blocks from [source rank, own partition] to [own partition, source rank]."""
    dim = _check_size("unaligned", local, dim, exchange.unaligned_size)
    return _moved(local, ToAligned(group, dim, exchange))


def aligned_to_unaligned(local: Tensor, exchange: Exchange, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The inverse: first the transpose of blocks, then the exchange, which delivers partitions in order."""
    dim = _check_size("aligned", local, dim, exchange.aligned_size)
    return _moved(local, ToUnaligned(group, dim, exchange))


def to_replicate(
    local: Tensor, counts: Tensor, owned: Sequence[int], group: dist.ProcessGroup, dim: int = 0, *, aligned: bool
) -> Tensor:
    """The full tensor from local ones of either layout: one gathering, and a copy unless shards are aligned and equally long."""
    dim = _check_size("aligned" if aligned else "unaligned", local, dim, shard_sizes(counts, owned, aligned)[group.rank()])
    return _moved(local, Gather(group, dim, counts, tuple(owned), aligned))


def from_replicate(
    full: Tensor, counts: Tensor, owned: Sequence[int], group: dist.ProcessGroup, dim: int = 0, *, aligned: bool
) -> Tensor:
    """This rank's part of a full tensor: a copy, no communication."""
    dim = _check_size("full", full, dim, int(counts.sum()))
    return _moved(full, Take(group, dim, counts, tuple(owned), aligned))


def exchange_ranges(local: Tensor, before: Sequence[int], after: Sequence[int], group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Moves the boundaries between contiguous ranges, one per rank: aligned <-> `Shard(dim)`. One exchange, no local copy."""
    rank = group.rank()
    dim = _check_size("sharded", local, dim, before[rank + 1] - before[rank])
    return _moved(local, Ranges(group, dim, tuple(before), tuple(after)))


@dataclass(frozen=True, eq=False)
class Move(ABC):
    """A linear map that moves rows between ranks, along dim `dim`; `back` is its inverse, and its gradient."""

    group: dist.ProcessGroup
    dim: int

    @abstractmethod
    def rows(self, rows: Tensor) -> Tensor:
        """Moves rows of dim 0."""

    @abstractmethod
    def back(self) -> Move:
        """The inverse."""


@dataclass(frozen=True, eq=False)
class ToAligned(Move):
    exchange: Exchange

    def rows(self, rows: Tensor) -> Tensor:
        got = exchange_rows(rows, self.exchange.send, self.exchange.receive, self.group)
        return transpose_received(got, self.exchange)

    def back(self) -> Move:
        return ToUnaligned(self.group, self.dim, self.exchange)


@dataclass(frozen=True, eq=False)
class ToUnaligned(Move):
    exchange: Exchange

    def rows(self, rows: Tensor) -> Tensor:
        sent = transpose_back(rows, self.exchange)
        return exchange_rows(sent, self.exchange.receive, self.exchange.send, self.group)

    def back(self) -> Move:
        return ToAligned(self.group, self.dim, self.exchange)


@dataclass(frozen=True, eq=False)
class Gather(Move):
    counts: Tensor
    owned: tuple[int, ...]
    aligned: bool

    def rows(self, rows: Tensor) -> Tensor:
        sizes = shard_sizes(self.counts, self.owned, self.aligned)
        got, room = gather_rows(rows, sizes, self.group)
        if not self.aligned:
            return pack_runs(got, gathered_runs(self.counts, room))
        return got if min(sizes) == room else pack_runs(got, gathered_shards(sizes, room))

    def back(self) -> Move:
        return Take(self.group, self.dim, self.counts, self.owned, self.aligned)


@dataclass(frozen=True, eq=False)
class Take(Move):
    counts: Tensor
    owned: tuple[int, ...]
    aligned: bool

    def rows(self, rows: Tensor) -> Tensor:
        rank = self.group.rank()
        if self.aligned:
            first, last = own_range(self.counts, self.owned, rank)
            return rows[first:last].clone()  # a view would keep the full tensor alive
        return pack_runs(rows, runs_of_rank(self.counts, rank))

    def back(self) -> Move:
        return Gather(self.group, self.dim, self.counts, self.owned, self.aligned)


@dataclass(frozen=True, eq=False)
class Ranges(Move):
    before: tuple[int, ...]
    after: tuple[int, ...]

    def rows(self, rows: Tensor) -> Tensor:
        send, receive = range_sizes(self.before, self.after, self.group.rank())
        return exchange_rows(rows, send, receive, self.group)

    def back(self) -> Move:
        return Ranges(self.group, self.dim, self.after, self.before)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, move: Move) -> Tensor:
        ctx.move = move
        moved = _moved_data(local, move)
        # On one rank nothing moves; a function must not return its input itself.
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grads[0], ctx.move.back()), None


def _moved(local: Tensor, move: Move) -> Tensor:
    if (torch.is_grad_enabled() and local.requires_grad) or in_dual_level() or is_transformed(local):
        apply: Callable[[Tensor, Move], Tensor] = _Moved.apply
        return apply(local, move)
    return _moved_data(local, move)


def _moved_data(local: Tensor, move: Move) -> Tensor:
    if not move.dim:
        return move.rows(local)
    rows = local.movedim(move.dim, 0)
    moved = move.rows(rows)
    return local if moved is rows else moved.movedim(0, move.dim)


def own_dim(local: Tensor, dim: int) -> int:
    """A dim of a tensor, counted from the first."""
    if not -local.dim() <= dim < local.dim():
        raise PartitionError(f"the tensor has {local.dim()} dims, and dim {dim} cannot be partitioned")
    return dim % local.dim()


def _check_size(what: str, local: Tensor, dim: int, expected: int) -> int:
    dim = own_dim(local, dim)
    if local.shape[dim] != expected:
        raise PartitionError(f"the {what} tensor has {local.shape[dim]} positions in dim {dim}, but its counts sum to {expected}")
    return dim
