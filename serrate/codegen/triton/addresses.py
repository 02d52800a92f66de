"""Addresses in Triton: which subexpressions of an index have 32 bits, and which lanes are multiplied in addresses.

In: index expressions, and the lanes that they are computed from. Out: whether lanes must be widened, positions in memory.

An address is a pointer, a scalar and a block of lanes: `T0 + (T1_c0 * 128 + r0o * 8192) + (d1[None, :] + r0i[:, None] * 128)`.
Loaded values, arguments and the position in the grid have 64 bits. Lanes are `tl.arange`s and have 32 bits, and so do the
indices of loops with constant extents. Triton computes in the wider of two types, so a subexpression has 32 bits only if all of
its operands are lanes, such indices or constants. All of these have bounds: if a subexpression could reach 2^31, its operands
are widened first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from serrate.ir.expr import Element, Expr, Maximum, Minimum, Product, Search, Sum, Symbol
from serrate.ir.loops import Load, Node, Write, flat_index, values_of
from serrate.ir.solve import terms_of
from serrate.ir.values import Tensor


def is_narrow(e: Expr, last: Mapping[Symbol, int]) -> bool:
    """Whether 32 bits hold every part of an index that is computed in 32 bits; `last` has the largest value of all symbols that
    have 32 bits.

    >>> from serrate.ir.expr import symbol
    >>> row, lane = symbol("row"), symbol("lane")
    >>> [is_narrow(row * 2**40 + lane * stride, {lane: 63}) for stride in (2**25, 2**26)]
    [True, False]
    """
    found: list[int] = []
    _reach(e, last, found)
    return max(found, default=0) < 2**31


def reach(e: Expr, last: Mapping[Symbol, int]) -> int | None:
    """The largest absolute value of an index that is computed in 32 bits; None for one that has 64."""
    most = _reach(e, last, []) if is_narrow(e, last) else None
    # `is_narrow` checks the parts of an expression; a constant alone has none.
    return most if most is not None and most < 2**31 else None


def _reach(e: Expr, last: Mapping[Symbol, int], found: list[int]) -> int | None:
    """The largest absolute value of an expression; None if it has 64 bits. Adds to `found` those of its parts that have 32."""
    if e.value is not None:
        return abs(e.value)
    if isinstance(e, Symbol):
        reached = last.get(e)
    elif isinstance(e, Sum):
        parts = [(_reach(term, last, found), abs(factor)) for term, factor in e.terms]
        # Terms are added from the left, so a 32-bit partial sum may precede the first 64-bit term.
        narrow = sum(own * factor for own, factor in parts if own is not None) + abs(e.constant)
        is_wide = [own is None for own, _ in parts]
        if not all(is_wide):
            found.append(narrow)
        reached = None if any(is_wide) else narrow
    else:
        operands = [_reach(operand, last, found) for operand in e.operands]
        own = [n for n in operands if n is not None]
        if isinstance(e, Element | Search) or len(own) < len(operands):
            reached = None
        elif isinstance(e, Product):
            reached = own[0] * own[1]
        elif isinstance(e, Minimum | Maximum):
            reached = max(own)
        else:
            # Quotients and remainders are smaller than their operands, but intermediate results of helper functions may not be.
            reached = sum(own)
    if reached is not None:
        found.append(reached)
    return reached


def place_of(tensor: Tensor, index: Sequence[Expr]) -> Expr:
    """The position in memory of an element of a tensor."""
    return flat_index(index, [d.extent_expr for d in tensor.storage])


def multiplied(every: Sequence[Node]) -> set[Symbol]:
    """The symbols that are multiplied in the position of something that these statements read or write."""
    return {s for place in _places(every) for term, factor in terms_of(place) if factor != 1 for s in term.symbols}


def _places(every: Sequence[Node]) -> Iterator[Expr]:
    for node in every:
        yield from (place_of(v.tensor, v.index) for value in values_of(node) for v in value.walk() if isinstance(v, Load))
        if isinstance(node, Write):
            yield place_of(node.tensor, node.index)
