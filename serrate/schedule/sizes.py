"""Tile sizes: how many lanes every axis of a phase of block statements gets.

In: the program, how many rows a strategy takes at once, a target. Out: lanes by axis name; `tiled` applies them by `split` and
`mark`. An axis keeps a tile size that the user fixed. The choice never changes what a kernel means (rule 6): kernels that might
depend on it were refused earlier.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Element, Expr, Sum, Symbol
from serrate.ir.loops import (
    Block,
    Dot,
    Held,
    Lanes,
    Load,
    Reduce,
    Running,
    While,
    Write,
    expressions_of,
    flat_index,
    multiplies_matrices,
    values_of,
)
from serrate.ir.ragged_transforms import Combine
from serrate.ir.tile import GRID, SERIAL, Around, Axis, ByLength, Leaf, Loop, Phase, Statement, TileProgram, inner, statements
from serrate.ir.transforms import Split
from serrate.ir.values import Role
from serrate.schedule.heuristic import Carried
from serrate.schedule.plan import Recorder, Sized
from serrate.schedule.row_work import RowWork, column_lanes
from serrate.schedule.target import Target

LONG = 4096
"""Lanes of an axis whose tiles are never kept, so that a large tile costs no memory."""


def tiled(recorder: Recorder, phase: str, lanes: Mapping[str, int]) -> None:
    """Splits the loops of a phase into tiles of these sizes, by axis name, and makes the tiles lanes."""
    body = next(p for p in recorder.program.phases if p.name == phase).body
    for loop in (n for n in statements(body) if isinstance(n, Loop)):
        axis, name = recorder.program.axis_of(loop.domain), loop.domain.name
        if axis is not None and lanes.get(axis.name, 1) > 1 and not _counts_tiles(loop.domain):
            recorder.do("split", phase, name, lanes[axis.name])
            recorder.do("mark", phase, f"{name}i", "lanes")


def _counts_tiles(domain: IterDomain) -> bool:
    """Whether positions of a domain are already tiles or pieces."""
    made = domain.definition
    return isinstance(made, Combine) or (isinstance(made, Split) and domain is made.outputs[0])


def sizes(program: TileProgram, rows: int, target: Target, asked: Mapping[str, int] | None = None) -> dict[str, int]:
    """Lanes of every axis: `rows` for axes that count rows. `asked` overrides axes that the user left open."""
    (phase,) = program.phases
    facts = AxisUse(program, phase)
    chosen: dict[Axis, int] = {}
    for axis in program.axes:
        chosen[axis] = _fixed(axis) or 0
    for axis in program.axes:
        if not chosen[axis] and axis.position in facts.components:
            # Matrix units multiply 2-D blocks: with rows as another dim, the product could not use them.
            alone = axis.position in facts.batches and target.least_matmul > 1
            chosen[axis] = 1 if alone else Sized(rows, f"{rows} rows are processed together, as lanes")
    _products(program.axes, chosen, facts, target)
    _vectors(program, phase, chosen, facts, target)
    _rest(program, phase, chosen, target)
    _fit(program, phase, chosen, facts, target)
    found = {a.name: max(chosen[a], Sized(a.least, "the least that the kernel allows")) for a in program.axes}
    given = {name: Sized(size, "requested") for name, size in (asked or {}).items()}
    return {a.name: given.get(a.name, found[a.name]) if a.looped and a.block is None else found[a.name] for a in program.axes}


class MatrixProduct(NamedTuple):
    """The positions of the axes of a matrix product."""

    rows: Symbol
    columns: Symbol
    depth: Symbol


class AxisUse:
    """The uses of a program's axes."""

    def __init__(self, program: TileProgram, phase: Phase) -> None:
        self.components: set[Symbol] = set()
        self.along: set[Symbol] = set()
        self.products: list[MatrixProduct] = []
        self.batches: set[Symbol] = set()
        """Axes that matrix products have besides their three."""
        self.computed: set[Symbol] = set()
        """Axes whose lanes each have a computed index."""
        owners = {a.lane: a.position for a in program.axes}
        exprs: list[Expr] = [e for a in program.axes if a.looped for e in (a.begin, a.end)]
        for node in statements(phase.body):
            exprs += [] if isinstance(node, Around | Leaf) else expressions_of(node)
            self._memory(node)
            if isinstance(node, Dot) and len(node.lanes) >= 3:
                *batches, rows, columns, depth = (lane.symbol for lane in node.lanes)
                self.products.append(MatrixProduct(rows, columns, depth))
                self.batches.update(batches)
        self.rows = {p.rows for p in self.products}
        self.columns = {p.columns for p in self.products}
        self.depths = {p.depth for p in self.products}
        for expr in exprs:
            for e in expr.walk():
                if isinstance(e, Element) and not e.array.local:
                    self.components |= e.index.symbols
                elif isinstance(e, Element):
                    self.computed |= {owners.get(s, s) for s in e.index.symbols}
        # Rows found through the user's own offsets: lanes of a matrix product may be gathered, others may not.
        self.components |= self.computed - self.rows - self.columns - self.depths

    def _memory(self, node: Statement) -> None:
        """Notes the axes along which an access is contiguous."""
        if not isinstance(node, Block):
            return
        accesses = [(v.tensor, v.index) for value in values_of(node) for v in value.walk() if isinstance(v, Load)]
        accesses += [(node.tensor, node.index)] if isinstance(node, Write) else []
        for tensor, index in accesses:
            flat = flat_index(index, [d.extent_expr for d in tensor.storage])
            terms = dict(flat.terms) if isinstance(flat, Sum) else {flat: 1}
            self.along |= {term for term, factor in terms.items() if factor == 1 and isinstance(term, Symbol)}

    @property
    def chained(self) -> set[Symbol]:
        """Axes of a product's result that another product sums over: keys, in attention."""
        return self.depths & (self.columns | self.rows)

    @property
    def kept(self) -> set[Symbol]:
        """Rows of chained products that their last result keeps: queries, in attention."""
        return {p.rows for p in self.products if not self.chained.isdisjoint(p)} - self.chained


