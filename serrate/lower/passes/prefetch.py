"""Prefetch: prefetches the next row, which is adjacent in memory, while a row is processed in private memory, and the right
operand of the next iteration while a product of blocks is computed.

In: a loop program. Out: the same, with hints. A loop that rereads a row and keeps its results in private memory leaves memory
bandwidth unused:

    serial r < len:  m max= x[start + r]                  serial r < len:  m max= x[start + r]
    serial r < len:  row[r] = exp(x[start + r] - m)  ->   serial r < len:  prefetch x[start + len + r];  row[r] = exp(...)

    serial k < n:  s += q @ x[k]                     ->   serial k < n:  prefetch x[k + 1];  s += q @ x[k]

A loop that keeps nothing already runs at memory speed, and hints would slow it down.
"""

from __future__ import annotations

from dataclasses import replace

from serrate.ir.expr import Expr, Less, const
from serrate.ir.loops import Assign, Dot, For, Load, LoopProgram, Node, Prefetch, Reduce, Write, bodies, values_of
from serrate.ir.tile import GRID
from serrate.ir.values import Role, Tensor
from serrate.lower.passes.common import Body, effects, inward, kept, per_kernel


def prefetch(program: LoopProgram) -> LoopProgram:
    """Prefetches the next row in the first loop that keeps results of the current one."""
    return per_kernel(program, lambda k: _body(k.body))


def _body(body: Body) -> Body:
    out: list[Node] = []
    seen: set[Tensor] = set()
    done = False
    for node in body:
        if isinstance(node, For) and node.kind is not GRID:
            node = _multiplying(node)
            statements = effects(node.body)
            near = all(isinstance(s, Reduce | Assign) or _is_private(s) for s in statements)
            if near and not done and any(map(_is_private, statements)):
                made = _fetching(node, seen)
                done = made is not node
                node = made
            seen |= {v.tensor for s in statements for value in values_of(s) for v in value.walk() if isinstance(v, Load)}
        elif bodies(node):
            node = inward(node, _body)
        out.append(node)
    return kept(body, out)


def _is_private(node: Node) -> bool:
    return isinstance(node, Write) and node.tensor.role is Role.PRIVATE


def _fetching(loop: For, seen: set[Tensor]) -> For:
    """A loop with a hint for everything that it rereads."""
    out: list[Node] = []
    fetched: set[tuple[Tensor, tuple[Expr, ...]]] = set()
    for node in loop.body:
        length = _length(node, loop) if isinstance(node, Reduce | Write) else None
        if length is not None and isinstance(node, Reduce | Write):
            reads = (v for v in node.value.walk() if isinstance(v, Load) and v.tensor in seen and v.tensor.role is Role.INPUT)
            for v in reads:
                index = (v.index[0] + length, *v.index[1:]) if v.index else ()
                if v.index and loop.symbol in v.index[0].symbols and not v.guard and (v.tensor, index) not in fetched:
                    out.append(Prefetch(node.lanes, node.guard, v.tensor, index))
                    fetched.add((v.tensor, index))
        out.append(node)
    return replace(loop, body=tuple(out)) if fetched else loop


def _multiplying(loop: For) -> For:
    """A loop with a hint before each product, for the right operand of the next iteration."""
    out: list[Node] = []
    for node in loop.body:
        right = node.right if isinstance(node, Dot) else None
        if isinstance(node, Dot) and isinstance(right, Load) and right.tensor.role is Role.INPUT and not right.guard:
            after: dict[Expr, Expr] = {loop.symbol: loop.symbol + 1}
            index = tuple(e.substitute(after) for e in right.index)
            if index != right.index:
                rows, *lanes = node.lanes
                conditions = (g for g in node.guard if rows.symbol not in g.symbols)
                guard = tuple(Less(g.left.substitute(after), g.right.substitute(after)) for g in conditions)
                out.append(Prefetch(tuple(lanes), guard, right.tensor, index))
        out.append(node)
    return loop if len(out) == len(loop.body) else replace(loop, body=tuple(out))


def _length(node: Reduce | Write, loop: For) -> Expr | None:
    """The length of the row that a loop runs over from its first position, if it guards a statement. None for pieces of rows,
    where the next piece is another worker's, and for rows in lanes, where the next row is another lane's."""
    zero: dict[Expr, Expr] = {s: const(0) for s in (loop.symbol, *(lane.symbol for lane in node.lanes))}
    rows = (g for g in node.guard if g.right.arrays and loop.symbol in g.left.symbols)
    return next((g.right for g in rows if g.left.substitute(zero).value == 0 and not g.right.symbols & zero.keys()), None)
