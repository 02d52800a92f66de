"""Grids: which indices of grid loops a Triton program has.

In: the grid loops of a kernel, outermost first, and its body. Out: the lines that compute the indices of these loops from a
position. All loops share one axis of the launch. Consecutive positions are along the innermost loop, except in matrix products
with many blocks along it. There, programs that run at the same time compute a square of blocks, and share both operands in cache:

    row by row    0  1  2  3  4  5      swizzled,     0  2  4  6  8 10
                  6  7  8  9 10 11      by two rows   1  3  5  7  9 11
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serrate.ir.expr import Expr, Symbol
from serrate.ir.loops import Bind, Dot, For, Held, Load, Node, nodes
from serrate.ir.values import Value

SQUARE = 8
"""The number of rows of blocks that are computed together, if the innermost loop has more blocks than this. (Eight by sixteen
blocks occupy an H200 once.)"""


def has_products(body: Sequence[Node]) -> bool:
    """Whether programs with this body compute matrix products."""
    return any(isinstance(n, Dot) for n in nodes(tuple(body)))


def is_swizzled(loops: Sequence[For], body: Sequence[Node]) -> bool:
    """Whether these loops are over blocks of matrix products, each with one operand that is constant along the innermost loop."""
    if len(loops) != 2 or any(loop.sparse for loop in loops):
        return False
    inner = loops[1]
    if inner.bound.value is not None and inner.bound.value <= SQUARE:
        return False
    products = [n for n in nodes(tuple(body)) if isinstance(n, Dot)]
    changing = _dependent_on(inner.symbol, body)
    return bool(products) and all(_reads_at(n.left, changing) != _reads_at(n.right, changing) for n in products)


def _dependent_on(index: Symbol, body: Sequence[Node]) -> set[Symbol]:
    """A loop's index, and the names of values computed from it."""
    found = {index}
    for node in nodes(tuple(body)):
        if isinstance(node, Bind) and node.expr.symbols & found:
            found.add(node.symbol)
    return found


def _reads_at(operand: Value, symbols: set[Symbol]) -> bool:
    """Whether the elements that an operand reads depend on these symbols. A private block may depend on anything."""
    return any(isinstance(v, Held) or (isinstance(v, Load) and _depends_on(v.index, symbols)) for v in operand.walk())


def _depends_on(index: Sequence[Expr], symbols: set[Symbol]) -> bool:
    return any(e.symbols & symbols for e in index)


def index_lines(loops: Sequence[For], sizes: Sequence[str], body: Sequence[Node]) -> Iterator[str]:
    """Lines that compute the indices of loops from `position`, innermost first; `sizes` are the loops' extents, as divisors."""
    if is_swizzled(loops, body):
        rows, columns = sizes
        places = f"position // {columns}, position % {columns}"
        yield f"{loops[0].symbol}, {loops[1].symbol} = tl.swizzle2d({places}, {rows}, {columns}, {SQUARE})"
        return
    rest = "position"
    for k, (loop, size) in reversed(list(enumerate(zip(loops, sizes, strict=True)))):
        yield f"{loop.symbol} = {rest}{f' % {size}' if k else ''}"
        rest = f"({rest} // {size})"
