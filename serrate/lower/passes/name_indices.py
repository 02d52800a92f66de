"""Name indices: array reads and searches are hoisted as far out as is safe, and named.

In: a loop program. Out: the same, with every row boundary read once.

    grid c < n:                                              grid c < n:
      serial r < T1[c + 1] - T1[c]:                  ->        T1_c := T1[c];  T1_c_1 := T1[c + 1]
        t sum= x[T1[c] + r]                                    serial r < T1_c_1 - T1_c:  t sum= x[T1_c + r]

A read must be safe where it is hoisted to. For an array in `LoopProgram.counts`, a loop, a branch or the statement's guard must
imply that the row exists. For other arrays, the schedule guarantees that the enclosing loops run over existing rows; these reads
are not moved out of a branch.
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
    Load,
    LoopProgram,
    Node,
    While,
    bodies,
    expressions_of,
    nodes,
    values_of,
)
from serrate.ir.recipes import Owners
from serrate.lower.names import Names, array_names
from serrate.lower.passes.common import Body, changed, kept, names_in, per_kernel, substituted

LONGEST = 40
"""The maximum length of a name, before it is made unique."""


def name_indices(program: LoopProgram) -> LoopProgram:
    """Names array reads and searches where their operands are first known."""
    namer = _Namer(program)
    return per_kernel(program, lambda k: namer.kernel(k.body))


class _Namer:
    def __init__(self, program: LoopProgram) -> None:
        self.program, self.arrays, self.counts = program, array_names(program), dict(program.counts)

    def kernel(self, body: Body) -> Body:
        self.names = Names(self.program)
        self.lanes = {lane.symbol: lane for n in nodes(body) for lane in getattr(n, "lanes", ())}
        self.lanes_of: dict[Symbol, Lanes] = {s: (lane,) for s, lane in self.lanes.items()}
        self.indices: set[Symbol] = set()
        """Names of indices from memory: conditions on these protect only what is read there."""
        # A value that the program computes may change from place to place.
        self.computed = {n.local.name for n in nodes(body) if isinstance(n, Declare)}
        return self.body(body, frozenset(), frozenset(), {})

    def body(self, body: Body, known: frozenset[Symbol], facts: frozenset[Less], named: dict[Expr, Expr]) -> Body:
        named, out = dict(named), list[Node]()
        inner = {n.symbol for n in nodes(body) if isinstance(n, For | Bind)} - known
        # The bounds of rows come first: they are in the conditions that protect reads in lanes.
        candidates = sorted(_candidates(body), key=lambda found: bool(self._lanes_of(found[0])))
        # All reads of one element share a name, so only conditions of all of them protect it.
        guards: dict[Expr, Guard] = {}
        for expr, guard, _ in candidates:
            guards[expr] = tuple(g for g in guards.get(expr, guard) if g in guard)
        for expr, _, certain in candidates:
            current, guard = expr.substitute(named), guards[expr]
            if current in named or not isinstance(current, Element | Search) or self._is_computed(current):
                continue
            if current.symbols & inner:
                continue
            lanes = self._lanes_of(current)
            protects = tuple(g for each in guard if lanes and self._protects(g := each.substitute(named), lanes))
            if any(g.symbols & inner for g in protects):
                # Only an inner loop guarantees that the read is in bounds, so it is named there.
                continue
            if not self._is_there(expr, facts | frozenset(guard) if lanes else facts, certain):
                continue
            bind = self._bind(current, lanes, protects)
            out.append(bind)
            named[current] = named[expr] = bind.symbol
        for k, node in enumerate(body):
            out.append(self._renamed(node, known, facts, named))
            if isinstance(node, Bind):
                # Reads that depend on this name can be named after it.
                owners = _owners(node.expr)
                if owners is not None:
                    facts |= {Less(node.symbol, owners)}
                return (*out, *self.body(body[k + 1 :], known | {node.symbol}, facts, named))
        return kept(body, out)

    def _is_computed(self, e: Element | Search) -> bool:
        return e.array.local or bool(names_in(e) & self.computed)

    def _is_there(self, e: Expr, facts: frozenset[Less], certain: bool) -> bool:
        """Whether the element that is read exists; `certain`: whether every path through this place performs the read."""
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
        if isinstance(expr, Element) and expr.array.signed:
            self.indices.add(new)
        return Bind(new, expr, lanes, guard)

    def _protects(self, condition: Less, lanes: Lanes) -> bool:
        """Whether a condition can guard an array read in these lanes: it mentions them, and what it reads is named already."""
        if condition.left.arrays | condition.right.arrays or condition.symbols & self.indices:
            return False
        varying = [lane for s in condition.symbols for lane in self.lanes_of.get(s, ())]
        return bool(varying) and all(lane in lanes for lane in varying)

    def _renamed(self, node: Node, known: frozenset[Symbol], facts: frozenset[Less], named: dict[Expr, Expr]) -> Node:
        """A statement with reads replaced by names; statements inside it may add more."""
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


def _owners(e: Expr) -> Expr | None:
    """The number of rows, if an expression is the owner of a position, found by a search or in a table; else None."""
    if isinstance(e, Search):
        return e.count
    return e.array.recipe.count if isinstance(e, Element) and isinstance(e.array.recipe, Owners) else None


def _below(index: Symbol, extent: Expr) -> Iterator[Less]:
    """The conditions that a loop implies: its index is below its extent, and below both operands if that is a minimum."""
    yield Less(index, extent)
    if isinstance(extent, Minimum):
        for operand in extent.operands:
            yield from _below(index, operand)


def _candidates(body: Body, certain: bool = True) -> Iterator[tuple[Expr, Guard, bool]]:
    """Array reads and searches in the body, inner ones before those that contain them, each with the guards of its statement and
    of the load that it is for, and whether it is outside all branches. Definitions of names are not candidates."""
    for node in body:
        guard: Guard = getattr(node, "guard", ())
        loads = [v for value in values_of(node) for v in value.walk() if isinstance(v, Load) and v.guard]
        guarded = {e: v.guard for v in loads for e in (*v.index, *(side for g in v.guard for side in (g.left, g.right)))}
        for expr in expressions_of(node):
            for e in reversed(list(expr.walk())):
                if isinstance(e, Element | Search) and not (isinstance(node, Bind) and e is node.expr):
                    yield e, (*guard, *guarded.get(expr, ())), certain
        for part in bodies(node):
            yield from _candidates(part, certain and not isinstance(node, If | While))
