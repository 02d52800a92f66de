"""Exchanges with messages of a fixed size: counts stay on the device, and the host never waits for them.

In: counts on a device, and a bound on how many rows a rank may receive. Out: rows in the other layout, in a tensor of that many
rows. Every pair of ranks exchanges `bound` rows, so not waiting for counts costs bandwidth: a rank sends `ranks * bound` rows,
used or not. Counts above the bound are detected on the device and raise: immediately on a CPU, at a later call on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from serrate.distributed.collectives import exchange_rows
from serrate.distributed.layout import by_owner
from serrate.errors import PartitionError
from serrate.tensor.checks.deferred import defer, poll


@dataclass(frozen=True, eq=False)
class FixedExchange:
    """An exchange of fixed slots, one for each pair of ranks. An index of -1 stands for a row of zeros.

    unaligned rows --pack--> slots [destination, bound] --exchange--> slots [source, bound] --unpack--> aligned rows
    """

    group: dist.ProcessGroup
    bound: int
    lengths: Tensor
    """Rows of each own partition; the last one also has the rows of zeros up to the bound."""
    pack: Tensor
    """The unaligned row of every row of the sent slots, and the inverse."""
    packed: Tensor
    unpack: Tensor
    """The row of the received slots for every aligned row, and the inverse."""
    unpacked: Tensor

    def to_aligned(self, rows: Tensor) -> Tensor:
        """Unaligned -> aligned: `bound` rows, those past the last partition's own are zeros."""
        return _taken(self._swapped(_taken(rows, self.pack, self.packed)), self.unpack, self.unpacked)

    def to_unaligned(self, rows: Tensor) -> Tensor:
        """Aligned -> unaligned."""
        return _taken(self._swapped(_taken(rows, self.unpacked, self.unpack)), self.packed, self.pack)

    def _swapped(self, slots: Tensor) -> Tensor:
        apply: Callable[[Tensor, FixedExchange], Tensor] = _SlotExchange.apply
        return apply(slots, self)


def exchange(row: Tensor, owned: Sequence[int], bound: int, size: int, group: dist.ProcessGroup) -> FixedExchange:
    """The exchange of this rank, whose counts are `row` and sum to `size`: one exchange of counts, which the host does not
    read."""
    ranks, rank, device = len(owned), group.rank(), row.device
    mine = by_owner(row, owned)
    got = exchange_rows(mine, [1] * ranks, [1] * ranks, group)[:, : owned[rank]]  # [source rank, own partition]
    send, receive = mine.sum(1), got.sum(1)
    _check_bound(torch.maximum(send.max(), receive.sum()), bound, rank)

    slot, source = torch.arange(ranks * bound, device=device) % bound, torch.arange(ranks * bound, device=device) // bound
    starts = send.cumsum(0) - send
    pack = torch.where(slot < send[source], starts[source] + slot, -1)

    # Blocks in aligned order; a row of the result belongs to the last block that begins at or before it.
    turned = got.T.flatten()
    ends = turned.cumsum(0)
    at = torch.arange(bound, device=device)
    block = torch.searchsorted(ends, at, right=True).clamp(max=max(turned.shape[0] - 1, 0))
    within = (got.cumsum(1) - got).T.flatten() + torch.arange(ranks, device=device).repeat(owned[rank]) * bound
    if turned.shape[0]:
        unpack = torch.where(at < ends[-1], within[block] + at - (ends - turned)[block], -1)
    else:
        unpack = torch.full_like(at, -1)
    lengths = got.sum(0)
    if owned[rank]:
        lengths = torch.cat([lengths[:-1], (bound - lengths[:-1].sum())[None]])
    return FixedExchange(group, bound, lengths, pack, _inverse(pack, size), unpack, _inverse(unpack, ranks * bound))


def _check_bound(most: Tensor, bound: int, rank: int) -> None:
    def verify(numbers: list[int]) -> None:
        if numbers[0] > bound:
            raise PartitionError(
                f"rank {rank} sends or receives {numbers[0]} rows, more than max_tokens={bound}; pass a larger bound"
            )

    defer([most], verify)
    if most.is_cpu:
        poll()


def _inverse(index: Tensor, size: int) -> Tensor:
    """The index at which each of `size` positions occurs; -1 if it does not."""
    found = index.new_full((size + 1,), -1)
    found[index] = torch.arange(index.shape[0], device=index.device)  # -1 writes to the last one, which is dropped
    return found[:size]


class _RowsByIndex(torch.autograd.Function):
    """Gathers rows by index. The inverse index makes the gradient a gather too, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        if not rows.shape[0]:
            return rows.new_zeros((index.shape[0], *rows.shape[1:]))
        there = rows.index_select(0, index.clamp(min=0))
        return there.masked_fill_((index < 0).view(-1, *[1] * (rows.dim() - 1)), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, back = ctx.saved_tensors
        return _taken(grads[0], back, index), None, None


class _SlotExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, exchange: FixedExchange) -> Tensor:
        ctx.exchange = exchange
        sizes = [exchange.bound] * exchange.group.size()
        return exchange_rows(slots, sizes, sizes, exchange.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange._swapped(grads[0]), None


def _taken(rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] = _RowsByIndex.apply
    return apply(rows, index, back)
