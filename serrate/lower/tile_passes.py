"""Passes over loop programs of kernels: what is left out, what is fetched ahead, what gets a name.

In: statements whose axes are loops and lanes already (`tiles.py`). Out: the same, with less to do. Skipping what does not exist
is the meaning of a kernel (a finished row rests), so it needs no proof; a loop runs on for what it stores without asking whether
a row is that long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from serrate.ir.expr import Array, Element, Expr, Less, Search, Sum, Symbol, ceildiv, const, minimum, symbol
from serrate.ir.loops import (
    Assign,
    Bind,
    Declare,
    Dot,
    Existing,
    For,
    Guard,
    Held,
    If,
    Lane,
    Lanes,
    Load,
    Local,
    Node,
    Prefetch,
    Reduce,
    Running,
    While,
    Write,
    bodies,
    expressions_of,
    held,
    load,
    nodes,
    number,
    with_bodies,
)
from serrate.ir.reductions import reduction
from serrate.ir.tile import GRID
from serrate.ir.values import Role, Tensor, Value, rewrite
from serrate.lower.pipeline import substituted


def without(value: Value, known: Guard) -> Value:
    """A read that does not ask what is known already."""
    if isinstance(value, Load):
        return load(value.tensor, value.index, tuple(g for g in value.guard if g not in known), value.other)
    return value


def bounds_a_lane(guard: Less, lanes: Lanes) -> bool:
    """Whether a condition says where one lane begins or ends, or nothing of any: products of blocks take no others."""
    mine = {lane.symbol for lane in lanes} & guard.symbols
    if len(mine) > 1:
        return False
    difference = guard.left - guard.right
    terms = difference.terms if isinstance(difference, Sum) else ((difference, 1),)
    for lane in mine:
        factor = next((f for t, f in terms if t is lane), 0)
        ends = factor > 0 and lane not in guard.right.symbols
        if not (ends or factor < 0) or lane in (difference - lane * factor).symbols:
            return False
    return True


# --- narrowed ----------------------------------------------------------------------------------------------------------


def narrowed(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Asks of every private block only the lanes that somebody reads."""
    statements = _effects(body)
    needed: dict[str, frozenset[Less]] = {}
    declared = {n.local.name: n.local for n in nodes(body) if isinstance(n, Declare)}
    lanes_of = {name: {lane.symbol for lane in local.lanes} for name, local in declared.items()}
    every = {lane.symbol for s in statements for lane in s.lanes}
    inside = _loops_around(body)
    changed = True
    while changed:
        changed = False
        for name in declared:
            found: frozenset[Less] | None = None
            for s in statements:
                if name not in _read_by(s):
                    continue
                target = getattr(s, "local", None)
                if target is not None and target.name == name:
                    continue
                asked = frozenset(s.guard) | (needed.get(target.name, frozenset()) if target is not None else frozenset())
                if not _reads_in_order(s, declared[name]):
                    asked = frozenset()
                found = asked if found is None else found & asked
            mine = frozenset(g for g in found or () if _about(g, lanes_of[name], every) and g.symbols & lanes_of[name])
            mine = frozenset(g for g in mine if not g.symbols & (inside.all - inside.of(name)))
            if needed.get(name) != mine:
                needed[name] = mine
                changed = True
    return _with_guards(body, {name: tuple(sorted(found, key=str)) for name, found in needed.items() if found})


class _Around:
    """Which loops stand around the declaration of every private block."""

    def __init__(self) -> None:
        self.all: set[Symbol] = set()
        self._of: dict[str, set[Symbol]] = {}

    def of(self, name: str) -> set[Symbol]:
        return self._of.get(name, set())

    def add(self, name: str, loops: frozenset[Symbol]) -> None:
        self._of[name] = set(loops)


def _loops_around(body: tuple[Node, ...]) -> _Around:
    found = _Around()

    def walk(part: tuple[Node, ...], loops: frozenset[Symbol]) -> None:
        for node in part:
            if isinstance(node, Declare):
                found.add(node.local.name, loops)
            elif isinstance(node, For | Bind):
                found.all.add(node.symbol)
            for inner in bodies(node):
                walk(inner, loops | {node.symbol} if isinstance(node, For) else loops)

    walk(body, frozenset())
    return found


