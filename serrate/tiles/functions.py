"""Torch functions on traced values: elementwise math, dims in another order, reductions, scans and products.

In: a torch function (or method, by its name) and its arguments. Out: a `Traced` value. Elementwise math is what the front end of
traced functions makes of it, so that every spelling, signature and dtype is the same there and here; reductions and products are
statements, whose results are private blocks.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from serrate.errors import SerrateError
from serrate.frontend.ops.common import Lifted
from serrate.interpret.functions import ELEMENTWISE, _instead, name_of
from serrate.interpret.run import refuse
from serrate.interpret.values import Lanes
from serrate.ir.expr import Expr, Less, const, maximum, minimum
from serrate.ir.fusion import Fusion
from serrate.ir.kernel import Axis
from serrate.ir.loops import Dot, Held, Number, Reduce, Running, existing, held, number
from serrate.ir.reductions import reduction
from serrate.ir.tile import Store
from serrate.ir.values import Constant, Read, Value, call, constant, rewrite
from serrate.ir.view import TensorView
from serrate.tiles.more import MORE
from serrate.tiles.values import Condition, Fed, LanesOf, OpenSize, Traced, TracedTensor, TracedTile, as_traced, plain

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace

Picked = namedtuple("Picked", "values indices")
SIXTEEN = (torch.float16, torch.bfloat16)
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "bool": torch.bool,
}
WHOLE: dict[str, Callable[[Expr, Expr], Expr | None]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "subtract": lambda a, b: a - b,
    "rsub": lambda a, b: b - a,
    "mul": lambda a, b: a * b,
    "multiply": lambda a, b: a * b,
    "floor_divide": lambda a, b: a // b if b.bounds[0] is not None and b.bounds[0] > 0 else None,
    "remainder": lambda a, b: a % b if b.bounds[0] is not None and b.bounds[0] > 0 else None,
    "minimum": minimum,
    "maximum": maximum,
}
"""Whole numbers that stay index expressions."""


def dispatch(trace: Trace, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a torch function gives for traced values."""
    name = name_of(function)
    if name == "__getitem__":
        return _getitem(trace, args[0], args[1])
    args = [_operand(trace, a) for a in args]
    kwargs = {k: _operand(trace, a) for k, a in kwargs.items()}
    if name in ELEMENTWISE:
        return elementwise(trace, function, name, args, kwargs)
    found = FUNCTIONS.get(name)
    if found is None:
        refuse(f"{name} is not part of the tile language: {_instead(name)}")
    if "axis" in kwargs:
        kwargs["dim"] = kwargs.pop("axis")
    try:
        return found(trace, *args, **kwargs)
    except TypeError as error:
        if "argument" in str(error) and type(error) is TypeError:
            refuse(f"{name}: {error}")
        raise


def _operand(trace: Trace, a: Any) -> Any:
    if isinstance(a, TracedTile):
        return a.index
    if isinstance(a, TracedTensor):
        return trace.load(a, (slice(None),) * a.ndim)
    if isinstance(a, Tensor):
        if a.dim() == 0 and a.device.type == "cpu":
            return Traced(constant(a.item(), a.dtype), ())
        refuse(
            f"a tensor of shape {tuple(a.shape)} meets values of tiles: make it before the loop and index it by tiles, as x[tile]"
        )
    return a


def _getitem(trace: Trace, x: Any, key: Any) -> Any:
    if isinstance(x, TracedTensor):
        return trace.load(x, key)
    return getitem(trace, x.index if isinstance(x, TracedTile) else x, key)


# --- elementwise ---


