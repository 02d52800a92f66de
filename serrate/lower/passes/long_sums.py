"""Long sums: a sum over a long serial loop is flushed into a wider block every few hundred additions.

In: a loop program. Out: the same, with float sums and scans as accurate as blocked ones, however long the loops are.

    t = 0                                t = 0
    serial k < n:                        serial g < ceil(n / 128):
      t sum= x[k]            ->            if 0 < g:  wide sum= t;  t = 0
                                           serial w < min(128, n - g*128):
                                             k := g*128 + w
                                             t sum= x[k]
                                         if something was flushed:  t = wide + t

Every addition rounds the running sum, so its error grows with the number of additions; here it grows with the few hundred per
flush. `wide` is float64. A loop that ends before the first flush does no extra work. A scan that sums keeps the flushed total
beside its carry and adds it to every position. The error of a product does not depend on its size, so scans that multiply carry
float64. On targets without branches, each group is summed into its own block, in the same dtype, and every scan carries float64;
matrix products are left to the matrix units. If only the sum over the lanes of that block is needed, each group ends with that
sum, so that a worker never holds two blocks: they would take twice the registers, and fewer loads could be in flight. A single
group gets a branch without the loop over groups, so that it runs as if it were known to be short:

    lanes<r> = 0                        t = 0
    serial k < n:                       if n <= 64:  part<r> = 0;  serial k < n: [r] part sum= x[k, r];  [r] t sum= part
      [r] lanes sum= x[k, r]            else:
    t = 0                         ->      serial g < ceil(n / 64):
    [r] t sum= lanes                        part<r> = 0
                                            serial w < min(64, n - g*64):  [r] part sum= x[g*64 + w, r]
                                            [r] t sum= part
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from serrate.ir.expr import Less, Symbol, ceildiv, const, minimum, symbol
from serrate.ir.loops import (
    Assign,
    Bind,
    Declare,
    Dot,
    For,
    Guard,
    Held,
    If,
    Local,
    LoopProgram,
    Node,
    Reduce,
    Running,
    blocks_read,
    bodies,
    held,
    nodes,
    values_of,
    written_by,
)
from serrate.ir.tile import SERIAL
from serrate.ir.values import Constant, Value, call, carried_dtype, constant
from serrate.lower.facts import Facts
from serrate.lower.names import Names
from serrate.lower.passes.common import Body, changed, inward, kept, per_kernel

STEPS = 128
"""Additions to an element between flushes."""
DEPTH = 1024
"""The same for matrix products, whose blocks are larger; libraries sum about as many at once."""
ABREAST = 32
"""Positions of the innermost lane that are summed side by side."""
OUTER = 8
"""Positions of an outer loop after which a block is flushed, whatever the inner loop did."""
GROUP = 64
"""Positions of a loop per group without branches; each is already the sum of many lanes."""


def long_sums(program: LoopProgram, *, branches: bool) -> LoopProgram:
    """The program with long sums and scans in two levels."""
    names = Names(program)
    wide = ("prod",) if branches else ("sum", "prod")
    return per_kernel(program, lambda k: _carrying_wide(_body(names, k.body, Facts(()), branches=branches), wide))


def _body(names: Names, body: Body, facts: Facts, *, branches: bool) -> Body:
    """Rewrites the loops of a body that add to blocks declared in it."""
    body = kept(body, (_inside(names, n, facts, branches=branches) for n in body))
    begun = dict.fromkeys(n.local for n in body if isinstance(n, Declare | Assign) and _begins(n))
    sums = [local for local in begun if local.dtype.is_floating_point and _only_summed(local, body)]
    out: list[Node] = []
    groups: list[tuple[For, For]] = []
    loops = 0
    for node in body:
        own = [local for local in sums if isinstance(node, For) and any(_writes(n, local) for n in nodes((node,)))]
        if not own or not isinstance(node, For):
            out.append(node)
        elif branches:
            out += _flushing(names, node, own, f"{loops or ''}", facts)
        else:
            out.append(made := _in_parts(names, node, own, f"{loops or ''}", facts))
            groups += [] if made is node else [(node, made)]
        loops += bool(own)
    return functools.reduce(_with_lanes_summed, groups, kept(body, out))


def _inside(names: Names, node: Node, facts: Facts, *, branches: bool) -> Node:
    if isinstance(node, If):
        then = _body(names, node.then, facts.and_(*node.guard), branches=branches)
        return changed(node, then=then, other=_body(names, node.other, facts, branches=branches))
    return inward(node, lambda part: _body(names, part, facts, branches=branches))


def _begins(node: Declare | Assign) -> bool:
    return isinstance(node, Declare) or (not node.guard and isinstance(node.value, Constant))


def _writes(node: Node, local: Local) -> bool:
    return local in written_by(node)


def _adds(node: Node, local: Local) -> bool:
    """Whether a statement adds to a block, or carries it from one position of a running sum to the next."""
    if isinstance(node, Dot):
        return True
    carried = isinstance(node, Running) and node.carry == local
    return isinstance(node, Reduce | Running) and node.operator == "sum" and (carried or isinstance(node, Reduce))


def _only_summed(local: Local, body: tuple[Node, ...]) -> bool:
    """Whether every loop of a body that writes a block only adds to it, inside loops and branches, and never reads it."""
    for node in body:
        inside = list(nodes((node,)))
        writers = [n for n in inside if _writes(n, local)]
        if not writers or not bodies(node) or _begins_anew(node, local):
            continue
        read = any(v.local == local for n in inside for value in values_of(n) for v in value.walk() if isinstance(v, Held))
        around = [n for n in inside if any(_writes(x, local) for part in bodies(n) for x in nodes(part))]
        serial = all(isinstance(n, If) or (isinstance(n, For) and n.kind is SERIAL) for n in around)
        if read or not serial or not isinstance(node, For) or not all(_adds(n, local) for n in writers):
            return False
        if any(isinstance(n, Declare) and n.local == local for n in inside):
            return False
        if any(isinstance(n, Running) for n in writers) and (len(writers) > 1 or writers[0] not in node.body):
            return False
    return True


def _begins_anew(node: Node, local: Local) -> bool:
    """Whether a branch ignores the previous contents of a block: wherever it writes the block, it first initialises it."""
    if not isinstance(node, If):
        return False
    writers = [next((n for n in part if any(_writes(x, local) for x in nodes((n,)))), None) for part in bodies(node)]
    return all(n is None or (isinstance(n, Assign) and n.local == local and _begins(n)) for n in writers)


def _loops_inside(loop: For, locals_: Sequence[Local]) -> list[For]:
    """The loops of a loop's body that add to blocks."""
    return [n for n in loop.body if isinstance(n, For) and any(_writes(x, local) for x in nodes(n.body) for local in locals_)]


