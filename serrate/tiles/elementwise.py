"""Elementwise math on traced values, over the broadcast dims of their operands.

In: a torch function and its arguments. Out: a value with a lane for every position of the broadcast dims. The front end of `jit`
defines the functions, so that signatures and dtypes are the same in both; integers stay index expressions where those suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from serrate.errors import SerrateError
from serrate.frontend import torch_names
from serrate.frontend.kernel.machine import refuse
from serrate.frontend.kernel.random import random_bits
from serrate.frontend.kernel.vocabulary import instead
from serrate.frontend.ops.common import Lifted
from serrate.ir.expr import Expr, maximum, minimum
from serrate.ir.fusion import Fusion
from serrate.ir.loops import Load, number
from serrate.ir.tile import Axis, Store
from serrate.ir.values import Constant, Read, Value, call, carried_dtype, constant, rewrite
from serrate.ir.view import TensorView
from serrate.tiles.values import Traced, as_traced, mentions, plain

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace

_ = torch_names  # imported for its side effects

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
DETACH = "detach()"
"""The key under which the line of a `detach` call is recorded. The call affects only gradients."""
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
"""Integer functions that stay index expressions."""


def elementwise(trace: Trace, function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Applies a function lane by lane, over the broadcast dims of all operands."""
    if name == "detach":
        trace.note(DETACH)
    if name in ("clone", "contiguous", "detach"):
        return args[0]
    if name in CASTS:
        return cast(args[0], CASTS[name])
    if name in ("to", "type_as"):
        dtype = _dtype_of(args[1:], kwargs)
        return args[0] if dtype is None else cast(args[0], dtype)
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Traced)]
    axes, moved = broadcast_dims(trace, given, name)
    new = dict(zip(map(id, given), moved, strict=True))
    args = [new.get(id(a), a) for a in args]
    kwargs = {k: new.get(id(a), a) for k, a in kwargs.items()}
    conditions = [c for m in moved for c in m.conditions]
    fed = [f for m in moved for f in m.fed]
    value = _as_index(name, args, kwargs) or _bits(name, args) or _random(function, args)
    return Traced(value or pointwise(function, name, args, kwargs), axes, conditions, fed)


def _random(function: Callable[..., Any], args: Sequence[Any]) -> Value | None:
    """Random bits, for which traced functions have no name."""
    if function is not random_bits:
        return None
    seed, position = (cast(as_traced(a), torch.int64).value for a in args[::2])
    return call("random_bits", seed, constant(args[1], torch.int64), position, dtype=torch.int32)