def elementwise(trace: Trace, function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Lane by lane, over the joint dims of all operands."""
    if name in ("clone", "contiguous", "detach"):
        return args[0]
    if name in CASTS:
        return cast(args[0], CASTS[name])
    if name in ("to", "type_as"):
        return cast(args[0], _dtype_of(args[0], args[1:], kwargs))
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Traced)]
    axes, moved = joint(given, name)
    new = dict(zip(map(id, given), moved, strict=True))
    args = [new.get(id(a), a) for a in args]
    kwargs = {k: new.get(id(a), a) for k, a in kwargs.items()}
    conditions = [c for m in moved for c in m.conditions]
    fed = [f for m in moved for f in m.fed]
    value = _whole(name, args, kwargs) or _bits(name, args) or pointwise(function, name, args, kwargs)
    return Traced(value, axes, conditions, fed)


def _whole(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Value | None:
    """The result as an index expression, if it is one."""
    if kwargs or len(args) != 2 or name not in WHOLE:
        return None
    sides = [as_traced(a) for a in args]
    if any(not isinstance(s, Traced) or s.dtype != torch.int64 or s.expr is None for s in sides):
        return None
    found = WHOLE[name](sides[0].expr, sides[1].expr)
    return None if found is None else number(found)


def cast(x: Traced, dtype: torch.dtype) -> Traced:
    """The value in another dtype."""
    if x.dtype == dtype:
        return x
    expr = x.expr
    if dtype == torch.int64 and expr is not None and not x.dtype.is_floating_point:
        return Traced(number(expr), x.axes, x.conditions, x.fed)
    return Traced(call("cast", x.value, dtype=dtype), x.axes, x.conditions, x.fed)


def _dtype_of(x: Traced, rest: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype:
    for each in (*rest, *kwargs.values()):
        if isinstance(each, torch.dtype):
            return each
        if isinstance(each, Traced):
            return each.dtype
    return x.dtype


ARITHMETIC = frozenset(["add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide"])
"""Functions in which a number is as exact as the arithmetic, not as the values it meets."""
BITS = {"bitwise_and": "bitand", "bitwise_or": "bitor", "bitwise_xor": "bitxor"}


def _bits(name: str, args: Sequence[Any]) -> Value | None:
    """Functions of the bits of whole numbers."""
    sides = [as_traced(a) for a in args]
    if name not in BITS or any(s.dtype.is_floating_point for s in sides) or all(s.dtype == torch.bool for s in sides):
        return None
    dims = [s.dtype for s in sides if s.ndim] or [s.dtype for s in sides]
    kind = _joined(dims)
    return call(BITS[name], *(cast(s, kind).value for s in sides), dtype=kind)


def pointwise(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Value:
    """What the front end makes of an elementwise function, for one element."""
    operation = TensorView.operators.get(function) or TensorView.operators.get(name) or MORE.get(name)
    if operation is None:
        refuse(f"{name} is not part of the tile language: {_instead(name)}")
    values: dict[Any, Value] = {}
    dtypes = [a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Traced) and a.ndim]
    floating = any(d.is_floating_point for d in dtypes)

    def view(a: Any) -> Any:
        if not isinstance(a, Traced):
            return a
        value, weak = a.value, not a.ndim and bool(dtypes) and a.dtype != torch.bool
        if isinstance(value, Constant) and not a.ndim:
            return value.number
        whole = not a.dtype.is_floating_point and bool(dtypes) and _joined(dtypes) != torch.bool
        if weak and (whole or (floating and name not in ARITHMETIC)):
            value = call("cast", value, dtype=_joined(dtypes))
        made = fusion.input((2,), value.dtype)
        values[made.tensor] = value
        return Lifted(made.tensor, fusion) if weak and value.dtype.is_floating_point and name in ARITHMETIC and floating else made

    numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, Traced)]
    if numbers and all(isinstance(a.value, Constant) and not a.ndim for a in numbers):
        plain_ = [torch.tensor(a.value.number, dtype=a.dtype) if isinstance(a, Traced) else a for a in args]  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunction():
            found = function(*plain_, **{k: plain(a) if isinstance(a, Traced) else a for k, a in kwargs.items()})
        return constant(found.item(), found.dtype)
    with Fusion("pointwise") as fusion:
        try:
            made = operation(*map(view, args), **{k: view(a) for k, a in kwargs.items()})
        except SerrateError as error:
            refuse(f"{name}: {error}")
    for definition in fusion.definitions:
        statement = definition.statement
        assert isinstance(statement, Store), f"{name} is not elementwise"
        values[statement.tensor] = rewrite(statement.value, lambda v: values[v.tensor.memory] if isinstance(v, Read) else None)
    return values[made.tensor.memory]


def _joined(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    found = dtypes[0]
    for each in dtypes[1:]:
        found = torch.promote_types(found, each)
    return found


def joint(values: Sequence[Traced], what: str) -> tuple[list[Axis | None], list[Traced]]:
    """The dims of operands that are broadcast together, from the right; and the operands in these dims' axes."""
    ndim = max((v.ndim for v in values), default=0)
    axes: list[Axis | None] = [None] * ndim
    for value in values:
        for dim, axis in enumerate(value.axes, start=ndim - value.ndim):
            met = axes[dim]
            if axis is None or met is axis:
                continue
            if met is None or (axis.looped and not met.looped):
                _meet(met, axis, dim, what)
                axes[dim] = axis
            else:
                _meet(met, axis, dim, what)
    moved = []
    for value in values:
        own = zip(value.axes, axes[ndim - value.ndim :], strict=True)
        names = {a: b for a, b in own if a is not None and b is not None and a is not b}
        moved.append(value.renamed(names) if names else value)
    return axes, moved


def _meet(one: Axis | None, other: Axis, dim: int, what: str) -> None:
    if one is None:
        return
    if (one.looped and other.looped) or any(a.looped and a.block is None for a in (one, other)):
        refuse(
            f"{what}: dim {dim} is of {one} in one operand and of {other} in another: "
            "separate them with None, as in x[:, None], or index both by one tile"
        )
    sizes = [a.block if a.looped else a.size for a in (one, other)]
    if sizes[0] != sizes[1]:
        refuse(f"{what}: dim {dim} has {sizes[0]} lanes ({one}) in one operand and {sizes[1]} ({other}) in another")


# --- dims ---


def _with_axes(x: Traced, axes: Sequence[Axis | None]) -> Traced:
    return Traced(x.value, axes, x.conditions, x.fed)


def _permute(trace: Trace, x: Traced, *dims: Any) -> Traced:
    order = [d % x.ndim for d in (dims[0] if dims and isinstance(dims[0], (list, tuple)) else dims)]
    if sorted(order) != list(range(x.ndim)):
        refuse(f"permute: {order} is not an order of {x.ndim} dims")
    return _with_axes(x, [x.axes[d] for d in order])


def _transpose(trace: Trace, x: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(trace, x, order)


def _t(trace: Trace, x: Traced) -> Traced:
    if x.ndim > 2:
        refuse(f".T and .t() are for two dims, not {x.ndim}: use .transpose(-2, -1) or .permute")
    return x if x.ndim < 2 else _transpose(trace, x, 0, 1)


def _unsqueeze(trace: Trace, x: Traced, dim: int) -> Traced:
    at = dim % (x.ndim + 1)
    return _with_axes(x, [*x.axes[:at], None, *x.axes[at:]])


def _squeeze(trace: Trace, x: Traced, dim: int | None = None) -> Traced:
    if dim is not None and not -x.ndim <= dim < x.ndim:
        refuse(f"squeeze: dim {dim} does not exist in a value of {x.ndim} dims")
    return _with_axes(x, [a for d, a in enumerate(x.axes) if a is not None or (dim is not None and d != dim % x.ndim)])


def getitem(trace: Trace, x: Traced, key: Any) -> Traced:
    """`None`, full slices, and one place or a fixed range of a dim that no tile runs over."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        at = next(n for n, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (x.ndim - sum(k is not None for k in keys) + 1)
    keys += [slice(None)] * (x.ndim - sum(k is not None for k in keys))
    if sum(k is not None for k in keys) > x.ndim:
        refuse(f"{len(keys)} indices for a value of {x.ndim} dims")
    old = 0
    axes: list[Axis | None] = []
    places: dict[Axis, tuple[Expr, Axis | None]] = {}
    for k in keys:
        if k is None:
            axes.append(None)
            continue
        axis = x.axes[old]
        old += 1
        if isinstance(k, slice) and k == slice(None):
            axes.append(axis)
            continue
        if isinstance(k, (Lanes, Tensor)) and not (isinstance(k, Traced) and k.expr is not None and k.expr.value is not None):
            refuse("a value of a tile is not gathered from: load from a tensor of the host, or use torch.where and a reduction")
        if axis is not None and axis.looped:
            refuse(
                f"one place of {axis} depends on the block size: "
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
        return _with_axes(x, axes)
    return placed(trace, x, {a: e for a, (e, _) in places.items()}, axes)


def placed(trace: Trace, x: Traced, places: dict[Axis, Expr], axes: Sequence[Axis | None]) -> Traced:
    """The value at other places along some of its axes: what is read from memory is read there."""
    if any(
        isinstance(v, Held) and any(lane.symbol in {a.position for a in places} for lane in v.local.lanes) for v in x.value.walk()
    ):
        refuse(
            "a part of a result that was computed in this loop: store it to a tensor first, or use torch.where and a reduction"
        )
    swap: dict[Expr, Expr] = {a.position: e for a, e in places.items()}
    from serrate.ir.loops import rewrite_value

    conditions = [Condition(c.holds.substitute(swap), c.row) for c in x.conditions]
    fed = [Fed(f.time, f.over, tuple(g.substitute(swap) for g in f.guard)) for f in x.fed]
    return Traced(rewrite_value(x.value, swap), axes, conditions, fed)


def _axis_of(size: Any) -> Axis | None:
    return size.axis if isinstance(size, (LanesOf, OpenSize)) else size.axis if isinstance(size, TracedTile) else None


def _expand(trace: Trace, x: Traced, *sizes: Any) -> Traced:
    shape = list(sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else list(sizes)
    own: list[Axis | None] = [*[None] * (len(shape) - x.ndim), *x.axes]
    axes: list[Axis | None] = []
    conditions = list(x.conditions)
    for axis, size in zip(own, shape, strict=True):
        wanted = _axis_of(size)
        if axis is None and wanted is not None:
            conditions.append(Condition(Less(wanted.position, wanted.end), False))
            axes.append(wanted)
        elif axis is None and not isinstance(size, Traced) and size > 1:
            axes.append(trace.fixed_axis(int(size)))
        else:
            axes.append(axis)
    return Traced(x.value, axes, conditions, x.fed)


def _reshape(trace: Trace, x: Traced, *sizes: Any) -> Traced:
    wanted = list(sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else list(sizes)
    open_ = [a for a in x.axes if a is not None and a.looped and a.block is None]
    lanes = [1 if a is None else a.block if a.looped else a.size for a in x.axes]
    if not open_:
        total = math.prod(n for n in lanes if n is not None)
        known = math.prod(int(s) for s in wanted if int(s) != -1)
        shape = [total // max(known, 1) if int(s) == -1 else int(s) for s in wanted]
        return _regrouped(trace, x, [n for n in lanes if n is not None], shape)
    # Tiles whose lanes are not known keep their dims, in their order; other dims may come and go where they are of size 1.
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
            f"a reshape of {', '.join(map(str, x.axes))} that depends on the block size: keep the dims of tiles as they are, "
            "or fix block_size="
        )
    return _with_axes(x, axes)


def _regrouped(trace: Trace, x: Traced, old: list[int], new: list[int]) -> Traced:
    from serrate.interpret.functions import regroup

    if math.prod(old) != math.prod(new):
        refuse(f"reshape: {old} has {math.prod(old)} lanes, and {new} has {math.prod(new)}")
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
                    refuse("a reshape that takes a tile's dim apart: load the tensor in that shape instead")
                places[axis] = flat % old[d]
            flat = flat // old[d]
    return placed(trace, x, places, axes) if places else _with_axes(x, axes)


def _flatten(trace: Trace, x: Traced, start_dim: int = 0, end_dim: int = -1) -> Traced:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    shape = list(x.shape)
    if any(isinstance(s, OpenSize) for s in shape[first : last + 1]) and first != last:
        refuse("flatten of tiles depends on the block size: keep their dims apart, or fix block_size=")
    return _reshape(trace, x, [*shape[:first], math.prod(int(s) for s in shape[first : last + 1]), *shape[last + 1 :]])


def _like(value: float) -> Callable[..., Traced]:
    def made(trace: Trace, x: Traced, dtype: torch.dtype | None = None, device: Any = None) -> Traced:
        ends = [Condition(Less(a.position, a.end), False) for a in x.axes if a is not None and a.looped]
        return Traced(constant(value, dtype or x.dtype), x.axes, ends)

    return made


def _full_like(trace: Trace, x: Traced, fill_value: Any, dtype: torch.dtype | None = None, device: Any = None) -> Traced:
    return _like(plain(fill_value) if isinstance(fill_value, Traced) else fill_value)(trace, x, dtype)


# --- reductions ---


def dims_of(x: Traced, dim: Any, what: str) -> list[int]:
    """The dims that are reduced, counted from the front."""
    given = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for d in given:
        if not -x.ndim <= d < x.ndim:
            refuse(f"{what}: dim {d} does not exist in a value of {x.ndim} dims")
    return sorted({d % x.ndim for d in given})


def reduced(trace: Trace, x: Traced, dims: Sequence[int], keepdim: bool, operator: str, dtype: torch.dtype) -> Traced:
    """A reduction over dims: a statement whose result is a private block. Holes do not count (rule 3)."""
    over = [a for d in dims if (a := x.axes[d]) is not None]
    for c in x.conditions:
        if c.row and c.over(over) and any(a not in x.axes and a.block != 1 and c.over([a]) for a in trace.axes_open):
            refuse(
                f"{operator} over a jagged tile, but the value does not have the dim of its rows: "
                "bring it in first, as rows[:, None] + x"
            )
    kept = [a for d, a in enumerate(x.axes) if d not in dims and a is not None]
    guard = x.guard()
    value = x.value if x.dtype == dtype else cast(x, dtype).value
    if operator in ("any", "all") and value.dtype != torch.bool:
        value = call("cast", value, dtype=torch.bool)
    identity = reduction(operator).identity(0, dtype)
    if over:
        local = trace.declare(trace.name_for(operator), dtype, kept, identity, operator)
        lanes = tuple(a.block_lane for a in x.axes if a is not None)
        trace.emit(Reduce(lanes, guard, local, operator, value))
        value = held(local)
    else:
        value = where_exists(x, value, identity)
    fed = [Fed(trace.clock, tuple(over), x.guard()), *_fed_over(x.fed, over)]
    conditions = [c for c in x.conditions if not c.over(over)]
    axes = [None if d in dims else a for d, a in enumerate(x.axes)]
    axes = axes if keepdim else [a for d, a in enumerate(axes) if d not in dims]
    return Traced(value, axes, conditions, fed)


def where_exists(x: Traced, value: Value, other: Any) -> Value:
    """A value in the rows in which another one exists; elsewhere a number."""
    rows = tuple(c.holds for c in x.conditions if c.row)
    if not rows:
        return value
    here = call("gt", existing((), rows, torch.int64), constant(0, torch.int64), dtype=torch.bool)
    return call("where", here, value, constant(other, value.dtype), dtype=value.dtype)


def _fed_over(fed: Sequence[Fed], over: Sequence[Axis]) -> list[Fed]:
    """What fed a value, as what is reduced from it sees that: anything along the reduced axes."""
    found = []
    for f in fed:
        more = [a for a in over if a not in f.over and any(s in g.symbols for g in f.guard for s in (a.position, a.lane))]
        found.append(Fed(f.time, (*f.over, *more), f.guard))
    return found


def _sum(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Traced:
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    return reduced(trace, x, dims_of(x, dim, "sum"), keepdim, "sum", result)


def _prod(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Traced:
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    return reduced(trace, x, dims_of(x, dim, "prod"), keepdim, "prod", result)


def _mean(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Traced:
    if not (dtype or x.dtype).is_floating_point:
        refuse(f"mean of {x.dtype}: convert it to a float first, as torch asks")
    dims = dims_of(x, dim, "mean")
    total = reduced(trace, x, dims, keepdim, "sum", dtype or x.dtype)
    over = [a for d in dims if (a := x.axes[d]) is not None]
    count = existing(tuple(a.block_lane for a in over), x.guard(), torch.int64)
    return Traced(
        call("div", total.value, call("cast", count, dtype=total.dtype), dtype=total.dtype),
        total.axes,
        total.conditions,
        total.fed,
    )


def _extreme(what: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
        if x.dtype == torch.bool:
            return _truth("any" if what == "max" else "all")(trace, x, dim, keepdim)
        return reduced(trace, x, dims_of(x, dim, f"a{what}"), keepdim, what, x.dtype)

    return run


def _truth(what: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
        return reduced(trace, x, dims_of(x, dim, what), keepdim, what, torch.bool)

    return run


_amax, _amin = _extreme("max"), _extreme("min")
NOWHERE = torch.iinfo(torch.int64).max


def _arg(what: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
        if dim is None:
            if x.ndim != 1:
                refuse(f"arg{what} over all of {x.ndim} dims depends on the block sizes: give dim=")
            dim = 0
        (d,) = dims_of(x, dim, f"arg{what}")
        axis = x.axes[d]
        best = reduced(trace, x, [d], True, what, x.dtype)
        # The first lane that exists and holds the extreme; NaN is one, as in torch.
        hit = call("eq", x.value, best.value, dtype=torch.bool)
        if x.dtype.is_floating_point:
            hit = call("logical_or", hit, call("isnan", x.value, dtype=torch.bool), dtype=torch.bool)
        lane: Expr = const(0) if axis is None else axis.lane if axis.looped else axis.position
        place = call("where", hit, number(lane), constant(NOWHERE, torch.int64), dtype=torch.int64)
        first = reduced(trace, Traced(place, x.axes, x.conditions, x.fed), [d], keepdim, "min", torch.int64)
        none = call("eq", first.value, constant(NOWHERE, torch.int64), dtype=torch.bool)
        found = call("where", none, constant(-1, torch.int64), first.value, dtype=torch.int64)
        return Traced(found, first.axes, first.conditions, first.fed)

    return run


def _max_like(what: str, both: Callable[..., Any]) -> Callable[..., Any]:
    extreme, arg = _extreme(what), _arg(what)

    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Traced):
            return dispatch(trace, both, (x, dim), {})
        return extreme(trace, x) if dim is None else Picked(extreme(trace, x, dim, keepdim), arg(trace, x, dim, keepdim))

    return run


def _softmax(trace: Trace, x: Traced, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = x if dtype is None else cast(x, dtype)
    shifted = (x - _amax(trace, x, dim, True)).exp()
    return shifted / _sum(trace, shifted, dim, True)


def _logsumexp(trace: Trace, x: Traced, dim: int, keepdim: bool = False) -> Any:
    top = _amax(trace, x, dim, True)
    # The largest is taken out, unless it is infinite.
    shift: Any = dispatch(trace, torch.where, (dispatch(trace, torch.isinf, (top,), {}), 0.0, top), {})
    total = _sum(trace, (x - shift).exp(), dim, True)
    found = total.log() + shift
    return found if keepdim else _squeeze(trace, found, dim)


# --- scans ---


def _cumulative(operator: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: int, dtype: torch.dtype | None = None) -> Traced:
        result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
        return scanned(trace, cast(x, result), dims_of(x, dim, "a scan")[0], operator)

    return run


def scanned(trace: Trace, x: Traced, dim: int, operator: str) -> Traced:
    """Values up to each position of a dim, combined: a statement whose result is a private block."""
    axis = x.axes[dim]
    if axis is None:
        return x
    identity = reduction(operator).identity(0, x.dtype)
    kept = [a for a in x.axes if a is not None and a is not axis]
    carry = trace.declare(trace.name_for("carry"), x.dtype, kept, identity)
    local = trace.declare(trace.name_for("scan"), x.dtype, [a for a in x.axes if a is not None], identity)
    lanes = tuple(a.block_lane for a in x.axes if a is not None)
    trace.emit(Running(lanes, x.guard(), local, carry, axis.block_lane, operator, x.value))
    return Traced(held(local), x.axes, x.conditions, [Fed(trace.clock, (axis,), x.guard()), *_fed_over(x.fed, [axis])])


# --- products ---


def product(trace: Trace, a: Any, b: Any, out_dtype: torch.dtype | None = None) -> Traced:
    """A product over the last dim of `a` and the last but one of `b`, carried in float32 (float64 for float64).

    A condition on the contracted dim is put on both operands; one that mentions a dim that the other operand lacks cannot be.
    """
    if a.ndim == 0 or b.ndim == 0:
        refuse("a product needs operands with at least one dim")
    if a.ndim == 1:
        return _squeeze(trace, product(trace, _unsqueeze(trace, a, 0), b, out_dtype), max(b.ndim, 2) - 2)
    if b.ndim == 1:
        return _squeeze(trace, product(trace, a, _unsqueeze(trace, b, 1), out_dtype), a.ndim - 1)
    depth, other = a.axes[-1], b.axes[-2]
    if (depth is None) != (other is None):
        one = depth or other
        refuse(f"a product contracts {one} of one operand with one lane of the other: they must be of one tile")
    if depth is not None and other is not None and depth is not other:
        if (depth.looped and other.looped) or any(x.looped and x.block is None for x in (depth, other)):
            refuse(f"a product contracts {depth} of one operand with {other} of the other: they must be of one tile")
        sizes = [x.block if x.looped else x.size for x in (depth, other)]
        if sizes[0] != sizes[1]:
            refuse(f"a product over {sizes[0]} lanes ({depth}) of one operand and {sizes[1]} ({other}) of the other")
        if other.looped:
            a, depth = a.renamed({depth: other}), other
        else:
            b = b.renamed({other: depth})
    rows, columns = a.axes[-2], b.axes[-1]
    if columns is not None and (columns is rows or columns is depth):
        columns = trace.like(columns)
        b = b.renamed({b.axes[-1]: columns}) if not columns.looped else b
    if rows is not None and rows is depth:
        refuse(f"a product of {rows} with itself: give the two dims different tiles")
    batch, (left, right) = joint([_with_axes(a, a.axes[:-2]), _with_axes(b, b.axes[:-2])], "a product")
    kind = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    if not (a.dtype.is_floating_point or b.dtype.is_floating_point):
        kind = torch.int64
    result = out_dtype or torch.promote_types(a.dtype, b.dtype)
    shared = [d for d in (depth,) if d is not None]
    guard: list[Less] = []
    for x, free in ((left, rows), (right, columns)):
        for c in x.conditions:
            if c.over(shared):
                if free is not None and c.over([free]):
                    refuse(
                        f"a product contracts {depth}, which exists under a condition on {free} "
                        "that the other operand cannot have: "
                        "make the lanes exist with hl.fill(x, 0), or write (a[:, :, None] * b).sum(1)"
                    )
                guard.append(c.holds)
    every = [*batch, rows, columns]
    kept = [x for x in every if x is not None]
    local = trace.declare(trace.name_for("product"), kind, kept, 0 if kind == torch.int64 else 0.0, "sum")
    lanes = tuple(x.block_lane for x in (*kept, *shared))
    trace.emit(Dot(lanes, tuple(dict.fromkeys(guard)), local, left.value, right.value))
    conditions = [c for x in (left, right) for c in x.conditions if not c.over(shared)]
    fed = [Fed(trace.clock, tuple(shared), tuple(dict.fromkeys((*left.guard(), *right.guard()))))]
    fed += _fed_over((*left.fed, *right.fed), shared)
    return cast(Traced(held(local), every, conditions, fed), result)


def dot(trace: Trace, a: Any, b: Any, acc: Any = None, out_dtype: torch.dtype | None = None) -> Any:
    """`hl.dot`: float32 for 16-bit operands, added to `acc` in its dtype."""
    a, b = as_traced(a), as_traced(b)
    kind = out_dtype or (torch.float32 if a.dtype in SIXTEEN else torch.promote_types(a.dtype, b.dtype))
    if acc is None:
        return product(trace, a, b, kind)
    return cast(acc + product(trace, a, b, acc.dtype), out_dtype or acc.dtype)


def _addmm(trace: Trace, acc: Any, a: Traced, b: Traced, *, beta: float = 1, alpha: float = 1) -> Any:
    made: Any = product(trace, a, b, acc.dtype)
    made = made if alpha == 1 else made * alpha
    return (acc if beta == 1 else acc * beta) + made


def fill(trace: Trace, x: Traced, v: Any) -> Traced:
    """Every lane exists; holes hold `v`. The ends of plain ranges stay ends."""
    return Traced(where_exists(x, x.value, v), x.axes, [c for c in x.conditions if not c.row], x.fed)


FUNCTIONS: dict[str, Callable[..., Any]] = {
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
    "sum": _sum,
    "prod": _prod,
    "mean": _mean,
    "amax": _amax,
    "amin": _amin,
    "max": _max_like("max", torch.maximum),
    "min": _max_like("min", torch.minimum),
    "argmax": _arg("max"),
    "argmin": _arg("min"),
    "any": _truth("any"),
    "all": _truth("all"),
    "softmax": _softmax,
    "logsumexp": _logsumexp,
    "cumsum": _cumulative("sum"),
    "cumprod": _cumulative("prod"),
    "matmul": product,
    "mm": product,
    "bmm": product,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "dot": product,
}


def conditions_of(trace: Trace, mask: Traced) -> tuple[Less, ...]:
    """A mask as conditions on indices: comparisons of whole numbers as they are, anything else asked for lane by lane."""
    found = _conjunction(trace, mask.value, mask)
    if found is not None:
        return found
    one = trace.index_of(cast(mask, torch.int64))
    return (Less(const(0), one),)


def _conjunction(trace: Trace, value: Value, whole: Traced) -> tuple[Less, ...] | None:
    from serrate.ir.values import Call

    if isinstance(value, Constant):
        return () if value.number else (Less(const(0), const(0)),)
    if not isinstance(value, Call):
        return None
    if value.function == "cast" and value.args[0].dtype == torch.bool:
        return _conjunction(trace, value.args[0], whole)
    if value.function == "logical_and":
        parts = [_conjunction(trace, a, whole) for a in value.args]
        return None if None in parts else tuple(c for p in parts for c in p)  # type: ignore[union-attr]
    if value.function not in ("lt", "le", "gt", "ge", "eq") or any(a.dtype != torch.int64 for a in value.args):
        return None
    sides = []
    for a in value.args:
        if isinstance(a, Number):
            sides.append(a.expr)
        elif isinstance(a, Constant):
            sides.append(const(int(a.number)))
        else:
            sides.append(trace.index_of(trace.part(a, whole)))
    left, right = sides
    if value.function == "eq":
        return (Less(left, right + 1), Less(right, left + 1))
    return {
        "lt": (Less(left, right),),
        "le": (Less(left, right + 1),),
        "gt": (Less(right, left),),
        "ge": (Less(right, left + 1),),
    }[value.function]
