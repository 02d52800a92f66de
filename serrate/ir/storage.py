"""Storage: the memory layout of a tensor over given logical domains, with rows back to back.

In: logical domains. Out: storage domains, all of them regular: every ragged domain is combined with its owner.

    [C, R]          -> combine(C, R)                     rows back to back
    [G, C, R[g][c]] -> [G, I] or combine(merge(G, C), R)  the domain that was partitioned under G, else all parts in order
    [C, R1, R2]     -> combine(C, product(R1, R2))       len1*len2 elements per component, packed
    [D, S, W[s]]    -> combine(D, combine(S, W))         words of the sentences of documents
    [C1, R1, C2, R2] -> two storage dims                 independent pairs
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.errors import ShapeError
from serrate.ir.domains import IterDomain, shape_text
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import combine, product
from serrate.ir.transforms import Merge, merge, picks


def storage_of(logical: Sequence[IterDomain]) -> tuple[IterDomain, ...]:
    """Storage domains for rows back to back.

    >>> from serrate.ir import partition
    >>> c, r = partition(IterDomain(10), [0, 3, 8, 10])
    >>> [d.extent for d in storage_of([c, r, IterDomain(4)])]
    [10, 4]
    """
    domains = collapse(logical)
    if any(d.is_ragged for d in domains):
        raise ShapeError(
            f"a tensor of shape {shape_text(logical)} cannot be stored: a ragged dim needs the dims that count its rows"
        )
    return domains


def row_dims(logical: Sequence[IterDomain]) -> tuple[IterDomain, ...]:
    """The dims of one row: without those that select it.

    >>> from serrate.ir import partition
    >>> c, r = partition(IterDomain(10), [0, 3, 8, 10])
    >>> [d.uid for d in row_dims([c, r])] == [r.uid]
    True
    """
    there = {d.uid for d in logical}
    owners = [owner for d in logical for owner in d.owners]
    chosen = {owner.uid for owner in owners} | {
        d.uid for d in logical for owner in owners if owner.uid not in there and picks(d, owner)
    }
    return tuple(d for d in logical if d.uid not in chosen)


def collapse(domains: Sequence[IterDomain]) -> tuple[IterDomain, ...]:
    """The domains with every ragged one combined with its component if that is present, outermost first.

    A ragged component (sentences of a document) is combined with its rows (words) even if the document dim is absent.
    """
    left = list(domains)
    while any(step(left) for step in (_multiply, _combine, _merge)):
        pass
    return tuple(left)


def _multiply(left: list[IterDomain]) -> bool:
    """Multiplies two ragged domains of one component, before either is combined with it alone."""
    for k, outer in enumerate(left):
        for j, inner in enumerate(left[k + 1 :], k + 1):
            if _of_one_component(outer, inner) and _owner_of(left, outer) is not None:
                left[k] = product(outer, inner)
                del left[j]
                return True
    return False


def _of_one_component(outer: IterDomain, inner: IterDomain) -> bool:
    return outer.uid != inner.uid and outer.is_ragged and [d.uid for d in outer.owners] == [d.uid for d in inner.owners]


def _combine(left: list[IterDomain]) -> bool:
    """Combines a ragged domain with its owner; with ragged owners (sentences without their document), the innermost rows first,
    because a combined domain does not own other rows."""
    for k, domain in enumerate(left):
        owner = next((j for j, other in enumerate(left) if j != k and _owns(other, domain)), None)
        inner = owner is not None and left[owner].is_ragged and any(_owns(domain, other) for other in left)
        if owner is not None and not inner:
            left[owner] = combine(left[owner], domain)
            del left[k]
            return True
    return False


def _merge(left: list[IterDomain]) -> bool:
    """Merges the domains that together own a ragged one, or a part of its owner."""
    for domain in left:
        for component in domain.owners:
            parts = _parts(left, component)
            if parts is not None:
                left[parts[0]] = merge(left[parts[0]], left[parts[1]])
                del left[parts[1]]
                return True
    return False


def _parts(left: Sequence[IterDomain], component: IterDomain) -> tuple[int, int] | None:
    """The positions of the two domains that the component, or a part of it, was merged from."""
    made = component.definition
    if not isinstance(made, Merge):
        return None
    places = [next((j for j, d in enumerate(left) if d.uid == part.uid), None) for part in made.inputs]
    if places[0] is not None and places[1] is not None:
        return places[0], places[1]
    return next((found for part in made.inputs if (found := _parts(left, part)) is not None), None)


def _owner_of(left: Sequence[IterDomain], ragged: IterDomain) -> int | None:
    """The position of a domain that the ragged one can be combined with, or of a part of such a domain."""
    for j, other in enumerate(left):
        if _owns(other, ragged) or any(other.uid == part.uid for owner in ragged.owners for part in _leaves(owner)):
            return j
    return None


def _leaves(component: IterDomain) -> list[IterDomain]:
    made = component.definition
    return [component] + ([d for part in made.inputs for d in _leaves(part)] if isinstance(made, Merge) else [])


def _owns(component: IterDomain, ragged: IterDomain) -> bool:
    if not isinstance(ragged, RaggedIterDomain):
        return False
    made, own = component.definition, ragged.definition
    if isinstance(own, Partition) and [d.uid for d in own.outputs] == [component.uid, ragged.uid] and own.lengths is None:
        return True
    counts = [component, *(made.inputs if component.is_ragged and isinstance(made, Partition) else ())]
    return any(d.uid == ragged.component.uid for d in counts)
