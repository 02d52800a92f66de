"""Rewriting indices, lanes and private blocks in the statements and values of loop programs.

In: a `Renaming`, which maps index expressions, lanes and names. Out: values, guards and block statements rewritten by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from serrate.ir.expr import Expr, Less, Symbol
from serrate.ir.loops import (
    Assign,
    Bind,
    Block,
    Declare,
    Dot,
    Existing,
    Fold,
    Guard,
    Held,
    Lane,
    Lanes,
    Load,
    Local,
    Number,
    Prefetch,
    Reduce,
    Running,
    Write,
    existing,
    held,
    load,
    map_values,
    number,
)
from serrate.ir.values import Value, rewrite

Renamed = TypeVar("Renamed", bound=Block | Declare | Bind)


class Renaming:
    """The identity; subclasses override what they change."""

    def expr(self, expr: Expr) -> Expr:
        """An index expression."""
        return expr

    def lane(self, lane: Lane) -> Lane | None:
        """A lane; None to drop one that has a single position."""
        return lane

    def name(self, name: str) -> str:
        """The name of a private block."""
        return name

    def guard(self, guard: Guard) -> Guard:
        """Conditions."""
        return tuple(Less(self.expr(g.left), self.expr(g.right)) for g in guard)

    def lanes(self, lanes: Lanes) -> Lanes:
        """The lanes of a statement or a private block."""
        return tuple(new for lane in lanes if (new := self.lane(lane)) is not None)

    def local(self, local: Local) -> Local:
        """A private block."""
        return Local(self.name(local.name), local.dtype, self.lanes(local.lanes))

    def value(self, value: Value) -> Value:
        """A value."""

        def change(v: Value) -> Value | None:
            if isinstance(v, Load):
                return load(v.tensor, tuple(map(self.expr, v.index)), self.guard(v.guard), v.other)
            if isinstance(v, Number):
                return number(self.expr(v.expr), v.dtype)
            if isinstance(v, Existing):
                return existing(self.lanes(v.lanes), self.guard(v.guard), v.dtype)
            return held(self.local(v.local)) if isinstance(v, Held) else None

        return rewrite(value, change)

    def node(self, node: Renamed) -> Renamed:
        """A statement without nested statements."""
        if isinstance(node, Declare):
            return replace(node, local=self.local(node.local))
        if isinstance(node, Bind):
            return replace(node, expr=self.expr(node.expr), lanes=self.lanes(node.lanes), guard=self.guard(node.guard))
        made = map_values(replace(node, lanes=self.lanes(node.lanes), guard=self.guard(node.guard)), self.value)
        if isinstance(made, Write | Prefetch):
            return replace(made, index=tuple(map(self.expr, made.index)))
        if isinstance(made, Running):
            axis = None if made.axis is None else self.lane(made.axis)
            return replace(made, local=self.local(made.local), carry=self.local(made.carry), axis=axis)
        if isinstance(made, Assign):
            return replace(made, local=self.local(made.local), rests=tuple(map(self.guard, made.rests)))
        if isinstance(made, Reduce | Dot):
            return replace(made, local=self.local(made.local))
        assert isinstance(made, Fold)
        return replace(made, locals=tuple(map(self.local, made.locals)))


@dataclass(frozen=True)
class Swap(Renaming):
    """Replaces index expressions, and lanes by lanes of the same size."""

    expressions: Mapping[Expr, Expr]
    symbols: Mapping[Symbol, Symbol] = field(default_factory=dict)

    def expr(self, expr: Expr) -> Expr:
        return expr.substitute(self.expressions)

    def lane(self, lane: Lane) -> Lane:
        return Lane(self.symbols.get(lane.symbol, lane.symbol), lane.size)
