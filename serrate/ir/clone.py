"""Cloning: a copy of a graph of domains, transforms, tensors and statements.

In: any node of a fusion. Out: its copy; shared nodes stay shared. Names, expressions and arrays are values, not nodes, and are
not copied. Neither is the identity of a structure, so domains of a clone pair with those of the original.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from serrate.ir.domains import IterDomain
from serrate.ir.transforms import Transform
from serrate.ir.uids import fresh_uid
from serrate.ir.values import (
    Computed,
    Extent,
    Ordinal,
    Place,
    Position,
    Read,
    Tensor,
    Value,
    computed,
    extent,
    ordinal,
    position,
    rewrite,
)

T = TypeVar("T")

_NODES = (IterDomain, Transform, Tensor)
"""Nodes compared by identity, which are always copied."""


class Cloner:
    """Copies nodes, each once.

    >>> from serrate.ir import IterDomain, partition
    >>> rows, ragged = partition(IterDomain(10), [0, 3, 10])
    >>> cloner = Cloner()
    >>> copy = cloner(ragged)
    >>> copy.component is cloner(rows), copy == ragged, copy is ragged
    (True, True, False)
    """

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []
        """Keeps the originals alive while their ids are used as keys."""
        self._values: dict[int, Value] = {}
        self.uids: dict[int, int] = {}
        """uid of a domain -> uid of its copy."""

    def __call__(self, node: T) -> T:
        """The copy of a node, a tuple of nodes, or a record that holds nodes; anything else is returned unchanged."""
        copied: Any
        if isinstance(node, Place):
            # Its reads were copied first, with the value that contains it.
            copied = node.moved({d.uid: self(d) for d in node.domains})
        elif isinstance(node, Value):
            copied = rewrite(node, self._value, self._values)
        elif isinstance(node, tuple):
            parts = tuple(self(x) for x in node)
            copied = node if all(a is b for a, b in zip(parts, node, strict=True)) else parts
        elif isinstance(node, _NODES) or (is_dataclass(node) and not isinstance(node, type)):
            copied = self._record(node)
        else:
            copied = node
        return copied  # type: ignore[no-any-return]

    def _record(self, node: Any) -> Any:
        if id(node) in self._made:
            return self._made[id(node)]
        new = object.__new__(type(node))
        identical = not isinstance(node, _NODES)
        if not identical:
            # Domains and the transforms that made them refer to each other.
            self._remember(node, new)
        if isinstance(node, IterDomain):
            # Registered first: transforms reached on the way to its definition look the copy up by this number.
            self.uids[node.uid] = fresh_uid()
            object.__setattr__(new, "uid", self.uids[node.uid])
            object.__setattr__(new, "derived", {})
        for field in fields(node):
            if not isinstance(node, IterDomain) or field.name not in ("uid", "derived"):
                old = getattr(node, field.name)
                value: Any = self(old)
                identical = identical and value is old
                object.__setattr__(new, field.name, value)
        if identical:
            new = node
        self._remember(node, new)
        if isinstance(node, Transform):
            self._derive(node, new)
        return new

    def _remember(self, node: Any, new: Any) -> None:
        self._made[id(node)] = new
        self._kept.append(node)

    def _derive(self, old: Transform, new: Transform) -> None:
        """Makes the same transform of the copied inputs return the copied outputs."""
        about = {d.uid for d in (*old.inputs, *old.outputs, *old.beside)}
        for source, copy in zip(old.inputs, new.inputs, strict=True):
            for key, outputs in source.derived.items():
                if outputs is old.outputs and isinstance(key, tuple):
                    known = tuple(self.uids.get(k, k) if isinstance(k, int) and k in about else k for k in key)
                    copy.derived[known] = new.outputs

    def _value(self, value: Value) -> Value | None:
        if isinstance(value, Read):
            return value.of(self(value.tensor), self(value.index))
        if isinstance(value, Position):
            return position(self(value.domain))
        if isinstance(value, Computed):
            return computed(self(value.place))
        if isinstance(value, Ordinal):
            return ordinal(self(value.tensor), self(value.index))
        return extent(self(value.domain)) if isinstance(value, Extent) else None
