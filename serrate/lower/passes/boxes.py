"""Boxes: operands of matrix products that a copy engine may read.

In: a loop program. Out: the same, with reads of operands marked that are boxes of their tensors (`analysis/boxes.py`). A copy
engine cannot mask positions, so an operand may have holes only along the lane that the product keeps: there they affect no
result that exists.

    [m:128, n:256, k:64] t += x[m, k] @ w[k, n]  where m < rows    ->    .. += box x[m, k] @ box w[k, n]  where m < rows

Programs are printed with or without boxes, because not all devices have copy engines and not all memory is aligned.
"""

from __future__ import annotations

from dataclasses import replace

from serrate.analysis.boxes import box_of
from serrate.ir.loops import Boxed, Dot, Lane, Load, LoopProgram, Node, Write, boxed, nodes
from serrate.ir.values import Tensor, Value
from serrate.lower.passes.common import Body, inward, kept, per_kernel

LEAST = 16 << 10
"""Bytes of the smallest block for which a copy engine is faster than pointer loads: programs wait for each of its blocks."""
NARROW = 2
"""Bytes of the elements that matrix units read from shared memory, which copy engines fill."""


def boxes(program: LoopProgram) -> LoopProgram:
    """Marks the operands of products that are boxes."""

    def kernel(body: Body) -> Body:
        # A copy engine would not see what the same kernel has written.
        return _body(body, {n.tensor for n in nodes(body) if isinstance(n, Write)})

    return per_kernel(program, lambda k: kernel(k.body))


def _body(body: Body, written: set[Tensor]) -> Body:
    return kept(body, (_dot(n, written) if isinstance(n, Dot) else inward(n, lambda p: _body(p, written)) for n in body))


def _dot(dot: Dot, written: set[Tensor]) -> Node:
    rows, columns, depth = dot.lanes

    def operand(value: Value, kept_lane: Lane) -> Value:
        if not isinstance(value, Load) or isinstance(value, Boxed) or value.tensor in written:
            return value
        missing = any(depth.symbol in g.symbols for g in (*dot.guard, *value.guard))
        size = value.dtype.itemsize * kept_lane.size * depth.size
        fits = value.dtype.is_floating_point and value.dtype.itemsize == NARROW and size >= LEAST and not missing
        return boxed(value) if fits and box_of(value, (kept_lane, depth)) else value

    left, right = operand(dot.left, rows), operand(dot.right, columns)
    return dot if (left, right) == (dot.left, dot.right) else replace(dot, left=left, right=right)
