"""Everything that users call leaves the graphs of `torch.compile`: Dynamo would trace the compiler instead of running it.

In: the names that a package exports. Out: the same functions and classes, marked for Dynamo. The package itself calls this, last.
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
"""What users call without naming the class."""


def leave_graphs(exported: Iterable[Any]) -> None:
    """Marks functions, and the methods and properties of classes."""
    seen: set[int] = set()
    for each in (*exported, *CALLABLE):
        for function in _functions(each, seen):
            leave_graph(function)


def _functions(each: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """The functions of this package that are found in an attribute, each once."""
    if id(each) in seen:
        return
    seen.add(id(each))
    inside: list[Any] = []
    match each:
        case types.FunctionType() if each.__module__.startswith("serrate"):
            yield each
        case staticmethod() | classmethod():
            inside = [each.__func__]
        case property():
            inside = [each.fget, each.fset]
        case type():
            inside = [x for base in each.__mro__ if base.__module__.startswith("serrate") for x in vars(base).values()]
    for attribute in inside:
        if not (isinstance(each, type) and isinstance(attribute, type)):
            yield from _functions(attribute, seen)
