"""`jt[key] = x`: writes into the values, if the key selects a view of them.

In: values, their structure, a key, and a number, a tensor or a ragged tensor. Out: nothing; the values change, holes do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, ShapeError, StructureMismatch
from serrate.tensor.base import JaggedBase
from serrate.tensor.components import dims_of
from serrate.tensor.indexing.keys import keys_of
from serrate.tensor.indexing.masking import check_mask, existing, storage_mask
from serrate.tensor.indexing.reading import axis_of_mask, follow, plain_keys
from serrate.tensor.padding import check_padded, unpad
from serrate.tensor.permuting import inverse, permute
from serrate.tensor.positions import compact
from serrate.tensor.structure import Structure
from serrate.tensor.torch_private import is_transformed

_WHY = "jt[key] = x"


def setitem(values: Tensor, structure: Structure, key: Any, x: Any) -> None:
    """Writes into the positions that `jt[key]` selects.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> setitem(jt.values, jt.structure, (slice(None), slice(1)), -1)
    >>> jt.values
    tensor([-1,  1,  2, -1,  4])
    """
    keys, left = keys_of(key, len(dims_of(values, structure)), _WHY), None
    if structure.ahead is not None:
        if None in keys:
            raise CallError(f"{_WHY}: the key must not contain None; leave it out")
        keys, left = plain_keys(values, structure, keys, _WHY)
        structure = structure.canonical
    mask = next((each for each in keys if isinstance(each, JaggedBase)), None)
    before = keys if mask is None else keys[: keys.index(mask)]
    (target, rest), at = follow((values, structure), before, in_place=True)
    if not _within(target, values):
        raise CallError(
            f"{_WHY}: the key selects a copy, so the write would be lost: use slices without a step for positions of rows "
            "(jt[:, i:i+1] for jt[:, i]), a ragged mask, or write into jt.values"
        )
    if left is not None:
        x = _plain_source(x, left, target, rest)
    if mask is not None:
        after = keys[len(before) + 1 :]
        if any(each != slice(None) for each in after):
            raise CallError(f"{_WHY}: only ':' may follow a ragged mask: write into jt[..., i] with the mask first")
        axis = axis_of_mask(target, rest, at, mask, _WHY)
        assert rest is not None
        check_mask(rest, axis, mask, _WHY)
        _write_where(target, rest, storage_mask(target, rest, axis, mask, _WHY), x)
    elif rest is None:
        _write_dense(target, x)
    else:
        _write_ragged(target, rest, x)


def _plain_source(x: Any, left: list[int], target: Tensor, rest: Structure | None) -> Any:
    """The written value with its dims in the target's order; `left` is the order in which the key selects them."""
    if isinstance(x, JaggedBase):
        if x.ndim != len(left):
            raise ShapeError(f"{_WHY}: the key selects {len(left)} dims, but x has {x.ndim}")
        return type(x)(*permute(x.values, x.structure, inverse(left)))
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    if rest is None and x.dim() < len(left):
        x = x[(None,) * (len(left) - x.dim())]
    if x.dim() == len(left):
        return x.permute(inverse(left))
    dims = [dims_of(target, rest)[k] for k in left]
    if x.dim() > len(dims) - 1 - max(k for k, dim in enumerate(dims) if dim.level is not None):
        raise ShapeError(
            f"{_WHY}: a tensor must have the dims after the ragged ones, or all {len(left)} that the key selects; "
            f"got shape {tuple(x.shape)}"
        )
    return x


def _within(target: Tensor, values: Tensor) -> bool:
    return target.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def _write_dense(target: Tensor, x: Any) -> None:
    if isinstance(x, JaggedBase):
        raise ShapeError(f"{_WHY}: the key selects no ragged dim, but x has shape {x.shape}: pass a tensor or a number")
    target.copy_(_apart(_fitting(_tensor(x, target), target.shape, "the key selects"), target))


