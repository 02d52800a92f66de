"""Tabulate: workers look up the component that owns a grid position in a table, instead of searching for it.

In: a loop program. Out: the same; a search by a grid index becomes a read of a derived array, computed once per structure.

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
    # Grids of different kernels may share a name but not a bound, so each kernel is handled separately.
    grids = {n.symbol: n.bound for n in nodes(kernel.body) if isinstance(n, For) and n.kind is GRID}
    found: dict[Expr, Expr] = {}
    for e in found_in(kernel.body):
        # In an array with several rows of offsets, a position alone does not determine an owner.
        if isinstance(e, Search) and e.first.value == 0 and e.position in grids and not grids[e.position].arrays:
            table = Array(f"owners({e.array.name})", recipe=Owners(e.array, e.count, grids[e.position]))
            found[e] = table[e.position]
    return substituted(kernel.body, found)
