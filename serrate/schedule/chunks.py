"""`persistent_dynamic` for kernels: one list of the pieces of work that there are, instead of rows of different lengths.

In: a `KernelProgram` and a plan with the size of a piece. Out: the same program as phases, each a program over such a list.

    programs over components and positions of their rows    a list of (component, tile), and the body as it was
    a loop over a row inside                                a list of (component, piece); the loop runs over one piece

A loop that carries something is cut into phases. A piece begins with nothing, and what it has at its end is kept; whatever
comes behind the loop first combines what the pieces of its row have kept, in order, so that the bits do not depend on who
worked on what. Only recognised reductions can be combined: of any other carried value a row cannot be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from serrate.errors import StrategyError
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, Expr, Less, Symbol, ceildiv, const, minimum, search
from serrate.ir.kernel import Axis, Carry, KernelProgram, Statement, Tiles, inner, statements, with_inner
from serrate.ir.loops import Assign, Declare, Dot, Lane, Reduce, Running, Write, held, load
from serrate.ir.recipes import RunningSum
from serrate.ir.reductions import reduction
from serrate.ir.values import Role, Tensor, Value, call, constant
from serrate.schedule.target import Target
from serrate.schedule.tiles import TilePlan, overridden, plan

COMBINE = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "mul", "any": "logical_or", "all": "logical_and"}


@dataclass(frozen=True)
class Rows:
    """The rows that a program's work is found in: which axis counts them, which runs along them, and their length."""

    component: Axis
    along: tuple[Axis, ...]
    length: Expr
    """As a function of COORDINATE."""
    count: Expr


def listed(program: KernelProgram, chosen: TilePlan, target: Target) -> tuple[tuple[KernelProgram, ...], TilePlan]:
    """The program over lists of pieces, and the plan with what was done; the program as it is where there is nothing to list."""
    if len(program.body) != 1 or not isinstance(program.body[0], Tiles):
        raise StrategyError("persistent_dynamic: the kernel has no loop of programs")
    outer, whole = program.body[0], replace(chosen, chunk=0)
    rows = _rows(program, outer)
    if rows is None:
        return (program,), whole.because("no store goes by the length of a row: all programs are alike, and rows stay whole")
    if chosen.by_name[rows.component.name] > 1:
        raise StrategyError(
            f"persistent_dynamic takes one row at a time, and {rows.component} has {chosen.by_name[rows.component.name]}: "
            "leave its block_size open, or make it 1"
        )
    here = [a for a in rows.along if a in outer.axes]
    if here:
        reason = f"programs are the tiles of {here[0].name} that there are"
        return (_tile_list(program, outer, rows, here[0], chosen),), whole.because(reason)
    chosen = replace(chosen, chunk=chosen.chunk or chunk_of(program, chosen.by_name, target.chunk))
    cut = _Cut(program, outer, rows, chosen)
    if not cut.loops:
        return (program,), whole.because("the loop over rows is inside another one, and rows stay whole")
    return cut.phases(), chosen.because(f"rows are cut into pieces of {chosen.chunk} positions")


def _rows(program: KernelProgram, outer: Tiles) -> Rows | None:
    """The rows that all loops and stores of a program go by, if there are such."""
    counts = dict(program.arrays)
    axes = {a.position: a for a in program.axes if a.looped and a.alias_of is None}
    found: dict[tuple[Axis, Expr], list[Axis]] = {}
    for node in statements(outer.body):
        for guard in getattr(node, "guard", ()):
            if isinstance(guard.left, Symbol) and guard.left in axes and guard.right.arrays:
                owners = [axes[s] for s in guard.right.symbols if s in axes]
                if len(owners) == 1 and owners[0] in outer.axes and guard.right.symbols == {owners[0].position}:
                    found.setdefault((owners[0], guard.right), []).append(axes[guard.left])
    for (component, length), along in found.items():
        arrays = [counts.get(a) for a in length.arrays]
        if len(arrays) == 1 and arrays[0] is not None:
            needed = Less(along[0].position, length)
            if along[0] in outer.axes and not all(needed in n.guard for n in statements(outer.body) if isinstance(n, Write)):
                continue
            row = length.substitute({component.position: COORDINATE})
            return Rows(component, tuple(dict.fromkeys(along)), row, arrays[0])
    return None


