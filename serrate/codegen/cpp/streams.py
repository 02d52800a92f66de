"""Non-temporal stores in C++: contiguous blocks bypass the cache, line by line or through a staging buffer, or as byte copies.

In: `Write`s. Out: how their blocks are stored, and their staging buffers; copies and fills for those that only move elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serrate.codegen.cpp.index_set_split import IndexSetSplit, moves
from serrate.codegen.cpp.statements import size_of
from serrate.codegen.cpp.text import Text
from serrate.codegen.cpp.values import ctype, number
from serrate.ir.expr import Expr, Sum, const
from serrate.ir.loops import Block, Lane, Load, Write
from serrate.ir.values import COSTLY, Call, Constant, Role


@dataclass(frozen=True)
class Stage:
    """A staged block: the pointer it is written through, its start in memory, the offsets in it, and its size in elements."""

    pointer: str
    base: str
    place: Expr
    count: str


@dataclass(frozen=True)
class Straight:
    """A block without staging: each cache line is streamed as soon as it is computed."""


HALVES = {torch.float16, torch.bfloat16}
LINES = 256
"""The fewest bytes of an innermost lane for which streaming line by line pays off."""


def block_bytes(text: Text, node: Write) -> int:
    """The bytes of the block that a statement writes if it is contiguous, else 0. Also 0 if it is accumulated into or read
    again, because the end of a block may still be buffered."""
    if node.tensor.role is not Role.OUTPUT or not node.lanes or node.add or node.tensor.memory in text.read:
        return 0
    if any(text.bound(lane, g) is None for lane, g in text.on_lanes(node.lanes, node.guard)):
        # It starts inside the tensor's row, or has gaps.
        return 0
    flat = text.flat_expr(node.tensor, node.index)
    terms = dict(flat.terms) if isinstance(flat, Sum) else {flat: 1}
    expected = 1
    guarded = {lane for g in node.guard for lane in node.lanes if lane.symbol in g.symbols}
    for k, lane in reversed(list(enumerate(node.lanes))):
        # Another term that depends on the lane, such as the row it belongs to, may jump.
        jumps = any(lane.symbol in term.symbols for term in terms if term is not lane.symbol)
        if terms.get(lane.symbol) != expected or jumps or (k > 0 and lane in guarded):
            return 0
        expected *= lane.size
    size = expected * node.tensor.dtype.itemsize
    return size if 256 <= size <= 65536 else 0


def streaming_of(
    text: Text, node: Write, bounds: dict[Lane, list[str]], pieces: Sequence[Sequence[Block]]
) -> Stage | Straight | None:
    """How a contiguous block bypasses the cache; None for other blocks. `pieces` are the statements that compute it."""
    return Straight() if block_bytes(text, node) and all(map(_goes_straight, pieces)) else stage_of(text, node, bounds)


def _goes_straight(piece: Sequence[Block]) -> bool:
    """Whether streaming line by line is as good as staging. Not if several statements compute the block together, if elements
    are guarded individually, if 16-bit conversions work on blocks, or if computing takes longer than storing."""
    node, *others = piece
    if others or not isinstance(node, Write) or node.lanes[-1].size * node.tensor.dtype.itemsize < LINES:
        return False
    loads = [v for v in node.value.walk() if isinstance(v, Load)]
    if any(v.guard for v in loads) or any(isinstance(v, Call) and v.function in COSTLY for v in node.value.walk()):
        return False
    dtypes = {node.tensor.dtype, *(v.tensor.dtype for v in loads)}
    return not dtypes & HALVES


def stage_of(text: Text, node: Write, bounds: dict[Lane, list[str]]) -> Stage | None:
    """Declares the staging buffer of a contiguous block; None for other blocks."""
    if not block_bytes(text, node):
        return None
    flat = text.flat_expr(node.tensor, node.index)
    start = flat.substitute({lane.symbol: const(0) for lane in node.lanes})
    name = text.fresh()
    kind = ctype(node.tensor.dtype)
    inner = size_of(node.lanes[1:])
    base = text.fresh()
    text.put(f"const i64 {base} = {text.index(start)};")
    text.put(f"Stage<{kind}, {size_of(node.lanes)}> {name}_stage;")
    place = f"{name}_stage.apart_from({_source(text, node)})"
    text.put(f"{kind}* __restrict {name} = stream ? {place} : {node.tensor.name} + {base};")
    count = f"larger<i64>(0, {text.limit(node.lanes[0], bounds[node.lanes[0]])}) * {inner}"
    return Stage(name, base, flat - start, count)


def _source(text: Text, node: Write) -> str:
    """The start in memory of the block that a statement reads, if known beforehand; of several reads, the one with most lanes."""
    at: dict[Expr, Expr] = {lane.symbol: const(0) for lane in node.lanes}
    found: list[tuple[int, str]] = []
    for load in (v for v in node.value.walk() if isinstance(v, Load) and not v.guard and v.tensor.role is not Role.SCRATCH):
        flat = text.flat_expr(load.tensor, load.index)
        start = flat.substitute(at)
        if not start.arrays:
            found.append((len(flat.symbols & at.keys()), f"{load.tensor.name} + {text.index(start)}"))
    return max(found, key=lambda each: each[0])[1] if found else "nullptr"


def moved(text: Text, group: Sequence[Block], cut: IndexSetSplit | None, bounds: dict[Lane, list[str]]) -> bool:
    """Prints a contiguous block that is read from contiguous memory as a byte copy, followed by a fill where the source ends."""
    first = group[0]
    if len(group) > 1 or not isinstance(first, Write) or not block_bytes(text, first):
        return False
    node, *later_pieces = (first,) if cut is None else (piece[0] for piece in cut.pieces)
    if not moves(node) or len(later_pieces) > 1 or (cut is not None and cut.lane != node.lanes[0]):
        return False
    filled = later_pieces[0] if later_pieces else None
    source, name, kind = node.value, node.tensor.name, ctype(node.tensor.dtype)
    assert isinstance(source, Load)
    at: dict[Expr, Expr] = {lane.symbol: const(0) for lane in node.lanes}
    to, by = text.flat_expr(node.tensor, node.index), text.flat_expr(source.tensor, source.index)
    start = to.substitute(at)
    fill = None if filled is None else _same_everywhere(text, filled)
    if to - start != by - by.substitute(at) or (filled is not None and fill is None):
        return False
    limit, inner = text.limit(node.lanes[0], bounds[node.lanes[0]]), size_of(node.lanes[1:])
    end = f"larger<i64>(0, {limit})" if cut is None else text.end(cut, limit)
    pointers = f"{name} + {text.index(start)}, {source.tensor.name} + {text.index(by.substitute(at))}"
    text.put(f"copy_bytes({name}_stream, {pointers}, {end} * {inner} * sizeof({kind}), stream);")
    if fill is not None:
        place = f"{name} + {text.index(start)} + {end} * {inner}"
        text.put(f"fill_with<{kind}>({name}_stream, {place}, {fill}, (larger<i64>({end}, {limit}) - {end}) * {inner}, stream);")
    return True


def _same_everywhere(text: Text, node: Write) -> str | None:
    """The value that a statement writes if it is the same in all lanes, in its storage type; else None."""
    value, kind = node.value, ctype(node.tensor.dtype)
    if isinstance(value, Constant):
        return f"stored<{kind}>({number(value.number, value.dtype)})"
    if not moves(node) or not isinstance(value, Load):
        return None
    place = text.flat_expr(value.tensor, value.index)
    still = not place.symbols & {lane.symbol for lane in node.lanes}
    return f"{value.tensor.name}[{text.index(place)}]" if still else None
