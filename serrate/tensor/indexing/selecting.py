"""One position of a dim: `jt[i]`, `jt[:, i]`, `jt[..., i]`; the dim goes away.

In: values, their structure, a dim and a number. Out: values and structure without that dim: a view where what is left lies
side by side or can be told by starts and lengths, else a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serrate.errors import RowError
from serrate.tensor.indexing.picking import picked
from serrate.tensor.rows import Rows, owners_and_places, rows_of
from serrate.tensor.structure import Dim, Structure
from serrate.tensor.taking import Piece, shifted, take_component, without


def select(values: Tensor, structure: Structure | None, dim: Dim, index: int, why: str) -> Piece:
    """What is at one position of a dim; of every row, if the dim is ragged.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> select(jt.values, jt.structure, jt.dims[1], -1, "jt[:, i]")
    (tensor([2, 4]), None)
    """
    if structure is None or dim.axis is None:
        size = values.shape[dim.values_dim]
        _check(index, size, "position", f"the dim has {size}")
        rest = None if structure is None else shifted(structure, dim.values_dim + 1, -1)
        return values.select(dim.values_dim, index), rest
    rows = structure.rows[dim.axis]
    if dim.level is None:
        count = rows.num_rows(0)
        _check(index, count, "row", f"the tensor has {count} rows")
        return take_component(values, structure, dim.axis, index % count, why)
    _check_rows(rows, dim.level, index, why)
    if dim.level < rows.depth - 1:
        return values, structure.replace(dim.axis, _part(rows, dim.level, index, why).to(values.device))
    return _position(values, structure, dim.axis, dim.level, index, why)


def _part(rows: Rows, level: int, index: int, why: str) -> Rows:
    # With one level below, what the parts hold is told by starts and lengths; more levels are host facts.
    work = rows if level == rows.depth - 2 and not rows.readable() else rows.at_home(why)
    ids = (work.offsets[level][:-1] if index >= 0 else work.offsets[level][1:]).long() + index
    return picked(work, ids, level=level + 1, outer=work.offsets[:level], why=why)


def _position(values: Tensor, structure: Structure, axis: int, level: int, index: int, why: str) -> Piece:
    dim, rows = structure.dims[axis], structure.rows[axis]
    counted = index if index >= 0 else rows.lengths(level).long() + index
    if rows.columns is None:
        values = values.index_select(dim, rows.where().long() + counted)
        if rows.depth == 1:
            return values, without(structure, axis)
        return values, structure.replace(axis, _kept(rows, rows.depth - 1))
    if level == rows.depth:
        return _column(values, structure, axis, index, why)
    counts = rows.offsets[rows.depth]
    offsets = (*rows.offsets[: rows.depth - 1], counts)
    if rows.packed:
        starts = rows.where().long() + counted * rows.counts().long()
        return values, structure.replace(axis, rows_of(offsets, rows.depth, True, starts, None, {}))
    width = values.shape[dim + 1]
    starts = torch.arange(rows.num_rows(rows.depth - 1), device=values.device) * width
    found = rows_of(offsets, rows.depth, True, starts, width, {})
    values = values.index_select(dim, rows.where().long() + counted).flatten(dim, dim + 1)
    return values, shifted(structure.replace(axis, found), dim + 1, -1)


def _column(values: Tensor, structure: Structure, axis: int, index: int, why: str) -> Piece:
    dim, rows = structure.dims[axis], structure.rows[axis]
    if not rows.packed and index >= 0:
        found = rows_of(rows.offsets[: rows.depth], rows.depth, True, rows.starts, rows.room, {})
        _note_kept(rows, found)
        return values.select(dim + 1, index), shifted(structure.replace(axis, found), dim + 1, -1)
    owner, place = owners_and_places(rows.inner_lengths(), rows.total(rows.depth - 1, why))
    start, count = rows.where().long().index_select(0, owner), rows.counts().long().index_select(0, owner)
    column = index if index >= 0 else count + index
    rest = structure.replace(axis, _kept(rows, rows.depth))
    if rows.packed:
        return values.index_select(dim, start + place * count + column), rest
    width = values.shape[dim + 1]
    flat = values.flatten(dim, dim + 1).index_select(dim, (start + place) * width + column)
    return flat, shifted(rest, dim + 1, -1)


def _kept(rows: Rows, levels: int) -> Rows:
    found = rows_of(rows.offsets[:levels], levels, True, None, None, {})
    _note_kept(rows, found)
    found.note("total", levels - 1, rows.total(levels - 1, "jt[:, i]"))
    return found


def _note_kept(rows: Rows, found: Rows) -> None:
    for name in ("min", "max", "total"):
        for level in range(found.levels):
            if (known := rows.known(name, level)) is not None:
                found.note(name, level, known)
    found._host.update((level, host) for level, host in rows._host.items() if level < found.levels)


def _check(index: int, size: int, what: str, has: str) -> None:
    if not -size <= index < size:
        raise RowError(f"{what} {index} does not exist: {has}")


def _check_rows(rows: Rows, level: int, index: int, why: str) -> None:
    needed = index + 1 if index >= 0 else -index
    known = rows.known("min", level)
    if rows.num_rows(level) == 0 or (known is not None and known >= needed) or rows.min_length(level, why) >= needed:
        return
    lengths = rows.host_lengths(level, why)
    row = int((lengths < needed).nonzero()[0])
    raise RowError(
        f"position {index} does not exist in every row: row {row} has length {int(lengths[row])}; "
        "take a range, which may be shorter, or the padded values"
    )
