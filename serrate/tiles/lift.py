"""A device loop as a fusion, from which its gradient can be derived.

In: the tile program of a loop. Out: a fusion of the same math, and where its inputs come from; or `NotLifted` with the reason.
Once it is proven that nothing depends on tile sizes (`whole_tiles.py`), every tile covers its whole axis: each loop then runs
once, a carried value still has its initial value when the loop updates it, and private blocks become tensors.

    serial k < max_length:                                              ->    T5[c, m] sum= T2[c, r, m] over r
      [b, k, m] sums sum= jt[offsets[b] + k, m]  where k < length of b

A position that counts only where the row is long enough becomes a position of the row. Conditions that the domains do not imply
remain, as selects between a value and its replacement.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from serrate.errors import SerrateError
from serrate.frontend.broadcast import under
from serrate.frontend.ops.structure import as_nested
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Element, Expr, Less, Symbol, const
from serrate.ir.fusion import Fusion
from serrate.ir.loops import (
    Assign,
    Declare,
    Dot,
    Existing,
    Guard,
    Held,
    Lane,
    Load,
    Local,
    Number,
    Reduce,
    Write,
    flat_index,
)
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import OPERATORS, SUM, Reduction, reduction
from serrate.ir.tile import Accumulate, Axis, Loop, Statement, Store, TileProgram, statements
from serrate.ir.values import (
    Call,
    Constant,
    Place,
    Read,
    Role,
    Tensor,
    Value,
    call,
    computed,
    constant,
    extent,
    index_of,
    index_read,
    position,
    read,
    rewrite,
)
from serrate.ir.view import TensorView
from serrate.tiles.elementwise import DETACH
from serrate.tiles.whole_tiles import LoopEnds, NotLifted, require_whole_tiles, updated

Line = int | None


class Source(NamedTuple):
    """The source of an input of the fusion: a tensor of the loop, an array that describes rows, or a tensor with arbitrary
    contents whose size is a number of the loop."""

    kind: Literal["tensor", "array", "size"]
    what: Tensor | Array | Expr


class Limit(NamedTuple):
    """At each call, the positions of an axis must end at `end`, or before it unless they must end exactly there."""

    axis: Axis
    last: Expr
    end: Expr
    exact: bool


@dataclass(frozen=True)
class LiftedLoop:
    """A fusion with the results of a loop."""

    fusion: Fusion
    sources: tuple[Source, ...]
    """The source of each input of the fusion."""
    stored: tuple[Tensor, ...]
    """The tensor of the loop that each result is stored to."""
    shapes: tuple[tuple[Expr | None, ...], ...]
    """The part of each stored tensor that is stored, from the first element on; None for all of a dim."""
    whole: tuple[bool, ...]
    """Whether every element of that part is stored, whatever the rows are."""
    limits: tuple[Limit, ...]


def lift(program: TileProgram, lines: Mapping[object, int], longest: Mapping[Array, Collection[Expr]]) -> LiftedLoop:
    """The fusion of a loop; `lines` are those of loads, by value, and of stores and blocks, by name. `longest` are the numbers
    that are the length of the longest row, by the boundaries of rows."""
    return _Lifting(program, lines, longest).run()


COMBINED = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""Reductions that a block may be the result of, with the function that combines two results."""


class CountedRows(NamedTuple):
    """Rows by their boundaries, and the axis that counts them."""

    boundaries: Array
    component: Symbol


