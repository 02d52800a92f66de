"""Permuting, reshaping and slicing traced values.

In: a value and the arguments of the torch function. Out: the same lanes under other dims. A tile's dim is never split, since its
number of lanes may be open; only dims that no tile runs over can be sliced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from serrate.frontend.kernel.machine import refuse
from serrate.frontend.kernel.values import Lanes
from serrate.frontend.kernel.vocabulary import expand_keys, regroup
from serrate.ir.expr import Expr, Less, const
from serrate.ir.loops import Held
from serrate.ir.renaming import Swap
from serrate.ir.tile import Axis
from serrate.ir.values import constant
from serrate.tiles.values import Condition, Feeder, LanesOf, OpenSize, Traced, TracedTile, plain

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace


def with_axes(x: Traced, axes: Sequence[Axis | None]) -> Traced:
    return Traced(x.value, axes, x.conditions, x.fed)


def permute(trace: Trace, x: Traced, *dims: Any) -> Traced:
    order = [d % x.ndim for d in (dims[0] if dims and isinstance(dims[0], (list, tuple)) else dims)]
    if sorted(order) != list(range(x.ndim)):
        refuse(f"permute: {order} is not a permutation of {x.ndim} dims")
    return with_axes(x, [x.axes[d] for d in order])


def transpose(trace: Trace, x: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(trace, x, order)


def t(trace: Trace, x: Traced) -> Traced:
    if x.ndim > 2:
        refuse(f".T and .t() need two dims, not {x.ndim}: use .transpose(-2, -1) or .permute")
    return x if x.ndim < 2 else transpose(trace, x, 0, 1)


def unsqueeze(trace: Trace, x: Traced, dim: int) -> Traced:
    at = dim % (x.ndim + 1)
    return with_axes(x, [*x.axes[:at], None, *x.axes[at:]])


def squeeze(trace: Trace, x: Traced, dim: int | None = None) -> Traced:
    if dim is not None and not -x.ndim <= dim < x.ndim:
        refuse(f"squeeze: dim {dim} does not exist in a value of {x.ndim} dims")
    return with_axes(x, [a for d, a in enumerate(x.axes) if a is not None or (dim is not None and d != dim % x.ndim)])


def getitem(trace: Trace, x: Traced, key: Any) -> Traced:
    """Supports `None`, full slices, and an index or a fixed slice of a dim that no tile runs over."""
    old = 0
    axes: list[Axis | None] = []
    places: dict[Axis, tuple[Expr, Axis | None]] = {}
    for k in expand_keys(key if isinstance(key, tuple) else (key,), x.ndim):
        if k is None:
            axes.append(None)
            continue
        axis = x.axes[old]
        old += 1
        if isinstance(k, slice) and k == slice(None):
            axes.append(axis)
            continue
        if isinstance(k, (Lanes, Tensor)) and not (isinstance(k, Traced) and k.expr is not None and k.expr.value is not None):
            refuse("a tile value cannot be gathered from: load from a tensor instead, or use torch.where and a reduction")
        if axis is not None and axis.looped:
            refuse(
                f"selecting one lane of {axis} depends on the block size: "
                "use torch.where(tile.index == i, x, 0).sum(dim), or slice the tensor"
            )
        size = 1 if axis is None else axis.size
        assert size is not None
        part = range(size)[k] if isinstance(k, slice) else range(size)[int(k)]
        if isinstance(part, int):
            if axis is not None:
                places[axis] = (const(part), None)
            continue
        new = trace.fixed_axis(len(part))
        if axis is not None:
            places[axis] = (const(part.start) + (new.position * part.step if new is not None else 0), new)
        axes.append(new)
    if not places:
        return with_axes(x, axes)
    return reindex(trace, x, {a: e for a, (e, _) in places.items()}, axes)


def reindex(trace: Trace, x: Traced, places: dict[Axis, Expr], axes: Sequence[Axis | None]) -> Traced:
    """The value at other indices along some of its axes: its loads are moved there."""
    if any(
        isinstance(v, Held) and any(lane.symbol in {a.position for a in places} for lane in v.local.lanes) for v in x.value.walk()
    ):
        refuse("a value computed in this loop cannot be sliced: store it to a tensor first, or use torch.where and a reduction")
    swap: dict[Expr, Expr] = {a.position: e for a, e in places.items()}
    conditions = [Condition(c.holds.substitute(swap), c.row) for c in x.conditions]
    fed = [Feeder(f.time, f.over, tuple(g.substitute(swap) for g in f.guard)) for f in x.fed]
    return Traced(Swap(swap).value(x.value), axes, conditions, fed)


def _axis_of(size: Any) -> Axis | None:
    return size.axis if isinstance(size, (LanesOf, OpenSize)) else size.axis if isinstance(size, TracedTile) else None


def expand(trace: Trace, x: Traced, *sizes: Any) -> Traced:
    shape = list(sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else list(sizes)
    own: list[Axis | None] = [*[None] * (len(shape) - x.ndim), *x.axes]
    axes: list[Axis | None] = []
    conditions = list(x.conditions)
    for axis, size in zip(own, shape, strict=True):
        wanted = _axis_of(size)
        if axis is None and wanted is not None:
            conditions.append(Condition(Less(wanted.position, wanted.end), False))
            axes.append(wanted)
        elif axis is None:
            axes.append(None if wanted is None and int(size) == -1 else trace.fixed_axis(int(size)))
        else:
            lanes = axis.block if axis.looped else axis.size
            if wanted is None and lanes is not None and int(size) not in (-1, lanes):
                refuse(f"expand: a dim of {lanes} lanes cannot be expanded to {int(size)}: only dims of size 1 can")
            axes.append(axis)
    return Traced(x.value, trace.distinct(axes), conditions, x.fed)


def reshape(trace: Trace, x: Traced, *sizes: Any) -> Traced:
    wanted = list(sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else list(sizes)
    open_ = [a for a in x.axes if a is not None and a.looped and a.block is None]
    lanes = [1 if a is None else a.block if a.looped else a.size for a in x.axes]
    if not open_:
        total = math.prod(n for n in lanes if n is not None)
        known = math.prod(int(s) for s in wanted if int(s) != -1)
        shape = [total // max(known, 1) if int(s) == -1 else int(s) for s in wanted]
        return _regrouped(trace, x, [n for n in lanes if n is not None], shape)
    # Tiles with an open block size keep their dims, in order; other dims may be added or removed if their size is 1.
    named = [_axis_of(s) for s in wanted]
    missing = [a for a in open_ if a not in named]
    for n, s in enumerate(wanted):
        if named[n] is None and isinstance(s, int) and s == -1 and len(missing) == 1:
            named[n] = missing[0]
    kept = [a for a in x.axes if a is not None]
    fixed = iter([a for a in kept if not a.looped])
    axes: list[Axis | None] = []
    for n, s in enumerate(wanted):
        if named[n] is not None:
            axes.append(named[n])
        elif isinstance(s, int) and s == 1:
            axes.append(None)
        else:
            axes.append(next(fixed, None))
    if [a for a in axes if a is not None] != kept:
        refuse(
            f"a reshape of {', '.join(map(str, x.axes))} depends on the block size: keep the dims of tiles as they are, "
            "or fix block_size="
        )
    return with_axes(x, axes)


def _regrouped(trace: Trace, x: Traced, old: list[int], new: list[int]) -> Traced:
    if math.prod(old) != math.prod(new):
        refuse(f"reshape: {old} has {math.prod(old)} lanes, but {new} has {math.prod(new)}")
    axes: list[Axis | None] = [None] * len(new)
    places: dict[Axis, Expr] = {}
    for mine, theirs in regroup(old, new):
        if len(mine) == len(theirs) == 1:
            axes[theirs[0]] = x.axes[mine[0]]
            continue
        flat: Expr = const(0)
        for d in theirs:
            axes[d] = made = trace.fixed_axis(new[d])
            flat = flat * new[d] + (made.position if made is not None else 0)
        for d in reversed(mine):
            axis = x.axes[d]
            if axis is not None:
                if axis.looped:
                    refuse("a reshape cannot split a tile's dim: load the tensor in that shape instead")
                places[axis] = flat % old[d]
            flat = flat // old[d]
    return reindex(trace, x, places, axes) if places else with_axes(x, axes)


def flatten(trace: Trace, x: Traced, start_dim: int = 0, end_dim: int = -1) -> Traced:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    shape = list(x.shape)
    if any(isinstance(s, OpenSize) for s in shape[first : last + 1]) and first != last:
        refuse("flatten of tiles depends on the block size: keep their dims separate, or fix block_size=")
    return reshape(trace, x, [*shape[:first], math.prod(int(s) for s in shape[first : last + 1]), *shape[last + 1 :]])


def like(value: float) -> Callable[..., Traced]:
    def made(trace: Trace, x: Traced, dtype: torch.dtype | None = None, device: Any = None) -> Traced:
        ends = [Condition(Less(a.position, a.end), False) for a in x.axes if a is not None and a.looped]
        return Traced(constant(value, dtype or x.dtype), x.axes, ends)

    return made


def full_like(trace: Trace, x: Traced, fill_value: Any, dtype: torch.dtype | None = None, device: Any = None) -> Traced:
    return like(plain(fill_value) if isinstance(fill_value, Traced) else fill_value)(trace, x, dtype)
