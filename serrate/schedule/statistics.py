"""The primitives `two_pass` and `keep` on loops of block statements: softmax statistics, and exponentials computed once.

In: a loop that carries a maximum and sums rescaled by it. Out: two loops: first the maximum of the row, then the sums relative to
it. The results are the same, with less work if the row stays in cache for a second pass. With `keep`, a later loop over the same
row reads the exponentials from a private row instead of recomputing them.

    top, total = max(top, m), total * e^(top - max(top, m)) + sum e^(x - max(top, m))
        ->  top max= x over the row;  kept = e^(x - top), total sum= kept over the row;  ... kept ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Element, Expr, Less, Symbol, minimum
from serrate.ir.loops import (
    Assign,
    Block,
    Declare,
    Dot,
    Held,
    Load,
    Local,
    Reduce,
    Write,
    expressions_of,
    held,
    load,
)
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import within_row
from serrate.ir.renaming import Swap
from serrate.ir.tile import Axis, Carry, Loop, Phase, Statement, TileProgram, inner, statements, with_inner
from serrate.ir.values import Call, Role, Tensor, Value, call, carried_dtype, rewrite


def below_their_maximum(program: TileProgram) -> TileProgram:
    """The program with exponentials relative to a maximum marked as such (`exp_below`): their arguments are at most 0. The
    maximum is the running one of a loop, or its last value in a later loop over the same row."""
    return program.with_phases(tuple(replace(p, body=_bounded(program, p.body)) for p in program.phases))


def _bounded(program: TileProgram, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    out = [with_inner(n, tuple(_bounded(program, part) for part in inner(n))) if inner(n) else n for n in body]
    for at, loop in enumerate(out):
        for carry in loop.carried if isinstance(loop, Loop) else ():
            assert isinstance(loop, Loop)
            top = _maximum(carry)
            found = None if top is None else _running_maximum(loop, top)
            if top is None or found is None:
                continue
            new, own = found
            guard = set(own.guard)
            powers = (_with_powers(n, new, {held(top), *([own.value] if guard <= _guard(n) else [])}) for n in loop.body)
            out[at] = loop = replace(loop, body=tuple(powers))
            _bound_later(program, out, at, own, top)
    return tuple(out)


def _bound_later(program: TileProgram, body: list[Statement], at: int, own: Reduce, top: Local) -> None:
    """Marks exponentials of the elements that a loop took the maximum of, in later loops over the same row."""
    loop = body[at]
    assert isinstance(loop, Loop)
    axis = program.axis_of(loop.domain)
    for k, later in enumerate(body[at + 1 :], at + 1):
        other = program.axis_of(later.domain) if isinstance(later, Loop) else None
        if _changes(body[at + 1 : k], own.value) or any(_writes(n, top) for n in statements((later,))):
            return
        if not isinstance(later, Loop) or axis is None or other is None or not _same_range(axis, other):
            continue
        swap = {axis.position: other.position}
        element, guard = Swap(dict[Expr, Expr](swap.items()), swap).value(own.value), set(_conditions(own, swap))
        users = (
            n if not isinstance(n, Write) or not guard <= _guard(n) else _with_powers(n, held(top), {element}) for n in later.body
        )
        body[k] = replace(later, body=tuple(users))


def _writes(node: Statement, local: Local) -> bool:
    return isinstance(node, Assign | Reduce | Dot) and node.local.name == local.name


def _maximum(carry: Carry) -> Local | None:
    """The maximum among carried values: alone, or as the first state of a reduction in two passes."""
    kind = carry.reduction
    if kind is not None and kind.two_pass is not None:
        kind = kind.two_pass.first
    return carry.locals[0] if kind is not None and kind.operator == "max" else None


def _running_maximum(loop: Loop, top: Local) -> tuple[Value, Reduce] | None:
    """The new value of a carried maximum in an iteration, and the statement that finds the maximum of the elements there."""
    new = next((n.value for n in loop.body if isinstance(n, Assign) and n.local.name == top.name), None)
    if not isinstance(new, Call) or new.function != "maximum":
        return None
    names = {v.local.name for v in new.args if isinstance(v, Held)} - {top.name}
    found = [n for n in loop.body if isinstance(n, Reduce) and n.local.name in names]
    return (new, found[0]) if len(found) == 1 and found[0].operator == "max" else None


def _guard(node: Statement) -> set[Less]:
    """The guard of a statement: where it fails, arguments of exponentials may exceed the maximum."""
    return set(node.guard) if isinstance(node, Block) else set()


def _with_powers(node: Statement, new: Value, below: set[Value]) -> Statement:
    def change(v: Value) -> Value | None:
        if isinstance(v, Call) and v.function == "exp" and isinstance(v.args[0], Call) and v.args[0].function == "sub":
            x, m = v.args[0].args
            if m is new and x in below and v.dtype == carried_dtype(x.dtype) == m.dtype:
                return call("exp_below", rewrite(x, change), m, dtype=v.dtype)
        return None

    if isinstance(node, Dot):
        return replace(node, left=rewrite(node.left, change), right=rewrite(node.right, change))
    return replace(node, value=rewrite(node.value, change)) if isinstance(node, Assign | Reduce | Write) else node


def two_pass(program: TileProgram, phase: Phase, name: str) -> TileProgram | None:
    """m, t carried around the loop over `name`   ->   m max= x;  t sum= e^(x - m).  None if the loop does not match."""
    made: list[Axis] = []

    def changed(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        out: list[Statement] = []
        for node in body:
            if isinstance(node, Loop) and node.domain.name == name:
                axis = program.axis_of(node.domain)
                found = None if axis is None else _two_loops(program, node, axis, out)
                if found is not None:
                    made.append(found[0])
                    out += found[1]
                    continue
            out.append(with_inner(node, tuple(changed(part) for part in inner(node))))
        return tuple(out)

    new = replace(phase, body=changed(phase.body))
    if not made:
        return None
    phases = tuple(new if p is phase else p for p in program.phases)
    return replace(program, phases=phases, axes=(*program.axes, *made))


def _two_loops(
    program: TileProgram, loop: Loop, axis: Axis, before: Sequence[Statement]
) -> tuple[Axis, tuple[Statement, ...]] | None:
    """The axis of a second pass, and both loops."""
    if any(a.alias_of is axis for a in program.axes):
        return None
    passes = loop.carried[0].reduction.two_pass if len(loop.carried) == 1 and loop.carried[0].reduction else None
    if passes is None:
        return None
    top, *sums = loop.carried[0].locals
    started = {n.local.name: n.number for n in before if isinstance(n, Declare)}
    if any(started.get(each.name) != 0 for each in sums):
        return None
    if not all(isinstance(n, Declare | Reduce | Assign) for n in loop.body):
        return None
    running = _running_maximum(loop, top)
    if running is None:
        return None
    new, own = running
    summed = [[n for n in loop.body if isinstance(n, Reduce) and n.local.name == each.name] for each in sums]
    if any(len(each) != 1 for each in summed):
        return None
    again = replace(axis, name=f"{axis.name}_again")
    swap: dict[Expr, Expr] = {axis.position: again.position, axis.lane: again.lane}
    lanes = {axis.position: again.position}

    def moved(node: Reduce) -> Reduce:
        value = rewrite(node.value, lambda v: held(top) if v is new else None)
        return Swap(swap, lanes).node(replace(node, value=value))

    first = replace(loop, body=(replace(own, local=top),), carried=(Carry((top,), passes.first),))
    second = tuple(moved(each[0]) for each in summed)
    declared = {n.local.name for n in loop.body if isinstance(n, Declare)}
    if any(_needs(n) & declared for n in (*first.body, *second)):
        # Another value of the iteration is needed, which no longer exists.
        return None
    domain = again.domain
    if isinstance(loop.domain, RaggedIterDomain):
        domain = within_row(loop.domain.component, domain, loop.domain.length, loop.domain.bound)
    return again, (first, Loop(domain, loop.kind, second, tuple(Carry((each,), passes.second) for each in sums)))


def keep(program: TileProgram, phase: Phase, name: str, most: int = 0) -> TileProgram | None:
    """t sum= e^(x - m) over `name`; ... e^(x - m)   ->   e = e^(x - m); t sum= e; ... e   (e is a private row), or None."""
    done: list[bool] = []

    def changed(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        at = next((k for k, n in enumerate(body) if isinstance(n, Loop) and n.domain.name == name), None)
        found = None if at is None else _kept(program, body, at, most)
        done.append(found is not None)
        return found or tuple(with_inner(node, tuple(changed(part) for part in inner(node))) for node in body)

    new = replace(phase, body=changed(phase.body))
    return program.with_phases(tuple(new if p is phase else p for p in program.phases)) if any(done) else None


def _kept(program: TileProgram, body: tuple[Statement, ...], at: int, most: int) -> tuple[Statement, ...] | None:
    """Keeps the exponentials that a loop sums, and a later loop over the same row needs again, in a private row. With `most`, no
    row has more positions than that."""
    out, loop = list(body), body[at]
    assert isinstance(loop, Loop)
    axis = program.axis_of(loop.domain)
    if axis is None or not (len(loop.body) == 1 and isinstance(loop.body[0], Reduce)):
        return None
    node = loop.body[0]
    if not (isinstance(node.value, Call) and node.value.function == "exp_below"):
        return None
    if any(a.alias_of is not None and a.position is lane.symbol for a in program.axes for lane in node.lanes):
        return None
    for place_of, later in enumerate(body[at + 1 :], at + 1):
        if _changes(body[at + 1 : place_of], node.value):
            break
        other = program.axis_of(later.domain) if isinstance(later, Loop) else None
        if not isinstance(later, Loop) or other is None or not _same_range(axis, other):
            continue
        swap = {axis.position: other.position}
        power = Swap(dict[Expr, Expr](swap.items()), swap).value(node.value)
        users = [n for n in later.body if isinstance(n, Write) and any(v is power for v in n.value.walk())]
        if not users or any(not set(_conditions(node, swap)) <= set(u.guard) for u in users):
            continue
        row, place = _row(program, node, axis, most)
        kept = load(row, tuple(e.substitute(dict[Expr, Expr](swap.items())) for e in place))
        out[place_of] = replace(later, body=tuple(_with_kept(n, power, kept) for n in later.body))
        out[at] = replace(loop, body=(Write(node.lanes, node.guard, row, place, node.value), node))
        return tuple(out)
    return None


def _row(program: TileProgram, node: Reduce, along: Axis, most: int) -> tuple[Tensor, tuple[Expr, ...]]:
    """A private row for a block, and the index of the block's elements in it."""
    by_position = {a.position: a for a in program.axes}
    axes = [by_position[lane.symbol] for lane in node.lanes]
    inside = [a for a in axes if a is along or a.looped is False or a.size is not None]
    inside.sort(key=lambda a: a is not along)
    name = f"{node.local.name}_row"
    sizes = [minimum(a.end - a.begin, most) if a is along and most else a.end - a.begin for a in inside]
    dims = tuple(IterDomain(size, name=f"{name}_{k}") for k, size in enumerate(sizes))
    row = Tensor(name, carried_dtype(node.value.dtype), dims, dims, Role.PRIVATE)
    return row, tuple(a.position - a.begin for a in inside)


