"""Eager operations: torch's functions, methods and operators on ragged tensors, each a compiled program of one operation.

In: nothing. Out: the operations, installed in `JaggedTensor` when this module is imported. What `serrate.ops` can do to a
traced tensor, torch's spelling of it does to a ragged one:

    jt * 2 + bias      torch.relu(jt)      jt.sum(dim=1)      F.layer_norm(jt, (64,))      jt += 1      torch.exp(jt, out=other)

The container's own operations (indexing, cat, split, permute ...) move no data through programs and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.calls import Jitted
from serrate.errors import CallError, DtypeError, StructureMismatch
from serrate.frontend.torch_names import ELEMENTWISE
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor
from serrate.tensor.jagged import install_operators, installed_operators

_BINARY = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "pow": "pow",
    "matmul": "matmul",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = {"neg": "neg", "abs": "abs", "logical_not": "invert"}


class Eager:
    """One operation on ragged tensors and whatever else it takes."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.program = Jitted(operation)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return self.program(*args, **kwargs)
        return self._into(out, args, kwargs)

    def in_place(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument, with the result in its values."""
        return self._into(args[0], args, kwargs)

    def _into(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not isinstance(out, JaggedTensor | torch.Tensor):
            raise CallError(f"out= takes the tensor of one result, got {type(out).__name__}")
        memory = out.values if isinstance(out, JaggedTensor) else out
        # Straight into the memory where nothing that is read lies there, or every element is read before it is written.
        straight = memory.is_contiguous() and (not _overlaps(memory, args) or self.program.fn in ELEMENTWISE)
        if isinstance(out, JaggedTensor):
            straight = straight and out.format == "csr" and any(_alike(out, a) for a in args)
        result = self.program.into([memory], args, kwargs) if straight else self.program(*args, **kwargs)
        _check_same(out, result)
        found = result.values if isinstance(result, JaggedTensor) else result
        if found.data_ptr() != memory.data_ptr():
            _copy(out, result)
        return out


def _alike(out: JaggedTensor, arg: Any) -> bool:
    """Whether an argument has the rows of `out`, and values of the same shape and dtype."""
    if not isinstance(arg, JaggedTensor) or arg.values.shape != out.values.shape or arg.dtype != out.dtype:
        return False
    return arg.structure is out.structure or arg.structure.same_rows(out.structure)


def _overlaps(memory: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether an argument lies in the same storage."""
    storage = memory.untyped_storage().data_ptr()
    tensors = (a.values if isinstance(a, JaggedTensor) else a for a in args)
    return any(isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() == storage for t in tensors)


def _check_same(out: Any, result: Any) -> None:
    if type(out) is not type(result) and isinstance(result, JaggedTensor) != isinstance(out, JaggedTensor):
        raise CallError(f"out= is a {type(out).__name__}, but the result is a {type(result).__name__}")
    if result.dtype != out.dtype:
        raise DtypeError(f"the result is {result.dtype}, which values of {out.dtype} cannot take: convert one of them first")
    if isinstance(result, JaggedTensor) and not result.structure.same_rows(out.structure.back_to_back()):
        raise StructureMismatch(f"the result has the rows {result.structure}, out= has {out.structure}")
    if tuple(map(str, result.shape)) != tuple(map(str, out.shape)):
        raise StructureMismatch(f"the result has shape {tuple(result.shape)}, out= has {tuple(out.shape)}")


def _copy(out: Any, result: Any) -> None:
    if isinstance(out, JaggedTensor):
        out[...] = result
    else:
        out.copy_(result)


def _method(program: Callable[..., Any], name: str, swapped: bool = False) -> Callable[..., Any]:
    def method(self: JaggedTensor, *args: Any, **kwargs: Any) -> Any:
        return program(*args, self) if swapped else program(self, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As `torch.{name.strip('_')}`, row by row; a compiled program."
    return method


def install() -> None:
    """Gives `JaggedTensor` every operation that a traced tensor has, under torch's names."""
    by_operation: dict[Any, Eager] = {}

    def eager(operation: Callable[..., Any]) -> Eager:
        return by_operation.setdefault(operation, Eager(operation))

    table = TensorView.operators
    taken = installed_operators()
    install_operators({f: eager(op) for f, op in table.items() if not isinstance(f, str) and f not in taken})
    for name, operation in table.items():
        if isinstance(name, str) and not hasattr(JaggedTensor, name):
            setattr(JaggedTensor, name, _method(eager(operation), name))
    for name in (n for n in table if isinstance(n, str) and table[n] in ELEMENTWISE):
        setattr(JaggedTensor, f"{name}_", _method(eager(table[name]).in_place, f"{name}_"))
    for name, python in _BINARY.items():
        program = eager(table[name])
        setattr(JaggedTensor, f"__{python}__", _method(program, f"__{python}__"))
        setattr(JaggedTensor, f"__r{python}__", _method(program, f"__r{python}__", swapped=True))
        if table[name] in ELEMENTWISE:
            setattr(JaggedTensor, f"__i{python}__", _method(program.in_place, f"__i{python}__"))
    for name in _COMPARISONS:
        setattr(JaggedTensor, f"__{name}__", _method(eager(table[name]), f"__{name}__"))
    for name, python in _UNARY.items():
        setattr(JaggedTensor, f"__{python}__", _method(eager(table[name]), f"__{python}__"))
    # Comparing gives a tensor, as in torch; what a tensor is stays what it is known by.
    JaggedTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


install()
