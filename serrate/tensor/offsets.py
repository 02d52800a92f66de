"""Normalises offsets, lengths or row ids, given as tensors or lists, to a chain of 1-D offsets, outermost first.

In: the user's offsets, lengths or row ids, and the values. Out: contiguous 1-D offsets of one dtype, without host copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, ShapeError, StructureError
from serrate.tensor.checks.validate import check_values_layout
from serrate.tensor.sync import host_copy, on_host

Levels = Tensor | Sequence[Any]
"""Offsets or lengths: a tensor, numbers in a list, or for nested rows a sequence of tensors, outermost first."""


def as_tensors(levels: Levels, values: Tensor) -> tuple[Tensor, ...]:
    """Offsets or lengths as tensors: tensors must be on the values' device; lists become tensors on the CPU.

    >>> as_tensors([0, 2, 3], torch.zeros(3))
    (tensor([0, 2, 3]),)
    """
    check_values_layout(values)
    device = values.device
    if isinstance(levels, Tensor):
        if levels.device != device:
            raise DeviceError(f"values are on {device}, but offsets or lengths on {levels.device}: move one of them")
        return (levels,)
    try:
        tensors = tuple(levels)
    except TypeError:
        raise CallError(f"offsets or lengths must be a tensor, or a sequence; got {type(levels).__name__}") from None
    if not tensors or not isinstance(tensors[0], Tensor):
        return (_numbers(tensors),)
    for level, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise CallError(f"levels of nested rows must all be tensors: level {level} is of type {type(tensor).__name__}")
        if tensor.device != device:
            raise DeviceError(f"values are on {device}, but offsets or lengths on {tensor.device}: move one of them")
    return tensors


def _numbers(given: Sequence[Any]) -> Tensor:
    if not given:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    try:
        return torch.tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CallError(
            f"offsets or lengths given as a list must be ints, or lists of the same number of ints ({error}); "
            "for levels of varying sizes pass one tensor each"
        ) from None


_ZERO = torch.zeros(1, dtype=torch.int64, device="cpu")


def chain_from_offsets(offsets: Sequence[Tensor], total: int | None) -> tuple[Tensor, ...]:
    """The chain for offsets, some of which may be 2-D: M rows that start at 0 and count from the start of their component.

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
    """The chain for lengths, some of which may be 2-D: M components of K parts each.

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
    # Summed in int64, so that int32 lengths cannot overflow undetected.
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


def offsets_of_row_ids(row_ids: Tensor, num_rows: int | None) -> Tensor:
    """The offsets of rows given by row ids; without `num_rows`, the last id determines the number of rows.

    Ids are validated on a CPU only. On a device, ids out of range give offsets that do not fit the values, which the deferred
    check of the offsets reports.

    >>> offsets_of_row_ids(torch.tensor([0, 0, 2]), num_rows=4)
    tensor([0, 2, 2, 3, 3])
    """
    if row_ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"row_ids must be int32 or int64, got {row_ids.dtype}: convert them with .to(torch.int64)")
    if row_ids.dim() != 1:
        raise ShapeError(f"row_ids must be 1-D, one number for each position, got shape {tuple(row_ids.shape)}")
    if on_host(row_ids):
        _check(row_ids, num_rows)
    if num_rows is None:
        num_rows = int(host_copy(row_ids[-1:], "from_row_ids").sum()) + 1 if row_ids.shape[0] else 0
    rows = torch.arange(num_rows + 1, dtype=row_ids.dtype, device=row_ids.device)
    return torch.searchsorted(row_ids.contiguous(), rows, out_int32=row_ids.dtype is torch.int32)


def _check(row_ids: Tensor, num_rows: int | None) -> None:
    falls = row_ids[1:] < row_ids[:-1]
    if falls.any():
        at = int(falls.nonzero()[0]) + 1
        raise StructureError(
            f"row_ids must not decrease: row_ids[{at}] = {int(row_ids[at])} < row_ids[{at - 1}] = {int(row_ids[at - 1])}; "
            "sort them, and the values with them"
        )
    if row_ids.shape[0] and row_ids[0] < 0:
        raise StructureError(f"row_ids must not be negative: row_ids[0] = {int(row_ids[0])}")
    if row_ids.shape[0] and num_rows is not None and row_ids[-1] >= num_rows:
        raise StructureError(f"row_ids must be below num_rows={num_rows}: row_ids[{row_ids.shape[0] - 1}] = {int(row_ids[-1])}")
