"""Expansion of reductions into block operations: one tile of values is reduced and combined with what is carried.

In: a reduction, its states as private blocks, the tile's values and the lanes they vary over. Out: block statements. No
reduction is known here; which of these serves one follows from its definition:

    one state and an operator    Reduce, or Dot where what is summed are the products of a matrix product
    no lanes are reduced         combine, lane by lane
    in_block                     what the definition makes of a whole block
    otherwise                    Fold: combine, position after position, in order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from serrate.ir.expr import const
from serrate.ir.loops import (
    Assign,
    Declare,
    Dot,
    Fold,
    For,
    Guard,
    Held,
    Lanes,
    Load,
    Local,
    Node,
    Reduce,
    existing,
    held,
)
from serrate.ir.reductions import Reduction, States
from serrate.ir.solve import end_of
from serrate.ir.tile import SERIAL
from serrate.ir.values import Call, Constant, Value, call, carried_dtype, rewrite


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


def expand(
    kind: Reduction, states: tuple[Local, ...], values: tuple[Value, ...], tile: ReductionTile, *, merge: bool
) -> list[Node]:
    """Block statements that combine `values` (whole states where `merge`) into `states` over the lanes the states do not have."""
    new = values if merge else kind.lifted(values)
    if kind.operator is not None:
        product = as_dot(kind, states[0], new[0], tile)
        return [product or Reduce(tile.lanes, tile.guard, states[0], kind.operator, new[0])]
    carried = tuple(map(held, states))
    if not tile.reduced:
        return assigned(states, kind.combine(carried, new), tile.lanes, tile.guard)
    if kind.in_block is None:
        return [Fold(tile.lanes, tile.guard, states, kind, new)]
    block = _BlockEmitter(kind, states, tile)
    kind.in_block(block, carried, new)
    return [*block.declared, *block.nodes]


def steps(fold: Fold) -> list[Node]:
    """A fold as loops."""
    kept = fold.locals[0].lanes
    combined = fold.reduction.combine(tuple(map(held, fold.locals)), fold.values)
    body = assigned(fold.locals, combined, tuple(lane for lane in fold.lanes if lane in kept), fold.guard)
    for lane in reversed(fold.lanes):
        if lane not in kept:
            body = [For(lane.symbol, const(lane.size), SERIAL, tuple(body), const(lane.size))]
    return body


def assigned(states: Sequence[Local], values: States, lanes: Lanes, guard: Guard) -> list[Node]:
    """Statements after which all states hold these values, which read what the states held before."""
    out: list[Node] = []
    pending = dict(zip(states, values, strict=True))
    while pending:
        free = next((s for s in pending if not any(_reads(v, s) for other, v in pending.items() if other is not s)), None)
        if free is None:
            # Around in a circle: what the others need of one is kept aside.
            free = next(iter(pending))
            before = Local(f"{free.name}_before", free.dtype, free.lanes)
            out += [Declare(before, None), Assign(lanes, guard, before, held(free))]
            pending = {s: v if s is free else _reading(v, free, before) for s, v in pending.items()}
        value = pending.pop(free)
        if value is not held(free):
            out.append(Assign(lanes, guard, free, value))
    return out


def _reads(value: Value, local: Local) -> bool:
    return any(v is held(local) for v in value.walk())


def _reading(value: Value, old: Local, new: Local) -> Value:
    return rewrite(value, lambda v: held(new) if v is held(old) else None)


@dataclass(eq=False)
class _BlockEmitter:
    """The block of a tile, for a definition to take: what it asks for becomes statements."""

    kind: Reduction
    states: tuple[Local, ...]
    tile: ReductionTile
    declared: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def reduced(self, state: int, operator: str, value: Value) -> Value:
        local, dtype = self._like(state), self.states[state].dtype
        if operator == "sum" and isinstance(value, Constant) and value.number == 1 and self._bounded():
            # The elements that exist are counted by where they end.
            return existing(self.tile.reduced, self._own_guard(), dtype)
        if dtype == torch.float64 and carried_dtype(value.dtype) == torch.float32:
            # A block is short enough to be reduced in the dtype of its elements.
            local = replace(local, dtype=torch.float32)
        self.declared.append(Declare(local, self.kind.identity(state, local.dtype)))
        self.nodes.append(Reduce(self.tile.lanes, self.tile.guard, local, operator, value))
        return held(local) if local.dtype == dtype else call("cast", held(local), dtype=dtype)

    def once(self, state: int, value: Value) -> Value:
        local = self._like(state)
        self.declared.append(Declare(local, self.kind.identity(state, local.dtype)))
        self.nodes.append(Assign(self.tile.kept, self.tile.kept_guard, local, value))
        return held(local)

    def update(self, states: States) -> None:
        self.nodes += assigned(self.states, states, self.tile.kept, self.tile.kept_guard)

    def into(self, state: int, operator: str, value: Value) -> None:
        self.nodes.append(Reduce(self.tile.lanes, self.tile.guard, self.states[state], operator, value))

    def _like(self, state: int) -> Local:
        like, names = self.states[state], {n.local.name for n in self.declared if isinstance(n, Declare)}
        name = next(n for n in (f"{like.name}_tile{k or ''}" for k in range(len(names) + 1)) if n not in names)
        return Local(name, like.dtype, like.lanes)

    def _own_guard(self) -> Guard:
        return tuple(g for g in self.tile.guard if g not in self.tile.kept_guard)

    def _bounded(self) -> bool:
        """Whether guards say how far the reduced lanes go, and nothing else about them."""
        reduced = [lane.symbol for lane in self.tile.reduced]
        return all(end_of(g, symbol) is not None for g in self._own_guard() for symbol in reduced if symbol in g.symbols)


def as_dot(kind: Reduction, local: Local, value: Value, tile: ReductionTile) -> Dot | None:
    """The reduction as a matrix product, if it is one: a product of two blocks that share exactly the reduced lane."""
    if kind.operator != "sum" or len(tile.reduced) != 1 or len(tile.kept) != 2:
        return None
    if not (isinstance(value, Call) and value.function == "mul"):
        return None
    inner = tile.reduced[0]
    left, right = value.args
    for a, b in ((left, right), (right, left)):
        if lanes_of(a, tile.lanes) == {tile.kept[0], inner} and lanes_of(b, tile.lanes) == {tile.kept[1], inner}:
            return Dot((*tile.kept, inner), tile.guard, local, a, b)
    return None


def lanes_of(value: Value, lanes: Lanes) -> set[object]:
    """The lanes a value varies over."""
    found: set[object] = set()
    for node in value.walk():
        if isinstance(node, Held):
            found.update(node.local.lanes)
        elif isinstance(node, Load):
            symbols = frozenset().union(*(e.symbols for e in node.index)) if node.index else frozenset()
            found.update(lane for lane in lanes if lane.symbol in symbols)
    return found
