"""Vectorized loops: whether a vector is whole wherever it is entered.

In: logical domains and loops, some of them marked `vectorize`. Out: nothing, or a `DomainError` that says what cuts a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.errors import DomainError
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.nested import flattened
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.transforms import Merge, Split


def check_vectorized(logical: Sequence[IterDomain], loop: Sequence[IterDomain]) -> None:
    """Raises `DomainError` unless every vectorized loop is whole wherever it is entered.

    A vector of v positions is read or written at once, so no condition may hold in a part of it only. Its positions are
    neighbours that begin at a multiple of v in every domain between it and the logical ones, and a guard `i < N` on such a domain
    does not cut it exactly when v divides N. So:

      split   the vector is in the inner part; v divides the inner extent (or it begins anywhere in i) and N (or i < N cuts it).
      merge   v divides the inner extent, or it would run on into the next position of the outer domain.
      partition   v divides every row; what precedes the rows moves a vector as a whole and is not looked at further.

    >>> from serrate.ir import IterDomain, ParallelType, split
    >>> d = IterDomain(32)
    >>> outer, inner = split(d, 8, inner=False)
    >>> tile, vector = split(inner, 4)
    >>> check_vectorized([d], [outer, tile, vector.parallelize(ParallelType.VECTORIZE)])
    """
    for vector in loop:
        if vector.parallel is ParallelType.VECTORIZE:
            size = vector.extent_expr.value
            if vector.is_ragged or size is None:
                raise DomainError(f"check_vectorized: the extent of {vector} must be known when the program is compiled")
            for domain in must_divide(vector, logical):
                _divides(vector, size, domain)


def must_divide(vector: IterDomain, logical: Sequence[IterDomain]) -> list[IterDomain]:
    """The domains whose extent (in every row) the size of a vector must divide; raises where its positions lie apart.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(32, name="d")
    >>> [str(domain) for domain in must_divide(split(d, 4)[1], [d])]
    ['i.di{4}', 'i.d{32}']
    """
    found: list[IterDomain] = []
    ends, domain = {d.uid for d in logical}, vector
    while domain.uid not in ends and domain.definition is not None:
        transform = domain.definition
        if isinstance(transform, Split) and transform.outputs[1].uid == domain.uid:
            found.append(domain)
            domain = transform.inputs[0]
            found.append(domain)
        elif isinstance(transform, Merge):
            domain = transform.inputs[1]
            found.append(domain)
        elif isinstance(transform, Partition) and transform.inputs[0].uid in ends:
            break
        else:
            raise DomainError(
                f"check_vectorized: the positions of {vector} are not neighbours, because {domain} came of `{transform.label}`"
            )
    return found


def _divides(vector: IterDomain, size: int, domain: IterDomain) -> None:
    if (domain.row_length % size).value == 0:
        return
    try:
        rows = flattened(domain.extents) if isinstance(domain, RaggedIterDomain) else []
    except DomainError:
        rows = []
    if not rows or any(length % size for length in rows):
        extent = domain if domain.is_ragged else domain.extent_expr
        raise DomainError(f"check_vectorized: {vector} is cut in two, because {size} does not divide {extent}")
