"""Barriers: lanes that run at the same time wait for each other where one needs what another has stored.

In: a loop program for a target whose lanes are threads. Out: the same; a barrier separates two accesses to memory, of which at
least one stores, unless the second certainly finds the first done:

    [i] t[i] = x[i] * 2                 [i] t[i] = x[i] * 2
    [i] y[i] = t[n - 1 - i]      ->     barrier
                                        [i] y[i] = t[n - 1 - i]

The thread that stores an element need not be the one that reads it, even for the same lanes: blocks of loads and of stores are
spread over threads independently. No barrier is needed

- after a read, for a store to the same element that is computed from what was read: it waits for that value anyway;
- between two stores to the same elements by the same lanes, which the same threads do, and between two atomic additions;
- between iterations of a loop that access different elements: certainly, or because a statement that only stores does so at
  positions of the loop, not at computed indices that may come again;
- between positions of a grid, which are independent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from serrate.ir.expr import Expr
from serrate.ir.loops import Barrier, Bind, For, If, Lanes, Load, LoopProgram, Node, While, Write, nodes, values_of, written_by
from serrate.ir.tile import GRID
from serrate.ir.values import Tensor
from serrate.lower.passes.common import Body, blocks_read, effects, inward, is_apart, kept, names_in, per_kernel


def barriers(program: LoopProgram) -> LoopProgram:
    """Adds barriers between accesses of a worker to the same memory."""
    return per_kernel(program, lambda k: _Worker(k.body).body(k.body) if _may_conflict(k.body) else k.body)


def _may_conflict(body: Body) -> bool:
    """Whether any memory is stored to and read, or stored to twice, or at a computed index. Few programs do that."""
    stores = [n for n in effects(body) if isinstance(n, Write)]
    stored = {n.tensor.memory for n in stores}
    read = {a.place.memory for n in effects(body) for a in _accesses(n) if not a.stores}
    computed = {x.name for n in effects(body) for x in written_by(n)}
    return len(stores) > len(stored) or bool(stored & read) or any(names_in(*n.index) & computed for n in stores)


@dataclass(frozen=True)
class Place:
    """Which element each lane of a statement accesses."""

    memory: Tensor
    index: tuple[Expr, ...]
    lanes: Lanes


@dataclass(frozen=True)
class Access:
    """A read, a store or an atomic addition."""

    place: Place
    stores: bool = False
    adds: bool = False
    is_elsewhere: bool = False
    """Whether the place is that of an earlier iteration, and now means other elements."""


Pending = dict[Access, None]
"""Accesses that some lanes may not have done yet."""


class _Worker:
    """Goes through the statements of a kernel in order."""

    def __init__(self, body: Body) -> None:
        self.stored = {n.tensor.memory for n in nodes(body) if isinstance(n, Write)}
        self.pending: Pending = {}
        self.read_by: dict[str, set[Place]] = {}
        """The reads of stored memory that private blocks are computed from."""

    def body(self, body: Body) -> Body:
        return kept(body, [new for node in body for new in self.node(node)])

    def node(self, node: Node) -> tuple[Node, ...]:
        """A statement, after a barrier if it needs one."""
        if isinstance(node, For) and node.kind is GRID:
            self.pending = {}
            return (inward(node, self.body),)
        if isinstance(node, For | While):
            return self._loop(node)
        if isinstance(node, If):
            before, after = self.pending, Pending()

            def branch(body: Body) -> Body:
                self.pending = dict(before)
                made = self.body(body)
                after.update(self.pending)
                return made

            made = inward(node, branch)
            self.pending = after
            return (made,)
        return self._statement(node)

    def _loop(self, loop: For | While) -> tuple[Node, ...]:
        before = self.pending
        self.pending = dict(before)
        inward(loop, self.body)
        carried = {self._carried(loop, a): None for a in self.pending if not self._is_apart(loop, a.place.memory)}
        self.pending = before | carried
        made = inward(loop, self.body)
        after = self.pending
        self.pending = dict(carried)
        alone = inward(loop, self.body)
        if _count(alone) < _count(made):
            # What comes before the loop is waited for once, not in every iteration.
            return (Barrier(), alone)
        self.pending = before | after
        return (made,)

    def _carried(self, loop: For | While, access: Access) -> Access:
        """What an access of one iteration is to the next."""
        changing = {x.name for n in effects((loop,)) for x in written_by(n)}
        if not access.stores:
            changing |= {n.symbol.name for n in nodes((loop,)) if isinstance(n, For | Bind)}
        return access if names_in(*access.place.index).isdisjoint(changing) else replace(access, is_elsewhere=True)

    def _is_apart(self, loop: For | While, memory: Tensor) -> bool:
        """Whether all iterations of a loop access different elements of some memory."""
        if isinstance(loop, While):
            return False
        statements = effects(loop.body)
        places = {a.place for n in statements for a in _accesses(n) if a.place.memory is memory}
        varying = {x.name for n in statements for x in written_by(n)}
        return len(places) == 1 and all(is_apart(p.index, p.lanes, loop.symbol, varying) for p in places)

    def _statement(self, node: Node) -> tuple[Node, ...]:
        own = [a for a in _accesses(node) if a.place.memory in self.stored]
        read = {a.place for a in own if not a.stores}
        read |= {place for name in blocks_read(node) for place in self.read_by.get(name, ())}
        for local in written_by(node):
            self.read_by.setdefault(local.name, set()).update(read)
        needed = any(_conflict(earlier, later, read) for later in own for earlier in self.pending)
        if needed:
            self.pending = {}
        self.pending |= dict.fromkeys(own)
        return (Barrier(), node) if needed else (node,)


def _conflict(earlier: Access, later: Access, read: Collection[Place]) -> bool:
    """Whether the later access must wait for the earlier one; `read` are the reads that its value is computed from."""
    if earlier.place.memory is not later.place.memory or not (earlier.stores or later.stores):
        return False
    if not later.stores:
        return True
    if earlier.adds and later.adds:
        return False
    same = earlier.place == later.place and not earlier.is_elsewhere
    return not same or not (earlier.stores or later.place in read)


def _count(node: Node) -> int:
    return sum(isinstance(n, Barrier) for n in nodes((node,)))


def _accesses(node: Node) -> list[Access]:
    lanes: Lanes = getattr(node, "lanes", ())
    every = (v for value in values_of(node) for v in value.walk())
    found = [Access(Place(v.tensor.memory, v.index, lanes)) for v in every if isinstance(v, Load)]
    if isinstance(node, Write):
        found.append(Access(Place(node.tensor.memory, node.index, lanes), stores=True, adds=node.add))
    return found
