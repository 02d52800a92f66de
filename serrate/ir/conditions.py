"""Conditions on positions: boolean values as guards, and the bounds that guards put on single lanes.

In: a bool value, or conditions `left < right`. Out: index comparisons, and the remainder of the value.
"""

from __future__ import annotations

import torch

from serrate.ir.expr import Expr, Less, const
from serrate.ir.loops import Guard, Lanes, Number
from serrate.ir.solve import end_of, possible, start_of
from serrate.ir.values import Call, Constant, Value, call


def conditions_of(test: Value) -> tuple[Guard, Value | None]:
    """Splits a bool value into a conjunction of index comparisons and a remainder, or None if nothing remains.

    >>> from serrate.ir.expr import symbol
    >>> from serrate.ir.loops import number
    >>> q, k = number(symbol("q")), number(symbol("k"))
    >>> found, rest = conditions_of(call("le", k, q, dtype=torch.bool))
    >>> print(*found, rest)
    k < q + 1 None
    """
    if not isinstance(test, Call):
        return (), test
    if test.function == "logical_and":
        (first, left), (second, right) = map(conditions_of, test.args)
        rest = [v for v in (left, right) if v is not None]
        both = call("logical_and", *rest, dtype=torch.bool) if len(rest) == 2 else None
        return (*first, *second), both or next(iter(rest), None)
    sides = [e for v in test.args if (e := as_index(v)) is not None]
    if len(sides) != 2 or len(test.args) != 2:
        return (), test
    a, b = sides
    at_most, at_least = Less(a, b + 1), Less(b, a + 1)
    found: dict[str, Guard] = {
        "lt": (Less(a, b),),
        "le": (at_most,),
        "gt": (Less(b, a),),
        "ge": (at_least,),
        "eq": (at_most, at_least),
    }
    return (found[test.function], None) if test.function in found else ((), test)


def as_index(value: Value) -> Expr | None:
    """An integer value as an index expression; None if it is not one."""
    if isinstance(value, Number):
        return value.expr
    if isinstance(value, Constant) and not value.dtype.is_floating_point and value.dtype != torch.bool:
        return const(int(value.number))
    if not isinstance(value, Call) or value.dtype != torch.int64:
        return None
    exprs = [e for v in value.args if (e := as_index(v)) is not None]
    if len(exprs) < len(value.args):
        return None
    if value.function == "add":
        return exprs[0] + exprs[1]
    if value.function == "sub":
        return exprs[0] - exprs[1]
    if value.function == "neg":
        return const(0) - exprs[0]
    return exprs[0] if value.function == "cast" else None


def bounds_a_lane(guard: Less, lanes: Lanes) -> bool:
    """Whether a condition bounds a single lane, or depends on none; matrix products support no others."""
    mine = {lane.symbol for lane in lanes} & guard.symbols
    return len(mine) <= 1 and all((end_of(guard, s) or start_of(guard, s)) is not None for s in mine)


def bounding(guard: Guard, lanes: Lanes) -> Guard:
    """The bounds that conditions put on single lanes, for any position of the other lanes."""
    found: dict[Less, None] = {}
    for condition in guard:
        mine = [lane.symbol for lane in lanes if lane.symbol in condition.symbols]
        if bounds_a_lane(condition, lanes):
            found[condition] = None
            continue
        for s in mine:
            loose = possible(condition, [other for other in mine if other is not s])
            if loose is not None and not loose.proven and bounds_a_lane(loose, lanes):
                found[loose] = None
    return tuple(found)
