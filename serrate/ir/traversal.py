"""Dependencies of domains and values: one walk over domains, transforms and arrays.

In: a domain, or a value. Out: everything a domain depends on, each node once, nearest first; the arrays that domains or a value
depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.transforms import Transform
from serrate.ir.values import Computed, Extent, Place, Read, Value


def traverse(domain: IterDomain) -> tuple[IterDomain | Transform | Array, ...]:
    """Everything a domain depends on: itself, its component and the components' own domains, the transforms that made them, and
    the arrays that extents come from, each once.

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
            pending.extend(_direct_dependencies(node))
        elif isinstance(node, Array):
            pending.extend(sorted(node.recipe.arrays if node.recipe is not None else (), key=str))
        else:
            pending.extend((*node.inputs, *node.beside))
    return tuple(found.values())


def arrays_of(domains: Iterable[IterDomain]) -> frozenset[Array]:
    """The arguments and computed tensors that determine the extents, starts and positions of domains."""
    found = {node for domain in domains for node in traverse(domain) if isinstance(node, Array)}
    return frozenset(source for array in found for source in array.sources)


def arrays_in(value: Value) -> frozenset[Array]:
    """The arguments and computed tensors that a value depends on beyond what it reads: those in its places, and row lengths."""
    found: set[Array] = set()
    for node in value.walk():
        places = node.index if isinstance(node, Read) else (node.place,) if isinstance(node, Computed) else ()
        found.update(source for at in places if isinstance(at, Place) for a in at.expr.arrays for source in a.sources)
        if isinstance(node, Extent):
            found |= arrays_of([node.domain])
    return frozenset(found)


def _direct_dependencies(domain: IterDomain) -> Iterator[IterDomain | Transform | Array]:
    expressions = [domain.extent_expr]
    if isinstance(domain, RaggedIterDomain):
        yield domain.component
        yield from domain.given
        expressions += [domain.length, *([] if domain.row_start is None else [domain.row_start])]
    if domain.definition is not None:
        yield domain.definition
    yield from sorted({a for e in expressions for a in e.arrays}, key=str)
