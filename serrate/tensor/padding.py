"""Conversion between packed and padded rows.

In: values with their structure, or padded values with a structure. Out: the other of the two, in one copy per partitioned dim:
compiled code copies whole rows; the fallback indexes every position, and gradients flow through it.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError, ShapeError, StructureError
from serrate.tensor.moving import BITS, pack_runs, pad_runs, unpad_rows
from serrate.tensor.offsets import Levels, as_tensors
from serrate.tensor.permuting import inverse
from serrate.tensor.positions import compacted, padded_index, padded_row_index
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy, on_host


def pad(values: Tensor, structure: Structure, fill: complex, room: int | None = None) -> Tensor:
    """Pads values `[total, *inner]` to `[B, L, *inner]`, or `[G, parts, L, *inner]` for two levels, with `fill` in the holes.

    `room` is the padded size of the last ragged dim, by default the longest length; no row may be longer.

    >>> pad(torch.tensor([1, 2, 3]), Structure.from_lengths(torch.tensor([1, 2])), fill=0)
    tensor([[1, 0],
            [2, 3]])
    """
    if structure.ahead is not None:
        return pad(values, structure.canonical, fill, room).permute(structure.order(values.dim()))
    _check_fill(values.dtype, fill)
    why = "to_padded"
    # From the last dim to the first, so that earlier dims keep their numbers.
    last = structure.rows[-1]
    for dim, rows in reversed(list(zip(structure.dims, structure.rows, strict=True))):
        extents = tuple(
            room if room is not None and rows is last and level == rows.levels - 1 else rows.max_length(level, why)
            for level in range(rows.levels)
        )
        box = (rows.num_rows(0), *extents)
        moved = _pad_compiled(values, dim, rows, box, fill)
        if moved is not None:
            values = moved
            continue
        packed = compacted(values, dim, rows, why)
        before, after = packed.shape[:dim], packed.shape[dim + 1 :]
        flat = packed.new_full((*before, math.prod(box), *after), fill)
        copied = _bits(flat).index_copy(dim, padded_index(rows, extents, why), _bits(packed))
        # Viewing as another dtype breaks the autograd graph, even for the same dtype.
        values = (copied if copied.dtype == flat.dtype else copied.view(flat.dtype)).view(*before, *box, *after)
    return values


def _bits(values: Tensor) -> Tensor:
    """The same bits as integers, for dtypes that torch cannot index; other values unchanged."""
    name = str(values.dtype)
    if "float8" not in name and name not in ("torch.uint16", "torch.uint32", "torch.uint64"):
        return values
    return values.view(BITS[values.dtype.itemsize])


def _pad_compiled(values: Tensor, dim: int, rows: Rows, box: tuple[int, ...], fill: complex) -> Tensor | None:
    """Pads the rows of a dim with compiled code; None if it cannot."""
    if rows.columns is not None:
        return None
    starts, lengths = rows.row_starts(), rows.inner_lengths()
    if rows.depth > 1:
        # Boxes that no row fills have length 0.
        there = padded_row_index(rows, box[1:-1])
        count = math.prod(box[:-1])
        starts = starts.new_zeros(count).index_copy(0, there, starts)
        lengths = lengths.new_zeros(count).index_copy(0, there, lengths)
    moved = pad_runs(values, dim, starts, lengths, box[-1], fill)
    return None if moved is None else moved.view(*values.shape[:dim], *box, *values.shape[dim + 1 :])


def unpad(padded: Tensor, structure: Structure) -> Tensor:
    """Packs the structure's rows from padded values, which may be padded beyond the longest row.

    >>> unpad(torch.tensor([[1, 0, 0], [2, 3, 0]]), Structure.from_lengths(torch.tensor([1, 2])))
    tensor([1, 2, 3])
    """
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        extents = tuple(padded.shape[dim + 1 : dim + 1 + rows.levels])
        moved = None
        if rows.levels == 1:
            moved = unpad_rows(padded, dim, rows, rows.elements("from_padded"))
        flat = padded.flatten(dim, dim + rows.levels) if moved is None else padded
        if moved is None and rows.columns is None:
            starts = rows.derived(("padded starts", extents), partial(_padded_starts, rows, extents))
            total = rows.elements("from_padded")
            moved = pack_runs(flat, dim, starts, rows.inner_lengths(), total, rows)
        padded = flat.index_select(dim, padded_index(rows, extents, "from_padded")) if moved is None else moved
    return padded


def _padded_starts(rows: Rows, extents: tuple[int, ...]) -> Tensor:
    """Where every innermost row begins in padded storage of these extents, in positions."""
    return padded_row_index(rows, extents[:-1]) * extents[-1]


def check_padded(padded: Tensor, structure: Structure, *, read_lengths: bool) -> None:
    """Checks that the structure's rows fit the padded values; reads lengths only if `read_lengths`.

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
        at += rows.levels - (rows.storage_dims - 1)


