"""Unmask: removes masks from private blocks if nothing reads the lanes that do not exist.

In: a loop program. Out: the same; in kernels with matrix products, statements that fill private blocks lose conditions that all
readers of these blocks have too. Reads of memory keep them. A GPU computes whole blocks anyway, so a mask would only select
between the result and the previous contents:

    [q:64, k:64] t = exp(s)  where q < n                      [q:64, k:64] t = exp(s)
    [q:64, k:64] l sum= t    where q < n, k < m       ->      [q:64, k:64] l sum= t     where k < m
    [q:64] y[q] = l          where q < n                      [q:64] y[q] = l           where q < n
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from serrate.ir.expr import Less, Symbol
from serrate.ir.loops import (
    Assign,
    Dot,
    Guard,
    Held,
    Load,
    Local,
    LoopProgram,
    Node,
    Reduce,
    Write,
    expressions_of,
    load,
    nodes,
    values_of,
    written_by,
)
from serrate.ir.values import Value
from serrate.lower.passes.common import Body, Effect, effects, inward, kept, names_in, per_kernel, with_values


def unmask(program: LoopProgram) -> LoopProgram:
    """Drops irrelevant conditions from private blocks."""
    return per_kernel(program, lambda k: _unmasked(k.body) if any(isinstance(n, Dot) for n in nodes(k.body)) else k.body)


def _unmasked(body: Body) -> Body:
    statements = effects(body)
    lanes = {lane.symbol for s in statements for lane in s.lanes}
    steering = _steering(body)
    asked = dict.fromkeys(g for s in statements for g in s.guard if g.symbols & lanes)
    free = {g: own for g in asked if _is_free(g, own := g.symbols & lanes, statements, steering)}

    def part(body: Body) -> Body:
        out: list[Node] = []
        for node in body:
            gone = tuple(g for g in node.guard if g in free and _fills(node, free[g])) if isinstance(node, Effect) else ()
            out.append(_without(node, gone, lanes) if gone and isinstance(node, Effect) else inward(node, part))
        return kept(body, out)

    return part(body)


def _steering(body: Body) -> set[str]:
    """The private blocks that conditions, loop bounds and indices read."""
    return names_in(*(e for node in nodes(body) for e in expressions_of(node)))


def _held(node: Effect) -> list[Local]:
    """The private blocks that a statement reads, with the lanes along which it does."""
    return [v.local for value in values_of(node) for v in value.walk() if isinstance(v, Held)]


def _fills(node: Effect, own: Collection[Symbol]) -> bool:
    """Whether a statement fills a private block that has these lanes."""
    return isinstance(node, Assign | Reduce | Dot) and set(own) <= {lane.symbol for lane in node.local.lanes}


def _is_free(condition: Less, own: Collection[Symbol], statements: list[Effect], steering: set[str]) -> bool:
    """Whether no result depends on the contents of private blocks where a condition fails."""
    pending = [local.name for s in statements if condition in s.guard and _fills(s, own) for local in written_by(s)]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in steering:
            return False
        for s in statements:
            read = [local for local in _held(s) if local.name == name]
            if not read:
                continue
            in_place = all(set(own) <= {lane.symbol for lane in local.lanes} for local in read)
            if in_place and _fills(s, own):
                pending += (local.name for local in written_by(s))
            elif not in_place or condition not in s.guard or not isinstance(s, Write):
                # A statement that sums over these lanes would have to mask what it reads instead.
                return False
    return bool(seen)


def _without(node: Effect, gone: Guard, lanes: set[Symbol]) -> Effect:
    """The statement without these conditions, which move to what it reads from memory."""

    def change(v: Value) -> Value | None:
        if not isinstance(v, Load):
            return None
        there = {s for e in v.index for s in e.symbols}
        more = tuple(g for g in gone if g.symbols & lanes <= there and g not in v.guard)
        return load(v.tensor, v.index, (*v.guard, *more), v.other)

    return replace(with_values(node, change), guard=tuple(g for g in node.guard if g not in gone))