def _pieces(rows: Rows, size: int) -> Array:
    """Where the pieces of every row begin in the list of all."""
    term = ceildiv(rows.length, size)
    of = ", ".join(sorted(a.name for a in rows.length.arrays))
    return Array(f"pieces({of}, {size})", recipe=RunningSum(term, COORDINATE, rows.count))


def _list_axes(rows: Rows, pieces: Array) -> tuple[Axis, Axis, Expr]:
    """The axis of the list, the component of a piece, and which piece of its row it is."""
    p = Axis("piece", const(0), pieces[rows.count], 1, "the list of pieces")
    owner = search(pieces, rows.count, p.position)
    component = replace(rows.component, at=owner - rows.component.begin, block=1)
    return p, component, p.position - pieces[component.position]


def _tile_list(program: KernelProgram, outer: Tiles, rows: Rows, along: Axis, chosen: TilePlan) -> KernelProgram:
    pieces = _pieces(rows, chosen.by_name[along.name])
    p, component, number = _list_axes(rows, pieces)
    tile = replace(along, at=number)
    rest = tuple(a for a in outer.axes if a not in (rows.component, along))
    axes = (p, *_swapped(program.axes, {rows.component: component, along: tile}))
    arrays = (*program.arrays, (pieces, rows.count))
    return replace(program, axes=axes, arrays=arrays, body=(replace(outer, axes=(p, *rest)),))


def _swapped(axes: Sequence[Axis], new: dict[Axis, Axis]) -> list[Axis]:
    return [new.get(a, a) for a in axes]