@dataclass
class _Lifting:
    program: TileProgram
    lines: Mapping[object, int]
    longest: Mapping[Array, Collection[Expr]]
    fusion: Fusion = field(init=False)
    sources: list[Source] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    blocks: dict[str, Value | tuple[Tensor, tuple[Symbol, ...]]] = field(default_factory=dict)
    """The contents of each private block: a number, or a tensor over these axes."""
    locals: dict[str, Local] = field(default_factory=dict)
    shapes: dict[str, tuple[Symbol, ...]] = field(default_factory=dict)
    """The axes of each private block."""
    results: dict[Tensor, tuple[TensorView, tuple[Expr | None, ...], bool]] = field(default_factory=dict)
    looped: frozenset[Symbol] = frozenset()
    """The axes of the loops around a statement."""
    around: tuple[Symbol, ...] = ()
    """The axes of the loops around a statement that run over single positions: they are not lanes, and count like those."""
    line: Line = None
    """The line of the statement that is being lifted, if known."""

    def __post_init__(self) -> None:
        self.fusion = Fusion(self.program.name)
        self.axes = {axis.position: axis for axis in self.program.axes}
        self.whole: dict[Expr, Expr] = {}
        for axis in self.program.axes:
            if axis.block == 1:
                self.whole |= {axis.first: axis.position, axis.last: axis.position + 1, axis.number: axis.position - axis.begin}
            elif axis.block is None:
                self.whole |= {axis.first: axis.begin, axis.last: axis.end}
        self.of_tiles = {s for a in self.program.axes for s in (a.first, a.last, a.number, a.lane, a.lanes)} - self.whole.keys()
        self.counts = dict(self.program.counts)
        tensors = (*self.program.inputs, *self.program.outputs)
        self.known_sizes = {*self.counts.values(), *(d.extent_expr for t in tensors for d in t.storage)}
        self.ends = LoopEnds(self.program)
        self.views: dict[object, TensorView] = {}
        self.sizes: dict[Expr, Expr] = {}
        self.domains: dict[Symbol, IterDomain] = {}
        self.rows: dict[Symbol, CountedRows] = {}
        self.combined = frozenset(self._combined())

    def refuse(self, reason: str, line: Line = None) -> NotLifted:
        return NotLifted(reason, line if line is not None else self.line)

    def run(self) -> LiftedLoop:
        (phase,) = self.program.phases
        if DETACH in self.lines:
            raise self.refuse("detach() in a kernel is ignored; detach the tensor before the kernel", self.lines[DETACH])
        require_whole_tiles(self.program, self.lines)
        with self.fusion:
            self._find_rows(phase.body)
            try:
                for node in phase.body:
                    self._statement(node)
            except SerrateError as error:
                raise self.refuse(str(error)) from error
        for tensor in self.program.outputs:
            if tensor not in self.results:
                raise self.refuse(f"no differentiable statement stores to {tensor.name}", self.lines.get(tensor.name))
        if not self.results:
            raise self.refuse("nothing is stored")
        views, shapes, whole = zip(*self.results.values(), strict=True)
        self.fusion.output(*views)
        return LiftedLoop(self.fusion, tuple(self.sources), tuple(self.results), shapes, whole, tuple(self.limits))

    # --- inputs ----------------------------------------------------------------------------------------------------------

    def _input(self, source: Source, shape: Sequence[Expr | None], dtype: torch.dtype) -> TensorView:
        key = source.what
        if key not in self.views:
            known = [None if e is None else e.value for e in shape]
            view = self.fusion.input(known, dtype)
            self.sources.append(source)
            self.views[key] = view
            for own, domain in zip(shape, view.domains, strict=True):
                if isinstance(own, Symbol):
                    self.sizes.setdefault(own, domain.extent_expr)
        return self.views[key]

    def tensor(self, tensor: Tensor) -> TensorView:
        return self._input(Source("tensor", tensor), [d.extent_expr for d in tensor.storage], tensor.dtype)

    def array(self, array: Array) -> TensorView:
        return self._input(Source("array", array), [None], torch.int64)

    def size(self, number: Expr) -> Expr:
        """A size of the loop as a size of the fusion."""
        if number in self.of_tiles:
            raise self.refuse("a number depends on the size of the tiles")
        if isinstance(number, Symbol) and number not in self.sizes:
            self._input(Source("size", number), [number], torch.uint8)
        return self.sizes.get(number, number)

    # --- axes ------------------------------------------------------------------------------------------------------------

    def _find_rows(self, body: tuple[Statement, ...]) -> None:
        """Finds the axes that run over rows: those whose positions count only where a row is that long, in every statement
        that stores or reduces them."""
        found: dict[Symbol, list[CountedRows]] = {}
        for node, around in self._with_single(body, ()):
            counting = node.lanes[-1:] if isinstance(node, Dot) else node.lanes
            for symbol in dict.fromkeys((*around, *(lane.symbol for lane in counting))):
                tests = (self._row_test(test.substitute(self.whole), symbol) for test in node.guard)
                here = [rows for rows in tests if rows is not None and self._ends_with(symbol, rows, node.guard)]
                before = found.get(symbol, here)
                found[symbol] = [rows for rows in before if rows in here]
        self.rows = {axis: rows[0] for axis, rows in found.items() if rows}

    def _ends_with(self, symbol: Symbol, rows: CountedRows, guard: Guard) -> bool:
        """Whether an axis reaches the end of every row, or a statement tests where it ends."""
        end = self.axes[symbol].end
        return end.substitute(self.whole) in self.longest.get(rows.boundaries, ()) or Less(symbol, end) in guard

    def _with_single(
        self, body: Iterable[Statement], around: tuple[Symbol, ...]
    ) -> Iterator[tuple[Write | Assign | Reduce | Dot, tuple[Symbol, ...]]]:
        """The statements that store or combine values, and the axes of the loops around them that run over single positions."""
        for node in body:
            if isinstance(node, Loop):
                axis = self.program.axis_of(node.domain)
                inner = (*around, axis.position) if axis is not None and axis.block == 1 else around
                yield from self._with_single(node.body, inner)
            elif isinstance(node, Write | Reduce | Dot) or (isinstance(node, Assign) and node.local.name in self.combined):
                yield node, around

    def _combined(self) -> Iterator[str]:
        """The private blocks that loops over single positions carry."""
        (phase,) = self.program.phases
        for node in statements(phase.body):
            axis = self.program.axis_of(node.domain) if isinstance(node, Loop) else None
            if isinstance(node, Loop) and axis is not None and axis.block == 1:
                inside = {n.local.name for n in statements(node.body) if isinstance(n, Declare)}
                changed = (updated(n) for n in statements(node.body))
                yield from (local.name for local in changed if local is not None and local.name not in inside)

    def _row_test(self, test: Less, axis: Symbol) -> CountedRows | None:
        """The rows of `axis < boundaries[b + 1] - boundaries[b]`."""
        if test.left is not axis:
            return None
        for array in test.right.arrays:
            for component in self.axes:
                if array in self.counts and test.right is array[component + 1] - array[component]:
                    return CountedRows(array, component)
        return None

    def nested(self, values: TensorView, rows: CountedRows) -> TensorView:
        key = (values.tensor, rows.boundaries)
        if key not in self.views:
            boundaries, count = self.array(rows.boundaries), self.counts[rows.boundaries]
            self.views[key] = as_nested(values, boundaries)
            if isinstance(count, Symbol):
                self.sizes.setdefault(count, boundaries.domains[0].extent_expr - 1)
        return self.views[key]

    def domain(self, symbol: Symbol) -> IterDomain:
        """The domain of an axis, by its position."""
        if symbol in self.domains:
            return self.domains[symbol]
        axis = self.axes[symbol]
        if axis.begin.value != 0:
            raise self.refuse(f"{axis} does not start at 0")
        rows = self.rows.get(symbol)
        if rows is not None:
            component, own = self._component(rows), self._rows_of(rows)
            self.domains[symbol] = under(component, own, self.fusion.fresh("r"))
            return self.domains[symbol]
        counted = next((rows for rows in self.rows.values() if rows.component is symbol), None)
        if counted is not None:
            own = self._rows_of(counted)
            self._require(axis, axis.end, self.counts[counted.boundaries], exact=True)
            self.domains[symbol] = own.component
            return own.component
        end = self._uniform(axis.end, f"the end of {axis}")
        self.domains[symbol] = IterDomain(end, name=self.fusion.fresh("d"))
        return self.domains[symbol]

    def _rows_of(self, rows: CountedRows) -> RaggedIterDomain:
        """The rows with these boundaries, of whatever is stored in them."""
        first = next((view for key, view in self.views.items() if isinstance(key, tuple) and key[1] == rows.boundaries), None)
        if first is None:
            tensors = [t for t in (*self.program.inputs, *self.program.outputs) if self._has_rows(t, rows)]
            if not tensors:
                raise self._no_rows(rows)
            chosen = tensors[0]
            if chosen.role is Role.OUTPUT:
                stored = self._input(Source("size", chosen.storage[0].extent_expr), [chosen.storage[0].extent_expr], torch.uint8)
            else:
                stored = self.tensor(chosen)
            first = self.nested(stored, rows)
        return first.ragged

    def _accesses(self) -> Iterator[Write | Load]:
        """Where tensors are read and written."""
        (phase,) = self.program.phases
        for node in statements(phase.body):
            if isinstance(node, Write):
                yield node
            values = [getattr(node, name) for name in ("value", "left", "right") if hasattr(node, name)]
            yield from (v for value in values for v in value.walk() if isinstance(v, Load))

    def _has_rows(self, tensor: Tensor, rows: CountedRows) -> bool:
        """Whether a tensor is read or written at these rows."""
        places = (each.index for each in self._accesses() if each.tensor is tensor)
        return any(index and rows.boundaries in index[0].substitute(self.whole).arrays for index in places)

    def _no_rows(self, rows: CountedRows) -> NotLifted:
        """The error for rows that no tensor stores back to back: those with gaps, and those whose columns are packed."""
        for each in self._accesses():
            tests = (self._row_test(test.substitute(self.whole), axis) for test in each.guard for axis in self.axes)
            if not each.index or rows not in tests:
                continue
            name, at = each.tensor.name, each.index[0].substitute(self.whole)
            if len([axis for axis in self.axes if axis is not rows.component and axis in at.symbols]) > 1:
                return self.refuse(
                    f"{name} has two ragged dims side by side, and packs the columns of each row; give it a structure with "
                    "padded columns: structure.with_columns(columns, packed=False)"
                )
            return self.refuse(f"the rows of {name} may have gaps; pack them before the kernel: {name}.contiguous()")
        return self.refuse("rows are counted whose elements are neither read nor stored")

    def _uniform(self, number: Expr, what: str) -> Expr:
        """A number that is the same everywhere, as one of the fusion."""
        number = number.substitute(self.whole)
        if number.arrays or any(s in self.axes for s in number.symbols):
            raise self.refuse(f"{what} is computed in the kernel")
        return number.substitute({s: self.size(s) for s in number.symbols})

    def _require(self, axis: Axis, last: Expr, end: Expr, *, exact: bool) -> None:
        limit = Limit(axis, last.substitute(self.whole), end.substitute(self.whole), exact)
        if limit.last is not limit.end and limit not in self.limits:
            self.limits.append(limit)

    # --- conditions ------------------------------------------------------------------------------------------------------

    def conditions(self, guard: Guard) -> list[Value]:
        """The conditions that do not follow from the domains."""
        found = map(self._condition, self._left(guard))
        return [test for test in found if test is not None]

    def _left(self, guard: Guard) -> list[Less]:
        """The tests of a guard, but those of ends of loops that do not matter."""
        return [test.substitute(self.whole) for test in guard if not self.ends.follows(test, guard)]

    def _condition(self, test: Less) -> Value | None:
        """A condition as a value; None if it holds at all positions of the domains, or is required to at each call."""
        axis = self.axes.get(test.left) if isinstance(test.left, Symbol) else None
        if axis is not None and self._follows(axis, test.right):
            return None
        # Where a row is longer than its axis, the end of the axis is a condition, and the bounds of the position follow from it.
        ends = axis is not None and axis.position in self.rows and test.right is axis.end.substitute(self.whole)
        if test.proven and not ends:
            return None
        sides = (self.number(e) for e in (test.left, test.right))
        return call("lt", *sides, dtype=torch.bool)

    def _follows(self, axis: Axis, end: Expr) -> bool:
        """Whether every position of an axis is below a number."""
        rows, last = self.rows.get(axis.position), axis.end.substitute(self.whole)
        if rows is not None:
            length = rows.boundaries[rows.component + 1] - rows.boundaries[rows.component]
            return end is length or end in self.longest.get(rows.boundaries, ())
        if end is last or (last.value is not None and end.value is not None and last.value <= end.value):
            return True
        if (
            last.arrays
            or any(s in self.axes for s in last.symbols)
            or end not in self.known_sizes
            or None not in (last.value, end.value)
        ):
            return False
        self._require(axis, last, end, exact=False)
        return True

    def masked(self, value: Value, conditions: Iterable[Value], other: Value) -> Value:
        for test in conditions:
            value = call("where", test, value, other, dtype=value.dtype)
        return value

    # --- numbers and values ----------------------------------------------------------------------------------------------

    def expr(self, e: Expr, reads: list[Value]) -> Expr:
        """An index expression of the loop over the domains of the fusion, and over integers that are appended to `reads`."""
        if isinstance(e, Symbol):
            return index_of(self.domain(e)) if e in self.axes else self.size(e)
        if isinstance(e, Element):
            reads.append(self._element(e))
            return index_read(len(reads) - 1)
        return e.rebuild(tuple(self.expr(o, reads) for o in e.operands)) if e.operands else e

    def place(self, e: Expr) -> Place:
        e = e.substitute(self.whole)
        reads: list[Value] = []
        expr = self.expr(e, reads)
        domains = (self.domain(s) for s in self.axes if s in e.symbols)
        return Place(expr, tuple(d for d in domains if index_of(d) in expr.symbols), tuple(reads))

    def number(self, e: Expr) -> Value:
        e = e.substitute(self.whole)
        if isinstance(e, Symbol) and e in self.axes:
            return position(self.domain(e))
        if isinstance(e, Element):
            return self._element(e)
        return constant(e.value, torch.int64) if e.value is not None else computed(self.place(e))

    def _element(self, e: Element) -> Value:
        """An integer that an index depends on: of an array that describes rows, or one that the kernel computed."""
        if not e.array.local:
            return read(self.array(e.array).tensor, (self.place(e.index),))
        local = self.locals[e.array.name]
        axes = [self.axes[lane.symbol] for lane in local.lanes]
        lanes = [a.lane if a.looped else a.position for a in axes]
        if e.most is not None or e.index is not flat_index(lanes, [a.lanes if a.looped else const(a.size or 1) for a in axes]):
            raise self.refuse("an index is computed in the kernel, along other axes")
        return self._held(local)

    def value(self, value: Value) -> Value:
        return rewrite(value, self._changed)

    def _changed(self, value: Value) -> Value | None:
        if isinstance(value, Load):
            return self._load(value)
        if isinstance(value, Held):
            return self._held(value.local)
        if isinstance(value, Number):
            found = self.number(value.expr)
            return found if value.dtype == torch.int64 else call("cast", found, dtype=value.dtype)
        if isinstance(value, Existing):
            total = self._count(value)
            return total if value.dtype == torch.int64 else call("cast", total, dtype=value.dtype)
        if isinstance(value, Call):
            return _folded(value, tuple(map(self.value, value.args)))
        return None

    def _count(self, value: Existing) -> Value:
        """The number of positions that exist: a sum of ones, or the size of a domain; for a single position, 1 or 0."""
        over = tuple(lane.symbol for lane in value.lanes if self.axes[lane.symbol].block != 1)
        tests = self.conditions(value.guard)
        one = constant(1, torch.int64)
        if not tests:
            sizes = (extent(self.domain(s)) for s in over)
            return functools.reduce(lambda x, y: call("mul", x, y, dtype=torch.int64), sizes, one)
        counted = self.masked(one, tests, constant(0, torch.int64))
        if not over:
            return counted
        named = {s for test in value.guard for s in test.substitute(self.whole).symbols} - {*over}
        index = tuple(self.domain(s) for s in self.axes if s in named)
        target = self.fusion.tensor(torch.int64, index)
        domains = tuple(map(self.domain, over))
        self.fusion.define([target], (*index, *domains), Accumulate((target,), index, SUM, (counted,), domains))
        return read(target, index)

    def _held(self, local: Local) -> Value:
        found = self.blocks[local.name]
        if isinstance(found, Value):
            return found
        tensor, symbols = found
        # It may be read along an alias of the axis that it was computed along.
        first = len(symbols) - len(local.lanes)
        here = (*symbols[:first], *(lane.symbol for lane in local.lanes))
        return read(tensor, tuple(map(self.domain, here)))

    def _load(self, value: Load) -> Value:
        before, self.line = self.line, self.lines.get(value, self.line)
        try:
            if value.tensor.role is Role.OUTPUT:
                raise self.refuse(f"{value.tensor.name} is read, and the kernel also stores to it")
            at = [e.substitute(self.whole) for e in value.index]
            guard = self._left(value.guard)
            rows = self._rows_at(at, guard)
            index: list[IterDomain | Place]
            if rows is None:
                view = self.tensor(value.tensor)
                index = [self._at(e, d) for e, d in zip(at, value.tensor.storage, strict=True)]
            else:
                axis, own = rows
                view = self.nested(self.tensor(value.tensor), own)
                here = self.domain(axis)
                inside = here if self.rows.get(axis) == own else Place(index_of(here), (here,))
                rest = [self._at(e, d) for e, d in zip(at[1:], value.tensor.storage[1:], strict=True)]
                index = [self._component(own), inside, *rest]
                guard = [test for test in guard if self._row_test(test, axis) != own]
            found = read(view.tensor, tuple(index), value.other)
            tests = [test for test in map(self._condition, guard) if test is not None]
            return self.masked(found, tests, constant(value.other, value.dtype))
        finally:
            self.line = before

    def _rows_at(self, index: Sequence[Expr], guard: Sequence[Less]) -> tuple[Symbol, CountedRows] | None:
        """The axis and the rows of an index `boundaries[b] + axis`, which exists where the row is that long."""
        if not index or not any(array in self.counts for array in index[0].arrays):
            return None
        for test in guard:
            for axis in self.axes:
                rows = self._row_test(test, axis)
                if rows is not None and index[0] is rows.boundaries[rows.component] + axis:
                    return axis, rows
        raise self.refuse("an index is computed in the kernel, and is not a position of a row of a ragged tensor")

    def _component(self, rows: CountedRows) -> IterDomain:
        """The domain that counts these rows."""
        axis = self.axes[rows.component]
        self._require(axis, axis.end, self.counts[rows.boundaries], exact=True)
        return self.domain(rows.component)

    def _at(self, e: Expr, dim: IterDomain) -> IterDomain | Place:
        """An index into a dim: a domain of the same extent, or a place."""
        if isinstance(e, Symbol) and e in self.axes:
            here, axis = self.domain(e), self.axes[e]
            if not here.is_ragged and axis.end.substitute(self.whole) is dim.extent_expr:
                return here
            return Place(index_of(here), (here,))
        return self.place(e)

    # --- statements ------------------------------------------------------------------------------------------------------

    def _statement(self, node: Statement) -> None:
        name = node.tensor.name if isinstance(node, Write) else getattr(getattr(node, "local", None), "name", None)
        self.line = self.lines.get(name)
        if isinstance(node, Loop):
            axis = self.program.axis_of(node.domain)
            assert axis is not None
            before = self.around, self.looped
            self.around = (*self.around, axis.position) if axis.block == 1 else self.around
            self.looped = self.looped | {axis.position}
            for each in node.body:
                self._statement(each)
            self.around, self.looped = before
        elif isinstance(node, Declare):
            if node.number is None:
                raise self.refuse(f"{node.local.name} has no first value")
            lanes = tuple(lane.symbol for lane in node.local.lanes)
            self.locals[node.local.name] = node.local
            self.shapes[node.local.name] = (*(s for s in self.around if s not in lanes), *lanes)
            self.blocks[node.local.name] = constant(node.number, node.local.dtype)
        elif isinstance(node, Assign):
            self._assign(node)
        elif isinstance(node, Reduce):
            if node.operator not in COMBINED:
                raise self.refuse(f"the reduction {node.operator} of {node.local.name} has no gradient")
            self._reduce(node.local, node.lanes, node.guard, reduction(node.operator), self.value(node.value))
        elif isinstance(node, Dot):
            sides = (self.value(side) for side in (node.left, node.right))
            self._reduce(node.local, node.lanes, node.guard, SUM, call("mul", *sides, dtype=node.local.dtype))
        elif isinstance(node, Write):
            self._write(node)
        else:
            inside = [self.lines[key] for each in statements((node,)) for key in _names_of(each) if key in self.lines]
            what = {"If": "a branch", "While": "a loop that ends by a condition", "Running": "a running reduction"}
            kind = what.get(type(node).__name__, f"a {type(node).__name__}")
            raise self.refuse(f"{kind} is not differentiated", min(inside, default=None))

    def _define(self, local: Local, value: Value) -> None:
        symbols = self.shapes[local.name]
        domains = tuple(map(self.domain, symbols))
        if isinstance(value, Constant):
            self.blocks[local.name] = value
        elif isinstance(value, Read) and value.tensor.role is Role.SCRATCH and value.index == domains == value.tensor.logical:
            self.blocks[local.name] = value.tensor, symbols
        else:
            target = self.fusion.tensor(value.dtype, domains)
            self.fusion.define([target], domains, Store(target, domains, value))
            self.blocks[local.name] = target, symbols

    def _assign(self, node: Assign) -> None:
        own = self.shapes[node.local.name]
        if not {*self.around} <= {*own}:
            # It is carried from one position to the next.
            combined = _contribution(node.value, node.local)
            if combined is None or combined[0] not in COMBINED:
                raise self.refuse(f"{node.local.name} is carried from position to position, and is not a reduction")
            self._reduce(node.local, node.lanes, node.guard, reduction(combined[0]), self.value(combined[1]))
            return
        new, old = self.value(node.value), self._held(node.local)
        if new.dtype != node.local.dtype:
            new = call("cast", new, dtype=node.local.dtype)
        if new is not old:
            new = self._kept_if_idle(new, old, node.rests, own)
        self._define(node.local, self.masked(new, self.conditions(node.guard), old))

    def _kept_if_idle(self, new: Value, old: Value, rests: Sequence[Guard], own: Sequence[Symbol]) -> Value:
        """A carried value stays as it is where its loop has no position."""
        tests = (test for guard in rests for test in guard)
        for symbol in dict.fromkeys(s for test in tests for s in self.rows if test.left is s and s not in own):
            some = call("gt", extent(self.domain(symbol)), constant(0, torch.int64), dtype=torch.bool)
            new = call("where", some, new, old, dtype=new.dtype)
        return new

    def _reduce(self, local: Local, lanes: Sequence[Lane], guard: Guard, kind: Reduction, value: Value) -> None:
        state, own = local.dtype, self.shapes[local.name]
        if value.dtype != state:
            value = call("cast", value, dtype=state)
        symbols = dict.fromkeys((*self.around, *(lane.symbol for lane in lanes)))
        value = self.masked(value, self.conditions(guard), constant(kind.identity(0, state), state))
        index, over = tuple(map(self.domain, own)), tuple(self.domain(s) for s in symbols if s not in own)
        if over:
            target = self.fusion.tensor(state, index)
            self.fusion.define([target], (*index, *over), Accumulate((target,), index, kind, (value,), over))
            value = read(target, index)
        combined = call(COMBINED[kind.name], self._held(local), value, dtype=state)
        self._define(local, _folded(combined))

    def _write(self, node: Write) -> None:
        tensor = node.tensor
        if node.add:
            raise self.refuse("an atomic addition is not differentiated")
        if tensor in self.results:
            raise self.refuse(f"{tensor.name} is stored to in two places")
        at = [e.substitute(self.whole) for e in node.index]
        rows = self._rows_at(at, self._left(node.guard))
        value = self.value(node.value)
        if rows is None:
            symbols = at
        else:
            axis, own = rows
            if self.rows.get(axis) != own:
                raise self.refuse(f"positions of {self.axes[axis]} are also stored, or reduced, where no row has them")
            symbols = [own.component, axis, *at[1:]]
            self._component(own)
        lanes = {lane.symbol for lane in node.lanes}
        if any(s not in self.axes for s in symbols) or not {*self.around, *lanes} == {*symbols} >= self.looped:
            raise self.refuse(f"{tensor.name} is not stored once for each position of the tiles around it")
        if len(set(symbols)) != len(symbols):
            raise self.refuse(f"{tensor.name} is stored along a diagonal")
        if value.dtype != tensor.dtype:
            value = call("cast", value, dtype=tensor.dtype)
        conditions = self.conditions(node.guard)
        value = self.masked(value, conditions, constant(0, tensor.dtype))
        domains = tuple(self.domain(s) for s in symbols if isinstance(s, Symbol))
        target = self.fusion.tensor(tensor.dtype, domains)
        (view,) = self.fusion.define([target], domains, Store(target, domains, value))
        ends = [self.axes[s].end.substitute(self.whole) for s in symbols if isinstance(s, Symbol)]
        dims, first = (tensor.storage, 0) if rows is None else (tensor.storage[1:], 2)
        for symbol, dim in zip([s for s in symbols if isinstance(s, Symbol)][first:], dims, strict=True):
            if symbol in self.rows or not self._follows(self.axes[symbol], dim.extent_expr):
                raise self.refuse(f"positions of {self.axes[symbol]} may be past the end of {tensor.name}")
        whole = rows is None and not conditions
        self.results[tensor] = view, tuple(ends) if rows is None else (None, *ends[2:]), whole


