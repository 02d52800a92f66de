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

import itertools
import os
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from serrate.errors import CallError, ShapeError, TraceError, VerificationError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Expr, as_expr, symbol
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.storage import storage_of
from serrate.ir.tile import Accumulate, Leaf
from serrate.ir.values import Read, Role, Tensor, Value, read

_current: ContextVar[Fusion | None] = ContextVar("fusion", default=None)


@dataclass(frozen=True, eq=False)
class Definition:
    """One operation: a statement and the domains it is computed for."""

    statement: Leaf
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


class TensorView:
    """A tensor of a fusion: what operations take and give. Supports Python operators and torch functions."""

    __slots__ = ("fusion", "tensor")
    operators: ClassVar[dict[Any, Callable[..., Any]]] = {}
    """torch functions and method names -> operations; filled by the front end."""

    def __init__(self, tensor: Tensor, fusion: Fusion) -> None:
        self.tensor, self.fusion = tensor, fusion

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def domains(self) -> tuple[IterDomain, ...]:
        """The logical domains, one for each dim."""
        return self.tensor.logical

    @property
    def ndim(self) -> int:
        return len(self.domains)

    @property
    def shape(self) -> tuple[Expr | int | str, ...]:
        """Extents; a ragged dim shows the name of its domain."""
        return tuple(d.name if d.is_ragged else d.extent for d in self.domains)

    @property
    def ragged(self) -> RaggedIterDomain:
        """The innermost ragged domain."""
        for domain in reversed(self.domains):
            if isinstance(domain, RaggedIterDomain):
                return domain
        raise ShapeError(f"{self} has no ragged dim")

    @property
    def component(self) -> IterDomain:
        """The domain that counts the components of `ragged`."""
        return self.ragged.component

    def at(self, index: Sequence[IterDomain | None]) -> Value:
        """The element at `index`, as a value."""
        return read(self.tensor, tuple(index))

    def __str__(self) -> str:
        return str(self.tensor)

    __repr__ = __str__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in cls.operators:
            raise CallError(f"{getattr(function, '__name__', function)} is not an operation on ragged tensors that can be traced")
        return cls.operators[function](*args, **(kwargs or {}))

    def __bool__(self) -> bool:
        raise TraceError(f"a branch on data cannot be traced ({user_line()}); write where(condition, a, b) instead")

    def __len__(self) -> int:
        raise TraceError(f"len() of a traced tensor is not known while tracing ({user_line()})")

    def __iter__(self) -> Any:
        raise TraceError(f"a traced tensor cannot be iterated over ({user_line()}); write an operation on all rows instead")

    def __float__(self) -> float:
        raise TraceError(f"the data of a traced tensor is not known while tracing ({user_line()})")

    __int__ = __index__ = __float__

    def __getattr__(self, name: str) -> Any:
        if name in TensorView.operators:
            operation = TensorView.operators[name]
            return lambda *args, **kwargs: operation(self, *args, **kwargs)
        raise AttributeError(f"a traced tensor has no attribute {name!r}")