def side_by_side(program: TileProgram, phase: Phase) -> bool:
    """Whether statements keep private rows while lanes run across rows, so that each lane would need its own."""
    lanes = {a.position for d in phase.lanes if (a := program.axis_of(d)) is not None}
    lanes |= {a.position for a in program.axes if not a.looped}
    for node in statements(phase.body):
        if isinstance(node, Write) and node.tensor.role is Role.PRIVATE:
            found = {s for e in node.index for s in e.symbols}
            if any(lane.symbol in lanes and lane.symbol not in found for lane in node.lanes):
                return True
    return False


def _with_kept(node: Statement, wanted: Value, kept: Value) -> Statement:
    """A store that reads the kept value instead of recomputing it."""
    if not isinstance(node, Write):
        return node
    return replace(node, value=rewrite(node.value, lambda v: kept if v is wanted else None))


def _needs(node: Statement) -> set[str]:
    """The private blocks that a statement reads, including those it uses as indices."""
    if not isinstance(node, Reduce | Assign | Write):
        return set()
    found = {v.local.name for v in node.value.walk() if isinstance(v, Held)}
    exprs = expressions_of(node)
    return found | {e.array.name for x in exprs for e in x.walk() if isinstance(e, Element) and e.array.local}


def _conditions(node: Reduce, swap: dict[Symbol, Symbol]) -> list[object]:
    names = dict[Expr, Expr](swap.items())
    return [g.substitute(names) for g in node.guard]


def _same_range(one: Axis, other: Axis) -> bool:
    return one.begin is other.begin and one.end is other.end and one.block is None and other.block is None


def _changes(nodes: Sequence[Statement], value: Value) -> bool:
    """Whether statements change something that a value is computed from."""
    read = {v.local.name for v in value.walk() if isinstance(v, Held)}
    tensors = {v.tensor for v in value.walk() if isinstance(v, Load)}
    for node in statements(tuple(nodes)):
        if isinstance(node, Assign | Reduce) and node.local.name in read:
            return True
        if isinstance(node, Write) and node.tensor in tensors:
            return True
    return False
