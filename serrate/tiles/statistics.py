"""Statistics of a row in two passes, and powers that are worked out once.

In: a kernel program. Out: the same, where a loop that carries a maximum and sums rescaled by it is two loops: the maximum of the
row first, then the sums, relative to it. That is the same numbers with less work where a row is near for a second pass. What a
later loop over the same row would compute again, it then finds in a private row.

    top, total = max(top, m), total * e^(top - max(top, m)) + sum e^(x - max(top, m))
        ->  top max= x over the row;  kept = e^(x - top), total sum= kept over the row;  ... kept ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Element, Expr, Symbol
from serrate.ir.kernel import Axis, Carry, KernelProgram, Statement, Tiles, inner, statements, with_inner
from serrate.ir.loops import Assign, Declare, Dot, Held, Lane, Load, Local, Reduce, Write, expressions_of, held, load
from serrate.ir.values import Call, Role, Tensor, Value, call, carried_dtype, rewrite
from serrate.tiles.values import renamed_value


def below_their_maximum(program: KernelProgram) -> KernelProgram:
    """The program with powers relative to a running maximum as what they are: of numbers that are not above it."""
    return replace(program, body=tuple(map(_bounded, program.body)))


def _bounded(node: Statement) -> Statement:
    if not inner(node):
        return node
    node = with_inner(node, tuple(tuple(map(_bounded, part)) for part in inner(node)))
    for carry in node.carried if isinstance(node, Tiles) else ():
        assert isinstance(node, Tiles)
        found = _running_maximum(node, carry) if carry.kind == "max" else None
        if found is not None:
            new, values = found
            node = replace(node, body=tuple(_with_powers(n, new, {held(carry.local), *values}) for n in node.body))
    return node


def _running_maximum(loop: Tiles, carry: Carry) -> tuple[Value, list[Value]] | None:
    """What a carried maximum becomes in an iteration, and the values that it is not below."""
    new = next((n.value for n in loop.body if isinstance(n, Assign) and n.local.name == carry.local.name), None)
    if not isinstance(new, Call) or new.function != "maximum":
        return None
    names = {v.local.name for v in new.args if isinstance(v, Held)} - {carry.local.name}
    values = [n.value for n in loop.body if isinstance(n, Reduce) and n.local.name in names]
    return (new, values) if len(values) == 1 else None


def _with_powers(node: Statement, new: Value, below: set[Value]) -> Statement:
    def change(v: Value) -> Value | None:
        if isinstance(v, Call) and v.function == "exp" and isinstance(v.args[0], Call) and v.args[0].function == "sub":
            x, m = v.args[0].args
            if m is new and x in below and v.dtype == x.dtype == m.dtype:
                return call("exp_below", rewrite(x, change), m, dtype=v.dtype)
        return None

    if isinstance(node, Dot):
        return replace(node, left=rewrite(node.left, change), right=rewrite(node.right, change))
    return replace(node, value=rewrite(node.value, change)) if isinstance(node, Assign | Reduce | Write) else node


def in_two_passes(program: KernelProgram) -> KernelProgram:
    """The program with statistics in two passes wherever they are alone in their loop."""
    worker = _Passes(program)
    body = worker.body(program.body)
    return replace(program, body=body, axes=tuple(worker.axes), scratch=(*program.scratch, *worker.rows))


def fits(program: KernelProgram, lanes: Mapping[str, int]) -> bool:
    """Whether private rows serve under these tiles: rows side by side would need one each."""
    by_position = {a.position: a for a in program.axes}
    for node in statements(program.body):
        if isinstance(node, Write) and node.tensor.role is Role.PRIVATE:
            found = {s for e in node.index for s in e.symbols}
            if any(lanes[by_position[lane.symbol].name] > 1 for lane in node.lanes if lane.symbol not in found):
                return False
    return True


class _Passes:
    def __init__(self, program: KernelProgram) -> None:
        self.axes = list(program.axes)
        self.rows: list[Tensor] = []

    def body(self, body: Sequence[Statement]) -> tuple[Statement, ...]:
        out: list[Statement] = []
        for node in body:
            made = self._split(node, out) if isinstance(node, Tiles) else None
            if made is not None:
                out += made
            elif inner(node):
                out.append(with_inner(node, tuple(self.body(part) for part in inner(node))))
            else:
                out.append(node)
        return self._kept(out)

    def _split(self, loop: Tiles, before: Sequence[Statement]) -> list[Statement] | None:
        if any(a.alias_of in loop.axes for a in self.axes):
            return None
        tops = [c for c in loop.carried if c.kind == "max"]
        sums = [c for c in loop.carried if c.kind == "rescaled sum"]
        if len(tops) != 1 or not sums or len(loop.carried) != 1 + len(sums):
            return None
        (top,) = tops
        started = {n.local.name: n.number for n in before if isinstance(n, Declare)}
        if any(c.top is None or c.top.name != top.local.name or started.get(c.local.name) != 0 for c in sums):
            return None
        if not all(isinstance(n, Declare | Reduce | Assign) for n in loop.body):
            return None
        running = _running_maximum(loop, top)
        if running is None:
            return None
        new, values = running
        found = [n for n in loop.body if isinstance(n, Reduce) and n.value in values and n.operator == "max"]
        summed = [[n for n in loop.body if isinstance(n, Reduce) and n.local.name == c.local.name] for c in sums]
        if len(found) != 1 or any(len(each) != 1 for each in summed):
            return None
        first = replace(loop, body=(_into(found[0], top.local),), carried=(Carry(top.local, "max"),))
        again = [replace(a, name=f"{a.name}_again") for a in loop.axes]
        self.axes += again
        swap = dict[Expr, Expr]((a.position, b.position) for a, b in zip(loop.axes, again, strict=True))
        swap |= {a.lane: b.lane for a, b in zip(loop.axes, again, strict=True)}
        lanes = {a.position: b.position for a, b in zip(loop.axes, again, strict=True)}

        def moved(node: Reduce) -> Reduce:
            value = rewrite(node.value, lambda v: held(top.local) if v is new else None)
            guard = tuple(g.substitute(swap) for g in node.guard)
            own = tuple(Lane(lanes.get(lane.symbol, lane.symbol), lane.size) for lane in node.lanes)
            return replace(node, lanes=own, guard=guard, value=renamed_value(value, swap, lanes))

        second = tuple(moved(each[0]) for each in summed)
        made = {n.local.name for n in loop.body if isinstance(n, Declare)}
        if any(_needs(n) & made for n in (*first.body, *second)):
            # Something else of the iteration is needed, which is not there any more.
            return None
        carried = tuple(Carry(c.local, "sum") for c in sums)
        return [first, Tiles(tuple(again), False, second, carried)]

    def _kept(self, body: list[Statement]) -> tuple[Statement, ...]:
        """Powers that a loop sums and a later one over the same row needs again, in a private row."""
        out = list(body)
        for k, loop in enumerate(out):
            if not (isinstance(loop, Tiles) and len(loop.body) == 1 and isinstance(loop.body[0], Reduce)):
                continue
            node = loop.body[0]
            if not (isinstance(node.value, Call) and node.value.function == "exp_below") or len(loop.axes) != 1:
                continue
            if any(a.alias_of is not None and a.position is lane.symbol for a in self.axes for lane in node.lanes):
                continue
            for at, later in enumerate(out[k + 1 :], k + 1):
                if _changes(out[k + 1 : at], node.value):
                    break
                if not (isinstance(later, Tiles) and len(later.axes) == 1 and _same_range(loop.axes[0], later.axes[0])):
                    continue
                swap = {loop.axes[0].position: later.axes[0].position}
                power = renamed_value(node.value, dict[Expr, Expr](swap.items()), swap)
                wanted = call("exp", call("sub", *power.args, dtype=power.dtype), dtype=power.dtype)
                users = [n for n in later.body if isinstance(n, Write) and any(v is wanted for v in n.value.walk())]
                if not users or any(not set(_conditions(node, swap)) <= set(u.guard) for u in users):
                    continue
                row, place = self._row(node, loop.axes[0])
                index = tuple(e.substitute(dict[Expr, Expr](swap.items())) for e in place)
                kept = load(row, index)

                out[at] = replace(later, body=tuple(_with_kept(n, wanted, kept) for n in later.body))
                store = Write(node.lanes, node.guard, row, place, node.value)
                out[k] = replace(loop, body=(store, node))
                break
        return tuple(out)

    def _row(self, node: Reduce, along: Axis) -> tuple[Tensor, tuple[Expr, ...]]:
        """A private row for a block, and where in it an element of the block is."""
        by_position = {a.position: a for a in self.axes}
        axes = [by_position[lane.symbol] for lane in node.lanes]
        inside = [a for a in axes if a is along or a.looped is False or a.size is not None]
        inside.sort(key=lambda a: a is not along)
        name = f"{node.local.name}_row"
        dims = tuple(IterDomain(a.end - a.begin, name=f"{name}_{k}") for k, a in enumerate(inside))
        row = Tensor(name, carried_dtype(node.value.dtype), dims, dims, Role.PRIVATE)
        self.rows.append(row)
        return row, tuple(a.position - a.begin for a in inside)


def _with_kept(node: Statement, wanted: Value, kept: Value) -> Statement:
    """A store that takes what was kept for what it would work out."""
    if not isinstance(node, Write):
        return node
    return replace(node, value=rewrite(node.value, lambda v: kept if v is wanted else None))


def _needs(node: Statement) -> set[str]:
    """The private blocks that a statement reads, also as indices."""
    if not isinstance(node, Reduce | Assign | Write):
        return set()
    found = {v.local.name for v in node.value.walk() if isinstance(v, Held)}
    exprs = expressions_of(node)
    return found | {e.array.name for x in exprs for e in x.walk() if isinstance(e, Element) and e.array.local}


def _into(node: Reduce, local: Local) -> Reduce:
    return replace(node, local=local)


def _conditions(node: Reduce, swap: dict[Symbol, Symbol]) -> list[object]:
    names = dict[Expr, Expr](swap.items())
    return [g.substitute(names) for g in node.guard]


def _same_range(one: Axis, other: Axis) -> bool:
    return one.begin is other.begin and one.end is other.end and one.block is None and other.block is None


def _changes(nodes: Sequence[Statement], value: Value) -> bool:
    """Whether statements change something that a value is made of."""
    read = {v.local.name for v in value.walk() if isinstance(v, Held)}
    tensors = {v.tensor for v in value.walk() if isinstance(v, Load)}
    for node in statements(tuple(nodes)):
        if isinstance(node, Assign | Reduce) and node.local.name in read:
            return True
        if isinstance(node, Write) and node.tensor in tensors:
            return True
    return False
