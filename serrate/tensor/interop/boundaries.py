"""Row boundaries as attention kernels (`cu_seqlens`) and grouped matrix products (end offsets) take them.

In: values with int32 boundaries, or values with a structure. Out: the other of the two. Values are shared both ways, and so are
boundaries that are already int32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serrate.errors import ShapeError, StructureError
from serrate.tensor.checks.validate import check_layout, check_values_layout
from serrate.tensor.interop.common import Copying, rows_of_one_level
from serrate.tensor.positions import compacted
from serrate.tensor.structure import Structure
from serrate.tensor.sync import on_host


class CuSeqlens(NamedTuple):
    """The arguments of a variable-length attention kernel for its queries or its keys."""

    values: Tensor
    """`[total, ...]`, sequences back to back."""
    cu_seqlens: Tensor
    """`[sequences + 1]`, int32: where each starts, and where the last ends."""
    max_seqlen: int
    """The longest sequence."""


class GroupEnds(NamedTuple):
    """The arguments of `torch.nn.functional.grouped_mm` for its left operand."""

    values: Tensor
    """`[total, ...]`, groups back to back."""
    ends: Tensor
    """`[groups]`, int32: where each group ends."""


def from_cu_seqlens(
    values: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, validate: bool | None, copying: Copying
) -> tuple[Tensor, Structure]:
    """Values and structure for cumulative sequence lengths; `max_seqlen` may exceed the longest.

    >>> from_cu_seqlens(torch.zeros(5), torch.tensor([0, 2, 5]), 8, None, Copying("from_cu_seqlens", None))[1].max_length()
    3
    """
    check_values_layout(values)
    structure = Structure.from_offsets(cu_seqlens, total=values.shape[0], validate=validate)
    rows = structure.rows[0]
    if max_seqlen is not None and rows.depth == 1:
        if not on_host(cu_seqlens) or validate is False:
            rows.note("max", 0, max_seqlen)
        elif (longest := structure.max_length()) > max_seqlen:
            raise StructureError(f"from_cu_seqlens: max_seqlen={max_seqlen} was given, but the longest row has length {longest}")
    return copying.kept(values), structure


def to_cu_seqlens(values: Tensor, structure: Structure, copying: Copying) -> CuSeqlens:
    """The arguments for a variable-length attention kernel.

    >>> to_cu_seqlens(torch.zeros(3), Structure.from_lengths(torch.tensor([1, 2])), Copying("to_cu_seqlens", None))[1:]
    (tensor([0, 1, 3], dtype=torch.int32), 2)
    """
    values = _back_to_back(values, structure, copying)
    longest = structure.max_length(why=copying.bridge)
    return CuSeqlens(values, structure.offsets_as(torch.int32), longest)


def from_group_ends(values: Tensor, ends: Tensor, validate: bool | None, copying: Copying) -> tuple[Tensor, Structure]:
    """Values and structure for groups given by their ends; values past the last end belong to no group and are dropped.

    On a device, where the ends cannot be read, the last one is trusted to equal the number of values.

    >>> from_group_ends(torch.zeros(6), torch.tensor([2, 5]), None, Copying("from_group_ends", None))
    (tensor([0., 0., 0., 0., 0.]), Structure(2 > 5))
    """
    check_values_layout(values)
    check_layout("ends", (ends,))
    if ends.dim() != 1:
        raise ShapeError(f"from_group_ends: ends must be 1-D, one for each group, got shape {tuple(ends.shape)}")
    offsets = torch.cat([ends.new_zeros(1), ends])
    if on_host(offsets) and validate is not False:
        # If the last end is too large, the offsets check reports it.
        values = values[: max(int(offsets[-1]), 0)]
    return copying.kept(values), Structure.from_offsets(offsets, total=values.shape[0], validate=validate)


def to_group_ends(values: Tensor, structure: Structure, copying: Copying) -> GroupEnds:
    """The arguments for `grouped_mm`.

    >>> to_group_ends(torch.zeros(3), Structure.from_lengths(torch.tensor([1, 2])), Copying("to_group_ends", None)).ends
    tensor([1, 3], dtype=torch.int32)
    """
    values = _back_to_back(values, structure, copying)
    return GroupEnds(values, structure.offsets_as(torch.int32)[1:])


def _back_to_back(values: Tensor, structure: Structure, copying: Copying) -> Tensor:
    rows = rows_of_one_level(copying.bridge, structure)
    if rows.contiguous:
        return copying.kept(values)
    copying.forced("the rows have gaps between them")
    return compacted(values, 0, rows, copying.bridge)
