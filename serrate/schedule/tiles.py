"""Tiles of a kernel: how many lanes every axis gets, by strategy.

In: a `KernelProgram`, a strategy, a target. Out: a `TilePlan`, printable and replayable: lanes for every axis.

    maskless             one component at a time: its rows are exactly as long as they are
    masked               several components side by side, as long as the longest of them
    persistent_dynamic   one component at a time, and programs in one list of the tiles that there are

An axis whose tile the user fixed keeps it. The choice never changes what a kernel means (rule 6): where that is not shown, a
schedule is refused, with the carried value to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serrate.ir.expr import Element, Expr, Sum, Symbol
from serrate.ir.kernel import Along, Axis, KernelProgram, Statement, Tiles, statements
from serrate.ir.loops import Dot, Load, Reduce, Write, expressions_of, flat_index, values_of
from serrate.ir.values import Role
from serrate.schedule.target import Target

LONG = 4096
"""Lanes of an axis that costs nothing but time: a tile of it is never kept."""


@dataclass(frozen=True)
class TilePlan:
    """Lanes of every axis, in the order of the program's axes."""

    strategy: str
    lanes: tuple[int, ...]
    names: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    chunk: int = 0
    """Positions of a row that are one piece of work, where rows are cut."""

    def because(self, reason: str) -> TilePlan:
        """The plan with a line that says why."""
        return replace(self, reasons=(*self.reasons, reason))

    @property
    def by_name(self) -> dict[str, int]:
        """The lanes of axes by their names."""
        return dict(zip(self.names, self.lanes, strict=True))

    def __str__(self) -> str:
        tiles = [f"  tile {name} {lanes}" for name, lanes in zip(self.names, self.lanes, strict=True)]
        cut = [f"  cut rows {self.chunk}"] if self.chunk else []
        return "\n".join([self.strategy, *tiles, *cut, *(f"  # {r}" for r in self.reasons)])


class Facts:
    """What a program does with its axes."""

    def __init__(self, program: KernelProgram) -> None:
        self.components: set[Symbol] = set()
        self.along: set[Symbol] = set()
        self.rows: set[Symbol] = set()
        self.columns: set[Symbol] = set()
        self.depths: set[Symbol] = set()
        self.computed: set[Symbol] = set()
        """Axes that have an index of their own in every lane."""
        owners = {a.lane: a.position for a in program.axes}
        for node in statements(program.body):
            if isinstance(node, Tiles):
                exprs: list[Expr] = [e for a in node.axes for e in (a.begin, a.end)]
            elif isinstance(node, Along):
                exprs = []
            else:
                exprs = list(expressions_of(node))
            for expr in exprs:
                for e in expr.walk():
                    if isinstance(e, Element) and not e.array.local:
                        self.components |= e.index.symbols
                    elif isinstance(e, Element):
                        self.computed |= {owners.get(s, s) for s in e.index.symbols}
            self._memory(node)
            if isinstance(node, Dot) and len(node.lanes) >= 3:
                *_, rows, columns, depth = (lane.symbol for lane in node.lanes)
                self.rows.add(rows)
                self.columns.add(columns)
                self.depths.add(depth)
        # Rows that are found by offsets of the user's own: the lanes of a product may be gathered side by side, others not.
        self.components |= self.computed - self.rows - self.columns - self.depths

    def _memory(self, node: Statement) -> None:
        """Along which axes memory runs."""
        if isinstance(node, Tiles | Along):
            return
        accesses = [(v.tensor, v.index) for value in values_of(node) for v in value.walk() if isinstance(v, Load)]
        accesses += [(node.tensor, node.index)] if isinstance(node, Write) else []
        for tensor, index in accesses:
            flat = flat_index(index, [d.extent_expr for d in tensor.storage])
            terms = dict(flat.terms) if isinstance(flat, Sum) else {flat: 1}
            self.along |= {term for term, factor in terms.items() if factor == 1 and isinstance(term, Symbol)}


