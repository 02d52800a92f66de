"""The primitive `about_pivot`: moments of a row from plain sums, which every lane accumulates on its own until the row is done.

In: a reduction with an `about_pivot` form. Out: phases: the mean of the row's first positions, sums relative to it, the states.

    n, m, s welford= x over r   ->   b sum= x over the first positions of r;  p = b / their number
                                     near, squares = sums of x - p and of its square over r
                                     n = length;  m = p + near / n;  s = squares - near^2 / n
The final subtraction loses at most log(length / first positions) digits, whatever the elements: the first positions are part of
the row, so a pivot far from the mean makes the squares large too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from serrate.errors import ScheduleError
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.expr import minimum
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import within_row
from serrate.ir.reductions import SUM
from serrate.ir.tile import SERIAL, Accumulate, Phase, Store, nest
from serrate.ir.values import Role, Tensor, Value, call, constant, extent, read


def about_pivot(
    phase: str, loops: tuple[tuple[IterDomain, ParallelType], ...], leaf: Accumulate, reduced: list[IterDomain], size: int
) -> tuple[Phase, ...]:
    """The phases in place of a reduction over `reduced`; `size` is the number of first positions."""
    made, rows = leaf.reduction.about_pivot, [d for d in reduced if isinstance(d, RaggedIterDomain)]
    if made is None or len(rows) != 1 or len(leaf.values) != 1:
        raise ScheduleError(f"phase {phase} is not a reduction of one row at a time that can be computed about a pivot")
    (row,) = rows
    first = within_row(row.component, row, minimum(row.length, size), row.bound)
    name, dtype = leaf.targets[0].name, leaf.targets[0].dtype
    begun, pivot, *sums = (
        replace(leaf.targets[0], name=f"{name}_{each}", role=Role.SCRATCH, base=None)
        for each in ("begun", "pivot", *(state.name for state in made.sums.states))
    )
    center = read(pivot, leaf.index)
    kept = tuple((d, SERIAL) for d, _ in loops if d not in reduced)

    def moved(domains: Iterable[IterDomain]) -> tuple[IterDomain, ...]:
        return tuple(first if d is row else d for d in domains)

    def count(domains: Iterable[IterDomain]) -> Value:
        sizes = (call("cast", extent(d), dtype=dtype) for d in domains)
        return functools.reduce(lambda a, b: call("mul", a, b, dtype=dtype), sizes)

    def stored(target: Tensor, value: Value) -> Phase:
        return Phase(target.name, nest(kept, Store(target, leaf.index, value)))

    seen = call("maximum", count(moved(reduced)), constant(1.0, dtype), dtype=dtype)
    beginning = Accumulate((begun,), leaf.index, SUM, leaf.values, moved(leaf.over))
    relative = replace(leaf, targets=tuple(sums), reduction=made.sums, values=(*leaf.values, center))
    states = made.result(tuple(read(s, leaf.index) for s in sums), center, count(reduced))
    return (
        Phase(begun.name, nest(tuple((first if d is row else d, kind) for d, kind in loops), beginning)),
        stored(pivot, call("div", read(begun, leaf.index), seen, dtype=dtype)),
        Phase(sums[0].name, nest(loops, relative)),
        *(stored(target, value) for target, value in zip(leaf.targets, states, strict=True)),
    )
