"""The two spellings of a nested structure, brought to one: a chain of 1-D offsets, outermost first.

In: offsets or lengths, 1-D or 2-D, one tensor per spelled level, and the total if it is known.
Out: contiguous 1-D offsets of one dtype. Everything stays on the device; nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ZERO = torch.zeros(1, dtype=torch.int64, device="cpu")


def chain_from_offsets(offsets: Sequence[Tensor], total: int | None) -> tuple[Tensor, ...]:
    """The chain for offsets of which some may be 2-D: M rows that each start at 0 and count from their component's start.

    >>> chain_from_offsets([torch.tensor([[0, 1, 3], [0, 2, 2]])], 5)
    (tensor([0, 2, 4]), tensor([0, 1, 3, 5, 5]))
    """
    if len(offsets) == 1 and offsets[0].dim() == 1:
        return (offsets[0].contiguous(),)
    chain: list[Tensor] = []
    for position, level in enumerate(offsets):
        if level.dim() == 1:
            chain.append(level.contiguous())
        else:
            chain.extend(chain_from_lengths([level.diff(dim=1)], _end(offsets, position, total, one_more=1)))
    return _one_dtype(chain)


def chain_from_lengths(lengths: Sequence[Tensor], total: int | None) -> tuple[Tensor, ...]:
    """The chain for lengths of which some may be 2-D: M components of K parts each.

    >>> chain_from_lengths([torch.tensor([2, 1]), torch.tensor([4, 0, 5])], 9)
    (tensor([0, 2, 3]), tensor([0, 4, 4, 9]))
    """
    chain: list[Tensor] = []
    for position, level in enumerate(lengths):
        if level.dim() == 2:
            components, parts = level.shape
            chain.append(torch.arange(components + 1, dtype=level.dtype, device=level.device) * parts)
        sums = _boundaries(level.reshape(-1))
        if level.dtype is not torch.int64:
            end = _end(lengths, position, total, one_more=0)
            if end is not None and end <= torch.iinfo(level.dtype).max:
                sums = sums.to(level.dtype)
        chain.append(sums)
    return _one_dtype(chain)


def _boundaries(lengths: Tensor) -> Tensor:
    # Summed in int64 so that int32 lengths cannot wrap around unseen.
    if lengths.is_cpu:
        return torch.cat((_ZERO, lengths)).cumsum_(0)
    sums = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=sums[1:])
    return sums


def _end(tensors: Sequence[Tensor], position: int, total: int | None, one_more: int) -> int | None:
    if position == len(tensors) - 1:
        return total
    below = tensors[position + 1]
    return below.shape[0] - (one_more if below.dim() == 1 else 0)


def _one_dtype(chain: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len(chain) == 1 or len({level.dtype for level in chain}) == 1:
        return tuple(chain)
    return tuple(level.to(torch.int64) for level in chain)
