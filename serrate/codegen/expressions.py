"""Index expressions and operators as text: shared by C++ and Triton, parametrised by the few spellings that differ.

In: an index expression and a `Spelling`. Out: text in the language of the spelling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serrate.ir.expr import Element, Expr, FloorDiv, Maximum, Minimum, Mod, Product, Search, Sum, Symbol, Xor

Write = Callable[[Expr], str]

OPERATORS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "neg": "(-{0})",
    "square": "({0} * {0})",
    "isnan": "({0} != {0})",
}
"""Elementwise functions that are operators, spelled the same in C++ and Triton."""


@dataclass(frozen=True)
class Spelling:
    """The spellings specific to one language; the callables get a writer for subexpressions."""

    helper: str
    """The prefix of helper functions in generated sources."""
    divide: str
    minimum: str
    maximum: str
    symbol: Callable[[Symbol], str]
    element: Callable[[Element, Write], str]
    search: Callable[[Search, Write], str]


def written(expr: Expr, spelling: Spelling) -> str:
    """The expression, parenthesised wherever it would be ambiguous.

    Both languages round a quotient towards zero. If the dividend may be negative, the helper functions `floor_divide` and
    `floor_rest` round down instead.
    """

    def go(e: Expr) -> str:
        if e.value is not None:
            return str(e.value)
        if isinstance(e, Symbol):
            return spelling.symbol(e)
        if isinstance(e, Sum):
            return f"({_sum(e, go)})"
        if isinstance(e, Product):
            return f"{go(e.left)} * {go(e.right)}"
        if isinstance(e, FloorDiv):
            if _negative(e.left):
                return f"{spelling.helper}floor_divide({unwrapped(go(e.left))}, {go(e.right)})"
            return f"({go(e.left)} {spelling.divide} {divisor(e.right, go)})"
        if isinstance(e, Mod):
            if _negative(e.left):
                return f"{spelling.helper}floor_rest({unwrapped(go(e.left))}, {go(e.right)})"
            return f"({go(e.left)} % {divisor(e.right, go)})"
        if isinstance(e, Xor):
            return f"({go(e.left)} ^ {go(e.right)})"
        if isinstance(e, Minimum):
            return f"{spelling.minimum}({go(e.left)}, {go(e.right)})"
        if isinstance(e, Maximum):
            return f"{spelling.maximum}({go(e.left)}, {go(e.right)})"
        if isinstance(e, Element):
            return spelling.element(e, go)
        assert isinstance(e, Search), e
        return spelling.search(e, go)

    return go(expr)


def divisor(e: Expr, go: Write) -> str:
    """An expression after a division sign: only a product is written without parentheses of its own."""
    return f"({go(e)})" if isinstance(e, Product) else go(e)


def _negative(e: Expr) -> bool:
    """Whether an expression may be negative."""
    return e.bounds[0] is None or e.bounds[0] < 0


def _sum(e: Sum, go: Write) -> str:
    text = ""
    for term, factor in e.terms:
        piece = go(term) if abs(factor) == 1 else f"{go(term)} * {abs(factor)}"
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {piece}" if text else (f"-{piece}" if factor < 0 else piece)
    return text + (f" {'-' if e.constant < 0 else '+'} {abs(e.constant)}" if e.constant else "")


def unwrapped(text: str) -> str:
    """Removes outer parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]
