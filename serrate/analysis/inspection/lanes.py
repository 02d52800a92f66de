"""How many lanes of the blocks of a loop program run, and how many of them hold an element.

In: a loop program, its arrays and its numbers. Out: a `LaneCount`. The analysis evaluates loops on tensors of positions, and only
numbers computed from indices. Above a limit, positions are sampled. Conditions on other computed values count as true, and
branches on them are skipped. A count says whether it is exact.

If lanes run concurrently, all lanes of a block run, and holes are masked. If they run in order, a condition on a lane ends its
loop, so the only holes that run are those that no loop bound excludes (`codegen/cpp/text.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from serrate.ir.expr import Array, Environment, Expr, Less, Symbol
from serrate.ir.loops import (
    Bind,
    Block,
    Declare,
    For,
    Guard,
    If,
    Lanes,
    LoopProgram,
    Node,
    Number,
    Prefetch,
    Reduce,
    While,
    bodies,
    nodes,
    written_by,
)
from serrate.ir.solve import end_of, start_of

MOST_POSITIONS = 1 << 18
"""The most positions of the loops around a statement that are sampled."""
MOST_LANES = 1 << 22
"""The most lanes of one statement that are sampled."""


@dataclass(frozen=True)
class LaneCount:
    """Lanes that a program runs.

    >>> LaneCount(200, 150).waste
    0.25
    """

    visited: int
    existing: int
    """Lanes that hold an element."""
    exact: bool = True

    @property
    def waste(self) -> float:
        """The share of the lanes that are holes."""
        return 1 - self.existing / self.visited if self.visited else 0.0


def count_lanes(
    program: LoopProgram, arrays: Mapping[Array, torch.Tensor], symbols: Mapping[Symbol, int], *, in_order: bool
) -> LaneCount:
    """The lanes that a program runs for these arrays and numbers; `in_order` if a target runs them one after another."""
    counter = _Counter({array: data.cpu().long() for array, data in arrays.items()}, in_order)
    for kernel in program.kernels:
        counter.body(kernel.body, _PositionScope(dict(symbols), {}, {}, 1, 1.0))
    return LaneCount(round(counter.visited), round(counter.existing), counter.exact)


class _ComputedValue(Exception):
    """An expression depends on something that the program computes."""


@dataclass(frozen=True)
class _PositionScope:
    """Positions of the loops around a statement."""

    symbols: dict[Symbol, Any]
    """Numbers, and tensors with one element for each position or for all of them."""
    laned: dict[Symbol, Bind]
    numbers: dict[str, Any]
    """Numbers that the program computes from indices, by name; for example, the longest of several rows."""
    count: int
    scale: float
    """How many positions each one stands for."""

    def taken(self, places: torch.Tensor, scale: float = 1.0) -> _PositionScope:
        """Some of the positions."""
        symbols = {s: _at(v, places) for s, v in self.symbols.items()}
        numbers = {name: _at(v, places) for name, v in self.numbers.items()}
        return _PositionScope(symbols, self.laned, numbers, len(places), self.scale * scale)


def _at(value: Any, places: torch.Tensor) -> Any:
    return value[places] if isinstance(value, torch.Tensor) and value.dim() else value


class _Counter:
    def __init__(self, arrays: Mapping[Array, torch.Tensor], in_order: bool) -> None:
        self.arrays, self.in_order = arrays, in_order
        self.visited, self.existing, self.exact = 0.0, 0.0, True
        self.random = torch.Generator().manual_seed(0)

    def body(self, body: tuple[Node, ...], scope: _PositionScope) -> None:
        """Counts the lanes of statements, which may bind names for those after them."""
        symbols, laned, numbers = dict(scope.symbols), dict(scope.laned), dict(scope.numbers)
        scope = replace(scope, symbols=symbols, laned=laned, numbers=numbers)
        for node in body:
            for part in bodies(node):
                # What it holds differs from one iteration or branch to the next.
                for local in (local for inner in nodes(part) for local in written_by(inner)):
                    numbers.pop(local.name, None)
            if isinstance(node, Declare) and not node.local.lanes and not node.local.dtype.is_floating_point:
                numbers[node.local.name] = 0 if node.number is None else int(node.number)
            elif isinstance(node, Bind) and node.lanes:
                laned[node.symbol] = node
            elif isinstance(node, Bind):
                try:
                    symbols[node.symbol] = self._evaluate(node.expr, scope, ())
                except _ComputedValue:
                    self.exact = False
            elif isinstance(node, For):
                self._loop(node, scope)
            elif isinstance(node, If):
                known = self._known(node.guard, scope)
                self.exact &= known
                if not known:
                    continue
                holds = self._holds(node.guard, scope, ()).expand(scope.count)
                self.body(node.then, scope.taken(holds.nonzero().flatten()))
                self.body(node.other, scope.taken((~holds).nonzero().flatten()))
            elif isinstance(node, While):
                self.exact = False
                self.body((*node.test, *node.body), scope)
            elif isinstance(node, Block) and not isinstance(node, Prefetch):
                self._block(node, scope)
                for local in written_by(node):
                    if local.name in numbers:
                        self._update(node, local.name, scope)

    def _update(self, node: Block, name: str, scope: _PositionScope) -> None:
        """Notes what a statement makes of a number, or that it is not known any more."""
        before = scope.numbers.pop(name)
        if not isinstance(node, Reduce) or node.operator != "max" or not isinstance(node.value, Number):
            return
        try:
            value = torch.as_tensor(self._evaluate(node.value.expr, scope, node.lanes), device="cpu")
        except _ComputedValue:
            return
        shape = [scope.count, *(lane.size for lane in node.lanes)]
        least = torch.iinfo(torch.int64).min
        found = torch.where(self._holds(node.guard, scope, node.lanes), value, least).expand(shape).reshape(scope.count, -1)
        scope.numbers[name] = torch.maximum(found.amax(1), torch.as_tensor(before, device="cpu"))

    def _loop(self, node: For, scope: _PositionScope) -> None:
        try:
            extent = torch.as_tensor(self._evaluate(node.extent, scope, ()), device="cpu").expand(scope.count).clamp(min=0)
        except _ComputedValue:
            self.exact = False
            extent = torch.ones(scope.count, dtype=torch.int64, device="cpu")
        ends = extent.cumsum(0)
        total = int(ends[-1]) if scope.count else 0
        if not total:
            return
        at = self._sampled(total, MOST_POSITIONS)
        owners = torch.searchsorted(ends, at, right=True)
        inside = scope.taken(owners, total / len(at))
        inside.symbols[node.symbol] = at - (ends - extent)[owners]
        self.body(node.body, inside)

    def _block(self, node: Block, scope: _PositionScope) -> None:
        each = math.prod(lane.size for lane in node.lanes)
        # Only the lanes that the conditions mention differ.
        used = self._mentioned(node.guard, scope)
        lanes = tuple(lane for lane in node.lanes if lane.symbol in used)
        size = math.prod(lane.size for lane in lanes)
        at = self._sampled(scope.count, max(MOST_LANES // max(size, 1), 1))
        if not len(at):
            return
        some = scope.taken(at, scope.count / len(at))
        shape, weight = [some.count, *(lane.size for lane in lanes)], some.scale * (each // size)
        ending = tuple(g for g in node.guard if self.in_order and self._ends_a_loop(g, node.lanes, scope))
        run = self._holds(ending, some, lanes).expand(shape)
        self.visited += int(run.sum()) * weight
        self.existing += int((run & self._holds(node.guard, some, lanes)).sum()) * weight

    def _ends_a_loop(self, condition: Less, lanes: Lanes, scope: _PositionScope) -> bool:
        """Whether a condition depends on no lane, or bounds the innermost one that it depends on."""
        swap: dict[Expr, Expr] = {symbol: bind.expr for symbol, bind in scope.laned.items()}
        spelled = Less(condition.left.substitute(swap), condition.right.substitute(swap))
        on = [lane for lane in lanes if lane.symbol in spelled.symbols]
        return not on or (end_of(spelled, on[-1].symbol) or start_of(spelled, on[-1].symbol)) is not None

    def _sampled(self, count: int, most: int) -> torch.Tensor:
        """All places below a count, or as many as there may be."""
        if count <= most:
            return torch.arange(count, device="cpu")
        self.exact = False
        return torch.randint(count, (most,), generator=self.random, device="cpu").sort().values

    def _mentioned(self, guard: Guard, scope: _PositionScope) -> set[Symbol]:
        found: set[Symbol] = set()
        pending = [s for condition in guard for s in condition.symbols]
        while pending:
            each = pending.pop()
            if each not in found:
                found.add(each)
                bind = scope.laned.get(each)
                pending += () if bind is None else bind.expr.symbols
        return found

    def _known(self, guard: Guard, scope: _PositionScope) -> bool:
        """Whether conditions depend on nothing that the program computes."""
        try:
            for condition in guard:
                self._evaluate(condition.left, scope, ())
                self._evaluate(condition.right, scope, ())
        except _ComputedValue:
            return False
        return True

    def _holds(self, guard: Guard, scope: _PositionScope, lanes: Lanes) -> torch.Tensor:
        """Where conditions hold: positions, then lanes."""
        holds = torch.ones([1] * (1 + len(lanes)), dtype=torch.bool, device="cpu")
        for condition in guard:
            try:
                left, right = (self._evaluate(e, scope, lanes) for e in (condition.left, condition.right))
            except _ComputedValue:
                self.exact = False
                continue
            holds = holds & torch.as_tensor(left < right, device="cpu")
        return holds

    def _evaluate(self, expr: Expr, scope: _PositionScope, lanes: Lanes) -> Any:
        def element(array: Array, index: Any) -> Any:
            data = self.arrays.get(array)
            if data is None:
                raise _ComputedValue(array.name)
            place = torch.as_tensor(index, device="cpu")
            return data[place.clamp(0, len(data) - 1)] if len(data) else torch.zeros_like(place)

        def search(array: Array, count: Any, position: Any, first: Any) -> Any:
            data = self.arrays.get(array)
            if data is None or isinstance(first, torch.Tensor) or isinstance(count, torch.Tensor):
                raise _ComputedValue(array.name)
            rows = data[first + 1 : first + count + 1].contiguous()
            found = torch.searchsorted(rows, torch.as_tensor(position, device="cpu").contiguous(), right=True)
            return found.clamp(max=max(count - 1, 0))

        return expr.evaluate(Environment(_PositionSymbols(self, scope, lanes), element, search))


class _PositionSymbols(dict[Symbol, Any]):
    """Symbols as a block sees them: positions are the first axis, lanes the others."""

    def __init__(self, counter: _Counter, scope: _PositionScope, lanes: Lanes) -> None:
        super().__init__()
        self.counter, self.scope, self.lanes = counter, scope, lanes

    def __missing__(self, symbol: Symbol) -> Any:
        rank = len(self.lanes)
        at = next((k for k, lane in enumerate(self.lanes) if lane.symbol is symbol), None)
        if at is not None:
            found: Any = torch.arange(self.lanes[at].size, device="cpu").reshape(
                [1, *(-1 if k == at else 1 for k in range(rank))]
            )
        elif symbol in self.scope.laned:
            found = self.counter._evaluate(self.scope.laned[symbol].expr, self.scope, self.lanes)
        elif symbol in self.scope.symbols or symbol.name in self.scope.numbers:
            found = self.scope.symbols[symbol] if symbol in self.scope.symbols else self.scope.numbers[symbol.name]
            found = found.reshape([-1, *[1] * rank]) if isinstance(found, torch.Tensor) and found.dim() else found
        else:
            raise _ComputedValue(symbol.name)
        self[symbol] = found
        return found
