"""One row, or all rows, taken out of values without a copy.

In: values and their structure. Out: values and structures of what is inside: a row of nested rows is ragged itself, a row of
one level is a plain tensor, and has no structure.
"""

from __future__ import annotations

from torch import Tensor

from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure

Piece = tuple[Tensor, Structure | None]


def count(values: Tensor, structure: Structure) -> int:
    """The extent of the first dim.

    >>> import torch
    >>> count(torch.zeros(5), Structure.from_lengths(torch.tensor([3, 2])))
    2
    """
    return structure.rows[0].num_rows(0) if structure.dims[0] == 0 else values.shape[0]


def take(values: Tensor, structure: Structure, row: int, why: str) -> Piece:
    """What is at one position of the first dim.

    >>> import torch
    >>> take(torch.arange(5), Structure.from_lengths(torch.tensor([3, 2])), 1, "jt[i]")
    (tensor([3, 4]), None)
    """
    dims, (rows, *others) = structure.dims, structure.rows
    if dims[0] > 0:
        return values[row], Structure(structure.rows, tuple(dim - 1 for dim in dims))
    if rows.depth > 1:
        first, last = rows.host_offsets(0, why)[row : row + 2].tolist()
        inner, start, stop = rows.narrow(first, last, level=1, why=why)
        return values[start:stop], structure.replace(0, inner)
    start = int(rows.host_where(why)[row])
    size = int(rows.host_sizes(why)[row])
    piece, moved = _rectangle(values[start : start + size], rows, row, why)
    return piece, Structure(tuple(others), tuple(dim + moved for dim in dims[1:])) if others else None


def take_all(values: Tensor, structure: Structure, why: str) -> list[Piece]:
    """What is at every position of the first dim, in order.

    >>> import torch
    >>> [row.tolist() for row, _ in take_all(torch.arange(5), Structure.from_lengths(torch.tensor([3, 2])), "unbind")]
    [[0, 1, 2], [3, 4]]
    """
    dims, (rows, *others) = structure.dims, structure.rows
    if dims[0] > 0 or rows.depth > 1:
        return [take(values, structure, row, why) for row in range(count(values, structure))]
    sizes = rows.host_sizes(why).tolist()
    if rows.starts is None:
        pieces = list(values.split_with_sizes(sizes))
    else:
        pieces = [values[a : a + n] for a, n in zip(rows.host_where(why).tolist(), sizes, strict=True)]
    shaped = [_rectangle(piece, rows, row, why) for row, piece in enumerate(pieces)]
    rest = tuple(others)
    return [(piece, Structure(rest, tuple(dim + moved for dim in dims[1:])) if rest else None) for piece, moved in shaped]


def _rectangle(piece: Tensor, rows: Rows, row: int, why: str) -> tuple[Tensor, int]:
    """A row with its columns as a dim of their own, and by how much that moved the dims behind."""
    if rows.columns is None:
        return piece, 0
    length, columns = (int(rows.host_lengths(level, why)[row]) for level in (rows.depth - 1, rows.depth))
    if not rows.packed:
        return piece[:, :columns], 0
    return piece.view(length, columns, *piece.shape[1:]), 1
