"""The primitive `one_pass` on loops of block statements: a row is read once for two reductions, one of which needs the other.

In: a loop that reduces a row, and a later loop that reduces the row relative to a value computed from the first result. Out: the
first loop, which also carries the states of a reduction (Welford) that determine the second result. This saves memory traffic if
a row does not stay in cache; if it does, two simple passes are less work.

    total sum= x over the row;  c = f(total);  squares sum= (x - c)^2 over the row
        ->  total sum= x, (n, mean, s) welford= x over the row;  c = f(total);  squares += s + n*(mean - c)^2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from serrate.errors import ScheduleError
from serrate.ir.expansion import ReductionTile, expand
from serrate.ir.expr import Element, Expr, Symbol
from serrate.ir.loops import Assign, Block, Declare, Guard, Held, Load, Local, Number, Reduce, Write, held, written_by
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import REDUCTIONS, OnePass, Reduction
from serrate.ir.renaming import Swap
from serrate.ir.tile import Axis, Carry, Loop, Statement, TileProgram, inner, statements, with_inner
from serrate.ir.values import Call, Value, call
from serrate.schedule.block_loops import find, loop_named, swap
from serrate.schedule.sharing import names_in

WIDE = torch.float64
"""The dtype of states: a row has few of them, and they are combined as often as the row has tiles."""


def one_pass(program: TileProgram, phase: str, first: str, second: str) -> TileProgram:
    """for r: t sum= x;  for r: u sum= (x - f(t))^2   ->   for r: (t sum= x;  (n, m, s) welford= x);  u += s + n*(m - f(t))^2"""
    found = find(program, phase)
    one, other = (_Pass.of(program, loop_named(found, name)) for name in (first, second))
    x, center, kind = _matched(one, other)
    names = names_in(program, found.body)
    states = tuple(Local(_fresh(f"{one.local.name}_{s.name}", names), WIDE, one.local.lanes) for s in kind.states)
    before, merged = _merged(one, kind, states, x)
    assert kind.one_pass is not None
    result = kind.one_pass.result(tuple(map(held, states)), center)

    def changed(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        at = next((k for k, node in enumerate(body) if node is one.loop), None)
        then = next((k for k, node in enumerate(body) if node is other.loop), None)
        if at is None and then is None:
            return tuple(with_inner(node, tuple(changed(part) for part in inner(node))) for node in body)
        if at is None or then is None or then < at:
            raise ScheduleError(f"phase {phase}: {second} does not follow {first} in the same loop")
        if _changes(body[at + 1 : then], x):
            raise ScheduleError(f"phase {phase}: the values that {first} reads may change before {second}")
        return (*body[:at], *before, merged, *body[at + 1 : then], _added(other.local, result), *body[then + 1 :])

    return swap(program, phase, replace(found, body=changed(found.body)))


@dataclass(frozen=True)
class _Pass:
    """Loops around one statement that reduces into what the outermost of them carries."""

    loop: Loop
    node: Reduce
    reduction: Reduction
    axes: tuple[Axis, ...]
    """The axes of the statement's lanes."""

    @property
    def local(self) -> Local:
        return self.node.local

    @property
    def reduced(self) -> tuple[Symbol, ...]:
        kept = {lane.symbol for lane in self.local.lanes}
        return tuple(lane.symbol for lane in self.node.lanes if lane.symbol not in kept)

    @classmethod
    def of(cls, program: TileProgram, loop: Loop) -> _Pass:
        body: Sequence[Statement] = (loop,)
        while len(body) == 1 and isinstance(body[0], Loop):
            body = body[0].body
        carry = loop.carried[0] if len(loop.carried) == 1 else None
        node = body[0] if len(body) == 1 else None
        if carry is None or carry.reduction is None or not isinstance(node, Reduce) or carry.locals != (node.local,):
            raise ScheduleError(f"the loop over {loop.domain.name} does more than reduce a row")
        axes = {a.position: a for a in program.axes}
        return cls(loop, node, carry.reduction, tuple(axes[lane.symbol] for lane in node.lanes))


def _matched(one: _Pass, other: _Pass) -> tuple[Value, Value, Reduction]:
    """The elements, the value that the second pass is relative to, and the reduction that replaces both passes."""
    what = f"the loops over {one.loop.domain.name} and {other.loop.domain.name}"
    alike = len(one.axes) == len(other.axes) and all(map(_same_axis, one.axes, other.axes)) and _same_rows(one.loop, other.loop)
    if not alike or len(one.reduced) != len(other.reduced):
        raise ScheduleError(f"{what} do not run over the same elements")
    lanes = {b.position: a.position for a, b in zip(one.axes, other.axes, strict=True)}
    node = Swap(dict[Expr, Expr](lanes.items()), lanes).node(other.node)
    if set(node.guard) != set(one.node.guard) or node.local.lanes != one.local.lanes:
        raise ScheduleError(f"{what} do not run over the same elements")
    if not one.local.dtype == other.local.dtype == node.value.dtype or one.local.dtype not in (torch.float32, torch.float64):
        raise ScheduleError(f"{what} do not reduce in the same dtype")
    for kind in REDUCTIONS.values():
        if kind.one_pass is None or (kind.one_pass.first, kind.one_pass.second) != (one.reduction, other.reduction):
            continue
        center = _center(kind.one_pass, _unwidened(one.node.value), node.value)
        if center is not None and not _varies(center, {*one.reduced, *other.reduced}) and not _holds(center, other.local):
            return one.node.value, center, kind
    raise ScheduleError(f"{what} do not match a reduction with a one-pass form")


