"""The primitives `ragged`, `fork` and `cut` on loops of block statements: how a kernel's rows are cut into pieces.

In: a loop whose statements only take effect inside a row. Out: the same loop, ending with the row; or two phases, one over a work
list of the pieces of all rows, and one over the rows.

    ragged   for c: for k < n: s where k < length[c]   ->   for c: for r[c]: s
    fork     for c: for r[c]: s                        ->   for c: if length[c] <= N: for r'[c]: s  else: for r[c]: s
    cut      for c: (a; for r[c]: t += x; b)           ->   for (c, o): (a; for q: t += x; p[c, o] = t);
                                                            for c: (a; for o[c]: t += p[c, o]; b)     (o in blocks, if asked)

A loop is cut only if every value it carries is a reduction. Each piece starts from the identity and stores a partial result; the
second phase combines the partial results of a row in order, so the bits do not depend on which worker took which piece. After a
`fork`, a row that fits one piece is finished by the worker that takes it, and only longer rows leave partial results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from serrate.errors import ScheduleError
from serrate.ir import ragged_transforms, transforms
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expansion import ReductionTile, expand
from serrate.ir.expr import Element, Expr, Less, Symbol, const, maximum
from serrate.ir.loops import (
    Assign,
    Block,
    Declare,
    Dot,
    Held,
    If,
    Lane,
    Local,
    Reduce,
    Running,
    While,
    Write,
    expressions_of,
    held,
    load,
    values_of,
)
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.renaming import Renaming
from serrate.ir.tile import (
    GRID,
    SERIAL,
    Along,
    Around,
    Axis,
    ByLength,
    Carry,
    Leaf,
    Loop,
    Phase,
    Statement,
    TileProgram,
    branch,
    inner,
    statements,
    with_inner,
)
from serrate.ir.values import Role, Tensor, Value, call, carried_dtype, constant
from serrate.schedule.dependences import is_read_inside, require_independent, require_movable_ahead


@dataclass(frozen=True)
class CutRows:
    """The rows that a phase iterates over: the axis that counts them, the axes that run along them, and their length."""

    component: Axis
    along: tuple[Axis, ...]
    length: Expr
    """As a function of the component's position."""
    count: Expr
    """The number of rows. The loop over components may have another bound."""

    @property
    def counted(self) -> IterDomain:
        """The component domain, restricted to positions that are rows."""
        whole = self.component.domain
        return whole if self.count is whole.extent_expr else transforms.restrict(whole, 0, self.count)


def rows_of(program: TileProgram, phase: Phase) -> list[CutRows]:
    """The rows whose lengths guard statements of a phase, in order of first use."""
    counts = dict(program.counts)
    axes = {a.position: a for a in program.axes if a.looped and a.alias_of is None}
    programs = [n.domain.uid for n in statements(phase.body) if isinstance(n, Loop) and n.kind is GRID]
    found: dict[tuple[Axis, Expr], list[Axis]] = {}
    for node in statements(phase.body):
        for guard in getattr(node, "guard", ()):
            if isinstance(guard.left, Symbol) and guard.left in axes and guard.right.arrays:
                owners = [axes[s] for s in guard.right.symbols if s in axes]
                if len(owners) == 1 and owners[0].domain.uid in programs and guard.right.symbols == {owners[0].position}:
                    found.setdefault((owners[0], guard.right), []).append(axes[guard.left])
    rows: list[CutRows] = []
    for (component, length), along in found.items():
        known = {counts.get(a) for a in length.arrays}
        count = known.pop()
        if not known and count is not None and component.begin.value == 0:
            rows.append(CutRows(component, tuple(dict.fromkeys(along)), length, count))
    return rows