def product_warps(program: TileProgram, target: Target) -> int | None:
    """The number of warps of a kernel with matrix products: few for the small blocks of chained ones, so that several programs
    share a multiprocessor; None without products."""
    uses = [AxisUse(program, phase) for phase in program.phases]
    if not any(use.products for use in uses):
        return None
    return target.warps if any(use.chained for use in uses) else 2 * target.warps


def kernel_work(program: TileProgram) -> RowWork:
    """The row work of a kernel whose loops over rows carry reductions and that uses no matrix units."""
    body = [n for phase in program.phases for n in _as_written(phase.body)]
    loops = [n for n in body if isinstance(n, Loop) and n.kind is SERIAL]
    kinds = [carry.reduction for loop in loops for carry in loop.carried]
    if not kinds or None in kinds or any(isinstance(n, Dot | Running | While) for n in body):
        return RowWork("nothing")
    carried: Carried = "sums" if all(kind is not None and kind.operator is not None for kind in kinds) else "statistics"
    held = {local.name for loop in loops for carry in loop.carried for local in carry.locals}
    serial = {axis.position for loop in loops if (axis := program.axis_of(loop.domain)) is not None}
    reduced = [_reduced(n) & serial for n in body if isinstance(n, Reduce) and n.local.name in held]
    # A second read of the row uses results of the first pass, so the first pass counts as statistics.
    passes = [loop for loop in loops if not any(loop in statements(outer.body) for outer in loops)]
    over_features = len(passes) > 1 and any(len(axes) > 1 for axes in reduced)
    blocks = [n for n in body if isinstance(n, Reduce | Write) and serial & {lane.symbol for lane in n.lanes}]
    loads = [v.tensor for n in blocks for v in n.value.walk() if isinstance(v, Load) and n.lanes[1:]]
    rows = [t.dtype for t in loads if t.role is Role.INPUT]
    numbers = all(len({lane.symbol for lane in n.lanes} - _components(program)) < 2 for n in blocks)
    return RowWork(carried, over_features, bool(rows) and all(dtype.itemsize == 2 for dtype in rows), numbers)


def _as_written(body: Sequence[Statement]) -> Iterator[Statement]:
    """The statements of a kernel, once: after a fork, those of short rows, which are as the user wrote them."""
    for node in body:
        yield node
        for part in (node.short,) if isinstance(node, ByLength) else inner(node):
            yield from _as_written(part)


