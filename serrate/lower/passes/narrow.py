"""Narrow: lanes of private blocks that nothing reads are not computed.

In: a loop program. Out: the same; a statement that fills a private block gets the conditions that all its readers share.

    [c:8, d:64] t = exp(x[c, d])                          [c:8, d:64] t = exp(x[c, d])  where c < n
    [c:8, d:64] y[c, d] = t  where c < n          ->      [c:8, d:64] y[c, d] = t       where c < n
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serrate.ir.conditions import bounding
from serrate.ir.expr import Element, Expr, Less, Symbol, const
from serrate.ir.loops import (
    Assign,
    Bind,
    Declare,
    Dot,
    Existing,
    Fold,
    For,
    Guard,
    Held,
    Load,
    Local,
    LoopProgram,
    Node,
    Reduce,
    Write,
    blocks_read,
    bodies,
    expressions_of,
    nodes,
    values_of,
)
from serrate.ir.values import Value
from serrate.lower.passes.common import Body, Effect, effects, inward, kept, per_kernel, with_values, without


def narrow(program: LoopProgram) -> LoopProgram:
    """Computes only those lanes of private blocks that are read."""
    return per_kernel(program, lambda k: _narrowed(k.body))


def _narrowed(body: Body) -> Body:
    statements = effects(body)
    needed: dict[str, frozenset[Less]] = {}
    declared = {n.local.name: n.local for n in nodes(body) if isinstance(n, Declare) and n.local.lanes}
    if not declared:
        return body
    lanes_of = {name: {lane.symbol for lane in local.lanes} for name, local in declared.items()}
    every = {lane.symbol for s in statements for lane in s.lanes}
    known = _known_at(body)
    loops = {n.symbol for n in nodes(body) if isinstance(n, For | Bind)}
    readers: dict[str, list[tuple[str, frozenset[Less], set[Symbol]]]] = {name: [] for name in declared}
    for s in statements:
        for name in blocks_read(s) & declared.keys():
            if _fills(s) != name:
                readers[name].append((_fills(s), frozenset(s.guard), _read_in_place(s, declared[name])))
    changed = True
    while changed:
        changed = False
        for name in declared:
            found: frozenset[Less] | None = None
            own = lanes_of[name]
            for filled, guard, in_place in readers[name]:
                asked = frozenset(g for g in guard | needed.get(filled, frozenset()) if g.symbols & own <= in_place)
                found = asked if found is None else found & asked
            mine = (g for g in found or () if g.symbols & own and _about(g, own, every))
            asked = frozenset(g for g in mine if not g.symbols & (loops - known.get(name, frozenset())))
            if needed.get(name) != asked:
                needed[name] = asked
                changed = True
    return _with_guards(body, {name: tuple(sorted(found, key=str)) for name, found in needed.items() if found})


def _fills(node: Effect) -> str:
    """The private block that a statement fills; None if it stores to memory or fills several blocks."""
    return "" if isinstance(node, Write | Fold) else node.local.name


def _known_at(body: Body) -> dict[str, frozenset[Symbol]]:
    """The loops around the declaration of every private block."""
    found: dict[str, frozenset[Symbol]] = {}

    def walk(part: Body, loops: frozenset[Symbol]) -> None:
        for node in part:
            if isinstance(node, Declare):
                found[node.local.name] = loops
            for inner in bodies(node):
                walk(inner, loops | {node.symbol} if isinstance(node, For) else loops)

    walk(body, frozenset())
    return found


def _about(condition: Less, own: set[Symbol], lanes: set[Symbol]) -> bool:
    """Whether a condition mentions only these lanes, and no values that the program computes."""
    local = any(isinstance(e, Element) and e.array.local for x in (condition.left, condition.right) for e in x.walk())
    return not local and not condition.symbols & (lanes - own) and all(s.bounds[0] is not None for s in condition.symbols)


def _read_in_place(node: Effect, local: Local) -> set[Symbol]:
    """The lanes along which a statement reads a block at its own position: conditions on these carry over to the block.

    A block may also be read along another lane of the same size, or at a computed index; then nothing is known.
    """
    parts = [v for value in values_of(node) for v in value.walk()]
    place: Expr = const(0)
    for lane in local.lanes:
        place = place * lane.size + lane.symbol
    counted = [e for v in parts if isinstance(v, Existing) for g in v.guard for e in (*g.left.walk(), *g.right.walk())]
    found = [e for x in expressions_of(node) for e in x.walk()]
    elsewhere = any(isinstance(e, Element) and e.array.name == local.name and e.index != place for e in found)
    if elsewhere or any(isinstance(e, Element) and e.array.name == local.name for e in counted):
        return set()
    lanes = {lane.symbol for lane in local.lanes}
    for v in parts:
        if isinstance(v, Held) and v.local.name == local.name:
            lanes &= {a.symbol for a, b in zip(local.lanes, v.local.lanes, strict=True) if a == b}
    return lanes


def _with_guards(body: Body, needed: Mapping[str, Guard]) -> Body:
    out: list[Node] = []
    for node in body:
        if bodies(node):
            node = inward(node, lambda part: _with_guards(part, needed))
        elif isinstance(node, Assign | Reduce | Dot) and node.local.name in needed:
            more = tuple(g for g in needed[node.local.name] if not _is_implied(g, node.guard))
            if isinstance(node, Dot):
                more = tuple(g for g in bounding(more, node.lanes) if not _is_implied(g, node.guard))
            node = _asking(node, (*node.guard, *more)) if more else node
        out.append(node)
    return kept(body, out)


def _is_implied(condition: Less, guard: Guard) -> bool:
    """Whether a guard implies a condition: it contains it, or a tighter one on the same position (a row's own end)."""
    return any(g == condition or (g.left is condition.left and g.right.symbols > condition.right.symbols) for g in guard)


def _asking(node: Effect, guard: Guard) -> Effect:
    """The statement with more conditions, which are dropped from its reads."""

    def change(v: Value) -> Value | None:
        return without(v, guard) if isinstance(v, Load) and v.guard else None

    return replace(with_values(node, change), guard=guard)
