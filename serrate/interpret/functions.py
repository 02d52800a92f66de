"""Torch functions on tiles: elementwise math, permuting and reshaping.

In: a torch function (or the name of a method) and its arguments. Out: a `ConcreteValue`; unsupported functions raise.

Elementwise math runs in all lanes, including holes; its result exists where all its operands do (rule 2). Aligned dims must
belong to one tile, even if their numbers of lanes are equal: block sizes must not affect the meaning of a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.frontend.kernel.machine import refuse
from serrate.frontend.kernel.random import random_bits
from serrate.frontend.kernel.values import Lanes
from serrate.frontend.kernel.vocabulary import ELEMENTWISE, expand_keys, instead, name_of, regroup
from serrate.interpret import reducing
from serrate.interpret.axes import ConcreteAxis, FedLanes, LaneMask, fixed, meet
from serrate.interpret.values import SIXTEEN, ConcreteValue, value_of

CASTS = frozenset(["to", "type_as", "half", "bfloat16"])
DIVIDING = frozenset(["floor_divide", "remainder", "fmod", "div", "divide"])
ROUNDING = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "pow", "remainder", "fmod"])
"""Functions in which torch rounds a scalar operand to the 16-bit dtype of the values."""


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a torch function on tiles."""
    name = name_of(function)
    with torch._C.DisableTorchFunction():
        if name in ELEMENTWISE or function is random_bits:
            return elementwise(function, name, args, kwargs)
        found = SHAPING.get(name) or reducing.FUNCTIONS.get(name)
        if found is None:
            refuse(f"{name} is not part of the tile language: {instead(name)}")
        if "axis" in kwargs:
            kwargs["dim"] = kwargs.pop("axis")
        try:
            return found(*(value_of(a) if isinstance(a, (Lanes, Tensor)) else a for a in args), **kwargs)
        except TypeError as error:
            if "argument" in str(error) and type(error) is TypeError:
                refuse(f"{name}: {error}")
            raise


def elementwise(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Elementwise, over the broadcast dims of all operands."""
    given = [value_of(a) for a in (*args, *kwargs.values()) if isinstance(a, (Lanes, Tensor))]
    axes, shape = joint_dims([(v.axes, v.data.shape) for v in given], name)
    conditions, fed, pending = joint_parts(given, len(axes))
    whole = ConcreteValue(torch.empty((), device="cpu").expand(shape), axes, conditions, fed, pending)
    raw = [value_of(a).data if isinstance(a, (Lanes, Tensor)) else a for a in args]
    named = {k: value_of(a).data if isinstance(a, (Lanes, Tensor)) else a for k, a in kwargs.items()}
    exact = name in DIVIDING and not any(_floating(a) for a in raw) and (name[:3] != "div" or named.get("rounding_mode"))
    if exact:
        # Integer division by zero traps. In a hole it gives 0; elsewhere it is the user's mistake.
        exists = (whole.exists() if given else torch.tensor(True, device="cpu")).broadcast_to(shape)
        divisor = torch.as_tensor(raw[1], device="cpu")
        raw[1] = torch.where(exists, divisor, torch.ones((), dtype=divisor.dtype, device="cpu"))
    sixteen = any(v.dtype in SIXTEEN for v in given)
    try:
        if sixteen and name in ROUNDING and not named:
            raw = [_held(x, torch.result_type(*_rounded(args, raw))) for x in raw]
        data, dtype = function(*raw, **named), None
        if sixteen:
            # torch determines the result dtype, and whether this is a cast.
            rounded = function(*_rounded(args, raw), **dict(zip(named, _rounded(kwargs.values(), named.values()), strict=True)))
            dtype = rounded.dtype
            data = data.to(dtype) if name in CASTS and dtype in SIXTEEN and _to_a_dtype(name, args, kwargs) else data
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        refuse(f"{name}: {error}")
    if exact:
        data = torch.where(exists, data, torch.zeros((), dtype=data.dtype, device="cpu"))
    return ConcreteValue(data, axes, conditions, fed, pending, dtype)


def _rounded(args: Iterable[Any], raw: Iterable[Any]) -> list[Any]:
    """The operands as torch sees them."""
    return [x.to(value_of(a).dtype) if isinstance(a, (Lanes, Tensor)) else x for a, x in zip(args, raw, strict=True)]


def _held(x: Any, dtype: torch.dtype) -> Any:
    """A scalar or 0-dim value, rounded to a 16-bit dtype."""
    if dtype not in SIXTEEN or isinstance(x, bool) or (isinstance(x, Tensor) and x.dim()):
        return x
    return torch.as_tensor(x, dtype=torch.float32, device="cpu").to(dtype).float()


def _to_a_dtype(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a cast names a dtype: `x.to("cpu")` does not."""
    return name != "to" or any(isinstance(a, (torch.dtype, Lanes, Tensor)) for a in (*args[1:], *kwargs.values()))


def _floating(x: Any) -> bool:
    return isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point())


