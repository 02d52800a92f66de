"""Block permutation of rows: the domains that index them change order.

In: a ragged domain owned by a merge of several regular domains. Out: the same rows, owned by a merge of these domains in another
order; rows stay whole, so positions within a row do not change.

| transform | from -> to              | to_inputs | extents                       |
| reordered | R[a][b] -> R'[b][a]     | r = r'    | the lengths, in another order |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Expr, const
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.transforms import Merge, Outputs, Shift, divisor, finish, merge, once, plain


@dataclass(frozen=True, eq=False)
class Reordered(Shift):
    """R[a][b] -> R'[b][a] with r' = r."""


def counted_by(rows: RaggedIterDomain) -> tuple[IterDomain, ...]:
    """The domains that together own a ragged one, outermost first: its component, or the domains merged into it."""
    return _leaves(rows.component)


def _leaves(component: IterDomain) -> tuple[IterDomain, ...]:
    made = component.definition
    return tuple(leaf for part in made.inputs for leaf in _leaves(part)) if isinstance(made, Merge) else (component,)


def reordered(rows: RaggedIterDomain, counts: Sequence[IterDomain]) -> RaggedIterDomain:
    """R[a][b] -> R'[b][a]: `counts` are the domains that own the rows, in the new order.

    >>> from serrate.ir import partition
    >>> g = IterDomain(2)
    >>> c, r = partition(IterDomain(100), [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[g])
    >>> reordered(r, [c, g]).extents
    ((30, 25), (0, 35), (40, 25), (30, 15))
    """
    plain("reordered", rows)
    old = counted_by(rows)
    if sorted(d.uid for d in old) != sorted(d.uid for d in counts):
        raise DomainError(f"reordered: {rows} is owned by {', '.join(map(str, old))}, not by {', '.join(map(str, counts))}")

    def make() -> Outputs:
        owner = counts[0]
        for each in counts[1:]:
            owner = merge(owner, each)
        # Split a coordinate in the new order, and merge it in the old one.
        at: dict[int, Expr] = {}
        rest: Expr = COORDINATE
        for each in reversed(counts[1:]):
            size = divisor(each.extent_expr)
            at[each.uid], rest = rest % size, rest // size
        at[counts[0].uid] = rest
        coordinate: Expr = const(0)
        for each in old:
            coordinate = coordinate * each.extent_expr + at[each.uid]
        output = RaggedIterDomain(
            rows.extent_expr,
            iter_type=rows.iter_type,
            name=f"{rows.name}p",
            pairing=rows.pairing,
            component=owner,
            length=rows.length_of(coordinate),
            bound=rows.host_bound,
        )
        return finish(Reordered((rows,), (), const(0)), (output,))

    return cast(RaggedIterDomain, once(rows, ("reordered", *(d.uid for d in counts)), make)[0])
