"""Copies of a tensor that a schedule adds: before it, or between it and its readers.

In: a fusion and one of its tensors. Out: the same fusion with one more definition; its results do not change.
"""

from __future__ import annotations

from dataclasses import replace

from serrate.errors import ScheduleError
from serrate.ir.fusion import Fusion
from serrate.ir.rewrites import map_values
from serrate.ir.tile import Library, Store
from serrate.ir.values import Read, Role, Tensor, Value, read
from serrate.ir.view import TensorView
from serrate.schedule.hand import keep, schedule_of


def cache_after(fusion: Fusion, tensor: Tensor) -> TensorView:
    """y = f(x)   ->   c = x;  y = f(c)   for everything that reads `tensor`, directly or through a view of it."""
    views: dict[Tensor, Tensor] = {}
    copy = fusion.tensor(tensor.dtype, tensor.logical)

    def moved(value: Value) -> Value | None:
        if not isinstance(value, Read):
            return None
        if value.tensor is tensor:
            return value.of(copy, value.index)
        if tensor.base is None and value.tensor.base is tensor:
            if value.tensor not in views:
                name = fusion.fresh("T")
                views[value.tensor] = replace(value.tensor, name=name, storage=copy.storage, role=copy.role, base=copy)
            return value.of(views[value.tensor], value.index)
        return None

    new = [replace(d, statement=map_values(d.statement, moved)) for d in fusion.definitions]
    readers = [k for k, d in enumerate(fusion.definitions) if new[k].statement is not d.statement]
    if not readers:
        raise ScheduleError(f"cache_after: nothing reads {tensor.name}")
    fusion.definitions[:] = new
    (view,) = fusion.define([copy], tensor.logical, Store(copy, tensor.logical, read(tensor, tensor.logical)))
    fusion.definitions.insert(readers[0], fusion.definitions.pop())
    return keep(fusion, view)


def cache_before(fusion: Fusion, tensor: Tensor) -> TensorView:
    """t = f(x)   ->   c = f(x);  t = c"""
    definition = fusion.definition_of(tensor)
    if definition is None:
        what = "an input" if tensor.memory.role is Role.INPUT else "a view"
        raise ScheduleError(f"cache_before: {tensor.name} is {what}, which no statement computes")
    statement = definition.statement
    if len(statement.targets) > 1:
        names = ", ".join(t.name for t in statement.targets)
        raise ScheduleError(f"cache_before: {names} are computed together; use cache_after of one of them")
    if statement.targets[0].name in schedule_of(fusion).states:
        raise ScheduleError(f"cache_before: {tensor.name} has a schedule already; cache first, then schedule both")
    copy = fusion.tensor(tensor.dtype, tensor.logical)
    place = fusion.definitions.index(definition)
    if isinstance(statement, Library):
        raise ScheduleError(f"cache_before: {tensor.name} is computed by the library call {statement.function}; use cache_after")
    changed = replace(statement, tensor=copy) if isinstance(statement, Store) else replace(statement, targets=(copy,))
    fusion.definitions[place] = replace(definition, statement=changed)
    fusion.define([tensor], tensor.logical, Store(tensor, tensor.logical, read(copy, tensor.logical)))
    fusion.definitions.insert(place + 1, fusion.definitions.pop())
    keep(fusion, fusion.view(tensor))
    return keep(fusion, fusion.view(copy))
