"""Reductions: associative combinations that may be cut into tiles and between workers, and finished in order.

In: a name. Out: a `Reduction`, which says what state it carries and what an empty one holds. A value `x` is lifted to a
state first (`softmax`: x -> (max x, sum 1)); states are combined. Because lifting and combining are all that a reduction
is, one Accumulate statement serves a whole row, a tile of it, and the ordered finish of partial results.

| reduction | state               | lift(x)   | combine                                                          |
| sum, prod | total               | x         | +, *                                                             |
| max, min  | extremum            | x         | max, min; NaN wins                                               |
| any, all  | bool                | x != 0    | or, and                                                          |
| softmax   | maximum, total      | (x, 1)    | M = max(m1, m2); t1*e^(m1-M) + t2*e^(m2-M)                       |
| softmax_max  the maximum alone, as softmax starts it                                                    |
| argmax, argmin | extremum, place | (x, place) | the better extremum; the smaller place where both are equal     |
| welford   | count, mean, square | (1, x, 0) | n = n1+n2; d = m2-m1; m1 + d*n2/n; s1 + s2 + d*d*n1*n2/n         |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from serrate.errors import DtypeError


@dataclass(frozen=True)
class Reduction:
    """One row of the table above."""

    name: str
    states: tuple[str, ...]
    lifted: tuple[float | None, ...]
    """What each state is after lifting values: None for a value itself (in their order), else a constant."""

    def __str__(self) -> str:
        return self.name

    def identity(self, state: int, dtype: torch.dtype) -> float | int | bool:
        """What an empty state holds."""
        if self.name in ("sum", "welford") or self.states[state] == "total":
            return 0 if not dtype.is_floating_point else 0.0
        if self.states[state] == "place":
            # Behind every place there is, so that any place is before it.
            return torch.iinfo(torch.int64).max
        if self.name == "prod":
            return 1 if not dtype.is_floating_point else 1.0
        if self.name in ("any", "all"):
            return self.name == "all"
        if self.name in ("softmax", "softmax_max"):
            # Finite, so that e^(maximum - maximum) is 1 and not NaN when nothing was seen yet.
            return torch.finfo(dtype).min
        lowest = self.name in ("max", "argmax")
        if dtype.is_floating_point:
            return float("-inf") if lowest else float("inf")
        if dtype == torch.bool:
            return not lowest
        info = torch.iinfo(dtype)
        return info.min if lowest else info.max


REDUCTIONS: dict[str, Reduction] = {
    **{name: Reduction(name, (state,), (None,)) for name, state in [("sum", "sum"), ("prod", "prod"), ("max", "max")]},
    **{name: Reduction(name, (name,), (None,)) for name in ("min", "any", "all")},
    **{name: Reduction(name, ("extremum", "place"), (None, None)) for name in ("argmax", "argmin")},
    "softmax_max": Reduction("softmax_max", ("maximum",), (None,)),
    "softmax": Reduction("softmax", ("maximum", "total"), (None, 1.0)),
    "welford": Reduction("welford", ("count", "mean", "square"), (1.0, None, 0.0)),
}


def reduction(name: str) -> Reduction:
    """The reduction of that name."""
    if name not in REDUCTIONS:
        raise DtypeError(f"no reduction is called {name!r}; there are {', '.join(REDUCTIONS)}")
    return REDUCTIONS[name]
