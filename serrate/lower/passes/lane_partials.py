"""Lane partials: a reduction over several lanes keeps one partial result per position of the innermost lane.

In: a loop program. Out: the same; partial results are contiguous, so they vectorize, and are combined once per block.

    [r:16, d:64] t sum= x[r, d]   ->   t_d<d:64> = 0;  [r:16, d:64] t_d sum= x[r, d];  [d:64] t sum= t_d
"""

from __future__ import annotations

from dataclasses import replace

from serrate.ir.loops import Declare, Local, LoopProgram, Node, Reduce, held
from serrate.ir.reductions import reduction
from serrate.lower.names import Names
from serrate.lower.passes.common import Body, inward, kept, per_kernel

NARROWEST = 8
"""The fewest positions of the innermost lane for which this pays off."""


def lane_partials(program: LoopProgram) -> LoopProgram:
    """Splits reductions over several lanes into two steps."""
    names = Names(program)

    def change(body: Body) -> Body:
        out: list[Node] = []
        for node in body:
            out += _in_two_steps(node, names) if isinstance(node, Reduce) else (inward(node, change),)
        return kept(body, out)

    return per_kernel(program, lambda k: change(k.body))


def _in_two_steps(node: Reduce, names: Names) -> tuple[Node, ...]:
    last = node.lanes[-1] if node.lanes else None
    others = [lane for lane in node.lanes[:-1] if lane not in node.local.lanes]
    if last is None or last in node.local.lanes or not others or last.size < NARROWEST:
        return (node,)
    name = names.of((node.local, last), f"{node.local.name}_{last.symbol.name}")
    part = Local(name, node.local.dtype, (*node.local.lanes, last))
    identity = reduction(node.operator).identity(0, node.local.dtype)
    own = tuple(lane for lane in node.lanes if lane in part.lanes)
    return Declare(part, identity), replace(node, local=part), Reduce(own, (), node.local, node.operator, held(part))
