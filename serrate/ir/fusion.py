"""Fusion: math on tensors over domains, without loops.

In: inputs and operations (`serrate.ops`), recorded under `with Fusion() as f`. Out: an ordered list of definitions, each one
statement of the tile grammar with the domains it runs over; the compiler lowers them one by one. The engine installs
`evaluate` and `compile`.

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
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from serrate.errors import CallError, ShapeError, TraceError
from serrate.ir import check
from serrate.ir.clone import Cloner
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Environment, Expr, Symbol, as_expr, symbol
from serrate.ir.hooks import installed
from serrate.ir.memory_order import in_order
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.storage import storage_of
from serrate.ir.structural_key import structure_key
from serrate.ir.tile import Accumulate, Leaf, Library, Scan, Store
from serrate.ir.traversal import arrays_in, arrays_of
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
    """A check at each call: two extents, or two arrays of offsets, must be equal."""

    left: Expr | Array
    right: Expr | Array
    what: str


@dataclass(frozen=True)
class AtLeastLongest:
    """A check at each call: a dense operand must be at least as long as the longest row."""

    extent: Expr
    ragged: RaggedIterDomain
    what: str


@dataclass(frozen=True)
class Offsets:
    """A check at each call: offsets start at 0, do not decrease and end at `extent`."""

    offsets: Array
    extent: Expr


@dataclass(frozen=True)
class RowsOfOffsets:
    """A check at each call: rows of `count` + 1 offsets each start at 0, do not decrease and end at the extent of `domain` (of
    its row, if it is ragged)."""

    offsets: Array
    count: Expr
    domain: IterDomain


@dataclass(frozen=True)
class RowsInside:
    """A check at each call: rows given by starts and lengths are in order and end before `extent`."""

    starts: Array
    lengths: Array
    extent: Expr


@dataclass(frozen=True)
class Products:
    """A check at each call: offsets of rows and of columns, whose products fill `extent`.

    With `starts`, there may be gaps between products, which are in order and end before `extent`. Columns that are not packed
    take no positions.
    """

    rows: Array
    columns: Array
    extent: Expr
    starts: Array | None = None
    packed: bool = True


@dataclass(frozen=True)
class PositionInside:
    """A check at each call: a requested position must exist."""

    position: int
    extent: Expr
    what: str


@dataclass(frozen=True)
class IndicesInside:
    """A check inside the program: indices of a torch indexing operator must be in range.

    `found` is a scalar: one of the indices out of range, or `NOTHING`. Only the engine sees this result.
    """

    found: Tensor
    indices: Tensor
    outside: Tensor
    """Which of the indices are out of range: bools over the same dims."""
    extent: Expr | None
    """The extent of the indexed dim; None if it is the length of a row."""
    what: str


NOTHING = torch.iinfo(torch.int64).max
"""The value of `IndicesInside.found` if every index is in range."""

Check = Equal | AtLeastLongest | Offsets | RowsOfOffsets | RowsInside | Products | PositionInside


Step = tuple[str, tuple[str | int, ...]]
"""A schedule primitive's name and its arguments, the phase first."""


class LoopSchedule(Protocol):
    """The interface of a fusion's schedule by hand; `schedule.hand` implements it."""

    @property
    def steps(self) -> tuple[Step, ...]: ...

    def is_partial(self, tensor: Tensor) -> bool: ...

    def cloned(self, cloner: Cloner, kept: Container[str]) -> LoopSchedule | None: ...


@dataclass(frozen=True, eq=False)
class RaggedInput:
    """A ragged argument: the view that operations take, and which inputs of the fusion it consists of."""

    view: TensorView
    values: int
    buffers: tuple[int, ...]
    structure: object
    """A `Structure` that is described in the same way."""
    like: int | None
    """The values of the input that has the same rows, and whose buffers these are."""