def _about(condition: Less, own: set[Symbol], lanes: set[Symbol]) -> bool:
    """Whether a condition mentions no lanes but these, and nothing that the program works out itself."""
    local = any(isinstance(e, Element) and e.array.local for x in (condition.left, condition.right) for e in x.walk())
    return not local and not condition.symbols & (lanes - own) and all(s.bounds[0] is not None for s in condition.symbols)


def _reads_in_order(node: Any, local: Local) -> bool:
    """Whether a statement reads a block only in the lanes it is in itself, so that what it asks of them is asked of the block."""
    values = (node.left, node.right) if isinstance(node, Dot) else (node.value,)
    parts = [v for value in values for v in value.walk()]
    place: Expr = const(0)
    for lane in local.lanes:
        place = place * lane.size + lane.symbol
    elsewhere = any(isinstance(v, Held) and v.local.name == local.name and v.local.lanes != local.lanes for v in parts)
    counted = [e for v in parts if isinstance(v, Existing) for g in v.guard for e in (*g.left.walk(), *g.right.walk())]
    found = [e for x in expressions_of(node) for e in x.walk()]
    elsewhere |= any(isinstance(e, Element) and e.array.name == local.name and e.index != place for e in found)
    return not elsewhere and not any(isinstance(e, Element) and e.array.name == local.name for e in counted)


def _read_by(node: Any) -> set[str]:
    values = (node.left, node.right) if isinstance(node, Dot) else (node.value,)
    found = {v.local.name for value in values for v in value.walk() if isinstance(v, Held)}
    return found | {e.array.name for x in expressions_of(node) for e in x.walk() if isinstance(e, Element) and e.array.local}


def _with_guards(body: tuple[Node, ...], needed: Mapping[str, Guard]) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if bodies(node):
            node = with_bodies(node, tuple(_with_guards(part, needed) for part in bodies(node)))
        elif isinstance(node, Assign | Reduce | Dot) and node.local.name in needed:
            more = tuple(g for g in needed[node.local.name] if g not in node.guard)
            if isinstance(node, Dot):
                more = tuple(g for g in more if bounds_a_lane(g, node.lanes))
            node = _asking(node, (*node.guard, *more))
        out.append(node)
    return tuple(out)


def _asking(node: Any, guard: Guard) -> Any:
    """The statement under more conditions, which its reads need not ask again."""

    def change(v: Value) -> Value | None:
        return without(v, guard) if isinstance(v, Load) and v.guard else None

    if isinstance(node, Dot):
        return replace(node, guard=guard, left=rewrite(node.left, change), right=rewrite(node.right, change))
    return replace(node, guard=guard, value=rewrite(node.value, change))


# --- ended -------------------------------------------------------------------------------------------------------------


