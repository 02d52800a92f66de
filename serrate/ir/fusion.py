"""Fusion: the math on tensors over domains, with no word about loops.

In: inputs and operations (`serrate.ops`), recorded under `with Fusion() as f`. Out: a list of definitions in order, each
one statement of the tile grammar with the domains it runs over; the compiler lowers them one by one. `evaluate` and
`compile` are installed by the engine.

    with Fusion() as f:
        x = f.input((None, 64), torch.float32)         # T0[n0, 64]
        off = f.input((None,), torch.int64)            # T1[n1]
        y = ops.softmax(ops.as_nested(x, off), dim=1)
        f.output(y)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from serrate.errors import CallError, ShapeError, TraceError
from serrate.ir import check
from serrate.ir.clone import Cloner
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Environment, Expr, Symbol, as_expr, symbol
from serrate.ir.hooks import installed
from serrate.ir.order import in_order
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.same import structure_key
from serrate.ir.storage import storage_of
from serrate.ir.tile import Accumulate, Leaf, Library, Scan, Store
from serrate.ir.traversal import traverse
from serrate.ir.values import Role, Tensor
from serrate.ir.view import TensorView

_current: ContextVar[Fusion | None] = ContextVar("fusion", default=None)


@dataclass(frozen=True, eq=False)
class Definition:
    """One operation: a statement and the domains it is computed for."""

    statement: Leaf | Library
    domains: tuple[IterDomain, ...]


@dataclass(frozen=True)
class Equal:
    """Something to check when the program is called: two extents, or two arrays of offsets, must be equal."""

    left: Expr | Array
    right: Expr | Array
    what: str


@dataclass(frozen=True)
class AtLeastLongest:
    """Something to check when the program is called: a dense operand must reach as far as the longest row."""

    extent: Expr
    ragged: RaggedIterDomain
    what: str


@dataclass(frozen=True)
class Offsets:
    """Something to check when the program is called: offsets start at 0, do not decrease and end at `extent`."""

    offsets: Array
    extent: Expr


@dataclass(frozen=True)
class RowsOfOffsets:
    """Something to check when the program is called: rows of `count` + 1 offsets each start at 0, do not decrease and end at
    the extent of `domain` (of its row, where it is ragged)."""

    offsets: Array
    count: Expr
    domain: IterDomain


@dataclass(frozen=True)
class RowsInside:
    """Something to check when the program is called: rows by starts and lengths are in order and end before `extent`."""

    starts: Array
    lengths: Array
    extent: Expr


@dataclass(frozen=True)
class Rectangles:
    """Something to check when the program is called: offsets of rows and of columns, whose products fill `extent`.

    With `starts`, rectangles may leave gaps: they are in order and end before `extent`. Columns that are not packed take no
    positions.
    """

    rows: Array
    columns: Array
    extent: Expr
    starts: Array | None = None
    packed: bool = True


@dataclass(frozen=True)
class PositionInside:
    """Something to check when the program is called: a position that was asked for must be there."""

    position: int
    extent: Expr
    what: str


@dataclass(frozen=True)
class IndicesInside:
    """Something that the program finds out itself: which of the indices given to an indexing operator of torch is outside.

    `found` has no dims: one of the indices that are outside, or `NOTHING`. It is a result that only the engine sees.
    """

    found: Tensor
    indices: Tensor
    outside: Tensor
    """Which of the indices are outside: bools over the same dims."""
    extent: Expr | None
    """The extent of the dim that is indexed; None where it is the length of a row."""
    what: str


NOTHING = torch.iinfo(torch.int64).max
"""What `IndicesInside.found` holds where every index is inside."""

Check = Equal | AtLeastLongest | Offsets | RowsOfOffsets | RowsInside | Rectangles | PositionInside


Step = tuple[str, tuple[str | int, ...]]
"""A schedule primitive's name and its arguments, the phase first."""


class LoopSchedule(Protocol):
    """What a fusion knows of the schedule that was made for it by hand; `schedule.hand` has the rest."""

    @property
    def steps(self) -> tuple[Step, ...]: ...

    def is_partial(self, tensor: Tensor) -> bool: ...

    def cloned(self, cloner: Cloner, kept: Container[str]) -> LoopSchedule | None: ...


