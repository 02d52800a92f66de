"""Local reordering: transposes a matrix of blocks, or packs runs of positions.

In: rows (dim 0) and their new positions. Out: the same rows in another order. On a CPU, rows are copied by index, block by block
or by a compiled program, whichever was fastest in our measurements for their size.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from serrate.api.jit import jit
from serrate.distributed.layout import Exchange, Runs
from serrate.runtime.memory import SMALLEST, empty
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.moving import runs

WIDE_ROWS = 64
"""Bytes of a row from which an index for each row, which `Runs` remembers, costs less than finding rows in blocks."""
WHOLE_BLOCKS = 8192
"""Bytes of an average block of narrower rows from which copying block by block is fastest."""


def transpose_received(rows: Tensor, exchange: Exchange) -> Tensor:
    """Reorders received blocks, [source rank, own partition], to aligned, [own partition, source rank].

    >>> import torch
    >>> from serrate.distributed.layout import exchange_of
    >>> exchange = exchange_of(torch.tensor([[1, 2], [1, 1]]), (2, 0), 0)
    >>> transpose_received(torch.tensor([0, 1, 1, 2, 3]), exchange)
    tensor([0, 2, 1, 1, 3])
    """
    if _in_order(rows, exchange):
        return rows
    return pack_runs(rows, exchange.transpose) if rows.is_cpu else _transposed_on_device(rows, exchange.blocks)


def transpose_back(rows: Tensor, exchange: Exchange) -> Tensor:
    """The inverse: aligned blocks in the order in which they are sent back."""
    if _in_order(rows, exchange):
        return rows
    return pack_runs(rows, exchange.transpose_back) if rows.is_cpu else _transposed_on_device(rows, exchange.blocks.T)


def pack_runs(rows: Tensor, which: Runs) -> Tensor:
    """Packs runs of rows back to back.

    >>> import torch
    >>> pack_runs(torch.arange(5), Runs(torch.tensor([3, 0]), torch.tensor([2, 1]), 3))
    tensor([3, 4, 0])
    """
    if not rows.is_cpu:
        starts, lengths = (x.to(rows.device, non_blocking=True) for x in (which.starts, which.lengths))
        return runs(rows, 0, starts, lengths, which.total)
    shape = (which.total, *rows.shape[1:])
    size = prod(shape) * rows.itemsize
    if size >= WIDE_ROWS * which.total:
        if size < SMALLEST:
            return rows.index_select(0, which.index)
        return torch.index_select(rows, 0, which.index, out=empty(shape, rows.dtype, rows.device))
    if size >= WHOLE_BLOCKS * which.lengths.shape[0]:
        return torch.cat([rows[each] for each in which.slices], out=empty(shape, rows.dtype, rows.device))
    return runs(rows, 0, which.starts, which.lengths, which.total)


def _in_order(rows: Tensor, exchange: Exchange) -> bool:
    return 1 in exchange.blocks.shape or rows.numel() == 0


def _transposed_on_device(rows: Tensor, lengths: Tensor) -> Tensor:
    # The program reads the lengths on the device; its total is the number of rows, so the host needs none of them.
    structure = Structure.from_lengths(lengths.to(rows.device, non_blocking=True), total=rows.shape[0], validate=False)
    moved = _swapped(JaggedTensor(rows, structure))
    assert isinstance(moved, JaggedTensor)
    return moved.values


@jit
def _swapped(x: JaggedTensor) -> JaggedTensor:
    return x.transpose(0, 1)