def _check_fill(dtype: torch.dtype, fill: complex) -> None:
    if not isinstance(fill, (int, float, complex)):
        raise DtypeError(f"fill must be a number, got {type(fill).__name__}")
    if dtype.is_complex or (dtype.is_floating_point and not isinstance(fill, complex)):
        return
    exact = fill in (0, 1) if dtype is torch.bool else not isinstance(fill, complex) and float(fill).is_integer()
    if not exact:
        raise DtypeError(f"fill={fill} does not fit {dtype}: use another fill, or convert the values first")


def mask(values: Tensor, structure: Structure, why: str) -> Tensor:
    """True where `to_padded` holds an element and False in its holes; `from_padded(x, mask=...)` takes it back.

    >>> mask(torch.zeros(3), Structure.from_lengths(torch.tensor([2, 1])), "mask")
    tensor([[ True,  True],
            [ True, False]])
    """
    if structure.ahead is not None:
        return _transposed_mask(values, structure, why)
    extents: list[int] = []
    masks: list[tuple[int, Tensor]] = []
    dim = 0
    for first, rows in zip(structure.dims, structure.rows, strict=True):
        extents += values.shape[dim:first]
        ragged = tuple(rows.max_length(level, why) for level in range(rows.levels))
        box = (rows.num_rows(0), *ragged)
        masks.append((len(extents), _exists(rows, box, why)))
        extents += box
        dim = first + rows.storage_dims
    found = torch.ones(extents, dtype=torch.bool, device=values.device)
    for place, box_of_rows in masks:
        trailing = len(extents) - place - box_of_rows.dim()
        found &= box_of_rows.view(*box_of_rows.shape, *(1 for _ in range(trailing)))
    return found


def _transposed_mask(values: Tensor, structure: Structure, why: str) -> Tensor:
    found = mask(values, structure.canonical, why)
    dims, order = structure.dims_of(values.dim()), structure.order(values.dim())
    found = found[(..., *(None,) * (len(order) - found.dim()))].permute(order)
    last = max(k for k, dim in enumerate(dims) if dim.level is not None)
    regular = [values.shape[dim.values_dim] if dim.axis is None else -1 for dim in dims[: last + 1]]
    return found.reshape(found.shape[: last + 1]).expand(regular)


def _exists(rows: Rows, box: tuple[int, ...], why: str) -> Tensor:
    """Which positions of the padded box exist."""
    if rows.columns is not None:
        flat = torch.zeros(math.prod(box), dtype=torch.bool, device=rows.device)
        return flat.index_fill(0, padded_index(rows, box[1:], why), True).view(box)
    lengths = rows.inner_lengths()
    if rows.depth > 1:
        lengths = lengths.new_zeros(math.prod(box[:-1])).index_copy(0, padded_row_index(rows, box[1:-1]), lengths)
    return (torch.arange(box[-1], dtype=lengths.dtype, device=rows.device) < lengths[:, None]).view(box)


