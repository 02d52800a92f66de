"""Structural keys of fusions, independent of the names of tensors, domains and extents.

In: a fusion. Out: a hashable key. Two fusions have equal keys iff they record the same operations, in the same order, on the same
inputs. Names and uids are replaced by order of appearance: symbols and arrays by the input they belong to, domains by the
transform that made them, everything else by first use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from serrate.ir.domains import Identity, IterDomain
from serrate.ir.expr import Array, Expr, Product, Sum, Symbol
from serrate.ir.transforms import Transform
from serrate.ir.values import Place, Read, Tensor, Value, index_of

if TYPE_CHECKING:
    from serrate.ir.fusion import Fusion


def structure_key(fusion: Fusion) -> tuple[Hashable, ...]:
    """The key of a fusion: a table of all its nodes, which refer to each other by number, and the roots."""
    names = _Numbering()
    inputs = tuple(names.declare(view.tensor) for view in fusion.inputs)
    definitions = tuple(names.node(d) for d in fusion.definitions)
    outputs = tuple(names.node(view.tensor) for view in fusion.outputs)
    checks = tuple(names.node(c, without=("what",)) for c in (*fusion.checks, *fusion.index_checks))
    return (tuple(names.table), inputs, len(fusion.seeds), definitions, outputs, checks)


class _Numbering:
    """Numbers every distinct node by its position in the table."""

    def __init__(self) -> None:
        self.table: dict[Hashable, int] = {}
        self.symbols: dict[str, Hashable] = {}
        self.arrays: dict[str, int] = {}
        self._made: dict[Hashable, int] = {}
        self._kept: list[Any] = []
        """Keeps nodes alive while their ids are used as keys."""
        self._alone = {Tensor: 0, IterDomain: 0}

    def declare(self, tensor: Tensor) -> Hashable:
        """An input: its extents, and its array if it is used as one, are named after its position."""
        self.arrays.setdefault(tensor.name, len(self.arrays))
        for domain in tensor.logical:
            if isinstance(domain.extent_expr, Symbol):
                self.symbols.setdefault(domain.extent_expr.name, len(self.symbols))
        return self.node(tensor)

    def node(self, x: Any, without: tuple[str, ...] = ()) -> Hashable:
        """A node as a number, a tuple as a tuple of them, anything else as itself."""
        if isinstance(x, tuple):
            return tuple(self.node(y) for y in x)
        if isinstance(x, Symbol):
            return ("symbol", self.symbols.get(x.name, x.name))
        if isinstance(x, Array):
            return self._array(x)
        if isinstance(x, Identity):
            return self._array(x.offsets)
        if isinstance(x, Expr):
            return self._number(x, self._expression)
        if isinstance(x, IterDomain):
            return self._number(x, self._domain)
        if isinstance(x, Value):
            return self._number(x, self._value)
        if isinstance(x, Place):
            return self._place(x)
        if is_dataclass(x) and not isinstance(x, type):
            unnamed = ("name", "outputs") if isinstance(x, Tensor | Transform) else ()
            return self._number(x, lambda y: self._fields(y, (*unnamed, *without)))
        return x.__name__ if isinstance(x, type) else repr(x) if isinstance(x, float) else x

    def _number(self, x: Any, describe: Callable[[Any], Hashable]) -> Hashable:
        key = x.uid if isinstance(x, IterDomain) else (id(x),)
        if key not in self._made:
            self._kept.append(x)
            described = describe(x)
            alone = (
                Tensor if isinstance(x, Tensor) else IterDomain if isinstance(x, IterDomain) and x.definition is None else None
            )
            if alone is not None:
                # Two tensors or dims with equal fields are still distinct.
                described = (described, self._alone[alone])
                self._alone[alone] += 1
            self._made[key] = self.table.setdefault(described, len(self.table))
        return ("node", self._made[key])

    def _fields(self, x: Any, without: tuple[str, ...]) -> Hashable:
        return (type(x).__name__, *(self.node(getattr(x, f.name)) for f in fields(x) if f.name not in without))

    def _array(self, array: Array) -> Hashable:
        if array.recipe is not None:
            return ("derived", self.node(array.recipe))
        return ("array", self.arrays.get(array.name, array.name) if array.data is None else array.data)

    def _expression(self, expr: Expr) -> Hashable:
        kind, *parts = expr._key
        shown = [self.node(part) for part in parts]
        if isinstance(expr, Sum):
            # Terms are sorted by name.
            shown = [tuple(sorted(part, key=repr)) if isinstance(part, tuple) else part for part in shown]
        elif isinstance(expr, Product):
            shown = sorted(shown, key=repr)
        return (kind.__name__, *shown)

    def _domain(self, domain: IterDomain) -> Hashable:
        made = domain.definition
        if made is not None:
            return (self.node(made), next(k for k, d in enumerate(made.outputs) if d.uid == domain.uid))
        return self._fields(domain, ("name", "uid", "derived", "definition", "bound"))

    def _place(self, place: Place) -> Hashable:
        for domain in place.domains:
            self.symbols[index_of(domain).name] = self.node(domain)
        return ("place", self.node(place.expr), tuple(self.node(r) for r in place.reads))

    def _value(self, value: Value) -> Hashable:
        kind, *parts = value._key
        if isinstance(value, Read):
            parts = [value.tensor, value.index, repr(value.other), value.dtype]
        uids = {d.uid for part in parts for d in (part if isinstance(part, tuple) else (part,)) if isinstance(d, IterDomain)}
        # Uids are in a value's key only to distinguish domains, whose nodes do that here.
        return (kind.__name__, *(self.node(p) for p in parts if not _only_uids(p, uids)))


def _only_uids(part: object, uids: set[int]) -> bool:
    found = part if isinstance(part, tuple) else (part,)
    return any(p in uids for p in found if type(p) is int) and all(p is None or type(p) is int for p in found)
