"""Barriers: lanes that run at the same time wait for each other where one needs what another has stored.

In: a loop program for a target whose lanes are threads. Out: the same; a barrier separates two accesses to memory, of which at
least one stores, unless the first is certainly complete when the second begins:

    [i] t[i] = x[i] * 2                 [i] t[i] = x[i] * 2
    [i] y[i] = t[n - 1 - i]      ->     barrier
                                        [i] y[i] = t[n - 1 - i]

The thread that stores an element need not be the one that reads it, even for the same lanes: blocks of loads and of stores are
spread over threads independently. No barrier is needed

- between a read and a store to the same element of a value computed from it: the store waits for that value anyway. If anything
  else uses what was read, the store must wait: several threads may read an element that one of them stores;
- between stores of one statement in one iteration, between stores to the same elements by the same lanes, because the same
  threads execute both, and between two atomic additions. Like torch, this assumes that stores through an index tensor go to
  distinct elements;
- between accesses to different columns, as in `y[i, :4]` and `y[i, 4:]`;
- between iterations of a loop that certainly access different elements, and between positions of a grid, which are independent.
"""

from __future__ import annotations

from typing import NamedTuple

from serrate.ir.expr import Element, Expr, Search, Sum, Symbol
from serrate.ir.loops import (
    Assign,
    Barrier,
    Bind,
    For,
    If,
    Lanes,
    Load,
    LoopProgram,
    Node,
    While,
    Write,
    blocks_read,
    expressions_of,
    nodes,
    written_by,
)
from serrate.ir.solve import terms_of
from serrate.ir.tile import GRID
from serrate.ir.values import Tensor
from serrate.lower.passes.common import Body, effects, inward, is_apart, kept, names_in, per_kernel
from serrate.schedule.dependences import Access, accesses, uncast


def barriers(program: LoopProgram) -> LoopProgram:
    """Adds barriers between accesses of a worker to the same memory."""
    return per_kernel(program, lambda k: _BarrierInserter(k.body).body(k.body) if _may_conflict(k.body) else k.body)


def _may_conflict(body: Body) -> bool:
    """Whether any memory is stored to and read, or stored to by several statements, or several times by one of them. Few programs
    do that."""
    stores = [n.tensor.memory for n in effects(body) if isinstance(n, Write)]
    if len(stores) > len(set(stores)) or any(not a.stores and a.tensor in stores for a in accesses(effects(body))):
        return True
    loops = (n for n in nodes(body) if isinstance(n, For | While) and not (isinstance(n, For) and n.kind is GRID))
    return any(_overwrites(loop, access) for loop in loops for access in accesses(effects((loop,))))


def _overwrites(loop: For | While, access: Access) -> bool:
    """Whether an iteration of a loop may store elements that other lanes have stored in an earlier one."""
    if not access.stores or access.adds or not _moves(loop, access) or _is_looked_up(loop, access):
        return False
    return isinstance(loop, While) or not is_apart(access.index, access.lanes, loop)


def _is_looked_up(loop: For | While, access: Access) -> bool:
    """Whether an access is at indices from memory, which are assumed to be distinct."""
    loaded = {n.local.name for n in nodes((loop,)) if isinstance(n, Assign) and isinstance(uncast(n.value), Load)}
    elements = (e for at in access.index for e in at.walk() if isinstance(e, Element | Search))
    return any(not e.array.local or e.array.name in loaded for e in elements)


Place = tuple[Tensor, tuple[Expr, ...], Lanes]
"""The element of a tensor that each lane accesses."""
Reading = tuple[int, Place]
"""A read: the id of its statement, and the elements."""


class Earlier(NamedTuple):
    """An access that may be incomplete in some lanes."""

    access: Access
    in_place: bool
    """Whether it is a read whose value is used only to compute what is then stored there."""


Pending = dict[Earlier, bool]
"""Accesses, each with whether it may belong to an earlier iteration, and so to other elements."""


def _joined(*parts: Pending) -> Pending:
    found: Pending = {}
    for each in parts:
        for earlier, moved in each.items():
            found[earlier] = moved or found.get(earlier, False)
    return found


