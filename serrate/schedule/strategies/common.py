"""Scheduling of fusions, shared by all strategies: loops of each phase, lanes of regular dims, matrix products, fusion of loops.

In: a recorder, and a `RowLoops`, which arranges component and ragged loops for one strategy. Out: recorded steps. The entry
point is `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod
from typing import Protocol

from serrate.ir.domains import IterDomain
from serrate.ir.tile import GRID, LANES, Accumulate, Phase, Scan, Store, TileProgram, chain, walk
from serrate.ir.values import Place, Read, Role, domains_of
from serrate.schedule.heuristic import Carried
from serrate.schedule.plan import Recorder, Sized
from serrate.schedule.prepare import RowProduct, Shape, describe, gather_operands, reduced_loops, round_operands
from serrate.schedule.primitives import goes_in_order
from serrate.schedule.row_work import RowWork, column_lanes
from serrate.schedule.sizes import kernel_work, product_warps
from serrate.schedule.strategies.contractions import contractions, schedule_contraction
from serrate.schedule.strategies.kernels import Lanes
from serrate.schedule.target import Target, power_of_two_at_least

LONG = 4096
"""The longest block of a row: long enough that the overhead of the loop around it vanishes."""


FINISHED = 2048
"""The most partial results that are combined in one block."""

FOLDED = 64
"""Elements of partial results that one fold combines; folds get slower with more lanes."""

RAGGED_WIDTH = 128
"""The most features of a ragged product for which few warps hold a block of sums in registers."""


def loop_names(recorder: Recorder, phase: str) -> list[str]:
    """The loops of a phase, outermost first."""
    found = chain(next(p for p in recorder.program.phases if p.name == phase))
    assert found is not None
    return [loop.domain.name for loop in found[0]]


def lanes_of(domain: IterDomain, target: Target, most: int) -> Sized:
    """How many lanes a regular dim gets: its extent, but at most `most`."""
    extent = domain.extent_expr.value
    wanted = most if extent is None else min(extent, most)
    return rounded(Sized(wanted, f"all {extent}" if extent == wanted else f"the most lanes of one dim are {most}"), target)


def rounded(size: int, target: Target) -> Sized:
    """A tile size that the target supports, at least as large."""
    why = size.why if isinstance(size, Sized) else ""
    found = power_of_two_at_least(size) if target.power_of_two_lanes else max(size, 1)
    return Sized(found, why if found == size else f"{why}, rounded up to a power of two")


def lane_regular(
    recorder: Recorder, shape: Shape, target: Target, outer: frozenset[int] = frozenset()
) -> tuple[list[str], list[str], list[str]]:
    """Makes the innermost regular dim lanes, split if it is wide. Other dims, and loops over rows, stay as they are, and so do
    dims that are `outer` ones of the program.

    Returns the names of loops that are kept, loops that are reduced, and lanes.
    """
    kept: list[str] = []
    reduced: list[str] = []
    lanes: list[str] = []
    for k, domain in enumerate(shape.regular):
        goal = reduced if domain.uid in shape.reduced else kept
        if k < len(shape.regular) - 1 or domain.is_ragged or domain.uid in outer or _of_rows(domain):
            goal.append(domain.name)
            continue
        size = lanes_of(domain, target, target.widest)
        if domain.extent_expr.value is None and isinstance(shape.leaf, Store):
            # The extent is unknown, and more lanes than one store covers would not help.
            stored = target.store_bytes // shape.leaf.tensor.dtype.itemsize
            size = min(size, Sized(stored, f"{target.store_bytes} bytes are stored at once"))
        if domain.extent_expr.value == size:
            lanes.append(domain.name)
        else:
            recorder.do("split", shape.phase, domain.name, size)
            goal.append(f"{domain.name}o")
            lanes.append(f"{domain.name}i")
    return kept, reduced, lanes


def _of_rows(domain: IterDomain) -> bool:
    """Whether a domain is made from rows that were cut: its positions are then whole inner rows, which cannot be lanes."""
    made = domain.definition
    return made is not None and any(source.is_ragged for source in made.inputs)


def block_size(asked: int | None, usual: int, target: Target) -> Sized:
    """The requested size, or else the usual one, rounded up to what the target supports."""
    return rounded(Sized(asked, "requested") if asked else usual, target)


def shapes(program: TileProgram) -> list[Shape]:
    """A description of each phase of a fusion; empty for a kernel."""
    return [] if program.axes else [describe(program, p.name) for p in program.phases]


def row_work(shapes: Sequence[Shape]) -> RowWork:
    """The row work of the phases of a fusion."""
    reducing = [s for s in shapes if s.reduces_rows]
    statistics = [s for s in reducing if not _is_simple(s.leaf)]
    carried: Carried = "statistics" if statistics else "sums" if reducing else "nothing"
    over_features = any(s.reduced & {d.uid for d in s.regular} for s in statistics)
    return RowWork(carried, over_features, _of_sixteen_bits(shapes))


def work_of(program: TileProgram) -> RowWork:
    """The row work of a program."""
    return kernel_work(program) if program.axes else row_work(shapes(program))


def warps_for(program: TileProgram, target: Target, *, small: bool = False, look_ups: bool = False) -> int:
    """The number of warps: by what is done with rows; one for `look_ups` of rows; more for the blocks of matrix products, to
    avoid spills. `small` blocks are half as large."""
    products = [s for s in shapes(program) if s.is_product or s.row_product is not None]
    if products:
        # Blocks of ragged products are small, and several programs share a multiprocessor.
        ragged = all(len(s.own_rows) > 1 and width(s, target) <= RAGGED_WIDTH for s in products)
        return target.warps if ragged else 2 * target.warps
    if program.axes and (warps := product_warps(program, target)) is not None:
        return warps
    work = work_of(program)
    return 1 if look_ups and not work.over_features else work.warps(target, small=small)


LOOKED_UP = 2048
"""Elements of a block of rows that are looked up: as many as one warp holds."""


def sums_look_ups(shapes: Sequence[Shape]) -> bool:
    """Whether rows of features are only looked up and summed, as those of bags are."""
    reducing = [s for s in shapes if s.reduces_rows]
    looked_up = bool(reducing) and all(_is_simple(s.leaf) and _looks_up(s) and s.regular for s in reducing)
    return looked_up and not any(s.is_product for s in shapes)


def for_look_ups(target: Target) -> Target:
    """The target with blocks for rows that are looked up and summed. Many small workers, each a warp that loads a block into
    registers, keep more rows in flight than few large ones. A worker reads rows as whole as possible, because workers that share
    a row would each look it up. (Bags of 16 rows of 512 bytes: 63% of a copy's speed on an H200; 50% with two warps; 50% with
    half rows; 22% with two warps, half rows and three stages.) Each thread adds up its elements of all rows of a block at once:
    partial results for all lanes would take the registers that the next loads need."""
    target = replace(target, column_bytes=2 * target.column_bytes, factors_blocks=False)
    return replace(target, largest=LOOKED_UP, simple_block=LOOKED_UP, block=LOOKED_UP)


def stages_for(program: TileProgram, target: Target, *, look_ups: bool = False) -> int:
    """The number of blocks in flight. A copy at indices from memory starts only when these have arrived: stages of `look_ups`
    would wait for one another."""
    return 1 if look_ups else work_of(program).stages(target)


def width(shape: Shape, target: Target) -> int:
    """Lanes of the regular dims of a phase."""
    regular = shape.regular and not shape.regular[-1].is_ragged
    return lanes_of(shape.regular[-1], target, target.widest) if regular else 1


def row_block(shape: Shape, shapes: Sequence[Shape], target: Target) -> Sized:
    """How many positions of a row are in one block. Phases that keep rows use the same number, so that they can be fused."""
    across = width(shape, target)
    if isinstance(shape.leaf, Accumulate) and shape.reduces_rows:
        if shape.leaf.reduction.operator is None:
            size = Sized(target.block // across, _elements(target.block, across, f"{shape.leaf.reduction} is costly to combine"))
        elif target.simple_block >= across:
            size = Sized(target.simple_block // across, _elements(target.simple_block, across, "a simple reduction"))
        else:
            # A target without blocks for simple reductions runs a plain loop over the row.
            size = Sized(LONG, "a simple reduction is a plain loop over the row")
    elif isinstance(shape.leaf, Store) and shape.leaf.tensor.role is Role.PRIVATE:
        size = Sized(LONG, "a row that stays in cache is filled by a plain loop")
    else:
        kept = [s for s in shapes if not s.reduces_rows and not s.is_product]
        kept = kept or [shape]
        if target.factors_blocks and any(s.reduces_rows and _has_states(s.leaf) for s in shapes):
            # Blocks that were reduced are read again: the second pass takes the same ones.
            why = _elements(target.block, across, "the second pass takes the blocks of the first")
            return block_size(None, Sized(max(target.block // across, 1), why), target)
        size = min(_stored_block(s, target) for s in kept)
    longest = Sized(LONG, f"rows are processed in blocks of at most {LONG} positions")
    return rounded(max(min(size, longest), Sized(1, "one position fills a block")), target)


def _elements(count: int, across: int, why: str) -> str:
    return f"{why}: blocks of {count} elements, {across} in each position" if across > 1 else f"{why}: blocks of {count} elements"


def _stored_block(shape: Shape, target: Target) -> Sized:
    """How many positions of a row a phase stores at once."""
    room, position = _stored_at_once(shape, target), width(shape, target) * shape.leaf.targets[0].dtype.itemsize
    return Sized(room // position, f"{room} bytes are stored at once, a position has {position}")


def _stored_at_once(shape: Shape, target: Target) -> int:
    """Bytes of one block of what a phase stores."""
    moves = isinstance(shape.leaf, Store) and isinstance(shape.leaf.value, Read) and shape.leaf.tensor.role is Role.OUTPUT
    return target.move_bytes if moves else target.store_bytes


def finish_loops(recorder: Recorder, phase: str, order: list[str], grid: list[str], lanes: list[str]) -> None:
    """Puts the loops of a phase in order and marks them."""
    order, lanes = _as_elements_go(recorder, phase, order, lanes)
    if loop_names(recorder, phase) != order:
        recorder.do("reorder", phase, *order)
    for name in order:
        if name in grid:
            recorder.do("mark", phase, name, "grid")
        elif name in lanes:
            recorder.do("mark", phase, name, "lanes")


def _as_elements_go(recorder: Recorder, phase: str, order: list[str], lanes: list[str]) -> tuple[list[str], list[str]]:
    """The order and the lanes for a statement that needs its elements in order: loops that it reduces keep their order, and only
    the innermost of them can be lanes."""
    found = chain(next(p for p in recorder.program.phases if p.name == phase))
    assert found is not None
    domains = [loop.domain for loop in found[0]]
    if not goes_in_order(found[1]):
        return order, lanes
    gone = reduced_loops(found[1], domains)
    reduced = [d.name for d in domains if d.uid in gone]
    last = {*takewhile(lanes.__contains__, reversed(reduced))}
    lanes = [name for name in lanes if name not in reduced or name in last]
    order = [*(n for n in order if n not in lanes), *(n for n in order if n in lanes)]
    in_order = iter(reduced)
    return [next(in_order) if name in reduced else name for name in order], lanes


def schedule_regular(recorder: Recorder, shape: Shape, shapes: Sequence[Shape], target: Target) -> None:
    """Schedules a phase without ragged loops: blocks of its first dim on the grid, its last dim as lanes."""
    domains = shape.regular if shape.component is None else (shape.component, *shape.regular)
    if not domains:
        return
    if shape.is_product or finishes_product(shape, shapes):
        lasting = [d for d in domains if d.uid not in shape.reduced]
        schedule_product(recorder, shape, target, rows=lasting[0] if len(lasting) > 1 else None)
        return
    first = domains[0]
    if first.uid in shape.reduced and isinstance(shape.leaf, Accumulate) and shape.leaf.merge:
        _finish_total(recorder, shape, domains, target)
        return
    if first.uid in shape.reduced and isinstance(shape.leaf, Accumulate):
        _schedule_total(recorder, shape, domains, target)
        return
    if first.uid in shape.reduced and isinstance(shape.leaf, Scan):
        _schedule_running(recorder, shape, domains, target)
        return
    block = _first_block(shapes, target)
    recorder.do("split", shape.phase, first.name, block)
    outer, inner = f"{first.name}o", f"{first.name}i"
    rest = Shape(shape.phase, shape.leaf, None, None, domains[1:], shape.reduced)
    kept, reduced, lanes = lane_regular(recorder, rest, target)
    finish_loops(recorder, shape.phase, [outer, *kept, *reduced, inner, *lanes], [outer], [inner, *lanes])


def _schedule_total(recorder: Recorder, shape: Shape, domains: tuple[IterDomain, ...], target: Target) -> None:
    """Schedules a reduction over the first dim: pieces of it on the grid, combined in order by one worker."""
    first, rest = domains[0], domains[1:]
    across = lanes_of(rest[-1], target, target.widest) if rest else 1
    block = block_size(None, Sized(max(target.block // across, 1), _elements(target.block, across, "a total")), target)
    # If there are many workers, pieces are short: the input may be as small as a few indices to check.
    part = 2 * block if target.many_workers else block_size(None, max(target.chunk // across, 1), target)
    pieces = Sized(max(part // block, 1) * block, "each worker sums one piece; the pieces are combined in order")
    recorder.do("split", shape.phase, first.name, pieces)
    outer, inner = f"{first.name}o", f"{first.name}i"
    recorder.do("rfactor", shape.phase, outer)
    partial = f"{shape.leaf.targets[0].name}_{outer}"
    kept, reduced, lanes = lane_regular(recorder, Shape(partial, shape.leaf, None, None, rest, shape.reduced), target)
    recorder.do("split", partial, inner, block)
    order = [outer, *kept, f"{inner}o", *reduced, f"{inner}i", *lanes]
    finish_loops(recorder, partial, order, [outer], [f"{inner}i", *lanes])
    _finish_total(recorder, shape, describe(recorder.program, shape.phase).regular, target)


def _finish_total(recorder: Recorder, shape: Shape, domains: tuple[IterDomain, ...], target: Target) -> None:
    """Combines partial results along the first dim, in order: those of an element by one worker."""
    first = domains[0].name
    kept, _, lanes = lane_regular(recorder, Shape(shape.phase, shape.leaf, None, None, domains[1:], shape.reduced), target)
    if target.finish > 1:
        recorder.do("split", shape.phase, first, finished_at_once(shape, width(shape, target) if domains[1:] else 1, target))
        first, lanes = f"{first}o", [f"{first}i", *lanes]
    finish_loops(recorder, shape.phase, [*kept, first, *lanes], kept if target.many_workers else [], lanes)


def finished_at_once(shape: Shape, across: int, target: Target) -> Sized:
    """How many partial results are combined in one block, with `across` elements each."""
    folds = isinstance(shape.leaf, Accumulate) and shape.leaf.reduction.folds
    size = min((min(target.finish, FOLDED) if folds else target.finish) // across, FINISHED)
    return block_size(None, Sized(max(size, 1), "partial results that are combined in one block"), target)


def _schedule_running(recorder: Recorder, shape: Shape, domains: tuple[IterDomain, ...], target: Target) -> None:
    """Schedules a scan along the first dim: block after block, with the other kept dims on the grid."""
    first = domains[0]
    rest = Shape(shape.phase, shape.leaf, None, None, domains[1:], shape.reduced)
    kept, reduced, lanes = lane_regular(recorder, rest, target)
    across = lanes_of(rest.regular[-1], target, target.widest) if rest.regular else 1
    block = Sized(max(target.block // across, 1), _elements(target.block, across, "a scan goes block after block"))
    recorder.do("split", shape.phase, first.name, block_size(None, block, target))
    outer, inner = f"{first.name}o", f"{first.name}i"
    finish_loops(recorder, shape.phase, [*kept, outer, *reduced, inner, *lanes], kept, [inner, *lanes])


def _first_block(shapes: Sequence[Shape], target: Target) -> Sized:
    """How many positions of the first dim are in one block: the same for all phases, so that they can be fused."""
    sizes = []
    for shape in shapes:
        if not shape.is_product:
            inner = shape.regular if shape.component is not None else shape.regular[1:]
            across = lanes_of(inner[-1], target, target.widest) if inner else 1
            sizes.append(target.store_bytes // (across * shape.leaf.targets[0].dtype.itemsize))
    return rounded(Sized(max(min(sizes, default=1), 1), f"{target.store_bytes} bytes are stored at once"), target)


def schedule_product(
    recorder: Recorder,
    shape: Shape,
    target: Target,
    rows: IterDomain | None,
    before: Sequence[str] = (),
    block: str = "",
    grid: int = 99,
) -> None:
    """Schedules a matrix product: rows, columns and depth in blocks, one worker per block of the result. An epilogue has no
    depth.

    `rows` is the domain to split into blocks of rows; a strategy that has already split it passes the name of the `block`.
    `before` names loops that are already outside. The outermost `grid` kept loops go on the grid.
    """
    depth = next((d for d in shape.regular if d.uid in shape.reduced), None)
    others = [d for d in shape.regular if d.uid not in shape.reduced and (rows is None or d.uid != rows.uid)]
    columns = others[-1]
    m, n, k = target.matmul
    least = target.least_matmul
    why = f"blocks of a matrix product are {m} x {n} x {k}"
    recorder.do("split", shape.phase, columns.name, Sized(max(lanes_of(columns, target, n), least), why))
    kept, serial = [*before, *(d.name for d in others[:-1]), f"{columns.name}o"], []
    lanes = [f"{columns.name}i"]
    if depth is not None:
        recorder.do("split", shape.phase, depth.name, Sized(max(lanes_of(depth, target, k), least), why))
        serial, lanes = [f"{depth.name}o"], [*lanes, f"{depth.name}i"]
    if rows is not None:
        recorder.do("split", shape.phase, rows.name, Sized(m, why))
        kept.append(f"{rows.name}o")
        block = f"{rows.name}i"
    lanes = [block, *lanes] if block else lanes
    finish_loops(recorder, shape.phase, [*kept, *serial, *lanes], kept[:grid], lanes)


FEW_BLOCKS, FEW_OF_MANY, LONG_SUM = 32, 128, 4096
"""A row product with fewer blocks of results than this (the second, if there are hundreds of workers) is summed in parts of so
many positions, to occupy all workers."""


def schedule_row_product(recorder: Recorder, shape: Shape, found: RowProduct, target: Target) -> None:
    """Schedules a matrix product that sums over rows: blocks of the result on the grid, each summed over all positions. If all
    rows are summed and the result has few blocks, parts of the rows are summed first, and then combined in order."""
    m, n, k = target.row_product
    if target.many_workers and max(r.dtype.itemsize for r in shape.leaf.values[0].reads) > 2:
        # Matrix units take 16 bits. Other products hold blocks of operands in registers, too.
        n = min(m, n)
    sizes = [max(lanes_of(d, target, most), target.least_matmul) for d, most in ((found.rows, m), (found.columns, n))]
    phase, depth, serial = shape.phase, found.depth.name, list[str]()
    count = prod(-(-(d.extent_expr.value or size) // size) for d, size in zip((found.rows, found.columns), sizes, strict=True))
    if shape.component is None and count < (FEW_OF_MANY if target.many_workers else FEW_BLOCKS):
        recorder.do(
            "split", phase, depth, Sized(LONG_SUM, f"the result has only {count} blocks: parts of the sum occupy all workers")
        )
        recorder.do("rfactor", phase, f"{depth}o")
        phase, serial, depth = f"{shape.leaf.targets[0].name}_{depth}o", [f"{depth}o"], f"{depth}i"
    for domain, size in zip((found.rows.name, found.columns.name, depth), (*sizes, k), strict=True):
        recorder.do("split", phase, domain, Sized(size, f"blocks of a product over rows are {m} x {n} x {k}"))
    inner = {found.rows.name, found.columns.name, found.depth.name}
    others = [d.name for d in shape.domains if d.name not in inner]
    blocks = [f"{found.rows.name}o", f"{found.columns.name}o"]
    grid = [*others, *serial, *blocks]
    lanes = [f"{found.rows.name}i", f"{found.columns.name}i", f"{depth}i"]
    finish_loops(recorder, phase, [*grid, f"{depth}o", *lanes], grid, lanes)
    if serial:
        _finish_total(recorder, shape, describe(recorder.program, shape.phase).regular, target)


def multiplies(program: TileProgram) -> bool:
    """Whether a fusion computes matrix products."""
    return any(shape.is_product or shape.row_product is not None for shape in shapes(program))


def finishes_product(shape: Shape, shapes: Sequence[Shape]) -> bool:
    """Whether a phase is the epilogue of a matrix product: elementwise, over the same elements, so it can share its blocks."""
    if not isinstance(shape.leaf, Store):
        return False
    read = {r.tensor for r in shape.leaf.value.reads if r.index == shape.leaf.index}
    kept = [{d.uid for d in s.domains} - s.reduced for s in shapes if s.is_product and s.leaf.targets[0] in read]
    return bool(kept) and all(uids == {d.uid for d in shape.domains} for uids in kept)


def _meetings(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """The matrix products that meet in one epilogue, and that epilogue."""
    found = []
    for each in shapes:
        if finishes_product(each, shapes):
            read = {r.tensor for r in each.leaf.values[0].reads}
            found.append([*(s for s in shapes if s.is_product and s.leaf.targets[0] in read), each])
    return found


def _of_sums(target: Target, shape: Shape, meetings: Sequence[Sequence[Shape]]) -> Target:
    """The target with blocks of matrix products so narrow that a worker can hold those of all that meet this one."""
    (m, n, k), count = target.matmul, max((len(each) - 1 for each in meetings if shape in each), default=1)
    return target if m * n * count <= target.sums else replace(target, matmul=(m, max(n // count, target.least_matmul), k))


def fuse_neighbours(recorder: Recorder) -> None:
    """Fuses each phase with the one before it, sharing as many loops as is legal. What is fused with a matrix product shares all
    of its grid, so that its blocks remain spread over all workers."""
    k = 1
    while k < len(recorder.program.phases):
        first, second = recorder.program.phases[k - 1], recorder.program.phases[k]
        least = max((_grid_depth(p) for p in (first, second) if _is_blocked(p)), default=1)
        if not any(recorder.attempt("fuse", first.name, second.name, depth) for depth in range(8, least - 1, -1)):
            k += 1


def _is_blocked(phase: Phase) -> bool:
    """Whether a phase computes a matrix product by blocks: three of its loops are lanes."""
    return any(
        sum(loop.kind is LANES for loop in around) > 2 for node, around in walk(phase.body) if isinstance(node, Accumulate)
    )


def _grid_depth(phase: Phase) -> int:
    """The number of nested grid loops."""
    return max((sum(loop.kind is GRID for loop in around) for _, around in walk(phase.body)), default=1)


PhaseBlocks = tuple[tuple[str, int | None], ...]
"""Names of phases, each with its number of positions per block; None if positions are taken one by one."""


class RowLoops(Protocol):
    """The interface of a strategy: how it arranges the loops over components and rows."""

    @property
    def tile(self) -> int | None:
        """How many positions of a row are in one block, if the caller chose it."""

    def per_component(self, recorder: Recorder, shape: Shape) -> tuple[list[str], list[str]]:
        """Arranges a loop over components alone; returns grid loops and lanes."""

    def for_components(self, target: Target) -> Target:
        """The target with the blocks of loops over components alone."""

    def per_row(self, recorder: Recorder, shape: Shape, block: int | None) -> tuple[list[str], list[str], list[str]]:
        """Arranges component and ragged loops; returns grid loops, serial loops and lanes. Remaining loops run inside the grid.

        If `block` is None, positions of a row are taken one by one.
        """

    def product(self, recorder: Recorder, shape: Shape, target: Target) -> None:
        """Arranges a matrix product whose rows are ragged."""

    def cut(self, recorder: Recorder, shape: Shape, block: int | None, target: Target) -> PhaseBlocks:
        """Cuts rows into pieces if the strategy does so; returns the phases left to schedule, and their blocks."""

    def kernel(self, recorder: Recorder, target: Target, lanes: Lanes) -> None:
        """Arranges the loops of a kernel, which are already fused and in order; `lanes` are requested tile sizes."""


def schedule(recorder: Recorder, target: Target, rows: RowLoops, lanes: Lanes | None = None) -> None:
    """Arranges the loops of all phases, then fuses phases with matching loops."""
    if recorder.program.axes:
        rows.kernel(recorder, target, lanes or {})
        return
    if target.rounds_operands:
        round_operands(recorder)
    if target.gathers_operands:
        gather_operands(recorder)
    found = shapes(recorder.program)
    together = contractions(recorder.program, found)
    done = {shape.phase for each in together for shape in each.phases}
    for each in together:
        schedule_contraction(recorder, each, target)
    left = [shape for shape in found if shape.phase not in done]
    target = by_threads(in_columns(target, left), left)
    # All phases over the features of rows that are looked up split them alike, so that they can be fused.
    looked_up = {shape.regular[-1].uid for shape in left if shape.regular and _looks_up(shape)}
    narrow = replace(target, widest=min(target.widest, target.gathered))
    meetings = _meetings(left)
    # Values that contractions need, with or without features, are computed on the same grid of heads.
    heads = frozenset(d.uid for each in together for d in each.outer) if target.column_bytes else frozenset[int]()
    for shape in left:
        own = narrow if any(d.uid in looked_up for d in shape.regular) else target
        _schedule_phase(recorder, shape, left, _of_sums(own, shape, meetings), rows, heads)
    for meeting in meetings:
        recorder.attempt("gather", *(shape.phase for shape in meeting))
    fuse_neighbours(recorder)


def _looks_up(shape: Shape) -> bool:
    """Whether a phase reduces what it reads at indices from memory."""
    reads = (read for value in shape.leaf.values for read in value.reads) if isinstance(shape.leaf, Accumulate) else ()
    return any(isinstance(at, Place) and at.reads for read in reads for at in read.index)


def in_columns(target: Target, shapes: Sequence[Shape]) -> Target:
    """The target with as many lanes for the innermost dim as one worker takes, if all phases over rows keep that dim. The widest
    dtype that is read counts."""
    last = {s.regular[-1].uid if s.regular and s.regular[-1].uid not in s.reduced else None for s in shapes if s.own_rows}
    if not target.column_bytes or len(last) != 1 or None in last or any(s.is_product for s in shapes):
        return target
    reads = (r for s in shapes for v in s.leaf.values for r in v.reads)
    itemsize = max((r.dtype.itemsize for r in reads if last & {d.uid for d in domains_of(r.index)}), default=target.column_bytes)
    return replace(target, widest=min(target.widest, column_lanes(itemsize, target)))


WARP, LOADED = 32, 16
"""Threads of a warp, and the bytes that a thread loads at once."""

MOST_STATES = 2
"""The most states of statistics that every thread keeps."""


def with_threads(program: TileProgram, target: Target, warps: int | None, *, small: bool, look_ups: bool) -> Target:
    """The target with the threads that a plan for this program will have."""
    if not target.factors_blocks or program.axes:
        return target
    return replace(target, threads=WARP * (warps or warps_for(program, target, small=small, look_ups=look_ups)))


def by_threads(target: Target, shapes: Sequence[Shape]) -> Target:
    """The target in whose blocks each thread keeps statistics of the positions that it reads: if rows of features have statistics
    for each column, or rows of numbers have some, such as those of a softmax. Combined in every block, they take exchanges and a
    barrier before the next load can be used. (Softmax of 16 bits: 495 instructions for 64 elements of a thread, not 607.)"""
    found = [s for s in shapes if _has_statistics_by_position(s)]
    # Scans run over one lane, and all phases over rows take the same ones.
    if not target.threads or not found or any(s.is_product or goes_in_order(s.leaf) for s in shapes):
        return target
    if not any(s.regular for s in shapes if s.own_rows):
        # Rows of numbers begin anywhere in memory, so that a thread loads one number at a time.
        return replace(target, at_once=target.threads)
    itemsize = max(read.dtype.itemsize for s in found for v in s.leaf.values for read in v.reads)
    return replace(target, at_once=target.threads * LOADED // (itemsize * max(width(s, target) for s in found)))


def _has_statistics_by_position(shape: Shape) -> bool:
    """Whether a phase reduces rows to statistics that no two columns share. At most two of them: more take the registers that
    loads need. (With three, a variance takes 168 registers instead of 128.)"""
    leaf = shape.leaf
    if not isinstance(leaf, Accumulate) or leaf.merge or not shape.reduces_rows or goes_in_order(leaf):
        return False
    if leaf.reduction.in_block is None or len(leaf.reduction.states) > MOST_STATES:
        return False
    return not any(d.uid in shape.reduced or d.is_ragged for d in shape.regular)


def _of_sixteen_bits(shapes: Sequence[Shape]) -> bool:
    """Whether the elements of rows that a caller passes have 16 bits."""
    rows = [row for s in shapes for row in s.own_rows]
    along = {d.uid for row in rows for d in (row, *(row.definition.inputs if row.definition else ()))}
    reads = [r for s in shapes if s.own_rows for v in s.leaf.values for r in v.reads if r.tensor.role is Role.INPUT]
    found = [r.dtype for r in reads if along & {d.uid for d in domains_of(r.index)}]
    return bool(found) and all(dtype.itemsize == 2 for dtype in found)


def _schedule_phase(
    recorder: Recorder, shape: Shape, shapes: Sequence[Shape], target: Target, rows: RowLoops, outer: frozenset[int]
) -> None:
    by_rows = shape.row_product
    if by_rows is not None:
        schedule_row_product(recorder, shape, by_rows, target)
    elif shape.component is None:
        schedule_regular(recorder, shape, shapes, target)
    elif shape.ragged is None:
        grid, own = rows.per_component(recorder, shape)
        target = rows.for_components(target)
        kept, reduced, lanes = lane_regular(recorder, _left(recorder, shape, [*grid, *own]), target)
        if _moves_rows(shape):
            kept, lanes = _lane_block(recorder, shape, target, kept, lanes)
        if _moves_rows(shape) or target.column_bytes:
            # All positions cost the same, so the kept loops can go on the grid too, which balances a few long rows.
            grid, kept = [*grid, *kept], []
        finish_loops(recorder, shape.phase, [*grid, *kept, *reduced, *own, *lanes], grid, [*own, *lanes])
    elif shape.is_product or finishes_product(shape, shapes):
        rows.product(recorder, shape, target)
    elif _factored_lanes(recorder, shape, target):
        for name in (f"{shape.leaf.targets[0].name}_{shape.regular[-1].name}", shape.phase):
            _schedule_phase(recorder, describe(recorder.program, name), shapes, target, rows, outer)
    else:
        # Inner rows of a product are taken one by one, and so are values with one element per inner row.
        is_line = shape.ragged.uid in _lines(shapes) and not shape.reduces_rows
        block = None if is_line else _positions(rows.tile, shape, shapes, target)
        for phase, size in rows.cut(recorder, shape, block, target):
            _schedule_rows(recorder, replace(shape, phase=phase), target, rows, size, outer)


def _positions(asked: int | None, shape: Shape, shapes: Sequence[Shape], target: Target) -> int:
    """How many positions of a row are in one block: as many as asked for, unless the phase has so many lanes beside them that the
    block would be larger than the target holds."""
    size = block_size(asked, row_block(shape, shapes, target), target)
    return min(size, max(target.largest // width(shape, target), 1))


def _moves_rows(shape: Shape) -> bool:
    """Whether a phase stores elements read at computed indices, as padding does."""
    return isinstance(shape.leaf, Store) and any(isinstance(at, Place) for r in shape.leaf.value.reads for at in r.index)


def _lane_block(
    recorder: Recorder, shape: Shape, target: Target, kept: list[str], lanes: list[str]
) -> tuple[list[str], list[str]]:
    """Makes the last two dims one block if they fit: they are contiguous."""
    if len(shape.regular) < 2 or lanes != [shape.regular[-1].name] or kept[-1:] != [shape.regular[-2].name]:
        return kept, lanes
    across = lanes_of(shape.regular[-1], target, target.widest) * shape.leaf.targets[0].dtype.itemsize
    outer = shape.regular[-2].name
    usual = Sized(max(target.store_bytes // across, 1), f"{target.store_bytes} bytes are stored at once, a position has {across}")
    size = block_size(None, usual, target)
    if size == 1:
        return kept, lanes
    recorder.do("split", shape.phase, outer, size)
    return [*kept[:-1], f"{outer}o"], [f"{outer}i", *lanes]


def _lines(shapes: Sequence[Shape]) -> set[int]:
    """The outer ragged dims of products, by uid."""
    return {s.own_rows[0].uid for s in shapes if len(s.own_rows) > 1}


def _schedule_rows(
    recorder: Recorder, shape: Shape, target: Target, rows: RowLoops, block: int | None, outer: frozenset[int]
) -> None:
    phase, at_once = shape.phase, target.at_once
    grid, serial, own = rows.per_row(recorder, shape, block)
    is_split = block is not None and 1 < at_once < block and len(own) == 1
    if is_split:
        recorder.do("split", phase, own[0], Sized(at_once, "the positions that the threads of a worker read at once"))
        own = [f"{own[0]}o", f"{own[0]}i"]
    rest = _left(recorder, shape, [*grid, *serial, *own])
    # Loops outside the row stay outside: a row is read from start to end.
    outside = _outside(recorder, phase, serial)
    kept, reduced, lanes = lane_regular(recorder, rest, target, outer)
    if target.column_bytes:
        columns = [d.name for d in rest.regular if not d.is_ragged]
        shared = [n for n in kept if n in columns or n.removesuffix("o") in columns]
        grid, kept = [*grid, *shared], [n for n in kept if n not in shared]
    if not shape.reduces_rows:
        first, last = [n for n in kept if n in outside], [n for n in kept if n not in outside]
        finish_loops(recorder, phase, [*grid, *first, *serial, *last, *reduced, *own, *lanes], grid, [*own, *lanes])
        return
    first, last = [n for n in reduced if n in outside], [n for n in reduced if n not in outside]
    order = [*grid, *kept, *first, *serial, *last, *own, *lanes]
    if not target.factors_blocks or not (_is_simple(shape.leaf) or is_split) or goes_in_order(shape.leaf):
        finish_loops(recorder, phase, order, grid, [*own, *lanes])
        return
    # Each lane, or thread, reduces its own elements; they are combined once, after the loop over the row.
    gone = [n for n in lanes if n in _reduced_names(recorder, phase)]
    apart = [*(own if is_split else own[-1:]), *gone] if _is_simple(shape.leaf) else own[-1:]
    recorder.do("rfactor", phase, *apart)
    finish_loops(recorder, f"{_first_target(recorder, phase)}_{'_'.join(apart)}", order, grid, [*own, *lanes])
    left = loop_names(recorder, phase)
    still = [name for name in serial if name in left]
    finish_loops(recorder, phase, [*grid, *kept, *still, *(n for n in own if n in left), *lanes], grid, [*own, *lanes])


def _is_simple(leaf: Accumulate | Scan | Store) -> bool:
    """Whether a statement reduces elements so that lanes can keep partial results: others combine a whole block at once."""
    return isinstance(leaf, Accumulate) and not leaf.merge and leaf.reduction.in_block is None


def _has_states(leaf: Accumulate | Scan | Store) -> bool:
    """Whether a statement reduces several states together."""
    return isinstance(leaf, Accumulate) and leaf.reduction.operator is None


def _left(recorder: Recorder, shape: Shape, arranged: Sequence[str]) -> Shape:
    """A description of the loops of a phase that the strategy has not arranged."""
    found = chain(next(p for p in recorder.program.phases if p.name == shape.phase))
    assert found is not None
    domains = [loop.domain for loop in found[0]]
    rest = tuple(d for d in domains if d.name not in arranged)
    return Shape(shape.phase, found[1], None, None, rest, reduced_loops(found[1], domains))


def _outside(recorder: Recorder, phase: str, serial: Sequence[str]) -> list[str]:
    """The loops outside the loop over a row."""
    order = loop_names(recorder, phase)
    return order[: order.index(serial[0])]


def _reduced_names(recorder: Recorder, phase: str) -> set[str]:
    """The names of the loops that a phase reduces."""
    found = chain(next(p for p in recorder.program.phases if p.name == phase))
    assert found is not None
    domains = [loop.domain for loop in found[0]]
    return {d.name for d in domains if d.uid in reduced_loops(found[1], domains)}


def _first_target(recorder: Recorder, phase: str) -> str:
    return describe(recorder.program, phase).leaf.targets[0].name


def _factored_lanes(recorder: Recorder, shape: Shape, target: Target) -> bool:
    """Reduces rows first and the innermost dim once at the end, instead of across lanes in every block."""
    if not shape.regular or not isinstance(shape.leaf, Accumulate) or shape.leaf.merge or not shape.reduces_rows:
        return False
    if target.factors_blocks:
        # Lanes of all dims keep their own partial results, and are combined together.
        return False
    last = shape.regular[-1]
    return last.uid in shape.reduced and recorder.attempt("rfactor", shape.phase, last.name)
