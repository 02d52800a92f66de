"""Rewriting the values of a statement.

In: a statement and a function on values. Out: the statement rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from serrate.ir.tile import Accumulate, Library, Scan, Store
from serrate.ir.values import Value, rewrite

S = TypeVar("S", bound=Store | Accumulate | Scan | Library)


def map_values(leaf: S, change: Callable[[Value], Value | None]) -> S:
    """A statement with its values rewritten; the same object if nothing changed."""
    values = tuple(rewrite(v, change) for v in leaf.values)
    if values == leaf.values:
        return leaf
    changed = replace(leaf, value=values[0]) if isinstance(leaf, Store) else replace(leaf, values=values)
    return cast(S, changed)
