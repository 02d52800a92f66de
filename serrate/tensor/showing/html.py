"""A ragged tensor in a notebook: its facts and a picture of its rows.

In: a ragged tensor's shape, values, structure and hints. Out: HTML that needs nothing from elsewhere, for light and dark pages.
"""

from __future__ import annotations

import math
from html import escape

from torch import Tensor

from serrate.tensor.hints import Hints
from serrate.tensor.showing.describe import padded_positions, percent
from serrate.tensor.showing.picture import picture
from serrate.tensor.structure import Structure
from serrate.tensor.sync import may_copy

_WHY = "_repr_html_"


def as_html(shape: tuple[object, ...], values: Tensor, structure: Structure, hints: Hints) -> str:
    """What a notebook shows for a ragged tensor; where lengths cannot be read, the facts without the picture.

    >>> import torch
    >>> from serrate.tensor.hints import NO_HINTS
    >>> as_html((2, "r0"), torch.zeros(3), Structure.from_lengths(torch.tensor([1, 2])), NO_HINTS)[:62]
    '<div style="overflow-x:auto"><div><b>JaggedTensor</b> (2, r0) '
    """
    facts = [str(values.dtype), str(values.device)]
    if structure.format != "csr":
        facts.append(structure.format)
    facts += [f"{name}={word}" for name, word in hints.told().items()]
    if values.requires_grad:
        facts.append("requires_grad")
    readable = all(rows.readable() or may_copy(rows.offsets[0]) for rows in structure.rows)
    drawn = "<div>the lengths are not on the host</div>"
    if readable:
        total, padded = structure.total_elements(why=_WHY), padded_positions(structure, _WHY)
        facts.append(f"{total:,} positions")
        if structure.format != "csr" and values.numel():
            regular = (values.shape[dim.values_dim] for dim in structure.dims_of(values.dim()) if dim.axis is None)
            facts.append(f"{percent(1 - total * math.prod(regular) / values.numel())} of the values are holes, hatched")
        elif padded:
            facts.append(f"padding would be {percent(1 - total / padded)} holes")
        drawn = picture(tuple(values.shape), structure)
    size = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    header = f"<div><b>JaggedTensor</b> {escape(size)} · {escape(' · '.join(facts))}</div>"
    return f'<div style="overflow-x:auto">{header}\n{drawn}</div>'
