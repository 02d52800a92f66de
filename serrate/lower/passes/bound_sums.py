"""Bound sums: the offsets of a work list stay within its bound, whatever the lengths that they are summed from.

In: a loop program. Out: the same; a running sum whose last element is the extent of a grid gets the bound of that grid, which
its elements never exceed when they are computed.

    grid p < parts[n]  (bound: t // 64 + n)        parts: the sum of (length[c] + 63) // 64, at most t // 64 + n

Partial results and tables have as many elements as the bound says. A GPU checks offsets while programs already use them, and
wrong lengths may add up to more. Other passes and the generated code rely on derived arrays, so these are clamped where they are
made.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from serrate.ir.expr import Array, Element, Expr, Search, element, minimum, search
from serrate.ir.loops import For, LoopProgram, nodes
from serrate.ir.recipes import Owners, RunningSum
from serrate.ir.tile import GRID
from serrate.lower.passes.common import mapped, per_kernel


def bound_sums(program: LoopProgram) -> LoopProgram:
    """Gives running sums of the positions of a grid the bound of the grid."""
    most = _bounds(program)

    @functools.cache
    def bounded(array: Array) -> Array:
        recipe = array.recipe
        if isinstance(recipe, Owners):
            offsets = bounded(recipe.offsets)
            return array if offsets is recipe.offsets else replace(array, recipe=replace(recipe, offsets=offsets))
        return (
            replace(array, recipe=replace(recipe, most=most[array]))
            if isinstance(recipe, RunningSum) and array in most
            else array
        )

    @functools.cache
    def change(e: Expr) -> Expr:
        operands = tuple(map(change, e.operands))
        if isinstance(e, Element):
            return element(bounded(e.array), *operands)
        if isinstance(e, Search):
            return search(bounded(e.array), *operands)
        return e if operands == e.operands else e.rebuild(operands)

    return per_kernel(program, lambda k: mapped(k.body, change)) if most else program


def _bounds(program: LoopProgram) -> dict[Array, Expr]:
    """The running sums whose last element is the extent of a grid, with its bound, if the host knows that from sizes alone."""
    launched = {symbol for symbol, _ in program.launched}
    found: dict[Array, Expr] = {}
    for loop in (n for kernel in program.kernels for n in nodes(kernel.body)):
        if not isinstance(loop, For) or loop.kind is not GRID or not isinstance(loop.extent, Element):
            continue
        array, place = loop.extent.array, loop.extent.index
        if isinstance(array.recipe, RunningSum) and place is array.recipe.count and launched.isdisjoint(loop.bound.symbols):
            found[array] = minimum(found.get(array, loop.bound), loop.bound)
    return found
