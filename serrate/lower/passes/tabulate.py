"""Tabulate: the component that owns a grid position is looked up instead of searched for by every worker.

In: a loop program. Out: the same; searches by a grid's index read a derived array, made once for each structure.

    grid p < n:  c := search(parts, p)   ->   grid p < n:  c := owners(parts)[p]
"""

from __future__ import annotations

from serrate.ir.expr import Array, Expr, Search
from serrate.ir.loops import For, LoopKernel, LoopProgram, nodes
from serrate.ir.recipes import Owners
from serrate.ir.tile import GRID
from serrate.lower.passes.common import Body, found_in, per_kernel, substituted


def tabulate(program: LoopProgram) -> LoopProgram:
    """Replaces searches for the owner of a grid position by reads of a derived array."""
    return per_kernel(program, _tabulated)


def _tabulated(kernel: LoopKernel) -> Body:
    # Grids of different kernels may have one name and different bounds, so each kernel is looked at alone.
    grids = {n.symbol: n.bound for n in nodes(kernel.body) if isinstance(n, For) and n.kind is GRID}
    found: dict[Expr, Expr] = {}
    for e in found_in(kernel.body):
        # Where an array holds several rows of offsets, a position alone has no owner.
        if isinstance(e, Search) and e.first.value == 0 and e.position in grids and not grids[e.position].arrays:
            table = Array(f"owners({e.array.name})", recipe=Owners(e.array, e.count, grids[e.position]))
            found[e] = table[e.position]
    return substituted(kernel.body, found)
