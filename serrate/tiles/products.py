"""Matrix products of traced values, accumulated in float32.

In: two blocks. Out: a block. Along the contracted dim, both operands are zeroed where either does not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from serrate.frontend.kernel.machine import refuse
from serrate.frontend.kernel.vocabulary import dot_dtype, product_dtype
from serrate.ir.expr import Less
from serrate.ir.loops import Dot, held
from serrate.ir.values import carried_dtype
from serrate.tiles.elementwise import broadcast_dims, cast
from serrate.tiles.reducing import feeders_over
from serrate.tiles.shaping import squeeze, unsqueeze, with_axes
from serrate.tiles.values import Feeder, Traced, as_traced

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace


def product(trace: Trace, a: Any, b: Any, out_dtype: torch.dtype | None = None) -> Traced:
    """Contracts the last dim of `a` with the second to last of `b`, accumulating in float32 (float64 for float64).

    Conditions on the contracted dim apply to both operands. A condition that mentions a dim the other operand lacks is an error.
    """
    if a.ndim == 0 or b.ndim == 0:
        refuse("a matrix product needs operands with at least one dim")
    if a.ndim == 1:
        return squeeze(trace, product(trace, unsqueeze(trace, a, 0), b, out_dtype), max(b.ndim, 2) - 2)
    if b.ndim == 1:
        return squeeze(trace, product(trace, a, unsqueeze(trace, b, 1), out_dtype), a.ndim - 1)
    depth, other = a.axes[-1], b.axes[-2]
    if (depth is None) != (other is None):
        refuse(f"a matrix product contracts {depth or other} with one lane: index both operands by the same tile")
    # Both operands over the dims (batch, rows, columns, contracted), so that these are four different axes.
    every, (left, right) = broadcast_dims(
        trace,
        [with_axes(a, [*a.axes[:-1], None, depth]), with_axes(b, [*b.axes[:-2], None, b.axes[-1], other])],
        "a product",
    )
    *_, rows, columns, depth = every
    every.pop()
    kind = product_dtype(a.dtype, b.dtype)
    if not kind.is_floating_point:
        left, right = cast(left, kind), cast(right, kind)
    result = out_dtype or torch.promote_types(a.dtype, b.dtype)
    shared = [d for d in (depth,) if d is not None]
    guard: list[Less] = []
    for x, free in ((left, rows), (right, columns)):
        for c in x.conditions:
            if c.over(shared):
                if free is not None and c.over([free]):
                    refuse(
                        f"a matrix product contracts {depth}, which exists under a condition on {free} "
                        "that the other operand cannot have: "
                        "make the lanes exist with hl.fill(x, 0), or write (a[:, :, None] * b).sum(1)"
                    )
                guard.append(c.holds)
    kept = [x for x in every if x is not None]
    dtype = result if carried_dtype(result) == kind else kind
    local = trace.declare(trace.name_for("product"), dtype, kept, 0 if kind == torch.int64 else 0.0, "sum")
    lanes = tuple(x.block_lane for x in (*kept, *shared))
    trace.emit(Dot(lanes, tuple(dict.fromkeys(guard)), local, left.value, right.value))
    conditions = [c for x in (left, right) for c in x.conditions if not c.over(shared)]
    fed = [Feeder(trace.clock, tuple(shared), tuple(dict.fromkeys((*left.guard(), *right.guard()))))]
    fed += feeders_over((*left.fed, *right.fed), shared)
    found = Traced(held(local), every, conditions, fed)
    return found if dtype == result else cast(found, result)


def dot(trace: Trace, a: Any, b: Any, acc: Any = None, out_dtype: torch.dtype | None = None) -> Any:
    """`hl.dot`: has `dot_dtype`, or is added to `acc` in its dtype."""
    a, b = as_traced(a), as_traced(b)
    if acc is None:
        return product(trace, a, b, out_dtype or dot_dtype(a.dtype, b.dtype))
    found: Any = acc + product(trace, a, b, acc.dtype)
    return found if out_dtype in (None, found.dtype) else cast(found, out_dtype)


def addmm(trace: Trace, acc: Any, a: Traced, b: Traced, *, beta: float = 1, alpha: float = 1) -> Any:
    made: Any = product(trace, a, b, acc.dtype)
    made = made if alpha == 1 else made * alpha
    return (acc if beta == 1 else acc * beta) + made