def ragged(program: TileProgram, phase: Phase, loop: Loop) -> Loop:
    """The loop, restricted to its row. Raises if a statement in it takes effect past the end of the row."""
    axis = program.axis_of(loop.domain)
    rows = next((r for r in rows_of(program, phase) if axis in r.along), None)
    if axis is None or rows is None or axis.domain is not loop.domain:
        raise ScheduleError(f"phase {phase.name}: no statement in the loop over {loop.domain.name} is guarded by a row length")
    _check_ends(rows, axis, loop)
    length = maximum(rows.length - axis.begin, 0) if axis.begin.value != 0 else rows.length
    length = length.substitute({rows.component.position: COORDINATE})
    bound = _positions(program, rows) if (axis.begin.bounds[0] or 0) >= 0 else None
    return replace(loop, domain=ragged_transforms.within_row(rows.counted, axis.domain, length, bound))


def _positions(program: TileProgram, rows: CutRows) -> Expr | None:
    """A bound on the total length of all rows: the size of the dim that their offsets index. None if it is not known."""
    at = rows.component.position
    for offsets, most in program.limits:
        if rows.length is offsets[at + 1] - offsets[at] and not most.arrays:
            return most
    return None


def _check_ends(rows: CutRows, axis: Axis, loop: Loop) -> None:
    """Raises if the loop stores, or updates a carried value, past the end of the row."""
    within = Less(axis.position, rows.length)
    own = {n.local.name for n in statements(loop.body) if isinstance(n, Declare)}
    for node in statements(loop.body):
        if isinstance(node, Write) and within not in node.guard:
            raise ScheduleError(f"the loop over {axis} stores past the end of a row")
        if isinstance(node, Reduce | Dot | Running | Assign) and node.local.name not in own:
            fed = node.rests if isinstance(node, Assign) else (node.guard,)
            if not fed or not all(within in each for each in fed):
                raise ScheduleError(f"{node.local.name} is updated past the end of a row")


