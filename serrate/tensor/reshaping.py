"""`flatten`, `unbind`, `split`, `chunk`.

In: values and their structure. Out: the same rows with other dims, or parts of them; views if the storage allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from serrate.errors import ShapeError
from serrate.tensor.components import dims_of, shift_dims, take_all, without_axis
from serrate.tensor.indexing.reading import getitem
from serrate.tensor.indexing.slicing import slice_dim
from serrate.tensor.permuting import MaybeRagged, arranged
from serrate.tensor.positions import compact_axis
from serrate.tensor.rows import Rows, owners_and_places, rows_of, running_sum
from serrate.tensor.structure import Structure


def flatten(values: Tensor, structure: Structure, start: int, end: int) -> MaybeRagged:
    """Flattens dims `start` to `end`: drops a level, joins all rows, or merges a ragged dim with the regular dim after it.

    >>> words = Structure.from_lengths(torch.tensor([2, 1]), torch.tensor([1, 3, 2]))
    >>> flatten(torch.arange(6), words, 1, 2)[1].lengths()
    tensor([4, 2])
    """
    there = structure.order(values.dim())
    merged = there[start : end + 1]
    if list(merged) != list(range(merged[0], merged[0] + len(merged))):
        raise ShapeError(
            f"flatten: dims {start} to {end} are not adjacent in the values: permute them so that the ragged one directly "
            "follows the dim that counts its rows"
        )
    piece = _flattened(values, structure.canonical, merged[0], merged[-1])
    left = [k for k in there if not merged[0] < k <= merged[-1]]
    return arranged(piece, [k - (len(merged) - 1) * (k > merged[0]) for k in left])


def _flattened(values: Tensor, structure: Structure, start: int, end: int) -> MaybeRagged:
    piece: MaybeRagged = (values, structure)
    # From the last to the first, because a ragged dim absorbs the dims after it.
    for at in reversed(range(start, end)):
        piece = _merged(*piece, at)
    return piece


def _merged(values: Tensor, structure: Structure | None, at: int) -> MaybeRagged:
    """Merges dims `at` and `at + 1`."""
    outer, inner = dims_of(values, structure)[at : at + 2]
    if structure is None or (outer.axis is None and inner.axis is None):
        shifted = None if structure is None else shift_dims(structure, inner.values_dim, -1)
        return values.flatten(outer.values_dim, inner.values_dim), shifted
    if inner.axis is None and outer.axis is not None:
        return _with_regular(values, structure, outer.axis)
    if outer.axis != inner.axis or inner.axis is None or inner.level is None:
        raise ShapeError(f"flatten: dim {at + 1} counts rows, and dim {at} is not one of theirs: permute it away first")
    axis, level = inner.axis, inner.level
    rows = structure.rows[axis]
    if level == rows.depth:
        values, structure = compact_axis(values, structure, axis, "flatten")
        rows = structure.rows[axis]
        return values, structure.replace(axis, _replaced(rows.depth, (*rows.offsets[: rows.depth - 1], rows.blocks())))
    if rows.depth == 1:
        values, structure = compact_axis(values, structure, axis, "flatten")
        rows = structure.rows[axis]
        if rows.columns is None:
            return values, without_axis(structure, axis)
        owner, _ = owners_and_places(rows.inner_lengths(), rows.total(0, "flatten"))
        return values, structure.replace(axis, _replaced(1, (running_sum(rows.counts().index_select(0, owner)),)))
    if level == 0:
        return values, structure.replace(axis, rows.below(1))
    if level == rows.depth - 1:
        if rows.columns is not None:
            raise ShapeError(
                f"flatten: the rows of dim {at + 1} have columns of their own: flatten dims {at + 1} and {at + 2} first"
            )
        values, structure = compact_axis(values, structure, axis, "flatten")
        rows = structure.rows[axis]
    composed = rows.offsets[level].index_select(0, rows.offsets[level - 1].long())
    offsets = (*rows.offsets[: level - 1], composed, *rows.offsets[level + 1 :])
    found = rows_of(offsets, rows.depth - 1, rows.packed, rows.starts, rows.room, {})
    if (known := rows.known(*rows.extent_fact)) is not None:
        found.note(*found.extent_fact, known)
    return values, structure.replace(axis, found)


def _with_regular(values: Tensor, structure: Structure, axis: int) -> MaybeRagged:
    """Merges the last ragged dim with the regular dim after it."""
    values, structure = compact_axis(values, structure, axis, "flatten")
    dim, rows = structure.dims[axis], structure.rows[axis]
    size = values.shape[dim + 1]
    values = values.flatten(dim, dim + 1)
    offsets = (*rows.offsets[:-1], rows.offsets[-1].long() * size)
    found = _replaced(rows.depth, offsets)
    found.note(*found.elements_fact, values.shape[dim])
    return values, shift_dims(structure.replace(axis, found), dim + 1, -1)


def _replaced(depth: int, offsets: Sequence[Tensor]) -> Rows:
    dtypes = {level.dtype for level in offsets}
    return rows_of(tuple(o if len(dtypes) == 1 else o.long() for o in offsets), depth, True, None, None, {})


def movedim_order(count: int, source: int | Sequence[int], destination: int | Sequence[int]) -> tuple[int, ...]:
    """The order of `count` dims after `torch.movedim`.

    >>> movedim_order(3, 0, -1)
    (1, 2, 0)
    """
    # Let torch apply its rules to a tensor of distinct sizes, which identify the dims afterwards.
    sizes = torch.empty(tuple(range(count)), device="meta")
    taken, put = ([k] if isinstance(k, int) else list(k) for k in (source, destination))
    try:
        return tuple(torch.movedim(sizes, taken, put).shape)
    except (IndexError, RuntimeError) as error:
        raise ShapeError(f"movedim: dims {source} of {count} cannot go to {destination}: {error}") from None


def unbind(values: Tensor, structure: Structure, at: int) -> list[MaybeRagged]:
    """The items of a dim, in order; the dim is removed.

    >>> [row.tolist() for row, _ in unbind(torch.arange(3), Structure.from_lengths(torch.tensor([2, 1])), 0)]
    [[0, 1], [2]]
    """
    if at == 0:
        return take_all(values, structure, "unbind")
    size = _size(values, structure, at, "unbind")
    return [getitem(values, structure, (slice(None),) * at + (index,)) for index in range(size)]


def split(values: Tensor, structure: Structure, sizes: int | Sequence[int], at: int) -> list[MaybeRagged]:
    """Splits a dim into parts of one size (the last may be smaller) or of the given sizes.

    >>> pieces = split(torch.arange(3), Structure.from_lengths(torch.tensor([1, 1, 1])), 2, 0)
    >>> [piece.tolist() for piece, _ in pieces]
    [[0, 1], [2]]
    """
    wanted = sizes if isinstance(sizes, int) else list(sizes)
    return split_like(values, structure, at, "split", lambda whole: torch.split(whole, wanted))


def split_like(
    values: Tensor, structure: Structure, at: int, why: str, cut: Callable[[Tensor], Sequence[Tensor]]
) -> list[MaybeRagged]:
    """Splits a dim as `cut` splits a plain 1-D tensor of the same size.

    >>> jt = Structure.from_lengths(torch.tensor([1, 1, 1])), torch.arange(3)
    >>> [piece.tolist() for piece, _ in split_like(jt[1], jt[0], 0, "chunk", lambda whole: whole.chunk(2))]
    [[0, 1], [2]]
    """
    size = _size(values, structure, at, why)
    # Let torch size the parts; a tensor without data is enough.
    try:
        pieces = cut(torch.empty(size, device="meta"))
    except (RuntimeError, ValueError, IndexError) as error:
        raise ShapeError(f"{why}: dim {at} of size {size} cannot be split like this: {error}") from None
    bounds = [0]
    for piece in pieces:
        bounds.append(bounds[-1] + piece.shape[0])
    dim = dims_of(values, structure)[at]
    return [slice_dim(values, structure, dim, slice(a, b), why) for a, b in pairwise(bounds)]


def _size(values: Tensor, structure: Structure, at: int, why: str) -> int:
    dim = dims_of(values, structure)[at]
    if dim.level is not None:
        raise ShapeError(f"{why}: dim {at} is ragged and has a different size in every row: slice it, as in jt[:, :k]")
    return values.shape[dim.values_dim] if dim.axis is None else structure.rows[dim.axis].num_rows(0)
