"""Index expressions compiled to Python functions, for sizes that are computed in every call.

In: expressions without arrays, and their symbols. Out: a function from the values of the symbols, in order, to the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from serrate.ir.expr import Expr, Symbol


def size_function(expr: Expr, symbols: Sequence[Symbol]) -> Callable[[Sequence[int]], int]:
    """An expression without arrays, compiled to a function of the values of `symbols`, in order.

    >>> from serrate.ir.expr import ceildiv, minimum, symbol
    >>> size_function(ceildiv(symbol("n"), 4), [symbol("n")])([10])
    3
    >>> size_function(minimum(symbol("min") * symbol("numbers"), 5), [symbol("min"), symbol("numbers")])([2, 3])
    5
    """
    value = expr.value
    if value is not None:
        constant = value
        return lambda numbers: constant
    found: Callable[[Sequence[int]], int] = eval(f"lambda numbers: {_python(expr, symbols)}")
    return found


def numbers_function(exprs: Sequence[Expr], symbols: Sequence[Symbol]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """As `size_function`, for several expressions at once.

    >>> from serrate.ir.expr import const, symbol
    >>> numbers_function([symbol("n") - 3, const(4)], [symbol("n")])([2])
    (-1, 4)
    """
    text = "".join(f"{_python(expr, symbols)}, " for expr in exprs)
    found: Callable[[Sequence[int]], tuple[int, ...]] = eval(f"lambda numbers: ({text})")
    return found


def shape_function(sizes: Sequence[Expr], symbols: Sequence[Symbol]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """As `size_function`, for the sizes of all dims of a tensor, none of which is less than 0.

    >>> from serrate.ir.expr import const, symbol
    >>> shape_function([symbol("n") - 3, const(4)], [symbol("n")])([2])
    (0, 4)
    """
    text = "".join(f"max(0, {_python(size, symbols)}), " for size in sizes)
    found: Callable[[Sequence[int]], tuple[int, ...]] = eval(f"lambda numbers: ({text})")
    return found


def shapes_function(
    shapes: Sequence[Sequence[Expr]], symbols: Sequence[Symbol]
) -> Callable[[Sequence[int]], tuple[tuple[int, ...], ...]]:
    """As `shape_function`, for several tensors at once.

    >>> from serrate.ir.expr import const, symbol
    >>> shapes_function([[symbol("n") - 3, const(4)], []], [symbol("n")])([2])
    ((0, 4), ())
    """
    texts = ["".join(f"max(0, {_python(size, symbols)}), " for size in sizes) for sizes in shapes]
    text = "".join(f"({text}), " for text in texts)
    found: Callable[[Sequence[int]], tuple[tuple[int, ...], ...]] = eval(f"lambda numbers: ({text})")
    return found


def _python(expr: Expr, symbols: Sequence[Symbol]) -> str:
    return python_text(expr, {s.name: f"numbers[{place}]" for place, s in enumerate(symbols)})


def python_text(expr: Expr, places: Mapping[str, str]) -> str:
    """An expression without arrays as Python, so that it is compiled once instead of walked at every call; `places` has the text
    of each symbol.

    >>> from serrate.ir.expr import minimum, symbol
    >>> python_text(minimum(symbol("min") + 1, 5), {"min": "n[0]"})
    'min(5, n[0] + 1)'
    """
    # A symbol may be called like a function, min or max, but is never followed by a parenthesis.
    return re.sub(r"\b[^\W\d]\w*\b(?!\()", lambda found: places.get(found[0], found[0]), str(expr))