def user_line() -> str:
    """File and line of the innermost frame outside serrate: where the user's program is."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for frame in reversed(traceback.extract_stack()):
        if not os.path.abspath(frame.filename).startswith((package, os.path.dirname(torch.__file__))):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown line"


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    def method(self: TensorView, *others: Any) -> Any:
        operation = TensorView.operators[name]
        return operation(*others, self) if swapped else operation(self, *others)

    return method


for _name, _method in {
    **{n: f"__{n}__" for n in ("add", "sub", "mul", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "matmul", "pow")},
    "div": "__truediv__",
    "logical_not": "__invert__",
}.items():
    setattr(TensorView, _method, _operator(_name))
for _name, _method in {"add": "__radd__", "sub": "__rsub__", "mul": "__rmul__", "div": "__rtruediv__"}.items():
    setattr(TensorView, _method, _operator(_name, swapped=True))
# Comparison is an operation here, so identity is what a traced tensor is found by.
setattr(TensorView, "__hash__", object.__hash__)  # noqa: B010  mypy does not let a method be assigned


@dataclass(eq=False)
class Fusion:
    """A recorded program. Use as a context manager, or pass to `ops` through its tensors."""

    name: str = "fusion"
    inputs: list[TensorView] = field(default_factory=list)
    outputs: list[TensorView] = field(default_factory=list)
    definitions: list[Definition] = field(default_factory=list)
    checks: list[Equal | AtLeastLongest] = field(default_factory=list)
    _names: Any = field(default_factory=itertools.count, repr=False)
    _numbers: dict[str, int] = field(default_factory=dict, repr=False)
    _token: Any = field(default=None, repr=False)

    def __enter__(self) -> Fusion:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def fresh(self, prefix: str) -> str:
        """A name not used before: `d0`, `d1`, ..."""
        number = self._numbers.get(prefix, 0)
        self._numbers[prefix] = number + 1
        return f"{prefix}{number}"

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
            self.outputs.append(view)

    def view(self, tensor: Tensor) -> TensorView:
        return TensorView(tensor, self)

    def define(self, tensors: Sequence[Tensor], domains: Sequence[IterDomain], statement: Leaf) -> tuple[TensorView, ...]:
        """Records one operation and returns views of what it writes."""
        self.definitions.append(Definition(statement, tuple(domains)))
        return tuple(self.view(t) for t in tensors)

    def tensor(self, dtype: torch.dtype, logical: Sequence[IterDomain]) -> Tensor:
        """A new intermediate tensor over `logical`, its rows stored back to back."""
        return Tensor(self.fresh("T"), dtype, tuple(logical), storage_of(logical))

    def definition_of(self, tensor: Tensor) -> Definition | None:
        """The operation that writes `tensor`."""
        return next((d for d in self.definitions if tensor in d.statement.targets), None)

    def live(self) -> list[Definition]:
        """The definitions that outputs depend on, in order."""
        needed = {view.tensor.memory for view in self.outputs}
        kept: list[Definition] = []
        for definition in reversed(self.definitions):
            if any(t in needed for t in definition.statement.targets):
                kept.append(definition)
                needed.update(r.tensor.memory for v in definition.statement.values for r in v.reads)
        return kept[::-1]

    def verify(self) -> None:
        """Raises unless every read is of an input or of something defined earlier."""
        defined = {view.tensor.memory for view in self.inputs}
        for definition in self.definitions:
            for value in definition.statement.values:
                for node in value.walk():
                    if isinstance(node, Read) and node.tensor.memory not in defined:
                        raise VerificationError(f"{self.name}: {node.tensor.name} is read before it is defined")
            defined.update(definition.statement.targets)

    def __str__(self) -> str:
        lines = [f"fusion {self.name}"]
        lines += [f"  input  {v.tensor}" for v in self.inputs]
        for definition in self.definitions:
            statement = definition.statement
            targets = ", ".join(map(str, statement.targets))
            values = ", ".join(map(str, statement.values))
            if isinstance(statement, Accumulate):
                values = f"{statement.reduction} {values}  over {', '.join(d.name for d in statement.over)}"
            lines.append(f"  {targets} = {values}")
        lines += [f"  output {v.tensor.name}" for v in self.outputs]
        return "\n".join(lines) + "\n"

    def evaluate(self, *args: Any) -> Any:
        """Runs the program on the reference interpreter."""
        return engine("evaluate")(self, *args)

    def compile(self, backend: str | None = None, strategy: str | None = None, **options: Any) -> Callable[..., Any]:
        """The program compiled for a backend under a strategy; both are chosen when not given."""
        compiled: Callable[..., Any] = engine("compile")(self, backend=backend, strategy=strategy, **options)
        return compiled


_engine: dict[str, Callable[..., Any]] = {}


def install(**entries: Callable[..., Any]) -> None:
    """Called once by the engine: what `Fusion.evaluate` and `Fusion.compile` do."""
    _engine.update(entries)


def engine(name: str) -> Callable[..., Any]:
    if name not in _engine:
        raise VerificationError("serrate.engine is not imported; import serrate, not serrate.ir alone, to run programs")
    return _engine[name]


def current_fusion() -> Fusion:
    """The fusion of the enclosing `with` block."""
    fusion = _current.get()
    if fusion is None:
        raise CallError("operations on plain numbers need a fusion: write them inside `with ir.Fusion() as f:`")
    return fusion
