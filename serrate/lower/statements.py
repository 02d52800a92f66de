"""From scheduled phases of block statements to loops: axes become loop indices and lanes.

In: a phase whose loops a schedule has split. Out: statements of a loop program. The loops around a statement and its lanes
determine the position along every axis, and index expressions are rewritten in terms of them. Conditions that always hold, or
that loop bounds enforce, are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from serrate.analysis.indices import Indices
from serrate.ir.conditions import bounds_a_lane
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Element, Expr, Less, Sum, Symbol, const, minimum, symbol
from serrate.ir.loops import (
    Bind,
    Block,
    Declare,
    Dot,
    For,
    Guard,
    If,
    Lane,
    Lanes,
    Load,
    LoopKernel,
    LoopProgram,
    Node,
    Reduce,
    While,
    Write,
    flat_index,
    map_values,
    multiplies_matrices,
    nodes,
    with_bodies,
)
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine
from serrate.ir.recipes import RunningSum
from serrate.ir.renaming import Renaming
from serrate.ir.tile import GRID, SERIAL, Along, At, Axis, ByLength, Leaf, Loop, Phase, Statement, TileProgram, inner
from serrate.ir.values import Role, Tensor, Value, call, rewrite
from serrate.lower.passes.common import found_in, without


@dataclass(frozen=True)
class _Scope(Renaming):
    """The context of a statement: loop indices, axes in terms of them, and conditions that are known to hold."""

    lane_of: Mapping[Symbol, Lane | None]
    """The lane of each axis, by its position; None if it has a single lane."""
    indices: tuple[tuple[IterDomain, Expr], ...] = ()
    swap: Mapping[Expr, Expr] = field(default_factory=dict)
    known: frozenset[Less] = frozenset()
    entered: frozenset[Axis] = frozenset()
    dropped: dict[Less, str] = field(default_factory=dict)
    """Conditions that need no check, with reasons, for reports."""

    def expr(self, expr: Expr) -> Expr:
        return _numbers(expr.substitute(self.swap))

    def lane(self, lane: Lane) -> Lane | None:
        return self.lane_of[lane.symbol]

    def guard(self, guard: Guard) -> Guard:
        found = super().guard(guard)
        for g in found:
            if g.proven or g in self.known:
                self.dropped[g] = "follows from the bounds of its parts" if g.proven else "its loop ends there"
        return tuple(dict.fromkeys(g for g in found if not g.proven and g not in self.known))


def block_statements(program: TileProgram, name: str, header: tuple[str, ...]) -> LoopProgram:
    """The loop program of a scheduled tile program of block statements, without phases that store nothing."""
    kernels: list[LoopKernel] = []
    for phase in program.phases:
        body = BlockStatements(program, phase).run()
        if any(isinstance(n, Write) for n in nodes(body)):
            kernels.append(LoopKernel(name if not kernels else f"{name}_{len(kernels)}", body))
    private = sorted({t for p in program.phases for t in p.writes if t.role is Role.PRIVATE}, key=lambda t: t.name)
    # A statement may ask for a row that does not exist. If the number of rows is unknown, its boundaries are read in place.
    read = (e.array for k in kernels for e in found_in(k.body) if isinstance(e, Element) and not e.array.local)
    counts = {a: a.recipe.count if isinstance(a.recipe, RunningSum) else None for a in read} | dict(program.counts)
    loops = LoopProgram(name, tuple(kernels), program.inputs, program.outputs, (*program.scratch, *private), (), (), header)
    return replace(loops, limits=program.limits, counts=tuple(counts.items()), longest=program.longest)


class BlockStatements:
    """The statements of one phase, with axes replaced by loop indices and lanes."""

    def __init__(self, program: TileProgram, phase: Phase) -> None:
        self.program, self.phase = program, phase
        self.lane: dict[Axis, Lane | None] = {}
        self.lane_domains: list[tuple[IterDomain, Expr]] = []
        self.dropped: dict[Less, str] = {}
        """Conditions that need no check, with reasons."""
        parts = {axis: d for d in phase.lanes if (axis := program.axis_of(d)) is not None}
        for axis in program.axes:
            part = parts.get(axis.original) if axis.looped else axis.domain
            size = 1 if part is None else part.extent_expr.value
            assert size is not None, axis
            name = axis.name if not axis.looped else f"{axis.name}i"
            self.lane[axis] = Lane(symbol(name, 0, size - 1), size) if size > 1 else None
            if axis.alias_of is None and part is not None:
                lane = self.lane[axis]
                self.lane_domains.append((part, const(0) if lane is None else lane.symbol))

    def run(self) -> tuple[Node, ...]:
        """The statements of a loop program."""
        lanes = {axis.position: lane for axis, lane in self.lane.items()}
        return self._body(self.phase.body, self._entered(_Scope(lanes, dropped=self.dropped)))

    def _body(self, body: Sequence[Statement], scope: _Scope) -> tuple[Node, ...]:
        return tuple(made for node in body for made in self._node(node, scope))

    # --- loops ---

    def _entered(self, scope: _Scope, *more: tuple[IterDomain, Expr]) -> _Scope:
        """The scope inside a loop, or with the indices of several domains known."""
        indices = (*scope.indices, *more)
        known = Indices((*indices, *self.lane_domains))
        swap, held_, entered = dict(scope.swap), set(scope.known), set(scope.entered)
        looped = {domain.uid for domain, _ in indices}
        for axis in self.program.axes:
            if axis not in entered and known.knows(axis.original.domain):
                entered.add(axis)
                inside = self._enter(axis, known.of(axis.original.domain), swap)
                if self.lane[axis] is None and axis.domain.uid in looped:
                    # A loop over the axis itself stays inside it.
                    held_.add(inside)
        return replace(scope, indices=indices, swap=swap, known=frozenset(held_), entered=frozenset(entered))

    def _enter(self, axis: Axis, index: Expr, swap: dict[Expr, Expr]) -> Less:
        """Adds to `swap` what an axis is at a known index; returns the condition that its tile begins inside the axis."""
        lane, own = self.lane[axis], self.lane[axis.original]
        i: Expr = const(0) if lane is None else lane.symbol
        before = index if own is None else index.substitute({own.symbol: const(0)})
        begin, end = (_numbers(e.substitute(swap)) for e in (axis.begin, axis.end))
        size = 1 if lane is None else lane.size
        first = begin + (before if axis.looped else const(0))
        swap |= {
            axis.position: first + i,
            axis.lane: i,
            axis.lanes: const(size),
            axis.number: before // size if axis.looped else const(0),
            axis.first: first,
            axis.last: minimum(first + size, end) if size > 1 else first + 1,
        }
        return Less(first, end)

    def _loop(self, loop: Loop, scope: _Scope) -> tuple[Node, ...]:
        domain = loop.domain
        made, extent, bound = domain.definition, domain.extent_expr, domain.host_bound
        if isinstance(domain, RaggedIterDomain):
            extent = bound = self._length(domain, scope)
        extent, bound = map(scope.expr, (extent, bound))
        if extent.value == 1:
            return self._body(loop.body, self._entered(scope, (domain, const(0))))
        high = extent.bounds[1]
        index = symbol(domain.name, 0, None if high is None else max(high - 1, 0))
        binds: list[Node] = []
        more: list[tuple[IterDomain, Expr]] = [(domain, index)]
        if isinstance(made, Combine):
            # The row that owns a piece, and the number of the piece in its row, get names.
            for source, e in zip(made.inputs, made.to_inputs({domain.uid: index}), strict=True):
                name = symbol(source.name, 0)
                e = e.substitute({binds[0].expr: binds[0].symbol}) if binds and isinstance(binds[0], Bind) else e
                binds.append(Bind(name, e, (), ()))
                more.append((source, name))
        body = (*binds, *self._body(loop.body, self._entered(scope, *more)))
        return (For(index, extent, loop.kind, body, bound if loop.kind is GRID else extent),)

    def _length(self, row: RaggedIterDomain, scope: _Scope) -> Expr:
        """The length of the current row of the enclosing loops."""
        return row.length_of(Indices(scope.indices).of(row.component))

    def _along(self, node: Along, scope: _Scope) -> tuple[Node, ...]:
        lane = self.lane[node.axis]
        body = self._body(node.body, scope)
        if lane is None:
            return body
        extent = const(lane.size)
        if not node.reverse:
            return (For(lane.symbol, extent, SERIAL, body, extent),)
        back = symbol(f"{lane.symbol.name}_back", 0, lane.size - 1)
        return (For(back, extent, SERIAL, (Bind(lane.symbol, const(lane.size - 1) - back, (), ()), *body), extent),)

    # --- statements ---

    def _node(self, node: Statement, scope: _Scope) -> tuple[Node, ...]:
        assert not isinstance(node, Leaf | At)
        if isinstance(node, Loop):
            return self._loop(node, scope)
        if isinstance(node, Along):
            return self._along(node, scope)
        if isinstance(node, ByLength):
            guard = scope.guard(node.guard(self._length(node.row, scope)))
            return (If(guard, self._body(node.short, scope), self._body(node.other, scope)),)
        if isinstance(node, If | While):
            guard = scope.guard(node.guard)
            parts = tuple(self._body(part, scope) for part in inner(node))
            return (with_bodies(replace(node, guard=guard), parts),)
        if isinstance(node, Declare | Bind):
            return (scope.node(node),)
        return (self._block(node, scope),)

    def _block(self, node: Block, scope: _Scope) -> Node:
        guard = scope.guard(node.guard)
        made = map_values(scope.node(node), lambda v: _asking(v, guard))
        if isinstance(made, Dot):
            return self._dot(made)
        if isinstance(made, Write):
            return replace(made, lanes=_inward(made.lanes, made.value, (made.tensor, made.index)))
        if not isinstance(made, Reduce):
            return made
        if made.operator == "sum" and isinstance(made.value, Load):
            # What is not there is 0, and adds nothing.
            guard = (*guard, *made.value.guard)
            made = replace(made, guard=guard, value=without(made.value, guard))
        return replace(made, lanes=_inward(made.lanes, made.value))

    def _dot(self, node: Dot) -> Node:
        lanes, guard, local, left, right = node.lanes, node.guard, node.local, node.left, node.right
        block = len(lanes) == 3 and local.lanes == lanes[:2] and lanes[2] not in local.lanes and multiplies_matrices(node)
        if block and all(bounds_a_lane(g, lanes) for g in guard):
            # What is not there is 0, and adds nothing.
            more = [g for v in (left, right) if isinstance(v, Load) for g in v.guard if bounds_a_lane(g, lanes)]
            guard = tuple(dict.fromkeys((*guard, *more)))
            left, right = (without(v, guard) if isinstance(v, Load) else v for v in (left, right))
            return Dot(lanes, guard, local, left, right)
        wide = [v if v.dtype == local.dtype else call("cast", v, dtype=local.dtype) for v in (left, right)]
        value = call("mul", *wide, dtype=local.dtype)
        return Reduce(_inward(lanes, value), guard, local, "sum", value)


def _asking(value: Value, guard: Guard) -> Value:
    """A value without the read conditions that its statement already has."""
    return rewrite(value, lambda v: without(v, guard) if isinstance(v, Load) and v.guard else None)


def _numbers(expr: Expr) -> Expr:
    """An expression with single-element private blocks replaced by symbols of the same name."""
    single: dict[Expr, Expr] = {e: symbol(e.array.name, None, None) for e in expr.walk() if _is_number(e)}
    return expr.substitute(single) if single else expr


def _is_number(e: Expr) -> TypeGuard[Element]:
    return isinstance(e, Element) and e.array.local and e.index.value == 0


def _inward(lanes: Lanes, value: Value, target: tuple[Tensor, tuple[Expr, ...]] | None = None) -> Lanes:
    """The lanes, with the one that is contiguous in memory innermost."""
    if len(lanes) < 2:
        return lanes
    accesses = [(v.tensor, v.index) for v in value.walk() if isinstance(v, Load)]
    accesses += [target] if target is not None else []
    score = dict.fromkeys(lanes, 0)
    for tensor, index in accesses:
        flat = flat_index(index, [d.extent_expr for d in tensor.storage])
        terms = dict(flat.terms) if isinstance(flat, Sum) else {flat: 1}
        for lane in lanes:
            score[lane] += terms.get(lane.symbol) == 1
    last = max(lanes, key=lambda lane: (score[lane], lanes.index(lane)))
    return (*(lane for lane in lanes if lane != last), last)