@dataclass(eq=False, repr=False)
class Fusion:
    """A recorded program. Use as a context manager, or pass to `ops` through its tensors.

    `==` compares what is recorded, ignoring names and schedules. A fusion can still grow, so it is not hashable: use `key()` in a
    dict.

    >>> from serrate import ops
    >>> with Fusion() as f:
    ...     f.output(ops.relu(f.input((8,), torch.float32)))
    >>> f == f.clone(), f.key() == f.clone().key(), f is f.clone()
    (True, True, False)
    """

    name: str = "fusion"
    inputs: list[TensorView] = field(default_factory=list)
    seeds: list[TensorView] = field(default_factory=list)
    """The last inputs, which callers do not pass: every call draws them from torch's generator."""
    outputs: list[TensorView] = field(default_factory=list)
    definitions: list[Definition] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    index_checks: list[IndicesInside] = field(default_factory=list)
    """Checks that the program makes itself."""
    schedule: LoopSchedule | None = None
    """The schedule by hand, if any."""
    sizes: dict[Symbol, int] = field(default_factory=dict)
    """Values of unknown extents in the call being traced: for messages, and for `fixed`."""
    device: torch.device | None = None
    """The device of the call being traced; programs are not shared between devices."""
    fixed_symbols: set[Symbol] = field(default_factory=set)
    """Unknown extents whose value the traced function used."""
    overwritten: set[Tensor] = field(default_factory=set)
    """Tensors that a traced function has overwritten in place, which may no longer be read."""
    identity: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identifies the program, and is the same in clones and pickles. Structures of two programs never pair."""
    ragged: list[RaggedInput] = field(default_factory=list)
    """The inputs that were declared with a structure."""
    _views: dict[Tensor, TensorView] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _token: Any = field(default=None)

    def __enter__(self) -> Fusion:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def __getstate__(self) -> dict[str, Any]:
        # The fusion that was being recorded before this one is state of this process.
        return {**self.__dict__, "_token": None}

    def fresh(self, prefix: str) -> str:
        """An unused name: `d0`, `d1`, ..."""
        number = self._numbers.get(prefix, 0)
        self._numbers[prefix] = number + 1
        return f"{prefix}{number}"

    # --- recording -----------------------------------------------------------------------------------------------------

    def input(self, shape: Sequence[int | None], dtype: torch.dtype, *, structure: object = None) -> TensorView:
        """Declares an argument; None is an extent known only at run time.

        With a `structure` the argument is ragged: a call takes a `JaggedTensor` whose values have this shape, and whose rows are
        described as those of the structure are (as many levels, with or without gaps and columns). Another ragged input in its
        place says that both have the same rows.

        >>> from serrate import JaggedTensor, ops
        >>> jt = JaggedTensor.from_lengths(torch.ones(3, 2), [2, 1])
        >>> with Fusion() as f:
        ...     x = f.input((None, 2), torch.float32, structure=jt.structure)
        ...     f.output(ops.sum(x, 1))
        >>> f.evaluate(jt)
        tensor([[2., 2.],
                [1., 1.]])
        """
        if structure is not None:
            ragged: TensorView = installed("ragged_input")(self, shape, dtype, structure)
            return ragged
        domains = tuple(
            IterDomain(symbol(self.fresh("n")) if size is None else as_expr(size), name=self.fresh("d")) for size in shape
        )
        view = self.view(Tensor(self.fresh("T"), dtype, domains, domains, Role.INPUT))
        self.inputs.insert(len(self.inputs) - len(self.seeds), view)
        return view

    def seed(self) -> TensorView:
        """Declares a seed: an int64 that every call draws; a call draws one per seed, in this order."""
        view = self.view(Tensor(self.fresh("T"), torch.int64, (), (), Role.INPUT))
        self.inputs.append(view)
        self.seeds.append(view)
        return view

    def output(self, *views: TensorView) -> None:
        """Declares results, in order."""
        for view in views:
            if not isinstance(view, TensorView):
                raise CallError(f"output: a result must be a tensor of the fusion, got {view!r}")
            if view.fusion is not self:
                raise ShapeError(f"output: {view} belongs to another fusion")
            view.check_current()
            self.outputs.append(view if in_order(view.tensor) else self._ordered(view))

    def _ordered(self, view: TensorView) -> TensorView:
        """A view whose elements lie in memory in the order of its dims."""
        out = self.tensor(view.dtype, view.domains)
        return self.define([out], view.domains, Store(out, view.domains, view.at(view.domains)))[0]

    def view(self, tensor: Tensor) -> TensorView:
        """The handle of a tensor, always the same object."""
        if tensor not in self._views:
            self._views[tensor] = TensorView(tensor, self)
        return self._views[tensor]

    def define(
        self, tensors: Sequence[Tensor], domains: Sequence[IterDomain], statement: Leaf | Library
    ) -> tuple[TensorView, ...]:
        """Records one operation and returns views of its results."""
        self.definitions.append(Definition(statement, tuple(domains)))
        return tuple(self.view(t) for t in tensors)

    def tensor(self, dtype: torch.dtype, logical: Sequence[IterDomain]) -> Tensor:
        """A new intermediate tensor over `logical`, its rows stored back to back."""
        return Tensor(self.fresh("T"), dtype, tuple(logical), storage_of(logical))

    def fixed(self, extent: Expr) -> int:
        """The value of an extent in the call being traced; the trace is then valid for this value only."""
        if extent.value is not None:
            return extent.value
        if extent.arrays or not extent.symbols <= self.sizes.keys():
            raise TraceError(f"the size {extent} is not known while tracing")
        self.fixed_symbols |= extent.symbols
        return int(extent.evaluate(Environment(self.sizes)))

    @property
    def results(self) -> list[TensorView]:
        """Everything that must be computed: the outputs, then the results of the program's own checks."""
        return [*self.outputs, *(self.view(c.found) for c in self.index_checks)]

    # --- traversal -----------------------------------------------------------------------------------------------------

    def every_tensor(self) -> list[Tensor]:
        """Inputs, then for each definition the views it reads and the tensors it writes, then outputs that are views."""
        found: dict[Tensor, None] = dict.fromkeys(view.tensor for view in self.inputs)
        for definition in self.definitions:
            found.update(dict.fromkeys(_read_by(definition)))
            found.update(dict.fromkeys(definition.statement.targets))
        found.update(dict.fromkeys(view.tensor for view in self.results))
        return list(found)

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        """Every tensor of the fusion, including views, in dependency order."""
        return tuple(map(self.view, self.every_tensor()))

    def definition_of(self, tensor: Tensor) -> Definition | None:
        """The operation that writes `tensor`."""
        return next((d for d in self.definitions if tensor in d.statement.targets), None)

    def producers(self, view: TensorView) -> tuple[TensorView, ...]:
        """The tensors this one is computed from directly; for a view, the tensor it refers to."""
        return tuple(map(self.view, self._before(view.tensor)))

    def consumers(self, view: TensorView) -> tuple[TensorView, ...]:
        """The tensors computed directly from this one, including views of it."""
        return tuple(self.view(t) for t in self.every_tensor() if view.tensor in self._before(t))

    def reaches(self, source: TensorView | Tensor, target: TensorView | Tensor) -> bool:
        """Whether `target` is computed from `source`, directly or indirectly."""
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
        """The definitions that results depend on, in order: because they read them, or because row lengths do."""
        return live(self.definitions, self.results)

    # --- the whole -----------------------------------------------------------------------------------------------------

    def clone(self) -> Fusion:
        """A copy with new tensors and domains, including the schedule.

        Structures keep their identity: a component of the original pairs with its rows in the clone.
        """
        return self._copied(self.definitions)

    def simplified(self) -> Fusion:
        """A clone without dead definitions. Inputs and checks are kept."""
        return self._copied(self.live())

    def _copied(self, definitions: Sequence[Definition]) -> Fusion:
        cloner, new = Cloner(), Fusion(self.name, identity=self.identity)
        new._numbers = dict(self._numbers)
        new.inputs = [new.view(cloner(view.tensor)) for view in self.inputs]
        new.ragged = [replace(r, view=new.view(cloner(r.view.tensor))) for r in self.ragged]
        new.seeds = new.inputs[len(self.inputs) - len(self.seeds) :]
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
        """Whether a tensor is a partial result introduced by `rfactor`, and so not part of the math."""
        return self.schedule is not None and self.schedule.is_partial(tensor)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The schedule by hand, as primitives with their arguments, in order."""
        return () if self.schedule is None else self.schedule.steps

    def key(self) -> tuple[Hashable, ...]:
        """A hashable key that does not depend on names; equal iff the fusions are."""
        return structure_key(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fusion) and (self is other or self.key() == other.key())

    __hash__ = None  # type: ignore[assignment]  # mutable

    def verify(self) -> None:
        """Raises `VerificationError` unless the fusion is well-formed; `ir.check` has the rules."""
        check.verify(self)

    def draw(self) -> Any:
        """A picture of the fusion: tensors with their domains, and the operations between them."""
        return installed("draw")(self)

    def __str__(self) -> str:
        lines = [f"fusion {self.name}"]
        given = len(self.inputs) - len(self.seeds)
        lines += [f"  {'input' if k < given else 'seed '}  {v.tensor}" for k, v in enumerate(self.inputs)]
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
        return self._engine("evaluate")(self, *args)

    def compile(self, backend: str | None = None, strategy: str | None = None, **options: Any) -> Callable[..., Any]:
        """Compiles the program for a backend and a strategy; both are chosen automatically by default.

        A schedule by hand is used unless a strategy is named. `save` says what the program keeps for its gradients, as in
        `serrate.jit`; other options are those of the strategy.
        """
        compiled: Callable[..., Any] = self._engine("compile")(self, backend=backend, strategy=strategy, **options)
        return compiled

    def _engine(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = installed(name)
        if not self.outputs:
            raise CallError(f"{self.name} has no outputs: declare its results with f.output(...)")
        return found


def live(definitions: Sequence[Definition], results: Sequence[TensorView]) -> list[Definition]:
    """The definitions that results depend on, in order: because they read them, or because row lengths do."""
    needed = {view.tensor.memory for view in results}
    arrays = {array.name for view in results for array in arrays_of(view.tensor.logical)}
    kept: list[Definition] = []
    for definition in reversed(definitions):
        if any(t in needed or t.name in arrays for t in definition.statement.targets):
            kept.append(definition)
            reads = _read_by(definition)
            needed.update(t.memory for t in reads)
            domains = [*definition.domains, *(d for t in reads for d in t.logical)]
            values = definition.statement.values
            arrays.update(array.name for array in arrays_of(domains).union(*map(arrays_in, values)))
    return kept[::-1]


def _read_by(definition: Definition) -> dict[Tensor, None]:
    """The tensors a definition reads, including views, in source order."""
    found: dict[Tensor, None] = {}
    for value in definition.statement.values:
        # A walk visits arguments from last to first.
        found.update(dict.fromkeys(r.tensor for r in reversed(value.reads)))
    return found


def _view_lines(tensors: Iterable[Tensor], shown: set[Tensor]) -> list[str]:
    """One line for each view not shown yet, before its reader."""
    new = [t for t in tensors if t.base is not None and t not in shown]
    shown.update(new)
    return [f"  {t} = view of {t.memory.name}" for t in new]


def current_fusion() -> Fusion:
    """The fusion of the enclosing `with` block."""
    fusion = _current.get()
    if fusion is None:
        raise CallError("operations on plain numbers need a fusion: write them inside `with ir.Fusion() as f:`")
    return fusion
