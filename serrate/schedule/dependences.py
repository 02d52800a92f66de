"""Memory dependences of block statements: may a loop run in any order, and ahead of the statements before it?

In: a phase and one of its loops. Out: nothing, or a `ScheduleError` that names the tensor. Private blocks are not looked at here:
what a loop carries is listed on it. Two accesses can meet only within one iteration if they agree in a dim whose index moves with
the loop; any other pair of accesses to a tensor, one of them a store, may meet across iterations. Stores at the numbers of an
index tensor are taken to be at different places, as torch takes them to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serrate.errors import ScheduleError
from serrate.ir.expr import Element, Expr, Sum
from serrate.ir.loops import Assign, Block, Load, Write, values_of
from serrate.ir.tile import GRID, Axis, Loop, Phase, Statement, TileProgram, inner, statements
from serrate.ir.values import Call, Role, Tensor, Value


@dataclass(frozen=True)
class Access:
    """A load or a store of a tensor that outlives its program."""

    tensor: Tensor
    index: tuple[Expr, ...]
    stores: bool
    adds: bool = False
    """Atomically; such stores may come in any order."""


def accesses(nodes: Iterable[Statement]) -> Iterator[Access]:
    """What statements load and store; statements inside them are statements of their own."""
    for node in nodes:
        if not isinstance(node, Block):
            continue
        for value in values_of(node):
            for v in value.walk():
                if isinstance(v, Load) and v.tensor.role is not Role.PRIVATE:
                    yield Access(v.tensor.memory, v.index, stores=False)
        if isinstance(node, Write) and node.tensor.role is not Role.PRIVATE:
            yield Access(node.tensor.memory, node.index, stores=True, adds=node.add)


def require_independent(program: TileProgram, loop: Loop) -> None:
    """Raises unless the iterations of a loop may run in any order and at the same time, as far as memory goes."""
    axis = program.axis_of(loop.domain)
    assert axis is not None
    moves = _Moving(program, loop, axis)
    found = list(accesses(statements(loop.body)))
    for store in (a for a in found if a.stores and not a.adds):
        for other in (a for a in found if a.tensor is store.tensor):
            dims = [mine for mine, its in zip(store.index, other.index, strict=True) if mine is its]
            if not any(moves.along(e) or (other.stores and moves.by_numbers(e)) for e in dims):
                how, name = "store" if other.stores else "read", store.tensor.name
                raise ScheduleError(f"iterations of {axis} run in order: one may {how} what another stores to {name}")
    for add in (a for a in found if a.adds):
        if any(a.tensor is add.tensor and not a.adds for a in found):
            raise ScheduleError(f"iterations of {axis} run in order: one may read what another adds to {add.tensor.name}")


class _Moving:
    """How an index changes from one iteration of a loop to the next, whatever the loops inside it do."""

    def __init__(self, program: TileProgram, loop: Loop, axis: Axis) -> None:
        self.axis = axis
        inside = [a for n in statements(loop.body) if isinstance(n, Loop) and (a := program.axis_of(n.domain)) is not None]
        self.symbols = {s for a in (axis, *inside) for s in (a.position, a.lane, a.number, a.first, a.last)}
        assigned = [n for n in statements(loop.body) if isinstance(n, Assign)]
        self.numbers = {n.local.name for n in assigned if isinstance(_uncast(n.value), Load)}
        """Private blocks of numbers that were read from an index tensor."""

    def along(self, index: Expr) -> bool:
        """Whether it is another one at every position of the axis."""
        terms = dict(index.terms) if isinstance(index, Sum) else {index: 1}
        return self.axis.position in terms and not any(t.symbols & self.symbols for t in terms if t is not self.axis.position)

    def by_numbers(self, index: Expr) -> bool:
        """Whether it is a number of an index tensor for every position of the axis."""
        if not isinstance(index, Element) or (index.array.local and index.array.name not in self.numbers):
            return False
        return self.along(index.index) or (index.array.local and self.axis.lane in index.index.symbols)


def _uncast(value: Value) -> Value:
    return value.args[0] if isinstance(value, Call) and value.function == "cast" else value


def require_movable_ahead(phase: Phase, loop: Loop) -> None:
    """Raises unless a loop may run before the stores that precede it, while others still work out what it needs."""
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
    """The statements that run before a loop; inside another serial loop, those behind it too."""
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
    """All leaves of a body but those inside a loop."""
    out: list[Statement] = []
    for node in body:
        if node is loop:
            continue
        out += [n for part in inner(node) for n in _others(part, loop)] if inner(node) else [node]
    return tuple(out)
