"""From scheduled tile programs to loop programs: domains become index expressions, lanes become blocks.

In: a scheduled `TileProgram`. Out: a `LoopProgram` before any pass (`pipeline` runs those next). The
loops around a statement determine the index expression of every access, and the guards under which it exists. A scratch tensor
that is written and read by the same position of the kept loops becomes a private block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

from serrate.analysis.guards import condition, needed
from serrate.analysis.indices import Indices, ancestry
from serrate.errors import ScheduleError
from serrate.ir.domains import IterDomain
from serrate.ir.expansion import ReductionTile, existing_only, expand
from serrate.ir.expr import Array, Element, Expr, Less, Search, Symbol, const, maximum, minimum, symbol
from serrate.ir.loops import (
    Assign,
    Declare,
    For,
    Guard,
    Held,
    If,
    Lane,
    Lanes,
    Load,
    Local,
    LoopKernel,
    LoopProgram,
    Node,
    Running,
    Write,
    flat_index,
    held,
    load,
    number,
)
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import lists_long_rows
from serrate.ir.renaming import Swap
from serrate.ir.storage import row_dims
from serrate.ir.tile import (
    GRID,
    LANES,
    SERIAL,
    Accumulate,
    At,
    ByLength,
    Leaf,
    Loop,
    Phase,
    Scan,
    Statement,
    Store,
    TileProgram,
    walk,
    written_at,
)
from serrate.ir.values import (
    Call,
    Computed,
    Constant,
    Extent,
    Index,
    Ordinal,
    Place,
    Places,
    Position,
    Read,
    Role,
    Tensor,
    Value,
    index_of,
    index_read,
    rewrite,
)
from serrate.lower.passes.common import inward


def blocks(program: TileProgram, name: str, header: tuple[str, ...]) -> LoopProgram:
    """The loop program of a scheduled tile program."""
    lowered = [_PhaseLowering(program, phase, k) for k, phase in enumerate(program.phases)]
    kernels = tuple(
        LoopKernel(f"{name}_{k}" if len(lowered) > 1 else name, p.run(), p.phase.is_short) for k, p in enumerate(lowered)
    )
    scratch = tuple(t for t in program.scratch if any(p.stores(t) for p in lowered))
    found = {t for p in program.phases for t in p.writes if t.role is Role.PRIVATE}
    private = tuple(sorted(found, key=lambda t: t.name))
    return LoopProgram(name, kernels, program.inputs, program.outputs, scratch + private, (), (), header)


def _launched(loop: For) -> For:
    """A grid loop, in which other grid loops are launched with it only if nothing is beside them. The others are loops of each
    program: what is fused with them is computed once for all their positions, or only for some rows."""
    if len(loop.body) == 1 and isinstance(inner := loop.body[0], For) and inner.kind is GRID:
        return replace(loop, body=(_launched(inner),))
    return replace(loop, body=tuple(map(_serial, loop.body)))


def _serial(node: Node) -> Node:
    """The same with serial loops instead of grid loops."""
    node = inward(node, lambda body: tuple(map(_serial, body)))
    return replace(node, kind=SERIAL, bound=node.extent) if isinstance(node, For) and node.kind is GRID else node


@dataclass(frozen=True)
class _LoopScope:
    """The loops around a statement, with their symbols, indices, lanes and guard."""

    loops: tuple[Loop, ...]

    @property
    def symbols(self) -> list[Expr]:
        return [loop_symbol(loop) for loop in self.loops]

    @property
    def indices(self) -> Indices:
        return Indices(zip((loop.domain for loop in self.loops), self.symbols, strict=True))

    @property
    def lanes(self) -> Lanes:
        return tuple(_lane(loop) for loop in self.loops if loop.kind is LANES and not _once(loop))

    def guard(self) -> Guard:
        """The conditions under which a position of these loops is an element, without those that always hold."""
        indices = self.indices
        found = (condition(n.domain, indices, n.lower) for n in needed([loop.domain for loop in self.loops]))
        return tuple(g for g in found if not g.proven)


def _once(loop: Loop) -> bool:
    """Whether a loop has exactly one position, so it needs neither a loop nor a lane."""
    return loop.domain.row_length.value == 1


def loop_symbol(loop: Loop) -> Expr:
    """The index of a loop: a symbol with the name of its domain, bounded by its extent; 0 if the loop has only one position."""
    if loop.index is not None:
        return loop.index
    if _once(loop):
        return const(0)
    high = None if loop.domain.is_ragged else loop.domain.extent_expr.bounds[1]
    return symbol(loop.domain.name, 0, None if high is None else max(high - 1, 0))


def _lane(loop: Loop) -> Lane:
    size = loop.domain.extent_expr.value
    if size is None:
        raise ScheduleError(f"lanes over {loop.domain} need a compile-time extent")
    return Lane(cast(Symbol, loop_symbol(loop)), size)


Carrying = Accumulate | Scan
"""Statements that carry a value from one iteration of a loop to the next."""


class _PhaseLowering:
    def __init__(self, program: TileProgram, phase: Phase, number_: int) -> None:
        self.program, self.phase = program, phase
        outside = [p for k, p in enumerate(program.phases) if k != number_]
        self.shared = {t.memory for p in outside for t in p.reads}
        self.finished = False
        """Whether this branch finishes its rows, so no other phase reads its intermediate results."""
        self.private: dict[Tensor, Local] = {}
        """Private blocks for tensors that this phase both writes and reads; `fuse` has checked that one position does both."""
        for leaf, loops in walk(phase.body):
            if isinstance(leaf, Leaf):
                held_here = [t for t in leaf.targets if t in phase.reads and t.role is not Role.PRIVATE]
                self.private.update((t, self._local(t, self._index_lanes(written_at(leaf, t), loops))) for t in held_here)
        self.declared: set[int] = set()
        self.known: set[Local] = set()

    def _local(self, tensor: Tensor, lanes: Lanes) -> Local:
        """A block named after a tensor, with a suffix if the tensor is in memory too."""
        stored = self.stores(tensor) or tensor.role is Role.PRIVATE
        return Local(f"{tensor.name}_" if stored else tensor.name, tensor.dtype, lanes)

    def stores(self, tensor: Tensor) -> bool:
        """Whether a tensor that this phase writes must be in memory: a result, or read by another phase."""
        shared = tensor in self.shared and not self.finished
        return tensor in self.phase.writes and (tensor.role is Role.OUTPUT or shared)

    def _index_lanes(self, index: Index, loops: tuple[Loop, ...]) -> Lanes:
        """The lanes that an index depends on."""
        kept = {loop.domain.uid for loop in self._kept(index, loops)}
        return tuple(_lane(loop) for loop in loops if loop.kind is LANES and loop.domain.uid in kept and not _once(loop))

    def _kept(self, index: Index, loops: tuple[Loop, ...]) -> list[Loop]:
        """The loops that the index determines; the others are reduced."""
        known = Indices([(d, symbol(f"@{d.uid}")) for d in index if d is not None])
        return [loop for loop in loops if known.knows(loop.domain)]

    def run(self) -> tuple[Node, ...]:
        body = tuple(self._body(self.phase.body, ()))
        return tuple(_launched(n) if isinstance(n, For) and n.kind is GRID else n for n in body)

    def _body(self, body: Sequence[Statement], outer: tuple[Loop, ...]) -> list[Node]:
        out: list[Node] = []
        for statement in body:
            if isinstance(statement, ByLength):
                guard = statement.guard(extent_of(statement.row, _LoopScope(outer).indices))
                out.append(If(guard, tuple(self._body(statement.short, outer)), tuple(self._body(statement.other, outer))))
                continue
            if isinstance(statement, At):
                index = _LoopScope(outer).indices.of(statement.domain)
                self.finished = statement.finishes
                out += self._body(statement.body, statement.inside(outer, index))
                self.finished = False
                continue
            begun = [a for a in self._accumulations(statement, outer) if self._begins(a, statement, outer)]
            for leaf, loops in begun:
                out += self._declare(leaf, loops)
            if isinstance(statement, Loop) and statement.kind is not LANES:
                inner = self._body(statement.body, (*outer, statement))
                out += inner if _once(statement) else [self._for(statement, outer, tuple(inner))]
            elif isinstance(statement, Loop):
                out += self._body(statement.body, (*outer, statement))
            else:
                assert isinstance(statement, Leaf), statement
                out += self._leaf(statement, _LoopScope(outer))
            for leaf, loops in begun:
                out += self._publish(leaf, loops)
        return out

    def _for(self, loop: Loop, outer: tuple[Loop, ...], body: tuple[Node, ...]) -> For:
        domain = loop.domain
        extent = domain.extent_expr
        if isinstance(domain, RaggedIterDomain):
            extent = domain.length_of(_LoopScope((*outer, loop)).indices.of(domain.component))
        bound = domain.host_bound if loop.kind is GRID else extent
        return For(cast(Symbol, loop_symbol(loop)), extent, loop.kind, body, bound, loop.kind is GRID and lists_long_rows(domain))

    # --- reductions: declared before the first reduced loop, published after it ---------------------------------------

    def _accumulations(self, statement: Statement, outer: tuple[Loop, ...]) -> list[tuple[Carrying, tuple[Loop, ...]]]:
        found = walk((statement,), outer)
        return [(s, loops) for s, loops in found if isinstance(s, Accumulate | Scan) and id(s) not in self.declared]

    def _begins(self, found: tuple[Carrying, tuple[Loop, ...]], statement: Statement, outer: tuple[Loop, ...]) -> bool:
        leaf, loops = found
        if isinstance(statement, Loop) and statement.kind is LANES:
            # Lanes are not loops: a reduction over lanes alone starts at its own statement.
            return False
        kept = {loop.domain.uid for loop in self._kept(leaf.index, loops)}
        inside = [loop for loop in loops[len(outer) :] if loop.kind is not LANES]
        if any(loop.domain.uid in kept for loop in inside):
            if inside[0].domain.uid not in kept:
                names = ", ".join(loop.domain.name for loop in inside)
                raise ScheduleError(f"phase {self.phase.name}: a loop that `{leaf}` keeps lies inside one it reduces ({names})")
            return False
        self.declared.add(id(leaf))
        return True

    def _states(self, leaf: Carrying, loops: tuple[Loop, ...]) -> tuple[Local, ...]:
        if isinstance(leaf, Scan):
            lanes = self._index_lanes(leaf.index, loops)
            return tuple(Local(f"{t.name}_carry", t.dtype, lanes) for t in leaf.targets)
        return tuple(self.private.get(t) or self._local(t, self._index_lanes(leaf.place(t), loops)) for t in leaf.targets)

    def _declare(self, leaf: Carrying, loops: tuple[Loop, ...]) -> list[Node]:
        states = self._states(leaf, loops)
        out: list[Node] = [Declare(s, leaf.reduction.identity(k, s.dtype)) for k, s in enumerate(states)]
        self.known.update(states)
        for k, state in enumerate(leaf.reduction.states):
            if state.free and isinstance(leaf, Accumulate) and not leaf.merge:
                out += self._first_value(leaf, k, states[k], loops)
        return out

    def _first_value(self, leaf: Accumulate, state: int, local: Local, loops: tuple[Loop, ...]) -> list[Node]:
        """The initial value of a state whose identity is arbitrary: that of the row's first element."""
        scope = _LoopScope(loops)
        kept = {loop.domain.uid for loop in self._kept(leaf.index, loops)}
        reduced = [loop for loop in loops if loop.domain.uid not in kept and not _once(loop)]
        start = {loop_symbol(loop): const(0) for loop in reduced}
        value = self._value(leaf.reduction.lifted(leaf.values)[state], scope)
        blocks_read = [v.local for v in value.walk() if isinstance(v, Held)]
        if any(set(read.lanes) - set(local.lanes) or read not in self.known for read in blocks_read):
            # Outside the loop, a block of the row has no first element; starting with the identity is also correct.
            return []
        # A serial loop that does not run has no first element, and no condition could guard the read.
        runs = tuple(Less(const(0), self._for(loop, loops, ()).extent) for loop in reduced if loop.kind is not LANES)
        if any(_picks_row(g, start.keys()) for g in (*scope.guard(), *runs)):
            # Across rows, the first row may be missing or empty.
            return []
        value = Swap(start).value(value)
        guard = runs + tuple(g.substitute(start) for g in scope.guard())
        return [Assign(local.lanes, tuple(g for g in guard if not g.proven), local, value)]

    def _publish(self, leaf: Carrying, loops: tuple[Loop, ...]) -> list[Node]:
        """Stores the states that other phases read, and rows that are held."""
        out: list[Node] = []
        if isinstance(leaf, Scan):
            return out
        for target, state in zip(leaf.targets, self._states(leaf, loops), strict=True):
            if self.stores(target) or target.role is Role.PRIVATE:
                scope = _LoopScope(tuple(self._kept(leaf.place(target), loops)))
                out.append(Write(state.lanes, scope.guard(), target, self._place(target, leaf.place(target), scope), held(state)))
        return out

    def _leaf(self, leaf: Leaf, scope: _LoopScope) -> list[Node]:
        if isinstance(leaf, Store):
            value = self._value(leaf.value, scope)
            out: list[Node] = []
            if leaf.tensor in self.private:
                local = self.private[leaf.tensor]
                out += [Declare(local, 0), Assign(local.lanes, scope.guard(), local, value)]
                self.known.add(local)
                value = held(local)
            if leaf.tensor.role is Role.SCRATCH and not self.stores(leaf.tensor):
                # Nothing reads it from memory. One of several results may not be read at all, such as the mean of a variance.
                return out
            write = Write(scope.lanes, scope.guard(), leaf.tensor, self._place(leaf.tensor, leaf.index, scope), value)
            return [*out, write]
        if isinstance(leaf, Scan):
            return self._scan(leaf, scope)
        kept_loops = tuple(self._kept(leaf.index, scope.loops))
        states = self._states(leaf, scope.loops)
        kept = self._index_lanes(leaf.index, scope.loops)
        tile = ReductionTile(scope.lanes, scope.guard(), kept, _LoopScope(kept_loops).guard())
        values = tuple(self._value(v, scope) for v in leaf.values)
        if not leaf.merge:
            values, tile = existing_only(leaf.reduction, values, tile)
        made = expand(leaf.reduction, states, values, tile, merge=leaf.merge)
        # A tile without elements leaves the states unchanged.
        return [replace(n, rests=(tile.guard,)) if isinstance(n, Assign) else n for n in made]

    def _scan(self, leaf: Scan, scope: _LoopScope) -> list[Node]:
        """A block of running values, and the block in memory."""
        (target,), (carry,) = leaf.targets, self._states(leaf, scope.loops)
        local = self.private.get(target) or Local(f"{target.name}_run", target.dtype, scope.lanes)
        self.known.add(local)
        along = [lane for lane in scope.lanes if lane not in carry.lanes]
        if len(along) > 1:
            raise ScheduleError(f"phase {self.phase.name}: `{leaf}` runs over one lane, not {', '.join(map(str, along))}")
        axis = along[0] if along else None
        value = self._value(leaf.values[0], scope)
        operator, identity = leaf.reduction.operator, leaf.reduction.identity(0, local.dtype)
        if operator is None:
            raise ScheduleError(f"phase {self.phase.name}: `{leaf}` has no block operator, and a scan needs one")
        out: list[Node] = [
            Declare(local, identity),
            Running(scope.lanes, scope.guard(), local, carry, axis, operator, value),
        ]
        if self.stores(target):
            out.append(Write(scope.lanes, scope.guard(), target, self._place(target, leaf.place, scope), held(local)))
        return out

    def _value(self, value: Value, scope: _LoopScope) -> Value:
        indices = scope.indices

        def change(v: Value) -> Value | None:
            if isinstance(v, Call) and v.function == "cast" and isinstance(v.args[0], Read) and v.args[0].dtype == v.dtype:
                # Values are rounded to the dtype of their memory.
                return None if v.args[0].tensor in self.private else rewrite(v.args[0], change)
            if isinstance(v, Read):
                if v.tensor in self.private:
                    return held(self.private[v.tensor])
                place, checks = self._place(v.tensor, v.index, scope), self._checks(v.tensor, v.index, scope)
                return load(v.tensor.memory, place, checks, v.other)
            if isinstance(v, Position):
                return number(indices.of(v.domain))
            if isinstance(v, Extent):
                return number(extent_of(v.domain, indices))
            if isinstance(v, Computed):
                return number(_index(v.place, indices))
            if isinstance(v, Ordinal):
                return number(flat_index(self._place(v.tensor, v.index, scope), [d.extent_expr for d in v.tensor.storage]))
            return v if isinstance(v, Constant) else None

        return rewrite(value, change)

    def _known(self, tensor: Tensor, index: Places, scope: _LoopScope) -> list[tuple[IterDomain, Expr]]:
        """The index expression of each logical dim. A computed component is clamped, so that its length and start can be read."""
        owners = _owners(tensor) if any(isinstance(at, Place) for at in index) else ()
        known: list[tuple[IterDomain, Expr]] = []
        for domain, at in zip(tensor.logical, index, strict=True):
            e = _index(at, scope.indices)
            if isinstance(at, Place) and domain.uid in owners:
                e = _kept_inside(e, domain)
            known.append((domain, e))
        if any(isinstance(at, Place) for at in index):
            # A component may come from a computed index, such as a sentence that its document does not have.
            there = {domain.uid for domain in tensor.logical}
            before = [d for transform in reversed(ancestry(tensor.logical)) for d in transform.inputs]
            for component in (d.component for d in (*before, *tensor.logical) if isinstance(d, RaggedIterDomain)):
                if component.uid not in there and Indices(known).knows(component):
                    known.append((component, _kept_inside(Indices(known).of(component), component)))
                    there.add(component.uid)
        return known

    def _checks(self, tensor: Tensor, index: Places, scope: _LoopScope) -> Guard:
        """The bounds checks of computed indices, components before the rows whose lengths they select."""
        indices = Indices(self._known(tensor, index, scope))
        found: list[Less] = []
        for domain, at in zip(tensor.logical, index, strict=True):
            if isinstance(at, Place):
                e = _index(at, scope.indices)
                found += [Less(const(-1), e), Less(e, extent_of(domain, indices))]
        return tuple(g for g in found if not g.proven)

    def _place(self, tensor: Tensor, index: Places, scope: _LoopScope) -> tuple[Expr, ...]:
        """The storage index of an access at logical domains."""
        known = self._known(tensor, index, scope)
        if tensor.role is Role.PRIVATE:
            # A private row holds one row at a time, so it has no dims that select it.
            row = {d.uid for d in row_dims(tensor.logical)}
            return tuple(e for d, e in known if d.uid in row)
        storage = Indices(known)
        return tuple(storage.of(d) for d in tensor.storage)


