"""What a domain is made from: one walk over domains, transforms and arrays.

In: a domain. Out: everything behind it, each node once, nearest first.
"""

from __future__ import annotations

from collections.abc import Iterator

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Owners
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.transforms import Transform


def traverse(domain: IterDomain) -> tuple[IterDomain | Transform | Array, ...]:
    """Everything a domain is made from: itself, its component and the components' own domains, the transforms behind them
    and the arrays that extents come from, each once.

    >>> off = Array("off")
    >>> off in traverse(RaggedIterDomain.from_offsets(off, 3))
    True
    """
    found: dict[int | Transform | Array, IterDomain | Transform | Array] = {}
    pending: list[IterDomain | Transform | Array] = [domain]
    while pending:
        node = pending.pop(0)
        key = node.uid if isinstance(node, IterDomain) else node
        if key in found:
            continue
        found[key] = node
        if isinstance(node, IterDomain):
            pending.extend(_behind(node))
        elif isinstance(node, Array):
            pending.extend(sorted(_sources(node), key=str))
        else:
            pending.extend((*node.inputs, *node.beside))
    return tuple(found.values())


def _behind(domain: IterDomain) -> Iterator[IterDomain | Transform | Array]:
    expressions = [domain.extent_expr]
    if isinstance(domain, RaggedIterDomain):
        yield domain.component
        yield from domain.given
        expressions += [domain.length, *([] if domain.row_start is None else [domain.row_start])]
    if domain.definition is not None:
        yield domain.definition
    yield from sorted({a for e in expressions for a in e.arrays}, key=str)


def _sources(array: Array) -> frozenset[Array]:
    recipe = array.recipe
    if recipe is None:
        return frozenset()
    return frozenset((recipe.offsets,)) if isinstance(recipe, Owners) else recipe.term.arrays
