"""Pad lanes: rounds the size of every lane up to a power of two, and of those in matrix products up to what the target needs.

In: a loop program. Out: the same; padding positions are masked, and indices into private blocks use padded strides.

    [k:48] t += x[k]   ->   [k:64] t += x[k]  where k < 48
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from serrate.errors import VerificationError
from serrate.ir.expr import Element, Expr, Less, Sum, const, symbol
from serrate.ir.loops import (
    Bind,
    Block,
    Declare,
    Dot,
    Existing,
    Guard,
    Lane,
    Lanes,
    Local,
    LoopProgram,
    Node,
    existing,
    nodes,
    values_of,
)
from serrate.ir.renaming import Renaming
from serrate.ir.values import Value, rewrite
from serrate.lower.passes.common import Body, inward, kept, per_kernel
from serrate.schedule.target import power_of_two_at_least


def pad_lanes(program: LoopProgram, least: int = 1) -> LoopProgram:
    """Lanes of powers of two, with guards; those of products have `least` positions or more."""

    def change(body: Body) -> Body:
        products = [n for n in nodes(body) if isinstance(n, Dot) and n.local.dtype.is_floating_point]
        # A block may be read along other lanes of the same size, which stay of the same size.
        multiplied = {lane.size for node in products for lane in node.lanes}
        sizes = {
            lane: max(power_of_two_at_least(lane.size), least if lane.size in multiplied else 1) for lane in _every_lane(body)
        }
        padded = {lane: size for lane, size in sizes.items() if size != lane.size}
        blocks = {node.local.name: node.local for node in nodes(body) if isinstance(node, Declare)}
        return _Padding(padded, blocks).body(body) if padded else body

    return per_kernel(program, lambda k: change(k.body))


def _every_lane(body: Body) -> Iterable[Lane]:
    return dict.fromkeys(lane for node in nodes(body) for lane in _lanes_of(node))


def _lanes_of(node: Node) -> Lanes:
    if isinstance(node, Declare):
        return node.local.lanes
    counted = (v for value in values_of(node) for v in value.walk() if isinstance(v, Existing))
    return (*getattr(node, "lanes", ()), *(lane for v in counted for lane in v.lanes))


@dataclass(frozen=True)
class _Padding(Renaming):
    padded: Mapping[Lane, int]
    """The lanes that are padded, and how many positions they get."""
    blocks: Mapping[str, Local]

    def body(self, body: Body) -> Body:
        return kept(body, map(self._padded, body))

    def _padded(self, node: Node) -> Node:
        if isinstance(node, Declare):
            return self.node(node)
        if isinstance(node, Bind | Block):
            new = self.node(node)
            return replace(new, guard=self._with_existing(new.guard, node.lanes))
        return inward(node, self.body)

    def _with_existing(self, guard: Guard, lanes: Lanes) -> Guard:
        """Conditions, and those under which positions of padded lanes exist."""
        existing = (Less(self.lane(lane).symbol, const(lane.size)) for lane in lanes if lane in self.padded)
        return tuple(dict.fromkeys((*guard, *existing)))

    def lane(self, lane: Lane) -> Lane:
        size = self.padded.get(lane)
        return lane if size is None else Lane(symbol(lane.symbol.name, 0, size - 1), size)

    def expr(self, expr: Expr) -> Expr:
        known: dict[Expr, Expr] = {lane.symbol: self.lane(lane).symbol for lane in self.padded}
        for e in reversed(list(expr.walk())):
            if isinstance(e, Element) and e.array.local and e.array.name in self.blocks:
                known[e] = e.array[self._place(e.index, self.blocks[e.array.name]).substitute(known)]
        return expr.substitute(known)

    def _place(self, index: Expr, block: Local) -> Expr:
        """An index into a private block, which counts positions of its lanes, where these are padded."""
        strides = dict(zip(_strides(block.lanes), _strides(self.lanes(block.lanes)), strict=True))
        terms = index.terms if isinstance(index, Sum) else ((index, 1),)
        if index.value == 0 or all(strides.get(factor) == factor for _, factor in terms):
            return index
        if (isinstance(index, Sum) and index.constant) or any(factor not in strides for _, factor in terms):
            raise VerificationError(f"{block} is read at {index}, which does not determine a position in each lane")
        return sum((term * strides[factor] for term, factor in terms), const(0))

    def value(self, value: Value) -> Value:
        sizes = {self.lane(lane): lane.size for lane in self.padded}

        def counted(v: Value) -> Value | None:
            if not isinstance(v, Existing) or not sizes.keys() & set(v.lanes):
                return None
            own = (Less(lane.symbol, const(sizes[lane])) for lane in v.lanes if lane in sizes)
            return existing(v.lanes, tuple(dict.fromkeys((*v.guard, *own))), v.dtype)

        return rewrite(super().value(value), counted)


def _strides(lanes: Lanes) -> list[int]:
    """How far apart neighbours along each lane of a block lie."""
    out, stride = [], 1
    for lane in reversed(lanes):
        out.append(stride)
        stride *= lane.size
    return out[::-1]
