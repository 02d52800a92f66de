"""A device loop as a fusion, from which its gradient can be derived.

In: the tile program of a loop. Out: a fusion of the same math, and where its inputs come from; or `NotLifted`, which says what is
in the way. The result of a kernel does not depend on the size of its tiles, so every tile is taken to be all of its axis: each
loop then runs once, a carried value has its first value when the loop reads it, and private blocks become tensors.

    serial k < max_length:                                              ->    T5[c, m] sum= T2[c, r, m] over r
      [b, k, m] sums sum= jt[offsets[b] + k, m]  where k < length of b

A position that only counts where a row is that long becomes a position of the row. Conditions that are left choose between a
value and what stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from serrate.errors import SerrateError
from serrate.frontend.broadcast import under
from serrate.frontend.ops.structure import as_nested
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Element, Expr, Less, Symbol
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
    symbols_of,
)
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import SUM, Reduction, reduction
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

Line = int | None


class NotLifted(Exception):
    """What keeps a loop from being a fusion, and its line, if that is known."""

    def __init__(self, reason: str, line: Line) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


class Source(NamedTuple):
    """What an input of the fusion is: a tensor of the loop, an array that describes rows, or a tensor of any contents whose size
    is a number of the loop."""

    kind: Literal["tensor", "array", "size"]
    what: Tensor | Array | Expr


class Limit(NamedTuple):
    """At each call, the positions of an axis must end at `end` or before."""

    axis: Axis
    last: Expr
    end: Expr


@dataclass(frozen=True)
class LiftedLoop:
    """A fusion with the results of a loop."""

    fusion: Fusion
    sources: tuple[Source, ...]
    """What each input of the fusion is."""
    stored: tuple[Tensor, ...]
    """The tensor of the loop that each result is stored to."""
    shapes: tuple[tuple[Expr | None, ...], ...]
    """The part of each stored tensor that is stored, from the first element on; None for all of a dim."""
    limits: tuple[Limit, ...]


def lift(program: TileProgram, lines: Mapping[object, int]) -> LiftedLoop:
    """The fusion of a loop; `lines` are those of loads, by value, and of stores and blocks, by name."""
    return _Lifting(program, lines).run()


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
    fusion: Fusion = field(init=False)
    sources: list[Source] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    blocks: dict[str, Value | tuple[Tensor, tuple[Symbol, ...]]] = field(default_factory=dict)
    """What each private block holds: a number, or a tensor over these axes."""
    locals: dict[str, Local] = field(default_factory=dict)
    shapes: dict[str, tuple[Symbol, ...]] = field(default_factory=dict)
    """The axes of each private block."""
    results: dict[Tensor, tuple[TensorView, tuple[Expr | None, ...]]] = field(default_factory=dict)
    inside: dict[str, frozenset[Symbol]] = field(default_factory=dict)
    """The axes of the loops in which each private block is declared."""
    looped: frozenset[Symbol] = frozenset()
    """The axes of the loops around a statement."""
    around: tuple[Symbol, ...] = ()
    """The axes of the loops around a statement that run over single positions: they are not lanes, and count like those."""
    line: Line = None
    """Of the statement that is being lifted, if it is known."""

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
        self.views: dict[object, TensorView] = {}
        self.sizes: dict[Expr, Expr] = {}
        self.domains: dict[Symbol, IterDomain] = {}
        self.rows: dict[Symbol, CountedRows] = {}

    def refuse(self, reason: str, line: Line = None) -> NotLifted:
        return NotLifted(reason, line if line is not None else self.line)

    def run(self) -> LiftedLoop:
        (phase,) = self.program.phases
        with self.fusion:
            self._find_rows(phase.body)
            try:
                for node in phase.body:
                    self._statement(node)
            except SerrateError as error:
                raise self.refuse(str(error)) from error
        for tensor in self.program.outputs:
            if tensor not in self.results:
                raise self.refuse(f"nothing that is lifted is stored to {tensor.name}", self.lines.get(tensor.name))
        self.fusion.output(*(view for view, _ in self.results.values()))
        shapes = tuple(shape for _, shape in self.results.values())
        return LiftedLoop(self.fusion, tuple(self.sources), tuple(self.results), shapes, tuple(self.limits))

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
        for node in statements(body):
            if not isinstance(node, Write | Reduce | Dot):
                continue
            counting = node.lanes[-1:] if isinstance(node, Dot) else node.lanes
            for lane in counting:
                tests = (self._row_test(test.substitute(self.whole), lane.symbol) for test in node.guard)
                here = [rows for rows in tests if rows is not None]
                before = found.get(lane.symbol, here)
                found[lane.symbol] = [rows for rows in before if rows in here]
        self.rows = {axis: rows[0] for axis, rows in found.items() if rows}

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
            component, own = self.domain(rows.component), self._rows_of(rows)
            self.domains[symbol] = under(component, own, self.fusion.fresh("r"))
            return self.domains[symbol]
        counted = next((rows for rows in self.rows.values() if rows.component is symbol), None)
        if counted is not None:
            own = self._rows_of(counted)
            self._require(axis, axis.end, self.counts[counted.boundaries])
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
                raise self.refuse(f"no tensor has the rows of {rows.boundaries}")
            chosen = tensors[0]
            if chosen.role is Role.OUTPUT:
                stored = self._input(Source("size", chosen.storage[0].extent_expr), [chosen.storage[0].extent_expr], torch.uint8)
            else:
                stored = self.tensor(chosen)
            first = self.nested(stored, rows)
        return first.ragged

    def _has_rows(self, tensor: Tensor, rows: CountedRows) -> bool:
        """Whether a tensor is read or written at these rows."""
        (phase,) = self.program.phases
        for node in statements(phase.body):
            places = [node.index] if isinstance(node, Write) and node.tensor is tensor else []
            values = [getattr(node, name) for name in ("value", "left", "right") if hasattr(node, name)]
            places += [v.index for value in values for v in value.walk() if isinstance(v, Load) and v.tensor is tensor]
            if any(index and rows.boundaries in index[0].substitute(self.whole).arrays for index in places):
                return True
        return False

    def _uniform(self, number: Expr, what: str) -> Expr:
        """A number that is the same everywhere, as one of the fusion."""
        number = number.substitute(self.whole)
        if number.arrays or any(s in self.axes for s in number.symbols):
            raise self.refuse(f"{what} is computed in the kernel")
        return number.substitute({s: self.size(s) for s in number.symbols})

    def _require(self, axis: Axis, last: Expr, end: Expr) -> None:
        last, end = last.substitute(self.whole), end.substitute(self.whole)
        if last is not end and Limit(axis, last, end) not in self.limits:
            self.limits.append(Limit(axis, last, end))

    # --- conditions ------------------------------------------------------------------------------------------------------

    def conditions(self, guard: Guard) -> list[Value]:
        """The conditions that do not follow from the domains."""
        found = (self._condition(test.substitute(self.whole)) for test in guard)
        return [test for test in found if test is not None]

    def _condition(self, test: Less) -> Value | None:
        if test.proven:
            return None
        axis = next((a for s, a in self.axes.items() if s in test.left.symbols), None)
        if axis is not None and test.left.symbols == {axis.position}:
            if test.left is axis.position and test.right is axis.end.substitute(self.whole):
                return None
            rows = self.rows.get(axis.position)
            if rows is not None and self._row_test(test, axis.position) == rows:
                return None
            uniform = not test.right.arrays and not axis.end.arrays
            if uniform and not any(s in self.axes for s in test.right.symbols):
                self._require(axis, test.left.substitute({axis.position: axis.end}), test.right)
                return None
        sides = (self.number(e) for e in (test.left, test.right))
        return call("lt", *sides, dtype=torch.bool)

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
        if not e.index.symbols <= {
            s for lane in local.lanes for s in (self.axes[lane.symbol].lane, self.axes[lane.symbol].lanes)
        }:
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
            total = constant(1, torch.int64)
            for lane in value.lanes:
                total = call("mul", total, extent(self.domain(lane.symbol)), dtype=torch.int64)
            return total if value.dtype == torch.int64 else call("cast", total, dtype=value.dtype)
        if isinstance(value, Call):
            return _folded(value, tuple(map(self.value, value.args)))
        return None

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
            guard: Guard = tuple(test.substitute(self.whole) for test in value.guard)
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
                guard = tuple(test for test in guard if self._row_test(test, axis) != own)
            found = read(view.tensor, tuple(index), value.other)
            return self.masked(found, self.conditions(guard), constant(value.other, value.dtype))
        finally:
            self.line = before

    def _rows_at(self, index: Sequence[Expr], guard: Guard) -> tuple[Symbol, CountedRows] | None:
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
        self._require(axis, axis.end, self.counts[rows.boundaries])
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
            strange = next((c for c in node.carried if c.reduction is None), None)
            if strange is not None and (axis is None or axis.block is not None):
                line = self.lines.get(strange.locals[0].name)
                raise self.refuse(f"{strange} is carried from tile to tile, and is not a reduction", line)
            before = self.around, self.looped
            if axis is not None:
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
            self.inside[node.local.name] = self.looped
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
        if not self.axes.keys() & symbols_of(node.value) <= {*own}:
            raise self.refuse(f"{node.local.name} is carried from position to position")
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
        for axis in (self.axes[s].original for s in symbols if s not in own):
            if axis.block is not None and axis.position in self.inside[local.name]:
                raise self.refuse(f"{local.name} is reduced within {axis}, whose block size is fixed")
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
        guard = tuple(test.substitute(self.whole) for test in node.guard)
        rows = self._rows_at(at, guard)
        value = self.value(node.value)
        if rows is None:
            symbols = at
        else:
            axis, own = rows
            if self.rows.get(axis) != own:
                raise self.refuse(f"positions of {self.axes[axis]} are also stored, or reduced, where no row has them")
            symbols = [own.component, axis, *at[1:]]
            self._component(own)
        if any(s not in self.axes for s in symbols) or {*self.around, *(lane.symbol for lane in node.lanes)} != set(symbols):
            raise self.refuse(f"{tensor.name} is not stored once for each position of the tiles around it")
        if len(set(symbols)) != len(symbols):
            raise self.refuse(f"{tensor.name} is stored along a diagonal")
        if value.dtype != tensor.dtype:
            value = call("cast", value, dtype=tensor.dtype)
        value = self.masked(value, self.conditions(guard), constant(0, tensor.dtype))
        domains = tuple(self.domain(s) for s in symbols if isinstance(s, Symbol))
        target = self.fusion.tensor(tensor.dtype, domains)
        (view,) = self.fusion.define([target], domains, Store(target, domains, value))
        ends = [self.axes[s].end.substitute(self.whole) for s in symbols if isinstance(s, Symbol)]
        self.results[tensor] = view, tuple(ends) if rows is None else (None, *ends[2:])


def _names_of(node: Statement) -> list[object]:
    return [node.tensor.name] if isinstance(node, Write) else [node.local.name] if hasattr(node, "local") else []


def _folded(value: Value, args: tuple[Value, ...] | None = None) -> Value:
    """A call with these arguments. What the first value of a carried block does is not computed: a sum starts from 0, a maximum
    from the lowest number, and scaling 0 is still 0, by whatever factor, as for a row without elements."""
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