@dataclass(eq=False, repr=False)
class Fusion:
    """A recorded program. Use as a context manager, or pass to `ops` through its tensors.

    `==` compares what is recorded, whatever things are called and however they are scheduled; a fusion can still grow, so
    that it has no hash of its own: `key()` is what to put in a dict.

    >>> from serrate import ops
    >>> with Fusion() as f:
    ...     f.output(ops.relu(f.input((8,), torch.float32)))
    >>> f == f.clone(), f.key() == f.clone().key(), f is f.clone()
    (True, True, False)
    """

    name: str = "fusion"
    inputs: list[TensorView] = field(default_factory=list)
    outputs: list[TensorView] = field(default_factory=list)
    definitions: list[Definition] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    index_checks: list[IndicesInside] = field(default_factory=list)
    """The checks that the program makes itself."""
    schedule: LoopSchedule | None = None
    """How loops were changed by hand; None where none were."""
    sizes: dict[Symbol, int] = field(default_factory=dict)
    """What unknown extents are in the call that is being traced: for messages, and for `fixed`."""
    device: str | None = None
    """The type of device of the call that is being traced."""
    fixed_symbols: set[Symbol] = field(default_factory=set)
    """Unknown extents that the traced function asked for as numbers."""
    overwritten: set[Tensor] = field(default_factory=set)
    """Tensors that a traced function wrote to in place, and that nothing may read since."""
    identity: str = field(default_factory=lambda: secrets.token_hex(8))
    """Which program this is; clones and pickles are the same one. Structures of two programs never pair."""
    _views: dict[Tensor, TensorView] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _token: Any = field(default=None)

    def __enter__(self) -> Fusion:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def __getstate__(self) -> dict[str, Any]:
        # Which fusion was being recorded before this one is a fact about this process.
        return {**self.__dict__, "_token": None}

    def fresh(self, prefix: str) -> str:
        """A name not used before: `d0`, `d1`, ..."""
        number = self._numbers.get(prefix, 0)
        self._numbers[prefix] = number + 1
        return f"{prefix}{number}"

    # --- recording -----------------------------------------------------------------------------------------------------

    def input(self, shape: Sequence[int | None], dtype: torch.dtype) -> TensorView:
        """Declares an argument; None is an extent known only when the program is called."""
        domains = tuple(
            IterDomain(symbol(self.fresh("n")) if size is None else as_expr(size), name=self.fresh("d")) for size in shape
        )
        view = self.view(Tensor(self.fresh("T"), dtype, domains, domains, Role.INPUT))
        self.inputs.append(view)
        return view

    def output(self, *views: TensorView) -> None:
        """Declares results, in order."""
        for view in views:
            if view.fusion is not self:
                raise ShapeError(f"output: {view} belongs to another fusion")
            view.check_current()
            self.outputs.append(view if in_order(view.tensor) else self._ordered(view))

    def _ordered(self, view: TensorView) -> TensorView:
        """The elements of a view in the order of its dims."""
        out = self.tensor(view.dtype, view.domains)
        return self.define([out], view.domains, Store(out, view.domains, view.at(view.domains)))[0]

    def view(self, tensor: Tensor) -> TensorView:
        """The handle of a tensor: always the same one."""
        if tensor not in self._views:
            self._views[tensor] = TensorView(tensor, self)
        return self._views[tensor]

    def define(
        self, tensors: Sequence[Tensor], domains: Sequence[IterDomain], statement: Leaf | Library
    ) -> tuple[TensorView, ...]:
        """Records one operation and returns views of what it writes."""
        self.definitions.append(Definition(statement, tuple(domains)))
        return tuple(self.view(t) for t in tensors)

    def tensor(self, dtype: torch.dtype, logical: Sequence[IterDomain]) -> Tensor:
        """A new intermediate tensor over `logical`, its rows stored back to back."""
        return Tensor(self.fresh("T"), dtype, tuple(logical), storage_of(logical))

    def fixed(self, extent: Expr) -> int:
        """What an extent is in the call that is being traced, as a number; what is traced is then for this number alone."""
        if extent.value is not None:
            return extent.value
        if extent.arrays or not extent.symbols <= self.sizes.keys():
            raise TraceError(f"the size {extent} is not known while tracing")
        self.fixed_symbols |= extent.symbols
        return int(extent.evaluate(Environment(self.sizes)))

    @property
    def results(self) -> list[TensorView]:
        """Everything that must be computed: the outputs, then what the program's own checks have found."""
        return [*self.outputs, *(self.view(c.found) for c in self.index_checks)]

    # --- traversal -----------------------------------------------------------------------------------------------------

    def every_tensor(self) -> list[Tensor]:
        """Inputs, then in the order of definitions what each reads through a view and what it writes, then viewed outputs."""
        found: dict[Tensor, None] = dict.fromkeys(view.tensor for view in self.inputs)
        for definition in self.definitions:
            found.update(dict.fromkeys(_read_by(definition)))
            found.update(dict.fromkeys(definition.statement.targets))
        found.update(dict.fromkeys(view.tensor for view in self.results))
        return list(found)

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        """Every tensor of the fusion, views included, each before those that are computed from it."""
        return tuple(map(self.view, self.every_tensor()))

    def definition_of(self, tensor: Tensor) -> Definition | None:
        """The operation that writes `tensor`."""
        return next((d for d in self.definitions if tensor in d.statement.targets), None)

    def producers(self, view: TensorView) -> tuple[TensorView, ...]:
        """What a tensor is computed from directly; of a view, the tensor it views."""
        return tuple(map(self.view, self._before(view.tensor)))

    def consumers(self, view: TensorView) -> tuple[TensorView, ...]:
        """What is computed from a tensor directly, views of it included."""
        return tuple(self.view(t) for t in self.every_tensor() if view.tensor in self._before(t))

    def reaches(self, source: TensorView | Tensor, target: TensorView | Tensor) -> bool:
        """Whether `target` is computed from `source`, directly or not."""
        wanted = source.tensor if isinstance(source, TensorView) else source
        pending = self._before(target.tensor if isinstance(target, TensorView) else target)
        seen: set[Tensor] = set()
        while pending:
            tensor = pending.pop()
            if tensor is wanted:
                return True
            if tensor not in seen:
                seen.add(tensor)
                pending.extend(self._before(tensor))
        return False

    def _before(self, tensor: Tensor) -> list[Tensor]:
        if tensor.base is not None:
            return [tensor.base]
        definition = self.definition_of(tensor)
        return [] if definition is None else list(_read_by(definition))

    def live(self) -> list[Definition]:
        """The definitions that results depend on, in order: by reading, or because rows are as long as they say."""
        needed = {view.tensor.memory for view in self.results}
        lengths = {name for view in self.results for name in _offsets_of(view.tensor.logical)}
        kept: list[Definition] = []
        for definition in reversed(self.definitions):
            if any(t in needed or t.name in lengths for t in definition.statement.targets):
                kept.append(definition)
                reads = _read_by(definition)
                needed.update(t.memory for t in reads)
                lengths.update(_offsets_of(definition.domains))
                lengths.update(name for t in reads for name in _offsets_of(t.logical))
        return kept[::-1]

    # --- the whole -----------------------------------------------------------------------------------------------------

    def clone(self) -> Fusion:
        """The same program, made of new tensors and domains; its schedule comes along.

        The identity of structures stays: a component of the original pairs with its rows in the clone.
        """
        return self._copied(self.definitions)

    def simplified(self) -> Fusion:
        """A clone without the definitions that no output depends on. Inputs and the checks of a call stay as they are."""
        return self._copied(self.live())

    def _copied(self, definitions: Sequence[Definition]) -> Fusion:
        cloner, new = Cloner(), Fusion(self.name, identity=self.identity)
        new._numbers = dict(self._numbers)
        new.inputs = [new.view(cloner(view.tensor)) for view in self.inputs]
        new.definitions = [cloner(d) for d in definitions]
        new.outputs = [new.view(cloner(view.tensor)) for view in self.outputs]
        new.checks = [cloner(c) for c in self.checks]
        new.index_checks = [cloner(c) for c in self.index_checks]
        if self.schedule is not None:
            new.schedule = self.schedule.cloned(cloner, {d.statement.targets[0].name for d in definitions})
            for tensor in self._views:
                if new.is_partial(tensor):
                    new.view(cloner(tensor))
        return new

    def is_partial(self, tensor: Tensor) -> bool:
        """Whether a tensor is the partial result of a reduction that a schedule has factored: no part of the math."""
        return self.schedule is not None and self.schedule.is_partial(tensor)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The changes of loops made by hand, as primitives with their arguments, in order."""
        return () if self.schedule is None else self.schedule.steps

    def key(self) -> tuple[Hashable, ...]:
        """What is recorded, as a hashable value that does not depend on names; equal iff the fusions are."""
        return structure_key(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fusion) and (self is other or self.key() == other.key())

    __hash__ = None  # type: ignore[assignment]  # what can still change has no hash

    def verify(self) -> None:
        """Raises unless what is recorded is a program; `ir.check` has the rules."""
        check.verify(self)

    def draw(self) -> Any:
        """A picture of the fusion: tensors with their domains, and the operations between them."""
        return installed("draw")(self)

    def __str__(self) -> str:
        lines = [f"fusion {self.name}"]
        lines += [f"  input  {v.tensor}" for v in self.inputs]
        shown = {v.tensor for v in self.inputs}
        for definition in self.definitions:
            statement = definition.statement
            lines += _view_lines(_read_by(definition), shown)
            targets = ", ".join(map(str, statement.targets))
            values = ", ".join(map(str, statement.values))
            if isinstance(statement, Accumulate):
                values = f"{statement.reduction} {values}  over {', '.join(d.name for d in statement.over)}"
            elif isinstance(statement, Scan):
                values = f"running {statement.reduction} of {values}  over {statement.over[0].name}"
            elif isinstance(statement, Library):
                values = f"{statement.function} {', '.join([values, *map(str, statement.options)])}"
            lines.append(f"  {targets} = {values}")
        lines += _view_lines([v.tensor for v in self.outputs], shown)
        lines += [f"  output {v.tensor.name}" for v in self.outputs]
        lines += [f"  check  {c.found.name}: {c.what}" for c in self.index_checks]
        return "\n".join(lines) + "\n"

    __repr__ = __str__

    # --- running -------------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any) -> Any:
        """Runs the program on the reference interpreter."""
        return installed("evaluate")(self, *args)

    def compile(self, backend: str | None = None, strategy: str | None = None, **options: Any) -> Callable[..., Any]:
        """The program compiled for a backend under a strategy; both are chosen when not given.

        A schedule made by hand is what runs, unless a strategy is named.
        """
        compiled: Callable[..., Any] = installed("compile")(self, backend=backend, strategy=strategy, **options)
        return compiled


def _read_by(definition: Definition) -> dict[Tensor, None]:
    """The tensors that a definition reads, views as they are, in the order in which its values are written."""
    found: dict[Tensor, None] = {}
    for value in definition.statement.values:
        # A walk goes through arguments from the last to the first.
        found.update(dict.fromkeys(r.tensor for r in reversed(value.reads)))
    return found


def _view_lines(tensors: Iterable[Tensor], shown: set[Tensor]) -> list[str]:
    """One line for each view that has not been shown, in front of what reads it."""
    new = [t for t in tensors if t.base is not None and t not in shown]
    shown.update(new)
    return [f"  {t} = view of {t.memory.name}" for t in new]


def _offsets_of(domains: Iterable[IterDomain]) -> set[str]:
    """The names of the arrays that the lengths of rows in these domains come from."""
    return {node.name for domain in domains for node in traverse(domain) if isinstance(node, Array)}


def current_fusion() -> Fusion:
    """The fusion of the enclosing `with` block."""
    fusion = _current.get()
    if fusion is None:
        raise CallError("operations on plain numbers need a fusion: write them inside `with ir.Fusion() as f:`")
    return fusion
