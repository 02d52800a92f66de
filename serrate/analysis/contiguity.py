"""Contiguity: which neighbouring dims are contiguous in memory, and how wide an access along them may be.

In: the dims of a tensor and how they are stored. Out: which neighbours merge freely, and a `WideAccess` that says whether
a vector, a bulk copy or a box of a given size is legal, and why.

Two neighbours are contiguous if stride(outer) = stride(inner) * extent(inner). Holes and gaps between rows break that, and so
does a sub-range of a longer dim. A component and its rows back to back are contiguous too (`combine` merges them), although the
component has no stride.

An access of n elements touches n consecutive slots. Merge the dims it covers, and let the *run* be the innermost of them that are
contiguous. Positions m of the merged dims with equal m // n form one access; they are consecutive in memory iff none lies past
the end of the run. If n divides the extent of the run, every run is a whole number of accesses: legal. Otherwise the last access
of a run reaches into the next run, which is elsewhere in memory, or past the tensor: illegal. For rows, the run ends with the
row, so n must divide every length and, unless the access takes its address from an index (a box), every start.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Expr, Product, Sum, as_expr, const
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine, Cover, RaggedProduct
from serrate.ir.transforms import Merge, Restrict, Split

AccessKind = Literal["vector", "bulk", "box"]


def divides(size: int, value: Expr | int) -> bool | None:
    """Whether `size` divides `value`; None if that is known only at run time.

    >>> from serrate.ir.expr import symbol
    >>> divides(4, 12), divides(4, symbol("n") * 8), divides(4, symbol("n") * 8 + 2), divides(4, symbol("n"))
    (True, True, False, None)
    """
    value = as_expr(value)
    if size == 1:
        return True
    if value.value is not None:
        return value.value % size == 0
    if isinstance(value, Sum):
        if all(factor % size == 0 or divides(size, term) for term, factor in value.terms):
            return value.constant % size == 0
        return None
    if isinstance(value, Product) and (divides(size, value.left) or divides(size, value.right)):
        return True
    return None


@dataclass(frozen=True, eq=False)
class _Stored:
    """A dim and the space it takes inside one step of the dim before it; None if that varies."""

    domain: IterDomain
    places: Expr | None

    @property
    def full(self) -> bool:
        """Whether the dim fills its space, so that the next step of the outer dim follows directly."""
        return self.places is _own(self.domain)


def _own(domain: IterDomain) -> Expr:
    """The positions of a dim in one step of the dim before it."""
    return domain.length if isinstance(domain, RaggedIterDomain) else domain.extent_expr


def _stored(dims: Sequence[IterDomain], storage: Sequence[IterDomain]) -> list[_Stored]:
    """The dims as stored: the storage domains, with transforms undone until `dims` are found."""
    found = [_Stored(d, _own(d)) for d in storage]
    wanted = [d.uid for d in dims]
    while [s.domain.uid for s in found] != wanted:
        step = _windowed(found, dims) or _undone(found, set(wanted))
        if step is None:
            have = ", ".join(str(s.domain) for s in found)
            raise DomainError(f"contiguity: [{', '.join(map(str, dims))}] are not in that order in storage [{have}]")
        found = step
    return found


def _windowed(found: list[_Stored], dims: Sequence[IterDomain]) -> list[_Stored] | None:
    """A dim that is a sub-range of a stored one, or that was stored as components and rows back to back."""
    for k, stored in enumerate(found):
        parts = [d for d in dims if d.definition is not None and any(s.uid == stored.domain.uid for s in d.definition.inputs)]
        if parts and isinstance(parts[0].definition, Restrict):
            return [*found[:k], _Stored(parts[0], stored.places), *found[k + 1 :]]
        ragged = parts[-1] if len(parts) == 2 else None
        if isinstance(ragged, RaggedIterDomain):
            lies = ragged.length if _back_to_back(ragged) else None
            return [*found[:k], _Stored(parts[0], parts[0].extent_expr), _Stored(ragged, lies), *found[k + 1 :]]
    return None


def _back_to_back(ragged: RaggedIterDomain) -> bool:
    """Whether each row starts where the one before it ends."""
    return ragged.row_start is not None and ragged.length is ragged.start_of(COORDINATE + 1) - ragged.start_of(COORDINATE)


def _undone(found: list[_Stored], wanted: set[int]) -> list[_Stored] | None:
    """The same memory with the last transform of some stored domain undone."""
    for k, stored in enumerate(found):
        made = stored.domain.definition
        if stored.domain.uid in wanted or made is None:
            continue
        if isinstance(made, Cover):
            return [*found[:k], _Stored(made.inputs[0], stored.places), *found[k + 1 :]]
        if isinstance(made, Merge | Combine | RaggedProduct) and stored.full:
            return [*found[:k], *(_Stored(d, _own(d)) for d in made.inputs), *found[k + 1 :]]
        if isinstance(made, Split) and k + 1 < len(found) and found[k + 1].domain.uid == made.outputs[1].uid:
            outer, inner = stored.places, found[k + 1].places
            if stored.domain.uid == made.outputs[0].uid and outer is not None and inner is not None:
                return [*found[:k], _Stored(made.inputs[0], outer * inner), *found[k + 2 :]]
    return None


def contiguous(
    dims: Sequence[IterDomain], storage: Sequence[IterDomain] | None = None, strides: Sequence[int | Expr] | None = None
) -> tuple[bool, ...]:
    """For each pair of neighbouring dims, whether they are contiguous and may be merged (a component and its rows: combined).

    The dims are stored row-major over `storage` (over themselves, if not given), or with `strides`, in elements.

    >>> from serrate.ir import IterDomain, split
    >>> a, b = IterDomain(3), IterDomain(6)
    >>> contiguous([a, b]), contiguous([a, b], [a, *split(b, 4)]), contiguous([a, b], strides=[8, 1])
    ((True,), (False,), (False,))
    """
    if strides is not None:
        if len(strides) != len(dims):
            raise DomainError(f"contiguous: expected one stride for each of {len(dims)} dims, got {len(strides)}")
        for domain in dims:
            if domain.is_ragged:
                raise DomainError(f"contiguous: {domain} is ragged, so the dim before it has no stride; pass storage instead")
        steps = [as_expr(s) for s in strides]
        return tuple(steps[k] is steps[k + 1] * dims[k + 1].extent_expr for k in range(len(dims) - 1))
    return tuple(stored.full for stored in _stored(dims, dims if storage is None else storage)[1:])


@dataclass(frozen=True)
class WideAccess:
    """Whether an access of some size is legal; `legal` is None if `checks` must decide at each call."""

    legal: bool | None
    why: str
    checks: tuple[tuple[int, Expr], ...] = ()
    """(size, what it must divide) for everything that is known only at run time."""

    def __bool__(self) -> bool:
        return self.legal is True


def wide_access(
    dims: Sequence[IterDomain],
    size: int,
    *,
    along: int = 1,
    kind: AccessKind = "vector",
    storage: Sequence[IterDomain] | None = None,
    strides: Sequence[int | Expr] | None = None,
) -> WideAccess:
    """Whether accesses of `size` elements along the last `along` dims, merged, are legal.

    >>> from serrate.ir import IterDomain
    >>> a, b = IterDomain(2), IterDomain(6)
    >>> wide_access([a, b], 4, along=2).legal, wide_access([a, b], 4, along=2, strides=[8, 1]).legal
    (True, False)
    """
    if not 1 <= along <= len(dims):
        raise DomainError(f"wide_access: `along` must name 1 to {len(dims)} dims, got {along}")
    if size < 1:
        raise DomainError(f"wide_access: a size must be at least 1, got {size}")
    if strides is not None and as_expr(strides[-1]) is not const(1):
        return WideAccess(size == 1, f"neighbours along {dims[-1].name} are {strides[-1]} apart")
    flags = contiguous(dims, storage, strides)
    first = len(dims) - 1
    while first > len(dims) - along and flags[first - 1]:
        first -= 1
    run = list(dims[first:])
    facts = [(_extent(run), f"the extent of {_names(run)}")]
    if kind != "box":
        facts += _starts(dims, first, storage, strides)
    return _verdict(size, kind, [(value, what) for values, what in facts for value in values])


def _names(dims: Sequence[IterDomain]) -> str:
    return " x ".join(d.name for d in dims)


def _extent(run: Sequence[IterDomain]) -> list[Expr]:
    """The extent of the run, for every row that starts in it; rows together with their components count as one dim."""
    owners = {d.uid for d in run}
    inner, rows = const(1), const(1)
    for domain in run:
        alone = isinstance(domain, RaggedIterDomain) and domain.component.uid not in owners
        if isinstance(domain, RaggedIterDomain):
            rows = rows * (domain.length if alone else domain.extent_expr)
        elif not any(isinstance(d, RaggedIterDomain) and d.component.uid == domain.uid for d in run):
            inner = inner * domain.extent_expr
    return _in_every_row(rows * inner, run)


def _in_every_row(value: Expr, dims: Sequence[IterDomain]) -> list[Expr]:
    return in_every_row(value, next((d.component for d in dims if isinstance(d, RaggedIterDomain)), None))


def in_every_row(value: Expr, component: IterDomain | None) -> list[Expr]:
    """The value for each component if their number is known; otherwise the expression itself."""
    count = None if component is None else component.extent_expr.value
    if COORDINATE not in value.symbols or count is None:
        return [value]
    return list(dict.fromkeys(value.substitute({COORDINATE: const(c)}) for c in range(count)))


def _starts(
    dims: Sequence[IterDomain], first: int, storage: Sequence[IterDomain] | None, strides: Sequence[int | Expr] | None
) -> list[tuple[list[Expr], str]]:
    """The distances between runs: the strides of the dims outside the run, and the starts of rows."""
    if strides is not None:
        return [([as_expr(s)], f"the stride of {d.name}") for s, d in zip(strides[:first], dims, strict=False)]
    found: list[tuple[list[Expr], str]] = []
    lies = _stored(dims, dims if storage is None else storage)
    for k in range(first):
        apart = next((m for m in range(k + 1, len(lies)) if lies[m].places is None), None)
        if apart is None:
            # Rows back to back start at sums of lengths, which are multiples if the lengths are.
            found.append((_in_every_row(_places(lies[k + 1 :]), dims), f"the step of {dims[k].name}"))
        else:
            ragged = lies[apart].domain
            assert isinstance(ragged, RaggedIterDomain) and ragged.row_start is not None
            begins = ragged.row_start * _places(lies[apart + 1 :])
            found.append((_in_every_row(begins, [ragged]), f"where rows of {ragged.name} begin"))
    return found


def _places(lies: Sequence[_Stored]) -> Expr:
    total = const(1)
    for stored in lies:
        total = total * (stored.places if stored.places is not None else const(1))
    return total


def _verdict(size: int, kind: AccessKind, facts: Sequence[tuple[Expr, str]]) -> WideAccess:
    unknown: list[tuple[Expr, str]] = []
    for value, what in facts:
        found = divides(size, value)
        if found is False:
            return WideAccess(False, f"a {kind} of {size} would cross an end: {size} does not divide {what}, {_shown(value)}")
        if found is None:
            unknown.append((value, what))
    if unknown:
        needs = " and ".join(dict.fromkeys(f"{what}, {_shown(value)}" for value, what in unknown))
        return WideAccess(None, f"known only at run time: {size} must divide {needs}", tuple((size, v) for v, _ in unknown))
    return WideAccess(True, f"{size} divides " + " and ".join(dict.fromkeys(what for _, what in facts)))


def _shown(value: Expr) -> str:
    return str(value).replace(str(COORDINATE), "c")


def merge_groups(dims: Sequence[IterDomain], flags: Sequence[bool]) -> list[tuple[IterDomain, ...]]:
    """Groups dims that merge freely, by the flags of `contiguous`.

    >>> from serrate.ir import IterDomain
    >>> a, b, c = IterDomain(2), IterDomain(3), IterDomain(4)
    >>> [len(g) for g in merge_groups([a, b, c], [False, True])]
    [1, 2]
    """
    starts = [0, *(k + 1 for k, flag in enumerate(flags) if not flag), len(dims)]
    return [tuple(dims[a:b]) for a, b in itertools.pairwise(starts)]