def joint_dims(
    operands: Sequence[tuple[Sequence[ConcreteAxis | None], Sequence[int]]], what: str
) -> tuple[list[ConcreteAxis | None], list[int]]:
    """The dims of operands broadcast together, aligned from the right as in torch."""
    ndim = max((len(shape) for _, shape in operands), default=0)
    axes: list[ConcreteAxis | None] = [None] * ndim
    sizes = [1] * ndim
    for own, shape in operands:
        for dim, (axis, size) in enumerate(zip(own, shape, strict=True), start=ndim - len(shape)):
            met = axes[dim]
            if axis is None:
                continue
            if not meet(met, axis):
                refuse(
                    f"{what}: dim {dim} belongs to {met} in one operand and to {axis} in another: "
                    "separate them with None, as in x[:, None], or index both by one tile"
                )
            if met is not None and sizes[dim] != size:
                refuse(f"{what}: dim {dim} has {sizes[dim]} lanes ({met}) in one operand and {size} ({axis}) in another")
            if met is None or not met.named:
                axes[dim] = axis
            sizes[dim] = size
    return axes, sizes


def joint_parts(values: Sequence[ConcreteValue], ndim: int) -> tuple[list[LaneMask], list[FedLanes], list[Any]]:
    """The conditions and feeding reductions of all operands, for a result with `ndim` dims."""
    conditions: list[LaneMask] = []
    fed: dict[tuple[int, int], FedLanes] = {}
    pending: list[Any] = []
    for value in values:
        dims = range(ndim - value.data.dim(), ndim)
        conditions += (c.moved(dims, ndim) for c in value.conditions)
        fed |= {(id(f.mask), f.time): f.moved(dims, ndim) for f in value.fed}
        pending += value.pending
    return conditions, list(fed.values()), pending


# --- dims ---


def _permute(x: ConcreteValue, *dims: Any) -> ConcreteValue:
    order = [d % x.ndim for d in (dims[0] if dims and isinstance(dims[0], (list, tuple)) else dims)]
    if sorted(order) != list(range(x.ndim)):
        refuse(f"permute: {order} is not a permutation of {x.ndim} dims")
    place = {old: new for new, old in enumerate(order)}
    return x.arranged(x.data.permute(order), [place[d] for d in range(x.ndim)], [x.axes[d] for d in order])


def _transpose(x: ConcreteValue, dim0: int, dim1: int) -> ConcreteValue:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(x, order)


def _t(x: ConcreteValue) -> ConcreteValue:
    if x.ndim > 2:
        refuse(f".T and .t() need two dims, not {x.ndim}: use .transpose(-2, -1) or .permute")
    return x if x.ndim < 2 else _transpose(x, 0, 1)


def _unsqueeze(x: ConcreteValue, dim: int) -> ConcreteValue:
    return getitem(x, (*[slice(None)] * (dim % (x.ndim + 1)), None))


def _squeeze(x: ConcreteValue, dim: int | None = None) -> ConcreteValue:
    if dim is not None and not -x.ndim <= dim < x.ndim:
        refuse(f"squeeze: dim {dim} does not exist in a value of {x.ndim} dims")
    # A tile's dim is kept, whatever its number of lanes.
    gone = [d for d in range(x.ndim) if x.axes[d] is None and (dim is None or d == dim % x.ndim)]
    return getitem(x, tuple(0 if d in gone else slice(None) for d in range(x.ndim)))