class _BarrierInserter:
    """Visits the statements of a kernel in order, and keeps track of the accesses that may be incomplete."""

    def __init__(self, body: Body) -> None:
        self.pending: Pending = {}
        self.in_place = _read_in_place(body)
        self._loops: dict[tuple[int, frozenset[tuple[Earlier, bool]]], tuple[Node, Pending]] = {}
        """By the id of the loop, and what is incomplete before it: inner loops are visited in every repetition of outer ones."""

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
                nonlocal after
                self.pending = dict(before)
                made = self.body(body)
                after = _joined(after, self.pending)
                return made

            made = inward(node, branch)
            self.pending = after
            return (made,)
        return self._statement(node)

    def _loop(self, loop: For | While) -> tuple[Node, ...]:
        before = self.pending
        made, after = self._repeated(loop, before)
        if before and _count(made):
            alone, left = self._repeated(loop, {})
            if _count(alone) < _count(made):
                # What comes before the loop is waited for once, not in every iteration.
                self.pending = left
                return (Barrier(), alone)
        # There may be no iteration.
        self.pending = _joined(before, after)
        return (made,)

    def _repeated(self, loop: For | While, before: Pending) -> tuple[Node, Pending]:
        """A loop that runs while these accesses may be incomplete, and the accesses that may be incomplete after an iteration.

        What one iteration leaves is incomplete in the next, where it may move a barrier, so that more is left: repeats until
        nothing is added."""
        key = (id(loop), frozenset(before.items()))
        found = self._loops.get(key)
        carried: Pending = {}
        while found is None:
            self.pending = _joined(before, carried)
            made = inward(loop, self.body)
            left = {e: _moves_on(loop, e.access) for e in self.pending if not _are_apart(loop, e.access.tensor)}
            grown = _joined(carried, left)
            if grown == carried:
                found = self._loops[key] = (made, self.pending)
            carried = grown
        return found

    def _statement(self, node: Node) -> tuple[Node, ...]:
        own = [Earlier(a, not a.stores and (id(node), _place(a)) in self.in_place) for a in accesses((node,))]
        waiting = ((earlier, moved, later.access) for later in own for earlier, moved in self.pending.items())
        needed = any(_conflict(*each) for each in waiting)
        if needed:
            self.pending = {}
        self.pending = _joined(self.pending, dict.fromkeys(own, False))
        return (Barrier(), node) if needed else (node,)


def _place(access: Access) -> Place:
    return access.tensor, access.index, access.lanes


def _moves(loop: For | While, access: Access) -> bool:
    """Whether an access may be to different elements in different iterations of a loop."""
    changing = {x.name for n in effects((loop,)) for x in written_by(n)}
    changing |= {n.symbol.name for n in nodes((loop,)) if isinstance(n, For | Bind)}
    return not names_in(*access.index).isdisjoint(changing)


def _moves_on(loop: For | While, access: Access) -> bool:
    """Whether an access of an earlier iteration may be to other elements; for a store, whether it may overwrite those of other
    lanes."""
    return _overwrites(loop, access) if access.stores else _moves(loop, access)


def _are_apart(loop: For | While, memory: Tensor) -> bool:
    """Whether all iterations of a loop access different elements of some memory."""
    if isinstance(loop, While):
        return False
    found = [a for a in accesses(effects(loop.body)) if a.tensor is memory]
    shared = [same[0] for same in zip(*(a.index for a in found), strict=True) if len(set(map(id, same))) == 1]
    lanes = tuple(sorted({lane for a in found for lane in a.lanes}, key=lambda lane: lane.size))
    return is_apart(shared, lanes, loop)


def _read_in_place(body: Body) -> set[Reading]:
    """The reads whose values are used only to compute what is then stored to the same elements."""
    every = list(nodes(body))
    sources: dict[str, set[Reading]] = {}
    users: dict[Reading, list[Node]] = {}
    count = -1
    # Repeats until nothing changes: a value may pass through several carried blocks before it is used.
    while count != sum(map(len, sources.values())):
        count, users = sum(map(len, sources.values())), {}
        for node in every:
            names = blocks_read(node) | names_in(*expressions_of(node))
            own = {(id(node), _place(a)) for a in accesses((node,)) if not a.stores}
            read = own.union(*(sources.get(name, ()) for name in names))
            for reading in read:
                users.setdefault(reading, []).append(node)
            for local in written_by(node):
                sources.setdefault(local.name, set()).update(read)

    def is_stored(node: Node, place: Place) -> bool:
        return isinstance(node, Write) and (node.tensor.memory, node.index, node.lanes) == place

    return {each for each, found in users.items() if all(isinstance(n, Assign) or is_stored(n, each[1]) for n in found)}


def _conflict(earlier: Earlier, moved: bool, later: Access) -> bool:
    """Whether the later access must wait for the earlier one."""
    access, in_place = earlier
    if access.tensor is not later.tensor or not (access.stores or later.stores) or _never_meet(access, later):
        return False
    if not later.stores:
        return True
    same = _place(access) == _place(later)
    if access.stores:
        return (not same or moved) and not (access.adds and later.adds)
    return not same or moved or not in_place


def _never_meet(one: Access, other: Access) -> bool:
    """Whether two accesses are to different elements in any iterations: along some dim, all indices of one are below all indices
    of the other."""
    for mine, its in zip(one.index, other.index, strict=True):
        a, b = _span(mine, one.lanes), _span(its, other.lanes)
        if a is not None and b is not None and (a[1] < b[0] or b[1] < a[0]):
            return True
    return False


def _span(index: Expr, lanes: Lanes) -> tuple[int, int] | None:
    """The least and the largest value of an index over these lanes; None if it depends on anything else."""
    last = {lane.symbol: lane.size - 1 for lane in lanes}
    start = index.constant if isinstance(index, Sum) else index.value or 0
    ends = [factor * last[term] for term, factor in terms_of(index) if isinstance(term, Symbol) and term in last]
    if len(ends) < len(terms_of(index)):
        return None
    return start + sum(min(e, 0) for e in ends), start + sum(max(e, 0) for e in ends)


def _count(node: Node) -> int:
    return sum(isinstance(n, Barrier) for n in nodes((node,)))
