"""Local reordering: the blocks of a matrix of blocks are transposed, or runs of positions packed, by compiled copies.

In: rows (dim 0) and the lengths of blocks. Out: the same rows in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serrate.api.jit import jit
from serrate.distributed.layout import transposed_runs
from serrate.runtime.memory import empty
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.moving import runs

WHOLE_BLOCKS = 8192
"""Bytes of an average block from which copying block by block is faster than a program that finds every row's source."""


def transpose_blocks(rows: Tensor, lengths: Tensor) -> Tensor:
    """Reorders blocks that are stored row by row of the matrix `lengths` to column by column.

    >>> import torch
    >>> transpose_blocks(torch.tensor([0, 1, 1, 2, 3]), torch.tensor([[1, 2], [1, 1]]))
    tensor([0, 2, 1, 1, 3])
    """
    if 1 in lengths.shape or rows.numel() == 0:
        return rows
    if rows.is_cpu:
        return packed_runs(rows, *transposed_runs(lengths), rows.shape[0])
    # On a device the program reads the lengths there; its total is the number of rows, so the host needs none of them.
    structure = Structure.from_lengths(lengths.to(rows.device, non_blocking=True), total=rows.shape[0], validate=False)
    moved = _swapped(JaggedTensor(rows, structure))
    assert isinstance(moved, JaggedTensor)
    return moved.values


def packed_runs(rows: Tensor, starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Packs runs of rows back to back: `lengths[k]` rows from `starts[k]`, `total` in all.

    >>> import torch
    >>> packed_runs(torch.arange(5), torch.tensor([3, 0]), torch.tensor([2, 1]), 3)
    tensor([3, 4, 0])
    """
    if rows.is_cpu and total * rows[:1].nbytes >= WHOLE_BLOCKS * lengths.shape[0]:
        out = empty((total, *rows.shape[1:]), rows.dtype, rows.device)
        return torch.cat([rows[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True) if n], out=out)
    return runs(rows, 0, starts.to(rows.device), lengths.to(rows.device), total)


@jit
def _swapped(x: JaggedTensor) -> JaggedTensor:
    return x.transpose(0, 1)
