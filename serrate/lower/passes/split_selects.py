"""Split selects: a block that chooses its values by constant positions of a lane becomes one block per range of positions.

In: a loop program. Out: the same, in which blocks of many parts are written one part after another:

    [d:64] out[c, d] = where(d < 16, a[c, d if d < 16], where(d < 20, b[c, d - 16 if -1 < d - 16 and d - 16 < 4], ...))
        ->
    [d_0:16] out[c, d_0] = a[c, d_0]
    [d_1:4] out[c, d_1 + 16] = b[c, d_1]
    ...

Without it, every element would be chosen among the elements of all parts. Blocks of few parts stay whole: index-set splitting at
the ends of reads does as well, and leaves one block, which can bypass the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod

from serrate.ir.conditions import conditions_of
from serrate.ir.expr import Less, const, symbol
from serrate.ir.loops import Existing, Guard, Lane, Load, LoopProgram, Node, Write, load
from serrate.ir.solve import end_of, start_of
from serrate.ir.values import Call, Value, constant, rewrite
from serrate.lower.names import Names
from serrate.lower.nests import locals_of
from serrate.lower.passes.common import Body, inward, kept, per_kernel, substituted

LEAST = 3
"""The fewest positions at which a block is split."""
CACHED = 1 << 17
"""The most bytes of a block that is split along an inner lane."""


def split_selects(program: LoopProgram) -> LoopProgram:
    """Splits blocks at the constant positions that their selects compare with."""
    names = Names(program)
    return per_kernel(program, lambda k: _body(k.body, names))


def _body(body: Body, names: Names) -> Body:
    return kept(body, (new for node in body for new in _statement(node, names)))


def _statement(node: Node, names: Names) -> Body:
    if not isinstance(node, Write):
        return (inward(node, lambda part: _body(part, names)),)
    values = list(node.value.walk())
    fixed = {own for v in values if isinstance(v, Existing) for own in v.lanes}
    fixed |= {own for local in locals_of(node) for own in local.lanes}
    tested = dict.fromkeys(g for v in values for g in _tested(v))
    for lane in node.lanes:
        cuts = sorted({cut for g in tested if (cut := _cut(g, lane)) is not None and 0 < cut < lane.size})
        if len(cuts) >= LEAST and lane not in fixed and not node.add and (lane == node.lanes[0] or _is_cached(node)):
            return tuple(_part(node, lane, k, *ends, names) for k, ends in enumerate(pairwise((0, *cuts, lane.size))))
    return (node,)


def _is_cached(node: Write) -> bool:
    """Whether the cache holds a block while its parts are written, each in all rows."""
    return prod(lane.size for lane in node.lanes) * node.tensor.dtype.itemsize <= CACHED


def _tested(value: Value) -> Guard:
    """The comparisons of positions that a select tests, if it tests nothing else."""
    if not isinstance(value, Call) or value.function != "where":
        return ()
    found, rest = conditions_of(value.args[0])
    return found if rest is None else ()


def _cut(condition: Less, lane: Lane) -> int | None:
    """The constant position of a lane at which a condition starts or stops to hold."""
    if condition.symbols != {lane.symbol}:
        return None
    place = end_of(condition, lane.symbol) or start_of(condition, lane.symbol)
    return None if place is None else place.value


def _part(node: Write, lane: Lane, k: int, begin: int, end: int, names: Names) -> Write:
    """The statement for the positions of a lane from `begin` to `end`."""
    short = Lane(symbol(names.of((node, lane, k), f"{lane.symbol.name}_{k}"), 0, end - begin - 1), end - begin)
    lanes = tuple(short if each == lane else each for each in node.lanes)
    chosen = replace(node, lanes=lanes, value=rewrite(node.value, lambda v: _chosen(v, lane, begin, end)))
    (moved,) = substituted((chosen,), {lane.symbol: short.symbol + begin})
    assert isinstance(moved, Write)
    guard = tuple(g for g in moved.guard if not g.proven)
    return replace(moved, guard=guard, value=rewrite(moved.value, _known))


def _chosen(value: Value, lane: Lane, begin: int, end: int) -> Value | None:
    """The operand that a select chooses everywhere between two positions of a lane."""
    tested = _tested(value)
    if not tested or not isinstance(value, Call):
        return None
    holds = list(_holding(tested, lane, begin, end))
    known = False if False in holds else None if None in holds else True
    return None if known is None else rewrite(value.args[1 if known else 2], lambda v: _chosen(v, lane, begin, end))


def _holding(guard: Guard, lane: Lane, begin: int, end: int) -> Iterator[bool | None]:
    """Whether each condition holds at all positions (True), at none (False), or is not known."""
    for condition in guard:
        first, last = (condition.substitute({lane.symbol: const(place)}) for place in (begin, end - 1))
        known = condition.symbols == {lane.symbol}
        both = {c.proven for c in (first, last)}
        yield both.pop() if known and len(both) == 1 else None


def _known(value: Value) -> Value | None:
    """A read without the conditions that hold at all positions; its `other` where one never holds."""
    if not isinstance(value, Load) or not value.guard:
        return None
    if any(Less(g.right, g.left + 1).proven for g in value.guard):
        return constant(value.other, value.dtype)
    return load(value.tensor, value.index, tuple(g for g in value.guard if not g.proven), value.other)
