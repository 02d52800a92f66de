"""End loops: a loop stops at the first position past which nothing in it exists, and starts at the first that may exist.

In: a loop program. Out: the same, with tighter loop bounds:

    serial r < longest:  t sum= x[r]  where r < len[c]      ->   serial r < min(longest, len[c]):  t sum= x[r]  where r < len[c]
    serial r < n:  t sum= x[r]  where k < r + 1             ->   serial r < n - k:  t sum= x[r + k]  where k < r + k + 1

Skipping positions that do not exist changes nothing: reductions do not count them, stores do not write them, and carried values
rest (`Assign.rests`). A loop continues for a store that is not guarded by the row's length, and for a carried value that
something else still feeds. If lanes hold several rows, the loop runs to the end of the longest, unless the schedule already
bounds it. Only conditions on its own index end a grid loop early. On targets with branches, other conditions that all stores of
a worker share are tested once before its body, and so are read conditions that are the same in all lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from serrate.ir.expr import Element, Expr, Less, Search, Symbol, maximum, minimum, symbol
from serrate.ir.loops import (
    Assign,
    Bind,
    Declare,
    For,
    Guard,
    If,
    Lane,
    Load,
    Local,
    LoopProgram,
    Node,
    Reduce,
    Write,
    bodies,
    nodes,
    number,
    values_of,
    with_bodies,
    written_by,
)
from serrate.ir.solve import certain, end_of, loosest, possible, start_of
from serrate.ir.tile import GRID
from serrate.ir.values import Value
from serrate.lower.facts import Facts
from serrate.lower.names import Names
from serrate.lower.passes.common import (
    Body,
    Effect,
    changed,
    effects,
    inward,
    kept,
    names_in,
    per_kernel,
    substituted,
    with_values,
    without,
)

MOST_TESTS = 4
"""How many read conditions may be tested once per worker; doing so duplicates its body."""


def end_loops(program: LoopProgram, *, branches: bool) -> LoopProgram:
    """Ends loops where every statement inside is masked off; with `branches`, skips workers that store nothing."""
    ending = _Ending(Names(program), branches)
    return per_kernel(program, lambda k: ending.body(k.body, Facts(())))


class _Ending:
    def __init__(self, names: Names, branches: bool) -> None:
        self.names, self.branches = names, branches

    def body(self, body: Body, facts: Facts) -> Body:
        """Rewrites statements, given the facts that hold around them."""
        out: list[Node] = []
        for node in body:
            if isinstance(node, For):
                out += [self._grid(node, facts)] if node.kind is GRID else self._serial(node, facts)
                continue
            if isinstance(node, Bind):
                facts = facts.named(node)
            elif isinstance(node, If):
                then, other = self.body(node.then, facts.and_(*node.guard)), self.body(node.other, facts)
                node = changed(node, then=then, other=other)
            elif bodies(node):
                node = inward(node, functools.partial(self.body, facts=facts))
            out.append(node)
        return kept(body, out)

    def _grid(self, loop: For, facts: Facts) -> For:
        found = _End(loop, self.names, alone=True)
        extent = loop.extent if found.end is None else minimum(loop.extent, found.end)
        facts = facts.and_(Less(loop.symbol, extent))
        inner = settled(loop.body, found.met)
        innermost = not any(isinstance(n, For) and n.kind is GRID for n in inner)
        body = self._worker(inner, facts) if innermost and self.branches else self.body(inner, facts)
        return changed(loop, extent=extent, body=body)

    def _serial(self, loop: For, facts: Facts) -> tuple[Node, ...]:
        found = _End(loop, self.names, alone=False)
        if found.end is None and found.start is None:
            return (changed(loop, body=self.body(loop.body, facts.and_(Less(loop.symbol, loop.extent)))),)
        extent = loop.extent if found.end is None else minimum(loop.extent, found.end)
        asked = tuple(g for g in found.asked if not facts.holds(g)) if self.branches else ()
        # Where there are no branches, a condition that holds from the start on would still be a mask.
        met = found.met if self.branches else [*found.met, *found.begun()]
        inner = settled(loop.body, (*asked, *met))
        body = self.body(inner, facts.and_(*asked, Less(loop.symbol, extent)))
        if found.start is not None:
            first = maximum(found.start, 0)
            body, extent = substituted(body, {loop.symbol: loop.symbol + first}), extent - first
        made = (*found.before, replace(loop, extent=extent, bound=extent, body=body))
        # The end of a row is read only for rows that exist.
        return (If(asked, made, ()),) if asked else made

    def _worker(self, body: Body, facts: Facts) -> Body:
        """The body of a worker, skipped if none of its stores writes an element."""
        writes = [n for n in nodes(body) if isinstance(n, Write)]
        lanes = {lane.symbol for n in writes for lane in n.lanes}
        own = _Defined(body)
        asked: list[Less] = []
        for guard in writes[0].guard if writes else ():
            loose = loosest(guard, lanes) if all(guard in w.guard for w in writes) else None
            if loose is not None and not own.mentioned(loose) and not _of_an_entry(loose) and not facts.holds(loose):
                asked.append(loose)
        facts = facts.and_(*asked)
        body = settled(body, asked)
        tests = _shared_tests(body, own)
        if tests:
            there = self.body(settled(body, tests), facts.and_(*tests))
            made: Body = (If(tests, there, self.body(body, facts)),)
        else:
            made = self.body(body, facts)
        return (If(tuple(asked), made, ()),) if asked else made


class _Defined:
    """The loop indices, names and private blocks that statements define."""

    def __init__(self, body: Body) -> None:
        self.symbols = {n.symbol for n in nodes(body) if isinstance(n, For | Bind)}
        self.locals = {n.local.name for n in nodes(body) if isinstance(n, Declare)}

    def mentioned(self, condition: Less) -> bool:
        """Whether a condition mentions any of these."""
        return bool(condition.symbols & self.symbols or names_in(condition.left, condition.right) & self.locals)


class _End:
    """The end of a loop, if known: the first position past which nothing exists; and its start.

    Also the statements that compute it, the conditions under which these are safe, and the conditions that the new bound
    implies. With `alone`, only conditions without inner loops and lanes count.
    """

    def __init__(self, loop: For, names: Names, *, alone: bool) -> None:
        self.loop, self.names, self.alone = loop, names, alone
        self.end: Expr | None = None
        self.start: Expr | None = None
        self.before: list[Node] = []
        self.met: list[Less] = []
        self.asked: Guard = ()
        statements = effects(loop.body)
        self.own = _Defined(loop.body)
        self.guarded = [s for s in statements if any(loop.symbol in g.symbols for g in s.guard)]
        # A value that outlives the iteration keeps the loop going, unless nothing feeds it.
        self.lasting = [
            s
            for s in statements
            if s not in self.guarded and (isinstance(s, Write) or any(x.name not in self.own.locals for x in written_by(s)))
        ]
        if not self.guarded or any(not isinstance(s, Assign) or not s.rests for s in self.lasting):
            return
        self.lanes = {lane.symbol: lane for s in statements for lane in s.lanes}
        for guard in self._shared():
            if not self._take(guard):
                break
        if self.end is not None or self.start is not None:
            fixed = {loop.symbol, *self.lanes}
            self.asked = tuple(g for g in self._shared() if not g.symbols & fixed and not self.own.mentioned(g))

    def _shared(self) -> list[Less]:
        """The conditions that all statements of the loop share, the same for all lanes."""
        asked = [self._loose(s.guard) for s in self.guarded]
        return [g for loose, g in asked[0].items() if all(loose in other for other in asked)]

    def _loose(self, guard: Guard) -> dict[Less, Less]:
        """Conditions relaxed to the loop index alone, for any position of inner lanes and loops."""
        inner = self.lanes.keys() | {s for s in self.own.symbols if isinstance(s, Symbol)}
        return {possible(g, inner) or g: g for g in guard}

    def _take(self, guard: Less) -> bool:
        """Ends the loop where a condition can no longer hold; returns whether to try another."""
        loop = self.loop.symbol
        inner = {s for s in self.own.symbols if isinstance(s, Symbol)}
        loose = possible(guard, self.lanes.keys() | inner)
        fed = [self._loose(rests) for s in self.lasting for rests in getattr(s, "rests", ())]
        if not all((loose or guard) in each for each in fed):
            return True
        if loop in guard.right.symbols:
            self._begin(loose)
            return True
        if self.alone and guard.symbols & (inner | self.lanes.keys()):
            return True
        along = [self.lanes[s] for s in guard.right.symbols if s in self.lanes]
        along = [] if loose is not None else along
        if along:
            if _fitted(self.loop) or self.own.mentioned(guard):
                return True
            limit, before = self._longest(guard.right, along)
            guard = Less(guard.left, limit)
            loose = possible(guard, self.lanes.keys() | inner)
        end = None if loose is None or self.own.mentioned(loose) else end_of(loose, loop)
        if end is None or end is self.loop.extent:
            return True
        self.end = end if self.end is None else minimum(self.end, end)
        self.met += [guard] if loose is guard else []
        if along:
            self.before += before
        return not along

    def _begin(self, loose: Less | None) -> None:
        """Starts the loop where a condition first can hold."""
        start = None if loose is None or self.alone or self.own.mentioned(loose) else start_of(loose, self.loop.symbol)
        if start is not None:
            self.start = start if self.start is None else maximum(self.start, start)

    def begun(self) -> Iterator[Less]:
        """The conditions that hold in all lanes wherever the loop runs, because of where it starts."""
        loop, start = self.loop.symbol, self.start
        asked = dict.fromkeys(g for s in self.guarded for g in s.guard if start is not None and loop in g.right.symbols)
        for guard in asked:
            sure = certain(guard, self.lanes.keys())
            since = None if sure is None or self.own.mentioned(sure) else start_of(sure, loop)
            if start is not None and since is not None and (apart := (since - start).value) is not None and apart <= 0:
                yield guard

    def _longest(self, limit: Expr, along: list[Lane]) -> tuple[Expr, list[Node]]:
        """The bound for several rows in lanes: the longest of them."""
        local = Local(self.names.of(self.loop, f"longest_{self.loop.symbol}"), torch.int64, ())
        own = {lane.symbol for lane in along}
        far = self.lanes.keys() - own | {self.loop.symbol}
        asked = tuple(g for g in self.guarded[0].guard if g.symbols & own and not g.symbols & far and not self.own.mentioned(g))
        return symbol(local.name, 0), [Declare(local, 0), Reduce(tuple(along), asked, local, "max", number(limit))]


def _of_an_entry(condition: Less) -> bool:
    """Whether a condition is on an entry of a work list, looked up through its owner: every entry has work to do."""
    return any(isinstance(e, Search) for side in (condition.left, condition.right) for e in side.walk())


def _fitted(loop: For) -> bool:
    """Whether a loop's extent already depends on its rows: it reads an array at their index."""
    return any(isinstance(e, Element) and e.index.symbols for e in loop.extent.walk())


