"""Rows back to back, and the same rows each padded to one length.

In: values with their structure, or padded values with a structure. Out: the other of the two, by one indexed copy for each
partitioned dim, through which gradients flow; there is no loop over rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serrate.errors import DtypeError, ShapeError, StructureError
from serrate.tensor.positions import compacted, in_box
from serrate.tensor.structure import Structure


def pad(values: Tensor, structure: Structure, fill: complex, room: int | None = None) -> Tensor:
    """Values `[total, *inner]` as `[B, L, *inner]`, or `[G, parts, L, *inner]` for two levels; holes hold `fill`.

    `room` is what the innermost rows of the last ragged dim get, if not the length of the longest; none may be longer.

    >>> pad(torch.tensor([1, 2, 3]), Structure.from_lengths(torch.tensor([1, 2])), fill=0)
    tensor([[1, 0],
            [2, 3]])
    """
    _check_fill(values.dtype, fill)
    why = "to_padded"
    # From the last dim to the first, so that the dims before stay where they are.
    last = structure.rows[-1]
    for dim, rows in reversed(list(zip(structure.dims, structure.rows, strict=True))):
        extents = tuple(
            room if room is not None and rows is last and level == rows.levels - 1 else rows.max_length(level, why)
            for level in range(rows.levels)
        )
        box = (rows.num_rows(0), *extents)
        packed = compacted(values, dim, rows, why)
        before, after = packed.shape[:dim], packed.shape[dim + 1 :]
        flat = packed.new_full((*before, math.prod(box), *after), fill)
        values = flat.index_copy(dim, in_box(rows, extents, why), packed).view(*before, *box, *after)
    return values


def unpad(padded: Tensor, structure: Structure) -> Tensor:
    """The values of the structure's rows back to back, taken out of padded values whose rows may be longer than the longest.

    >>> unpad(torch.tensor([[1, 0, 0], [2, 3, 0]]), Structure.from_lengths(torch.tensor([1, 2])))
    tensor([1, 2, 3])
    """
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        extents = tuple(padded.shape[dim + 1 : dim + 1 + rows.levels])
        padded = padded.flatten(dim, dim + rows.levels).index_select(dim, in_box(rows, extents, "from_padded"))
    return padded


def check_padded(padded: Tensor, structure: Structure, *, read_lengths: bool) -> None:
    """Checks that padded values have room for the structure's rows; their lengths are looked at only if `read_lengths`.

    >>> check_padded(torch.zeros(1, 2), Structure.from_lengths(torch.tensor([3])), read_lengths=True)
    Traceback (most recent call last):
    serrate.errors.StructureError: lengths must fit the padded rows: lengths[0] = 3, but dim 1 of the padded values has 2
    """
    at = 0
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        first = dim + at
        if padded.dim() <= first + rows.levels:
            raise ShapeError(
                f"padded values of {structure.levels} ragged level(s) need at least {first + rows.levels + 1} dims, "
                f"got shape {tuple(padded.shape)}"
            )
        if padded.shape[first] != rows.num_rows(0):
            raise ShapeError(f"lengths describe {rows.num_rows(0)} rows, but the padded values have {padded.shape[first]}")
        for level in range(rows.levels if read_lengths else 0):
            room = padded.shape[first + level + 1]
            if rows.max_length(level, "from_padded") > room:
                lengths = rows.host_lengths(level, "from_padded")
                row = int((lengths > room).nonzero()[0])
                of = "lengths" if structure.levels == 1 else f"lengths of level {level}"
                raise StructureError(
                    f"{of} must fit the padded rows: lengths[{row}] = {int(lengths[row])}, "
                    f"but dim {first + level + 1} of the padded values has {room}"
                )
        at += rows.levels - (rows.takes - 1)


def _check_fill(dtype: torch.dtype, fill: complex) -> None:
    if not isinstance(fill, (int, float, complex)):
        raise DtypeError(f"fill must be a number, got {type(fill).__name__}")
    if dtype.is_complex or (dtype.is_floating_point and not isinstance(fill, complex)):
        return
    exact = fill in (0, 1) if dtype is torch.bool else not isinstance(fill, complex) and float(fill).is_integer()
    if not exact:
        raise DtypeError(f"fill={fill} cannot be held by values of {dtype}: give another fill, or convert the values first")
