"""Expansion of reductions into block operations: one tile of values is reduced and combined into the carried states.

In: a reduction, its states as private blocks, the tile's values and the lanes they vary over. Out: block statements. This module
knows no reduction by name; the definition determines the form:

    an operator for each state   Reduce, or Dot if the terms of the only state form a matrix product
    no lanes are reduced         combine, lane by lane
    in_block                     the definition's own code for a whole block
    otherwise                    Fold: combine, position by position, in order
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from serrate.ir.conditions import bounding, bounds_a_lane, conditions_of
from serrate.ir.expr import const
from serrate.ir.loops import (
    Assign,
    Declare,
    Dot,
    Fold,
    For,
    Guard,
    Lanes,
    Load,
    Local,
    Node,
    Reduce,
    existing,
    held,
    symbols_of,
)
from serrate.ir.reductions import Reduction, States
from serrate.ir.solve import end_of
from serrate.ir.tile import SERIAL
from serrate.ir.values import COSTLY, Call, Constant, Value, call, carried_dtype, rewrite


@dataclass(frozen=True)
class ReductionTile:
    """Where a reduction happens: the statement's lanes and guard, and the lanes that its states keep."""

    lanes: Lanes
    guard: Guard
    kept: Lanes
    kept_guard: Guard

    @property
    def reduced(self) -> Lanes:
        return tuple(lane for lane in self.lanes if lane not in self.kept)

    def of(self, state: Local) -> ReductionTile:
        """The tile for a state that has fewer lanes than other states."""
        gone = [lane for lane in self.kept if lane not in state.lanes]
        if not gone:
            return self
        symbols = {lane.symbol for lane in gone}
        lanes, kept = (tuple(lane for lane in every if lane not in gone) for every in (self.lanes, self.kept))
        guard, kept_guard = (tuple(g for g in every if not g.symbols & symbols) for every in (self.guard, self.kept_guard))
        return ReductionTile(lanes, guard, kept, kept_guard)


def expand(
    kind: Reduction, states: tuple[Local, ...], values: tuple[Value, ...], tile: ReductionTile, *, merge: bool
) -> list[Node]:
    """Block statements that combine `values` (whole states if `merge`) into `states`, over the lanes that the states lack."""
    new = values if merge else kind.lifted(values)
    if kind.operator is not None:
        product = as_dot(states[0], new[0], tile) if kind.operator == "sum" else None
        return [product or Reduce(tile.lanes, tile.guard, states[0], kind.operator, new[0])]
    if kind.operators is not None:
        parts = zip(states, map(tile.of, states), kind.operators, new, strict=True)
        return [Reduce(part.lanes, part.guard, state, operator, value) for state, part, operator, value in parts]
    carried = tuple(map(held, states))
    if not tile.reduced:
        return assigned(states, kind.combine(carried, new), [(tile.of(s).lanes, tile.of(s).guard) for s in states])
    if kind.in_block is None:
        return [Fold(tile.lanes, tile.guard, states, kind, new)]
    block = _BlockEmitter(kind, states, tile)
    kind.in_block(block, carried, new)
    return [*block.declared, *block.nodes]


def steps(fold: Fold) -> list[Node]:
    """A fold as loops."""
    kept = fold.locals[0].lanes
    combined = fold.reduction.combine(tuple(map(held, fold.locals)), fold.values)
    lanes = tuple(lane for lane in fold.lanes if lane in kept)
    body = assigned(fold.locals, combined, [(lanes, fold.guard)] * len(fold.locals))
    for lane in reversed(fold.lanes):
        if lane not in kept:
            body = [For(lane.symbol, const(lane.size), SERIAL, tuple(body), const(lane.size))]
    return body


def assigned(states: Sequence[Local], values: States, where: Sequence[tuple[Lanes, Guard]]) -> list[Node]:
    """Assigns all states simultaneously: the values read the previous states. Each state is assigned in its own lanes."""
    out: list[Node] = []
    pending = dict(zip(states, values, strict=True))
    places = dict(zip(states, where, strict=True))
    while pending:
        free = next((s for s in pending if not any(_reads(v, s) for other, v in pending.items() if other is not s)), None)
        if free is None:
            # A cycle: copy the state that the others still need.
            free = next(iter(pending))
            before = Local(f"{free.name}_before", free.dtype, free.lanes)
            out += [Declare(before, None), Assign(*places[free], before, held(free))]
            pending = {s: v if s is free else _reading(v, free, before) for s, v in pending.items()}
        value = pending.pop(free)
        if value is not held(free):
            out.append(Assign(*places[free], free, value))
    return out


def _reads(value: Value, local: Local) -> bool:
    return any(v is held(local) for v in value.walk())


def _reading(value: Value, old: Local, new: Local) -> Value:
    return rewrite(value, lambda v: held(new) if v is held(old) else None)