def _as_index(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Value | None:
    """The result as an index expression, if it is one."""
    if kwargs or len(args) != 2 or name not in WHOLE:
        return None
    sides = [as_traced(a) for a in args]
    if any(not isinstance(s, Traced) or s.dtype != torch.int64 or s.expr is None for s in sides):
        return None
    found = WHOLE[name](sides[0].expr, sides[1].expr)
    return None if found is None else number(found)


def cast(x: Traced, dtype: torch.dtype) -> Traced:
    """Converts a value to another dtype. Results in a 16-bit dtype are rounded here, not when they are computed."""
    if x.dtype == dtype and (carried_dtype(dtype) == dtype or isinstance(x.value, Load)):
        return x
    expr = x.expr
    if dtype == torch.int64 and expr is not None and not x.dtype.is_floating_point:
        return Traced(number(expr), x.axes, x.conditions, x.fed)
    return Traced(call("cast", x.value, dtype=dtype), x.axes, x.conditions, x.fed)


def block_value(x: Traced, dtype: torch.dtype) -> Value:
    """A value as stored in a private block of a dtype: blocks of 16-bit dtypes hold float32, so nothing is rounded."""
    return x.value if carried_dtype(x.dtype) == carried_dtype(dtype) else cast(x, dtype).value


def _dtype_of(rest: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    for each in (*rest, *kwargs.values()):
        if isinstance(each, torch.dtype):
            return each
        if isinstance(each, Traced):
            return each.dtype
    return None


ARITHMETIC = frozenset(["add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide"])
"""Functions whose number arguments have the precision of the arithmetic, not of the other operand's dtype."""
BITS = {"bitwise_and": "bitand", "bitwise_or": "bitor", "bitwise_xor": "bitxor"}


def _bits(name: str, args: Sequence[Any]) -> Value | None:
    """Bitwise functions of integers."""
    sides = [as_traced(a) for a in args]
    if name not in BITS or any(s.dtype.is_floating_point for s in sides) or all(s.dtype == torch.bool for s in sides):
        return None
    dims = [s.dtype for s in sides if s.ndim] or [s.dtype for s in sides]
    kind = _joined(dims)
    return call(BITS[name], *(cast(s, kind).value for s in sides), dtype=kind)


def _masked_fill(input: Any, mask: Any, value: Any) -> Value | None:
    """`masked_fill` by a number that is only known at run time, such as an argument. None for a constant, which the front end's
    definition serves; that definition tells numbers from lanes by their dims, and here every operand is one element."""
    if not isinstance(value, Traced):
        return None
    if value.ndim:
        refuse(f"masked_fill: value must be a number or a 0-dim tensor, got a value with {value.ndim} dims; use torch.where")
    return pointwise(torch.where, "where", (mask, cast(value, as_traced(input).dtype), input), {})


def pointwise(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Value:
    """The front end's definition of an elementwise function, for one element."""
    if name == "masked_fill":
        filled = _masked_fill(*args, **kwargs)
        if filled is not None:
            return filled
    operation = TensorView.operators.get(function) or TensorView.operators.get(name)
    if operation is None:
        refuse(f"{name} is not part of the tile language: {instead(name)}")
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
        elif weak and not floating and value.dtype.is_floating_point:
            value = call("cast", value, dtype=torch.get_default_dtype())
        made = fusion.input((2,), value.dtype)
        values[made.tensor] = value
        return Lifted(made.tensor, fusion) if weak and value.dtype.is_floating_point and name in ARITHMETIC and floating else made

    numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, Traced)]
    if numbers and all(isinstance(a.value, Constant) and not a.ndim for a in numbers):
        plain_ = [torch.tensor(a.value.number, dtype=a.dtype, device="cpu") if isinstance(a, Traced) else a for a in args]  # type: ignore[attr-defined]
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


def broadcast_dims(trace: Trace, values: Sequence[Traced], what: str) -> tuple[list[Axis | None], list[Traced]]:
    """Broadcasts operands, from the right: the axes of the result, and the operands over these axes.

    Every dim gets its own axis: if one tile appears in two dims, as in x[:, None] - x[None, :], the second is an alias.
    """
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
    axes = trace.distinct(axes)
    for c in (c for value in values for c in value.conditions if c.row):
        for alias in (a for a in axes if a is not None and a.alias_of is not None):
            if mentions(c.holds, alias.original) and not any(alias.original in v.axes for v in values if c in v.conditions):
                refuse(f"{what}: a jagged tile is used with two dims of {alias}, so its rows are ambiguous")
    moved = []
    for value in values:
        own = zip(value.axes, axes[ndim - value.ndim :], strict=True)
        names = {a: b for a, b in own if a is not None and b is not None and a is not b}
        moved.append(value.renamed(names) if names else value)
    return axes, moved


def _meet(one: Axis | None, other: Axis, dim: int, what: str) -> None:
    if one is None or one.original is other.original:
        return
    if (one.looped and other.looped) or any(a.looped and a.block is None for a in (one, other)):
        refuse(
            f"{what}: dim {dim} belongs to {one} in one operand and to {other} in another: "
            "separate them with None, as in x[:, None], or index both by one tile"
        )
    sizes = [a.block if a.looped else a.size for a in (one, other)]
    if sizes[0] != sizes[1]:
        refuse(f"{what}: dim {dim} has {sizes[0]} lanes ({one}) in one operand and {sizes[1]} ({other}) in another")