class _Cut:
    """A program whose loops over rows are cut."""

    def __init__(self, program: KernelProgram, outer: Tiles, rows: Rows, chosen: TilePlan) -> None:
        self.program, self.outer, self.rows, self.chunk = program, outer, rows, chosen.chunk
        self.pieces = _pieces(rows, chosen.chunk)
        self.scratch: dict[str, Tensor] = {}
        self.loops = [n for n in outer.body if isinstance(n, Tiles) and any(a in rows.along for a in n.axes)]
        for loop in self.loops:
            self._check(loop)

    def _check(self, loop: Tiles) -> None:
        for carry in loop.carried:
            if carry.kind is None:
                raise StrategyError(
                    f"persistent_dynamic cuts rows, and {carry.local.name}, carried around {loop.axes[0]}, is no reduction "
                    "that pieces can be combined of"
                )
        if any(a.alias_of in loop.axes for a in self.program.axes):
            raise StrategyError(f"persistent_dynamic cuts rows, and {loop.axes[0]} stands in two dims of one value")
        own = {n.local.name for n in statements(loop.body) if isinstance(n, Declare)}
        length = self.rows.length.substitute({COORDINATE: self.rows.component.position})
        within = [Less(a.position, length) for a in loop.axes if a in self.rows.along]
        for node in statements(loop.body):
            if isinstance(node, Write) and not any(g in node.guard for g in within):
                raise StrategyError(f"persistent_dynamic cuts rows, and the loop over {loop.axes[0]} stores past them")
            if isinstance(node, Reduce | Dot | Running | Assign) and node.local.name not in own:
                fed = node.rests if isinstance(node, Assign) else (node.guard,)
                if not fed or not all(any(g in each for g in within) for each in fed):
                    raise StrategyError(f"persistent_dynamic cuts rows, and {node.local.name} goes on past them")

    def phases(self) -> tuple[KernelProgram, ...]:
        """One for each loop, and one for what comes behind them all."""
        out = []
        for k, _ in enumerate(self.loops):
            out.append(self._piece_phase(k))
        if any(isinstance(n, Write) for node in self.outer.body if node not in self.loops for n in statements((node,))):
            out.append(self._last_phase())
        arrays = (*self.program.arrays, (self.pieces, self.rows.count))
        return tuple(replace(each, arrays=arrays, scratch=tuple(self.scratch.values())) for each in out)

    def _piece_phase(self, at: int) -> KernelProgram:
        p, component, number = _list_axes(self.rows, self.pieces)
        axes = _swapped(self.program.axes, {self.rows.component: component})
        body: list[Statement] = []
        for node in self.outer.body:
            if node is self.loops[at]:
                assert isinstance(node, Tiles)
                loop, changed = self._one_piece(node, number)
                axes = _swapped(axes, changed)
                body += [Assign(c.local.lanes, (), c.local, _identity(c)) for c in node.carried]
                body.append(loop)
                body += [self._keep(c, p) for c in node.carried]
                break
            body += self._before(node, axes)
        rest = tuple(a for a in self.outer.axes if a is not self.rows.component)
        program = replace(self.program, axes=(p, *axes), body=(Tiles((p, *rest), True, tuple(body)),))
        return program

    def _last_phase(self) -> KernelProgram:
        axes = list(self.program.axes)
        body: list[Statement] = []
        for node in self.outer.body:
            body += self._before(node, axes, stores=True)
        return replace(self.program, axes=tuple(axes), body=(replace(self.outer, body=tuple(body)),))

    def _before(self, node: Statement, axes: list[Axis], *, stores: bool = False) -> list[Statement]:
        """A statement for whoever needs what it makes: a loop that was cut is what its pieces have kept."""
        if node in self.loops:
            assert isinstance(node, Tiles)
            return [self._combined(node, axes)] if node.carried else []
        return [node] if stores else _without_stores(node)

    def _one_piece(self, loop: Tiles, number: Expr) -> tuple[Tiles, dict[Axis, Axis]]:
        changed: dict[Axis, Axis] = {}
        for axis in loop.axes:
            if axis in self.rows.along:
                begin = axis.begin + number * self.chunk
                whole = axis.position.bounds
                changed[axis] = replace(axis, begin=begin, end=minimum(axis.end, begin + self.chunk), span=whole)
        ends = tuple(Less(new.position, new.end) for new in changed.values())
        body = tuple(_within(node, ends) for node in loop.body)
        return replace(loop, axes=tuple(changed.get(a, a) for a in loop.axes), body=body), changed

    def _kept(self, carry: Carry) -> tuple[Tensor, list[Axis]]:
        """The memory for what pieces keep of a private block; its dims are the piece, then the block's axes."""
        by_position = {a.position: a for a in self.program.axes}
        axes = [by_position[lane.symbol] for lane in carry.local.lanes if by_position[lane.symbol] is not self.rows.component]
        if carry.local.name not in self.scratch:
            name = f"{carry.local.name}_kept"
            dims = [IterDomain(self.pieces[self.rows.count], name=f"{name}_0")]
            dims += [IterDomain(a.end - a.begin, name=f"{name}_{k + 1}") for k, a in enumerate(axes)]
            dtype = carry.local.dtype if carry.local.dtype not in (torch.bfloat16, torch.float16) else torch.float32
            self.scratch[carry.local.name] = Tensor(name, dtype, tuple(dims), tuple(dims), Role.SCRATCH)
        return self.scratch[carry.local.name], axes

    def _keep(self, carry: Carry, p: Axis) -> Statement:
        tensor, axes = self._kept(carry)
        index = (p.position, *(a.position - a.begin for a in axes))
        guard = tuple(Less(a.position, a.end) for a in axes if a.looped)
        value = held(carry.local)
        value = value if value.dtype == tensor.dtype else call("cast", value, dtype=tensor.dtype)
        return Write(carry.local.lanes, guard, tensor, index, value)

    def _combined(self, loop: Tiles, axes: list[Axis]) -> Statement:
        """A loop over the pieces of a row, that combines what they have kept."""
        component = self.rows.component.position
        q = Axis(f"piece_of_{loop.axes[0].name}", self.pieces[component], self.pieces[component + 1], 1, "the pieces of a row")
        axes.append(q)
        body: list[Statement] = []

        def part(carry: Carry) -> Value:
            tensor, own = self._kept(carry)
            guard = tuple(Less(a.position, a.end) for a in own if a.looped)
            found = load(tensor, (q.position, *(a.position - a.begin for a in own)), guard)
            return found if found.dtype == carry.local.dtype else call("cast", found, dtype=carry.local.dtype)

        tops = {c.local.name: c for c in loop.carried if c.kind == "max"}
        for carry in (c for c in loop.carried if c.kind == "rescaled sum"):
            assert carry.top is not None
            top, other = held(carry.top), part(tops[carry.top.name])
            dtype = carry.local.dtype
            new = call("maximum", top, other, dtype=top.dtype)
            mine = call("mul", held(carry.local), _cast(call("exp_diff", top, new, dtype=top.dtype), dtype), dtype=dtype)
            theirs = call("mul", part(carry), _cast(call("exp_diff", other, new, dtype=top.dtype), dtype), dtype=dtype)
            body.append(Assign(carry.local.lanes, (), carry.local, call("add", mine, theirs, dtype=dtype)))
        for carry in (c for c in loop.carried if c.kind != "rescaled sum"):
            value = call(COMBINE[str(carry.kind)], held(carry.local), part(carry), dtype=carry.local.dtype)
            body.append(Assign(carry.local.lanes, (), carry.local, value))
        return Tiles((q,), False, tuple(body))