def _reduced(node: Reduce) -> set[Symbol]:
    """The positions of the axes that a statement reduces over."""
    return {lane.symbol for lane in node.lanes} - {lane.symbol for lane in node.local.lanes}


def _components(program: TileProgram) -> set[Symbol]:
    """The positions of the axes that count rows."""
    return set().union(*(AxisUse(program, phase).components for phase in program.phases))


def _fixed(axis: Axis) -> int | None:
    if not axis.looped:
        return axis.size
    return None if axis.block is None else Sized(axis.block, "fixed by the kernel")


def _products(axes: Sequence[Axis], chosen: dict[Axis, int], facts: AxisUse, target: Target) -> None:
    """Blocks of matrix products; an axis that is the depth of one and a column of another gets a size that suits both."""
    why = "blocks of a matrix product are {} x {} x {}".format(*target.matmul)
    rows, columns, depth = (Sized(size, why) for size in target.matmul)
    why = "blocks of chained products are {} x {}".format(*target.contraction)
    kept, along = (Sized(size, why) for size in target.contraction)
    for axis in axes:
        at = axis.position
        if chosen[axis]:
            continue
        if at in facts.chained:
            chosen[axis] = along
        elif at in facts.kept:
            chosen[axis] = kept
        elif at in facts.depths:
            chosen[axis] = _at_most(axis, depth)
        elif at in facts.columns:
            chosen[axis] = columns
        elif at in facts.rows:
            chosen[axis] = rows


