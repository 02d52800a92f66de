"""TensorView: a tensor of a fusion; operations take and return it, and it is the handle for scheduling its loops.

In: Python operators, torch functions and methods on it. Out: operations recorded in the fusion, through the table
`TensorView.operators` that the front end fills.
Loops are changed by `schedule.loop_handle`, which the engine installs.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from serrate.errors import (
    CallError,
    DtypeError,
    InPlaceError,
    RaggedSizeError,
    ScheduleError,
    ShapeError,
    TraceAttributeError,
    TraceError,
)
from serrate.ir.callers import asks_for_class, is_own
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.expr import Expr, as_expr
from serrate.ir.hooks import installed
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.tensor_domain import TensorDomain
from serrate.ir.values import Places, Role, Tensor, Value, read

if TYPE_CHECKING:
    from serrate.ir.fusion import Fusion


class SymbolicRaggedSize(str):
    """The size of a ragged dim while tracing: a name, like `r0`, that cannot be converted to a number."""

    __slots__ = ()

    def _refuse(self, *_: object) -> Any:
        raise RaggedSizeError(
            f"{self} is the size of a ragged dim and differs from row to row ({user_line()}); to divide by it, use mean"
        )

    __int__ = __index__ = __float__ = _refuse
    __add__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __rpow__ = __neg__ = _refuse

    # Python tries these first when the size is formatted into a string, where it is a name.
    def __radd__(self, other: object) -> Any:
        return str.__add__(other, self) if isinstance(other, str) else self._refuse()

    def __rmod__(self, other: object) -> Any:
        return str.__mod__(other, str(self)) if isinstance(other, str) else self._refuse()


standing_for: ContextVar[type | None] = ContextVar("standing_for", default=None)
"""While a function is traced: the class that its ragged tensors claim to be."""


class Size(torch.SymInt):
    """A symbolic size while tracing, which may differ in the next call. Shapes print it as a symbol, like `n0`.

    Sums and products of sizes are sizes, and a size may be an operand. If Python or torch needs its value (a comparison, `range`,
    `float`, `str`, `torch.arange`), it gets the value in the call being traced, and the trace is then specialised to it.

    torch accepts a SymInt wherever it accepts a number, and then asks the trace's function mode, which passes on the value: so
    torch never asks for the `node` that its own have.
    """

    def __init__(self, expr: Expr, fusion: Fusion) -> None:
        self.expr, self.fusion = expr, fusion

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` sees: the first call of a traced function sees an int, and so must the others."""
        return self.stands_for() if standing_for.get() is not None and asks_for_class(sys._getframe(1)) else type(self)

    def stands_for(self) -> type:
        """The class of this size outside of a trace."""
        return int

    def __index__(self) -> int:
        return self.fusion.fixed(self.expr)

    __int__ = __trunc__ = __floor__ = __ceil__ = __index__

    def __float__(self) -> float:
        return float(int(self))

    def __bool__(self) -> bool:
        return bool(int(self))

    def __hash__(self) -> int:
        return hash(int(self))

    def __eq__(self, other: object) -> bool:
        expr = other.expr if isinstance(other, Size) else other
        if isinstance(expr, Expr):
            return self.expr is expr or (expr.symbols <= self.fusion.sizes.keys() and int(self) == self.fusion.fixed(expr))
        return isinstance(other, int | float) and int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return str(self.expr)

    def __str__(self) -> str:
        """The value, if the traced function asks, which may decide by it; the symbol for messages."""
        return repr(self) if standing_for.get() is None or is_own(sys._getframe(1)) else str(int(self))

    def __format__(self, form: str) -> str:
        own = standing_for.get() is None or is_own(sys._getframe(1))
        return repr(self) if own and not form else format(int(self), form)

    def _symbolic(self, other: Any, operation: Callable[[Any, Any], Any], *, swapped: bool = False) -> Any:
        """A sum, product or quotient of sizes and whole numbers, as a size."""
        if not isinstance(other, Size) and type(other) is not int:
            return self._of_number(other, operation, swapped=swapped)
        expr = other.expr if isinstance(other, Size) else as_expr(other)
        found = operation(expr, self.expr) if swapped else operation(self.expr, expr)
        return Size(found, self.fusion) if found.value is None else found.value

    def _of_number(self, other: Any, operation: Callable[[Any, Any], Any], *, swapped: bool = False) -> Any:
        if not isinstance(other, int | float | Size):
            return NotImplemented
        number = int(other) if isinstance(other, Size) else other
        return operation(number, int(self)) if swapped else operation(int(self), number)

    def __add__(self, other: Any) -> Any:
        return self._symbolic(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._symbolic(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._symbolic(other, operator.sub, swapped=True)

    def __mul__(self, other: Any) -> Any:
        return self._symbolic(other, operator.mul)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Any:
        apply = self._symbolic if type(other) is int and other > 0 else self._of_number
        return apply(other, operator.floordiv)

    def __mod__(self, other: Any) -> Any:
        apply = self._symbolic if type(other) is int and other > 0 else self._of_number
        return apply(other, operator.mod)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._of_number(other, operator.floordiv, swapped=True)

    def __rmod__(self, other: Any) -> Any:
        return self._of_number(other, operator.mod, swapped=True)

    def __truediv__(self, other: Any) -> Any:
        return self._of_number(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Any:
        return self._of_number(other, operator.truediv, swapped=True)

    def __pow__(self, other: Any) -> Any:
        return self._of_number(other, operator.pow)

    def __rpow__(self, other: Any) -> Any:
        return self._of_number(other, operator.pow, swapped=True)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __lshift__(self, other: Any) -> Any:
        return self._of_number(other, operator.lshift)

    def __rlshift__(self, other: Any) -> Any:
        return self._of_number(other, operator.lshift, swapped=True)

    def __rshift__(self, other: Any) -> Any:
        return self._of_number(other, operator.rshift)

    def __rrshift__(self, other: Any) -> Any:
        return self._of_number(other, operator.rshift, swapped=True)

    def __and__(self, other: Any) -> Any:
        return self._of_number(other, operator.and_)

    def __or__(self, other: Any) -> Any:
        return self._of_number(other, operator.or_)

    def __xor__(self, other: Any) -> Any:
        return self._of_number(other, operator.xor)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __neg__(self) -> Any:
        return 0 - self

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> int:
        return abs(int(self))

    def __invert__(self) -> int:
        return ~int(self)

    def __round__(self, digits: int | None = None) -> int:
        return round(int(self), digits or 0)

    def bit_length(self) -> int:
        return int(self).bit_length()

    def is_integer(self) -> bool:
        return True

    def __lt__(self, other: Any) -> Any:
        return self._of_number(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._of_number(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._of_number(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._of_number(other, operator.ge)


class TensorView:
    """A tensor of a fusion. Supports Python operators, torch functions and methods, and scheduling by hand."""

    __slots__ = ("fusion", "tensor")
    operators: ClassVar[dict[Any, Callable[..., Any]]] = {}
    """torch functions and method names -> operations; filled by the front end."""
    instead: ClassVar[dict[str, str]] = {}
    """Suggestions for some missing attributes, appended to messages; filled by the front end."""
    advice: ClassVar[dict[str, str]] = {}
    """What to do where a function is not supported, by its name; filled by the front end."""
    __array_ufunc__ = None
    """Makes numpy scalars defer to traced tensors in operators."""

    def __init__(self, tensor: Tensor, fusion: Fusion) -> None:
        self.tensor, self.fusion = tensor, fusion

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` sees: a traced function sees the tensor that this view represents.

        torch's C++ code asks the same question, and would read the tensor's memory: it never sees a torch.Tensor. Neither does
        serrate's own code.
        """
        kind = standing_for.get()
        if kind is None:
            return type(self)
        claimed = self.stands_for()
        return claimed if claimed is kind or asks_for_class(sys._getframe(1)) else type(self)

    def stands_for(self) -> type:
        """The class of the tensor that this view represents while a function is traced."""
        kind = standing_for.get()
        return kind if kind is not None and any(d.is_ragged for d in self.domains) else torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device of the call being traced, for tensors that the function makes."""
        if self.fusion.device is None:
            raise AttributeError("device")  # `__getattr__` says more
        return self.fusion.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def domains(self) -> tuple[IterDomain, ...]:
        """The logical domains, one for each dim."""
        return self.tensor.logical

    @property
    def ndim(self) -> int:
        return len(self.domains)

    @property
    def shape(self) -> tuple[Size | int | str, ...]:
        """The extents; for a ragged dim, the name of its domain."""
        return tuple(SymbolicRaggedSize(d.name) if d.is_ragged else self.size_of(k) for k, d in enumerate(self.domains))

    def size_of(self, dim: int) -> Size | int:
        """The extent of a regular dim."""
        extent = self.domains[dim].extent_expr
        return Size(extent, self.fusion) if extent.value is None else extent.value

    @property
    def ragged(self) -> RaggedIterDomain:
        """The innermost ragged domain."""
        for domain in reversed(self.domains):
            if isinstance(domain, RaggedIterDomain):
                return domain
        raise ShapeError(f"{self} has no ragged dim")

    @property
    def component(self) -> IterDomain:
        """The component domain of `ragged`."""
        return self.ragged.component

    def at(self, index: Places, other: float | int | bool = 0) -> Value:
        """The element at `index`, as a value; `other` where a computed place is out of bounds."""
        if self.fusion.is_partial(self.tensor):
            raise ScheduleError(f"{self.tensor.name} is a partial result of a schedule; operations cannot read it")
        self.check_current()
        return read(self.tensor, index, other)

    def check_current(self) -> None:
        """Raises if this tensor, or the one it is a view of, was overwritten in place: use the result of that write instead."""
        if self.tensor.memory in self.fusion.overwritten:
            raise InPlaceError(
                f"a traced tensor that was written to in place is used under another name, or as a view ({user_line()}); write "
                "y = y + 1 instead of y += 1"
            )

    def written(self, name: str, other: Any) -> Any:
        """`y += 1`: the result, with the shape and dtype of `y`. The old `y` must no longer be used."""
        result = TensorView.operators[name](self, other)
        same = len(result.domains) == self.ndim and all(
            own.uid == new.uid or (not own.is_ragged and not new.is_ragged and own.extent_expr == new.extent_expr)
            for own, new in zip(self.domains, result.domains, strict=True)
        )
        if not same:
            raise ShapeError(f"{name} in place ({user_line()}): the result has shape {result.shape}, the tensor {self.shape}")
        if not torch.can_cast(result.dtype, self.dtype):
            raise DtypeError(f"{name} in place ({user_line()}): the result is {result.dtype}, which {self.dtype} cannot hold")
        self.fusion.overwritten.add(self.tensor.memory)
        return result.to(self.dtype)

    # --- scheduling by hand; `schedule.loop_handle` does the work -------------------------------------------------------

    @property
    def _loop_handle(self) -> Any:
        return installed("loop_handle")(self)

    @property
    def domain(self) -> TensorDomain:
        """Root, logical, allocation and loop domains, under the current schedule.

        >>> from serrate import ir, ops
        >>> with ir.Fusion() as f:
        ...     x, offsets = f.input((10, 4), torch.float32), f.input((4,), torch.int64)
        ...     y = ops.sum(ops.as_nested(x, offsets), 1)
        >>> print(y.split(1, 2).parallelize(0, "block_x").domain)
        root       [i.c0{3}, i.d1{4}]
        logical    [i.c0{3}, i.d1{4}]
        allocation [i.c0{3}, i.d1{4}]
        loop       [i.c0{3}.block_x, r.ragged.r0o{(T1[c + 1] - T1[c] + 1) // 2}, r.r0i{2}, i.d1{4}]
        """
        domain: TensorDomain = self._loop_handle.domain
        return domain

    @property
    def loops(self) -> tuple[IterDomain, ...]:
        """The loop domains, which the axes of the methods below refer to; negative axes count from the end."""
        return self.domain.loop

    def split(self, axis: Any, factor: Any = None, inner: bool = True, **named: Any) -> Any:
        """for i: s   ->   for io: for ii in factor: s   (with `inner=False` the factor is the outer extent)

        Splitting a component does not change its ragged domain, whose length is a function of the coordinate. In a traced
        function this is torch's `split(sizes, dim)` instead.
        """
        if standing_for.get() is not None:
            given = (axis,) if factor is None else (axis, factor)
            return TensorView.operators["split"](self, *given, **named)
        self._loop_handle.split(axis, factor, inner)
        return self

    def merge(self, axis: int, other: int | None = None) -> Self:
        """for a: for b: s   ->   for ab: s   (`other` defaults to the next axis)"""
        self._loop_handle.merge(axis, other)
        return self

    def reorder(self, order: Mapping[int, int] | Sequence[int]) -> Self:
        """for a: for b: s   ->   for b: for a: s.  Either all axes in their new order, or {axis: new position} for some."""
        self._loop_handle.reorder(order)
        return self

    def partition(self, axis: int, offsets: TensorView | Sequence[object] | torch.Tensor) -> Self:
        """for i: s   ->   for c: for r[c]: s.  By constant offsets, or by offsets that the fusion already partitions this by.

        `[G, K+1]` offsets partition a loop for each position of the loop outside it, a ragged loop for each of its rows.
        """
        self._loop_handle.partition(axis, offsets)
        return self

    def combine(self, component: int, ragged: int | None = None) -> Self:
        """for c: for r[c]: s   ->   for i: s   (the inverse of partition; `ragged` defaults to the next axis)"""
        self._loop_handle.combine(component, ragged)
        return self

    def resize(self, axis: int, left: int, right: int) -> Self:
        """for i in n: s   ->   for i' in left+n+right: s at i' - left   (added positions are guarded)"""
        self._loop_handle.resize(axis, left, right)
        return self

    def swizzle(self, axis: int, other: int) -> Self:
        """for a: for b: s   ->   for a: for b': s at b' xor a   (a is at `axis`, b at `other`; extents are powers of two)"""
        self._loop_handle.swizzle(axis, other)
        return self

    def parallelize(self, axis: int, kind: ParallelType | str) -> Self:
        """Sets a loop's parallel type, given itself or by name.

        `grid` and `block_*` loops are distributed over workers; `lanes`, `thread_*`, `vectorize` and `unroll` form one block.
        """
        self._loop_handle.parallelize(axis, kind)
        return self

    def inline_at(self, consumer: TensorView, position: int) -> Self:
        """for c: t;  for c: y   ->   for c: (t; y):  computes this tensor inside the outermost `position` loops of `consumer`.

        If this tensor has no schedule of its own, it is scheduled like those loops of the consumer. Negative positions count from
        the end; -1 means all loops.
        """
        self._loop_handle.inline_at(consumer, position)
        return self

    def rfactor(self, axes: int | Sequence[int]) -> TensorView:
        """t[c] += x over (o, n)   ->   p[c, o] += x over n;  t[c] += p[c, o] over o.  Returns p, which reduces `axes` (here
        n)."""
        view: TensorView = self._loop_handle.rfactor(axes)
        return view

    def cache_before(self) -> TensorView:
        """t = f(x)   ->   c = f(x);  t = c.  Returns c, which is computed and then copied to this tensor."""
        view: TensorView = self._loop_handle.cache_before()
        return view

    def cache_after(self) -> TensorView:
        """y = f(x)   ->   c = x;  y = f(c).  Returns c, a copy of this tensor that all readers use instead."""
        view: TensorView = self._loop_handle.cache_after()
        return view

    def set_allocation(self, domains: Sequence[IterDomain]) -> Self:
        """Stores an intermediate over other domains: splits and merges of its allocation domains, in any order; or of its logical
        ones, where every ragged domain is combined with the domains that count its rows: `[c, *split(r, 128)]` stores rows in
        blocks of 128.

        An indivisible split leaves slots without an element; nothing reads them.
        """
        self._loop_handle.set_allocation(domains)
        return self

    # --- Python's protocols ---------------------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        raise InPlaceError(
            f"items of a traced tensor cannot be assigned in place ({user_line()}); write torch.where(condition, a, b) and "
            "return the result"
        )

    def __str__(self) -> str:
        return str(self.tensor)

    __repr__ = __str__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in cls.operators:
            name = torch.overrides.resolve_name(function) or getattr(function, "__name__", function)
            raise CallError(f"{name} is not supported in a traced function ({user_line()}); {cls._advice(name)}")
        return cls.operators[function](*args, **(kwargs or {}))

    @classmethod
    def _advice(cls, name: str) -> str:
        return cls.advice.get(name.rpartition(".")[2], "call it outside of the function")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise CallError(
            f"a tensor cannot be called ({user_line()}): values, lengths and offsets are attributes, so write x.values, x.lengths"
        )

    def __bool__(self) -> bool:
        raise TraceError(
            f"a branch on data cannot be traced, because data is not known at trace time ({user_line()}); write "
            "torch.where(condition, a, b) instead of `a if condition else b`, or decide before the call"
        )

    def __contains__(self, element: object) -> bool:
        raise TraceError(
            f"whether a traced tensor contains an element depends on data, which is not known at trace time ({user_line()}); "
            "write (x == element).any(), and use the result in torch.where"
        )

    def __len__(self) -> int:
        raise TraceError(f"len() of a traced tensor is not known while tracing ({user_line()}); write x.shape[0]")

    def __iter__(self) -> Any:
        raise TraceError(
            f"a traced tensor cannot be iterated over ({user_line()}); write an operation on the whole tensor instead"
        )

    def __float__(self) -> float:
        raise TraceError(f"the data of a traced tensor is not known while tracing ({user_line()})")

    __int__ = __index__ = __float__

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return TensorView.operators[name](self)
        if name in TensorView.operators:
            operation = TensorView.operators[name]
            return lambda *args, **kwargs: operation(self, *args, **kwargs)
        if name in _DATA:
            return _reading(name)
        if name.endswith("_") and not name.startswith("_") and hasattr(torch.Tensor, name):
            raise InPlaceError(f"{name} in place ({user_line()}) cannot be traced; write y = y.{name[:-1]}(...) and return y")
        if name.startswith("__"):
            raise AttributeError(name)  # protocols that Python and libraries ask for
        if name in TensorView.instead:
            raise TraceAttributeError(f"a traced tensor has no attribute {name!r} ({user_line()}){TensorView.instead[name]}")
        if callable(getattr(torch.Tensor, name, None)):
            raise TraceAttributeError(f"{name}() is not supported in a traced function ({user_line()}); {self._advice(name)}")
        raise TraceAttributeError(
            f"a traced tensor has no attribute {name!r} ({user_line()}): memory and rows are not known while tracing; "
            "read it before the call and pass it as an argument"
        )


ATTRIBUTES = ("T", "mT", "values", "lengths", "offsets", "structure", "num_rows", "num_groups")
"""Operations without arguments that are written as attributes."""
_DATA = ("item", "tolist", "numpy", "unbind", "nonzero")
"""Methods that return host data or depend on it."""


def _reading(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TraceError(
            f"{name}() needs the data of a traced tensor, which is not known while tracing ({user_line()}); call it "
            "on the result of the traced function"
        )

    return refuse


def user_line() -> str:
    """File and line of the innermost frame outside serrate: the user's code."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown line"


def users_level() -> int:
    """The `stacklevel` with which a `warnings.warn` of the caller points at the user's line."""
    frame, level = sys._getframe(1), 1
    while not is_user_file(frame.f_code.co_filename):
        if frame.f_back is None:
            # torch runs gradients in threads of its own, whose stacks have no line of the user.
            return 1
        frame, level = frame.f_back, level + 1
    return level


def is_user_file(name: str) -> bool:
    """Whether a file belongs to neither serrate, torch nor the standard library."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.path.abspath(name)
    if path.startswith((package, os.path.dirname(torch.__file__))):
        return False
    # Installed packages may lie inside the standard library's folder.
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
    "bitwise_left_shift": "__lshift__",
    "bitwise_right_shift": "__rshift__",
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
    "bitwise_left_shift": "__rlshift__",
    "bitwise_right_shift": "__rrshift__",
}.items():
    setattr(TensorView, _method, _operator(_name, swapped=True))


def _in_place_operator(name: str) -> Callable[..., Any]:
    def method(self: TensorView, other: Any) -> Any:
        if self.tensor.memory.role is Role.INPUT:
            raise InPlaceError(
                f"{name} in place on an argument or a captured tensor ({user_line()}) cannot be traced; write y = y + 1 and "
                "return y"
            )
        return self.written(name, other)

    return method


IN_PLACE = {
    **{f"__i{n}__": n for n in ("add", "sub", "mul", "pow")},
    "__itruediv__": "div",
    "__ifloordiv__": "floor_divide",
    "__imod__": "remainder",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}
"""Python's in-place operators and the operations they perform."""
for _method, _name in IN_PLACE.items():
    setattr(TensorView, _method, _in_place_operator(_name))
# `==` is an operation here, so traced tensors hash by identity.
setattr(TensorView, "__hash__", object.__hash__)  # noqa: B010  mypy does not let a method be assigned
