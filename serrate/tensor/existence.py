"""Which positions of padded rows exist.

In: values and their structure. Out: a boolean tensor with the dims of the padded values, up to the last ragged one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serrate.tensor.positions import boxes as boxes_of
from serrate.tensor.positions import in_box
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure


def mask(values: Tensor, structure: Structure, why: str) -> Tensor:
    """True where `to_padded` holds an element and False in its holes; `from_padded(x, mask=...)` takes it back.

    >>> mask(torch.zeros(3), Structure.from_lengths(torch.tensor([2, 1])), "mask")
    tensor([[ True,  True],
            [ True, False]])
    """
    extents: list[int] = []
    boxes: list[tuple[int, Tensor]] = []
    dim = 0
    for first, rows in zip(structure.dims, structure.rows, strict=True):
        extents += values.shape[dim:first]
        ragged = tuple(rows.max_length(level, why) for level in range(rows.levels))
        box = (rows.num_rows(0), *ragged)
        boxes.append((len(extents), _exists(rows, box, why)))
        extents += box
        dim = first + rows.takes
    found = torch.ones(extents, dtype=torch.bool, device=values.device)
    for place, box_of_rows in boxes:
        behind = len(extents) - place - box_of_rows.dim()
        found &= box_of_rows.view(*box_of_rows.shape, *(1 for _ in range(behind)))
    return found


def _exists(rows: Rows, box: tuple[int, ...], why: str) -> Tensor:
    """Which positions of a box rows have."""
    if rows.columns is not None:
        flat = torch.zeros(math.prod(box), dtype=torch.bool, device=rows.device)
        return flat.index_fill(0, in_box(rows, box[1:], why), True).view(box)
    lengths = rows.inner_lengths()
    if rows.depth > 1:
        lengths = lengths.new_zeros(math.prod(box[:-1])).index_copy(0, boxes_of(rows, box[1:-1]), lengths)
    return (torch.arange(box[-1], dtype=lengths.dtype, device=rows.device) < lengths[:, None]).view(box)
