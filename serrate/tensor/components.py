"""Single components taken out of a ragged tensor without a copy, and structures with dims added or removed.

In: values and their structure. Out: the component's values and structure: a row of nested rows is ragged itself, a row of one
level is a plain tensor without a structure.
"""

from __future__ import annotations

from torch import Tensor

from serrate.tensor.permuting import MaybeRagged, arranged
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Dim, Structure


def dims_of(values: Tensor, structure: Structure | None) -> tuple[Dim, ...]:
    """The kind of every dim; a plain tensor's dims are those of its values."""
    return tuple(map(Dim, range(values.dim()))) if structure is None else structure.dims_of(values.dim())


def count(values: Tensor, structure: Structure) -> int:
    """The extent of the first dim.

    >>> import torch
    >>> count(torch.zeros(5), Structure.from_lengths(torch.tensor([3, 2])))
    2
    """
    return structure.rows[0].num_rows(0) if structure.dims[0] == 0 else values.shape[0]


def take(values: Tensor, structure: Structure, row: int, why: str) -> MaybeRagged:
    """The item at one index of the first dim.

    >>> import torch
    >>> take(torch.arange(5), Structure.from_lengths(torch.tensor([3, 2])), 1, "jt[i]")
    (tensor([3, 4]), None)
    """
    if structure.ahead is not None:
        return arranged(take(values, structure.canonical, row, why), _after_first(values, structure))
    if structure.dims[0] > 0:
        return values[row], shift_dims(structure, 0, -1)
    return take_component(values, structure, 0, row, why)


def take_component(values: Tensor, structure: Structure, axis: int, row: int, why: str) -> MaybeRagged:
    """One component of a partitioned dim: rows of one level less, or a plain dim if there is only one level.

    >>> import torch
    >>> words = Structure.from_lengths(torch.tensor([2, 1]), torch.tensor([1, 3, 2]))
    >>> take_component(torch.arange(6), words, 0, 0, "jt[i]")
    (tensor([0, 1, 2, 3]), Structure(2 > 4))
    """
    dim, rows = structure.dims[axis], structure.rows[axis]
    if rows.depth > 1:
        first, last = rows.host_offsets(0, why)[row : row + 2].tolist()
        inner, start, stop = rows.narrow(first, last, level=1, why=why)
        return values.narrow(dim, start, stop - start), structure.replace(axis, inner)
    start, size = int(rows.host_row_starts(why)[row]), int(rows.host_sizes(why)[row])
    piece, moved = _separate_columns(values.narrow(dim, start, size), dim, rows, row, why)
    return piece, without_axis(structure, axis, moved)


def take_all(values: Tensor, structure: Structure, why: str) -> list[MaybeRagged]:
    """The items of the first dim, in order.

    >>> import torch
    >>> [row.tolist() for row, _ in take_all(torch.arange(5), Structure.from_lengths(torch.tensor([3, 2])), "unbind")]
    [[0, 1, 2], [3, 4]]
    """
    if structure.ahead is not None:
        order = _after_first(values, structure)
        return [arranged(piece, order) for piece in take_all(values, structure.canonical, why)]
    rows = structure.rows[0]
    if structure.dims[0] > 0 or rows.depth > 1:
        return [take(values, structure, row, why) for row in range(count(values, structure))]
    sizes = rows.host_sizes(why).tolist()
    if rows.starts is None:
        pieces = list(values.split_with_sizes(sizes))
    else:
        pieces = [values[a : a + n] for a, n in zip(rows.host_row_starts(why).tolist(), sizes, strict=True)]
    shaped = [_separate_columns(piece, 0, rows, row, why) for row, piece in enumerate(pieces)]
    return [(piece, without_axis(structure, 0, moved)) for piece, moved in shaped]


def _after_first(values: Tensor, structure: Structure) -> list[int]:
    """The order of the dims after the first, which is the first in any order that a structure can have."""
    return [k - 1 for k in structure.order(values.dim())[1:]]


def without_axis(structure: Structure, axis: int, moved: int = 0) -> Structure | None:
    """The structure without one partitioned dim, later dims shifted by `moved`; None if no partitioned dim is left.

    >>> import torch
    >>> lengths = torch.tensor([3, 2])
    >>> both = Structure.independent(Structure.from_lengths(lengths), Structure.from_lengths(lengths, dim=1))
    >>> without_axis(both, 0).dims
    (1,)
    """
    assert structure.ahead is None
    left = [k for k in range(len(structure.rows)) if k != axis]
    if not left:
        return None
    return Structure(tuple(structure.rows[k] for k in left), tuple(structure.dims[k] + (moved if k > axis else 0) for k in left))


def shift_dims(structure: Structure, start: int, by: int) -> Structure:
    """The structure after dims were inserted (or removed) before dim `start` of the values: later partitioned dims shift.

    >>> import torch
    >>> shift_dims(Structure.from_lengths(torch.tensor([3, 2])), 0, 1).dims
    (1,)
    """
    assert structure.ahead is None
    return Structure(structure.rows, tuple(dim + by if dim >= start else dim for dim in structure.dims))


def _separate_columns(piece: Tensor, dim: int, rows: Rows, row: int, why: str) -> tuple[Tensor, int]:
    """A row with its columns as a separate dim, and by how much that shifted later dims."""
    if rows.columns is None:
        return piece, 0
    length, columns = (int(rows.host_lengths(level, why)[row]) for level in (rows.depth - 1, rows.depth))
    if not rows.packed:
        return piece.narrow(dim + 1, 0, columns), 0
    return piece.view(*piece.shape[:dim], length, columns, *piece.shape[dim + 1 :]), 1
