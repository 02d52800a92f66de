"""Copies of rows: packed back to back, spread out with padding, selected by number, gathered position by position.

In: values, rows, and which of them to copy. Out: new values and the rows that describe them. The engine installs compiled copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.tensor.rows import Rows, owners_and_places, rows_of, running_sum
from serrate.tensor.sync import host_copy, on_host
from serrate.tensor.torch_private import is_transformed

Mover = Callable[..., Tensor | None]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size: copies move bits, whatever the dtype."""

_movers: dict[str, Mover] = {}


def install(**movers: Mover) -> None:
    """Installs compiled copies, called once by the engine. A copy returns None for what torch must do instead."""
    _movers.update(movers)


def pack_runs(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, total: int, packed: Rows | None = None) -> Tensor | None:
    """Packs runs of a dim: `lengths[k]` positions from `starts[k]` for every k, back to back, `total` in all. Returns None if
    torch must do it. Pass the `packed` rows if they exist: they are not checked again, and arrays derived from their offsets are
    cached."""
    return _moved("pack_runs", values, dim, starts, lengths, total, packed)


def pad_runs(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, room: int, fill: complex) -> Tensor | None:
    """Pads the same runs to `room` positions each, with `fill`: the dim becomes two. Returns None if torch must do it."""
    return _moved("pad_runs", values, dim, starts, lengths, room, fill)


def unpad_rows(padded: Tensor, dim: int, packed: Rows, total: int) -> Tensor | None:
    """Packs rows that are padded to dim `dim + 1`, one for each position of `dim`, back to back: they become the rows `packed`.
    Returns None if `pack_runs` or torch must do it."""
    mover = _movers.get("unpad_rows")
    if mover is None or not (_plain(padded) and _plain(packed.offsets[0])):
        return None
    return mover(padded, dim, packed, total)


def _moved(name: str, values: Tensor, dim: int, starts: Tensor, lengths: Tensor, *rest: Any) -> Tensor | None:
    mover = _movers.get(name)
    if mover is None or not all(map(_plain, (values, starts, lengths))):
        return None
    return mover(values, dim, starts.contiguous(), lengths.contiguous(), *rest)


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory of a CPU or GPU: no gradient, no subclass, no transform."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if not (on_host(tensor) or tensor.is_cuda):
        return False
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or torch.compiler.is_compiling() or is_transformed(tensor))


def runs(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, total: int, step: int = 1) -> Tensor:
    """Runs of positions of a dim, back to back: `lengths[k]` positions from `starts[k]`, `step` apart.

    >>> runs(torch.arange(10), 0, torch.tensor([7, 0]), torch.tensor([2, 3]), 5, step=2)
    tensor([7, 9, 0, 2, 4])
    """
    moved = pack_runs(values, dim, starts, lengths, total) if step == 1 else None
    if moved is not None:
        return moved
    owner, place = owners_and_places(lengths, total)
    return values.index_select(dim, starts.long().index_select(0, owner) + place * step)


def total_of(boundaries: Tensor, why: str) -> int:
    """The last offset, read on the host.

    >>> import torch
    >>> total_of(torch.tensor([0, 2, 5]), "jt[rows]")
    5
    """
    return int(host_copy(boundaries[-1:], why))


def sum_of(lengths: Tensor, uniform: int | None, why: str) -> int:
    """The sum of the lengths, read on the host unless all rows have the same known length.

    >>> import torch
    >>> sum_of(torch.tensor([2, 2]), 2, "jt[rows]")
    4
    """
    return lengths.shape[0] * uniform if uniform is not None else total_of(running_sum(lengths), why)


def select_rows(rows: Rows, ids: Tensor, *, level: int, outer: Sequence[Tensor], why: str) -> Rows:
    """Selects rows `ids` of a level in place, with everything nested in them; `outer` are the offsets of the levels above.

    The number of rows on levels in between is read on the host: pass `host_rows` if there are any.

    >>> import torch
    >>> words = Rows((torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3, 4])))
    >>> last = select_rows(words, torch.tensor([1]), level=0, outer=(), why="jt[rows]")
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
    starts = rows.row_starts().index_select(0, ids)
    found = rows_of(offsets, depth, rows.packed, starts, rows.room, {})
    if all(level in rows._host for level in range(rows.levels)) and rows.device.type == "cpu":
        found._host.update(enumerate(offsets))
        found._memo["host starts"] = starts
    # Levels are matched by their distance from the innermost one. If all rows had one length, so do the selected ones.
    for own in range(level, rows.levels):
        length = rows.uniform(own)
        if length is not None and ids.shape[0]:
            for name in ("min", "max"):
                found.note(name, own - rows.levels + found.levels, length)
    return found


def gather_positions(
    values: Tensor, dim: int, rows: Rows, inner: Tensor, owner: Tensor, place: Tensor, why: str
) -> tuple[Tensor, Rows]:
    """New innermost rows, with offsets `inner`, gathered from the old ones: position `place` of row `owner` for each position.

    A position moves with all its columns.

    >>> import torch
    >>> inner, rows = torch.tensor([0, 1, 2]), Rows((torch.tensor([0, 2, 4]),))
    >>> gather_positions(torch.arange(4), 0, rows, inner, torch.tensor([0, 1]), torch.tensor([1, 0]), "jt[mask]")
    (tensor([1, 2]), 2 > 2)
    """
    offsets = _like(rows, [*rows.offsets[: rows.depth - 1], inner])
    if rows.columns is not None:
        offsets = _like(rows, [*offsets, rows.columns])
    found = rows_of(offsets, rows.depth, rows.packed, None, None, {})
    found.note("total", found.depth - 1, owner.shape[0])
    start = rows.row_starts().long().index_select(0, owner)
    if rows.columns is None or not rows.packed:
        return values.index_select(dim, start + place), found
    counts = rows.counts().long().index_select(0, owner)
    total = sum_of(counts, rows.uniform(rows.depth), why)
    found.note(*found.elements_fact, total)
    return runs(values, dim, start + place * counts, counts, total), found


def _like(rows: Rows, chain: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dtype = rows.offsets[0].dtype
    return tuple(level.to(dtype) for level in chain)
