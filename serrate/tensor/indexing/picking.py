"""Rows of any level picked by number, and positions copied together from wherever they are.

In: rows, and the numbers of those wanted. Out: rows that describe them in place, by starts and lengths; or the values of other
rows, back to back.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from serrate.tensor.moving import runs
from serrate.tensor.rows import Rows, owners_and_places, rows_of, running_sum
from serrate.tensor.sync import host_copy


def total_of(boundaries: Tensor, why: str) -> int:
    """What offsets end at: a host fact.

    >>> import torch
    >>> total_of(torch.tensor([0, 2, 5]), "jt[rows]")
    5
    """
    return int(host_copy(boundaries[-1:], why))


def sum_of(lengths: Tensor, uniform: int | None, why: str) -> int:
    """How long rows of these lengths are together: a host fact, unless all have one length that is known.

    >>> import torch
    >>> sum_of(torch.tensor([2, 2]), 2, "jt[rows]")
    4
    """
    return lengths.shape[0] * uniform if uniform is not None else total_of(running_sum(lengths), why)


def picked(rows: Rows, ids: Tensor, *, level: int, outer: Sequence[Tensor], why: str) -> Rows:
    """Rows `ids` of a level, in place; `outer` are the offsets of the levels that count them.

    Everything that they hold comes with them. How many rows there are on the levels in between is a host fact: give rows
    that are at home where that matters.

    >>> import torch
    >>> words = Rows((torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3, 4])))
    >>> last = picked(words, torch.tensor([1]), level=0, outer=(), why="jt[rows]")
    >>> last.offsets, last.starts
    ((tensor([0, 1]), tensor([0, 1])), tensor([3]))
    """
    chain: list[Tensor] = []
    for inner in range(level, rows.depth - 1):
        lengths = rows.lengths(inner).index_select(0, ids)
        owner, place = owners_and_places(lengths, sum_of(lengths, rows.uniform(inner), why))
        ids = rows.offsets[inner].long().index_select(0, ids).index_select(0, owner) + place
        chain.append(running_sum(lengths))
    chain.append(running_sum(rows.inner_lengths().index_select(0, ids)))
    depth = len(outer) + len(chain)
    if rows.columns is not None:
        chain.append(running_sum(rows.counts().index_select(0, ids)))
    offsets = _like(rows, [*outer, *chain])
    starts = rows.where().index_select(0, ids)
    found = rows_of(offsets, depth, rows.packed, starts, rows.room, {})
    if all(level in rows._host for level in range(rows.levels)) and rows.device.type == "cpu":
        found._host.update(enumerate(offsets))
        found._memo["host starts"] = starts
    # The levels keep their distance from the innermost one; what all rows had, those picked have.
    for own in range(level, rows.levels):
        length = rows.uniform(own)
        if length is not None and ids.shape[0]:
            for name in ("min", "max"):
                found.note(name, own - rows.levels + found.levels, length)
    return found


def regathered(
    values: Tensor, dim: int, rows: Rows, inner: Tensor, owner: Tensor, place: Tensor, why: str
) -> tuple[Tensor, Rows]:
    """Other innermost rows (of offsets `inner`) made of positions of the old ones: position `place` of row `owner` for each.

    Whole positions move, with all columns they have.

    >>> import torch
    >>> inner, rows = torch.tensor([0, 1, 2]), Rows((torch.tensor([0, 2, 4]),))
    >>> regathered(torch.arange(4), 0, rows, inner, torch.tensor([0, 1]), torch.tensor([1, 0]), "jt[mask]")
    (tensor([1, 2]), 2 > 2)
    """
    offsets = _like(rows, [*rows.offsets[: rows.depth - 1], inner])
    if rows.columns is not None:
        offsets = _like(rows, [*offsets, rows.columns])
    found = rows_of(offsets, rows.depth, rows.packed, None, None, {})
    found.note("total", found.depth - 1, owner.shape[0])
    start = rows.where().long().index_select(0, owner)
    if rows.columns is None or not rows.packed:
        return values.index_select(dim, start + place), found
    counts = rows.counts().long().index_select(0, owner)
    total = sum_of(counts, rows.uniform(rows.depth), why)
    found.note(*found.elements_fact, total)
    return runs(values, dim, start + place * counts, counts, total), found


def _like(rows: Rows, chain: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dtype = rows.offsets[0].dtype
    return tuple(level.to(dtype) for level in chain)
