"""Name indices: reads of arrays and searches get a name as far out as they can be made.

In: a loop program. Out: the same, in which every boundary of a row is read once.

    grid c < n:                                              grid c < n:
      serial r < T1[c + 1] - T1[c]:                  ->        T1_c := T1[c];  T1_c_1 := T1[c + 1]
        t sum= x[T1[c] + r]                                    serial r < T1_c_1 - T1_c:  t sum= x[T1_c + r]

A read must be safe where it is made. Of an array in `LoopProgram.counts` that means: the row is known to be there, by a loop, a
branch or the condition of the statement. Of others it is enough that the loops around are those of their rows, which their
schedule has seen to; but such a read is not moved out of a branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from serrate.ir.expr import Element, Expr, Less, Minimum, Search, Symbol, symbol
from serrate.ir.loops import (
    Bind,
    Declare,
    For,
    Guard,
    If,
    Lanes,
    LoopProgram,
    Node,
    While,
    bodies,
    expressions_of,
    nodes,
)
from serrate.lower.names import Names, array_names
from serrate.lower.passes.common import Body, changed, kept, names_in, per_kernel, substituted

LONGEST = 40
"""Characters of a name, before it is told apart from others."""


def name_indices(program: LoopProgram) -> LoopProgram:
    """Gives array reads and searches a name where their operands are first known."""
    namer = _Namer(program)
    return per_kernel(program, lambda k: namer.kernel(k.body))


class _Namer:
    def __init__(self, program: LoopProgram) -> None:
        self.program, self.arrays, self.counts = program, array_names(program), dict(program.counts)

    def kernel(self, body: Body) -> Body:
        self.names = Names(self.program)
        self.lanes = {lane.symbol: lane for n in nodes(body) for lane in getattr(n, "lanes", ())}
        self.lanes_of: dict[Symbol, Lanes] = {s: (lane,) for s, lane in self.lanes.items()}
        # What a program works out itself is not the same everywhere.
        self.computed = {n.local.name for n in nodes(body) if isinstance(n, Declare)}
        return self.body(body, frozenset(), frozenset(), {})

    def body(self, body: Body, known: frozenset[Symbol], facts: frozenset[Less], named: dict[Expr, Expr]) -> Body:
        named, out = dict(named), list[Node]()
        inner = {n.symbol for n in nodes(body) if isinstance(n, For | Bind)} - known
        for expr, guard, certain in _candidates(body):
            current = expr.substitute(named)
            if current in named or not isinstance(current, Element | Search) or self._is_computed(current):
                continue
            if current.symbols & inner:
                continue
            lanes = self._lanes_of(current)
            protects = tuple(g for each in guard if lanes and self._protects(g := each.substitute(named), lanes))
            if any(g.symbols & inner for g in protects):
                # What keeps the read inside is known only in a loop further in, so it is named there.
                continue
            if not self._is_there(expr, facts | frozenset(guard) if lanes else facts, certain):
                continue
            bind = self._bind(current, lanes, protects)
            out.append(bind)
            named[current] = named[expr] = bind.symbol
        for k, node in enumerate(body):
            out.append(self._renamed(node, known, facts, named))
            if isinstance(node, Bind):
                # What is found by a name is known after it.
                if isinstance(node.expr, Search):
                    facts |= {Less(node.symbol, node.expr.count)}
                return (*out, *self.body(body[k + 1 :], known | {node.symbol}, facts, named))
        return kept(body, out)

    def _is_computed(self, e: Element | Search) -> bool:
        return e.array.local or bool(names_in(e) & self.computed)

    def _is_there(self, e: Expr, facts: frozenset[Less], certain: bool) -> bool:
        """Whether an array has the element that is read; `certain`: whether the read is made wherever this place is reached."""
        if not isinstance(e, Element) or e.array not in self.counts:
            return certain
        count = self.counts[e.array]
        return count is not None and any(Less(row, count) in facts for row in (e.index, e.index - 1))

    def _lanes_of(self, expr: Expr) -> Lanes:
        return tuple(dict.fromkeys(lane for s in sorted(expr.symbols, key=str) for lane in self.lanes_of.get(s, ())))

    def _bind(self, expr: Element | Search, lanes: Lanes, guard: Guard) -> Bind:
        place = expr.index if isinstance(expr, Element) else expr.position
        short = "_".join(re.findall(r"\w+", str(place)))
        base = f"{self.arrays[expr.array]}_{short}" if isinstance(expr, Element) else f"owner_{short}"
        new = symbol(self.names.of(expr, base[:LONGEST]), *expr.bounds)
        self.lanes_of[new] = lanes
        return Bind(new, expr, lanes, guard)

    def _protects(self, condition: Less, lanes: Lanes) -> bool:
        """Whether a condition can be asked before an array is read in these lanes: it is on them, and on no array itself."""
        if condition.left.arrays | condition.right.arrays:
            return False
        varying = [s for s in condition.symbols if self.lanes_of.get(s)]
        return bool(varying) and all(s in self.lanes and self.lanes[s] in lanes for s in varying)

    def _renamed(self, node: Node, known: frozenset[Symbol], facts: frozenset[Less], named: dict[Expr, Expr]) -> Node:
        """A statement with names for what it reads; those inside it get more."""
        if not bodies(node):
            return substituted((node,), named)[0]
        guard = tuple(g.substitute(named) for g in getattr(node, "guard", ()))
        if isinstance(node, For):
            here = facts | set(_below(node.symbol, node.extent))
            inside = self.body(node.body, known | {node.symbol}, here, named)
            return changed(node, extent=node.extent.substitute(named), body=inside)
        if isinstance(node, If):
            then = self.body(node.then, known, facts | set(node.guard), named)
            return changed(node, guard=guard, then=then, other=self.body(node.other, known, facts, named))
        assert isinstance(node, While)
        test, inside = (self.body(part, known, facts, named) for part in (node.test, node.body))
        return changed(node, guard=guard, test=test, body=inside)


def _below(index: Symbol, extent: Expr) -> Iterator[Less]:
    """What is known in a loop: its index is below its extent, and so below both of which that is the smaller."""
    yield Less(index, extent)
    if isinstance(extent, Minimum):
        for operand in extent.operands:
            yield from _below(index, operand)


def _candidates(body: Body, certain: bool = True) -> Iterator[tuple[Expr, Guard, bool]]:
    """Array reads and searches in the body, inner ones before those that contain them; their statement's guard, and whether no
    branch is around them. What has a name already is not a candidate itself."""
    for node in body:
        guard = getattr(node, "guard", ())
        for expr in expressions_of(node):
            for e in reversed(list(expr.walk())):
                if isinstance(e, Element | Search) and not (isinstance(node, Bind) and e is node.expr):
                    yield e, guard, certain
        for part in bodies(node):
            yield from _candidates(part, certain and not isinstance(node, If | While))