def _names_of(node: Statement) -> list[object]:
    return [node.tensor.name] if isinstance(node, Write) else [node.local.name] if hasattr(node, "local") else []


def _contribution(value: Value, local: Local) -> tuple[str, Value] | None:
    """The reduction by which a private block is updated, and what is combined into it: `local = local op x`."""
    if isinstance(value, Call) and value.function == "where" and _is_held(value.args[2], local):
        inner = _contribution(value.args[1], local)
        if inner is None or _mentions(value.args[0], local):
            return None
        name, x = inner
        return name, call("where", value.args[0], x, constant(reduction(name).identity(0, x.dtype), x.dtype), dtype=x.dtype)
    if isinstance(value, Call) and value.function in OPERATORS:
        for old, x in (value.args, value.args[::-1]):
            if _is_held(old, local) and not _mentions(x, local):
                return OPERATORS[value.function], x
    return None


def _is_held(value: Value, local: Local) -> bool:
    return isinstance(value, Held) and value.local.name == local.name


def _mentions(value: Value, local: Local) -> bool:
    return any(_is_held(v, local) for v in value.walk())


def _folded(value: Value, args: tuple[Value, ...] | None = None) -> Value:
    """A call with these arguments, simplified for initial values of carried blocks: adding to 0, the maximum with the lowest
    number, and scaling 0 by any factor, as for a row without elements."""
    assert isinstance(value, Call)
    args = value.args if args is None else args
    numbers = [a.number if isinstance(a, Constant) else None for a in args]
    if value.function == "add" and 0 in numbers and None in numbers:
        return _cast(args[1 - numbers.index(0)], value.dtype)
    if value.function == "mul" and 0 in numbers and value.dtype.is_floating_point:
        return constant(0, value.dtype)
    if value.function == "maximum" and float("-inf") in numbers:
        return _cast(args[1 - numbers.index(float("-inf"))], value.dtype)
    if value.function == "minimum" and float("inf") in numbers:
        return _cast(args[1 - numbers.index(float("inf"))], value.dtype)
    if value.function == "where" and args[1] is args[2]:
        return args[1]
    return call(value.function, *args, dtype=value.dtype)


def _cast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else call("cast", value, dtype=dtype)


__all__ = ["LiftedLoop", "Limit", "NotLifted", "Source", "lift"]