def _direct(body: tuple[Node, ...], local: Local) -> Iterator[Reduce | Dot | Running]:
    """The statements of a loop that add to a block once per iteration."""
    for node in body:
        if isinstance(node, Reduce | Dot | Running) and _writes(node, local):
            yield node
        elif isinstance(node, If):
            for part in bodies(node):
                yield from _direct(part, local)


def _period(loop: For, local: Local) -> int:
    """How many iterations of a loop lie between flushes."""
    found = list(_direct(loop.body, local))
    products = [n.lanes[-1].size for n in found if isinstance(n, Dot)]
    if products:
        return max(DEPTH // max(products), 1)
    return max(STEPS // max(sum(_depth(n) for n in found if not isinstance(n, Dot)), 1), 1)


def _depth(node: Reduce | Running) -> int:
    """How many positions a statement adds to one element sequentially."""
    if isinstance(node, Running):
        return 1 if node.axis is None else node.axis.size
    depth = 1
    for lane in node.lanes:
        depth *= 1 if lane in node.local.lanes else lane.size
    side_by_side = bool(node.lanes) and node.lanes[-1] not in node.local.lanes
    return -(-depth // ABREAST) if side_by_side else depth


def _in_groups(names: Names, loop: For, size: int, before: tuple[Node, ...], after: tuple[Node, ...] = ()) -> For:
    """A loop split into groups of iterations, with statements before and after each group."""
    group = symbol(names.of((loop.symbol, "group"), f"{loop.symbol.name}_group"), 0)
    within = symbol(names.of((loop.symbol, "within"), f"{loop.symbol.name}_within"), 0, size - 1)
    extent = minimum(const(size), loop.extent - group * size)
    inner = For(within, extent, SERIAL, (Bind(loop.symbol, group * size + within, (), ()), *loop.body), extent)
    groups = ceildiv(loop.extent, size)
    return For(group, groups, SERIAL, (*before, inner, *after), groups)


def _short(loop: For, period: int) -> bool:
    """Whether a loop provably ends before the first flush."""
    most = loop.extent.bounds[1]
    return most is not None and most <= period


# --- flushed into a wider block ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flush:
    """How a block is flushed: statements before the loop, at each flush, and after the loop."""

    before: tuple[Node, ...]
    flush: tuple[Node, ...]
    after: tuple[Node, ...]


def _flushing(names: Names, loop: For, locals_: Sequence[Local], suffix: str, facts: Facts) -> tuple[Node, ...]:
    """A loop that flushes the blocks it adds to."""
    if not _loops_inside(loop, locals_) and _short(loop, min(_period(loop, local) for local in locals_)):
        return (loop,)
    flushes: dict[Local, _Flush] = {}
    for local in locals_:
        scan = next((n for n in loop.body if isinstance(n, Running) and n.carry == local), None)
        if scan is None:
            flushes[local] = _flush_of_sum(names, local, suffix)
        else:
            flushes[local], own = _flush_of_scan(names, scan, suffix)
            at = loop.body.index(scan) + 1
            loop = replace(loop, body=(*loop.body[:at], own, *loop.body[at:]))
    loop = _with_flushes(names, loop, flushes)
    every = flushes.values()
    return (*(n for each in every for n in each.before), loop, *(n for each in every for n in each.after))


def _with_flushes(names: Names, loop: For, flushes: dict[Local, _Flush]) -> For:
    """A loop that flushes blocks when they are full, and so do the loops inside it."""
    own = {local: each for local, each in flushes.items() if any(_writes(n, local) for n in nodes(loop.body))}
    flush = tuple(n for each in own.values() for n in each.flush)
    inner = _loops_inside(loop, [*own])
    if inner:
        body = tuple(_with_flushes(names, n, own) if n in inner and isinstance(n, For) else n for n in loop.body)
        full: Guard = (Less(const(0), loop.symbol), Less(loop.symbol % OUTER, const(1)))
        return replace(loop, body=(If(full, flush, ()), *body))
    period = min(_period(loop, local) for local in own)
    if period == 1:
        return replace(loop, body=(If((Less(const(0), loop.symbol),), flush, ()), *loop.body))
    made = _in_groups(names, loop, period, ())
    return replace(made, body=(If((Less(const(0), made.symbol),), flush, ()), *made.body))


def _flush_of_sum(names: Names, local: Local, suffix: str) -> _Flush:
    """The first flush assigns instead of adding; without a flush, nothing is added at the end."""
    wide = Local(_name(names, local, f"wide{suffix}"), torch.float64, local.lanes)
    emptied = Local(_name(names, local, f"emptied{suffix}"), torch.int64, ())
    happened = symbol(emptied.name, None, None)
    content, dtype = _as(held(local), torch.float64), carried_dtype(local.dtype)
    first, more = Assign(local.lanes, (), wide, content), Reduce(local.lanes, (), wide, "sum", content)
    flush: tuple[Node, ...] = (
        If((Less(happened, const(1)),), (first,), (more,)),
        Assign((), (), emptied, constant(1, torch.int64)),
        Assign(local.lanes, (), local, constant(0.0, dtype)),
    )
    total = _as(call("add", held(wide), content, dtype=torch.float64), dtype)
    after = If((Less(const(0), happened),), (Assign(local.lanes, (), local, total),), ())
    return _Flush((Declare(wide, None), Declare(emptied, 0)), flush, (after,))


def _flush_of_scan(names: Names, scan: Running, suffix: str) -> tuple[_Flush, Assign]:
    """The flushed total is kept in `base`, separate from the carry, and added to every position of the scan."""
    carry, dtype = scan.carry, carried_dtype(scan.carry.dtype)
    wide = Local(_name(names, carry, f"wide{suffix}"), torch.float64, carry.lanes)
    base = Local(_name(names, carry, f"base{suffix}"), dtype, carry.lanes)
    flush: tuple[Node, ...] = (
        Reduce(carry.lanes, (), wide, "sum", _as(held(carry), torch.float64)),
        Assign(carry.lanes, (), base, _as(held(wide), dtype)),
        Assign(carry.lanes, (), carry, constant(0.0, dtype)),
    )
    own = Assign(scan.lanes, scan.guard, scan.local, call("add", held(base), held(scan.local), dtype=scan.local.dtype))
    return _Flush((Declare(wide, 0.0), Declare(base, 0.0)), flush, ()), own


def _name(names: Names, local: Local, ending: str) -> str:
    return names.of((local, ending), f"{local.name}_{ending}")


def _as(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else call("cast", value, dtype=dtype)


# --- groups without branches ---------------------------------------------------------------------------------------------


def _in_parts(names: Names, loop: For, locals_: Sequence[Local], suffix: str, facts: Facts) -> For:
    """A loop over groups, each of which is summed into its own block; the same loop if it is short."""
    own = [local for local in locals_ if all(isinstance(n, Reduce) for n in nodes(loop.body) if _writes(n, local))]
    own = [local for local in own if not _loops_inside(loop, [local]) and list(_direct(loop.body, local))]
    if not own or _short(loop, GROUP) or facts.prove(const(GROUP) - loop.extent):
        return loop
    parts = {local: Local(_name(names, local, f"part{suffix}"), local.dtype, local.lanes) for local in own}
    body = tuple(replace(n, local=parts[n.local]) if isinstance(n, Reduce) and n.local in parts else n for n in loop.body)
    begin = tuple(Declare(part, 0.0) for part in parts.values())
    end = tuple(Reduce(local.lanes, (), local, "sum", held(part)) for local, part in parts.items())
    return _in_groups(names, replace(loop, body=body), GROUP, begin, end)


def _with_lanes_summed(body: Body, loops: tuple[For, For]) -> Body:
    """A body whose groups end with the sum over their lanes, where nothing else needs the lanes. If that holds for all sums, a
    single group gets a branch. `loops` are a loop and the loop over groups that has replaced it."""
    loop, groups = loops
    for end in (n for n in groups.body if isinstance(n, Reduce)):
        body = _with_lanes_of(end, body, groups.symbol)
    made = next(n for n in body if isinstance(n, For) and n.symbol is groups.symbol)
    if not all(_sums_lanes(n) for n in made.body if isinstance(n, Reduce)):
        return body
    within = next(n for n in made.body if isinstance(n, For))
    alone = tuple(replace(loop, body=within.body[1:]) if n is within else n for n in made.body)
    short = If((Less(loop.extent, const(GROUP + 1)),), alone, (made,))
    return tuple(short if n is made else n for n in body)


def _sums_lanes(node: Reduce) -> bool:
    return node.lanes != node.local.lanes


def _with_lanes_of(end: Reduce, body: Body, group: Symbol) -> Body:
    """A body whose groups end with the sum over the lanes of `end.local`; the same body if anything else uses this block, or uses
    the sum before all groups are added to it."""
    at = next(k for k, n in enumerate(body) if isinstance(n, For) and n.symbol is group)
    loop, block = body[at], end.local
    users = [n for n in body if n is not loop and _uses(n, block)]
    if len(users) != 2 or users[0] not in body[:at] or users[1] in body[:at]:
        return body
    begin, last = users
    if not isinstance(begin, Declare) or begin.number or not isinstance(last, Reduce):
        return body
    between = body[at + 1 : body.index(last)]
    own = [n for n in between if isinstance(n, Declare | Assign) and n.local == last.local and _begins(n)]
    others = [n for n in (loop, *between) if n not in own]
    if last.value != held(block) or last.guard or last.operator != "sum" or any(_uses(n, last.local) for n in others):
        return body
    summed = inward(loop, lambda part: kept(part, (replace(last, value=end.value) if n is end else n for n in part)))
    rest = [n for n in body[at + 1 :] if n not in own and n is not last]
    return (*(n for n in body[:at] if n is not begin), *own, summed, *rest)


def _uses(node: Node, local: Local) -> bool:
    """Whether a statement, or one inside it, declares, reads or writes a block."""
    return any(
        (isinstance(n, Declare) and n.local == local) or _writes(n, local) or local.name in blocks_read(n) for n in nodes((node,))
    )


def _carrying_wide(body: Body, operators: Sequence[str]) -> Body:
    """Scans whose carry is float64."""
    wide = {
        n.carry: replace(n.carry, dtype=torch.float64)
        for n in nodes(body)
        if isinstance(n, Running) and n.operator in operators and n.carry.dtype == torch.float32
    }

    def change(node: Node) -> Node:
        if isinstance(node, Declare) and node.local in wide:
            return replace(node, local=wide[node.local])
        if isinstance(node, Running) and node.carry in wide:
            return replace(node, carry=wide[node.carry])
        return inward(node, lambda part: kept(part, map(change, part)))

    return kept(body, map(change, body)) if wide else body