def getitem(x: ConcreteValue, key: Any) -> ConcreteValue:
    """`None`, full slices, and a position or fixed range of a dim that is not a tile's."""
    old = 0
    narrow: list[slice] = []
    places: list[tuple[int, int]] = []
    axes: list[ConcreteAxis | None] = []
    for k in expand_keys(key if isinstance(key, tuple) else (key,), x.ndim):
        if k is None:
            axes.append(None)
            continue
        axis = x.axes[old]
        if isinstance(k, slice) and k == slice(None):
            narrow.append(k)
        elif isinstance(k, (Lanes, Tensor)):
            refuse("a tile value cannot be gathered from: load from a tensor instead, or use torch.where and a reduction")
        elif axis is not None and axis.named:
            refuse(
                f"selecting one lane of {axis} depends on the block size: "
                "use torch.where(tile.index == i, x, 0).sum(dim), or slice the tensor"
            )
        else:
            narrow.append(k if isinstance(k, slice) else slice(int(k), int(k) + 1 or None))
        if isinstance(k, slice):
            places.append((old, len(axes)))
            axes.append(axis if k == slice(None) else fixed(len(range(x.data.shape[old])[k])))
        old += 1
    place = dict(places)

    def part(t: Tensor) -> Tensor:
        t = t[tuple(n if t.shape[d] > 1 else slice(None) for d, n in enumerate(narrow))]
        kept = [d for d in range(t.dim()) if d in place]
        shape = [1] * len(axes)
        for d in kept:
            shape[place[d]] = t.shape[d]
        return t.reshape(shape)

    conditions = [
        LaneMask(part(c.mask), frozenset(place[d] for d in c.dims if d in place), c.key, c.born, c.row, c.keep)
        for c in x.conditions
    ]
    return ConcreteValue(part(x.data), axes, conditions, [FedLanes(part(f.mask), f.time) for f in x.fed], x.pending, x.dtype)


def _expand(x: ConcreteValue, *sizes: Any) -> ConcreteValue:
    shape = list(sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else list(sizes)
    grown = len(shape) - x.ndim
    lead = x.arranged(x.data.reshape((1,) * grown + tuple(x.data.shape)), range(grown, len(shape)), (None,) * grown + x.axes)
    axes: list[ConcreteAxis | None] = []
    for d, (axis, size) in enumerate(zip(lead.axes, shape, strict=True)):
        size = lead.data.shape[d] if size == -1 else size
        shape[d] = int(size)
        axes.append(axis if axis is not None or size == 1 else getattr(size, "axis", None) or fixed(int(size)))
    ends = [
        s.tile.index for s in (sizes[0] if isinstance(sizes[0], (list, tuple)) else sizes) if getattr(s, "tile", None) is not None
    ]
    end_conditions = [c.moved([axes.index(e.axes[0])], len(axes)) for e in ends for c in e.conditions if e.axes[0] in axes]
    return ConcreteValue(lead.data.expand(shape), axes, (*lead.conditions, *end_conditions), lead.fed, x.pending, x.dtype)


def _reshape(x: ConcreteValue, *sizes: Any) -> ConcreteValue:
    wanted = list(sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else list(sizes)
    data = x.data.reshape([int(s) for s in wanted])
    groups = regroup(list(x.data.shape), list(data.shape))
    axes: list[ConcreteAxis | None] = [None] * data.dim()
    reached: dict[int, frozenset[int]] = {}
    for old, new in groups:
        for d in old:
            reached[d] = frozenset(new)
        kept = x.axes[old[0]] if len(old) == len(new) == 1 else None
        for d in new:
            axes[d] = kept or fixed(data.shape[d])

    def full(mask: Tensor) -> Tensor:
        return mask.expand(x.data.shape).reshape(data.shape)

    def moved(c: LaneMask) -> LaneMask:
        dims = frozenset[int]().union(*(reached[d] for d in c.dims))
        mask = full(c.mask)[tuple(slice(None) if d in dims else slice(0, 1) for d in range(data.dim()))]
        return LaneMask(mask, dims, (*c.key, "reshaped", tuple(data.shape)), c.born, c.row, c.keep)

    return ConcreteValue(
        data, axes, [moved(c) for c in x.conditions], [FedLanes(full(f.mask), f.time) for f in x.fed], x.pending, x.dtype
    )


def _flatten(x: ConcreteValue, start_dim: int = 0, end_dim: int = -1) -> ConcreteValue:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return _reshape(x, [*x.data.shape[:first], math.prod(x.data.shape[first : last + 1]), *x.data.shape[last + 1 :]])


def _like(value: float) -> Callable[..., ConcreteValue]:
    def made(x: ConcreteValue, dtype: torch.dtype | None = None, device: Any = None) -> ConcreteValue:
        # Every lane of the tile, whether or not x exists there: only the tile bounds are kept.
        ends = [c for c in x.conditions if not c.row]
        return ConcreteValue(torch.full_like(x.data, value, dtype=dtype or x.dtype), x.axes, ends)

    return made


def _full_like(x: ConcreteValue, fill_value: float, dtype: torch.dtype | None = None, device: Any = None) -> ConcreteValue:
    return _like(fill_value)(x, dtype, device)


SHAPING: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem,
    "permute": _permute,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "t": _t,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "broadcast_to": _expand,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _flatten,
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
}