def ended(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Ends loops where everything inside is guarded away, and leaves out programs that store nothing."""
    out: list[Node] = []
    for node in body:
        if isinstance(node, For):
            inner = ended(node.body)
            node = replace(node, body=inner)
            if node.kind is GRID:
                if not (inner and isinstance(inner[-1], For) and inner[-1].kind is GRID):
                    node = replace(node, body=_programs(inner))
            else:
                before, end, asked = _end(node)
                if end is not None:
                    extent = minimum(node.extent, end)
                    node = replace(node, extent=extent, bound=extent)
                if asked:
                    # Where a row ends is asked only of rows that there are.
                    out.append(If(asked, (*before, *_settled((node,), frozenset(asked))), ()))
                    continue
                out += before
        elif bodies(node):
            node = with_bodies(node, tuple(map(ended, bodies(node))))
        out.append(node)
    return tuple(out)


def _names(*exprs: Expr) -> set[str]:
    """What index expressions read that a program may have worked out itself."""
    found = {s.name for e in exprs for s in e.symbols}
    return found | {e.array.name for x in exprs for e in x.walk() if isinstance(e, Element) and e.array.local}


def _effects(body: Iterable[Node]) -> list[Any]:
    return [n for n in nodes(tuple(body)) if isinstance(n, Assign | Reduce | Dot | Running | Write)]


def _end(loop: For) -> tuple[list[Node], Expr | None, Guard]:
    """The first tile from which on nothing exists, the statements that find it out, and what must hold before they may ask."""
    statements = _effects(loop.body)
    lanes = {lane.symbol: lane for s in statements for lane in s.lanes}
    inner = {n.symbol for n in nodes(loop.body) if isinstance(n, For)}
    written = {n.local.name for n in nodes(loop.body) if isinstance(n, Declare)}
    guarded = [s for s in statements if any(loop.symbol in g.symbols for g in s.guard)]
    # What is kept beyond an iteration goes on, unless nothing feeds it there.
    lasting = [s for s in statements if s not in guarded and (isinstance(s, Write) or s.local.name not in written)]
    if not guarded or any(not isinstance(s, Assign) or not s.rests for s in lasting):
        return [], None, ()
    before: list[Node] = []
    found: Expr | None = None
    for guard in guarded[0].guard:
        if not all(guard in s.guard for s in guarded) or loop.symbol in guard.right.symbols:
            continue
        if not all(guard in fed for s in lasting for fed in s.rests):
            continue
        here = guard.right.symbols | {s for s in guard.left.symbols if s is not loop.symbol}
        if here & inner or _names(guard.left, guard.right) & written:
            continue
        limit = guard.right
        along = [lanes[s] for s in limit.symbols if s in lanes]
        left = _least(guard.left, lanes)
        if left is None or any(s in lanes for s in left.symbols):
            continue
        if along:
            # Rows side by side go on as long as the longest of them.
            name = f"longest_{loop.symbol}"
            local = Local(name, torch.int64, ())
            own = {a.symbol for a in along}
            far = lanes.keys() - own | inner | {loop.symbol}
            asked = tuple(
                g for g in guarded[0].guard if g.symbols & own and not g.symbols & far and not _names(g.left, g.right) & written
            )
            before += [Declare(local, 0), Reduce(tuple(along), asked, local, "max", number(limit))]
            limit = symbol(name, 0)
        bound = _solved(left, loop.symbol, limit)
        if bound is not None and bound is not loop.extent:
            found = bound if found is None else minimum(found, bound)
        if along:
            break
    fixed = {loop.symbol, *inner, *lanes}
    asked = tuple(
        g
        for g in guarded[0].guard
        if all(g in s.guard for s in guarded) and not g.symbols & fixed and not _names(g.left, g.right) & written
    )
    return before, found, asked if found is not None else ()


def _least(expr: Expr, lanes: Mapping[Symbol, Lane]) -> Expr | None:
    """The smallest value of an expression over lanes that it grows with; None if it does not grow with one of them."""
    terms = expr.terms if isinstance(expr, Sum) else ((expr, 1),)
    for term, factor in terms:
        if term in lanes and factor < 0:
            return None
    return expr.substitute({s: const(0) for s in lanes})


def _solved(left: Expr, wanted: Symbol, right: Expr) -> Expr | None:
    """The first value of a symbol for which `left < right` does not hold any more."""
    terms = left.terms if isinstance(left, Sum) else ((left, 1),)
    factor = next((f for t, f in terms if t is wanted), 0)
    rest = left - wanted * factor
    if factor < 1 or wanted in rest.symbols:
        return None
    return ceildiv(right - rest, factor)


def _programs(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """The body of a program, left out where none of its stores has an element."""
    writes = [n for n in nodes(body) if isinstance(n, Write)]
    lanes = {lane.symbol: lane for n in writes for lane in n.lanes}
    inner = {n.symbol for n in nodes(body) if isinstance(n, For | Bind)}
    local = {n.local.name for n in nodes(body) if isinstance(n, Declare)}
    asked: list[Less] = []
    for guard in writes[0].guard if writes else ():
        if not all(guard in w.guard for w in writes):
            continue
        left = _least(guard.left, lanes)
        if left is None or guard.right.symbols & lanes.keys() or (left.symbols | guard.right.symbols) & inner:
            continue
        if _names(left, guard.right) & local or any(s in lanes for s in left.symbols):
            continue
        asked.append(Less(left, guard.right))
    body = _decided(_settled(body, frozenset(asked)), inner, local)
    return (If(tuple(asked), body, ()),) if asked else body


def _decided(body: tuple[Node, ...], inner: set[Symbol], local: set[str]) -> tuple[Node, ...]:
    """A program that asks once, for all of its reads, what is the same in all lanes."""
    values = [v for n in _effects(body) if n.lanes for v in ((n.left, n.right) if isinstance(n, Dot) else (n.value,))]
    lanes = {lane.symbol for n in _effects(body) for lane in n.lanes}
    found = dict.fromkeys(g for value in values for v in value.walk() if isinstance(v, Load) for g in v.guard)
    known = [
        g
        for g in found
        if not g.symbols & (lanes | inner) and not g.left.arrays | g.right.arrays and not _names(g.left, g.right) & local
    ]
    if not known or len(known) > 4:
        return body
    return (If(tuple(known), _settled(body, frozenset(known)), body),)


def ahead(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """While a row is worked on that is near already, the next one is fetched, which lies right behind it."""
    out: list[Node] = []
    seen: set[Tensor] = set()
    done = False
    for node in body:
        if isinstance(node, For) and node.kind is not GRID:
            statements = _effects(node.body)
            near = all(
                isinstance(s, Reduce | Assign) or (isinstance(s, Write) and s.tensor.role is Role.PRIVATE) for s in statements
            )
            if near and not done:
                made = tuple(_with_next(n, node.symbol, seen) for n in node.body)
                done = any(len(each) > 1 for each in made)
                node = replace(node, body=tuple(n for each in made for n in each))
            seen |= {v.tensor for s in statements if not isinstance(s, Dot) for v in s.value.walk() if isinstance(v, Load)}
        elif bodies(node):
            node = with_bodies(node, tuple(map(ahead, bodies(node))))
        out.append(node)
    return tuple(out)


def _with_next(node: Node, loop: Symbol, seen: set[Tensor]) -> tuple[Node, ...]:
    if not isinstance(node, Reduce | Write):
        return (node,)
    length = next((g.right for g in node.guard if g.right.arrays and loop in g.left.symbols), None)
    if length is None:
        return (node,)
    reads = (v for v in node.value.walk() if isinstance(v, Load) and v.tensor in seen and v.tensor.role is Role.INPUT)
    moving = [v for v in reads if v.index and loop in v.index[0].symbols and not v.guard]
    more = [Prefetch(node.lanes, node.guard, v.tensor, (v.index[0] + length, *v.index[1:])) for v in moving]
    return (*more, node)


def _settled(body: tuple[Node, ...], known: frozenset[Less]) -> tuple[Node, ...]:
    """Statements that do not ask what holds where they stand."""
    out: list[Node] = []
    for node in body:
        if isinstance(node, Assign | Reduce | Dot | Running | Write):
            node = _asked_before(node, known)
        elif isinstance(node, If):
            guard = tuple(g for g in node.guard if g not in known)
            parts = tuple(_settled(part, known) for part in bodies(node))
            if not guard and not node.other:
                out += parts[0]
                continue
            node = with_bodies(replace(node, guard=guard), parts)
        elif bodies(node):
            node = with_bodies(node, tuple(_settled(part, known) for part in bodies(node)))
        out.append(node)
    return tuple(out)


def _asked_before(node: Any, known: frozenset[Less]) -> Any:
    guard = tuple(g for g in node.guard if g not in known)

    def change(v: Value) -> Value | None:
        return without(v, tuple(known)) if isinstance(v, Load) and v.guard else None

    if isinstance(node, Dot):
        return replace(node, guard=guard, left=rewrite(node.left, change), right=rewrite(node.right, change))
    return replace(node, guard=guard, value=rewrite(node.value, change))


# --- named -------------------------------------------------------------------------------------------------------------


def named(
    body: tuple[Node, ...], counts: Mapping[Array, Expr], names: Names, known: frozenset[Less] = frozenset()
) -> tuple[Node, ...]:
    """Gives boundaries of rows a name as far out as their row is known to exist."""
    out: list[Node] = []
    if known:
        found: dict[Expr, Symbol] = {}
        for e in _boundaries(body):
            (count, base) = (counts.get(e.array), e.index)
            rows = [base, base - 1]
            if count is not None and any(Less(r, count) in known for r in rows) and e not in found:
                found[e] = symbol(names.of(e, "_".join(re.findall(r"\w+", f"{e.array.name} {e.index}"))), 0)
                out.append(Bind(found[e], e, (), ()))
        if found:
            body = _replaced(body, dict(found))
    for k, node in enumerate(body):
        if isinstance(node, Bind) and isinstance(node.expr, Search):
            # The owner of a piece is a row.
            fact = known | {Less(node.symbol, node.expr.count)}
            return (*out, node, *named(body[k + 1 :], counts, names, fact))
        if isinstance(node, For):
            inner = known | {Less(node.symbol, node.extent)} if node.kind is GRID else frozenset()
            node = replace(node, body=named(node.body, counts, names, inner))
        elif isinstance(node, If):
            then = named(node.then, counts, names, frozenset(node.guard))
            node = replace(node, then=then, other=named(node.other, counts, names))
        elif bodies(node):
            node = with_bodies(node, tuple(named(part, counts, names) for part in bodies(node)))
        out.append(node)
    return tuple(out)


def _boundaries(body: tuple[Node, ...]) -> list[Element]:
    inner = {n.symbol for n in nodes(body) if isinstance(n, For | Bind)}
    lanes = {lane.symbol for n in nodes(body) for lane in getattr(n, "lanes", ())}
    found = (e for n in nodes(body) for x in expressions_of(n) for e in x.walk())
    return [e for e in found if isinstance(e, Element) and not e.array.local and not e.index.symbols & (inner | lanes)]


def _replaced(body: tuple[Node, ...], found: dict[Expr, Expr]) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, For):
            extent, bound = node.extent.substitute(found), node.bound.substitute(found)
            node = replace(node, extent=extent, bound=bound, body=_replaced(node.body, found))
        elif isinstance(node, If | While):
            guard = tuple(g.substitute(found) for g in node.guard)
            node = with_bodies(replace(node, guard=guard), tuple(_replaced(part, found) for part in bodies(node)))
        else:
            node = substituted(node, found)
        out.append(node)
    return tuple(out)


# --- names ---


LONGEST = 60
"""Characters of a name that is made of others."""


class Names:
    """New names for things of a loop program, different from all that it has."""

    def __init__(self, tensors: Iterable[Tensor], body: tuple[Node, ...]) -> None:
        self._taken = {t.name for t in tensors}
        for node in nodes(body):
            self._taken |= {s.name for e in expressions_of(node) for s in e.symbols}
            self._taken |= {lane.symbol.name for lane in getattr(node, "lanes", ())}
            if isinstance(node, Declare):
                self._taken.add(node.local.name)
            elif isinstance(node, For | Bind):
                self._taken.add(node.symbol.name)
        self._made: dict[object, str] = {}

    def of(self, thing: object, wish: str) -> str:
        """The name of a thing: the one wished for, or with a number."""
        if thing not in self._made:
            found, k = wish[:LONGEST], 1
            while found in self._taken:
                k += 1
                found = f"{wish[:LONGEST]}_{k}"
            self._taken.add(found)
            self._made[thing] = found
        return self._made[thing]


# --- stepped -----------------------------------------------------------------------------------------------------------


def stepped(body: tuple[Node, ...], names: Names) -> tuple[Node, ...]:
    """Reductions over several lanes in two steps."""
    out: list[Node] = []
    for node in body:
        if isinstance(node, Reduce):
            out += _in_two_steps(node, names)
        else:
            out.append(with_bodies(node, tuple(stepped(part, names) for part in bodies(node))) if bodies(node) else node)
    return tuple(out)


def _in_two_steps(node: Reduce, names: Names) -> tuple[Node, ...]:
    """A reduction over several lanes, with results for each position of the innermost one until the block is done: these lie
    side by side, and are combined once."""
    last = node.lanes[-1] if node.lanes else None
    others = [lane for lane in node.lanes[:-1] if lane not in node.local.lanes]
    if last is None or last in node.local.lanes or not others or last.size < 8:
        return (node,)
    part = Local(
        names.of((node.local, last), f"{node.local.name}_{last.symbol.name}"), node.local.dtype, (*node.local.lanes, last)
    )
    identity = reduction(node.operator).identity(0, node.local.dtype)
    kept = tuple(lane for lane in node.lanes if lane in part.lanes)
    return Declare(part, identity), replace(node, local=part), Reduce(kept, (), node.local, node.operator, held(part))