def _vectors(program: TileProgram, phase: Phase, chosen: dict[Axis, int], facts: AxisUse, target: Target) -> None:
    """Contiguous axes: whole if short; if they are only stored, as much as one store covers. Workers share the columns of rows
    that they reduce."""
    parallel, work = _parallel(program, phase), kernel_work(program)
    reduces, columns = target.column_bytes > 0 and work.carried != "nothing", work.in_narrow_columns(target)
    for axis in program.axes:
        if not chosen[axis] and axis.position in facts.along:
            size = _stored_size(phase, axis)
            if size is None and reduces and axis in parallel:
                lanes = column_lanes(_widest_read(phase, axis), columns)
                most = Sized(lanes, f"several workers share a row: each takes {columns.column_bytes} bytes of its positions")
            elif size is None and reduces and work.numbers:
                most = Sized(work.positions(1, target), "a block of numbers: most rows would not fill a larger one")
            elif size is None:
                most = Sized(target.widest, f"contiguous: the most lanes of one dim are {target.widest}")
            else:
                most = Sized(2 * target.store_bytes // size, f"only stored: {2 * target.store_bytes} bytes at a time")
            chosen[axis] = _at_most(axis, most)


def _fit(program: TileProgram, phase: Phase, chosen: dict[Axis, int], facts: AxisUse, target: Target) -> None:
    """Halves tiles that the user left open until no statement has a larger block than the target holds."""
    axes = {a.position: a for a in program.axes}
    for lanes in (lanes for node in statements(phase.body) if isinstance(node, Block) for lanes in _held_at_once(node)):
        block = [axes[lane.symbol] for lane in lanes]
        most = _most_held(lanes, facts, target)
        while math.prod(map(chosen.__getitem__, block)) > most:
            widest = max((a for a in block if a.looped and a.block is None), key=lambda a: (chosen[a], a.name), default=None)
            if widest is None or chosen[widest] <= max(widest.least, target.least_matmul if _multiplied(phase, widest) else 1):
                break
            chosen[widest] = Sized(-(-chosen[widest] // 2), f"halved until no block has more than {most} elements")


def _held_at_once(node: Block) -> Iterable[Lanes]:
    """The lanes of the blocks that a statement holds at once: a float product of matrices holds its operands and its result; any
    other product holds one block with all axes."""
    if isinstance(node, Dot) and node.local.dtype.is_floating_point and multiplies_matrices(node):
        *batches, rows, columns, depth = node.lanes
        return [(*batches, *sides) for sides in itertools.combinations((rows, columns, depth), 2)]
    return [node.lanes]


def _most_held(lanes: Lanes, facts: AxisUse, target: Target) -> int:
    """The most elements of a block. The sums of products may fill the registers, unless other products are computed from them."""
    sides = {lane.symbol for lane in lanes} - facts.batches
    is_result = any({p.rows, p.columns} == sides for p in facts.products)
    return max(target.sums // len(facts.products), target.largest) if is_result and not facts.chained else target.largest


def _multiplied(phase: Phase, axis: Axis) -> bool:
    return any(isinstance(n, Dot) and axis.position in {lane.symbol for lane in n.lanes} for n in statements(phase.body))


def _stored_size(phase: Phase, axis: Axis) -> int | None:
    """The bytes per element of an axis that occurs in stores only; None if it is reduced or kept."""
    found = [n for n in statements(phase.body) if axis.position in {lane.symbol for lane in getattr(n, "lanes", ())}]
    sizes = [n.tensor.dtype.itemsize for n in found if isinstance(n, Write)]
    return max(sizes) if sizes and len(sizes) == len(found) else None


def _rest(program: TileProgram, phase: Phase, chosen: dict[Axis, int], target: Target) -> None:
    """Remaining axes share the room of a block; grid axes take one position each."""
    parallel, work = _parallel(program, phase), kernel_work(program)
    for axis in program.axes:
        if chosen[axis]:
            continue
        if axis in parallel:
            chosen[axis] = 1
            continue
        widest = 1
        for other, lanes in chosen.items():
            widest *= lanes if lanes and other.position in _companions(phase, axis) else 1
        size = _stored_size(phase, axis)
        room = target.near_block if size is None else target.store_bytes // size
        if target.factors_blocks and work.in_same_blocks(is_stored=size is not None):
            most = Sized(work.positions(widest, target), f"blocks of rows, with {widest} beside each position")
        elif _only_summed(phase, axis):
            most = Sized(LONG, "only summed, so a long tile costs no memory")
        elif size is None:
            most = Sized(max(1, room // widest), f"a block of {room} elements stays in cache, with {widest} beside each position")
        else:
            most = Sized(
                max(1, room // widest), f"{target.store_bytes} bytes are stored at once, with {widest} beside each position"
            )
        chosen[axis] = _at_most(axis, most)


def _parallel(program: TileProgram, phase: Phase) -> set[Axis]:
    """The axes of grid loops."""
    loops = [n for n in statements(phase.body) if isinstance(n, Loop) and n.kind is GRID]
    return {a for n in loops if (a := program.axis_of(n.domain)) is not None}


def shares_columns(program: TileProgram, lanes: Mapping[str, int], target: Target) -> bool:
    """Whether workers share the columns of a row, with these lanes."""
    (phase,) = program.phases
    columns = _parallel(program, phase) if target.column_bytes else set[Axis]()
    return any(lanes[a.name] > 1 and (a.size is None or lanes[a.name] < a.size) for a in columns)


def _widest_read(phase: Phase, axis: Axis) -> int:
    """The most bytes of an element that statements along an axis read, from memory or from private blocks."""
    found = [n for n in statements(phase.body) if isinstance(n, Reduce | Write)]
    reads = (v for n in found if axis.position in {lane.symbol for lane in n.lanes} for v in n.value.walk())
    return max((v.dtype.itemsize for v in reads if isinstance(v, Load | Held)), default=1)


def _only_summed(phase: Phase, axis: Axis) -> bool:
    """Whether a single statement reduces over an axis and no other uses it, so no element of a tile is needed twice."""
    found = [n for n in statements(phase.body) if axis.position in {lane.symbol for lane in getattr(n, "lanes", ())}]
    rows = [n for n in found if isinstance(n, Write) and n.tensor.role is Role.PRIVATE]
    sums = [n for n in found if isinstance(n, Reduce) and axis.position not in {a.symbol for a in n.local.lanes}]
    return len(sums) == 1 and len(rows) + 1 == len(found)


def _companions(phase: Phase, axis: Axis) -> set[Symbol]:
    """The axes that share a statement with this one."""
    found: set[Symbol] = set()
    for node in statements(phase.body):
        lanes = {lane.symbol for lane in getattr(node, "lanes", ())}
        if axis.position in lanes:
            found |= lanes - {axis.position}
    return found


def _at_most(axis: Axis, limit: int) -> int:
    size = axis.size
    return limit if size is None else max(1, min(Sized(size, f"all {size}"), limit))
