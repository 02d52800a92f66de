"""`hl.associative_scan`: a scan along a dim with the user's combine function.

In: the function, one value or several, a dim. Out: values with the same dims. Lane by lane, the running value is combined with
the next lane that exists; a lane that does not exist passes it on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from serrate.frontend.kernel.machine import refuse
from serrate.ir.loops import Assign, existing, held
from serrate.ir.tile import Along
from serrate.ir.values import call, constant
from serrate.tiles.elementwise import block_value, broadcast_dims
from serrate.tiles.reducing import dims_of, feeders_over
from serrate.tiles.values import Feeder, Traced, as_traced

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace


def associative_scan(trace: Trace, combine: Callable[..., Any], x: Any, dim: int, reverse: bool) -> Any:
    """The scan, as a loop over the lanes of one axis."""
    many = isinstance(x, (tuple, list))
    axes, given = broadcast_dims(trace, [as_traced(each) for each in (x if many else [x])], "associative_scan")
    (d,) = dims_of(given[0], dim, "associative_scan")
    axis = axes[d]
    if axis is None:
        return tuple(given) if many else given[0]
    kept = [a for a in axes if a is not None and a is not axis]
    rest = [a for n, a in enumerate(axes) if n != d]
    lanes = tuple(a.block_lane for a in kept)
    whole = [a for a in axes if a is not None]
    carries = [trace.declare(trace.name_for("carry"), each.dtype, kept, 0) for each in given]
    fresh = [trace.declare(trace.name_for("next"), each.dtype, kept, 0) for each in given]
    results = [trace.declare(trace.name_for("scan"), each.dtype, whole, 0) for each in given]
    seen = trace.declare(trace.name_for("seen"), torch.bool, kept, False)

    outer, trace.block = trace.block, []
    guard = tuple(dict.fromkeys(g for each in given for g in each.guard([axis])))
    exists = call("gt", existing((), guard, torch.int64), constant(0, torch.int64), dtype=torch.bool)
    before = [Traced(held(c), rest) for c in carries]
    here = [Traced(each.value, rest) for each in given]
    pairs = (tuple(before), tuple(here)) if many else (before[0], here[0])
    made = combine(*pairs)
    made = list(made) if many else [made]
    if len(made) != len(given):
        refuse(f"associative_scan: the function takes {len(given)} values but returns {len(made)}")
    for local, each, new in zip(fresh, here, made, strict=True):
        combined = block_value(as_traced(new), each.dtype)
        first = call("where", held(seen), combined, each.value, dtype=each.dtype)
        trace.block.append(Assign(lanes, (), local, first))
    for local, carry in zip(fresh, carries, strict=True):
        trace.block.append(Assign(lanes, (), carry, call("where", exists, held(local), held(carry), dtype=carry.dtype)))
    trace.block.append(Assign(lanes, (), seen, call("logical_or", held(seen), exists, dtype=torch.bool)))
    for local, carry in zip(results, carries, strict=True):
        trace.block.append(Assign(lanes, (), local, held(carry)))
    body, trace.block = tuple(trace.block), outer
    trace.block.append(Along(axis, reverse, body))

    out = []
    for each, local in zip(given, results, strict=True):
        fed = [Feeder(trace.clock, (axis,), each.guard()), *feeders_over(each.fed, [axis])]
        out.append(Traced(held(local), axes, each.conditions, fed))
    return tuple(out) if many else out[0]
