"""Shape operations and indexing under torch's signatures.

In: traced tensors and dims as torch's functions take them. Out: traced tensors, or their metadata.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from serrate.errors import ShapeError
from serrate.frontend import ops
from serrate.frontend.ops.movement import index_together, require_inside
from serrate.frontend.shapes import shown
from serrate.ir.view import Size, SymbolicRaggedSize, TensorView
from serrate.tensor.foreign_names import refuse_recurrent


def squeeze(input: TensorView, dim: int | None = None) -> TensorView:
    return ops.squeeze(input, dim)


def unsqueeze(input: TensorView, dim: int) -> TensorView:
    return ops.unsqueeze(input, dim)


def flatten(input: TensorView, start_dim: int = 0, end_dim: int = -1) -> TensorView:
    return ops.flatten(input, start_dim, end_dim)


def unflatten(input: TensorView, dim: int, sizes: Sequence[int]) -> TensorView:
    return ops.unflatten(input, dim, sizes)


def reshape(input: TensorView, *shape: Any) -> TensorView:
    return ops.reshape(input, shape[0] if len(shape) == 1 and not isinstance(shape[0], int | Size) else shape)


def permute(input: TensorView, *dims: Any) -> TensorView:
    return ops.permute(input, *dims)


def transpose(input: TensorView, dim0: int, dim1: int) -> TensorView:
    return ops.transpose(input, dim0, dim1)


def matrix_transpose(input: TensorView) -> TensorView:
    return ops.transpose(input, -1, -2)


def reversed_dims(input: TensorView) -> TensorView:
    if input.ndim > 2:
        raise ShapeError(f"t and T need a matrix, got {shown(input)}; use mT or transpose")
    return ops.permute(input, *reversed(range(input.ndim)))


def select(input: TensorView, dim: int, index: int) -> TensorView:
    return ops.select(input, dim, index)


def narrow(input: TensorView, dim: int, start: int, length: int) -> TensorView:
    """As in torch, positions past either end of a dense dim raise; rows that end earlier give the positions that they have."""
    domain = input.domains[dim % input.ndim]
    extent = None if domain.is_ragged else domain.extent_expr.value
    available = -start if start < 0 else None if extent is None else extent - start
    if length < 0 or (available is not None and length > available) or (extent is not None and start < -extent):
        raise ShapeError(f"narrow: start {start} with length {length} is out of range for dim {dim} of {shown(input)}")
    if start < 0:
        return ops.slice(ops.slice(input, dim, start), dim, 0, length)
    return ops.slice(input, dim, start, start + length)


def split(tensor: TensorView, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[TensorView, ...]:
    return ops.split(tensor, split_size_or_sections, dim)


def chunk(input: TensorView, chunks: int, dim: int = 0) -> tuple[TensorView, ...]:
    return ops.chunk(input, chunks, dim)


def pad(input: TensorView, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> TensorView:
    """`F.pad` by a constant: two numbers for each dim, from the last one on; those below zero take positions away."""
    if mode != "constant" or len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise ShapeError(f"pad: takes mode='constant' and two numbers for each of the last dims, got {mode!r} and {tuple(pad)}")
    for k in range(len(pad) // 2):
        before, after = pad[2 * k], pad[2 * k + 1]
        dim = input.ndim - 1 - k
        if min(before, after) < 0:
            input = ops.slice(input, dim, max(-before, 0), None if after >= 0 else after)
        if max(before, after) > 0:
            input = ops.pad(input, dim, max(before, 0), max(after, 0), 0 if value is None else value)
    return input


def tril(input: TensorView, diagonal: int = 0) -> TensorView:
    return ops.tril(input, diagonal)


def triu(input: TensorView, diagonal: int = 0) -> TensorView:
    return ops.triu(input, diagonal)


def flip(input: TensorView, *dims: Any) -> TensorView:
    for dim in dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims:
        input = ops.flip(input, dim)
    return input


def gather(input: TensorView, dim: int, index: TensorView, *, sparse_grad: bool = False) -> TensorView:
    gathered = ops.gather(input, dim, index)
    require_inside("gather", input, dim, index)
    return gathered


def index_select(input: TensorView, dim: int, index: TensorView) -> TensorView:
    if index.ndim > 1:
        raise ShapeError(f"index_select: the index must have one dim, got {shown(index)}; use gather, or x[index]")
    picked = ops.index(input, index, dim)
    require_inside("index_select", input, dim, index, in_every_row=True)
    return picked


def cat(tensors: Sequence[TensorView], dim: int = 0) -> TensorView:
    return ops.cat(tensors, dim)


def stack(tensors: Sequence[TensorView], dim: int = 0) -> TensorView:
    return ops.stack(tensors, dim)


def expand_as(input: TensorView, other: TensorView) -> TensorView:
    return ops.broadcast_to(input, other)


def same(input: TensorView, **_: Any) -> TensorView:
    """A no-op on traced tensors: `contiguous`."""
    return input


def detach(input: TensorView) -> TensorView:
    return ops.detach(input)


def clone(input: TensorView, *, memory_format: Any = None) -> TensorView:
    return ops.set(input)


def size(input: TensorView, dim: int | None = None) -> Any:
    found = input.shape if dim is None else input.shape[dim]
    if isinstance(found, SymbolicRaggedSize):
        refuse_recurrent(found)
    return found


def dim(input: TensorView) -> int:
    return input.ndim


def is_floating_point(input: TensorView) -> bool:
    return input.dtype.is_floating_point


def getitem(input: TensorView, key: Any) -> TensorView:
    """`x[...]` with integers, slices, None and integer tensors. As in torch, several index tensors are broadcast together."""
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = len([k for k in keys if k is not None and k is not Ellipsis])
    if taken > input.ndim:
        raise ShapeError(f"{taken} indices are too many for a tensor of shape {shown(input)}, which has {input.ndim} dims")
    if Ellipsis in [k for k in keys if not isinstance(k, TensorView)]:
        place = next(k for k, each in enumerate(keys) if each is Ellipsis)
        keys[place : place + 1] = [slice(None)] * (input.ndim - taken)
    runs = [(indexes, [*run]) for indexes, run in itertools.groupby(keys, lambda k: isinstance(k, TensorView))]
    if sum(indexes for indexes, _ in runs) > 1:
        raise ShapeError(
            "index tensors in the key of a traced tensor must be next to each other: first permute the dims that they index"
        )
    at = 0
    for indexes, run in runs:
        if indexes:
            input, at = _picked(input, run, at)
            continue
        for each in run:
            if each is None:
                input, at = ops.unsqueeze(input, at), at + 1
            elif isinstance(each, slice):
                if each != slice(None):
                    input = ops.slice(input, at, each.start, each.stop, 1 if each.step is None else each.step)
                at += 1
            elif isinstance(each, int | Size):
                input = ops.select(input, at, int(each))
            else:
                raise ShapeError(f"a traced tensor is indexed by integers, slices, None and tensors of integers, got {each!r}")
    return input


def _picked(input: TensorView, indices: Sequence[TensorView], dim: int) -> tuple[TensorView, int]:
    """`input` indexed by tensors from `dim` on, and the first dim of the result after theirs."""
    if any(index.dtype == torch.bool for index in indices):
        raise ShapeError("the number of elements a mask selects is not known while tracing; use where, or index before the call")
    found = ops.index(input, indices[0], dim, from_end=True) if len(indices) == 1 else index_together(input, indices, dim)
    for k, index in enumerate(indices):
        require_inside("indexing by a tensor", input, dim + k, index, low=-1, in_every_row=True)
    return found, dim + max(index.ndim for index in indices)