def list_tiles(program: TileProgram, phase: Phase, component: Loop, tiles: Loop) -> tuple[Statement, ...]:
    """for c: for o[c]: s   ->   for t: s   where these loops are all on the grid, in any order."""
    if not isinstance(tiles.domain, RaggedIterDomain):
        raise ScheduleError(f"phase {phase.name}: {tiles.domain} is not ragged, so its tiles need no work list")
    row = tiles.domain
    pair = ragged_transforms.combine(row.component, row)

    def changed(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        out: list[Statement] = []
        for node in body:
            if isinstance(node, Loop) and node.domain is tiles.domain:
                out += changed(node.body)
            elif isinstance(node, Loop) and node.domain is component.domain:
                out.append(replace(node, domain=pair, body=_requested_only(_component(program, row), row, changed(node.body))))
            else:
                out.append(node)
        return tuple(out)

    return changed(phase.body)


def forked(program: TileProgram, phase: Phase, loop: Loop, size: int) -> TileProgram:
    """Separates rows of at most `size` positions from longer ones, so that each kind can be scheduled differently."""
    if not isinstance(loop.domain, RaggedIterDomain):
        raise ScheduleError(f"phase {phase.name}: {loop.domain} is not ragged, so all its rows are equally long")
    component = _component(program, loop.domain)
    _require_rows(component, loop.domain)
    copy, row = _Copy(program, phase), loop.domain

    def changed(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        if len(body) == 1 and isinstance(body[0], Loop) and body[0].kind is GRID:
            return (replace(body[0], body=changed(body[0].body)),)
        return (ByLength(row, 0, size, copy.body(body), body),)

    new = replace(phase, body=changed(phase.body))
    phases = tuple(new if p is phase else p for p in program.phases)
    return replace(program, phases=phases, axes=(*program.axes, *copy.axes.values()))


def _component(program: TileProgram, row: RaggedIterDomain) -> Axis:
    """The axis that counts the rows of a loop."""
    axis = program.axis_of(row.component)
    assert axis is not None
    return axis


def _requested_only(axis: Axis, row: RaggedIterDomain, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The statements, guarded by the bound of the loop over rows if that may be less than the number of rows."""
    if axis.domain.uid == row.component.uid:
        return body
    if len(body) == 1 and isinstance(body[0], Loop) and body[0].kind is GRID:
        return (replace(body[0], body=_requested_only(axis, row, body[0].body)),)
    return (branch((Less(axis.position, axis.end),), body),)


def _require_rows(axis: Axis, row: RaggedIterDomain) -> None:
    """Raises unless a loop over rows runs over all of them and no more: past the last row there are no lengths."""
    if axis.domain.uid != row.component.uid:
        raise ScheduleError(
            f"{axis} has {axis.end} positions, but there are {row.component.extent_expr} rows: loop over exactly the rows, as in "
            "hl.tile(jt.num_rows)"
        )


class _Copy(Renaming):
    """Copies the statements of a phase, with fresh axes and private blocks."""

    def __init__(self, program: TileProgram, phase: Phase) -> None:
        own = [n for n in statements(phase.body) if isinstance(n, Loop) and n.kind is not GRID]
        looped = {a for n in own if (a := program.axis_of(n.domain)) is not None}
        declared = [n.local.name for n in statements(phase.body) if isinstance(n, Declare)]
        names = {*declared, *(a.name for a in program.axes)}
        ending = "_short"
        while any(f"{name}{ending}" in names for name in names):
            ending += "_"
        self.axes: dict[Axis, Axis] = {}
        self.swap: dict[Expr, Expr] = {}
        self.positions: dict[Symbol, Symbol] = {}
        self.names = {name: f"{name}{ending}" for name in declared}
        for axis in (a for a in program.axes if a.original in looped):
            begin, end = (self.expr(e) for e in (axis.begin, axis.end))
            alias = None if axis.alias_of is None else self.axes[axis.alias_of]
            new = replace(axis, name=f"{axis.name}{ending}", begin=begin, end=end, alias_of=alias)
            self.axes[axis] = new
            self.positions[axis.position] = new.position
            for name in ("position", "lane", "lanes", "number", "first", "last"):
                self.swap[getattr(axis, name)] = getattr(new, name)

    def expr(self, expr: Expr) -> Expr:
        known = dict(self.swap)
        for e in reversed(list(expr.walk())):
            if isinstance(e, Element) and e.array.local and e.array.name in self.names:
                known[e] = replace(e.array, name=self.names[e.array.name])[e.index.substitute(known)]
        return expr.substitute(known)

    def lane(self, lane: Lane) -> Lane:
        return Lane(self.positions.get(lane.symbol, lane.symbol), lane.size)

    def name(self, name: str) -> str:
        return self.names.get(name, name)

    def body(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """A copy of these statements."""
        return tuple(map(self._copied, body))

    def _copied(self, node: Statement) -> Statement:
        if isinstance(node, Loop):
            carried = tuple(replace(carry, locals=tuple(map(self.local, carry.locals))) for carry in node.carried)
            return replace(node, domain=self._domain(node.domain), body=self.body(node.body), carried=carried)
        if isinstance(node, Along):
            return replace(node, axis=self.axes.get(node.axis, node.axis), body=self.body(node.body))
        if isinstance(node, If | While):
            node = replace(node, guard=self.guard(node.guard))
            return with_inner(node, tuple(self.body(part) for part in inner(node)))
        assert not isinstance(node, Around | Leaf)
        return self.node(node)

    def _domain(self, domain: IterDomain) -> IterDomain:
        """The domain of a copied loop: the copied axis, within the same row."""
        own = {old.domain.uid: new.domain for old, new in self.axes.items()}
        if isinstance(domain, RaggedIterDomain) and isinstance(domain.definition, ragged_transforms.WithinRow):
            whole = own[domain.definition.inputs[0].uid]
            return ragged_transforms.within_row(domain.component, whole, domain.length, domain.bound)
        return own[domain.uid]


class Cut:
    """Cuts one loop over rows: makes a phase over the pieces, and one over the rows if any work is left for it."""

    def __init__(self, program: TileProgram, phase: Phase, loop: Loop, size: int, at_once: int = 1) -> None:
        """`at_once`: how many partial results of a row are combined as one block, where the reductions allow it."""
        self.program, self.phase, self.loop, self.size = program, phase, loop, size
        if not isinstance(loop.domain, RaggedIterDomain):
            raise ScheduleError(f"phase {phase.name}: {loop.domain} is not ragged; nothing to cut")
        self.axis = program.axis_of(loop.domain)
        self.component = _component(program, loop.domain)
        self.path = _path(phase.body, loop)
        self.carried = [local for carry in loop.carried for local in carry.locals]
        self._check()
        self.pieces, self.within = transforms.split(loop.domain, size)
        self.work_list = ragged_transforms.combine(loop.domain.component, self.pieces)
        count = self.work_list.extent_expr
        self.entry = Axis(f"{self.work_list.name}_entry", const(0), count, 1, "the work list", given=self.work_list)
        self.scratch = {local.name: self._memory(local) for local in self.carried}
        self.at_once = at_once if all(map(self._combines_blocks, loop.carried)) else 1
        self.blocks: IterDomain = self.pieces
        self.lanes: IterDomain | None = None
        if self.at_once > 1:
            self.blocks, self.lanes = transforms.split(self.pieces, self.at_once)

    def _check(self) -> None:
        for carry in self.loop.carried:
            if carry.reduction is None:
                raise ScheduleError(
                    f"{carry}, carried around {self.axis}, is not a known reduction, so pieces of a row cannot be combined"
                )
            if is_read_inside(carry, self.loop):
                raise ScheduleError(
                    f"{carry}, carried around {self.axis}, is read inside the loop, where it covers only the row so far: "
                    "a piece of a row does not know the pieces before it"
                )
        if any(a.alias_of is self.axis for a in self.program.axes):
            raise ScheduleError(f"{self.axis} indexes two dims of one value, so its rows cannot be cut")
        needed = self._carried_outside()
        if needed:
            raise ScheduleError(f"the loop over {self.axis} needs {needed}, which a loop around it carries")
        require_independent(self.program, self.loop)
        require_movable_ahead(self.phase, self.loop)

    def _carried_outside(self) -> str:
        """The values read by the loop that depend on a value carried by an enclosing loop: they are unknown when pieces run."""
        around = (c for outer in self.path if outer.kind is not GRID for c in outer.carried)
        names = {local.name for carry in around for local in carry.locals}
        own = {local.name for local in self.carried}
        changed = True
        while changed:
            found = {_target(n) for outer in self.path for n in statements(outer.body) if _reads(n) & names} - own - {""}
            changed, names = not found <= names, names | found
        read = {name for n in statements(self.loop.body) for name in _reads(n)}
        return ", ".join(sorted((read & names) - own))

    @property
    def _inside(self) -> list[Axis]:
        """The axes of the serial loops around the loop being cut."""
        found = (self.program.axis_of(loop.domain) for loop in self.path if loop.kind is not GRID)
        return [a for a in found if a is not None]

    def rewritten(self) -> TileProgram:
        """The program with this phase replaced by one over pieces, followed by one over rows if that stores anything."""
        parts = replace(self.phase, name=f"{self.phase.name}_{self.loop.domain.name}", body=self._over_pieces(self.phase.body))
        lanes = self.phase.lanes if self.lanes is None else (*self.phase.lanes, self.lanes)
        rows = replace(self.phase, body=self._over_rows(self.phase.body), lanes=lanes)
        new = (parts, rows) if any(isinstance(n, Write) for n in statements(rows.body)) else (parts,)
        if len(new) > 1:
            assert isinstance(self.loop.domain, RaggedIterDomain)
            _require_rows(self.component, self.loop.domain)
        phases = [p for each in self.program.phases for p in (new if each is self.phase else (each,))]
        return replace(self.program, phases=tuple(phases), axes=(*self.program.axes, self.entry))

    def _over_pieces(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """The code before the loop, without its stores; one piece of the loop; and the store of its partial result."""
        out: list[Statement] = []
        for node in body:
            if node is self.loop:
                out += [node for carry in self.loop.carried for node in _identities(carry)]
                out.append(replace(self.loop, domain=self.within))
                out += map(self._keep, self.carried)
                break
            if isinstance(node, Loop) and node in self.path:
                inside = self._over_pieces(node.body)
                if node.domain.uid == self.component.domain.uid:
                    assert isinstance(self.loop.domain, RaggedIterDomain)
                    inside = _requested_only(self.component, self.loop.domain, inside)
                    node = replace(node, domain=self.work_list)
                out.append(replace(node, body=inside))
                break
            if isinstance(node, ByLength):
                # A row that fits one piece is finished here, unless an earlier phase has finished it.
                out.append(replace(node, other=self._over_pieces(node.other)))
                break
            out += _without_stores(node)
        return tuple(out)

    def _over_rows(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """The whole phase, in which the loop combines partial results."""
        out: list[Statement] = []
        for node in body:
            if node is self.loop:
                combined = self._combined() if self.lanes is None else self._combined_blocks()
                out += [Loop(self.blocks, SERIAL, combined)] if self.loop.carried else []
            elif isinstance(node, Loop) and node in self.path:
                out.append(replace(node, body=self._over_rows(node.body)))
            elif isinstance(node, ByLength):
                # A row that fits one piece is already finished; an empty row had no piece.
                out.append(replace(node, least=1, short=(), other=self._over_rows(node.other)))
            else:
                out.append(node)
        return tuple(out)

    # --- partial results ---

    def _memory(self, local: Local) -> tuple[Tensor, list[Axis]]:
        """The tensor that holds partial results of a private block: over entries, enclosing loops, then the axes of the block."""
        by_position = {a.position: a for a in self.program.axes}
        axes = [by_position[lane.symbol] for lane in local.lanes if by_position[lane.symbol] is not self.component]
        name = f"{local.name}_kept"
        dims = [IterDomain(self.work_list.extent_expr, name=f"{name}_0", bound=self.work_list.bound)]
        around = [a for a in self._inside if a not in axes]
        for axis in (*around, *axes):
            if not self._has_one_size(axis):
                raise ScheduleError(
                    f"{axis} has a different size in each tile around it, so partial results of {local.name} have no fixed shape"
                )
        dims += [IterDomain(a.end - a.begin, name=f"{name}_{k + 1}") for k, a in enumerate((*around, *axes))]
        return Tensor(name, carried_dtype(local.dtype), tuple(dims), tuple(dims), Role.SCRATCH), axes

    def _has_one_size(self, axis: Axis) -> bool:
        """Whether the size of an axis is known before the phase runs."""
        size = axis.end - axis.begin
        moving = {s for a in self.program.axes for s in (a.position, a.lane, a.number, a.first, a.last)}
        return not size.symbols & moving and not any(isinstance(e, Element) and e.array.local for e in size.walk())

    def _place(self, axes: Sequence[Axis]) -> tuple[tuple[Expr, ...], tuple[Less, ...]]:
        """The index of a partial result, and the guard of its lanes. Each tile of an enclosing loop has one place."""
        around = [a for a in self._inside if a not in axes]
        index = (self.entry.position, *(a.first - a.begin for a in around), *(a.position - a.begin for a in axes))
        return index, tuple(Less(a.position, a.end) for a in axes if a.looped)

    def _keep(self, local: Local) -> Statement:
        tensor, axes = self.scratch[local.name]
        index, guard = self._place(axes)
        return Write(local.lanes, guard, tensor, index, _cast(held(local), tensor.dtype))

    def _combined(self) -> tuple[Statement, ...]:
        """Combines the partial result of one piece into the carried values."""
        body: list[Statement] = []
        for carry in self.loop.carried:
            assert carry.reduction is not None
            dtype = functools.reduce(torch.promote_types, (self.scratch[local.name][0].dtype for local in carry.locals))
            mine = tuple(_cast(held(local), dtype) for local in carry.locals)
            new = carry.reduction.combine(mine, tuple(self._partial(local, dtype) for local in carry.locals))
            # Each state is computed from those before it, so the last one is assigned first.
            for local, value in reversed(list(zip(carry.locals, new, strict=True))):
                body.append(Assign(local.lanes, (), local, _cast(value, local.dtype)))
        return tuple(body)

    def _combines_blocks(self, carry: Carry) -> bool:
        """Whether partial results can be combined by block operators, in the dtype that they are stored in."""
        dtypes = {t for local in carry.locals for t in (local.dtype, self.scratch[local.name][0].dtype)}
        return carry.reduction is not None and not carry.reduction.folds and len(dtypes) == 1

    def _combined_blocks(self) -> tuple[Statement, ...]:
        """Combines the partial results of several pieces into the carried values: pieces are lanes of the axis that was cut."""
        assert self.axis is not None and isinstance(self.work_list.definition, ragged_transforms.Combine)
        end = self.work_list.definition.offsets[self.component.position + 1]
        body: list[Statement] = []
        for carry in self.loop.carried:
            assert carry.reduction is not None
            kept = carry.locals[0].lanes
            inside = tuple(Less(a.position, a.end) for a in self.scratch[carry.locals[0].name][1] if a.looped)
            guard = (Less(self.entry.position, end), *inside)
            tile = ReductionTile((Lane(self.axis.position, self.at_once), *kept), guard, kept, inside)
            values = tuple(self._partial(local, local.dtype) for local in carry.locals)
            made = expand(carry.reduction, carry.locals, values, tile, merge=True)
            body += (replace(n, rests=(guard,)) if isinstance(n, Assign) else n for n in made if isinstance(n, Declare | Block))
        return tuple(body)

    def _partial(self, local: Local, dtype: torch.dtype) -> Value:
        tensor, axes = self.scratch[local.name]
        index, guard = self._place(axes)
        return _cast(load(tensor, index, guard), dtype)


def _path(body: tuple[Statement, ...], wanted: Loop) -> tuple[Loop, ...]:
    """The loops around a loop. Raises if it is inside an `if` or `while`."""
    for node in body:
        if node is wanted:
            return ()
        if any(n is wanted for part in inner(node) for n in statements(part)):
            if isinstance(node, ByLength) and any(n is wanted for n in statements(node.other)):
                return _path(node.other, wanted)
            if not isinstance(node, Loop):
                raise ScheduleError(f"the loop over {wanted.domain.name} is inside an `if` or `while`; its rows stay whole")
            return (node, *_path(node.body, wanted))
    raise AssertionError(wanted)


def _target(node: Statement) -> str:
    return node.local.name if isinstance(node, Assign | Reduce | Dot | Running) else ""


def _reads(node: Statement) -> set[str]:
    """The private blocks that a statement reads, as values and as indices."""
    if isinstance(node, Around | Leaf | Declare):
        return set()
    held_ = {v.local.name for value in values_of(node) for v in value.walk() if isinstance(v, Held)}
    return held_ | {e.array.name for x in expressions_of(node) for e in x.walk() if isinstance(e, Element) and e.array.local}


def _cast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else call("cast", value, dtype=dtype)


def _identities(carry: Carry) -> Iterator[Statement]:
    """Sets carried values to their identities, which is where each piece starts."""
    assert carry.reduction is not None
    for k, local in enumerate(carry.locals):
        yield Assign(local.lanes, (), local, constant(carry.reduction.identity(k, local.dtype), local.dtype))


def _without_stores(node: Statement) -> list[Statement]:
    """A statement without its stores to memory."""
    if isinstance(node, Write) and node.tensor.role is not Role.PRIVATE:
        return []
    if inner(node):
        return [with_inner(node, tuple(tuple(kept for n in part for kept in _without_stores(n)) for part in inner(node)))]
    return [node]
