"""Dependences of block statements: may a loop run in any order, and ahead of the statements before it?

In: a phase and one of its loops. Out: nothing, or a `ScheduleError` that names the tensor. A loop lists the private blocks that
it carries; `is_read_inside` says whether an iteration needs their values from earlier ones. For tensors in memory: if two
accesses have the same index in a dim, and that index is different in every iteration, they conflict within one iteration at
most. Any other pair of accesses to a tensor, one of them a store, may conflict across iterations. Like torch, this assumes that
stores through an index tensor go to distinct elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serrate.errors import ScheduleError
from serrate.ir.expr import Element, Expr, Sum
from serrate.ir.loops import Assign, Block, If, Lanes, Load, Node, While, Write, blocks_read, values_of, written_by
from serrate.ir.tile import GRID, Axis, Carry, Loop, Phase, Statement, TileProgram, inner, statements
from serrate.ir.values import Call, Role, Tensor, Value


@dataclass(frozen=True)
class Access:
    """A load or a store of a tensor in memory: which element each lane of a statement accesses."""

    tensor: Tensor
    index: tuple[Expr, ...]
    lanes: Lanes
    stores: bool
    adds: bool = False
    """An atomic add; these may come in any order."""


def accesses(nodes: Iterable[Statement | Node]) -> Iterator[Access]:
    """The loads and stores of these statements, without those of nested statements."""
    for node in nodes:
        if not isinstance(node, Block):
            continue
        for value in values_of(node):
            for v in value.walk():
                if isinstance(v, Load) and v.tensor.role is not Role.PRIVATE:
                    yield Access(v.tensor.memory, v.index, node.lanes, stores=False)
        if isinstance(node, Write) and node.tensor.role is not Role.PRIVATE:
            yield Access(node.tensor.memory, node.index, node.lanes, stores=True, adds=node.add)


def require_independent(program: TileProgram, loop: Loop) -> None:
    """Raises if memory accesses keep the iterations of a loop from running in any order and concurrently."""
    axis = program.axis_of(loop.domain)
    assert axis is not None
    moves = _Moving(program, loop, axis)
    found = list(accesses(statements(loop.body)))
    for store in (a for a in found if a.stores and not a.adds):
        for other in (a for a in found if a.tensor is store.tensor):
            dims = [mine for mine, its in zip(store.index, other.index, strict=True) if mine is its]
            if not any(moves.along(e) or (other.stores and moves.by_numbers(e)) for e in dims):
                how, name = "store" if other.stores else "read", store.tensor.name
                raise ScheduleError(f"iterations of {axis} must run in order: one may {how} what another stores to {name}")
    for add in (a for a in found if a.adds):
        if any(a.tensor is add.tensor and not a.adds for a in found):
            raise ScheduleError(f"iterations of {axis} must run in order: one may read what another adds to {add.tensor.name}")


class _Moving:
    """How indices vary over the iterations of a loop, whatever the loops inside it do."""

    def __init__(self, program: TileProgram, loop: Loop, axis: Axis) -> None:
        self.axis = axis
        inside = [a for n in statements(loop.body) if isinstance(n, Loop) and (a := program.axis_of(n.domain)) is not None]
        self.symbols = {s for a in (axis, *inside) for s in (a.position, a.lane, a.number, a.first, a.last)}
        assigned = [n for n in statements(loop.body) if isinstance(n, Assign)]
        self.numbers = {n.local.name for n in assigned if isinstance(uncast(n.value), Load)}
        """Private blocks that were loaded from an index tensor."""

    def along(self, index: Expr) -> bool:
        """Whether an index is different at every position of the axis."""
        terms = dict(index.terms) if isinstance(index, Sum) else {index: 1}
        return self.axis.position in terms and not any(t.symbols & self.symbols for t in terms if t is not self.axis.position)

    def by_numbers(self, index: Expr) -> bool:
        """Whether an index is read from an index tensor, at a different place for every position of the axis."""
        if not isinstance(index, Element) or (index.array.local and index.array.name not in self.numbers):
            return False
        return self.along(index.index) or (index.array.local and self.axis.lane in index.index.symbols)


def uncast(value: Value) -> Value:
    return value.args[0] if isinstance(value, Call) and value.function == "cast" else value


def is_read_inside(carry: Carry, loop: Loop) -> bool:
    """Whether anything but its own update depends on a carried value inside its loop: what is stored, what decides a branch,
    or another carried value."""
    others = {local.name for each in loop.carried if each is not carry for local in each.locals}
    reached, before = {local.name for local in carry.locals}, set[str]()
    while reached != before:
        before = set(reached)
        for node in statements(loop.body):
            if isinstance(node, Block | If | While) and blocks_read(node) & reached:
                written = {local.name for local in written_by(node)} if isinstance(node, Block) else set()
                if not written or written & others:
                    return True
                reached |= written
    return False


def require_movable_ahead(phase: Phase, loop: Loop) -> None:
    """Raises unless a loop may run ahead of the stores before it, with the loads before it repeated."""
    before = list(accesses(statements(_preceding(phase.body, loop))))
    own = list(accesses(statements(loop.body)))
    needed = {a.tensor for a in (*own, *(a for a in before if not a.stores))}
    for access in before:
        if access.stores and access.tensor in needed:
            raise ScheduleError(f"{access.tensor.name} is stored before the loop over {loop.domain.name}, which needs it")
    stored = {a.tensor for a in own if a.stores}
    for access in before:
        if access.tensor in stored:
            raise ScheduleError(f"{access.tensor.name} is read before the loop over {loop.domain.name} stores to it")


def _preceding(body: tuple[Statement, ...], loop: Loop) -> tuple[Statement, ...]:
    """The statements that run before a loop. Inside another serial loop, this includes those after it."""
    out: list[Statement] = []
    for node in body:
        if node is loop:
            break
        if any(n is loop for n in statements((node,))):
            if isinstance(node, Loop) and node.kind is not GRID:
                return (*out, *_others(node.body, loop))
            part = next(p for p in inner(node) if any(n is loop for n in statements(p)))
            return (*out, *_preceding(part, loop))
        out.append(node)
    return tuple(out)


def _others(body: tuple[Statement, ...], loop: Loop) -> tuple[Statement, ...]:
    """All leaves of a body except those inside `loop`."""
    out: list[Statement] = []
    for node in body:
        if node is loop:
            continue
        out += [n for part in inner(node) for n in _others(part, loop)] if inner(node) else [node]
    return tuple(out)
