"""Peel: a loop that computes runs without masks up to the first block that is not whole.

In: a loop program. Out: the same; a loop whose statements are guarded at its end becomes two, the first of which has no such
guards. Masks cost arithmetic units as much as a softmax does, and most blocks of a long row are whole:

    serial k < e:  t += a[k*64 + i] * ..  where k*64 + i < n    ->    whole = min(e, n // 64)
                                                                      serial k < whole:      t += a[k*64 + i] * ..
                                                                      k = whole, if whole < e:
                                                                          t += a[k*64 + i] * ..  where k*64 + i < n
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from serrate.ir.expr import Expr, FloorDiv, Less, Minimum, Symbol, const, maximum, minimum, symbol
from serrate.ir.loops import Bind, Declare, Dot, For, If, Load, LoopProgram, Node, While, nodes, values_of
from serrate.ir.solve import certain, end_of
from serrate.ir.tile import GRID
from serrate.ir.values import Call, Role
from serrate.lower.names import Names
from serrate.lower.passes.common import Body, effects, inward, kept, names_in, per_kernel
from serrate.lower.passes.end_loops import settled


def peel(program: LoopProgram) -> LoopProgram:
    """Takes the blocks at the end of rows out of loops."""
    names = Names(program)
    return per_kernel(program, lambda k: _body(k.body, names))


def _body(body: Body, names: Names) -> Body:
    out: list[Node] = []
    for node in body:
        node = inward(node, lambda part: _body(part, names))
        out += _peeled(node, names) if isinstance(node, For) and _computes(node) else [node]
    return kept(body, out)


def _computes(loop: For) -> bool:
    """Whether a loop itself, and not one inside it, multiplies blocks, or computes something of what the program is given. A loop
    that only adds up or moves what it reads waits for memory, and one over partial results is short."""
    if loop.kind is GRID or any(isinstance(n, Dot) for n in loop.body):
        return loop.kind is not GRID
    values = [v for s in effects(loop.body) for value in values_of(s) for v in value.walk()]
    called = any(isinstance(v, Call) and v.function != "cast" for v in values)
    read = any(isinstance(v, Load) and v.tensor.role is Role.INPUT for v in values)
    return called and read and not any(isinstance(n, For | While) for n in loop.body)


def _peeled(loop: For, names: Names) -> list[Node]:
    ends = {g: end for g in _guards(loop) if (end := _whole_until(g, loop)) is not None}
    if not ends:
        return [loop]
    whole = symbol(names.of(loop, f"whole_{loop.symbol}"), 0)
    # Nothing is whole in a row that ends before it begins.
    limit = maximum(functools.reduce(minimum, dict.fromkeys(ends.values()), loop.extent), const(0))
    first = For(loop.symbol, whole, loop.kind, settled(loop.body, ends.keys()), whole)
    named = Bind(whole, limit, (), ())
    if all(_at_most_one_apart(loop.extent, end) for end in ends.values()):
        return [named, first, If((Less(whole, loop.extent),), (Bind(loop.symbol, whole, (), ()), *loop.body), ())]
    rest = symbol(names.of((loop, "rest"), f"rest_{loop.symbol}"), 0)
    left, body = loop.extent - whole, (Bind(loop.symbol, whole + rest, (), ()), *loop.body)
    return [named, first, For(rest, left, loop.kind, body, left, brief=True)]


def _at_most_one_apart(extent: Expr, end: Expr) -> bool:
    """Whether one expression certainly exceeds another by at most one."""
    if isinstance(extent, Minimum):
        return any(_at_most_one_apart(each, end) for each in (extent.left, extent.right))
    if isinstance(extent, FloorDiv) and isinstance(end, FloorDiv) and extent.right is end.right:
        apart, most = (extent.left - end.left).value, extent.right.value
    else:
        apart, most = (extent - end).value, 1
    return apart is not None and most is not None and apart <= most


def _guards(loop: For) -> dict[Less, None]:
    """The conditions in a loop that depend on its position."""
    statements = effects(loop.body)
    loads = (v for s in statements for value in values_of(s) for v in value.walk() if isinstance(v, Load))
    found = (g for each in (*statements, *loads) for g in each.guard)
    return {g: None for g in found if loop.symbol in g.symbols}


def _whole_until(condition: Less, loop: For) -> Expr | None:
    """The first position of a loop at which a condition may fail in some lane, if it then fails from there on."""
    lanes = {lane.symbol: lane.size for s in effects(loop.body) for lane in s.lanes}
    own = {n.local.name for n in nodes(loop.body) if isinstance(n, Declare)} | {s.name for s in _inside(loop)}
    if any(s in lanes and (s.bounds[1] is None or s.bounds[1] < lanes[s] - 1) for s in condition.symbols):
        return None
    sure = certain(condition, lanes.keys())
    if sure is None or names_in(sure.left, sure.right) & own:
        return None
    return end_of(sure, loop.symbol)


def _inside(loop: For) -> Iterator[Symbol]:
    return (n.symbol for n in nodes(loop.body) if isinstance(n, For | Bind))
