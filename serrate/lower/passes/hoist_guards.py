"""Hoist guards: a condition that all statements of a loop share, and that does not change in it, is tested once.

In: a loop program. Out: the same, with branches around loops instead of in them, so that Triton can pipeline the loads of a loop:

    serial k:  t += a[k] * b[k]  where c < n      ->   if c < n:  serial k:  t += a[k] * b[k]
"""

from __future__ import annotations

import functools

from serrate.ir.expr import Less
from serrate.ir.loops import Bind, Declare, For, If, LoopProgram, Node, nodes, written_by
from serrate.ir.tile import GRID
from serrate.lower.passes.common import Body, effects, inward, kept, names_in, per_kernel
from serrate.lower.passes.end_loops import settled


def hoist_guards(program: LoopProgram) -> LoopProgram:
    """Hoists loop-invariant conditions out of loops."""
    return per_kernel(program, lambda k: _body(k.body))


def _body(body: Body) -> Body:
    out: list[Node] = []
    for node in body:
        node = inward(node, _body)
        shared = _shared(node) if isinstance(node, For) and node.kind is not GRID else ()
        if shared and isinstance(node, For):
            node = If(shared, (inward(node, functools.partial(settled, known=shared)),), ())
        out.append(node)
    return kept(body, out)


def _shared(loop: For) -> tuple[Less, ...]:
    """The conditions that all statements of a loop have, and that are the same in all its iterations and lanes."""
    statements = effects(loop.body)
    if not statements:
        return ()
    inside = [loop, *nodes(loop.body)]
    own = {n.symbol for n in inside if isinstance(n, For | Bind)} | {lane.symbol for s in statements for lane in s.lanes}
    # A condition may read a private block of indices, which the loop must not write.
    locals_ = {n.local.name for n in inside if isinstance(n, Declare)} | {x.name for s in statements for x in written_by(s)}
    found = [g for g in statements[0].guard if all(g in s.guard for s in statements)]
    return tuple(g for g in found if not g.symbols & own and not names_in(g.left, g.right) & locals_)
