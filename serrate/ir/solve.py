"""Solving conditions for a symbol: where along a loop or lane they hold.

In: a condition `left < right` and a symbol. Out: the position where it stops or starts to hold, as an expression without that
symbol. Used wherever a guard becomes a loop bound.

With left - right = f*s + rest, where `rest` does not mention s, the condition is f*s + rest < 0:

    f > 0:   it holds exactly for s < ceil(-rest / f)
    f < 0:   it holds exactly for s >= floor(rest / -f) + 1
    f = 0, or s inside something else (a division, an array's index): neither
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from serrate.ir.expr import Expr, Less, Sum, Symbol, ceildiv, const


def terms_of(e: Expr) -> tuple[tuple[Expr, int], ...]:
    """The terms of a linear combination with their factors, without the constant."""
    if isinstance(e, Sum):
        return e.terms
    return () if e.value is not None else ((e, 1),)


def factor_of(e: Expr, wanted: Symbol) -> int:
    """The coefficient of a symbol in an expression; 0 if the expression is not linear in it."""
    factor = next((f for term, f in terms_of(e) if term is wanted), 0)
    return 0 if factor and wanted in (e - wanted * factor).symbols else factor


def end_of(condition: Less, wanted: Symbol) -> Expr | None:
    """The `end` for which the condition is equivalent to `wanted < end`; None if it has no such form.

    >>> from serrate.ir.expr import symbol
    >>> print(end_of(Less(symbol("o") * 8 + symbol("i"), symbol("n")), symbol("o")))
    (n - i + 7) // 8
    """
    difference = condition.left - condition.right
    factor = factor_of(difference, wanted)
    return ceildiv(wanted * factor - difference, factor) if factor > 0 else None


def start_of(condition: Less, wanted: Symbol) -> Expr | None:
    """The `start` for which the condition is equivalent to `start <= wanted`; None if it has no such form.

    >>> from serrate.ir.expr import symbol
    >>> print(start_of(Less(symbol("n"), symbol("i") * 2), symbol("i")))
    n // 2 + 1
    """
    difference = condition.left - condition.right
    factor = factor_of(difference, wanted)
    return (difference - wanted * factor) // -factor + 1 if factor < 0 else None


def loosest(condition: Less, others: Collection[Symbol]) -> Less | None:
    """The weakest condition without `others` that holds whenever this one holds for some non-negative values of them. None unless
    the condition gets harder to satisfy as each of them grows.

    >>> from serrate.ir.expr import symbol
    >>> print(loosest(Less(symbol("o") * 8 + symbol("i"), symbol("n")), [symbol("i")]))
    o*8 < n
    """
    mine = [s for s in condition.symbols if s in others]
    if not mine:
        return condition
    difference = condition.left - condition.right
    if any(factor_of(difference, s) <= 0 for s in mine):
        return None
    zero: dict[Expr, Expr] = {s: const(0) for s in mine}
    return Less(condition.left.substitute(zero), condition.right.substitute(zero))


def possible(condition: Less, others: Collection[Symbol]) -> Less | None:
    """The strongest condition without `others` that holds whenever this one holds for some values of them within their bounds.
    None if one of them is not a plain term, or has no bound on the side that matters.

    >>> from serrate.ir.expr import symbol
    >>> q, k = symbol("q", 0, 7), symbol("k", 0, 7)
    >>> print(possible(Less(symbol("o") * 8 + k, q + 1), [q, k]))
    o*8 < 8
    """
    return _at_bounds(condition, others, lambda factor: 0 if factor > 0 else 1)


def certain(condition: Less, others: Collection[Symbol]) -> Less | None:
    """The weakest condition without `others` under which this one holds for all values of them within their bounds. None if one
    of them is not a plain term, or has no bound on the side that matters.

    >>> from serrate.ir.expr import symbol
    >>> q, k = symbol("q", 0, 7), symbol("k", 0, 7)
    >>> print(certain(Less(symbol("o") * 8 + k, symbol("n") + q), [q, k]))
    o*8 + 7 < n
    """
    return _at_bounds(condition, others, lambda factor: 1 if factor > 0 else 0)


def _at_bounds(condition: Less, others: Collection[Symbol], side: Callable[[int], int]) -> Less | None:
    """The condition with each of `others` at its lower (0) or upper (1) bound, whichever `side` says for its coefficient in
    left - right."""
    mine = [s for s in condition.symbols if s in others]
    if not mine:
        return condition
    difference = condition.left - condition.right
    put: dict[Expr, Expr] = {}
    for s in mine:
        factor = factor_of(difference, s)
        bound = s.bounds[side(factor)]
        if not factor or bound is None:
            return None
        put[s] = const(bound)
    return Less(condition.left.substitute(put), condition.right.substitute(put))