def _center(passes: OnePass, x: Value, value: Value) -> Value | None:
    """The value that the terms of the second pass are relative to."""
    return next((c for c in value.walk() for term in passes.terms if c is not x and term(x, c) is value), None)


def _unwidened(value: Value) -> Value:
    """A value before it was widened to the dtype of its sum."""
    widened = isinstance(value, Call) and value.function == "cast" and value.dtype.is_floating_point
    if widened and torch.promote_types(value.args[0].dtype, value.dtype) == value.dtype:
        return value.args[0]
    return value


def _same_axis(one: Axis, other: Axis) -> bool:
    alias = one.alias_of or other.alias_of
    return one.begin is other.begin and one.end is other.end and one.looped == other.looped and alias is None


def _same_rows(one: Loop, other: Loop) -> bool:
    rows = (one.domain, other.domain)
    if all(isinstance(d, RaggedIterDomain) for d in rows):
        first, second = (d for d in rows if isinstance(d, RaggedIterDomain))
        return first.component is second.component and first.length is second.length
    return not any(isinstance(d, RaggedIterDomain) for d in rows)


def _varies(value: Value, symbols: set[Symbol]) -> bool:
    """Whether a value varies along any of these lanes."""
    for v in value.walk():
        if isinstance(v, Held) and any(lane.symbol in symbols for lane in v.local.lanes):
            return True
        if isinstance(v, Load) and any(e.symbols & symbols for e in (*v.index, *_sides(v.guard))):
            return True
        if isinstance(v, Number) and v.expr.symbols & symbols:
            return True
    return False


def _sides(guard: Guard) -> list[Expr]:
    return [e for g in guard for e in (g.left, g.right)]


def _holds(value: Value, local: Local) -> bool:
    return any(isinstance(v, Held) and v.local.name == local.name for v in value.walk())


def _merged(one: _Pass, kind: Reduction, states: tuple[Local, ...], x: Value) -> tuple[list[Statement], Loop]:
    """The declarations of the states, and the loop that carries them."""
    guard = one.node.guard
    tile = ReductionTile(one.node.lanes, guard, one.local.lanes, tuple(g for g in guard if not g.symbols & set(one.reduced)))
    assert kind.one_pass is not None
    made = expand(replace(kind, in_block=kind.one_pass.in_block), states, (x,), tile, merge=False)
    # A tile without elements leaves the states unchanged.
    rested = (replace(n, rests=(guard,)) if isinstance(n, Assign) and n.local in states else n for n in made)
    body = tuple(n for n in rested if isinstance(n, Declare | Block))
    begins: list[Statement] = [Declare(local, kind.identity(k, WIDE)) for k, local in enumerate(states)]

    def carrying(loop: Loop) -> Loop:
        (node,) = loop.body
        carried = (*loop.carried, *(Carry(states, kind) for _ in loop.carried))
        return replace(loop, body=(carrying(node),) if isinstance(node, Loop) else (node, *body), carried=carried)

    return begins, carrying(one.loop)


def _added(local: Local, value: Value) -> Assign:
    """Adds the result of a row to the initial value of its private block."""
    begun = call("cast", held(local), dtype=WIDE) if local.dtype != WIDE else held(local)
    total = call("add", begun, value, dtype=WIDE)
    return Assign(local.lanes, (), local, total if local.dtype == WIDE else call("cast", total, dtype=local.dtype))


def _changes(nodes: Sequence[Statement], x: Value) -> bool:
    """Whether statements change something that the elements are computed from."""
    loads = [v for v in x.walk() if isinstance(v, Load)]
    places = [e for v in loads for place in (*v.index, *_sides(v.guard)) for e in place.walk()]
    private = {v.local.name for v in x.walk() if isinstance(v, Held)}
    private |= {e.array.name for e in places if isinstance(e, Element) and e.array.local}
    memory = {v.tensor.memory for v in loads}
    for node in statements(tuple(nodes)):
        if isinstance(node, Write) and node.tensor.memory in memory:
            return True
        if isinstance(node, Block) and private & {local.name for local in written_by(node)}:
            return True
    return False


def _fresh(name: str, names: set[str]) -> str:
    """A fresh name, which is added to `names`."""
    while name in names:
        name += "_"
    names.add(name)
    return name
