"""Lane partials: a reduction over several lanes keeps one result for each position of the innermost until its block is done.

In: a loop program. Out: the same; such results lie side by side, so that a vector takes many of them, and are combined once.

    [r:16, d:64] t sum= x[r, d]   ->   t_d<d:64> = 0;  [r:16, d:64] t_d sum= x[r, d];  [d:64] t sum= t_d
"""

from __future__ import annotations

from dataclasses import replace

from serrate.ir.loops import Declare, Local, LoopProgram, Node, Reduce, held
from serrate.ir.reductions import reduction
from serrate.lower.names import Names
from serrate.lower.passes.common import Body, inward, kept, per_kernel

NARROWEST = 8
"""Positions of the innermost lane from which on it is worth it."""


def lane_partials(program: LoopProgram) -> LoopProgram:
    """Reductions over several lanes in two steps."""
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
