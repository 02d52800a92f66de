"""Extents, lengths and offsets that are known to be equal although they are different expressions.

In: the checks that a fusion makes when it is called. Out: `Equalities`, whose `canonical` gives equal expressions one form.

Two arrays of offsets are equal if they have the same elements (constants) or the same recipe over the same arrays (derived
arrays), or if a check requires it. The last case is an assumption: a call that violates it raises before anything runs. Two
arguments that no check relates are treated as different, whatever their contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from serrate.ir.expr import Array, Element, Expr, Sum, Symbol, element
from serrate.ir.fusion import Equal


class Equalities:
    """Canonical forms of expressions under the assumption that some of them are equal.

    >>> from serrate.ir.expr import symbol
    >>> n, m = symbol("n"), symbol("m")
    >>> known = Equalities([Equal(n - 1, m - 1, "components of x and y")])
    >>> known.canonical(n * 4) is known.canonical(m * 4)
    True
    """

    def __init__(self, checks: Iterable[Equal] = ()) -> None:
        self._symbols: dict[Expr, Expr] = {}
        self._arrays: dict[Array, Array] = {}
        self._memo: dict[Expr, Expr] = {}
        for check in checks:
            if isinstance(check.left, Array) and isinstance(check.right, Array):
                self._same_array(check.left, check.right)
            elif isinstance(check.left, Expr) and isinstance(check.right, Expr):
                self._same_value(check.left, check.right)
            self._memo.clear()

    def _same_array(self, left: Array, right: Array) -> None:
        a, b = self.array(left), self.array(right)
        if a != b:
            # A constant stays, so that what is read from it folds.
            self._arrays.update({a: b} if a.data is None else {b: a})

    def _same_value(self, left: Expr, right: Expr) -> None:
        """Solves left = right for one symbol, if there is one that occurs once and with factor 1."""
        rest = self.canonical(left) - self.canonical(right)
        terms = rest.terms if isinstance(rest, Sum) else ((rest, 1),)
        for term, factor in reversed(terms):
            if isinstance(term, Symbol) and factor in (1, -1):
                solved = (term * factor - rest) * factor
                if term not in solved.symbols:
                    self._symbols[term] = solved
                    return

    def array(self, array: Array) -> Array:
        """The representative of the arrays equal to this one."""
        if array.data is not None:
            array = Array(f"{list(array.data)}", array.data)
        elif array.recipe is not None:
            parts: dict[str, Any] = {f.name: self._part(getattr(array.recipe, f.name)) for f in fields(array.recipe)}
            array = Array(type(array.recipe).__name__, recipe=replace(array.recipe, **parts))
        while array in self._arrays:
            array = self._arrays[array]
        return array

    def _part(self, value: Any) -> Any:
        if isinstance(value, Array):
            return self.array(value)
        return self.canonical(value) if isinstance(value, Expr) else value

    def canonical(self, expr: Expr) -> Expr:
        """The canonical form of `expr`."""
        found = self._memo.get(expr)
        if found is None:
            if expr in self._symbols:
                found = self.canonical(self._symbols[expr])
            elif isinstance(expr, Element):
                found = element(self.array(expr.array), self.canonical(expr.index))
            elif expr.operands:
                found = expr.rebuild(tuple(self.canonical(e) for e in expr.operands))
            else:
                found = expr
            self._memo[expr] = found
        return found
