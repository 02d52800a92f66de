"""A kernel program with tiles of known sizes as a loop program.

In: a `KernelProgram`, a number of lanes for every axis, and how rows become loops. Out: a `LoopProgram`, which every backend
prints. Passes, in order:

    sized      axes of one lane are loop indices, others lanes; positions become index expressions, guards that hold are dropped
    narrowed   lanes of private blocks that nobody reads are not worked out
    ended      a loop over tiles ends where nothing in it exists any more; programs without work end at once
    ahead      the next row is fetched while one is worked on
    inside     numbers that callers could still change are clamped, so that no access leaves its tensor
    stepped    a reduction over several lanes keeps one result for each of the innermost until a block is done
    named      boundaries of rows that are read several times get a name, where it is known that there is such a row
    collect    which arrays and extents the program needs from its caller

All but the first and the last are in `tile_passes.py`, and `inside` is that of fusions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serrate.ir.expr import Element, Expr, Less, Sum, Symbol, ceildiv, const, minimum, symbol
from serrate.ir.kernel import Along, Axis, KernelProgram, Statement, Tiles
from serrate.ir.kernel import inner as held_by
from serrate.ir.loops import (
    Assign,
    Bind,
    Declare,
    Dot,
    Existing,
    For,
    Guard,
    Held,
    If,
    Kernel,
    Lane,
    Lanes,
    Load,
    Local,
    LoopProgram,
    Node,
    Number,
    Reduce,
    Running,
    While,
    Write,
    existing,
    flat_index,
    held,
    load,
    nodes,
    number,
    with_bodies,
)
from serrate.ir.tile import GRID, SERIAL
from serrate.ir.values import Tensor, Value, call, rewrite
from serrate.lower.inside import kept_inside
from serrate.lower.pipeline import check, collect
from serrate.lower.tile_passes import Names, ahead, bounds_a_lane, ended, named, narrowed, stepped, without


def lower_kernel(phases: Sequence[KernelProgram], lanes: Mapping[str, int], header: tuple[str, ...] = ()) -> LoopProgram:
    """The loop program of a kernel, phase after phase; its axes, by name, have these numbers of lanes."""
    kernels: list[Kernel] = []
    for program in phases:
        body = _Sized(program, lanes).body(program.body)
        if any(isinstance(n, Write) for n in nodes(body)):
            body = kept_inside(ahead(ended(narrowed(body))), dict(program.limits))
            names = Names(program, body)
            body = named(stepped(body, names), {a: e for a, e in program.arrays if e is not None}, names)
            kernels.append(Kernel(program.name if not kernels else f"{program.name}_{len(kernels)}", body))
    first = phases[0]
    loops = LoopProgram(first.name, tuple(kernels), first.inputs, first.outputs, first.scratch, (), (), header)
    loops = collect(loops)
    check(loops, complete=True)
    return loops


@dataclass(frozen=True)
class _Size:
    """What an axis is in the loop program."""

    axis: Axis
    block: int
    count: Expr
    """How many tiles it has."""
    outer: Symbol | None
    """Which tile; None where there is only one."""
    lane: Lane | None


class _Sized:
    """Replaces axes by loop indices and lanes."""

    def __init__(self, program: KernelProgram, lanes: Mapping[str, int]) -> None:
        self.axes = {a.position: a for a in program.axes}
        self.swap: dict[Expr, Expr] = {}
        self.sizes: dict[Symbol, _Size] = {}
        self.binds: list[Bind] = []
        """Which tiles are meant, of axes that no loop runs over."""
        self.known: set[Less] = set()
        """Conditions that loops see to."""
        for axis in program.axes:
            self._size(axis, lanes[axis.name])

    def _size(self, axis: Axis, block: int) -> None:
        begin, end = (self._expr(e) for e in (axis.begin, axis.end))
        extent = end - begin
        count = ceildiv(extent, block)
        if not axis.looped:
            block, count = axis.size or 1, const(1)
        high = count.bounds[1]
        single = count.value == 1
        outer = None if single else symbol(axis.name if block == 1 else f"{axis.name}o", 0, None if high is None else high - 1)
        lane = Lane(symbol(f"{axis.name}i" if axis.looped else axis.name, 0, block - 1), block) if block > 1 else None
        if axis.alias_of is not None:
            # Another lane of the tile that the axis itself is in.
            outer = self.sizes[axis.alias_of.position].outer
        elif axis.at is not None:
            outer = symbol(axis.name if block == 1 else f"{axis.name}o", 0)
            self.binds.append(Bind(outer, self._expr(axis.at), (), ()))
        o: Expr = const(0) if outer is None else outer
        i: Expr = const(0) if lane is None else lane.symbol
        first = begin + o * block
        self.swap |= {
            axis.position: first + i,
            axis.lane: i,
            axis.lanes: const(block),
            axis.number: o,
            axis.first: first,
            axis.last: minimum(first + block, end) if block > 1 else first + 1,
        }
        if lane is None and outer is not None:
            self.known.add(Less(first, end))
        self.sizes[axis.position] = _Size(axis, block, count, outer, lane)

    # --- statements ---

    def body(self, body: Sequence[Statement]) -> tuple[Node, ...]:
        return tuple(made for node in body for made in self._node(node))

    def _node(self, node: Statement) -> tuple[Node, ...]:
        if isinstance(node, Tiles):
            return self._loops(node)
        if isinstance(node, Along):
            return self._along(node)
        if isinstance(node, If | While):
            guard = self._guard(node.guard)
            parts = tuple(self.body(part) for part in held_by(node))
            return (with_bodies(replace(node, guard=guard), parts),)
        if isinstance(node, Declare):
            return (Declare(self._local(node.local), node.number),)
        if isinstance(node, Bind):
            return (replace(node, expr=self._expr(node.expr)),)
        return (self._block(node),)

    def _loops(self, node: Tiles) -> tuple[Node, ...]:
        inner = self.body(node.body)
        if node.parallel:
            inner = (*self.binds, *inner)
        for axis in reversed(node.axes):
            size = self.sizes[axis.position]
            if size.outer is None:
                # One tile: there is none where the range is empty.
                if size.block > 1 and not Less(const(0), size.count).proven:
                    inner = (If((Less(const(0), size.count),), inner, ()),)
                continue
            kind = GRID if node.parallel else SERIAL
            inner = (For(size.outer, size.count, kind, inner, size.count),)
        return inner

    def _along(self, node: Along) -> tuple[Node, ...]:
        lane = self.sizes[node.axis.position].lane
        body = self.body(node.body)
        if lane is None:
            return body
        extent = const(lane.size)
        if not node.reverse:
            return (For(lane.symbol, extent, SERIAL, body, extent),)
        back = symbol(f"{lane.symbol.name}_back", 0, lane.size - 1)
        return (For(back, extent, SERIAL, (Bind(lane.symbol, const(lane.size - 1) - back, (), ()), *body), extent),)

    def _block(self, node: Any) -> Node:
        guard = self._guard(node.guard)
        lanes = self._lanes(node.lanes)
        if isinstance(node, Dot):
            return self._dot(node, lanes, guard)
        value = self._value(node.value, guard)
        if isinstance(node, Write):
            index = tuple(map(self._expr, node.index))
            return Write(_inward(lanes, value, (node.tensor, index)), guard, node.tensor, index, value, node.add)
        local = self._local(node.local)
        if isinstance(node, Running):
            axis = self.sizes[node.axis.symbol].lane if node.axis is not None else None
            return Running(lanes, guard, local, self._local(node.carry), axis, node.operator, value)
        if isinstance(node, Reduce):
            if node.operator == "sum" and isinstance(value, Load):
                # What is not there is 0, and adds nothing.
                guard = (*guard, *value.guard)
                value = without(value, guard)
            return Reduce(_inward(lanes, value), guard, local, node.operator, value)
        assert isinstance(node, Assign)
        return Assign(lanes, guard, local, value, tuple(map(self._guard, node.rests)))

    def _dot(self, node: Dot, lanes: Lanes, guard: Guard) -> Node:
        local = self._local(node.local)
        left, right = (self._value(v, guard) for v in (node.left, node.right))
        block = len(lanes) == 3 and local.lanes == lanes[:2] and lanes[2] not in local.lanes and _spans(left, right, lanes)
        if block and all(bounds_a_lane(g, lanes) for g in guard):
            # What is not there is 0, and adds nothing.
            more = [g for v in (left, right) if isinstance(v, Load) for g in v.guard if bounds_a_lane(g, lanes)]
            guard = tuple(dict.fromkeys((*guard, *more)))
            left, right = (without(v, guard) for v in (left, right))
            return Dot(lanes, guard, local, left, right)
        wide = [v if v.dtype == local.dtype else call("cast", v, dtype=local.dtype) for v in (left, right)]
        value = call("mul", *wide, dtype=local.dtype)
        return Reduce(_inward(lanes, value), guard, local, "sum", value)

    # --- parts ---

    def _lanes(self, lanes: Lanes) -> Lanes:
        found = (self.sizes[lane.symbol].lane for lane in lanes)
        return tuple(lane for lane in found if lane is not None)

    def _local(self, local: Local) -> Local:
        return Local(local.name, local.dtype, self._lanes(local.lanes))

    def _expr(self, expr: Expr) -> Expr:
        expr = expr.substitute(self.swap)
        # A private block of one index is a number of that name.
        single = {e: symbol(e.array.name, None, None) for e in expr.walk() if isinstance(e, Element) and _is_number(e)}
        return expr.substitute(single) if single else expr  # type: ignore[arg-type]

    def _guard(self, guard: Guard) -> Guard:
        found = (Less(self._expr(g.left), self._expr(g.right)) for g in guard)
        return tuple(dict.fromkeys(g for g in found if not g.proven and g not in self.known))

    def _value(self, value: Value, known: Guard) -> Value:
        """A value in lanes; reads do not ask what the statement asks already."""

        def change(v: Value) -> Value | None:
            if isinstance(v, Load):
                guard = tuple(g for g in self._guard(v.guard) if g not in known)
                return load(v.tensor, tuple(map(self._expr, v.index)), guard, v.other)
            if isinstance(v, Number):
                return number(self._expr(v.expr), v.dtype)
            if isinstance(v, Existing):
                return existing(self._lanes(v.lanes), self._guard(v.guard), v.dtype)
            if isinstance(v, Held):
                return held(self._local(v.local))
            return None

        return rewrite(value, change)


def _is_number(e: Element) -> bool:
    return e.array.local and e.index.value == 0


def _spans(left: Value, right: Value, lanes: Lanes) -> bool:
    """Whether the operands are blocks of rows by depth and of depth by columns."""
    rows, columns, depth = (lane.symbol for lane in lanes)
    mine, theirs = _symbols(left), _symbols(right)
    return {rows, depth} <= mine and columns not in mine and {columns, depth} <= theirs and rows not in theirs


def _symbols(value: Value) -> set[Symbol]:
    found: set[Symbol] = set()
    for v in value.walk():
        if isinstance(v, Load):
            found |= {s for e in v.index for s in e.symbols}
        elif isinstance(v, Number):
            found |= v.expr.symbols
        elif isinstance(v, Held):
            found |= {lane.symbol for lane in v.local.lanes}
    return found


def _inward(lanes: Lanes, value: Value, target: tuple[Tensor, tuple[Expr, ...]] | None = None) -> Lanes:
    """The lanes with the one along which memory runs innermost."""
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
