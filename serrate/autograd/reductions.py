"""The derivatives of reductions.

In: a reduction statement, and the adjoints of its results. Out: adjoints of the values that it reduced, one value per position of
its domains. A rule may ask for further sums over the same positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from serrate.autograd.derivatives import Adjoints, is_, number, select, times, zero
from serrate.ir.domains import IterDomain
from serrate.ir.fusion import Fusion
from serrate.ir.reductions import COUNT, MEAN, PROD, SQUARE, SUM, Reduction
from serrate.ir.tile import Accumulate
from serrate.ir.values import Places, Value, call, read


@dataclass(frozen=True)
class Reduced:
    """A reduction being differentiated."""

    fusion: Fusion
    statement: Accumulate
    domains: tuple[IterDomain, ...]
    """The domains of the statement."""
    place: Places
    """Where results are read for a position of the domains."""

    def again(self, kind: Reduction, value: Value) -> Value:
        """`value` reduced over the same positions, as an element at each of them."""
        statement = self.statement
        target = self.fusion.tensor(value.dtype, statement.targets[0].logical)
        again = Accumulate((target,), statement.index, kind, (value,), statement.over)
        self.fusion.define([target], self.domains, again)
        return read(target, self.place)

    def result(self, state: int) -> Value:
        return read(self.statement.targets[state], self.place)


Rule = Callable[[Reduced, tuple[Value | None, ...], tuple[Value, ...]], Adjoints]
"""From the reduction, the adjoint of each result (None: zero), and the reduced values."""


def _sum(r: Reduced, g: Adjoints, values: tuple[Value, ...]) -> Adjoints:
    return (g[0],)


def _prod(r: Reduced, g: Adjoints, values: tuple[Value, ...]) -> Adjoints:
    """g times the product of all others: out / x; next to a single zero, the product of what is not 0."""
    assert g[0] is not None
    x, gone = values[0], is_("eq", values[0], 0.0)
    zeros = r.again(SUM, select(gone, number(1.0, g[0])))
    rest = r.again(PROD, call("where", gone, number(1.0, g[0]), x, dtype=g[0].dtype))
    alone = call("logical_and", gone, is_("eq", zeros, 1.0), dtype=torch.bool)
    others = call("div", rest, call("where", gone, number(1.0, g[0]), x, dtype=g[0].dtype), dtype=g[0].dtype)
    found = select(is_("eq", zeros, 0.0), others, select(alone, rest, zero(g[0])))
    return (times(g[0], found),)


def _extremum(r: Reduced, g: Adjoints, values: tuple[Value, ...]) -> Adjoints:
    """All positions that hold the extremum share the adjoint evenly, as in `torch.amax`."""
    assert g[0] is not None
    own = is_("eq", values[0], r.result(0))
    count = r.again(SUM, select(own, number(1.0, g[0])))
    return (select(own, call("div", g[0], count, dtype=g[0].dtype)),)


def _first_extremum(r: Reduced, g: Adjoints, values: tuple[Value, ...]) -> Adjoints:
    """The position that was found gets the whole adjoint."""
    assert g[0] is not None
    return select(call("eq", values[1], r.result(1), dtype=torch.bool), g[0]), None


def _softmax(r: Reduced, g: Adjoints, values: tuple[Value, ...]) -> Adjoints:
    """total = sum of e^(x - maximum). The maximum is only where exponents are measured from: whatever a program computes from
    both does not depend on it, so it counts as a constant."""
    if g[1] is None:
        return (None,)
    return (times(g[1], call("exp_diff", values[0], r.result(0), dtype=g[1].dtype)),)


def _welford(r: Reduced, g: Adjoints, values: tuple[Value, ...]) -> Adjoints:
    """g_mean / count + 2 (x - mean) g_square; distances from the mean sum to 0, so the squares do not change with the mean."""
    found: Value | None = None
    mean, square = g[MEAN], g[SQUARE]
    if mean is not None:
        found = call("div", mean, r.result(COUNT), dtype=mean.dtype)
    if square is not None:
        away = call("sub", values[0], r.result(MEAN), dtype=square.dtype)
        more = times(square, 2.0, away)
        found = more if found is None else call("add", found, more, dtype=more.dtype)
    return (found,)


REDUCTIONS: dict[str, Rule | None] = {
    "sum": _sum,
    "prod": _prod,
    "max": _extremum,
    "min": _extremum,
    "any": lambda r, g, values: (None,),
    "all": lambda r, g, values: (None,),
    "argmax": _first_extremum,
    "argmin": _first_extremum,
    "softmax_max": None,  # only schedules introduce it
    "softmax": _softmax,
    "welford": _welford,
}
"""The name of a reduction -> rule; None if it has no derivative."""

CONSTANT: dict[str, tuple[int, ...]] = {"softmax": (0,), "welford": (COUNT,)}
"""States that count as constants."""
