"""torch's NestedTensors, in both of their layouts.

In: a NestedTensor, or values with a structure. Out: the other of the two.

    jagged, contiguous             rows back to back                     shared
    jagged, with lengths           rows with gaps                        shared
    jagged, transposed             regular dims before the ragged one    shared
    strided, one ragged dim        rows back to back                     shared if the buffer is contiguous
    strided, two ragged dims       rows with packed columns              shared if the buffer is contiguous
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, FormatError
from serrate.tensor.components import take_all
from serrate.tensor.interop.common import Copying, rows_of_one_level
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure
from serrate.tensor.torch_private import nested_view

_LAYOUTS = ("jagged", "strided")


def from_torch_nested(nested: Tensor, copying: Copying) -> tuple[Tensor, Structure]:
    """Values and structure of a NestedTensor.

    >>> nested = torch.nested.nested_tensor_from_jagged(torch.zeros(3, 4), torch.tensor([0, 2, 3]))
    >>> from_torch_nested(nested, Copying("from_torch_nested", None))[1]
    Structure(2 > 3)
    """
    if not isinstance(nested, Tensor) or not nested.is_nested:
        raise CallError(f"from_torch_nested takes a NestedTensor, got {type(nested).__name__}: for rows in a list use from_list")
    return _from_jagged(nested, copying) if nested.layout is torch.jagged else _from_strided(nested, copying)


def to_torch_nested(values: Tensor, structure: Structure, layout: str, copying: Copying) -> Tensor:
    """The NestedTensor of these rows.

    >>> values, structure = torch.zeros(3, 4), Structure.from_lengths(torch.tensor([2, 1]))
    >>> to_torch_nested(values, structure, "jagged", Copying("to_torch_nested", None)).offsets()
    tensor([0, 2, 3])
    """
    if layout not in _LAYOUTS:
        raise CallError(f"to_torch_nested: layout={layout!r} is not one of {', '.join(map(repr, _LAYOUTS))}")
    jagged = layout == "jagged"
    rows = rows_of_one_level(copying.bridge, structure, first=False, columns=not jagged)
    if jagged:
        dim = structure.dims[0]
        at = dim if structure.ahead is None else dim + structure.ahead[0][0]
        return _to_jagged(copying.kept(values).movedim(dim, at), at, rows)
    return _to_strided(values, structure, rows, copying)


def _from_jagged(nested: Tensor, copying: Copying) -> tuple[Tensor, Structure]:
    # Only the ragged size of a NestedTensor is not an int.
    ragged = next(dim for dim, size in enumerate(nested.shape) if not isinstance(size, int))
    holder: Any = nested
    values, offsets, lengths = holder.values(), holder.offsets(), holder.lengths()
    values = values.movedim(ragged - 1, 0)
    if lengths is None:
        structure = Structure.from_offsets(offsets, total=values.shape[0])
    else:
        structure = Structure.from_starts(offsets[:-1], lengths, extent=values.shape[0])
    return copying.kept(values), structure.transposed(((ragged - 1,),))


def _to_jagged(values: Tensor, dim: int, rows: Rows) -> Tensor:
    longest, shortest = (rows.known(name, 0) for name in ("max", "min"))
    offsets, lengths = rows.offsets[0], None
    if rows.starts is not None:
        # torch wants one boundary more than rows: the end of the values.
        offsets = torch.cat([rows.starts, rows.starts.new_tensor([values.shape[dim]])])
        lengths = rows.inner_lengths().to(offsets.dtype)
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets=offsets,
        lengths=lengths,
        jagged_dim=dim + 1,
        max_seqlen=None if longest is None else int(longest),
        min_seqlen=None if shortest is None else int(shortest),
    )


def _from_strided(nested: Tensor, copying: Copying) -> tuple[Tensor, Structure]:
    shapes = [tuple(row.shape) for row in nested.unbind()]
    ndim = len(shapes[0]) if shapes else 1
    if ndim == 0:
        raise FormatError("from_torch_nested: the rows of the NestedTensor are scalars: stack them with torch.stack")
    ragged = {dim for shape in shapes for dim in range(ndim) if shape[dim] != shapes[0][dim]}
    if ragged - {0, 1}:
        raise FormatError(
            f"from_torch_nested: dim {max(ragged) + 1} of the NestedTensor is ragged, but only the first two dims of a row "
            "can be: transpose first"
        )
    columns = 1 in ragged
    if not nested.is_contiguous():
        copying.forced("the rows of the NestedTensor are not contiguous")
        nested = nested.contiguous()
        values = nested.values()
    else:
        values = copying.kept(nested.values())
    lengths = torch.tensor([shape[0] for shape in shapes], dtype=torch.int64, device="cpu")
    structure = Structure.from_lengths(lengths)
    if columns:
        structure = structure.with_columns(torch.tensor([shape[1] for shape in shapes], dtype=torch.int64, device="cpu"))
    inner = shapes[0][1 + columns :] if shapes else ()
    total = structure.total_elements()
    return values[: total * math.prod(inner)].view(total, *inner), structure.to(values.device)


def _to_strided(values: Tensor, structure: Structure, rows: Rows, copying: Copying) -> Tensor:
    why = copying.bridge
    if rows.num_rows(0) == 0:
        # torch cannot make a view without rows.
        return torch.nested.nested_tensor([], dtype=values.dtype, device=values.device)
    if rows.contiguous and structure.dims == (0,) and structure.ahead is None and values.is_contiguous():
        lengths = rows.host_lengths(0, why).long()
        extents = [lengths] if rows.columns is None else [lengths, rows.host_lengths(1, why).long()]
        inner = [torch.full_like(lengths, extent) for extent in values.shape[1:]]
        starts = rows.host_row_starts(why).long() * math.prod(values.shape[1:])
        return nested_view(copying.kept(values), torch.stack([*extents, *inner], dim=1), starts)
    if structure.dims != (0,):
        copying.forced(f"rows of dim {structure.dims[0]} do not follow one another in memory")
        where, sizes = rows.host_row_starts(why).tolist(), rows.host_sizes(why).tolist()
        pieces = [values.narrow(structure.dims[0], start, size) for start, size in zip(where, sizes, strict=True)]
        return torch.nested.as_nested_tensor(pieces)
    copying.forced("the rows do not lie back to back in contiguous values")
    return torch.nested.as_nested_tensor([piece for piece, _ in take_all(values, structure, why)])
