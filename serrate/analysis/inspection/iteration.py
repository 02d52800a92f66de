"""Whether two loop nests over the same domains are the same iteration.

In: two lists of loops. Out: True, False, or None where it depends on extents known only when the program runs.

Two nests are the same iteration if their loops have the same extents and, at every position, both are at the same element or both
at a hole. The proof brings the index expressions and guards of both nests to a normal form and compares them. The normal form
uses these identities, for 0 <= n < f:

    (q*f + n) // (f*k) = q // k              because q*f + n lies between q*f and (q+1)*f - 1, and no multiple of f*k,
    (q*f + n) %  (f*k) = (q % k)*f + n       which is also a multiple of f, lies strictly inside; the second is the remainder

Therefore split-then-merge equals merge-then-split if the factor divides the inner extent of the merge. For (A, B) with extents
Na >= 2 and Nb = f*k, split B by f, then merge: a = m // k, b = (m % k)*f + n. Merge, then split: a = (m*f + n) // (f*k) = m // k,
b = (m*f + n) % (f*k) = (m % k)*f + n. The converse also holds: if the factor does not divide, the first nest has holes after
every row of B, so (a, b) = (1, 0) is at position ceil(Nb/f)*f, while in the second it is at Nb, which is smaller. Where this
proof fails, all positions are visited, if they are known and not too many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from serrate.analysis.contiguity import divides
from serrate.analysis.guards import guards, loop_symbols
from serrate.analysis.indices import Indices
from serrate.analysis.inspection.allocation import sources
from serrate.analysis.inspection.brute_force import visits
from serrate.errors import DomainError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, FloorDiv, Mod, Sum
from serrate.ir.ragged import RaggedIterDomain

MOST_POSITIONS = 1 << 16
"""How many positions are visited to decide what the rule leaves open."""


def split_commutes(inner: IterDomain, factor: int) -> bool | None:
    """Whether split-then-merge equals merge-then-split, for a merge of two positions or more with `inner`.

    >>> split_commutes(IterDomain(8), 4), split_commutes(IterDomain(6), 4)
    (True, False)
    """
    return divides(factor, inner.extent_expr)


def same_iteration(a: Sequence[IterDomain], b: Sequence[IterDomain]) -> bool | None:
    """Whether loops over `a` and over `b` visit the same elements at the same positions.

    >>> from serrate.ir import merge, split
    >>> def both(x, y):
    ...     o, n = split(y, 4)
    ...     return [merge(x, o), n], split(merge(x, y), 4)
    >>> same_iteration(*both(IterDomain(2), IterDomain(5))), same_iteration(*both(IterDomain(2), IterDomain(8)))
    (False, True)
    """
    logical = sources(a)
    if {d.uid for d in logical} != {d.uid for d in sources(b)} or len(a) != len(b):
        return False
    ends_a, ends_b = _ends(a), _ends(b)
    apart = [x - y for x, y in zip(ends_a, ends_b, strict=True)]
    if any(e.value not in (None, 0) for e in apart):
        return False
    if all(e.value == 0 for e in apart) and _described(logical, a) == _described(logical, b):
        return True
    return _visited_alike(logical, a, b)


def _ends(loops: Sequence[IterDomain]) -> list[Expr]:
    """The extent of each loop; for a ragged loop, that of the row selected by the loops before it."""
    indices = Indices(zip(loops, loop_symbols(loops), strict=True))
    return [simplified(d.length_of(indices.of(d.component))) if isinstance(d, RaggedIterDomain) else d.extent_expr for d in loops]


def _described(logical: Sequence[IterDomain], loops: Sequence[IterDomain]) -> tuple[tuple[Expr, ...], frozenset[Expr]]:
    """The logical indices at a position, in terms of position symbols, and the guards; both in normal form."""
    indices = Indices(zip(loops, loop_symbols(loops), strict=True))
    at = sorted(logical, key=lambda d: d.uid)
    below = frozenset(simplified(g.condition.left - g.condition.right) for g in guards(logical, loops))
    return tuple(simplified(indices.of(d)) for d in at), below


def _visited_alike(logical: Sequence[IterDomain], a: Sequence[IterDomain], b: Sequence[IterDomain]) -> bool | None:
    """The answer by visiting every position of both, each with its element; None where that cannot be done."""
    known = [_longest(d) for d in (*a, *b)]
    if any(k is None for k in known) or math.prod(k for k in known[: len(a)] if k is not None) > MOST_POSITIONS:
        return None
    # Asking for the loops' own indices too gives the position of each element.
    ours, theirs = (set(visits([*logical, *loops], loops, guards(logical, loops))) for loops in (a, b))
    return ours == theirs


def _longest(domain: IterDomain) -> int | None:
    if not isinstance(domain, RaggedIterDomain):
        return domain.extent_expr.value
    try:
        return domain.extent_expr.value if domain.extents is not None else None
    except DomainError:
        return None


def simplified(expr: Expr) -> Expr:
    """The expression with divisions of nested positions undone, by the two equations above.

    >>> from serrate.ir.expr import symbol
    >>> q, n, k = symbol("q"), symbol("n", 0, 3), symbol("k", 1)
    >>> print(simplified((q * 4 + n) // (k * 4)), simplified((q * 4 + n) % 8))
    q // k n + q % 2*4
    """
    if not expr.operands:
        return expr
    expr = expr.rebuild(tuple(simplified(e) for e in expr.operands))
    if not isinstance(expr, FloorDiv | Mod):
        return expr
    terms = expr.left.terms if isinstance(expr.left, Sum) else ((expr.left, 1),)
    content = _content(expr.right)
    for factor in sorted({math.gcd(f, content) for _, f in terms}, reverse=True):
        if factor < 2:
            continue
        rest = _rest(expr.left, factor)
        low, high = rest.bounds
        if low is not None and high is not None and low >= 0 and high < factor:
            whole, size = (expr.left - rest) // factor, expr.right // factor
            if isinstance(expr, FloorDiv):
                return simplified(whole // size)
            return simplified(whole % size) * factor + rest
    return expr


def _content(expr: Expr) -> int:
    """The largest integer that divides every term."""
    if expr.value is not None:
        return expr.value
    return math.gcd(expr.constant, *(f for _, f in expr.terms)) if isinstance(expr, Sum) else 1


def _rest(expr: Expr, factor: int) -> Expr:
    """The terms of a sum that `factor` does not divide."""
    if not isinstance(expr, Sum):
        return expr
    rest: Expr = expr
    for term, f in expr.terms:
        if f % factor == 0:
            rest = rest - term * f
    return rest - (rest.constant // factor * factor if isinstance(rest, Sum) else 0)