def from_padded(
    x: Tensor,
    lengths: Levels | None,
    mask: Tensor | None,
    structure: Structure | None,
    total: int | None,
    format: str,
) -> tuple[Tensor, Structure]:
    """The rows of padded values, given by lengths, a mask or a structure: packed, or left in place.

    >>> from_padded(torch.tensor([[1, 2], [3, 0]]), [2, 1], None, None, None, "csr")
    (tensor([1, 2, 3]), Structure(2 > 3))
    """
    if (lengths is not None) + (mask is not None) + (structure is not None) != 1:
        raise CallError("from_padded: pass one of lengths, mask and structure")
    if structure is not None and structure.ahead is not None:
        return _from_transposed(x, structure, total, format)
    if format not in ("csr", "padded"):
        raise CallError(f"from_padded: format={format!r} is not one of 'csr' and 'padded'")
    if mask is not None:
        if format == "padded":
            raise CallError("from_padded: a mask may leave out positions anywhere, so format='padded' cannot keep x in place")
        return _masked(x, mask)
    readable = True
    if structure is not None:
        readable = total is None or all(rows.readable() for rows in structure.rows)
    else:
        assert lengths is not None
        tensors = as_tensors(lengths, x)
        if tensors[0].dtype is torch.bool:
            raise DtypeError("from_padded: lengths must be int32 or int64, got torch.bool: pass a mask as mask=")
        readable = total is None or on_host(tensors[0])
        if readable and format == "csr" and not on_host(tensors[0]):
            tensors = tuple(host_copy(level, "from_padded") for level in tensors)
        structure = Structure.from_lengths(*tensors, total=total)
    if format == "padded":
        readable = structure.rows[0].readable()
    structure = structure.back_to_back()
    check_padded(x, structure, read_lengths=readable)
    structure = structure.to(x.device)
    if format == "padded":
        return _in_place(x, structure)
    return unpad(x, structure), structure


def _from_transposed(x: Tensor, structure: Structure, total: int | None, format: str) -> tuple[Tensor, Structure]:
    # The values have one dim for each partition, with all its dims, and for each regular dim.
    order = structure.order(x.dim() - sum(rows.levels + 1 - rows.storage_dims for rows in structure.rows))
    if len(order) != x.dim():
        raise ShapeError(f"padded values of {structure} need at least {len(order)} dims, got shape {tuple(x.shape)}")
    values, found = from_padded(x.permute(inverse(order)), None, None, structure.canonical, total, format)
    return values, found.transposed(structure.ahead)


def _masked(x: Tensor, mask: Tensor) -> tuple[Tensor, Structure]:
    if mask.dtype is not torch.bool:
        raise DtypeError(f"from_padded: the mask must be torch.bool, got {mask.dtype}: write mask != 0")
    if mask.dim() < 2 or x.shape[: mask.dim()] != mask.shape:
        raise ShapeError(f"from_padded: the mask must have the first dims of {tuple(x.shape)}, got shape {tuple(mask.shape)}")
    lengths = mask.sum(-1)
    parts = mask.shape[:-1]
    flat = lengths.reshape(-1)
    outer = [torch.full((parts[:level].numel(),), parts[level], device=x.device) for level in range(1, len(parts))]
    where = host_copy(flat, "from_padded")
    chain = Structure.from_lengths(*(level.cpu() for level in outer), where).to(x.device)
    return x[mask], chain


def _in_place(x: Tensor, structure: Structure) -> tuple[Tensor, Structure]:
    if len(structure.rows) > 1 or structure.dims != (0,) or structure.rows[0].columns is not None:
        raise ShapeError(f"from_padded: only rows of dim 0 can stay padded in place, got {structure}; use format='csr'")
    rows = structure.rows[0]
    room = x.shape[rows.depth]
    there = padded_row_index(rows, tuple(x.shape[1 : rows.depth]))
    lengths = tuple(rows.lengths(level) for level in range(rows.depth))
    kept = Structure.from_starts(there * room, *lengths, room=room, validate=False)
    if not x.is_contiguous():
        raise ShapeError("from_padded: values that stay padded in place must be contiguous: call x.contiguous() first")
    return x.flatten(0, rows.depth), kept