@dataclass(eq=False)
class _BlockEmitter:
    """Implements `Block` for a definition's `in_block`: its calls become statements."""

    kind: Reduction
    states: tuple[Local, ...]
    tile: ReductionTile
    declared: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def reduced(self, state: int, operator: str, value: Value) -> Value:
        local, tile, dtype = self._like(state), self.tile.of(self.states[state]), self.states[state].dtype
        if operator == "sum" and isinstance(value, Constant) and value.number == 1 and self._bounded():
            # Count the existing elements from the end of the guards' ranges.
            return existing(self.tile.reduced, self._own_guard(), dtype)
        if dtype == torch.float64 and carried_dtype(value.dtype) == torch.float32:
            # A block is short enough to be reduced in the dtype of its elements.
            local = replace(local, dtype=torch.float32)
        self.declared.append(Declare(local, self.kind.identity(state, local.dtype)))
        self.nodes.append(Reduce(tile.lanes, tile.guard, local, operator, value))
        return held(local) if local.dtype == dtype else call("cast", held(local), dtype=dtype)

    def once(self, state: int, value: Value) -> Value:
        local, tile = self._like(state), self.tile.of(self.states[state])
        self.declared.append(Declare(local, self.kind.identity(state, local.dtype)))
        self.nodes.append(Assign(tile.kept, tile.kept_guard, local, value))
        return held(local)

    def each(self, value: Value) -> Value:
        if not any(isinstance(v, Load) or (isinstance(v, Call) and v.function in COSTLY) for v in value.walk()):
            return value
        tile = self.tile.of(self.states[0])
        local = replace(self._like(0), dtype=value.dtype, lanes=tile.lanes)
        whole = all(bounds_a_lane(g, tile.lanes) for g in tile.guard)
        self.declared.append(Declare(local, None if whole else 0))
        self.nodes.append(Assign(tile.lanes, tile.guard, local, value))
        return held(local)

    def update(self, states: States) -> None:
        tiles = [self.tile.of(s) for s in self.states]
        self.nodes += assigned(self.states, states, [(tile.kept, tile.kept_guard) for tile in tiles])

    def into(self, state: int, operator: str, value: Value) -> None:
        local, tile = self.states[state], self.tile.of(self.states[state])
        product = as_dot(local, value, tile) if operator == "sum" else None
        self.nodes.append(product or Reduce(tile.lanes, tile.guard, local, operator, value))

    def _like(self, state: int) -> Local:
        like, names = self.states[state], {n.local.name for n in self.declared if isinstance(n, Declare)}
        name = next(n for n in (f"{like.name}_tile{k or ''}" for k in range(len(names) + 1)) if n not in names)
        return Local(name, like.dtype, like.lanes)

    def _own_guard(self) -> Guard:
        return tuple(g for g in self.tile.guard if g not in self.tile.kept_guard)

    def _bounded(self) -> bool:
        """Whether guards only bound the reduced lanes from above."""
        reduced = [lane.symbol for lane in self.tile.reduced]
        return all(end_of(g, symbol) is not None for g in self._own_guard() for symbol in reduced if symbol in g.symbols)


def as_dot(local: Local, value: Value, tile: ReductionTile) -> Dot | None:
    """A sum as a matrix product, if it is one: of products of two blocks that share exactly the reduced lane.

    A matrix product supports only guards on single lanes. Where other guards fail, an operand is 0 (`existing_only`,
    `Block.each`).
    """
    if len(tile.reduced) != 1 or len(tile.kept) != 2 or not (isinstance(value, Call) and value.function == "mul"):
        return None
    inner = tile.reduced[0]
    left, right = value.args
    for a, b in ((left, right), (right, left)):
        if lanes_of(a, tile.lanes) == {tile.kept[0], inner} and lanes_of(b, tile.lanes) == {tile.kept[1], inner}:
            lanes = (*tile.kept, inner)
            return Dot(lanes, bounding(tile.guard, lanes), local, a, b)
    return None


def lanes_of(value: Value, lanes: Lanes) -> set[object]:
    """The lanes a value varies over."""
    symbols = symbols_of(value)
    return {lane for lane in lanes if lane.symbol in symbols}


def existing_only(kind: Reduction, values: tuple[Value, ...], tile: ReductionTile) -> tuple[tuple[Value, ...], ReductionTile]:
    """Turns selects into guards: an element that is neutral unless a condition on positions holds gets that condition.

    m max= where(k <= q, x, -inf)   ->   m max= x  where k <= q
    t sum= where(k <= q, x, 0) * y  ->   the same  where k <= q
    t sum= exp_diff(where(k <= q, x, -inf), m) * y  ->   the same  where k <= q
    """
    neutral, (value, *others) = kind.neutral(values[0].dtype), values
    if neutral is None or not isinstance(value, Call):
        return values, tile
    if kind.operator == "sum" and value.function == "mul":
        return values, replace(tile, guard=_with(tile.guard, _zero_unless(value)))
    found, kept = _chosen(value, neutral)
    return (kept, *others), replace(tile, guard=_with(tile.guard, found))


def _with(guard: Guard, more: Guard) -> Guard:
    return tuple(dict.fromkeys((*guard, *(g for g in more if not g.proven))))


def _zero_unless(value: Value) -> Guard:
    """Conditions on positions outside of which a value is 0."""
    if not isinstance(value, Call):
        return ()
    first, *others = value.args
    if value.function == "mul":
        return tuple(g for side in value.args for g in _zero_unless(side))
    if value.function in ("cast", "neg"):
        return _zero_unless(first)
    if value.function in ("add", "sub"):
        return tuple(g for g in _zero_unless(first) if g in _zero_unless(others[0]))
    if value.function in ("exp", "exp_diff"):
        return _chosen(first, -math.inf)[0]
    return (*_chosen(value, 0)[0], *_zero_unless(others[0])) if value.function == "where" else ()


def _chosen(value: Value, other: float | int | bool) -> tuple[Guard, Value]:
    """The conditions on positions under which a value is not `other`, and its value under them."""
    if isinstance(value, Call) and value.function == "cast":
        return _chosen(value.args[0], other)[0], value
    if not (isinstance(value, Call) and value.function == "where"):
        return (), value
    test, there, missing = value.args
    if not isinstance(missing, Constant) or missing.number != other:
        return (), value
    found, left = conditions_of(test)
    return found, there if left is None else call("where", left, there, missing, dtype=value.dtype)
