"""Rewriting the values of a statement, and the tensors of a program.

In: a statement and a function on values, or a program and two tensors. Out: the statement or program rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from serrate.ir.tile import Accumulate, Leaf, Library, Scan, Store, TileProgram, map_leaves
from serrate.ir.values import Read, Tensor, Value, rewrite

S = TypeVar("S", bound=Store | Accumulate | Scan | Library)


def map_values(leaf: S, change: Callable[[Value], Value | None]) -> S:
    """A statement with its values rewritten; the same object if nothing changed."""
    values = tuple(rewrite(v, change) for v in leaf.values)
    if values == leaf.values:
        return leaf
    changed = replace(leaf, value=values[0]) if isinstance(leaf, Store) else replace(leaf, values=values)
    return cast(S, changed)


def with_tensor(program: TileProgram, old: Tensor, new: Tensor) -> TileProgram:
    """The program with one tensor, and the views of it, replaced everywhere."""
    views: dict[Tensor, Tensor] = {old: new}

    def swap(tensor: Tensor) -> Tensor:
        if tensor.base is old and tensor not in views:
            views[tensor] = replace(tensor, base=new, storage=new.storage, dtype=new.dtype)
        return views.get(tensor, tensor)

    def moved(value: Value) -> Value | None:
        return value.of(swap(value.tensor), value.index) if isinstance(value, Read) else None

    def change(leaf: Leaf) -> Leaf:
        leaf = map_values(leaf, moved)
        if isinstance(leaf, Store):
            return replace(leaf, tensor=swap(leaf.tensor))
        return replace(leaf, targets=tuple(map(swap, leaf.targets)))

    return program.with_phases(tuple(replace(p, body=map_leaves(p.body, change)) for p in program.phases))
