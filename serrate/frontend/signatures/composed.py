"""Functions of torch that are short compositions of others, under torch's signatures.

In: traced tensors and options as torch's functions take them. Out: traced tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from serrate.errors import CallError, DtypeError, RaggedSizeError, ShapeError
from serrate.frontend import ops
from serrate.frontend.ops.common import Dims, Number, counted, dim_of
from serrate.frontend.ops.movement import pulled, require_inside
from serrate.frontend.shapes import both, shown
from serrate.frontend.signatures.reducing import nansum
from serrate.ir.domains import IterDomain
from serrate.ir.expr import const
from serrate.ir.fusion import Fusion
from serrate.ir.values import Place, constant
from serrate.ir.view import Size, SymbolicRaggedSize, TensorView, user_line
from serrate.tensor.reshaping import movedim_order

Dtype = torch.dtype | None


# --- along a dim -------------------------------------------------------------------------------------------------------


def diff(
    input: TensorView, n: int = 1, dim: int = -1, prepend: TensorView | None = None, append: TensorView | None = None
) -> TensorView:
    """Differences of neighbours: one position less in every row, and none in an empty one."""
    if n < 0:
        raise CallError(f"diff: n must not be negative, got {n}")
    dim = dim_of("diff", input, dim)
    if counted(input, dim):
        raise ShapeError(f"diff: dim {dim} of {shown(input)} counts rows of different lengths; use diff along a row")
    parts = [part for part in (prepend, input, append) if part is not None]
    found = ops.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(n):
        later, earlier = ops.slice(found, dim, 1, None), ops.slice(found, dim, 0, -1)
        found = ops.logical_xor(later, earlier) if found.dtype == torch.bool else ops.sub(later, earlier)
    return found


def nanmean(input: TensorView, dim: Dims | None = None, keepdim: bool = False, *, dtype: Dtype = None) -> TensorView:
    if not input.dtype.is_floating_point:
        raise DtypeError(f"nanmean: a floating-point tensor is needed, got {input.dtype}; use mean of x.float()")
    count = ops.sum(ops.logical_not(ops.isnan(input)), dim, keepdim)
    return ops.div(nansum(input, dim, keepdim, dtype=dtype), count)


def take_along_dim(input: TensorView, indices: TensorView, dim: int | None = None) -> TensorView:
    """As `gather`, where dims of size 1 broadcast."""
    if dim is None:
        raise ShapeError(f"take_along_dim: dim is required for a tensor of shape {shown(input)}; flatten it first")
    dim = dim_of("take_along_dim", input, dim)
    if input.ndim != indices.ndim:
        raise ShapeError(f"take_along_dim of {both(input, indices)}: tensor and indices must have the same number of dims")
    input, indices = _widened(input, indices, dim), _widened(indices, input, dim)
    taken = ops.gather(input, dim, indices, name="take_along_dim")
    require_inside("take_along_dim", input, dim, indices)
    return taken


def _widened(x: TensorView, like: TensorView, dim: int) -> TensorView:
    """A tensor with its regular dims of size 1 as in another, but for one dim."""
    pairs = list(zip(x.domains, like.domains, strict=True))
    if not any(k != dim and own.is_single and not to.is_single and not to.is_ragged for k, (own, to) in enumerate(pairs)):
        return x
    wanted = (to if k != dim and own.is_single and not to.is_ragged else own for k, (own, to) in enumerate(pairs))
    return _spread(x, tuple(wanted))


# --- values ------------------------------------------------------------------------------------------------------------


def isin(
    elements: TensorView | Number, test_elements: TensorView | Number, *, assume_unique: bool = False, invert: bool = False
) -> TensorView:
    if isinstance(elements, TensorView) and isinstance(test_elements, TensorView):
        if any(d.is_ragged for d in test_elements.domains):
            raise CallError(
                "isin: test elements must be a number or a dense tensor; for those of all rows write y.values, for those of the "
                "same row (x.unsqueeze(2) == y.unsqueeze(1)).any(2)"
            )
        dense = ops.reshape(test_elements, (-1,))
        found = ops.any(ops.eq(ops.unsqueeze(elements, -1), dense), -1)
    else:
        # An element that is a number is compared with all test elements.
        found = ops.eq(elements, test_elements) if isinstance(elements, TensorView) else ops.any(ops.eq(test_elements, elements))
    return ops.logical_not(found) if invert else found


def bucketize(input: TensorView, boundaries: TensorView, *, out_int32: bool = False, right: bool = False) -> TensorView:
    """The number of boundaries below each element, or up to it if `right`; NaN is above all."""
    if not isinstance(boundaries, TensorView) or boundaries.ndim != 1:
        given = shown(boundaries) if isinstance(boundaries, TensorView) else type(boundaries).__name__
        raise ShapeError(f"bucketize: boundaries must be a tensor of one dim, got {given}")
    element = ops.unsqueeze(input, -1)
    above = ops.gt(boundaries, element) if right else ops.ge(boundaries, element)
    found = ops.sum(ops.logical_not(above), -1)
    return ops.cast(found, torch.int32) if out_int32 else found


def one_hot(tensor: TensorView, num_classes: int = -1) -> TensorView:
    if tensor.dtype != torch.int64:
        raise DtypeError(f"one_hot: classes must be int64, got {tensor.dtype}; convert them first, with .long()")
    if num_classes < 1:
        raise CallError(f"one_hot: num_classes is required, because it does not depend on data; got {num_classes}")
    classes = _numbers(tensor.fusion, int(num_classes))
    require_inside("one_hot", classes, 0, tensor)
    return ops.cast(ops.eq(ops.unsqueeze(tensor, -1), classes), torch.int64)


def _numbers(fusion: Fusion, count: int) -> TensorView:
    """0, 1, 2, ... as a traced tensor."""
    domain = IterDomain(const(count), name=fusion.fresh("d"))
    return ops.position(pulled(fusion, torch.int64, (domain,), constant(0, torch.int64)), 0)


# --- several tensors ---------------------------------------------------------------------------------------------------


def hstack(tensors: Sequence[TensorView]) -> TensorView:
    tensors = [ops.unsqueeze(x, 0) if x.ndim == 0 else x for x in tensors]
    return ops.cat(tensors, 0 if tensors[0].ndim == 1 else 1)


def vstack(tensors: Sequence[TensorView]) -> TensorView:
    return ops.cat([_with_dims(x, 2) for x in tensors], 0)


def dstack(tensors: Sequence[TensorView]) -> TensorView:
    tensors = [_with_dims(x, 2) for x in tensors]
    return ops.cat([ops.unsqueeze(x, 2) if x.ndim == 2 else x for x in tensors], 2)


def column_stack(tensors: Sequence[TensorView]) -> TensorView:
    return ops.cat([ops.unsqueeze(_with_dims(x, 1), 1) if x.ndim < 2 else x for x in tensors], 1)


def _with_dims(x: TensorView, count: int) -> TensorView:
    while x.ndim < count:
        x = ops.unsqueeze(x, 0)
    return x


# --- shapes ------------------------------------------------------------------------------------------------------------


def _sizes(given: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes that are given one by one, or as a sequence."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else tuple(given)


def expand(input: TensorView, *size: Any, implicit: bool = False) -> TensorView:
    sizes = _sizes(size)
    added = len(sizes) - input.ndim
    if added < 0 or (added and any(d.is_ragged for d in input.domains)):
        raise ShapeError(f"expand: {shown(input)} has {input.ndim} dims, and there are {len(sizes)} sizes; pass -1 to keep a dim")
    domains = [_domain(input.fusion, "expand", each) for each in sizes[:added]]
    for k, (own, wanted) in enumerate(zip(input.domains, sizes[added:], strict=True)):
        if isinstance(wanted, SymbolicRaggedSize) and not own.is_ragged:
            raise RaggedSizeError(f"expand: {wanted} is the size of a ragged dim; to expand {shown(input)} to it, use expand_as")
        kept = not isinstance(wanted, Size) and wanted in (-1, own.name)
        if not kept and own.is_single:
            domains.append(_domain(input.fusion, "expand", wanted))
        elif kept or (not own.is_ragged and input.size_of(k) == wanted):
            domains.append(own)
        else:
            raise ShapeError(f"expand: dim {k} of {shown(input)} does not have size 1, and cannot get size {wanted}; pass -1")
    return _spread(input, tuple(domains))


def _spread(x: TensorView, domains: Sequence[IterDomain]) -> TensorView:
    """A tensor read over `domains`, aligned from the right; at 0 in its dims of size 1."""
    aligned = zip(x.domains, domains[len(domains) - x.ndim :], strict=True)
    index = tuple(Place(const(0)) if own.is_single and to is not own else to for own, to in aligned)
    return pulled(x.fusion, x.dtype, domains, x.at(index))


def _domain(fusion: Fusion, name: str, size: Any) -> IterDomain:
    """A new dim."""
    if isinstance(size, SymbolicRaggedSize):
        raise RaggedSizeError(f"{name}: {size} is the size of a ragged dim; for a tensor with the same rows, use zeros_like")
    if not isinstance(size, int | Size) or isinstance(size, bool) or (not isinstance(size, Size) and size < 0):
        raise ShapeError(f"{name}: a size must be a number that is not negative, got {size!r}")
    return IterDomain(size.expr if isinstance(size, Size) else const(size), name=fusion.fresh("d"))


def repeat(input: TensorView, *repeats: Any) -> TensorView:
    counts = _sizes(repeats)
    if len(counts) < input.ndim or (len(counts) > input.ndim and any(d.is_ragged for d in input.domains)):
        raise ShapeError(f"repeat: {shown(input)} needs a number for each of its {input.ndim} dims, got {len(counts)}")
    return _repeated("repeat", _with_dims(input, len(counts)), counts)


def tile(input: TensorView, *dims: Any) -> TensorView:
    counts = _sizes(dims)
    return repeat(input, (*(1,) * (input.ndim - len(counts)), *counts))


def _repeated(name: str, x: TensorView, counts: Sequence[Any]) -> TensorView:
    for dim, count in enumerate(int(each) for each in counts):
        if count < 1:
            raise ShapeError(f"{name}: a dim is repeated at least once, got {tuple(counts)}; slice it, as in x[:, :0]")
        x = ops.cat([x] * count, dim) if count > 1 else x
    return x


def repeat_interleave(input: TensorView, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> TensorView:
    """Each position several times, by a number that is the same for all."""
    if isinstance(repeats, TensorView) or dim is None:
        raise CallError(f"repeat_interleave ({user_line()}): takes a number of repeats and a dim; use index_select for others")
    dim, count = dim_of("repeat_interleave", input, dim), int(repeats)
    if counted(input, dim):
        raise ShapeError(
            f"repeat_interleave: dim {dim} of {shown(input)} counts rows; outside of traced functions, take rows several times: "
            "jt[torch.arange(len(jt)).repeat_interleave(k)]"
        )
    if count < 1:
        raise ShapeError(f"repeat_interleave: repeats must be positive, got {count}; slice it, as in x[:, :0]")
    inside = ops.unsqueeze(input, dim + 1)
    sizes = [-1] * inside.ndim
    sizes[dim + 1] = count
    return ops.flatten(expand(inside, sizes), dim, dim + 1)


def movedim(input: TensorView, source: Any, destination: Any) -> TensorView:
    return ops.permute(input, *movedim_order(input.ndim, source, destination))


def numel(input: TensorView) -> Any:
    """The number of elements, which for rows is that of their values."""
    return math.prod((ops.values(input) if any(d.is_ragged for d in input.domains) else input).shape)


# --- rows --------------------------------------------------------------------------------------------------------------


def num_rows(input: TensorView) -> Any:
    """The number of innermost rows."""
    return ops.offsets(input).size_of(0) - 1


def num_groups(input: TensorView) -> Any:
    """The number of outermost components."""
    return ops.structure_of(input).offsets[0].size_of(0) - 1


def row_ids(input: TensorView) -> TensorView:
    """The row of every position, for one level of rows."""
    ragged = [k for k, d in enumerate(input.domains) if d.is_ragged]
    if len(ragged) != 1:
        raise ShapeError(f"row_ids of {shown(input)}: a traced function has them for one level of rows; pass them as an argument")
    inside = ops.position(input, ragged[0])
    return ops.values(ops.broadcast_to(ops.unsqueeze(ops.position(inside, 0), 1), inside))


# --- new tensors -------------------------------------------------------------------------------------------------------


def _filled(name: str, input: TensorView, size: Sequence[Any], value: Number, dtype: Dtype, options: Any) -> TensorView:
    device = options.pop("device", None)
    if device is not None and torch.device(device) != input.device:
        raise CallError(f"{name} ({user_line()}): a traced function runs on one device, {input.device}, got device={device}")
    unknown = [key for key, given in options.items() if key not in ("layout", "pin_memory", "requires_grad") or given]
    if unknown:
        raise CallError(f"{name} ({user_line()}): does not take {', '.join(unknown)} in a traced function")
    domains = [_domain(input.fusion, name, each) for each in _sizes(size)]
    dtype = dtype or input.dtype
    return pulled(input.fusion, dtype, domains, constant(value, dtype))


def new_zeros(input: TensorView, *size: Any, dtype: Dtype = None, **options: Any) -> TensorView:
    return _filled("new_zeros", input, size, 0, dtype, options)


def new_ones(input: TensorView, *size: Any, dtype: Dtype = None, **options: Any) -> TensorView:
    return _filled("new_ones", input, size, 1, dtype, options)


def new_empty(input: TensorView, *size: Any, dtype: Dtype = None, **options: Any) -> TensorView:
    return _filled("new_empty", input, size, 0, dtype, options)


def new_full(input: TensorView, size: Sequence[Any], fill_value: Number, *, dtype: Dtype = None, **options: Any) -> TensorView:
    return _filled("new_full", input, size, fill_value, dtype, options)
