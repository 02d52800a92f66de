"""Rows back to back, and the same rows each padded to one length.

In: values with their structure, or padded values with a structure. Out: the other of the two, by one indexed copy
through which gradients flow; there is no loop over rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serrate.errors import DtypeError, ShapeError, StructureError
from serrate.tensor.structure import Structure


def pad(values: Tensor, structure: Structure, fill: complex) -> Tensor:
    """Values `[total, *inner]` as `[B, L, *inner]`, or `[G, parts, L, *inner]` for two levels; holes hold `fill`.

    >>> pad(torch.tensor([1, 2, 3]), Structure.from_lengths(torch.tensor([1, 2])), fill=0)
    tensor([[1, 0],
            [2, 3]])
    """
    _check_fill(values.dtype, fill)
    extents = tuple(structure.max_length(level, why="to_padded") for level in range(structure.levels))
    outer, inner = (structure.num_rows(0), *extents), values.shape[1:]
    flat = values.new_full((math.prod(outer), *inner), fill)
    return flat.index_copy(0, _positions(structure, extents), values).view(*outer, *inner)


def unpad(padded: Tensor, structure: Structure) -> Tensor:
    """The values of the structure's rows, taken out of padded values whose rows may be longer than the longest row.

    >>> unpad(torch.tensor([[1, 0, 0], [2, 3, 0]]), Structure.from_lengths(torch.tensor([1, 2])))
    tensor([1, 2, 3])
    """
    extents = tuple(padded.shape[1 : 1 + structure.levels])
    return padded.flatten(0, structure.levels).index_select(0, _positions(structure, extents))


def check_padded(padded: Tensor, structure: Structure, *, read_lengths: bool) -> None:
    """Checks that padded values have room for the structure's rows; their lengths are looked at only if `read_lengths`.

    >>> check_padded(torch.zeros(1, 2), Structure.from_lengths(torch.tensor([3])), read_lengths=True)
    Traceback (most recent call last):
    serrate.errors.StructureError: lengths must fit the padded rows: lengths[0] = 3, but dim 1 of the padded values has 2
    """
    if padded.dim() < structure.levels + 1:
        raise ShapeError(
            f"padded values of {structure.levels} ragged level(s) need at least {structure.levels + 1} dims, "
            f"got shape {tuple(padded.shape)}"
        )
    if padded.shape[0] != structure.num_rows(0):
        raise ShapeError(f"lengths describe {structure.num_rows(0)} rows, but the padded values have {padded.shape[0]}")
    if not read_lengths:
        return
    for level in range(structure.levels):
        room = padded.shape[level + 1]
        if structure.max_length(level, why="from_padded") > room:
            lengths = structure.host_offsets(level, why="from_padded").diff()
            row = int((lengths > room).nonzero()[0])
            of = "lengths" if structure.levels == 1 else f"lengths of level {level}"
            raise StructureError(
                f"{of} must fit the padded rows: lengths[{row}] = {int(lengths[row])}, "
                f"but dim {level + 1} of the padded values has {room}"
            )


def _positions(structure: Structure, extents: tuple[int, ...]) -> Tensor:
    def make() -> Tensor:
        positions = torch.arange(structure.num_rows(0), device=structure.device)
        for level, extent in enumerate(extents):
            count = structure.total_elements(level)
            # With output_size torch need not read the lengths on the host to size the result.
            row = torch.repeat_interleave(structure.lengths(level), output_size=count).long()
            within = torch.arange(count, device=structure.device) - structure.offsets[level].index_select(0, row)
            positions = positions.index_select(0, row) * extent + within
        return positions

    return structure.derived(("padded positions", extents), make)


def _check_fill(dtype: torch.dtype, fill: complex) -> None:
    if dtype.is_complex or (dtype.is_floating_point and not isinstance(fill, complex)):
        return
    exact = fill in (0, 1) if dtype is torch.bool else not isinstance(fill, complex) and float(fill).is_integer()
    if not exact:
        raise DtypeError(f"fill={fill} cannot be held by values of {dtype}: give another fill, or convert the values first")
