"""Gathers: a statement that reads rows of a tensor at indices from memory becomes a loop over the indices.

In: a loop program. Out: the same, in which each index is read and checked once, and the rows of later indices are prefetched:

    [r:4096, d:64] t sum= table[ids[c + r], d if ids[c + r] < n]  where r < len
        ->
    serial r < len:
      prefetch table[ids[min(c + r + 32, size - 1)], d]
      [d:64] t sum= table[ids[c + r], d if ids[c + r] < n]

The hardware cannot guess where the next row is, but its index is already in memory, in this row of indices or in the next. What
`name_indices` names in such a loop does not depend on lanes, so `unswitch` can test it outside of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from serrate.ir.expr import Element, Expr, Less, Minimum, Symbol, ceildiv, const, element, minimum, symbol
from serrate.ir.loops import (
    Existing,
    For,
    Lane,
    Lanes,
    Load,
    LoopProgram,
    Node,
    Prefetch,
    Reduce,
    values_of,
)
from serrate.ir.solve import end_of, factor_of
from serrate.ir.tile import SERIAL
from serrate.ir.values import Role, Tensor
from serrate.lower.names import Names
from serrate.lower.nests import joins, locals_of
from serrate.lower.passes.common import Body, found_in, inward, kept, per_kernel, substituted

AHEAD = 32
"""How many indices ahead rows are prefetched: memory answers after that many short rows."""
LEAST = 32
"""Bytes of a row below which a loop over indices is not worth its overhead."""

Sizes = dict[str, Expr]


def gathers(program: LoopProgram) -> LoopProgram:
    """Turns the lanes that indices from memory depend on into loops."""
    names = Names(program)
    sizes = {t.name: prod((d.extent_expr for d in t.storage), start=const(1)) for t in program.inputs if t.role is Role.INPUT}
    return per_kernel(program, lambda k: _body(k.body, names, sizes))


def _body(body: Body, names: Names, sizes: Sizes) -> Body:
    out: list[Node] = []
    group: list[Reduce] = []
    for node in (*body, None):
        if isinstance(node, Reduce) and (not group or joins([*group], node)):
            group.append(node)
            continue
        out += _looped(group, names, sizes)
        group = []
        if isinstance(node, Reduce):
            group.append(node)
        elif node is not None:
            inside = inward(node, lambda part: _body(part, names, sizes))
            out.append(node if inside is node else _collapsed(inside))
    return kept(body, out)


def _collapsed(node: Node) -> Node:
    """The two loops of a split as the loop that was split, if nothing else is in the outer one; else the node itself.

    serial o < ceil(n / 4096):  serial i < min(4096, n - o*4096):  x[o*4096 + i]   ->   serial i < n:  x[i]
    """
    inner = node.body[0] if isinstance(node, For) and node.kind is SERIAL and len(node.body) == 1 else None
    if not isinstance(node, For) or not isinstance(inner, For) or not isinstance(inner.extent, Minimum):
        return node
    *rest, step = sorted(inner.extent.operands, key=lambda e: e.value is not None)
    if step.value is None or len(rest) != 1:
        return node
    whole, before = symbol(inner.symbol.name, 0), node.symbol * step.value
    total = rest[0] + before
    body = substituted(inner.body, {inner.symbol: whole - before})
    if node.extent is not ceildiv(total, step.value) or any(node.symbol in e.symbols for e in (total, *found_in(body))):
        return node
    return For(whole, total, SERIAL, body, total)


def _looped(group: Sequence[Reduce], names: Names, sizes: Sizes) -> Sequence[Node]:
    """The statements of one nest, inside loops over the lanes that their indices depend on."""
    found = [(v, e) for node in group for v, e in _gathered(node)]
    if not found:
        return group
    lanes = group[0].lanes
    last = max(k for k, lane in enumerate(lanes) for _, e in found if lane.symbol in e.symbols)
    outer, inner = lanes[: last + 1], lanes[last + 1 :]
    if _needed_lanes(group) & set(outer):
        return group
    loops = {lane: symbol(names.of((lane, "at"), f"{lane.symbol.name}_at"), 0, lane.size - 1) for lane in outer}
    new: dict[Expr, Expr] = {lane.symbol: loop for lane, loop in loops.items()}
    guard = [Less(g.left.substitute(new), g.right.substitute(new)) for g in group[0].guard]
    extents: list[Expr] = []
    for k, lane in enumerate(outer):
        later = {*(loops[each] for each in outer[k + 1 :]), *(each.symbol for each in inner)}
        extent: Expr = const(lane.size)
        for condition in tuple(guard):
            end = end_of(condition, loops[lane])
            if end is not None and not end.symbols & later:
                extent = minimum(extent, end)
                guard.remove(condition)
        extents.append(extent)
    if guard:
        # A condition that stays with the statements may protect what the ends of the loops read.
        return group
    shorter = tuple(replace(node, lanes=inner, guard=()) for node in group)
    body: Body = (*_prefetched(found, new, loops[outer[-1]], inner, sizes), *substituted(shorter, new))
    for lane, extent in zip(reversed(outer), reversed(extents), strict=True):
        body = (For(loops[lane], extent, SERIAL, body, extent),)
    return body


def _needed_lanes(group: Sequence[Reduce]) -> set[Lane]:
    """Lanes that private blocks have, and that values count."""
    found = {lane for node in group for local in locals_of(node) for lane in local.lanes}
    counts = (v for node in group for value in values_of(node) for v in value.walk() if isinstance(v, Existing))
    return found | {lane for v in counts for lane in v.lanes}


def _prefetched(
    found: Sequence[tuple[Load, Element]], new: dict[Expr, Expr], loop: Symbol, lanes: Lanes, sizes: Sizes
) -> Iterator[Prefetch]:
    """Hints for the rows that are read `AHEAD` iterations later, at indices that may belong to a later row of indices."""
    seen: set[tuple[Tensor, tuple[Expr, ...]]] = set()
    for v, e in found:
        place, size = e.index.substitute(new), sizes.get(e.array.name)
        if size is None or factor_of(place, loop) != 1:
            continue
        later = element(e.array, minimum(place + AHEAD, size - 1))
        index = tuple(x.substitute(new).substitute({element(e.array, place): later}) for x in v.index)
        if (v.tensor, index) not in seen:
            seen.add((v.tensor, index))
            yield Prefetch(lanes, (), v.tensor, index)


def _gathered(node: Reduce) -> Iterator[tuple[Load, Element]]:
    """Reads along memory, in the innermost lane, of rows that elements of index arrays select in other lanes."""
    if not node.lanes:
        return
    innermost = node.lanes[-1]
    outer = {lane.symbol for lane in node.lanes[:-1]}
    for value in values_of(node):
        for v in value.walk():
            if not isinstance(v, Load) or not v.index or factor_of(v.index[-1], innermost.symbol) != 1:
                continue
            if innermost.size * v.dtype.itemsize < LEAST:
                continue
            elements = [e for x in v.index[:-1] for e in x.walk() if isinstance(e, Element) and e.array.signed]
            for e in elements:
                if not e.array.local and e.symbols & outer and innermost.symbol not in e.symbols:
                    yield v, e
