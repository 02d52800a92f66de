"""One position or a range of a dim: `jt[i]`, `jt[:, i]`, `jt[:, a:b]`, `jt[rows]`.

In: values, their structure, a dim and its key. Out: the selected values and their structure, views if the storage allows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from serrate.errors import CallError, RowError, ShapeError
from serrate.tensor.components import shift_dims, take_component, without_axis
from serrate.tensor.moving import gather_positions, runs, select_rows, sum_of
from serrate.tensor.permuting import MaybeRagged
from serrate.tensor.positions import compact_axis
from serrate.tensor.rows import Rows, owners_and_places, rows_of, running_sum
from serrate.tensor.structure import Dim, Structure
from serrate.tensor.sync import host_copy


def select(values: Tensor, structure: Structure | None, dim: Dim, index: int, why: str) -> MaybeRagged:
    """Selects one index of a dim, in every row if the dim is ragged, and removes the dim.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> select(jt.values, jt.structure, jt.dims[1], -1, "jt[:, i]")
    (tensor([2, 4]), None)
    """
    if structure is None or dim.axis is None:
        size = values.shape[dim.values_dim]
        _check(index, size, "position", f"the dim has {size}")
        rest = None if structure is None else shift_dims(structure, dim.values_dim + 1, -1)
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
    # With one level below, starts and lengths on the device describe the parts; with more levels the host must read offsets.
    work = rows if level == rows.depth - 2 and not rows.readable() else rows.host_rows(why)
    ids = (work.offsets[level][:-1] if index >= 0 else work.offsets[level][1:]).long() + index
    return select_rows(work, ids, level=level + 1, outer=work.offsets[:level], why=why)


def _position(values: Tensor, structure: Structure, axis: int, level: int, index: int, why: str) -> MaybeRagged:
    dim, rows = structure.dims[axis], structure.rows[axis]
    counted = index if index >= 0 else rows.lengths(level).long() + index
    if rows.columns is None:
        values = values.index_select(dim, rows.row_starts().long() + counted)
        if rows.depth == 1:
            return values, without_axis(structure, axis)
        return values, structure.replace(axis, _kept(rows, rows.depth - 1))
    if level == rows.depth:
        return _column(values, structure, axis, index, why)
    counts = rows.offsets[rows.depth]
    offsets = (*rows.offsets[: rows.depth - 1], counts)
    if rows.packed:
        starts = rows.row_starts().long() + counted * rows.counts().long()
        return values, structure.replace(axis, rows_of(offsets, rows.depth, True, starts, None, {}))
    width = values.shape[dim + 1]
    starts = torch.arange(rows.num_rows(rows.depth - 1), device=values.device) * width
    found = rows_of(offsets, rows.depth, True, starts, width, {})
    values = values.index_select(dim, rows.row_starts().long() + counted).flatten(dim, dim + 1)
    return values, shift_dims(structure.replace(axis, found), dim + 1, -1)


def _column(values: Tensor, structure: Structure, axis: int, index: int, why: str) -> MaybeRagged:
    dim, rows = structure.dims[axis], structure.rows[axis]
    if not rows.packed and index >= 0:
        found = rows_of(rows.offsets[: rows.depth], rows.depth, True, rows.starts, rows.room, {})
        _note_kept(rows, found)
        return values.select(dim + 1, index), shift_dims(structure.replace(axis, found), dim + 1, -1)
    owner, place = owners_and_places(rows.inner_lengths(), rows.total(rows.depth - 1, why))
    start, count = rows.row_starts().long().index_select(0, owner), rows.counts().long().index_select(0, owner)
    column = index if index >= 0 else count + index
    rest = structure.replace(axis, _kept(rows, rows.depth))
    if rows.packed:
        return values.index_select(dim, start + place * count + column), rest
    width = values.shape[dim + 1]
    flat = values.flatten(dim, dim + 1).index_select(dim, (start + place) * width + column)
    return flat, shift_dims(rest, dim + 1, -1)


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
        "use a slice, which may be shorter, or the padded values"
    )


_FAR = 2**62
"""Past the end of every row, but small enough that adding a length does not overflow."""


@dataclass(frozen=True)
class RowSlice:
    """A slice with int bounds; `start` and `stop` may be None, as in Python.

    >>> RowSlice.of(slice(-2, None))
    RowSlice(start=-2, stop=None, step=1)
    """

    start: int | None
    stop: int | None
    step: int

    @classmethod
    def of(cls, key: slice) -> RowSlice:
        """Checks and converts a Python slice.

        >>> RowSlice.of(slice(None, None, 0))
        Traceback (most recent call last):
        serrate.errors.ShapeError: a slice cannot have step 0
        """
        start, stop, step = (None if part is None else operator.index(part) for part in (key.start, key.stop, key.step))
        if step == 0:
            raise ShapeError("a slice cannot have step 0")
        return cls(start, stop, 1 if step is None else step)

    def whole(self) -> bool:
        """Whether it selects everything."""
        return self.start in (None, 0) and self.stop is None and self.step == 1

    def of_rows(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Start and length of the slice in rows of these lengths: `slice.indices` for all rows at once.

        >>> RowSlice.of(slice(-2, None)).of_rows(torch.tensor([1, 5]))
        (tensor([0, 3]), tensor([1, 2]))
        """
        lengths = lengths.long()
        forward = self.step > 0
        low, high = (0, lengths) if forward else (-1, lengths - 1)

        def bound(given: int | None, otherwise: Tensor) -> Tensor:
            if given is None:
                return otherwise
            given = max(-_FAR, min(given, _FAR))
            there = lengths + given if given < 0 else torch.full_like(lengths, given)
            return torch.minimum(there.clamp(min=low), high)

        least = torch.full_like(lengths, low)
        first = bound(self.start, least if forward else high)
        last = bound(self.stop, high if forward else least)
        span = last - first if forward else first - last
        step = abs(self.step)
        return first, ((span + step - 1) // step).clamp(min=0)

    def length_of(self, length: int) -> int:
        """The number of positions it selects from a row of this length."""
        return len(range(length)[self.start : self.stop : self.step])

    def monotone(self) -> bool:
        """Whether it selects no less from a longer row, so that the longest row stays the longest."""
        start, stop = (self.start, self.stop) if self.step > 0 else (self.stop, self.start)
        return not (start is not None and start < 0 and stop is not None and stop >= 0)


def slice_dim(values: Tensor, structure: Structure | None, dim: Dim, key: slice, why: str) -> MaybeRagged:
    """Slices one dim.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> slice_dim(jt.values, jt.structure, jt.dims[1], slice(1), "jt[:, a:b]")
    (tensor([0, 1, 2, 3, 4]), Structure(2 > ?, with gaps))
    """
    part = RowSlice.of(key)
    if part.whole():
        return values, structure
    if structure is None or dim.axis is None:
        return _regular(values, dim.values_dim, part), structure
    rows, where = structure.rows[dim.axis], structure.dims[dim.axis]
    if dim.level is None:
        return _components(values, structure, dim.axis, part, why)
    if dim.level < rows.depth - 1:
        return _parts(values, structure, dim.axis, dim.level, part, why)
    if dim.level == rows.depth:
        values, rows = _columns(values, where, rows, part, why)
        return values, shift_dims(
            structure.replace(dim.axis, rows), where + 1, rows.storage_dims - structure.rows[dim.axis].storage_dims
        )
    if part.step == 1:
        return values, structure.replace(dim.axis, _in_place(rows, part))
    first, lengths = part.of_rows(rows.inner_lengths())
    owner, place = owners_and_places(lengths, sum_of(lengths, _uniform(rows, dim.level, part), why))
    place = first.index_select(0, owner) + place * part.step
    values, rows = gather_positions(values, where, rows, running_sum(lengths), owner, place, why)
    return values, structure.replace(dim.axis, rows)


def slice_rows(values: Tensor, structure: Structure, axis: int, start: int, stop: int, why: str) -> MaybeRagged:
    """Components `start` to `stop` of a partitioned dim, without a copy.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> slice_rows(jt.values, jt.structure, 0, 1, 2, "split")
    (tensor([3, 4]), Structure(1 > 2))
    """
    part, first, last = structure.rows[axis].narrow(start, stop, why=why)
    return values.narrow(structure.dims[axis], first, last - first), structure.replace(axis, part)


def _regular(values: Tensor, dim: int, part: RowSlice) -> Tensor:
    if part.step > 0:
        return values[(*(slice(None),) * dim, slice(part.start, part.stop, part.step))]
    taken = range(values.shape[dim])[part.start : part.stop : part.step]
    return values.index_select(dim, torch.tensor(list(taken), dtype=torch.int64, device=values.device))


def _components(values: Tensor, structure: Structure, axis: int, part: RowSlice, why: str) -> MaybeRagged:
    rows = structure.rows[axis]
    taken = range(rows.num_rows(0))[part.start : part.stop : part.step]
    if part.step == 1:
        return slice_rows(values, structure, axis, taken.start, max(taken.start, taken.stop), why)
    found = pick_rows(values, structure, axis, torch.tensor(list(taken), dtype=torch.int64, device="cpu"), why)
    return found if part.step > 0 else compact_axis(*found, axis, why)


def pick_rows(values: Tensor, structure: Structure, axis: int, ids: Tensor, why: str) -> tuple[Tensor, Structure]:
    """Selects components of a partitioned dim by number (on the CPU, in any order); the result describes them in place.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [1, 2, 2])
    >>> pick_rows(jt.values, jt.structure, 0, torch.tensor([0, 2]), "jt[rows]")
    (tensor([0, 1, 2, 3, 4]), Structure(2 > ?, with gaps))
    """
    rows = structure.rows[axis]
    found = select_rows(rows.host_rows(why), ids, level=0, outer=(), why=why)
    return values, structure.replace(axis, found.to(values.device))


def pick_positions(values: Tensor, structure: Structure, axis: int, level: int, key: Tensor, why: str) -> MaybeRagged:
    """Selects the same positions of every row, by number in any order; negative numbers count from the end of each row.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> pick_positions(jt.values, jt.structure, 0, 0, torch.tensor([0, -1]), "jt[:, rows]")[0].tolist()
    [[0, 2], [3, 4]]
    """
    rows, dim = structure.rows[axis], structure.dims[axis]
    if key.dtype == torch.bool or key.dim() != 1:
        raise CallError(
            f"{why}: a ragged dim takes an int, a slice, a ragged mask or position numbers of one dim, got a {key.dtype} tensor "
            f"of shape {tuple(key.shape)}"
        )
    if rows.columns is not None and level >= rows.depth - 1:
        raise CallError(
            f"{why}: rows and columns of a product take an int, a slice or a ragged mask; index positions one by one, or in a "
            "traced function"
        )
    farthest = max(host_copy(key, why).tolist(), key=lambda index: index + 1 if index >= 0 else -index, default=None)
    if farthest is not None:
        _check_rows(rows, level, farthest, why)
    work = rows if level == rows.depth - 1 or (level == rows.depth - 2 and not rows.readable()) else rows.host_rows(why)
    key = key.long().to(work.device)
    lengths = work.lengths(level).long()
    place = torch.where(key >= 0, key, lengths[:, None] + key)
    if level < rows.depth - 1:
        ids = (work.offsets[level][:-1].long()[:, None] + place).flatten()
        outer = (*work.offsets[:level], running_sum(torch.full_like(lengths, len(key))))
        found = select_rows(work, ids, level=level + 1, outer=outer, why=why)
        return compact_axis(values, structure.replace(axis, found.to(values.device)), axis, why)
    taken = values.index_select(dim, (rows.row_starts().long()[:, None] + place).flatten())
    taken = taken.view(*taken.shape[:dim], *place.shape, *taken.shape[dim + 1 :])
    left = without_axis(structure, axis) if rows.depth == 1 else structure.replace(axis, _kept(rows, rows.depth - 1))
    return taken, None if left is None else shift_dims(left, dim + 1, 1)


def _parts(values: Tensor, structure: Structure, axis: int, level: int, part: RowSlice, why: str) -> MaybeRagged:
    rows = structure.rows[axis]
    uniform = _uniform(rows, level, part)
    work = rows if uniform is not None and not rows.readable() else rows.host_rows(why)
    first, lengths = part.of_rows(work.lengths(level))
    owner, place = owners_and_places(lengths, sum_of(lengths, uniform, why))
    ids = (work.offsets[level][:-1] + first).long().index_select(0, owner) + place * part.step
    found = select_rows(work, ids, level=level + 1, outer=(*work.offsets[:level], running_sum(lengths)), why=why)
    _note_cut(rows, found, level, part)
    whole = structure.replace(axis, found.to(values.device))
    return (values, whole) if part.step > 0 else compact_axis(values, whole, axis, why)


def _in_place(rows: Rows, part: RowSlice) -> Rows:
    level = rows.depth - 1
    first, lengths = part.of_rows(rows.inner_lengths())
    where = rows.row_starts()
    starts = where + (first if rows.columns is None or not rows.packed else first * rows.counts())
    offsets = list(rows.offsets)
    offsets[level] = running_sum(lengths).to(rows.offsets[0].dtype)
    # Rows that keep their starts keep their space in padded storage.
    room = rows.room if part.start in (None, 0) else None
    found = rows_of(tuple(offsets), rows.depth, rows.packed, starts.to(where.dtype), room, {})
    _note_cut(rows, found, level, part)
    return found


def _columns(values: Tensor, dim: int, rows: Rows, part: RowSlice, why: str) -> tuple[Tensor, Rows]:
    first, counts = part.of_rows(rows.counts())
    columns = running_sum(counts).to(rows.offsets[0].dtype)
    offsets = (*rows.offsets[: rows.depth], columns)
    if not rows.packed and part.step > 0 and (part.start is None or part.start >= 0):
        # Every row's columns start at the same index of the next dim, so one slice of that dim serves all rows.
        found = rows_of(offsets, rows.depth, False, rows.starts, rows.room, {})
        _note_cut(rows, found, rows.depth, part)
        return _regular(values, dim + 1, RowSlice(part.start, None, part.step)), found
    found = rows_of(offsets, rows.depth, True, None, None, {})
    _note_cut(rows, found, rows.depth, part)
    owner, place = owners_and_places(rows.inner_lengths(), rows.total(rows.depth - 1, why))
    start = rows.row_starts().long().index_select(0, owner)
    if rows.packed:
        start += place * rows.counts().index_select(0, owner)
    else:
        start = (start + place) * values.shape[dim + 1]
        values = values.flatten(dim, dim + 1)
    lengths = counts.index_select(0, owner)
    total = sum_of(lengths, _uniform(rows, rows.depth, part), why)
    found.note(*found.elements_fact, total)
    return runs(values, dim, start + first.index_select(0, owner), lengths, total, part.step), found


def _uniform(rows: Rows, level: int, part: RowSlice) -> int | None:
    length = rows.uniform(level)
    return None if length is None else part.length_of(length)


def _note_cut(rows: Rows, found: Rows, level: int, part: RowSlice) -> None:
    """Carries over known lengths: of levels that were not sliced, and of the sliced one if its longest row stays the longest."""
    for name in ("min", "max"):
        for own in range(rows.levels):
            known = rows.known(name, own)
            if known is None or (own == level and not part.monotone()) or (own > level and level < rows.depth - 1):
                continue
            found.note(name, own, part.length_of(int(known)) if own == level else known)
    if level == rows.depth and (known := rows.known("total", rows.depth - 1)) is not None:
        found.note("total", rows.depth - 1, known)
