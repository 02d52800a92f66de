"""Matrix products of blocks in C++.

In: a `Dot`. Out: a call of the prelude's product, preceded by copies of operands whose memory layout does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serrate.codegen.cpp.text import Text
from serrate.codegen.cpp.values import computed, ctype
from serrate.errors import VerificationError
from serrate.ir.expr import Expr, Sum, const
from serrate.ir.loops import Dot, Held, Lane, Load, Prefetch
from serrate.ir.values import Call, Tensor, Value

PAIRED = 32
"""Columns of a block whose bfloat16 products are summed in pairs."""


def product(text: Text, node: Dot) -> None:
    """A product of blocks: operands stored in the dtype of the product are used in place, others are copied."""
    rows, columns, depth = node.lanes
    if any((text.bound(lane, g) or text.floor(lane, g)) is None for lane, g in text.on_lanes(node.lanes, node.guard)):
        raise VerificationError(f"a matrix product cannot skip lanes: {node}")
    bounds = text.bounds(node.lanes, node.guard)
    conditions = text.outside(node)
    text.open(f"if ({' && '.join(conditions)})" if conditions else "")
    ranges = {lane: _range(text, lane, node, bounds[lane]) for lane in node.lanes}
    pairs = columns.size % PAIRED == 0 and node.local.dtype == torch.float32 and ranges[columns].start == "0"
    pairs = pairs and all(_is_bfloat16(v) for v in (node.left, node.right))
    kind = "bf16" if pairs else computed(node.local.dtype)
    a, am = _operand(text, node.left, rows, depth, ranges, kind)
    across = _across(text, node.right, depth, columns, kind)
    b, bk = across or _operand(text, node.right, depth, columns, ranges, kind)
    to = _moved(node.local.name, str(columns.size), ranges[rows], ranges[columns])
    inward = (columns, depth) if across else (depth, columns)
    a, b = _moved(a, am, ranges[rows], ranges[depth]), _moved(b, bk, *(ranges[lane] for lane in inward))
    extents = ", ".join(ranges[lane].count for lane in (rows, columns, depth))
    lies = "true" if across else "false"
    name = f"dot_pairs<{rows.size}, {depth.size}, {lies}>(" if pairs else f"dot<{kind}>({lies}, "
    text.put(f"{name}{to}, {columns.size}, {a}, {am}, {b}, {bk}, {extents});")
    text.close()


def fetch(text: Text, hint: Prefetch) -> None:
    """A hint as a loop over cache lines, if it names rows of contiguous elements."""
    for outer, inner in (hint.lanes, hint.lanes[::-1]) if len(hint.lanes) == 2 else ():
        rows = _rows_of(text, hint.tensor, hint.index, outer, inner)
        if rows is not None:
            bounds, size = text.bounds(hint.lanes, hint.guard), f"(i64)sizeof({ctype(hint.tensor.dtype)})"
            count, width = (text.limit(lane, bounds[lane]) for lane in (outer, inner))
            text.put(f"fetch_rows({rows[0]}, {rows[1]} * {size}, {width} * {size}, {count});")
            return


@dataclass(frozen=True)
class _LaneRange:
    """The existing lanes of a block: the first, one past the last, and their number."""

    start: str
    end: str

    @property
    def count(self) -> str:
        return self.end if self.start == "0" else f"{self.end} - {self.start}"


def _range(text: Text, lane: Lane, node: Dot, bounds: list[str]) -> _LaneRange:
    start, end = text.start(lane, node.lanes, node.guard), text.fresh()
    if start != "0":
        first = text.fresh()
        text.put(f"const i64 {first} = {start};")
        start = first
    text.put(f"const i64 {end} = larger<i64>({start}, {text.limit(lane, bounds)});")
    return _LaneRange(start, end)


def _moved(pointer: str, stride: str, outer: _LaneRange, inner: _LaneRange) -> str:
    """A pointer to a block's first existing lanes."""
    steps = [f"{outer.start} * {stride}"] * (outer.start != "0") + [inner.start] * (inner.start != "0")
    return " + ".join([pointer, *steps])


def _is_bfloat16(value: Value) -> bool:
    """Whether an operand is stored in, or rounded to, that dtype."""
    rounded = isinstance(value, Call) and value.function == "cast"
    return value.dtype == torch.bfloat16 and (rounded or isinstance(value, Load))


def _operand(text: Text, value: Value, outer: Lane, inner: Lane, ranges: dict[Lane, _LaneRange], kind: str) -> tuple[str, str]:
    """A pointer to the operand and its row stride; columns are contiguous."""
    if isinstance(value, Load) and ctype(value.dtype) == kind and not value.guard:
        rows = _rows_of(text, value.tensor, value.index, outer, inner)
        if rows is not None:
            return rows
    if isinstance(value, Held) and value.local.lanes == (outer, inner) and computed(value.dtype) == kind:
        return value.local.name, str(inner.size)
    name = text.fresh()
    across = _across(text, value, outer, inner, kind)
    if across is not None:
        # Its columns are contiguous: transposed, one square at a time.
        text.put(f"static thread_local {kind} {name}[{outer.size * inner.size}];")
        to = _moved(name, str(inner.size), ranges[outer], ranges[inner])
        by = _moved(*across, ranges[inner], ranges[outer])
        text.put(f"turned({to}, {inner.size}, {by}, {across[1]}, {ranges[outer].count}, {ranges[inner].count});")
        return name, str(inner.size)
    text.put(f"static thread_local {kind} {name}[{outer.size * inner.size}];")
    for lane in (outer, inner):
        if lane == inner:
            # Like all innermost loops. If g++ 12 unrolls it and vectorizes the outer one, masked reads with gaps are wrong.
            text.put("#pragma omp simd")
        text.open(f"for (i64 {lane.symbol} = {ranges[lane].start}; {lane.symbol} < {ranges[lane].end}; {lane.symbol}++)")
    scalars = text.scalars()
    # The copy rounds, so the value is not rounded first.
    spelled = scalars.text(value.args[0] if kind == "bf16" and isinstance(value, Call) else value)
    for line in scalars.lines:
        text.put(line)
    text.put(f"store({name}[{outer.symbol} * {inner.size} + {inner.symbol}], ({'f32' if kind == 'bf16' else kind}){spelled});")
    text.close(2)
    return name, str(inner.size)


def _across(text: Text, value: Value, outer: Lane, inner: Lane, kind: str) -> tuple[str, str] | None:
    """A pointer to an operand with contiguous rows, and its column stride; None for others."""
    if not isinstance(value, Load) or ctype(value.dtype) != kind or value.guard:
        return None
    return _rows_of(text, value.tensor, value.index, inner, outer)


def _rows_of(text: Text, tensor: Tensor, index: Sequence[Expr], outer: Lane, inner: Lane) -> tuple[str, str] | None:
    """A pointer to rows of contiguous elements, and how far apart they are; None for others."""
    flat = text.flat_expr(tensor, index)
    terms = dict(flat.terms) if isinstance(flat, Sum) else {flat: 1}
    first, second, third = (flat.substitute({outer.symbol: const(k), inner.symbol: const(0)}) for k in range(3))
    stride = second - first
    # Rows that are looked up (those of different components may lie anywhere) have no fixed stride.
    even = (third - second - stride).value == 0
    if terms.get(inner.symbol) != 1 or not even or stride.symbols & {outer.symbol, inner.symbol}:
        return None
    return f"{tensor.name} + {text.index(first)}", f"({text.index(stride)})"
