"""Pad lanes: rounds the size of every lane up to a power of two, for targets that need it.

In: a loop program. Out: the same; padding positions are masked, and indices into private blocks use padded strides.

    [k:48] t += x[k]   ->   [k:64] t += x[k]  where k < 48
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serrate.errors import VerificationError
from serrate.ir.expr import Element, Expr, Less, Sum, Symbol, const, symbol
from serrate.ir.loops import (
    Bind,
    Block,
    Declare,
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


def pad_lanes(program: LoopProgram) -> LoopProgram:
    """Pads lanes to powers of two, with guards."""

    def change(body: Body) -> Body:
        lanes = {lane for node in nodes(body) for lane in _lanes_of(node)}
        odd = {lane.symbol: lane.size for lane in lanes if lane.size != power_of_two_at_least(lane.size)}
        blocks = {node.local.name: node.local for node in nodes(body) if isinstance(node, Declare)}
        return _Padding(odd, blocks).body(body) if odd else body

    return per_kernel(program, lambda k: change(k.body))


def _lanes_of(node: Node) -> Lanes:
    if isinstance(node, Declare):
        return node.local.lanes
    counted = (v for value in values_of(node) for v in value.walk() if isinstance(v, Existing))
    return (*getattr(node, "lanes", ()), *(lane for v in counted for lane in v.lanes))


@dataclass(frozen=True)
class _Padding(Renaming):
    sizes: Mapping[Symbol, int]
    """The padded lanes, with the number of positions that exist."""
    blocks: Mapping[str, Local]

    def body(self, body: Body) -> Body:
        return kept(body, map(self._padded, body))

    def _padded(self, node: Node) -> Node:
        if isinstance(node, Declare):
            return self.node(node)
        if isinstance(node, Bind | Block):
            new = self.node(node)
            return replace(new, guard=tuple(dict.fromkeys((*new.guard, *self._existing(node.lanes)))))
        return inward(node, self.body)

    def _existing(self, lanes: Lanes) -> Guard:
        """The conditions under which positions of padded lanes exist."""
        return tuple(Less(self._symbol(lane.symbol), const(lane.size)) for lane in lanes if lane.symbol in self.sizes)

    def _symbol(self, s: Symbol) -> Symbol:
        return symbol(s.name, 0, power_of_two_at_least(self.sizes[s]) - 1) if s in self.sizes else s

    def lane(self, lane: Lane) -> Lane:
        return Lane(self._symbol(lane.symbol), power_of_two_at_least(lane.size))

    def expr(self, expr: Expr) -> Expr:
        known: dict[Expr, Expr] = {s: self._symbol(s) for s in self.sizes}
        for e in reversed(list(expr.walk())):
            if isinstance(e, Element) and e.array.local and e.array.name in self.blocks:
                known[e] = e.array[self._place(e.index, self.blocks[e.array.name]).substitute(known)]
        return expr.substitute(known)

    def _place(self, index: Expr, block: Local) -> Expr:
        """An index into a private block whose lanes are padded, with the strides of the padded block."""
        sizes = [lane.size for lane in block.lanes]
        strides = dict(zip(_strides(sizes), _strides([power_of_two_at_least(n) for n in sizes]), strict=True))
        terms = index.terms if isinstance(index, Sum) else ((index, 1),)
        if index.value == 0 or all(strides.get(factor) == factor for _, factor in terms):
            return index
        if (isinstance(index, Sum) and index.constant) or any(factor not in strides for _, factor in terms):
            raise VerificationError(f"{block} is read at {index}, which does not determine a position in each lane")
        return sum((term * strides[factor] for term, factor in terms), const(0))

    def value(self, value: Value) -> Value:
        def counted(v: Value) -> Value | None:
            if not isinstance(v, Existing):
                return None
            return existing(v.lanes, tuple(dict.fromkeys((*v.guard, *(Less(s, const(n)) for s, n in odd(v))))), v.dtype)

        def odd(v: Existing) -> list[tuple[Symbol, int]]:
            padded = {self._symbol(s): n for s, n in self.sizes.items()}
            return [(lane.symbol, padded[lane.symbol]) for lane in v.lanes if lane.symbol in padded]

        return rewrite(super().value(value), counted)


def _strides(sizes: Sequence[int]) -> list[int]:
    """The stride of each lane of a block."""
    out, stride = [], 1
    for size in reversed(sizes):
        out.append(stride)
        stride *= size
    return out[::-1]
