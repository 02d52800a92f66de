"""Detects stores that race whatever the data: two lanes or two programs write different values to one element.

In: a store, with the index of every lane and the conditions under which it stores. Out: nothing, or a `RaceError` at the user's
line. Races that depend on the data (repeated numbers in an index tensor) are found by the interpreter's checked mode.

    programs     the index does not depend on the program, but the value does
    lanes        the index is the same for all lanes in which a condition fails (`torch.where(valid, t.index, 0)`,
                 `t.index.clamp(max=n)`), the value is not, and the store does not require that condition
    rows         the index counts from the start of a row (`offsets[b] + t.index`), and the store runs on into the next row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from serrate.errors import RaceError
from serrate.frontend.kernel.machine import refuse
from serrate.ir.expr import Element, Expr, Less, Maximum, Minimum, Symbol
from serrate.ir.loops import Load, Number, symbols_of
from serrate.ir.tile import Axis
from serrate.ir.values import Call, Constant, Value, call
from serrate.tiles.functions import conjunction
from serrate.tiles.values import Traced

if TYPE_CHECKING:
    from serrate.tiles.memory import IndexedElements
    from serrate.tiles.trace import Trace


def refuse_races(
    trace: Trace, target: IndexedElements, guard: Sequence[Less], stored: Value, value: Traced, *, masked: bool
) -> None:
    """Raises for a store that races whatever its arguments."""
    _programs(trace, target, guard, stored, value)
    own = symbols_of(stored) | trace.depends(stored)
    for axis in target.place.axes:
        if axis is None or axis.block == 1 or not {axis.position, axis.lane} & own:
            continue
        parts = [_LaneDependence(trace, axis).of(index) for index in target.place.indices]
        merged = [p for p in parts if p]
        if merged and not any(p == [] for p in parts) and not any(_requires(trace, p, guard, target) for p in merged):
            refuse(
                f"lanes of {axis} store different values to one element: their index is the same wherever its condition fails. "
                "Store only where the condition holds, as in hl.store(out, [index, ...], x, extra_mask=valid[:, None])",
                RaceError,
            )
        if not masked:
            _rows(trace, target, axis)


def _programs(trace: Trace, target: IndexedElements, guard: Sequence[Less], stored: Value, value: Traced) -> None:
    """Raises if programs store different values at an index that is the same for all of them."""
    used = {s for e in target.where for s in e.symbols} | {s for g in guard for s in g.symbols}
    exprs = (*target.where, *(g.left for g in guard), *(g.right for g in guard))
    local = any(isinstance(e, Element) and e.array.local for x in exprs for e in x.walk())
    if local or any(trace.is_computed(s) for s in used):
        return
    mine = symbols_of(stored) | {s for f in value.fed for g in f.guard for s in g.symbols}
    for axis in trace.programs:
        own = {axis.position, axis.number, axis.first, axis.last}
        many = axis.size is None or axis.size > 1
        if many and not own & used and own & (mine | trace.depends(stored)):
            refuse(
                f"programs of {axis} store different values to the same element, because the index does not depend on it: "
                "index by it too, reduce in a loop inside, or use hl.atomic_add"
            )


# --- lanes -----------------------------------------------------------------------------------------------------------------

Condition = Value | Less
"""A condition under which each lane has its own index: a mask, or a comparison of indices."""


class _LaneDependence:
    """How an index depends on the lanes of an axis: None if not at all; else the conditions under which each lane has its own
    index (an empty list if always, as far as can be seen)."""

    def __init__(self, trace: Trace, axis: Axis) -> None:
        self.trace, self.axis = trace, axis
        self.symbols = {s for a in (axis, axis.original) for s in (a.position, a.lane)}

    def of(self, x: Expr | Value) -> list[Condition] | None:
        """The conditions of an index expression or a value."""
        if isinstance(x, Expr):
            return self._expr(x)
        if isinstance(x, Constant):
            return None
        if isinstance(x, Number):
            return self._expr(x.expr)
        if isinstance(x, Load):
            return self._joined([self._expr(e) for e in x.index])
        if isinstance(x, Call) and x.function == "where":
            return self._where(x)
        if isinstance(x, Call) and x.function in ("minimum", "maximum"):
            return self._limited(x.function, *map(_as_expr, x.args)) or self._joined([self.of(a) for a in x.args])
        if isinstance(x, Call):
            return self._joined([self.of(a) for a in x.args])
        return [] if symbols_of(x) & self.symbols else None

    def _expr(self, e: Expr) -> list[Condition] | None:
        if not e.symbols & self.symbols:
            return None
        made = self._computed(e)
        if made is not None:
            return self.of(made)
        if isinstance(e, Minimum | Maximum):
            found = self._limited("minimum" if isinstance(e, Minimum) else "maximum", e.left, e.right)
            if found is not None:
                return found
        if isinstance(e, Symbol):
            return []
        return self._joined([self._expr(part) for part in e.operands])

    def _computed(self, e: Expr) -> Value | None:
        """The value that the program computed for an element of an index block."""
        if isinstance(e, Element) and e.array.local and e.index.symbols & self.symbols:
            return self.trace.computed(e.array.name)
        return None

    def _joined(self, parts: Sequence[list[Condition] | None]) -> list[Condition] | None:
        """One addend that differs in every lane is enough."""
        found = [p for p in parts if p is not None]
        if not found or [] in found:
            return [] if found else None
        return [c for p in found for c in p]

    def _where(self, x: Call) -> list[Condition] | None:
        condition, one, other = x.args
        parts = [self.of(one), self.of(other)]
        if not symbols_of(condition) & self.symbols or None not in parts or parts == [None, None]:
            return self._joined(parts)
        if parts[1] is None:
            return [condition, *(parts[0] or ())]
        return [call("logical_not", condition, dtype=torch.bool), *(parts[1] or ())]

    def _limited(self, function: str, one: Expr | None, other: Expr | None) -> list[Condition] | None:
        """A clamped index: lanes within the limit have their own."""
        for x, limit in ((one, other), (other, one)):
            if x is None or limit is None or not x.symbols & self.symbols or limit.symbols & self.symbols:
                continue
            inside = self._expr(x)
            least = function == "minimum"
            condition = Less(x, limit + 1) if least else Less(limit - 1, x)
            extreme = condition.substitute({self.axis.position: self.axis.end - 1 if least else self.axis.begin})
            return inside if condition.proven or extreme.proven else [condition, *(inside or ())]
        return None


def _as_expr(value: Value) -> Expr | None:
    return Traced(value, ()).expr


def _requires(trace: Trace, conditions: Sequence[Condition], guard: Sequence[Less], target: IndexedElements) -> bool:
    """Whether a store requires all of these conditions."""
    masks = {m for g in guard for e in g.right.walk() if isinstance(e, Element) and e.array.local for m in _masks(trace, e)}
    return all(_holds(trace, c, guard, masks, target) for c in conditions)


def _masks(trace: Trace, e: Element) -> Iterator[Value]:
    """The masks that a condition on an element of a block implies."""
    pending = [trace.computed(e.array.name)]
    while pending:
        value = pending.pop()
        if isinstance(value, Call) and value.function in ("cast", "logical_and", "bitand"):
            pending += value.args
        if value is not None:
            yield value


def _holds(trace: Trace, c: Condition, guard: Sequence[Less], masks: set[Value], target: IndexedElements) -> bool:
    if isinstance(c, Less):
        gaps = [((c.left - c.right) - (g.left - g.right)).bounds[1] for g in guard]
        return any(gap is not None and gap <= 0 for gap in gaps)
    if c in masks:
        return True
    if isinstance(c, Call) and c.function == "logical_not" and isinstance(inner := c.args[0], Call):
        opposite = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}.get(inner.function)
        if opposite is None:
            return inner.function == "logical_not" and _holds(trace, inner.args[0], guard, masks, target)
        return _holds(trace, call(opposite, *inner.args, dtype=torch.bool), guard, masks, target)
    if isinstance(c, Call) and c.function == "logical_and":
        return all(_holds(trace, part, guard, masks, target) for part in c.args)
    found = conjunction(trace, c, Traced(c, target.place.axes))
    return found is not None and all(_holds(trace, each, guard, masks, target) for each in found)


# --- rows ------------------------------------------------------------------------------------------------------------------


def _rows(trace: Trace, target: IndexedElements, axis: Axis) -> None:
    """Raises if an index counts from the start of a row, and no bound of the store depends on the end of that row."""
    fixed = set(trace.numbers.values())
    if not axis.looped or not axis.end.symbols <= fixed or any(isinstance(e, Element) for e in axis.end.walk()):
        return
    if any(c.row and c.over([axis]) for c in target.place.conditions):
        return
    for index in target.place.indices:
        made = trace.computed(index.array.name) if isinstance(index, Element) and index.array.local else None
        if made is None:
            continue
        addends = list(_addends(made))
        counts = any(isinstance(a, Number) and axis.position in a.expr.symbols for a in addends)
        starts = [a for a in addends if isinstance(a, Load) and len(a.index) == 1]
        if counts and any((a.tensor.name, a.index[0] + 1) in trace.loaded for a in starts):
            refuse(
                f"the store runs from the start of a row to the end of {axis}, past the end of the row and into the next one, "
                "which another program stores. Store only inside the row, as in "
                "hl.store(out, [index, ...], x, extra_mask=(tile.index < length)[:, None])",
                RaceError,
            )


def _addends(value: Value) -> Iterator[Value]:
    if isinstance(value, Call) and value.function == "cast":
        yield from _addends(value.args[0])
    elif isinstance(value, Call) and value.function == "add":
        for part in value.args:
            yield from _addends(part)
    else:
        yield value
