"""`permute`, and conversion to and from the order in which every ragged dim directly follows the dim that counts its rows.

In: values and their structure. Out: the same rows with permuted dims; a view, unless whole rows move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from serrate.errors import ShapeError
from serrate.tensor.moving import select_rows
from serrate.tensor.positions import compact_axis, coordinates, owners
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure

MaybeRagged = tuple[Tensor, Structure | None]
"""Values with their structure; None for a plain tensor."""

_STAYS = "a ragged dim must follow the dim that counts its rows"


def permute(values: Tensor, structure: Structure, order: Sequence[int]) -> tuple[Tensor, Structure]:
    """Permutes the dims.

    Regular dims, and a dim that counts rows together with its ragged dims, move without a copy; regular dims may come between
    the two. Dims that count nested rows can be swapped if every row has the same number of parts; that copies rows.

    >>> ranks = Structure.from_lengths(torch.tensor([[1, 2], [0, 1]]))
    >>> permute(torch.arange(4), ranks, (1, 0, 2))
    (tensor([0, 1, 2, 3]), Structure(2 > 4 > 4))
    >>> permute(torch.zeros(4, 8), Structure.from_lengths(torch.tensor([1, 3])), (0, 2, 1))[1]
    Structure(2 > 4, 1 dim before r0)
    """
    ndim = values.dim()
    count = len(structure.dims_of(ndim))
    places = [k % count if -count <= k < count else k for k in order]
    if sorted(places) != list(range(count)):
        raise ShapeError(f"permute takes each of the {count} dims once, got {tuple(order)}")
    there = structure.order(ndim)
    return _permuted(values, structure.canonical, [there[k] for k in places], tuple(order))


def arranged(piece: MaybeRagged, order: Sequence[int]) -> MaybeRagged:
    """Permutes the dims of a ragged or plain tensor.

    >>> arranged((torch.zeros(2, 3), None), (1, 0))[0].shape
    torch.Size([3, 2])
    """
    values, structure = piece
    if list(order) == list(range(len(order))):
        return piece
    return (values.permute(*order), None) if structure is None else permute(values, structure, order)


def inverse(order: Sequence[int]) -> list[int]:
    """The inverse of a permutation.

    >>> inverse((0, 2, 3, 1))
    [0, 3, 1, 2]
    """
    return sorted(range(len(order)), key=order.__getitem__)


def _permuted(values: Tensor, structure: Structure, places: list[int], asked: tuple[int, ...]) -> tuple[Tensor, Structure]:
    """`permute` for tensors in which every ragged dim directly follows the dim that counts its rows."""
    for axis in range(len(structure.rows)):
        dims = structure.dims_of(values.dim())
        own = [k for k, dim in enumerate(dims) if dim.axis == axis]
        found = [k for k in places if k in own]
        between = places[places.index(found[0]) : places.index(found[-1])]
        if any(dims[k].axis not in (None, axis) for k in between):
            raise ShapeError(
                f"permute: only regular dims may come between the dims {own}, which hold the same rows, got the order {asked}"
            )
        values, structure = _reordered(values, structure, axis, [k - own[0] for k in found], own[0])
        if structure.rows[axis].storage_dims > 1 and any(k not in own for k in between):
            values, structure = compact_axis(values, structure, axis, "permute")
    moved: list[int] = []
    axes: list[int] = []
    starts: list[int] = []
    ahead: list[list[int]] = []
    dims = structure.dims_of(values.dim())
    for place in places:
        dim = dims[place]
        if dim.axis is None:
            moved.append(dim.values_dim)
        elif dim.axis not in axes:
            first, rows = structure.dims[dim.axis], structure.rows[dim.axis]
            axes.append(dim.axis)
            starts.append(len(moved))
            ahead.append([])
            moved += range(first, first + rows.storage_dims)
        else:
            k = axes.index(dim.axis)
            ahead[k].append(len(moved) - starts[k] - structure.rows[dim.axis].storage_dims)
    if axes != sorted(axes) or tuple(starts) != structure.dims:
        structure = Structure(tuple(structure.rows[axis] for axis in axes), tuple(starts))
    return values if moved == sorted(moved) else values.permute(moved), structure.transposed(tuple(map(tuple, ahead)))


def _reordered(values: Tensor, structure: Structure, axis: int, order: list[int], first: int) -> tuple[Tensor, Structure]:
    """Permutes the dims of one partitioned dim: 0 counts the outermost rows, k is ragged by level k - 1."""
    rows = structure.rows[axis]
    changed = [k for k, other in enumerate(order) if k != other]
    if not changed:
        return values, structure
    if rows.columns is not None and changed == [rows.depth, rows.depth + 1]:
        values, structure = compact_axis(values, structure, axis, "permute")
        return _transpose_columns(values, structure, axis)
    if changed[-1] > rows.depth - 1:
        raise ShapeError(
            f"permute: dim {first + changed[-1]} is ragged and cannot come before the dim that counts its rows: {_STAYS}"
        )
    outermost = changed[-1] + 1
    sizes = [rows.num_rows(0), *(_equal_counts(rows, level, first + level + 1) for level in range(outermost - 1))]
    # Without a level in between, starts and lengths on the device describe the rows; otherwise the host must read offsets.
    work = rows if outermost == rows.depth and not rows.readable() else rows.host_rows("permute")
    ids = torch.arange(math.prod(sizes), device=work.device).view(sizes).permute(order[:outermost]).reshape(-1)
    sizes = [sizes[k] for k in order[:outermost]]
    outer = [torch.arange(math.prod(sizes[:k]) + 1, device=work.device) * sizes[k] for k in range(1, outermost)]
    found = select_rows(work, ids, level=outermost - 1, outer=outer, why="permute").to(values.device)
    for name in ("min", "max"):
        for level in range(rows.levels):
            known = sizes[level + 1] if level < outermost - 1 else rows.known(name, level)
            if known is not None and ids.numel():
                found.note(name, level, known)
    for fact in {("total", rows.depth - 1), rows.elements_fact}:
        if (known := rows.known(*fact)) is not None:
            found.note(*fact, known)
    return compact_axis(values, structure.replace(axis, found), axis, "permute")


def _equal_counts(rows: Rows, level: int, dim: int) -> int:
    least, most = rows.min_length(level, "permute"), rows.max_length(level, "permute")
    if least != most:
        raise ShapeError(
            f"permute: dim {dim} has between {least} and {most} parts, and only equal counts can be swapped: {_STAYS}"
        )
    return most


def _transpose_columns(values: Tensor, structure: Structure, axis: int) -> tuple[Tensor, Structure]:
    """Transposes every row with columns."""
    rows = structure.rows[axis]
    *outer, inner, columns = rows.offsets
    turned = Rows((*outer, columns), columns=inner)
    turned.note(*turned.elements_fact, values.shape[structure.dims[axis]])
    for name in ("min", "max"):
        for level, other in ((rows.depth - 1, rows.depth), (rows.depth, rows.depth - 1)):
            if (known := rows.known(name, level)) is not None:
                turned.note(name, other, known)
    row, _ = owners(turned, "permute")
    *_, column, place = coordinates(turned, "permute")
    source = rows.row_starts().long().index_select(0, row) + place * rows.counts().long().index_select(0, row) + column
    return values.index_select(structure.dims[axis], source), structure.replace(axis, turned)
