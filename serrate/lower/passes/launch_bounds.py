"""Launch bounds: a grid that is bounded only by lengths gets a launch size that is known on the host.

In: a loop program. Out: the same; a grid whose bound is read from arrays is launched with a symbol, which the caller computes.

    grid p < parts[n]  (launched parts[n] times)   ->   grid p < parts[n]  (launched launched0 times)
"""

from __future__ import annotations

from dataclasses import replace

from serrate.ir.expr import Expr, Symbol, symbol
from serrate.ir.loops import For, LoopProgram, Node
from serrate.ir.tile import GRID
from serrate.lower.passes.common import Body, inward, kept, per_kernel


def launch_bounds(program: LoopProgram) -> LoopProgram:
    """Adds a launch symbol to every grid whose bound is read from arrays."""
    found: dict[Expr, Symbol] = {}

    def change(body: Body) -> Body:
        out: list[Node] = []
        for node in body:
            if isinstance(node, For) and node.kind is GRID and node.bound.arrays:
                node = replace(node, bound=found.setdefault(node.bound, symbol(f"launched{len(found)}")))
            out.append(inward(node, change))
        return kept(body, out)

    program = per_kernel(program, lambda k: change(k.body))
    return replace(program, launched=tuple((s, e) for e, s in found.items())) if found else program
