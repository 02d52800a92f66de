"""Strip-mine: a statement that adds many positions of a lane to the same element sequentially becomes a loop.

In: a loop program. Out: the same, in which no statement adds more than `STEPS` positions to an element, so that `long_sums` can
flush it in between:

    [r:4096, d:64] t sum= x[r, d]   ->   serial m < 32:  [r:128, d:64] t sum= x[m*128 + r, d]

The innermost lane is vectorized, so it is not split. Statements that share a nest of loops stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serrate.ir.expr import Expr, Less, Symbol, ceildiv, const, minimum, symbol
from serrate.ir.loops import (
    Assign,
    Bind,
    Block,
    Dot,
    Existing,
    For,
    Guard,
    Lane,
    Lanes,
    LoopProgram,
    Node,
    Prefetch,
    Reduce,
    Running,
    Write,
    nodes,
    values_of,
)
from serrate.ir.solve import end_of
from serrate.ir.tile import SERIAL
from serrate.lower.names import Names
from serrate.lower.nests import joins, locals_of
from serrate.lower.passes.common import Body, inward, kept, per_kernel, substituted
from serrate.lower.passes.long_sums import STEPS


def strip_mine(program: LoopProgram) -> LoopProgram:
    """Splits statements that add too many positions."""
    names = Names(program)
    return per_kernel(program, lambda k: _body(k.body, _named(k.body), names))


def _named(body: Body) -> dict[Symbol, Lanes]:
    """Names of indices that have lanes: these were expanded elsewhere, so their lanes do not change."""
    return {n.symbol: n.lanes for n in nodes(body) if isinstance(n, Bind) and n.lanes}


def _body(body: Body, named: dict[Symbol, Lanes], names: Names) -> Body:
    out: list[Node] = []
    group: list[Block] = []
    for node in (*body, None):
        if isinstance(node, Assign | Reduce | Dot | Running | Write | Prefetch) and (not group or joins(group, node)):
            group.append(node)
            continue
        out += _cut(group, named, names)
        group = []
        if isinstance(node, Assign | Reduce | Dot | Running | Write | Prefetch):
            group.append(node)
        elif node is not None:
            out.append(inward(node, lambda part: _body(part, named, names)))
    return kept(body, out)


def _cut(group: Sequence[Block], named: dict[Symbol, Lanes], names: Names) -> Sequence[Node]:
    """Statements of one nest as a loop, if one of them is deep."""
    deep = next((lane for node in group for lane in _deep_lanes(node)), None)
    kept = {own for node in group for local in locals_of(node) for own in local.lanes}
    counted = {own for n in group for value in values_of(n) for v in value.walk() if isinstance(v, Existing) for own in v.lanes}
    fixed = kept | counted | {own for lanes in named.values() for own in lanes}
    if deep is None or deep in fixed or any(isinstance(node, Running | Dot) for node in group):
        return group
    lanes = group[0].lanes
    short = Lane(symbol(names.of((deep, "step"), f"{deep.symbol.name}_step"), 0, STEPS - 1), STEPS)
    step = symbol(names.of((deep, "block"), f"{deep.symbol.name}_block"), 0, -(-deep.size // STEPS) - 1)
    place = step * STEPS + short.symbol
    inside = () if deep.size % STEPS == 0 else (Less(place, const(deep.size)),)
    extent = ceildiv(_end(group[0].guard, deep, {*named, *(lane.symbol for lane in lanes)}), STEPS)
    changed = tuple(short if lane == deep else lane for lane in lanes)
    body = tuple(_shorter(node, changed, inside) for node in substituted(tuple(group), {deep.symbol: place}))
    return (For(step, extent, SERIAL, body, extent),)


def _shorter(node: Node, lanes: Lanes, inside: Guard) -> Node:
    assert isinstance(node, Assign | Reduce | Write | Prefetch), node
    return replace(node, lanes=lanes, guard=(*node.guard, *inside))


def _end(guard: Guard, lane: Lane, varying: set[Symbol]) -> Expr:
    """The end of a lane: its size, or a bound that depends on no other lane, so that short rows take no empty steps."""
    end: Expr = const(lane.size)
    for condition in guard:
        found = end_of(condition, lane.symbol)
        if found is not None and not found.symbols & varying:
            end = minimum(end, found)
    return end


def _deep_lanes(node: Block) -> list[Lane]:
    """The lanes that a statement reduces sequentially with too many positions; the innermost lane is kept."""
    if not isinstance(node, Reduce) or node.operator != "sum" or not node.local.dtype.is_floating_point:
        return []
    if not node.lanes or node.lanes[-1] not in node.local.lanes:
        return []
    return [lane for lane in node.lanes if lane.size > 2 * STEPS and lane not in node.local.lanes]
