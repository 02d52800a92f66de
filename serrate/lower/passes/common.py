"""Helpers of the passes: rewriting of index expressions, and queries on statements.

In: statements of a loop program. Out: rewritten statements. Unchanged statements stay the same objects, so a pass that changes
nothing returns the program it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from serrate.ir.expr import Element, Expr, Less, Symbol
from serrate.ir.loops import (
    Assign,
    Barrier,
    Bind,
    Declare,
    Dot,
    Existing,
    Fold,
    For,
    Guard,
    If,
    Lanes,
    Load,
    LoopKernel,
    LoopProgram,
    Node,
    Number,
    Prefetch,
    Reduce,
    Running,
    While,
    Write,
    bodies,
    existing,
    expressions_of,
    load,
    map_values,
    nodes,
    number,
    values_of,
    with_bodies,
    written_by,
)
from serrate.ir.solve import factor_of, terms_of
from serrate.ir.values import Value, rewrite

Body = tuple[Node, ...]
Effect = Assign | Reduce | Fold | Dot | Running | Write
"""Statements that change a private block or memory."""


def per_kernel(program: LoopProgram, change: Callable[[LoopKernel], Body]) -> LoopProgram:
    """The program with the statements of each kernel rewritten; the same object if nothing changed."""
    kernels = tuple(k if (body := change(k)) is k.body else replace(k, body=body) for k in program.kernels)
    return program if same(program.kernels, kernels) else replace(program, kernels=kernels)


def same(old: tuple[object, ...], new: tuple[object, ...]) -> bool:
    """Whether two tuples hold the same objects."""
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))


def kept(old: Body, new: Iterable[Node]) -> Body:
    """The new statements; the old tuple itself if they are the same."""
    made = tuple(new)
    return old if same(old, made) else made


def inward(node: Node, change: Callable[[Body], Body]) -> Node:
    """A statement with every body inside it rewritten."""
    parts = bodies(node)
    new = tuple(change(part) for part in parts)
    return node if same(parts, new) else with_bodies(node, new)


N = TypeVar("N", bound=Node)


def changed(node: N, **parts: object) -> N:
    """A statement with fields replaced; the same object if they are the same."""
    old = [getattr(node, name) for name in parts]
    unchanged = all(a is b or a == b for a, b in zip(old, parts.values(), strict=True))
    return node if unchanged else replace(node, **parts)  # type: ignore[arg-type]


def effects(body: Body) -> list[Effect]:
    """The statements of a body, at any depth, that write a private block or memory."""
    return [n for n in nodes(body) if isinstance(n, Effect)]


def with_values(node: Effect, change: Callable[[Value], Value | None]) -> Effect:
    """A statement whose values are rewritten."""
    made = map_values(node, lambda v: rewrite(v, change))
    return node if same(values_of(node), values_of(made)) else made


def names_in(*exprs: Expr) -> set[str]:
    """The names that index expressions read: symbols, and private blocks of indices."""
    found = {s.name for e in exprs for s in e.symbols}
    return found | {e.array.name for x in exprs for e in x.walk() if isinstance(e, Element) and e.array.local}


def without(value: Load, known: Iterable[Less]) -> Value:
    """A read without the conditions that are known to hold."""
    return load(value.tensor, value.index, tuple(g for g in value.guard if g not in known), value.other)


def is_apart(index: Sequence[Expr], lanes: Lanes, loop: For) -> bool:
    """Whether no two iterations of a loop access the same element: along some dim, the elements of an iteration span less than
    the distance to those of the next."""
    last = {lane.symbol: lane.size - 1 for lane in lanes}
    inside = [*nodes(loop.body)]
    varying = {x.name for n in inside for x in written_by(n)} | {n.symbol.name for n in inside if isinstance(n, For | Bind)}

    def separates(e: Expr) -> bool:
        terms = [(term, factor) for term, factor in terms_of(e) if term is not loop.symbol]
        span = sum(abs(factor) * last[term] for term, factor in terms if isinstance(term, Symbol) and term in last)
        others = names_in(*(term for term, _ in terms if term not in last))
        fixed = others.isdisjoint({loop.symbol.name, *(s.name for s in last), *varying})
        return fixed and abs(factor_of(e, loop.symbol)) > span

    return any(map(separates, index))


# --- index expressions -------------------------------------------------------------------------------------------------


def substituted(body: Body, names: Mapping[Expr, Expr]) -> Body:
    """Statements with index expressions substituted, at any depth."""
    return mapped(body, lambda e: e.substitute(names)) if names else body


def mapped(body: Body, change: Callable[[Expr], Expr]) -> Body:
    """Statements with every index expression rewritten, at any depth."""
    return kept(body, (_changed(node, change) for node in body))


def _changed(node: Node, change: Callable[[Expr], Expr]) -> Node:
    def guard(old: Guard) -> Guard:
        new = tuple(Less(change(g.left), change(g.right)) for g in old)
        return old if new == old else new

    def value(v: Value) -> Value | None:
        if isinstance(v, Load):
            return load(v.tensor, tuple(map(change, v.index)), guard(v.guard), v.other)
        if isinstance(v, Number):
            return number(change(v.expr), v.dtype)
        return existing(v.lanes, guard(v.guard), v.dtype) if isinstance(v, Existing) else None

    if isinstance(node, Declare | Barrier):
        return node
    if isinstance(node, For):
        extent, bound, body = change(node.extent), change(node.bound), mapped(node.body, change)
        new: dict[str, object] = {"extent": extent, "bound": bound, "body": body}
    elif isinstance(node, Bind):
        new = {"expr": change(node.expr), "guard": guard(node.guard)}
    elif isinstance(node, If):
        new = {"guard": guard(node.guard), "then": mapped(node.then, change), "other": mapped(node.other, change)}
    elif isinstance(node, While):
        new = {"guard": guard(node.guard), "test": mapped(node.test, change), "body": mapped(node.body, change)}
    else:
        new = {"guard": guard(node.guard)}
        if isinstance(node, Write | Prefetch):
            index = tuple(map(change, node.index))
            new["index"] = node.index if index == node.index else index
        if isinstance(node, Assign) and node.rests:
            new["rests"] = tuple(map(guard, node.rests))
        if isinstance(node, Effect):
            node = with_values(node, value)
    return changed(node, **new)


def found_in(body: Body) -> Iterable[Expr]:
    """Every index expression of a body, with all subexpressions."""
    return (e for node in nodes(body) for x in expressions_of(node) for e in x.walk())
