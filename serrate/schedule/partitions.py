"""Partition of a loop by a schedule: by numbers, or by offsets that the program itself partitions by.

In: the loops of a tensor, the index of the loop to partition, and boundaries. Out: the component loop and the ragged loop.
Multi-dimensional offsets have a row of boundaries for each position of the enclosing loops; for a ragged loop, for each of its
rows.

    for i:             s   ->   for c: for r[c]: s                by K+1 boundaries
    for g: for i:      s   ->   for g: for c: for r[g][c]: s      by [G, K+1]
    for c: for r[c]:   s   ->   for c: for k: for r'[c][k]: s     by [C, K+1]: the ragged loop is partitioned again
    for c: for r[c]:   s   ->   for g: for c'[g]: for r[c]: s     by G+1: the component loop is partitioned
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from serrate.errors import DomainError, ScheduleError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, const
from serrate.ir.nested import depth_of, flattened, integers
from serrate.ir.partition import Pair, Partition, partition
from serrate.ir.ragged import RaggedIterDomain

UNDER = "under"
"""Marks, in the arguments of a step, the number of enclosing loops that have separate boundaries."""


def by_numbers(phase: str, loops: Sequence[IterDomain], place: int, offsets: object) -> tuple[Pair, tuple[str | int, ...]]:
    """The two loops; and the boundaries as the arguments of a step, which `from_step` reads."""
    domain, known = loops[place], integers("partition: offsets", offsets)
    flat = tuple(flattened(known))
    outside = 0 if domain.is_ragged else max(depth_of(known) - 1, 0)
    if outside > place:
        raise ScheduleError(
            f"partition: offsets of {domain.name} of {phase} have {outside} leading dims, but only {place} loops are outside it"
        )
    under = tuple(loops[place - outside : place])
    for each in (domain, *under):
        if not _is_known(each):
            what = "lengths" if each.is_ragged else "an extent"
            raise ScheduleError(f"partition: {each} of {phase} has {what} known only at run time; {list(flat)} may not end there")
    return partition(domain, known, under=under), ((UNDER, outside, *flat) if outside else flat)


def from_step(phase: str, loops: Sequence[IterDomain], place: int, args: Sequence[str | int]) -> Pair:
    """The two loops, from the arguments that `by_numbers` returned."""
    numbers, outside = [b for b in args if isinstance(b, int)], 0
    if args and args[0] == UNDER:
        outside, *numbers = numbers
    outer = loops[place].owners or loops[place - outside : place]
    sizes = [d.extent_expr.value for d in outer if d.extent_expr.value is not None]
    nested: list[object] = list(numbers)
    if outer and len(sizes) == len(outer):
        for size in (len(numbers) // max(math.prod(sizes), 1), *reversed(sizes[1:])):
            nested = [nested[k : k + size] for k in range(0, len(nested), max(size, 1))]
    return by_numbers(phase, loops, place, nested)[0]


def _is_known(domain: IterDomain) -> bool:
    if not isinstance(domain, RaggedIterDomain):
        return domain.extent_expr.value is not None
    try:
        return isinstance(domain.extents, tuple)
    except DomainError:
        return False


def by_offsets(
    phase: str, loops: Sequence[IterDomain], place: int, offsets: Array, known: Iterable[Partition], program: str | None = None
) -> Pair:
    """The two loops, by a runtime array that also partitions an equal domain (`known`), because calls check only those."""
    domain = loops[place]
    for made in known:
        under = _under(loops, place, made) if made.starts == offsets and made.lengths is None else None
        if under is not None:
            return partition(domain, offsets, made.outputs[0].extent_expr, under=under, program=program)
    what = "rows" if domain.is_ragged else "an extent"
    raise ScheduleError(
        f"partition: {offsets} does not partition {what} of {domain.row_length} anywhere in the program, so nothing "
        f"checks that it fits {domain.name} of {phase}; use as_nested in the math, or known offsets"
    )


def _under(loops: Sequence[IterDomain], place: int, made: Partition) -> tuple[IterDomain, ...] | None:
    """The loops outside that have boundaries of their own, if the loop can be partitioned as `made` partitions its domain."""
    domain, whole = loops[place], made.inputs[0]
    if domain.is_ragged != whole.is_ragged or domain.row_length is not whole.row_length:
        return None
    if made.group is None or domain.is_ragged:
        same = all(a.extent_expr is b.extent_expr for a, b in zip(domain.owners, whole.owners, strict=True))
        return () if same else None
    for first in reversed(range(place)):
        outside = loops[first:place]
        if any(d.is_ragged for d in outside):
            return None
        if (math.prod((d.extent_expr for d in outside), start=const(1)) - made.group.extent_expr).value == 0:
            return tuple(outside)
    return None
