"""Graph breaks: `torch.compile` runs everything that users call outside of its graphs. Otherwise it would trace the compiler.

In: what a package exports. Out: the same functions and classes, marked for Dynamo. `serrate/__init__.py` calls this last.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from serrate.api.eager import Eager
from serrate.api.jit import Jitted
from serrate.api.kernel import DerivedKernel, DifferentiableKernel, Kernel
from serrate.compiled import Compiled
from serrate.tensor.torch_private import leave_graph
from serrate.tiles.host import CompiledKernel

CALLABLE = (Eager, Jitted, Kernel, DerivedKernel, DifferentiableKernel, CompiledKernel, Compiled)
"""Classes that are not exported, but whose instances users call."""


def leave_graphs(exported: Iterable[Any]) -> None:
    """Marks functions, and the methods and properties of classes."""
    seen: set[int] = set()
    for function_or_class in (*exported, *CALLABLE):
        for function in _functions(function_or_class, seen):
            leave_graph(function)


def _functions(attribute: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """The functions of this package that an attribute consists of, without those already seen."""
    if id(attribute) in seen:
        return
    seen.add(id(attribute))
    inner: list[Any] = []
    match attribute:
        case types.FunctionType() if attribute.__module__.startswith("serrate"):
            yield attribute
        case staticmethod() | classmethod():
            inner = [attribute.__func__]
        case property():
            inner = [attribute.fget, attribute.fset]
        case type():
            bases = (base for base in attribute.__mro__ if base.__module__.startswith("serrate"))
            inner = [x for base in bases for x in vars(base).values() if not isinstance(x, type)]
    for each in inner:
        yield from _functions(each, seen)
