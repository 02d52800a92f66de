"""Unswitch: a reduction whose reads depend on a condition that is the same in all lanes becomes a branch.

In: a loop program. Out: the same, with such conditions tested once per statement instead of once per lane:

    [d:64] t sum= table[i, d if i < n]   ->   if i < n:  [d:64] t sum= table[i, d]

Where the condition does not hold, the read gives its `other`; a reduction of its identity is dropped.
"""

from __future__ import annotations

from dataclasses import replace

from serrate.ir.expr import Symbol
from serrate.ir.loops import Bind, Guard, If, Lanes, Load, LoopProgram, Node, Reduce, identity_of, load, nodes
from serrate.ir.values import Constant, Value, constant, rewrite
from serrate.lower.passes.common import Body, inward, kept, per_kernel


def unswitch(program: LoopProgram) -> LoopProgram:
    """Moves conditions of reads out of the lanes of reductions."""
    return per_kernel(program, lambda k: _body(k.body, _laned(k.body)))


def _laned(body: Body) -> dict[Symbol, Lanes]:
    """Names of indices that differ from lane to lane."""
    return {n.symbol: n.lanes for n in nodes(body) if isinstance(n, Bind) and n.lanes}


def _body(body: Body, laned: dict[Symbol, Lanes]) -> Body:
    return kept(body, (_statement(node, laned) for node in body))


def _statement(node: Node, laned: dict[Symbol, Lanes]) -> Node:
    if not isinstance(node, Reduce):
        return inward(node, lambda part: _body(part, laned))
    guards = dict.fromkeys(v.guard for v in node.value.walk() if isinstance(v, Load) and v.guard)
    varying = {lane.symbol for lane in node.lanes} | laned.keys()
    if len(guards) != 1 or not node.lanes:
        return node
    (guard,) = guards
    if any(g.symbols & varying for g in guard):
        return node
    then = replace(node, value=rewrite(node.value, lambda v: _without(v, guard)))
    other = replace(node, value=rewrite(node.value, lambda v: _absent(v, guard)))
    return If(guard, (then,), () if _is_identity(other) else (other,))


def _without(value: Value, guard: Guard) -> Value | None:
    return load(value.tensor, value.index, (), value.other) if isinstance(value, Load) and value.guard == guard else None


def _absent(value: Value, guard: Guard) -> Value | None:
    return constant(value.other, value.dtype) if isinstance(value, Load) and value.guard == guard else None


def _is_identity(node: Reduce) -> bool:
    value = node.value
    return isinstance(value, Constant) and value.number == identity_of(node.operator, node.local.dtype)