def _write_ragged(target: Tensor, structure: Structure, x: Any) -> None:
    dims = dims_of(target, structure)
    if not isinstance(x, JaggedBase):
        x = _tensor(x, target)
        if x.dim() <= _trailing(target, structure):
            _write_where(target, structure, None, x)
            return
        source = _unpadded(x, target, structure)
    else:
        if not structure.back_to_back().same_rows(x.structure.back_to_back(), why=_WHY):
            raise StructureMismatch(f"{_WHY}: x must have the rows that the key selects: {structure}, got {x.structure}")
        source, _ = compact(x.values, x.structure, _WHY)
    packed = target.dim() - sum(rows.storage_dims - 1 for rows in structure.rows)
    if source.dim() != packed:
        raise ShapeError(f"{_WHY}: the key selects {len(dims)} dims, but x has {len(dims) + source.dim() - packed}")
    there = existing(target, structure)
    source = _apart(source, target)
    if there is None:
        target.copy_(_fitting(source, target.shape, "the values at the key have"))
        return
    # Rows are in order, so the existing positions of the storage come in the order of the rows.
    room = list(source.shape)
    for dim in dims:
        if dim.axis is None:
            at = dim.values_dim - sum(
                r.storage_dims - 1 for d, r in zip(structure.dims, structure.rows, strict=True) if d < dim.values_dim
            )
            room[at] = target.shape[dim.values_dim]
    source = _fitting(source, torch.Size(room), "the values at the key have")
    target.masked_scatter_(there.expand(target.shape), source.to(target.dtype).contiguous())


def _write_where(target: Tensor, structure: Structure, mask: Tensor | None, x: Any) -> None:
    if isinstance(x, JaggedBase):
        raise CallError(
            f"{_WHY}: a masked write takes a number, or a tensor written at every position; got a ragged tensor: use torch.where"
        )
    x = _tensor(x, target)
    inner = target.shape[target.dim() - _trailing(target, structure) :]
    x = _apart(_fitting(x, inner, "every position holds"), target)
    there = existing(target, structure)
    if mask is not None:
        there = mask if there is None else mask & there
    target.copy_(x if there is None else torch.where(there, x.to(target.dtype), target))


def _unpadded(x: Tensor, target: Tensor, structure: Structure) -> Tensor:
    """Dense values with all dims of the tensor, broadcast, and packed to its rows."""
    packed, dims = structure.back_to_back(), dims_of(target, structure)
    if x.dim() != len(dims):
        raise ShapeError(
            f"{_WHY}: a tensor must have the dims after the ragged ones, or all {len(dims)} that the key selects; "
            f"got shape {tuple(x.shape)}"
        )
    sizes = []
    for dim, size in zip(dims, x.shape, strict=True):
        if size != 1:
            sizes.append(size)
        elif dim.axis is None:
            sizes.append(target.shape[dim.values_dim])
        elif dim.level is None:
            sizes.append(structure.rows[dim.axis].num_rows(0))
        else:
            sizes.append(max(1, structure.rows[dim.axis].max_length(dim.level, _WHY)))
    x = x.expand(sizes)
    check_padded(x, packed, read_lengths=True)
    return unpad(x, packed)


def _trailing(target: Tensor, structure: Structure) -> int:
    return target.dim() - structure.dims[-1] - structure.rows[-1].storage_dims


def _tensor(x: Any, target: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        try:
            if isinstance(x, int | float | complex):
                # Filled on the device: copying a number from the host would wait for the device.
                return torch.full((), x, dtype=target.dtype, device=target.device)
            return torch.as_tensor(x, dtype=target.dtype, device=target.device)
        except (TypeError, ValueError, RuntimeError):
            raise CallError(f"{_WHY}: x must be a number, a tensor or a ragged tensor, got {type(x).__name__}") from None
    if x.device != target.device and x.dim() > 0:
        raise DeviceError(f"{_WHY}: x is on {x.device}, but the values are on {target.device}: move one of them")
    return x.to(target.device)


def _fitting(x: Tensor, shape: torch.Size, who: str) -> Tensor:
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ShapeError(f"{_WHY}: x of shape {tuple(x.shape)} does not fit: {who} shape {tuple(shape)}") from None


def _apart(source: Tensor, target: Tensor) -> Tensor:
    """The elements to write; a copy if they share memory with the target, so that all are read before any is written."""
    if is_transformed(source) or is_transformed(target) or source.device != target.device:
        return source
    if source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        return source.clone()
    return source
