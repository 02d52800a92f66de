"""TensorView: a tensor of a fusion, what operations take and give, and the handle that schedules change loops by.

In: Python operators, torch functions and methods on it. Out: operations recorded in the fusion, through the table
`TensorView.operators` that the front end fills. Loops are in `LoopHandle`.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from serrate.errors import CallError, RaggedSizeError, ScheduleError, ShapeError, TraceError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr
from serrate.ir.loop_handle import LoopHandle
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.values import Places, Tensor, Value, read

if TYPE_CHECKING:
    from serrate.ir.fusion import Fusion


class RaggedSize(str):
    """The size of a ragged dim while tracing: a name, like `r0`, that refuses to become a number."""

    __slots__ = ()

    def _refuse(self, *_: object) -> Any:
        raise RaggedSizeError(
            f"{self} is the size of a ragged dim and differs from row to row ({user_line()}); to divide by it, use mean"
        )

    __int__ = __index__ = __float__ = _refuse
    __add__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __rpow__ = __neg__ = _refuse

    # Python asks these first where the size stands in a sentence, and there it is a name.
    def __radd__(self, other: object) -> Any:
        return str.__add__(other, self) if isinstance(other, str) else self._refuse()

    def __rmod__(self, other: object) -> Any:
        return str.__mod__(other, str(self)) if isinstance(other, str) else self._refuse()


class TensorView(LoopHandle):
    """A tensor of a fusion. Supports Python operators, torch functions and methods, and scheduling by hand."""

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
        return tuple(RaggedSize(d.name) if d.is_ragged else d.extent for d in self.domains)

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

    def at(self, index: Places, other: float | int | bool = 0) -> Value:
        """The element at `index`, as a value; `other` where a computed place lies outside."""
        if self.fusion.is_partial(self.tensor):
            raise ScheduleError(f"{self.tensor.name} is a partial result that only a schedule knows; operations cannot read it")
        return read(self.tensor, index, other)

    def __str__(self) -> str:
        return str(self.tensor)

    __repr__ = __str__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in cls.operators:
            name = getattr(function, "__name__", function)
            raise CallError(f"{name} is not an operation on ragged tensors that can be traced ({user_line()})")
        return cls.operators[function](*args, **(kwargs or {}))

    def __bool__(self) -> bool:
        raise TraceError(
            f"a branch on data cannot be traced, because data is not known by then ({user_line()}); write torch.where(condition, "
            "a, b) instead of `a if condition else b`, or decide before the call"
        )

    def __len__(self) -> int:
        raise TraceError(f"len() of a traced tensor is not known while tracing ({user_line()})")

    def __iter__(self) -> Any:
        raise TraceError(f"a traced tensor cannot be iterated over ({user_line()}); write an operation on all rows instead")

    def __float__(self) -> float:
        raise TraceError(f"the data of a traced tensor is not known while tracing ({user_line()})")

    __int__ = __index__ = __float__

    def __getattr__(self, name: str) -> Any:
        if name in ("T", "mT"):
            return TensorView.operators[name](self)
        if name in TensorView.operators:
            operation = TensorView.operators[name]
            return lambda *args, **kwargs: operation(self, *args, **kwargs)
        if name in _DATA:
            return _reading(name)
        raise AttributeError(f"a traced tensor has no attribute {name!r}")


_DATA = ("item", "tolist", "numpy", "unbind", "nonzero")
"""Methods whose result is data on the host, or depends on it."""


def _reading(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TraceError(
            f"{name}() needs the data of a traced tensor, which is not known while tracing ({user_line()}); do it "
            "with what the traced function returns"
        )

    return refuse


def user_line() -> str:
    """File and line of the innermost frame outside serrate: where the user's program is."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown line"


def is_user_file(name: str) -> bool:
    """Whether a file is neither serrate's nor torch's nor Python's own."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.path.abspath(name)
    if path.startswith((package, os.path.dirname(torch.__file__))):
        return False
    # Installed packages may lie inside the folder of Python's own.
    return "site-packages" in path or not path.startswith(os.path.dirname(contextlib.__file__))


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    def method(self: TensorView, *others: Any) -> Any:
        operation = TensorView.operators[name]
        return operation(*others, self) if swapped else operation(self, *others)

    return method


for _name, _method in {
    **{n: f"__{n}__" for n in ("add", "sub", "mul", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "matmul", "pow")},
    "div": "__truediv__",
    "floor_divide": "__floordiv__",
    "remainder": "__mod__",
    "bitwise_not": "__invert__",
    "bitwise_and": "__and__",
    "bitwise_or": "__or__",
    "bitwise_xor": "__xor__",
    "getitem": "__getitem__",
}.items():
    setattr(TensorView, _method, _operator(_name))
for _name, _method in {
    **{n: f"__r{n}__" for n in ("add", "sub", "mul", "pow", "matmul")},
    "div": "__rtruediv__",
    "floor_divide": "__rfloordiv__",
    "remainder": "__rmod__",
    "bitwise_and": "__rand__",
    "bitwise_or": "__ror__",
    "bitwise_xor": "__rxor__",
}.items():
    setattr(TensorView, _method, _operator(_name, swapped=True))
# Comparison is an operation here, so identity is what a traced tensor is found by.
setattr(TensorView, "__hash__", object.__hash__)  # noqa: B010  mypy does not let a method be assigned