def _cast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else call("cast", value, dtype=dtype)


def _identity(carry: Carry) -> Value:
    kind = "sum" if carry.kind == "rescaled sum" else str(carry.kind)
    return constant(reduction(kind).identity(0, carry.local.dtype), carry.local.dtype)


def _within(node: Statement, ends: tuple[Less, ...]) -> Statement:
    """A statement that goes no further than a piece does."""
    if inner(node):
        return with_inner(node, tuple(tuple(_within(n, ends) for n in part) for part in inner(node)))
    if isinstance(node, Reduce | Dot | Running | Write):
        mine = {lane.symbol for lane in node.lanes}
        return replace(node, guard=(*node.guard, *(e for e in ends if e.left in mine)))
    return node


def _without_stores(node: Statement) -> list[Statement]:
    """A statement without what it stores."""
    if isinstance(node, Write):
        return []
    if inner(node):
        return [with_inner(node, tuple(tuple(kept for n in part for kept in _without_stores(n)) for part in inner(node)))]
    return [node]


def chunk_of(program: KernelProgram, lanes: dict[str, int], elements: int) -> int:
    """How many positions of a row are one piece: whole tiles, with about as many elements as it takes to be worth a worker."""
    size = 1
    for node in statements(program.body):
        if isinstance(node, Tiles) and not node.parallel:
            work = [n for n in statements(node.body) if isinstance(n, Reduce | Dot | Running | Write | Assign)]
            width = max((_elements(n.lanes, node, lanes) for n in work), default=1)
            tile = lanes[node.axes[0].name]
            products = any(isinstance(n, Dot) for n in work)
            size = max(size, tile if products else tile * max(1, elements // max(1, width * tile)))
    return size


def _elements(lanes: Sequence[Lane], loop: Tiles, sizes: dict[str, int]) -> int:
    own = {a.position for a in loop.axes}
    total = 1
    for lane in lanes:
        if lane.symbol not in own:
            total *= max(1, sizes.get(lane.symbol.name, 1))
    return total


def scheduled(
    program: KernelProgram, strategy: str, target: Target, lanes: dict[str, int] | None = None
) -> tuple[TilePlan, tuple[KernelProgram, ...], dict[str, int]]:
    """A plan for a kernel under a strategy, the program as the phases that it makes, and the lanes of all their axes.

    `lanes` are others than the strategy's own, by the name of an axis, and `chunk` for the size of pieces.
    """
    chosen = overridden(plan(program, strategy, target), program, lanes or {})
    phases: tuple[KernelProgram, ...] = (program,)
    if strategy == "persistent_dynamic":
        phases, chosen = listed(program, chosen, target)
    sizes = {a.name: 1 for phase in phases for a in phase.axes} | chosen.by_name
    return chosen, phases, sizes
