"""Carried values, which one iteration of a loop passes to the next.

In: the carried values of a loop, before it and after an iteration. Out: the statements that end an iteration, and the reduction
that each value was recognised as.

    acc = acc + x.sum(1)                        reduces directly into acc; a finished row adds nothing
    acc = torch.maximum(acc, x.amax(1))         likewise, and min, prod, any, all
    acc = acc * exp(top - new) + p @ v          rescales acc if any lane existed, then accumulates the product into it
    anything else                               the new value if any lane existed, else the old one (rule 5)

A recognised reduction does not depend on how a row is cut into tiles (rule 6); for any other value this must be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from serrate.ir.expr import Expr
from serrate.ir.loops import Assign, Declare, Dot, Held, Local, Reduce, held, values_of
from serrate.ir.reductions import MAX, OPERATORS, REDUCTIONS, rescaled
from serrate.ir.renaming import Swap
from serrate.ir.tile import Around, Carry, Leaf, Statement, statements
from serrate.ir.values import Call, Value, call, carried_dtype, constant
from serrate.tiles.values import Feeder, Traced

RESCALED = "rescaled sum"
COMBINES = {function: REDUCTIONS[name] for function, name in OPERATORS.items()}


@dataclass(eq=False)
class Carried:
    """A carried variable: its private block, its value after an iteration, and the reductions of that iteration that feed it."""

    name: str
    local: Local
    value: Traced
    now: tuple[Feeder, ...]
    kind: str | None = None
    """The reduction it was recognised as, in words."""
    top: Local | None = None
    """The maximum that a rescaled sum is relative to."""


def finish(body: list[Statement], carried: Sequence[Carried], reductions: dict[str, str]) -> tuple[Statement, ...]:
    """The body of a loop, followed by the statements that update every carried value.

    `reductions` maps names of private blocks to the reductions they hold; carried ones are added.
    """
    uses = _uses(body, carried)
    actions: list[_Action] = []
    for each in carried:
        each.kind = _kind(each, carried, reductions)
        actions.append(_action(each, body, uses, reductions))
    for each in carried:
        if each.kind is not None:
            reductions[each.local.name] = each.kind
    moved = {id(node) for action in actions for node in action.taken}
    rest = [node for node in body if id(node) not in moved]
    return (*rest, *_ordered(actions))


def carries(carried: Sequence[Carried]) -> tuple[Carry, ...]:
    """The carried values of a loop as reductions; a sum that is rescaled by a maximum is grouped with it."""
    sums = {c.local: [s for s in carried if s.kind == RESCALED and s.top == c.local] for c in carried if c.kind == MAX.name}
    found: list[Carry] = []
    for each in carried:
        own = sums.get(each.local, [])
        if own:
            found.append(Carry((each.local, *(s.local for s in own)), rescaled(len(own))))
        elif each.kind != RESCALED or each.top not in sums:
            found.append(Carry((each.local,), None if each.kind in (None, RESCALED) else REDUCTIONS[str(each.kind)]))
    return tuple(found)


@dataclass(eq=False)
class _Action:
    """The statements that update one carried value, and those they replace."""

    local: Local
    nodes: list[Statement]
    taken: list[Statement]

    @property
    def reads(self) -> set[str]:
        found = {v.local.name for n in self.nodes for value in _values(n) for v in value.walk() if isinstance(v, Held)}
        return found - {self.local.name}


def _values(node: Statement) -> tuple[Value, ...]:
    return () if isinstance(node, Declare | Around | Leaf) else values_of(node)


def _uses(body: Sequence[Statement], carried: Sequence[Carried]) -> dict[str, int]:
    """How often private blocks are read, by statements and by carried values."""
    found: dict[str, int] = {}
    values = [v for node in statements(tuple(body)) for v in _values(node)] + [c.value.value for c in carried]
    for value in values:
        for v in value.walk():
            if isinstance(v, Held):
                found[v.local.name] = found.get(v.local.name, 0) + 1
    return found


def _parts(value: Value) -> tuple[str, Value, Value] | None:
    """The operator and operands of a combination, ignoring lossless casts."""
    value = _widened(value)
    if isinstance(value, Call) and value.function in COMBINES:
        return value.function, *map(_widened, value.args)  # type: ignore[return-value]
    return None


def _widened(value: Value) -> Value:
    """The value without lossless casts."""
    while isinstance(value, Call) and value.function == "cast" and value.dtype.is_floating_point:
        (inner,) = value.args
        exact = carried_dtype(value.dtype) == value.dtype and torch.promote_types(inner.dtype, value.dtype) == value.dtype
        if not inner.dtype.is_floating_point or not exact:
            break
        value = inner
    return value


def _split(each: Carried, reductions: dict[str, str]) -> tuple[str, Value, Held] | None:
    """An update as (operator, rescaled old value, reduction combined into it)."""
    parts = _parts(each.value.value)
    if parts is None:
        return None
    operator, left, right = parts
    for base, new in ((left, right), (right, left)):
        own = isinstance(new, Held) and new.local.name != each.local.name
        if not own or not isinstance(new, Held) or _mentions(base, new.local):
            continue
        if reductions.get(new.local.name) == COMBINES[operator].name and _mentions(base, each.local):
            return operator, base, new
    return None


def _mentions(value: Value, local: Local) -> bool:
    return any(isinstance(v, Held) and v.local.name == local.name for v in value.walk())


def _kind(each: Carried, carried: Sequence[Carried], reductions: dict[str, str]) -> str | None:
    """The reduction that a carried value is recognised as; None if it is not."""
    split = _split(each, reductions)
    if split is None:
        return None
    operator, base, _ = split
    if isinstance(base, Held):
        return COMBINES[operator].name
    if operator == "add" and _rescales(base, each, carried):
        return RESCALED
    return None


def _rescales(base: Value, each: Carried, carried: Sequence[Carried]) -> bool:
    """Whether the old value is multiplied by e^(old maximum - new maximum) for a maximum that the loop also carries."""
    if not (isinstance(base, Call) and base.function == "mul"):
        return False
    for old, factor in (base.args, base.args[::-1]):
        if isinstance(old, Held) and old.local.name == each.local.name:
            each.top = next((top.local for top in carried if top is not each and _shrinks(factor, top)), None)
            return each.top is not None
    return False


def _shrinks(factor: Value, top: Carried) -> bool:
    if not (isinstance(factor, Call) and factor.function == "exp"):
        return False
    (inner,) = factor.args
    if not (isinstance(inner, Call) and inner.function == "sub"):
        return False
    old, new = inner.args
    return isinstance(old, Held) and old.local.name == top.local.name and new is top.value.value


def _action(each: Carried, body: Sequence[Statement], uses: dict[str, int], reductions: dict[str, str]) -> _Action:
    local, value = each.local, each.value.value
    split = _split(each, reductions)
    if split is not None:
        operator, base, new = split
        declared = next((n for n in body if isinstance(n, Declare) and n.local.name == new.local.name), None)
        made = [n for n in body if isinstance(n, Reduce | Dot) and n.local.name == new.local.name]
        pure = isinstance(base, Held)
        same = {lane.symbol for lane in new.local.lanes} == {lane.symbol for lane in local.lanes}
        alone = uses.get(new.local.name) == 1 and len(made) == 1 and declared is not None and same
        if alone and declared is not None and (pure or operator == "add"):
            nodes: list[Statement] = []
            if not pure:
                nodes.append(_assign(each, _kept_if_idle(base, each)))
            nodes.append(_into(made[0], new.local, local))
            return _Action(local, nodes, [declared, *made])
        if pure:
            return _Action(local, [_assign(each, _fitting(value, local))], [])
    return _Action(local, [_assign(each, _kept_if_idle(value, each))], [])


def _assign(each: Carried, value: Value) -> Assign:
    return Assign(each.local.lanes, (), each.local, value, tuple(fed.guard for fed in each.now))


def _into(node: Reduce | Dot, alias: Local, local: Local) -> Reduce | Dot:
    """A reduction redirected into another block, in its dtype, along the lanes at which the result was read."""
    if isinstance(node, Reduce) and node.value.dtype != local.dtype:
        node = replace(node, value=call("cast", node.value, dtype=local.dtype))
    lanes = {old.symbol: new.symbol for old, new in zip(node.local.lanes, alias.lanes, strict=True) if old != new}
    if not lanes:
        return replace(node, local=local)
    return replace(Swap(dict[Expr, Expr](lanes.items()), lanes).node(node), local=local)


def _fitting(value: Value, local: Local) -> Value:
    return value if value.dtype == local.dtype else call("cast", value, dtype=local.dtype)


def _kept_if_idle(value: Value, each: Carried) -> Value:
    """The new value if any lane of the reductions that feed it existed in this iteration, else the old one (rule 5)."""
    value = _fitting(value, each.local)
    if not each.now:
        return value
    seen: Value | None = None
    for fed in each.now:
        one = call("gt", fed.count(), constant(0, torch.int64), dtype=torch.bool)
        seen = one if seen is None else call("logical_or", seen, one, dtype=torch.bool)
    assert seen is not None
    return call("where", seen, value, held(each.local), dtype=each.local.dtype)


def _ordered(actions: list[_Action]) -> list[Statement]:
    """Orders actions so that each reads values from the start of the iteration; copies break cycles."""
    pending = list(actions)
    out: list[Statement] = []
    while pending:
        free = next((a for a in pending if not any(a.local.name in b.reads for b in pending if b is not a)), None)
        if free is None:
            # A cycle: copy the value that the others need.
            free = pending[0]
            kept = Local(f"{free.local.name}_before", free.local.dtype, free.local.lanes)
            out += [Declare(kept, 0), Assign(kept.lanes, (), kept, held(free.local))]
            for other in pending[1:]:
                other.nodes = [_reading(n, free.local, kept) for n in other.nodes]
        out += free.nodes
        pending.remove(free)
    return out


def _reading(node: Any, old: Local, new: Local) -> Any:
    from serrate.ir.values import rewrite

    def change(v: Value) -> Value | None:
        return held(replace(new, lanes=v.local.lanes)) if isinstance(v, Held) and v.local.name == old.name else None

    if isinstance(node, Dot):
        return replace(node, left=rewrite(node.left, change), right=rewrite(node.right, change))
    return replace(node, value=rewrite(node.value, change)) if isinstance(node, Assign | Reduce) else node
