"""Vectorized loops: whether every vector is contiguous in memory and is always executed as a whole.

In: a loop to vectorize, and an access: an index, and how the tensor is stored. Out: a `VectorAccess`: legal, illegal with the
reason, or legal if the size divides extents that are known only at a call.

A vector of v positions is read or written at once. In every domain between the loop and the index it begins at a multiple of v,
so a guard `i < N` never holds for only part of a vector iff v divides N:

  split       the vector is in the inner part; v divides the inner extent (or it begins anywhere in i) and N (or i < N cuts it).
  merge       the vector runs along both dims as one. Where the index has both, memory decides: `wide_access`. Where it has the
              inner one only, v divides the inner extent, or the vector would run on into the next position of the outer dim.
  partition   v divides every row, and where rows have gaps between them, every start.

The dims the vector runs along must be the innermost of the storage, and contiguous over the vector's length: `wide_access`
decides. Permuted and blocked storage is analysed as stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serrate.analysis.contiguity import divides, in_every_row, wide_access
from serrate.analysis.indices import Indices, ancestry
from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain, ParallelType
from serrate.ir.expr import Expr, const, symbol
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine
from serrate.ir.transforms import Merge, Split
from serrate.ir.values import Place, Places, domains_of


@dataclass(frozen=True)
class MustDivide:
    """What the size of a vector must divide: `value`, for every component of `rows` if it mentions COORDINATE."""

    size: int
    value: Expr
    what: str
    rows: IterDomain | None = None

    @property
    def known(self) -> bool | None:
        """Whether it does; None if that is known only at a call."""
        found = {divides(self.size, value) for value in in_every_row(self.value, self.rows)}
        return False if False in found else None if None in found else True

    def __str__(self) -> str:
        values = in_every_row(self.value, self.rows)
        shown = str(values[0]) if len(values) == 1 else f"[{', '.join(map(str, values))}]"
        return f"{self.size} does not divide {shown.replace(str(COORDINATE), 'c')}, {self.what}"


@dataclass(frozen=True)
class VectorAccess:
    """Whether an access may be a vector; `legal` is None if `checks` must decide at each call."""

    legal: bool | None
    why: str = ""
    checks: tuple[MustDivide, ...] = ()


def check_vectorized(
    logical: Sequence[IterDomain], loop: Sequence[IterDomain], storage: Sequence[IterDomain] | None = None
) -> None:
    """Raises `DomainError` unless every vectorized loop may access a tensor over `logical` in vectors.

    The tensor is stored row-major over `storage`, or over `logical` itself.

    >>> from serrate.ir import IterDomain, ParallelType, merge, split
    >>> a, b = IterDomain(2, name="a"), IterDomain(6, name="b")
    >>> outer, vector = split(merge(a, b), 4)
    >>> check_vectorized([a, b], [outer, vector.parallelize(ParallelType.VECTORIZE)])
    >>> check_vectorized([a, b], [outer, vector.parallelize(ParallelType.VECTORIZE)], [b, a])
    Traceback (most recent call last):
    serrate.errors.DomainError: check_vectorized: i.abi{4}.vectorize: neighbours along b are apart in memory [i.b{6}, i.a{2}]
    """
    for vector in loop:
        if vector.parallel is ParallelType.VECTORIZE:
            found = vector_access(vector, loop, tuple(logical), tuple(logical), tuple(logical if storage is None else storage))
            if found.legal is not True:
                raise DomainError(f"check_vectorized: {vector}: {found.why}")


def vector_access(
    vector: IterDomain,
    loops: Sequence[IterDomain],
    index: Places,
    logical: Sequence[IterDomain],
    storage: Sequence[IterDomain],
) -> VectorAccess:
    """Whether the positions of the loop `vector` access a tensor at `index` as one vector.

    `index` has an entry for each of the tensor's `logical` dims, which are stored row-major over `storage`.

    >>> from serrate.ir import IterDomain, split
    >>> a, b = IterDomain(2, name="a"), IterDomain(8, name="b")
    >>> outer, inner = split(b, 4)
    >>> vector_access(inner, [a, outer, inner], (a, b), (a, b), (a, b)).legal
    True
    >>> vector_access(inner, [a, outer, inner], (a, b), (a, b), (b, a)).why
    'neighbours along b are apart in memory [i.b{8}, i.a{2}]'
    """
    size = vector.extent_expr.value
    if vector.is_ragged or size is None:
        return VectorAccess(False, f"the extent of {vector} must be known when the program is compiled; split it by a number")
    moving = _moving(vector, loops, index)
    if size == 1 or not moving:
        return VectorAccess(True)
    if any(isinstance(at, Place) for at in moving):
        return VectorAccess(False, "the index is computed, so positions of a vector may not be adjacent in memory")
    try:
        needs, run = _run(vector, size, {at.uid for at in moving if isinstance(at, IterDomain)})
        places = [next(k for k, at in enumerate(index) if isinstance(at, IterDomain) and at.uid == d.uid) for d in run]
        whole = _verdict(needs)
        if run and whole.legal is not False:
            whole = _verdict([*needs, *_in_memory(size, [logical[k] for k in places], logical, storage)])
    except DomainError as error:
        return VectorAccess(False, str(error))
    return whole


def _verdict(needs: Sequence[MustDivide]) -> VectorAccess:
    known = [(need, need.known) for need in dict.fromkeys(needs)]
    broken = next((need for need, holds in known if holds is False), None)
    if broken is not None:
        return VectorAccess(False, str(broken))
    unknown = tuple(need for need, holds in known if holds is None)
    return VectorAccess(None if unknown else True, "; ".join(map(str, unknown)), unknown)


def _moving(vector: IterDomain, loops: Sequence[IterDomain], index: Places) -> list[IterDomain | Place]:
    """The entries of an index that change along the vector."""
    indices = Indices([(d, symbol(f"@{d.uid}")) for d in loops])
    own = symbol(f"@{vector.uid}")
    return [at for at in index if at is not None and any(own in indices.of(d).symbols for d in domains_of((at,)))]


def _run(vector: IterDomain, size: int, ends: set[int]) -> tuple[list[MustDivide], list[IterDomain]]:
    """What the size of a vector must divide, and the domains among `ends` that it runs along, as one merged dim.

    It may run along none of them: along dims that the index lacks, all lanes access one element.
    """
    needs: list[MustDivide] = []
    domain = vector
    while domain.uid not in ends:
        made = domain.definition
        if isinstance(made, Split) and made.outputs[1].uid == domain.uid:
            domain = made.inputs[0]
        elif isinstance(made, Merge | Combine):
            leaves = _leaves(domain, ends)
            if leaves[-1].uid in ends:
                return needs, _last(leaves, lambda d: d.uid in ends)
            lacking = _last(leaves, lambda d: d.uid not in ends)
            if all(d.definition is None for d in lacking):
                extent = math.prod((d.extent_expr for d in lacking), start=const(1))
                needs.append(MustDivide(size, extent, f"the extent of {' x '.join(d.name for d in lacking)}"))
                return needs, []
            domain = leaves[-1]
        elif isinstance(made, Partition) and made.outputs[1].uid == domain.uid:
            assert isinstance(domain, RaggedIterDomain)
            if made.lengths is not None and domain.row_start is not None:
                needs.append(MustDivide(size, domain.row_start, f"where rows of {domain.name} begin", domain.component))
            domain = made.inputs[0]
        else:
            how = "is not derived from the accessed dims" if made is None else f"comes from `{made.label}`"
            raise DomainError(f"the positions of {vector} are not adjacent, because {domain} {how}")
        needs.append(_extent(size, domain))
    return needs, [domain]


def _leaves(domain: IterDomain, ends: set[int]) -> list[IterDomain]:
    """The dims that were merged, or combined, into a domain, outermost first; rows back to back as the dim they partition."""
    made = domain.definition
    if isinstance(made, Partition) and made.lengths is None and domain.is_ragged and made.inputs[0].uid in ends:
        return [made.inputs[0]]
    if domain.uid in ends or not isinstance(made, Merge | Combine):
        return [domain]
    return [leaf for part in made.inputs for leaf in _leaves(part, ends)]


def _last(domains: Sequence[IterDomain], test: Callable[[IterDomain], bool]) -> list[IterDomain]:
    """The longest end of a list that passes a test."""
    return list(itertools.takewhile(test, reversed(domains)))[::-1]


def _extent(size: int, domain: IterDomain) -> MustDivide:
    if isinstance(domain, RaggedIterDomain):
        return MustDivide(size, domain.length, f"the lengths of {domain.name}", domain.component)
    return MustDivide(size, domain.extent_expr, f"the extent of {domain.name}")


def _in_memory(
    size: int, run: Sequence[IterDomain], logical: Sequence[IterDomain], storage: Sequence[IterDomain]
) -> list[MustDivide]:
    """What the size must divide so that a vector along `run` is contiguous in memory; raises if it never is."""
    rows = next((d.component for d in logical if isinstance(d, RaggedIterDomain)), None)
    dims = _as_stored(logical, storage)
    needs: list[MustDivide] = []
    if dims is None:
        # Blocked storage: the innermost part of a dim is a separate dim, and the last block may contain holes.
        made = storage[-1].definition
        if not isinstance(made, Split) or [d.uid for d in (made.inputs[0], made.outputs[1])] != [run[-1].uid, storage[-1].uid]:
            raise DomainError(_apart(run, storage))
        found = wide_access(storage, size)
        needs.append(_extent(size, run[-1]))
    else:
        single = len(dims)
        while dims[single - 1].extent_expr.value == 1 and dims[single - 1].uid != run[-1].uid:
            single -= 1
        shared = 0
        while shared < min(len(run), single) and run[-1 - shared].uid == dims[single - 1 - shared].uid:
            shared += 1
        if not shared:
            raise DomainError(_apart(run, storage))
        found = wide_access(dims, size, along=len(dims) - single + shared, storage=storage)
    if found.legal is False:
        raise DomainError(found.why)
    where = f"what lies in memory [{', '.join(map(str, storage))}]"
    unknown = (MustDivide(n, value, where, rows if COORDINATE in value.symbols else None) for n, value in found.checks)
    return [*needs, *unknown]


def _apart(run: Sequence[IterDomain], storage: Sequence[IterDomain]) -> str:
    return f"neighbours along {run[-1].name} are apart in memory [{', '.join(map(str, storage))}]"


def _as_stored(logical: Sequence[IterDomain], storage: Sequence[IterDomain]) -> list[IterDomain] | None:
    """The logical dims in memory order; None if parts of one surround another."""
    found: list[IterDomain] = []
    for stored in storage:
        order = [d.uid for d in _sources(stored)]
        own = [d for d in logical if d.uid in order or any(stored.uid == s.uid for t in ancestry([d]) for s in t.inputs)]
        for domain in sorted(own, key=lambda d: order.index(d.uid) if d.uid in order else -1):
            if all(d.uid != domain.uid for d in found):
                found.append(domain)
            elif found[-1].uid != domain.uid:
                return None
    return found


def _sources(domain: IterDomain) -> list[IterDomain]:
    """A domain and everything it was derived from; merged domains in order."""
    made = domain.definition
    return [domain] + ([d for part in made.inputs for d in _sources(part)] if made is not None else [])