def _shared_tests(body: Body, own: _Defined) -> Guard:
    """Read conditions that are the same in all lanes and can be tested before the worker's body."""
    statements = effects(body)
    values = [v for n in statements if n.lanes for v in values_of(n)]
    lanes = {lane.symbol for n in statements for lane in n.lanes}
    found = dict.fromkeys(g for value in values for v in value.walk() if isinstance(v, Load) for g in v.guard)
    known = tuple(g for g in found if not g.symbols & lanes and not g.left.arrays | g.right.arrays and not own.mentioned(g))
    return known if len(known) <= MOST_TESTS else ()


def settled(body: Body, known: Collection[Less]) -> Body:
    """Statements without the conditions that are known to hold around them."""
    if not known:
        return body
    out: list[Node] = []
    for node in body:
        if isinstance(node, Effect):
            node = _asked_before(node, known)
        elif isinstance(node, If):
            guard = tuple(g for g in node.guard if g not in known)
            parts = tuple(settled(part, known) for part in bodies(node))
            if not guard:
                out += parts[0]
                continue
            node = with_bodies(replace(node, guard=guard), parts)
        elif bodies(node):
            node = inward(node, lambda part: settled(part, known))
        out.append(node)
    return kept(body, out)


def _asked_before(node: Effect, known: Collection[Less]) -> Effect:
    guard = tuple(g for g in node.guard if g not in known)

    def change(v: Value) -> Value | None:
        return without(v, known) if isinstance(v, Load) and v.guard else None

    node = with_values(node, change)
    return changed(node, guard=guard)
