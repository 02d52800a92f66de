"""Reductions and scans of traced values: statements whose results are private blocks. Holes never count (rule 3).

In: a value, the dims to reduce, and the other arguments of torch's functions. Out: a value without these dims, which records
the reductions that feed it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from serrate.frontend.kernel.machine import refuse
from serrate.ir.expr import Expr, const
from serrate.ir.loops import Reduce, Running, existing, held, number
from serrate.ir.reductions import reduction
from serrate.ir.tile import Axis
from serrate.ir.values import Value, call, constant
from serrate.tiles.elementwise import cast
from serrate.tiles.shaping import squeeze
from serrate.tiles.values import Feeder, Traced

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace


Picked = namedtuple("Picked", "values indices")


def dims_of(x: Traced, dim: Any, what: str) -> list[int]:
    """The reduced dims as non-negative numbers."""
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
                "add it first, as in rows[:, None] + x"
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
    fed = [Feeder(trace.clock, tuple(over), x.guard()), *feeders_over(x.fed, over)]
    conditions = [c for c in x.conditions if not c.over(over)]
    axes = [None if d in dims else a for d, a in enumerate(x.axes)]
    axes = axes if keepdim else [a for d, a in enumerate(axes) if d not in dims]
    return Traced(value, axes, conditions, fed)


def where_exists(x: Traced, value: Value, other: Any) -> Value:
    """A value where `x` exists; elsewhere a number."""
    rows = tuple(c.holds for c in x.conditions if c.row)
    if not rows:
        return value
    here = call("gt", existing((), rows, torch.int64), constant(0, torch.int64), dtype=torch.bool)
    return call("where", here, value, constant(other, value.dtype), dtype=value.dtype)


def feeders_over(fed: Sequence[Feeder], over: Sequence[Axis]) -> list[Feeder]:
    """The reductions that feed a value, for a reduction of that value: any position along the reduced axes counts."""
    found = []
    for f in fed:
        more = [a for a in over if a not in f.over and any(s in g.symbols for g in f.guard for s in (a.position, a.lane))]
        found.append(Feeder(f.time, (*f.over, *more), f.guard))
    return found


def sum(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Traced:
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    return reduced(trace, x, dims_of(x, dim, "sum"), keepdim, "sum", result)


def prod(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Traced:
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    return reduced(trace, x, dims_of(x, dim, "prod"), keepdim, "prod", result)


def mean(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Traced:
    if not (dtype or x.dtype).is_floating_point:
        refuse(f"mean of {x.dtype}: convert it to a float first, as in torch")
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


def extreme(what: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
        if x.dtype == torch.bool:
            return truth("any" if what == "max" else "all")(trace, x, dim, keepdim)
        return reduced(trace, x, dims_of(x, dim, f"a{what}"), keepdim, what, x.dtype)

    return run


def truth(what: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
        return reduced(trace, x, dims_of(x, dim, what), keepdim, what, torch.bool)

    return run


amax, amin = extreme("max"), extreme("min")
NOWHERE = torch.iinfo(torch.int64).max


def arg(what: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
        if dim is None:
            if x.ndim != 1:
                refuse(f"arg{what} over all of {x.ndim} dims depends on the block sizes: pass dim=")
            dim = 0
        (d,) = dims_of(x, dim, f"arg{what}")
        axis = x.axes[d]
        best = reduced(trace, x, [d], True, what, x.dtype)
        # The first lane that exists and holds the extreme; NaN counts as one, as in torch.
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


def max_like(what: str, both: Callable[..., Any]) -> Callable[..., Any]:
    largest, place = extreme(what), arg(what)

    def run(trace: Trace, x: Traced, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Traced):
            return trace.call(both, (x, dim), {})
        return largest(trace, x) if dim is None else Picked(largest(trace, x, dim, keepdim), place(trace, x, dim, keepdim))

    return run


def softmax(trace: Trace, x: Traced, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = x if dtype is None else cast(x, dtype)
    shifted = (x - amax(trace, x, dim, True)).exp()
    return shifted / sum(trace, shifted, dim, True)


def logsumexp(trace: Trace, x: Traced, dim: int, keepdim: bool = False) -> Any:
    top = amax(trace, x, dim, True)
    # Subtract the maximum, unless it is infinite.
    shift: Any = trace.call(torch.where, (trace.call(torch.isinf, (top,), {}), 0.0, top), {})
    total = sum(trace, (x - shift).exp(), dim, True)
    found = total.log() + shift
    return found if keepdim else squeeze(trace, found, dim)


# --- scans ---


def cumulative(operator: str) -> Callable[..., Traced]:
    def run(trace: Trace, x: Traced, dim: int, dtype: torch.dtype | None = None) -> Traced:
        result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
        return scanned(trace, x if x.dtype == result else cast(x, result), dims_of(x, dim, "a scan")[0], operator)

    return run


def scanned(trace: Trace, x: Traced, dim: int, operator: str) -> Traced:
    """An inclusive scan along a dim: a statement whose result is a private block."""
    axis = x.axes[dim]
    if axis is None:
        return x
    identity = reduction(operator).identity(0, x.dtype)
    kept = [a for a in x.axes if a is not None and a is not axis]
    carry = trace.declare(trace.name_for("carry"), x.dtype, kept, identity)
    local = trace.declare(trace.name_for("scan"), x.dtype, [a for a in x.axes if a is not None], identity)
    lanes = tuple(a.block_lane for a in x.axes if a is not None)
    trace.emit(Running(lanes, x.guard(), local, carry, axis.block_lane, operator, x.value))
    return Traced(held(local), x.axes, x.conditions, [Feeder(trace.clock, (axis,), x.guard()), *feeders_over(x.fed, [axis])])


def fill(trace: Trace, x: Traced, v: Any) -> Traced:
    """Makes every lane exist, with `v` in holes. Bounds of plain ranges stay."""
    return Traced(where_exists(x, x.value, v), x.axes, [c for c in x.conditions if not c.row], x.fed)