def _owners(tensor: Tensor) -> set[int]:
    """The dims of a tensor that select lengths and starts of rows: components, and dims that together form one."""
    found = {d.component.uid for d in tensor.logical if isinstance(d, RaggedIterDomain)}
    indices = Indices((d, index_of(d)) for d in tensor.logical)
    places = [indices.of(d) for d in tensor.storage] if tensor.role is not Role.PRIVATE else []
    arrays = (e for place in places for e in place.walk() if isinstance(e, Element | Search))
    selecting = {s for e in arrays for s in e.symbols}
    return found | {d.uid for d in tensor.logical if not d.is_ragged and index_of(d) in selecting}


def _kept_inside(e: Expr, component: IterDomain) -> Expr:
    """The index of a component, clamped so that its length can be read."""
    return maximum(minimum(e, component.extent_expr - 1), 0)


def _picks_row(condition: Less, loops: Collection[Expr]) -> bool:
    """Whether one of the loops determines which length a condition reads."""
    inner = (e for side in (condition.left, condition.right) for e in side.walk() if isinstance(e, Element | Search))
    return any(s in loops for e in inner for s in e.symbols)


def _index(at: IterDomain | Place | None, indices: Indices) -> Expr:
    if isinstance(at, Place):
        known: dict[Expr, Expr] = {index_of(d): indices.of(d) for d in at.domains}
        for k, r in enumerate(at.reads):
            assert isinstance(r, Load), r
            array = Array(r.tensor.name, signed=True)
            known[index_read(k)] = array[flat_index(r.index, [d.extent_expr for d in r.tensor.storage])]
        return at.expr.substitute(known)
    return const(0) if at is None else indices.of(at)


def extent_of(domain: IterDomain, indices: Indices) -> Expr:
    """The extent of a domain; if it is ragged, in the row that the indices select."""
    if isinstance(domain, RaggedIterDomain):
        return domain.length_of(indices.of(domain.component))
    return domain.extent_expr
