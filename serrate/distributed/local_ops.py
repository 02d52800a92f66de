"""Operations on `PartitionedTensor`: what each rank computes on its own part, and sums over ranks.

In: an ATen operator and its arguments. Out: a PartitionedTensor, or a plain tensor where the sharded dim was summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from serrate.distributed.collectives import all_reduce
from serrate.distributed.tensor import MeshLayout, PartitionedTensor
from serrate.errors import PartitionError

aten = torch.ops.aten

Rule = Callable[..., Any]

_INSTEAD = "call to_local() for this rank's part, full_tensor() for the whole, or redistribute() for another layout"


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator, or raises PartitionError if it has no rule."""
    rule = _RULES.get(func)
    if rule is not None:
        return rule(func, *args, **kwargs)
    if torch.Tag.pointwise in func.tags:
        return _pointwise(func, *args, **kwargs)
    raise PartitionError(f"{func} is not defined for a PartitionedTensor; {_INSTEAD}")


def _layout_of(func: Any, *args: Any) -> MeshLayout:
    """The common layout of the partitioned arguments."""
    found = [each._layout for each in pytree.tree_leaves(args) if isinstance(each, PartitionedTensor)]
    for other in found[1:]:
        if not found[0].same(other):
            raise PartitionError(f"{func} got two layouts, {found[0]} and {other}; redistribute() one of them first")
    return found[0]


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    layout = _layout_of(func, args, kwargs)
    ndim = max(each.dim() for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    shaped = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, PartitionedTensor))
    if ndim != shaped.dim():
        raise PartitionError(f"{func} would add dims before those of a PartitionedTensor; {_INSTEAD}")

    def local(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if isinstance(each, PartitionedTensor):
            return each._local
        from_end = each.dim() - (ndim - layout.dim)
        _refuse_other_shards(func, layout, each)
        if from_end < 0 or each.shape[from_end] == 1:
            return each  # broadcasts along the sharded dim
        if each.shape[from_end] != shaped.shape[layout.dim]:
            raise PartitionError(
                f"{func}: a plain tensor is the same on every rank, and must have size 1 or {shaped.shape[layout.dim]} in the "
                f"sharded dim, got shape {tuple(each.shape)}; wrap a rank's own part with PartitionedTensor.from_local"
            )
        return layout.with_dim(from_end).part_of(each)

    args_, kwargs_ = pytree.tree_map(local, (args, kwargs))
    out = func(*args_, **kwargs_)
    first = args[0] if args else None
    if func._schema.name.endswith("_") and isinstance(first, PartitionedTensor):
        return first
    return pytree.tree_map_only(Tensor, lambda each: PartitionedTensor(each, layout), out)


def _refuse_other_shards(func: Any, layout: MeshLayout, plain: Tensor | None) -> None:
    if any(isinstance(each, Shard) for each in layout.others) and (plain is None or plain.numel() > 1):
        raise PartitionError(f"{func}: the tensor is sharded along another dim of the mesh too ({layout.placements}); {_INSTEAD}")


def _same_shape(func: Any, x: PartitionedTensor, *args: Any, **kwargs: Any) -> Any:
    """Copies, casts and the `_like` factories."""
    return PartitionedTensor(func(x._local, *args, **kwargs), x._layout)


def _along(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Softmax and its gradient: along one dim, which must not be the sharded one."""
    layout = _layout_of(func, args)
    count = sum(isinstance(each, Tensor) for each in args)
    local = [each._local if isinstance(each, PartitionedTensor) else layout.part_of(each) for each in args[:count]]
    dim = args[count] % args[0].dim()
    _refuse_other_shards(func, layout, None)
    if dim == layout.dim:
        raise PartitionError(f"{func}: dim {dim} is sharded, and a rank does not have all of it; {_INSTEAD}")
    return PartitionedTensor(func(*local, *args[count:], **kwargs), layout)


def _reduce(func: Any, x: PartitionedTensor, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:
    """Reductions over other dims are local; a sum over the sharded dim is added up over ranks."""
    layout = x._layout
    _refuse_other_shards(func, layout, None)
    whole = dim is None or (isinstance(dim, Sequence) and not dim)
    dims = list(range(x.dim())) if whole else [d % x.dim() for d in (dim if isinstance(dim, Sequence) else [dim])]
    keepdim = kwargs.get("keepdim", rest[0] if rest and isinstance(rest[0], bool) else False)
    packet = func.overloadpacket
    if layout.dim not in dims:
        kept = layout.dim if keepdim else layout.dim - sum(d < layout.dim for d in dims)
        return pytree.tree_map_only(
            Tensor, lambda each: PartitionedTensor(each, layout.with_dim(kept)), func(x._local, dim, *rest, **kwargs)
        )
    if packet is not aten.sum:
        raise PartitionError(f"{func} over dim {layout.dim}, which is sharded, needs other ranks; {_INSTEAD}")
    args = () if func is aten.sum.default else (dim, *rest)
    return all_reduce(func(x._local, *args, **kwargs), layout.group)


def _mm(func: Any, a: Tensor, b: Tensor) -> Any:
    layout = _layout_of(func, a if isinstance(a, PartitionedTensor) else b)
    _refuse_other_shards(func, layout, None)
    rows = isinstance(a, PartitionedTensor) and a._layout.dim == a.dim() - 2
    columns = isinstance(b, PartitionedTensor) and b._layout.dim == b.dim() - 1
    if rows and not isinstance(b, PartitionedTensor) and isinstance(a, PartitionedTensor):
        return PartitionedTensor(func(a._local, b), a._layout)
    if columns and not isinstance(a, PartitionedTensor) and isinstance(b, PartitionedTensor):
        return PartitionedTensor(func(a, b._local), b._layout)
    inner_a, inner_b = a.dim() - 1, b.dim() - 2
    if rows or columns or layout.dim not in (inner_a, inner_b):
        raise PartitionError(f"{func} of two tensors that are both sharded in the result, or along a batch dim; {_INSTEAD}")
    local = [
        x._local if isinstance(x, PartitionedTensor) else layout.with_dim(dim).part_of(x)
        for x, dim in ((a, inner_a), (b, inner_b))
    ]
    layouts = [x._layout.with_dim(0) for x in (a, b) if isinstance(x, PartitionedTensor)]
    if not layouts[0].same(layouts[-1]):
        raise PartitionError(f"{func} got two layouts, {layouts[0]} and {layouts[-1]}; redistribute() one of them first")
    return all_reduce(func(*local), layout.group)


def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _mm(aten.mm.default, a, b)
    scaled = product if alpha == 1 else product * alpha
    return scaled + (bias if beta == 1 else bias * beta)


def _permute(func: Any, x: PartitionedTensor, *args: Any) -> Any:
    layout = x._layout
    _refuse_other_shards(func, layout, None)
    order = torch.empty([1] * x.dim(), device="meta")
    # Where the sharded dim goes: it is the only one that does not have size 1.
    probe = order.expand([2 if k == layout.dim else 1 for k in range(x.dim())])
    dim = list(func(probe, *args).shape).index(2)
    return PartitionedTensor(func(x._local, *args), layout.with_dim(dim))


def _view(func: Any, x: PartitionedTensor, size: Sequence[int]) -> Any:
    """A view in which the sharded dim stays, is merged with dims after it, or is split into itself and dims after it."""
    layout = x._layout
    _refuse_other_shards(func, layout, None)
    known = math.prod(n for n in size if n != -1)
    sizes = [n if n != -1 else x.numel() // max(known, 1) for n in size]
    before, count = math.prod(x.shape[: layout.dim]), x.shape[layout.dim]
    trailing = math.prod(x.shape[layout.dim + 1 :])
    for dim in range(len(sizes)):
        # Counted from the end, because a tensor without positions has no products before the sharded dim.
        rest = math.prod(sizes[dim + 1 :])
        if math.prod(sizes[:dim]) != before or rest == 0 or sizes[dim] * rest != count * trailing:
            continue
        scaled = layout.counts * trailing
        if bool((scaled % rest).any()) or (count == 0 and sizes[dim]):
            break
        local = list(sizes)
        local[dim] = x._local.shape[layout.dim] * trailing // rest
        return PartitionedTensor(func(x._local, local), layout.with_dim(dim, scaled // rest))
    raise PartitionError(f"{func} to {tuple(size)} would mix positions of the sharded dim {layout.dim}; {_INSTEAD}")


def _expand(func: Any, x: PartitionedTensor, size: Sequence[int], *rest: Any, **kwargs: Any) -> Any:
    if len(size) != x.dim() or size[x._layout.dim] not in (-1, x.shape[x._layout.dim]):
        raise PartitionError(f"{func} to {tuple(size)} would change the sharded dim; {_INSTEAD}")
    _refuse_other_shards(func, x._layout, None)
    local = [x._local.shape[k] if k == x._layout.dim else n for k, n in enumerate(size)]
    return PartitionedTensor(func(x._local, local, *rest, **kwargs), x._layout)


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            aten.detach.default,
            aten.alias.default,
            aten.clone.default,
            aten._to_copy.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.empty_like.default,
            aten.full_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
        ),
        _same_shape,
    ),
    **dict.fromkeys(
        (
            aten._softmax.default,
            aten._log_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
        ),
        _along,
    ),
    **dict.fromkeys(
        (
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.mean.default,
            aten.mean.dim,
            aten.prod.dim_int,
            aten.amax.default,
            aten.amin.default,
            aten.any.dim,
            aten.all.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.logsumexp.default,
            aten.linalg_vector_norm.default,
            aten.var.correction,
            aten.std.correction,
        ),
        _reduce,
    ),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default), _permute),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    aten.expand.default: _expand,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
}
