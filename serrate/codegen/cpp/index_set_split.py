"""Index-set splitting: blocks are split where the data they read ends. Also recognises blocks that only move elements.

In: statements over the same lanes. Out: the same statements twice: for the positions at which every element exists, and for the
positions after them, where reads are constants. Neither tests a guard per lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serrate.ir.expr import Expr, Less
from serrate.ir.loops import Block, Guard, Lane, Load, Number, Write, load
from serrate.ir.solve import end_of
from serrate.ir.values import Call, Value, constant, rewrite

MOST = 2
"""The most ends of data at which statements are split: each split doubles the code."""

Piece = tuple[Write, ...]


@dataclass(frozen=True)
class IndexSetSplit:
    """Statements split along one lane: positions where `bounds` (which increase along the lane) and `tests` hold, then the rest.
    Either side may be split again along the same lane."""

    lane: Lane
    bounds: Guard
    tests: Guard
    inside: Piece | IndexSetSplit
    outside: Piece | IndexSetSplit

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The statements of all pieces, in order."""
        return tuple(
            p for each in (self.inside, self.outside) for p in (each.pieces if isinstance(each, IndexSetSplit) else (each,))
        )


def cut_of(group: Sequence[Block], spelled: Callable[[Expr], Expr]) -> IndexSetSplit | None:
    """The split of statements that all write, if everything they read ends along one lane; else None.

    `spelled` expands names that have lanes.
    """
    writes = tuple(node for node in group if isinstance(node, Write))
    guards = dict.fromkeys(v.guard for node in writes for v in node.value.walk() if isinstance(v, Load) and v.guard)
    if len(writes) != len(group) or not 1 <= len(guards) <= MOST or not writes[0].lanes:
        return None
    asked = {guard: tuple(Less(spelled(g.left), spelled(g.right)) for g in guard) for guard in guards}
    lanes = writes[0].lanes
    bounds = [g for conditions in asked.values() for g in conditions if g.symbols & {lane.symbol for lane in lanes}]
    along = [lane for lane in lanes if any(lane.symbol in g.symbols for g in bounds)] or [lanes[0]]
    if len(along) > 1 or any(end_of(g, along[0].symbol) is None for g in bounds):
        return None
    # The split position is computed before the loops, so the lane's range must not depend on outer lanes.
    around = {lane.symbol for lane in lanes[: lanes.index(along[0])]}
    within = [Less(spelled(g.left), spelled(g.right)) for g in writes[0].guard]
    if any(along[0].symbol in g.symbols and g.symbols & around for g in within):
        return None
    return _cut(writes, along[0], list(asked.items()), spelled)


def _cut(group: Piece, lane: Lane, asked: list[tuple[Guard, Guard]], spelled: Callable[[Expr], Expr]) -> IndexSetSplit:
    """Splits at the end of the reads under the first condition, and both pieces at the ends of the others."""
    (guard, conditions), *others = asked

    def there(v: Load) -> Value:
        return load(v.tensor, v.index, (), v.other)

    def absent(v: Load) -> Value:
        return constant(v.other, v.dtype)

    changes = (
        replace_reads(guard, there, lambda g: True if g in conditions else None, spelled),
        replace_reads(guard, absent, lambda g: False if conditions == (g,) else None, spelled),
    )
    inside, outside = (tuple(replace(n, value=rewrite(n.value, change)) for n in group) for change in changes)
    bounds = tuple(g for g in conditions if lane.symbol in g.symbols)
    tests = tuple(g for g in conditions if g not in bounds)
    if not others:
        return IndexSetSplit(lane, bounds, tests, inside, outside)
    return IndexSetSplit(lane, bounds, tests, _cut(inside, lane, others, spelled), _cut(outside, lane, others, spelled))


def replace_reads(
    guard: Guard, guarded: Callable[[Load], Value], holds: Callable[[Less], bool | None], spelled: Callable[[Expr], Expr]
) -> Callable[[Value], Value | None]:
    """Rewrites the values of one piece: reads under this guard, and selects whose condition is known there."""

    def change(value: Value) -> Value | None:
        if isinstance(value, Load) and value.guard == guard:
            return guarded(value)
        if isinstance(value, Call) and value.function == "where":
            condition, chosen, other = value.args
            known = None
            if isinstance(condition, Call) and condition.function == "lt" and all(isinstance(a, Number) for a in condition.args):
                left, right = (spelled(a.expr) for a in condition.args if isinstance(a, Number))
                known = holds(Less(left, right))
            return None if known is None else rewrite(chosen if known else other, change)
        return None

    return change


def moves(node: Write) -> bool:
    """Whether a statement only moves elements, so that bits can be copied whatever the dtype."""
    return isinstance(node.value, Load) and not node.value.guard and node.value.dtype == node.tensor.dtype
