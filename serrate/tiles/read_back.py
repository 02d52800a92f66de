"""Loops whose iterations access, in one tensor, what other iterations store.

In: a loop of a traced kernel. Out: the tensors for which that cannot be excluded, whose values may then depend on the tile size;
or a `RaceError`, if programs of a grid read what others store whatever the arguments, because programs run in any order.

Two accesses never meet in different iterations

    along the loop   if a dim has the same index in both, and that index is a position of the loop plus what no iteration changes
    in place         if all their indices are the same, and differ from iteration to iteration: stores go to distinct elements
    in their rows    if both are inside of a row of a ragged tensor, and each iteration has its own row
    by their ranges  if the range of one index ends before that of the other begins, or their strides keep them apart
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import cast

from serrate.errors import RaceError
from serrate.ir.expr import Element, Expr, Less, Symbol
from serrate.ir.loops import Block, Guard, If, Load, Node, While, Write, symbols_of, values_of, written_by
from serrate.ir.solve import terms_of
from serrate.ir.tile import GRID, Axis, Loop, Statement, TileProgram, inner, statements
from serrate.ir.values import Tensor


@dataclass(frozen=True)
class ReadBack:
    """A tensor of which an iteration may access elements that another one stores."""

    tensor: Tensor
    reads: bool
    """Whether it may read them; else it only overwrites them."""


@dataclass(frozen=True)
class _TensorAccess:
    tensor: Tensor
    index: tuple[Expr, ...]
    guard: Guard
    stores: bool
    adds: bool
    known: bool
    """Whether `guard` is all that decides if it runs."""


def read_back(program: TileProgram, loop: Loop) -> Iterator[ReadBack]:
    """The tensors of which an iteration of a loop may access elements that another one stores."""
    pairs = _Pairs(program, loop)
    for store, other in pairs.meeting():
        yield ReadBack(store.tensor, not other.stores)


def refuse_read_back(program: TileProgram, lines: Mapping[object, int]) -> None:
    """Raises if programs of a grid read what others store, whatever the arguments."""
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if not isinstance(node, Loop) or node.kind is not GRID:
            continue
        pairs = _Pairs(program, node)
        if pairs.axis is None or _is_single(pairs.axis):
            continue
        for store, other in pairs.meeting():
            if not other.stores and pairs.surely(store, other):
                name, line = store.tensor.name, lines.get(store.tensor.name)
                raise RaceError(
                    f"programs of {pairs.axis} run in any order, and one reads what another stores to {name}"
                    f"{'' if line is None else f' in line {line}'}: read from a copy made before the loop, as in "
                    f"{name}.clone(), store to another tensor, or put the loop inside of another one over tiles, where its "
                    "iterations run in order, and fix its tiles, as in hl.tile(..., block_size=16)"
                )


def _is_single(axis: Axis) -> bool:
    """Whether a grid has one program at most."""
    return axis.size is not None and axis.size <= (axis.block or 1)


def _accesses(body: Sequence[Statement | Node], guard: Guard = (), known: bool = True) -> Iterator[_TensorAccess]:
    for node in body:
        if isinstance(node, Block):
            for value in values_of(node):
                for v in value.walk():
                    if isinstance(v, Load):
                        yield _TensorAccess(v.tensor, v.index, (*v.guard, *node.guard, *guard), False, False, known)
            if isinstance(node, Write):
                yield _TensorAccess(node.tensor, node.index, (*node.guard, *guard), True, node.add, known)
        elif isinstance(node, If):
            yield from _accesses(node.then, (*guard, *node.guard), known)
            yield from _accesses(node.other, guard, False)
        elif isinstance(node, While):
            yield from _accesses((*node.test, *node.body), guard, known)
        else:
            for part in inner(cast(Statement, node)):
                yield from _accesses(part, guard, known)


class _Pairs:
    """Pairs of accesses to one tensor, a store and another access, in the body of a loop."""

    def __init__(self, program: TileProgram, loop: Loop) -> None:
        self.program, self.loop = program, loop
        self.axis = program.axis_of(loop.domain)
        self._rows = {array for array, _ in (*program.counts, *program.limits)}
        if self.axis is None:
            return
        mine = [a for a in program.axes if a.original is self.axis]
        self._own = {s for a in mine for s in _symbols(a)}
        self._distinct = self._own - {a.lane for a in mine}
        """What differs from iteration to iteration; the lane does not."""
        inside = {a for n in statements(loop.body) if isinstance(n, Loop) and (a := program.axis_of(n.domain)) is not None}
        self._axes = [a for a in program.axes if a.original is self.axis or a.original in inside or not a.original.looped]
        self._moving = {s for a in self._axes for s in _symbols(a)}
        self._positions = {a.position: a for a in self._axes}
        # All lanes of a tile, and those of a number of positions without a loop, belong to one iteration.
        fixed = {(a.begin, a.end): a for a in program.axes if not a.looped and a.alias_of is None}
        same = [(a, a.original if a.original.looped else fixed[a.original.begin, a.original.end]) for a in program.axes]
        self._originals: dict[Expr, Expr] = {
            mine: its for a, one in same if a is not one for mine, its in ((a.position, one.position), (a.lane, one.lane))
        }
        self._made: dict[str, list[Block]] = {}
        for node in statements(loop.body):
            if isinstance(node, Block):
                for local in written_by(node):
                    self._made.setdefault(local.name, []).append(node)

    def meeting(self) -> Iterator[tuple[_TensorAccess, _TensorAccess]]:
        """The pairs for which it is not proven that they never meet in different iterations."""
        if self.axis is None:
            return
        found = list(dict.fromkeys(_accesses(self.loop.body)))
        stored = {a.tensor for a in found if a.stores}
        found = [a for a in found if a.tensor in stored]
        for n, store in enumerate(found):
            for m, other in enumerate(found):
                # A store and itself, or two stores at one index, are those of `_overwritten`.
                once = store.stores and other is not store and not (other.stores and m < n)
                both = store.adds and other.adds
                if once and other.tensor is store.tensor and not both and not self._apart(store, other):
                    yield store, other

    # --- what never meets ---

    def _apart(self, store: _TensorAccess, other: _TensorAccess) -> bool:
        pairs = [(self._shown(a), self._shown(b)) for a, b in zip(store.index, other.index, strict=True)]
        if any(a is b and self._along(a) for a, b in pairs):
            return True
        if all(a is b for a, b in pairs) and not (store.adds or other.adds) and any(self._differs(a) for a, _ in pairs):
            return True
        if any(self._row(a) & self._row(b) for a, b in pairs):
            return True
        if other.stores and all(a is b for a, b in pairs):
            return True
        return any(self._ranges_apart(a, b) for a, b in pairs)

    def _shown(self, index: Expr) -> Expr:
        return index.substitute(self._originals) if self._originals else index

    def _along(self, index: Expr) -> bool:
        """Whether an index is a position, or the number or an end of the tile, plus what no iteration changes."""
        terms = [term for term, _ in terms_of(index)]
        mine = [term for term in terms if term in self._distinct]
        return len(mine) == 1 and not any(self._changes(term) for term in terms if term is not mine[0])

    def _changes(self, e: Expr) -> bool:
        """Whether a term may change in the loop."""
        return bool(e.symbols & self._moving) or any(
            isinstance(x, Element) and x.array.local and x.array.name in self._made for x in e.walk()
        )

    def _differs(self, e: Expr) -> bool:
        """Whether an index depends on the iteration, other than through carried values."""
        pending, seen = [e], set[str]()
        while pending:
            each = pending.pop()
            if each.symbols & self._distinct:
                return True
            for x in each.walk():
                if isinstance(x, Element) and x.array.local and x.array.name not in seen:
                    seen.add(x.array.name)
                    for node in self._made.get(x.array.name, ()):
                        for value in values_of(node):
                            if symbols_of(value, conditions=False) & self._distinct:
                                return True
                            pending += [i for v in value.walk() if isinstance(v, Load) for i in v.index]
        return False

    def _row(self, index: Expr) -> set[Expr]:
        """The rows of ragged tensors that an index is inside of, if each iteration has its own."""
        starts = {e for term, _ in terms_of(index) for e in term.walk() if isinstance(e, Element) and not e.array.local}
        return {e for e in starts if e.array in self._rows and self._along(e.index)}

    def _ranges_apart(self, a: Expr, b: Expr) -> bool:
        if self._is_linear(a) and self._is_linear(b):
            difference = self._fixed_part(a) - self._fixed_part(b)
            stride = gcd(*(factor for x in (a, b) for term, factor in terms_of(x) if term in self._positions))
            if difference.value is not None and (difference.value % stride if stride else difference.value):
                return True
        return self._ends_before(a, b) or self._ends_before(b, a)

    def _ends_before(self, a: Expr, b: Expr) -> bool:
        last, first = self._extreme(a, True), self._extreme(b, False)
        return last is not None and first is not None and Less(last, first).proven

    def _is_linear(self, e: Expr) -> bool:
        """Whether an index is a sum of positions and of what no iteration changes."""
        return not any(self._changes(term) for term, _ in terms_of(e) if term not in self._positions)

    def _fixed_part(self, e: Expr) -> Expr:
        for term, factor in terms_of(e):
            if term in self._positions:
                e = e - term * factor
        return e

    def _extreme(self, e: Expr, largest: bool) -> Expr | None:
        """The largest or smallest value of an index over all iterations, in terms of what none of them changes."""
        for _ in range(len(self._axes) + 1):
            moved = [(term, factor) for term, factor in terms_of(e) if self._changes(term)]
            if not moved:
                return e
            for term, factor in moved:
                axis = self._positions.get(term) if isinstance(term, Symbol) else None
                if axis is None:
                    return None
                end = axis.end - 1 if (factor > 0) is largest else axis.begin
                e = e - term * factor + end * factor
        return None

    # --- what meets for sure ---

    def surely(self, store: _TensorAccess, read: _TensorAccess) -> bool:
        """Whether a store and a read of different programs meet if there are enough programs, whatever is in memory."""
        pairs = [(self._shown(a), self._shown(b)) for a, b in zip(store.index, read.index, strict=True)]
        if not (store.known and read.known) or not all(self._meet(a, b) for a, b in pairs):
            return False
        # With one loop per index, and one index per loop, all pairs meet at the same time.
        for side in zip(*pairs, strict=True):
            used = [term for e in side for term, _ in terms_of(e) if term in self._positions]
            if len(set(used)) < len(used):
                return False
        shifted = all(bool(self._own & a.symbols) == bool(self._own & b.symbols) for a, b in pairs)
        return self._unmasked(store, shifted) and self._unmasked(read, shifted)

    def _meet(self, a: Expr, b: Expr) -> bool:
        """Whether two indices that their ranges do not keep apart are the same in some iterations: each is a position or a
        number, plus what no iteration changes."""
        if not (self._is_linear(a) and self._is_linear(b)):
            return False
        if (self._fixed_part(a) - self._fixed_part(b)).value is None:
            return False
        used = [[(self._positions[t], f) for t, f in terms_of(e) if t in self._positions] for e in (a, b)]
        if any(len(part) > 1 or any(self._is_nested(axis) for axis, _ in part) for part in used):
            return False
        if used[0] == used[1]:
            return True
        return {f for part in used for _, f in part} == {1}

    def _is_nested(self, axis: Axis) -> bool:
        """Whether the positions of a loop depend on another one: programs may then have different ones."""
        return self._changes(axis.begin) or self._changes(axis.end)

    def _unmasked(self, access: _TensorAccess, shifted: bool) -> bool:
        """Whether its only conditions are that positions are in their loops and rows, and indices in their tensors. If programs
        meet that are a fixed number of positions apart, those from some position on meet too."""
        ends = {d.extent_expr for d in access.tensor.storage}
        positions = {(a.position, a.end) for a in self.program.axes if a.looped}
        for g in access.guard:
            left, right = self._shown(g.left), self._shown(g.right)
            is_row = any(isinstance(e, Element) and e.array in self._rows for e in right.walk())
            is_end = self._is_linear(left) and not self._changes(right) and (right in ends or is_row)
            is_begin = (
                left.value is not None and self._is_linear(right) and (shifted or (left.value < 0 and right in access.index))
            )
            if not (is_end or is_begin or (left, right) in positions):
                return False
        return True


def _symbols(axis: Axis) -> tuple[Symbol, ...]:
    return axis.position, axis.lane, axis.number, axis.first, axis.last
