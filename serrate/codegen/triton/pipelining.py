"""Pipelining: how many blocks the loops of a kernel load ahead, and which loads are the last to read their memory.

In: the statements of a kernel. Out: numbers of stages for Triton's software pipelining; the loops that read an input last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from serrate.ir.expr import Symbol
from serrate.ir.loops import Bind, Dot, For, Held, If, Load, Node, Reduce, bodies, nodes, values_of
from serrate.ir.tile import GRID
from serrate.ir.values import Role, Tensor

STAGES, ROW_STAGES = 4, 3
"""Blocks of a matrix product in flight: in a loop over as many as a number says, and over those of a row, which may be few."""
CHAINED_STAGES = (3, 2)
"""The same for chained products: the first number that lets two programs share a multiprocessor, else the last."""
HALF_SHARED = 113 << 10
"""Bytes of shared memory that each of two programs on a multiprocessor may have."""
IN_FLIGHT = 96 << 10
"""The most bytes that a loop of reductions keeps in flight: they occupy shared memory."""


def product_stages(body: Sequence[Node], loop: For | None = None) -> int | None:
    """How many blocks of products to keep in flight, if these are the statements of a loop."""
    products = [n for n in body if isinstance(n, Dot)]
    inner = (product_stages(part, n if isinstance(n, For) and n.kind is not GRID else None) for n in body for part in bodies(n))
    own = _stages_of(products, loop) if products else None
    return min((n for n in (own, *inner) if n is not None), default=None)


def _stages_of(products: Sequence[Dot], loop: For | None) -> int:
    """Two programs on a multiprocessor hide what one waits for: scores, say, before they are multiplied with values."""
    sides = [(v, dot) for dot in products for v in (dot.left, dot.right)]
    if not any(isinstance(v, Held) for side, _ in sides for v in side.walk()):
        return STAGES if loop is None or loop.extent.value is not None else ROW_STAGES
    changing = {loop.symbol, *(n.symbol for n in nodes(loop.body) if isinstance(n, For | Bind))} if loop else set()
    blocks = {v: dot for v, dot in sides if isinstance(v, Load)}
    still = moving = 0
    for block, dot in blocks.items():
        own = {s for e in block.index for s in e.symbols}
        size = block.dtype.itemsize * math.prod(lane.size for lane in dot.lanes if lane.symbol in own)
        still, moving = (still, moving + size) if own & changing else (still + size, moving)
    fitting = (n for n in CHAINED_STAGES if still + n * moving <= HALF_SHARED)
    return next(fitting, CHAINED_STAGES[-1])


def bytes_of(body: Sequence[Node]) -> int:
    """The bytes that one iteration of a loop loads, for all lanes."""
    blocks = {(v.tensor, v.index, n.lanes) for n in body if isinstance(n, Reduce) for v in _loads(n)}
    return sum(tensor.dtype.itemsize * math.prod(lane.size for lane in lanes) for tensor, _, lanes in blocks)


def last_reads(body: Sequence[Node]) -> set[tuple[int, Tensor]]:
    """The loops, by id, that are the last to read an input that an earlier sibling loop reads too. A loop and the block that was
    taken out of its end are one. Blocks of products are read by other programs too."""
    loops: list[list[Node]] = []
    for node in body:
        if isinstance(node, For | If) and loops and isinstance(first := loops[-1][0], For) and _goes_on(node, first.symbol):
            loops[-1].append(node)
        elif isinstance(node, For) and not any(isinstance(inner, Dot) for inner in nodes((node,))):
            loops.append([node])
    read = [{v.tensor for n in loop for v in _loads(n) if v.tensor.role is Role.INPUT} for loop in loops]
    last = {tensor: loop for loop, tensors in zip(loops, read, strict=True) for tensor in tensors}
    several = [tensor for tensor in last if sum(tensor in tensors for tensors in read) > 1]
    inside = (last_reads(part) for n in body for part in bodies(n))
    return {(id(n), tensor) for tensor in several for n in last[tensor]}.union(*inside)


def _goes_on(node: For | If, index: Symbol) -> bool:
    """Whether a statement goes on where a loop over this index has ended."""
    return any(isinstance(n, Bind) and n.symbol is index for n in bodies(node)[0])


def _loads(node: Node) -> Iterator[Load]:
    return (v for n in nodes((node,)) for value in values_of(n) for v in value.walk() if isinstance(v, Load))
