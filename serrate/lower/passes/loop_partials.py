"""Loop partials: every lane of a block keeps a partial result around a loop, and lanes are combined after it.

In: a loop program. Out: the same; a reduction that nothing reads inside its loop combines its lanes once, after the loop. In
every iteration, that would cost a GPU exchanges between threads and prevent pipelined loads:

    serial k < n:  [r:64, d:64] t sum= x[k*64 + r, d]   ->   t_lanes<r:64, d:64> = 0
                                                             serial k < n:  [r:64, d:64] t_lanes sum= x[k*64 + r, d]
                                                             [r:64, d:64] t sum= t_lanes

The order in which elements are combined changes, so this applies to commutative reductions; it depends on the plan alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from serrate.ir.loops import Declare, For, Load, Local, LoopProgram, Node, Reduce, blocks_read, held, nodes, written_by
from serrate.ir.reductions import reduction
from serrate.ir.tile import SERIAL
from serrate.ir.values import Role
from serrate.lower.names import Names
from serrate.lower.passes.common import Body, inward, kept, per_kernel


def loop_partials(program: LoopProgram, *, most: int) -> LoopProgram:
    """Combines lanes after the loop that reduces them, where a block of partial results has at most so many elements."""
    names = Names(program)

    def change(body: Body) -> Body:
        out: list[Node] = []
        for node in body:
            out += _after_loop(node, names, most) if isinstance(node, For) and node.kind is SERIAL else (node,)
        return kept(body, [inward(n, change) for n in out])

    return per_kernel(program, lambda k: change(k.body))


def _after_loop(loop: For, names: Names, most: int) -> tuple[Node, ...]:
    parts: dict[Local, tuple[Local, Reduce]] = {}
    inside = list(nodes(loop.body))
    own = {n.local for n in inside if isinstance(n, Declare)}
    read = {name for n in inside for name in blocks_read(n)}
    for local in dict.fromkeys(n.local for n in inside if isinstance(n, Reduce)):
        writers = [n for n in inside if local in written_by(n)]
        first = writers[0]
        if local in own or local.name in read or not isinstance(first, Reduce) or not _combines_lanes(first, most):
            continue
        if all(isinstance(n, Reduce) and (n.operator, n.lanes) == (first.operator, first.lanes) for n in writers):
            parts[local] = Local(names.of((loop, local), f"{local.name}_lanes"), local.dtype, first.lanes), first
    if not parts:
        return (loop,)

    def partial(node: Node) -> Node:
        if isinstance(node, Reduce) and node.local in parts:
            return replace(node, local=parts[node.local][0])
        return inward(node, change)

    def change(body: Body) -> Body:
        return kept(body, map(partial, body))

    begin = (Declare(part, reduction(first.operator).identity(0, part.dtype)) for part, first in parts.values())
    end = (Reduce(part.lanes, (), local, first.operator, held(part)) for local, (part, first) in parts.items())
    return (*begin, inward(loop, change), *end)


def _combines_lanes(node: Reduce, most: int) -> bool:
    """Whether a statement combines the lanes of a block of what the program is given; loops over partial results are short."""
    gone = [lane for lane in node.lanes if lane not in node.local.lanes]
    if not any(isinstance(v, Load) and v.tensor.role is Role.INPUT for v in node.value.walk()):
        return False
    return bool(gone) and reduction(node.operator).commutative and math.prod(lane.size for lane in node.lanes) <= most