def plan(program: KernelProgram, strategy: str, target: Target) -> TilePlan:
    """Lanes for every axis under a strategy."""
    facts = Facts(program)
    chosen: dict[Axis, int] = {}
    for axis in program.axes:
        chosen[axis] = _fixed(axis) or 0
    for axis in program.axes:
        if not chosen[axis] and axis.position in facts.components:
            chosen[axis] = target.rows_together if strategy == "masked" else 1
    _products(program.axes, chosen, facts, target)
    _vectors(program, chosen, facts, target)
    _rest(program, chosen, target)
    lanes = tuple(max(chosen[a], a.least) for a in program.axes)
    return TilePlan(strategy, lanes, tuple(a.name for a in program.axes))


def _fixed(axis: Axis) -> int | None:
    if not axis.looped:
        return axis.size
    return axis.block


def _products(axes: Sequence[Axis], chosen: dict[Axis, int], facts: Facts, target: Target) -> None:
    """Blocks of matrix products; an axis that is summed over in one and a column of another has room in both."""
    rows, columns, depth = target.matmul
    for axis in axes:
        at = axis.position
        if chosen[axis]:
            continue
        if at in facts.depths and (at in facts.columns or at in facts.rows):
            chosen[axis] = rows
        elif at in facts.depths:
            chosen[axis] = _at_most(axis, depth)
        elif at in facts.columns:
            chosen[axis] = columns
        elif at in facts.rows:
            chosen[axis] = rows


def _vectors(program: KernelProgram, chosen: dict[Axis, int], facts: Facts, target: Target) -> None:
    """The axis along which memory runs: whole where it is short, and as much as is stored at once where it is only stored."""
    for axis in program.axes:
        if not chosen[axis] and axis.position in facts.along:
            size = _stored_size(program, axis)
            chosen[axis] = _at_most(axis, target.widest if size is None else 2 * target.store_bytes // size)


def _stored_size(program: KernelProgram, axis: Axis) -> int | None:
    """The bytes of an element where an axis occurs in stores only; None where something is reduced over it, or kept."""
    found = [n for n in statements(program.body) if axis.position in {lane.symbol for lane in getattr(n, "lanes", ())}]
    sizes = [n.tensor.dtype.itemsize for n in found if isinstance(n, Write)]
    return max(sizes) if sizes and len(sizes) == len(found) else None


def _rest(program: KernelProgram, chosen: dict[Axis, int], target: Target) -> None:
    """Other axes share what a block has room for; independent programs take one position each."""
    parallel = {a for n in program.body if isinstance(n, Tiles) and n.parallel for a in n.axes}
    for axis in program.axes:
        if chosen[axis]:
            continue
        if axis in parallel:
            chosen[axis] = 1
            continue
        widest = 1
        for other, lanes in chosen.items():
            widest *= lanes if lanes and other.position in _companions(program, axis) else 1
        size = _stored_size(program, axis)
        room = target.near_block if size is None else target.store_bytes // size
        chosen[axis] = _at_most(axis, LONG if _only_summed(program, axis) else max(1, room // widest))


def _only_summed(program: KernelProgram, axis: Axis) -> bool:
    """Whether one statement reduces over an axis and no other has it: nothing of a tile is needed twice."""
    found = [n for n in statements(program.body) if axis.position in {lane.symbol for lane in getattr(n, "lanes", ())}]
    rows = [n for n in found if isinstance(n, Write) and n.tensor.role is Role.PRIVATE]
    sums = [n for n in found if isinstance(n, Reduce) and axis.position not in {a.symbol for a in n.local.lanes}]
    return len(sums) == 1 and len(rows) + 1 == len(found)


def _companions(program: KernelProgram, axis: Axis) -> set[Symbol]:
    """Axes that occur in one statement with another."""
    found: set[Symbol] = set()
    for node in statements(program.body):
        lanes = {lane.symbol for lane in getattr(node, "lanes", ())}
        if axis.position in lanes:
            found |= lanes - {axis.position}
    return found


def _at_most(axis: Axis, limit: int) -> int:
    size = axis.size
    return limit if size is None else max(1, min(size, limit))


def overridden(plan_: TilePlan, program: KernelProgram, lanes: Mapping[str, int]) -> TilePlan:
    """The plan with other lanes for some axes that the user left open."""
    new = tuple(
        lanes.get(a.name, n) if a.looped and a.block is None else n for a, n in zip(program.axes, plan_.lanes, strict=True)
    )
    return TilePlan(plan_.strategy, new, plan_.names, plan_.reasons, lanes.get("chunk", plan_.chunk))
