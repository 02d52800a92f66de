"""Peel: a compute-bound loop runs its whole blocks without masks; the partial blocks at its ends are peeled off.

In: a loop program. Out: the same; a loop whose statements are guarded at its end becomes two, the first of them without these
guards. Masks cost as many instructions as a softmax, and most blocks of a long row are whole:

    serial k < e:  t += a[k*64 + i] * ..  where k*64 + i < n    ->    whole = min(e, n // 64)
                                                                      serial k < whole:      t += a[k*64 + i] * ..
                                                                      k = whole, if whole < e:
                                                                          t += a[k*64 + i] * ..  where k*64 + i < n

Conditions that hold only from some block on, such as those of queries that see a key, get a loop before these two, or after them
if blocks only add to sums. In whole blocks, a select by such a condition (a causal mask) is replaced by its value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping

from serrate.ir.conditions import conditions_of
from serrate.ir.expr import Element, Expr, FloorDiv, Less, Minimum, Symbol, const, maximum, minimum, symbol
from serrate.ir.loops import (
    Bind,
    Declare,
    Dot,
    For,
    If,
    Load,
    LoopProgram,
    Node,
    While,
    Write,
    blocks_read,
    bodies,
    nodes,
    values_of,
    written_by,
)
from serrate.ir.solve import certain, end_of, start_of
from serrate.ir.tile import GRID
from serrate.ir.values import Call, Role, Value, call, rewrite
from serrate.lower.names import Names
from serrate.lower.passes.common import Body, Effect, effects, inward, kept, names_in, per_kernel, with_values
from serrate.lower.passes.end_loops import settled

Bounds = Mapping[Less, Expr]
"""Conditions, and the positions of a loop from which on they may fail, or hold."""


def peel(program: LoopProgram) -> LoopProgram:
    """Takes the blocks at the ends of rows out of loops."""
    names = Names(program)
    return per_kernel(program, lambda k: _body(k.body, names))


def _body(body: Body, names: Names) -> Body:
    out: list[Node] = []
    for node in body:
        node = inward(node, lambda part: _body(part, names))
        out += _peeled(node, names) if isinstance(node, For) and _computes(node) else [node]
    return kept(body, out)


def _computes(loop: For) -> bool:
    """Whether a loop itself, not a nested one, does arithmetic on the program's inputs, so that masks would cost extra
    instructions. A loop that only sums, multiplies or moves its inputs is bound by memory or matrix units, and a loop over
    partial results is short. If loads are pipelined, a peeled block would have to wait for memory on its own."""
    products = [n for n in loop.body if isinstance(n, Dot)]
    if loop.kind is GRID or products:
        return loop.kind is not GRID and not all(_multiplies_memory(n) for n in effects(loop.body))
    values = [v for s in effects(loop.body) for value in values_of(s) for v in value.walk()]
    called = any(isinstance(v, Call) and v.function != "cast" for v in values)
    read = any(isinstance(v, Load) and v.tensor.role is Role.INPUT for v in values)
    return called and read and not any(isinstance(n, For | While) for n in loop.body)


def _multiplies_memory(node: Effect) -> bool:
    """Whether a statement multiplies blocks as they are in memory."""
    return isinstance(node, Dot) and isinstance(node.left, Load) and isinstance(node.right, Load)


def _peeled(loop: For, names: Names) -> list[Node]:
    guards = guards_of(loop)
    ends = {g: end for g in guards if (end := first_failure(g, loop)) is not None}
    starts = {g: start for g in guards if g not in ends and (start := _bound(g, loop, start_of)) is not None}
    met = functools.reduce(maximum, dict.fromkeys(starts.values()), const(0))
    met = maximum(minimum(met, loop.extent), const(0))
    readable, named = _protected(ends, loop, names)
    limit = functools.reduce(minimum, dict.fromkeys(readable.values()), loop.extent)
    # Nothing is whole in a row that ends before it begins.
    if not (ends or starts) or (limit.value is not None and limit.value <= 0):
        return [loop]
    inner = _decided(settled(loop.body, {**ends, **starts}.keys()), {**ends, **starts}.keys())
    begin, first = const(0), list[Node]()
    if starts:
        begin = symbol(names.of((loop, "first"), f"first_{loop.symbol}"), 0)
        named.append(Bind(begin, met, (), ()))
        first = [For(loop.symbol, begin, loop.kind, loop.body, begin, brief=True)]
    most = limit.bounds[1]
    whole = symbol(names.of(loop, f"whole_{loop.symbol}"), 0, None if most is None else max(most, 0))
    named.append(Bind(whole, maximum(limit, begin), (), ()))
    if starts:
        step = symbol(names.of((loop, "step"), f"step_{loop.symbol}"), 0)
        main = For(step, whole - begin, loop.kind, (Bind(loop.symbol, begin + step, (), ()), *inner), whole - begin)
    else:
        main = For(loop.symbol, whole, loop.kind, inner, whole)
    last = _last(loop, ends, starts, whole, names)
    # Blocks carried across another loop were observed to occupy registers that the loop over whole blocks needs.
    return [*named, main, *last, *first] if _in_any_order(loop) else [*named, *first, main, *last]


def _last(loop: For, ends: Bounds, starts: Bounds, whole: Symbol, names: Names) -> list[Node]:
    """The blocks from the first on that is not whole: one, or a loop over them."""
    if not ends:
        return []
    body = _decided(settled(loop.body, starts.keys()), starts.keys())
    if not starts and all(at_most_one_apart(loop.extent, end) for end in ends.values()):
        return [If((Less(whole, loop.extent),), (Bind(loop.symbol, whole, (), ()), *body), ())]
    rest = symbol(names.of((loop, "rest"), f"rest_{loop.symbol}"), 0)
    left = loop.extent - whole
    return [For(rest, left, loop.kind, (Bind(loop.symbol, whole + rest, (), ()), *body), left, brief=True)]


def _in_any_order(loop: For) -> bool:
    """Whether the iterations of a loop only add to blocks that none of them reads."""
    own = {n.local.name for n in nodes(loop.body) if isinstance(n, Declare)}
    lasting = [s for s in effects(loop.body) if isinstance(s, Write) or any(x.name not in own for x in written_by(s))]
    read = {name for n in nodes(loop.body) for name in blocks_read(n)}
    return all(isinstance(s, Dot) and s.local.name not in read for s in lasting)


def at_most_one_apart(extent: Expr, end: Expr) -> bool:
    """Whether one expression certainly exceeds another by at most one."""
    if isinstance(extent, Minimum):
        return any(at_most_one_apart(each, end) for each in (extent.left, extent.right))
    if isinstance(extent, FloorDiv) and isinstance(end, FloorDiv) and extent.right is end.right:
        apart, most = (extent.left - end.left).value, extent.right.value
    else:
        apart, most = (extent - end).value, 1
    return apart is not None and most is not None and apart <= most


def guards_of(loop: For) -> dict[Less, None]:
    """The conditions in a loop that depend on its position: of statements and reads, and those that decide a select."""
    statements = effects(loop.body)
    values = [v for s in statements for value in values_of(s) for v in value.walk()]
    found = [g for each in (*statements, *(v for v in values if isinstance(v, Load))) for g in each.guard]
    found += (g for v in values if isinstance(v, Call) and v.function == "where" for g in conditions_of(v.args[0])[0])
    return {g: None for g in found if loop.symbol in g.symbols}


def first_failure(condition: Less, loop: For) -> Expr | None:
    """The first position of a loop at which a condition may fail in some lane, if it then fails from there on."""
    return _bound(condition, loop, end_of)


def _bound(condition: Less, loop: For, solved: Callable[[Less, Symbol], Expr | None]) -> Expr | None:
    """The first position of a loop at which a condition may fail in some lane, if it then fails from there on; or the first from
    which on it holds in all lanes."""
    lanes = {lane.symbol: lane.size for s in effects(loop.body) for lane in s.lanes}
    own = {n.local.name for n in nodes(loop.body) if isinstance(n, Declare)} | {s.name for s in _inside(loop)}
    if any(s in lanes and (s.bounds[1] is None or s.bounds[1] < lanes[s] - 1) for s in condition.symbols):
        return None
    sure = certain(condition, lanes.keys())
    if sure is None or names_in(sure.left, sure.right) & own:
        return None
    return solved(sure, loop.symbol)


def _protected(ends: Bounds, loop: For, names: Names) -> tuple[Bounds, list[Node]]:
    """The bounds, and definitions of names for those that may be read only under conditions that the loop itself checks. For
    example, the first row has no row before it: there, the name holds an arbitrary number, which bounds only statements that do
    nothing."""
    lanes = {lane.symbol for s in effects(loop.body) for lane in s.lanes}
    found, named = dict(ends), list[Node]()
    for condition, end in ends.items():
        rows = {s for e in end.walk() if isinstance(e, Element) for s in e.index.symbols} - {loop.symbol}
        users = [
            [g for g in guard if g.symbols & rows and g.symbols.isdisjoint({loop.symbol, *lanes})]
            for guard in _guards_of_uses(loop.body, ())
            if condition in guard
        ]
        always = tuple(g for g in users[0] if all(g in guard for guard in users))
        if always:
            name = symbol(names.of((loop, condition), f"end_{loop.symbol}"), None, None)
            named.append(Bind(name, end, (), always))
            found[condition] = name
    return found, named


def _guards_of_uses(body: Body, around: tuple[Less, ...]) -> Iterator[tuple[Less, ...]]:
    """The conditions under which each statement of a loop runs, and under which each of its reads and selects takes effect."""
    for node in body:
        if isinstance(node, Effect):
            inside = (*around, *node.guard)
            yield inside
            for v in (v for value in values_of(node) for v in value.walk()):
                if isinstance(v, Load):
                    yield (*inside, *v.guard)
                elif isinstance(v, Call) and v.function == "where":
                    yield (*inside, *conditions_of(v.args[0])[0])
        for k, part in enumerate(bodies(node)):
            # The guard of a branch holds in its first part, that of a while loop in its second.
            holds = (isinstance(node, If) and k == 0) or (isinstance(node, While) and k == 1)
            yield from _guards_of_uses(part, (*around, *node.guard) if holds and isinstance(node, If | While) else around)


def _decided(body: Body, known: Collection[Less]) -> Body:
    """Statements whose selects by conditions that are known to hold are decided."""

    def change(v: Value) -> Value | None:
        if not isinstance(v, Call) or v.function != "where":
            return None
        asked, left = conditions_of(v.args[0])
        if not asked or not all(g in known for g in asked):
            return None
        there, other = (rewrite(arg, change) for arg in v.args[1:])
        return there if left is None else call("where", left, there, other, dtype=v.dtype)

    def part(body: Body) -> Body:
        return kept(body, (with_values(n, change) if isinstance(n, Effect) else inward(n, part) for n in body))

    return part(body)


def _inside(loop: For) -> Iterator[Symbol]:
    return (n.symbol for n in nodes(loop.body) if isinstance(n, For | Bind))
