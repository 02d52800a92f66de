"""persistent_dynamic: rows are cut into pieces, and all workers share one flat work list of pieces.

    for c: for r[c]: s  ->  (o, q) = split r;  grid t = combine(c, o):  serial qo:  lanes qi: s
A reduction over a cut row leaves one partial result per piece. A later phase combines them in order, so results do not depend on
which worker processed which piece. In a product of two ragged dims, the kept dim is cut, which leaves no partial results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from serrate.errors import ScheduleError
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.tile import Accumulate, Scan, TileProgram
from serrate.schedule.plan import Plan, Recorder, Sized
from serrate.schedule.prepare import Shape, describe, prepare
from serrate.schedule.row_work import RowWork
from serrate.schedule.short_rows import by_length, piece_size
from serrate.schedule.strategies.common import (
    PhaseBlocks,
    block_size,
    finish_loops,
    finished_at_once,
    for_look_ups,
    in_columns,
    lane_regular,
    loop_names,
    multiplies,
    schedule,
    schedule_product,
    shapes,
    stages_for,
    sums_look_ups,
    warps_for,
    width,
    with_threads,
    work_of,
)
from serrate.schedule.strategies.kernels import Lanes, pieces_of_rows
from serrate.schedule.strategies.masked import masked
from serrate.schedule.strategies.maskless import maskless
from serrate.schedule.target import Target

LINE = 512
"""Assumed length of the inner rows of a product, where a piece consists of whole inner rows."""

UNCUT = 2
"""The longest row that a GPU leaves whole, in multiples of the elements of a piece: a worker finishes it before all others are
done. One, if workers share the columns of a row or its elements have 16 bits. (On an H200, in percent of a copy's speed,
with exponential and Zipf lengths: softmax 79 and 60, and 81 and 60 with one; layer norm of 16 bits 62 and 52, and 65 and 57 with
one, of 32 bits 76 and 57, and 75 and 57 with one.)"""

FINISH = (128, 16)
"""The partial results and columns of a block in which a GPU combines them. If there is one long row, many workers should share
its columns. (With 64 columns, it took 57 microseconds to finish a row of a thousand pieces.)"""

GROUP_WARPS = 4
"""Warps of a program for a group of short rows: a thread holds few numbers, so that many programs wait for memory at once."""


def persistent_dynamic(
    program: TileProgram,
    target: Target,
    tile: int | None = None,
    chunk: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    lanes: Lanes | None = None,
    rows: int | None = None,
    uncut: int | None = None,
    short_tile: int | None = None,
    resident: int | None = None,
) -> Plan:
    """A plan with pieces of rows on the grid; a piece has `chunk` positions, a block `tile` of them. On a GPU, `tile` is also the
    number of rows of a block of a matrix product. Rows of up to `uncut` positions stay whole, in blocks of `short_tile`, and
    can be processed in groups of `rows`. `resident` programs of a matrix product run on each multiprocessor of a GPU."""
    if resident:
        _require_products(program, target)
        if rows or uncut or short_tile:
            raise ScheduleError("resident= keeps all rows in one work list: rows=, uncut= and short_tile= do not apply to it")
        return replace(_pieces(program, target, tile, chunk, warps, stages, lanes), resident=resident)
    if program.axes:
        return _pieces(program, target, tile, chunk, warps, stages, lanes)
    # On a GPU, short rows have separate programs: one program for both kinds of rows would need the registers of both.
    apart = target.many_workers
    try:
        plan = _pieces(program, target, tile, chunk, warps, stages, lanes, apart=apart, uncut=uncut)
        short = short_tile or tile
        return _with_short_rows(plan, program, target, short, warps, stages, rows if apart else None)
    except ScheduleError:
        return _pieces(program, target, tile, chunk, warps, stages, lanes)


def _pieces(
    program: TileProgram,
    target: Target,
    tile: int | None,
    chunk: int | None,
    warps: int | None,
    stages: int | None,
    lanes: Lanes | None,
    *,
    apart: bool = False,
    uncut: int | None = None,
) -> Plan:
    """A plan with pieces of all rows on the grid; with `apart`, only of rows of more than `uncut` positions."""
    recorder = Recorder(program)
    prepare(recorder)
    work = work_of(recorder.program)
    small, target = target.factors_blocks and work.halvings > 0, work.in_blocks(target, pieces=apart)
    look_ups = target.many_workers and sums_look_ups(shapes(recorder.program))
    target = for_look_ups(target) if look_ups else target
    whole, target = target, in_columns(target, shapes(recorder.program))
    across = max((width(s, target) for s in shapes(recorder.program)), default=1)
    shares = target.widest < whole.widest
    # Workers that share the columns of a row take shorter pieces of it.
    elements = target.chunk // 2 if shares else target.chunk
    piece = block_size(chunk, max(elements // across, 1), target)
    if tile and target.many_workers:
        most, columns, depth = target.matmul
        block = min(max(block_size(tile, most, target), target.least_matmul), most)
        target = replace(target, matmul=(block, columns, depth))
    whole_rows = (
        (uncut or (piece if chunk else _longest(elements, shares, work, whole, shapes(recorder.program)))) if apart else 0
    )
    finish = replace(target, widest=min(target.widest, FINISH[1]), finish=math.prod(FINISH)) if shares and apart else target
    target = with_threads(recorder.program, target, warps, small=small, look_ups=look_ups)
    schedule(recorder, target, PiecesOfRows(tile, piece, chunk, whole_rows, finish), lanes)
    warps = warps or warps_for(program, target, small=small, look_ups=look_ups)
    stages = stages or stages_for(program, target, look_ups=look_ups)
    return recorder.plan("persistent_dynamic", warps, stages, combines_lanes=look_ups)


def _longest(elements: int, shares: bool, work: RowWork, target: Target, phases: Sequence[Shape]) -> int:
    """The positions of the longest row that is left whole. `target` has the columns of workers that take whole rows."""
    columns = in_columns(work.in_narrow_columns(target), phases)
    across = max((width(s, columns) for s in phases), default=1)
    return max(elements * (1 if shares or work.sixteen_bits else UNCUT) // across, 1)


def _with_short_rows(
    plan: Plan,
    program: TileProgram,
    target: Target,
    tile: int | None,
    warps: int | None,
    stages: int | None,
    rows: int | None,
) -> Plan:
    """The plan, with a plan for rows that it leaves whole: in groups of `rows`, or one by one. Raises unless all phases run by
    rows."""
    pieces = plan.apply(program)
    most = longest_whole(plan, pieces)
    short = maskless(program, target, tile, warps=warps, stages=stages, short=True, pivots=True)
    if rows:
        with suppress(ScheduleError):
            short = masked(program, target, max(target.grouped // rows, 1), rows, GROUP_WARPS, most=most)
    by_length(short.apply(program), pieces, most)
    return replace(plan, short=short, most=most)


def _require_products(program: TileProgram, target: Target) -> None:
    """Raises if resident programs are not possible."""
    if not target.many_workers:
        raise ScheduleError("resident= is for GPUs: on a CPU, each thread computes many blocks anyway")
    if program.axes:
        raise ScheduleError("resident= is not supported for kernels: leave it out")
    if not multiplies(program):
        raise ScheduleError("resident= is for matrix products, and this program computes none")


def longest_whole(plan: Plan, pieces: TileProgram) -> int:
    """The positions of the longest row that a plan leaves whole: as it says, or those of a piece."""
    left = {step.args[2] for step in plan.steps if step.primitive == "long_only"}
    return int(left.pop()) if len(left) == 1 else piece_size(pieces)


def _cut_rows(shape: Shape) -> RaggedIterDomain | None:
    """The rows to cut; None if they stay whole, because a scan runs along them or their partial results are combined in order. Of
    a product, the outermost dim that is kept, so that no two pieces contribute to one result."""
    if isinstance(shape.leaf, Accumulate) and shape.leaf.merge:
        return None
    kept = [rows for rows in shape.own_rows if rows.uid not in shape.reduced]
    if kept:
        return kept[0]
    return None if isinstance(shape.leaf, Scan) else shape.own_rows[0]


@dataclass(frozen=True)
class PiecesOfRows:
    """A work list of the pieces of all rows on the grid; a worker runs through its piece in blocks."""

    tile: int | None
    piece: int
    asked: int | None
    """The size of a piece, if the caller chose it."""
    uncut: int = 0
    """Rows of up to so many positions are left to another plan."""
    finish: Target | None = None
    """The target with the blocks in which partial results are combined."""

    def for_components(self, target: Target) -> Target:
        return self.finish or target

    def per_component(self, recorder: Recorder, shape: Shape) -> tuple[list[str], list[str]]:
        assert shape.component is not None
        return [shape.component.name], []

    def cut(self, recorder: Recorder, shape: Shape, block: int | None, target: Target) -> PhaseBlocks:
        rows = _cut_rows(shape)
        if rows is None:
            return ((shape.phase, block),)
        # A piece consists of whole blocks; otherwise its last block would reach into the next piece.
        size = self._lines if rows is not shape.ragged or block is None else -(-self.piece // block) * block
        recorder.do("split", shape.phase, rows.name, Sized(size, "an entry of the work list: enough work for one worker"))
        if self.uncut:
            recorder.do("long_only", shape.phase, f"{rows.name}o", self.uncut)
        if rows.uid not in shape.reduced:
            return ((shape.phase, block),)
        recorder.do("rfactor", shape.phase, self._outer(rows))
        self._finish(recorder, describe(recorder.program, shape.phase), target)
        pieces = [f"{t.name}_{self._outer(rows)}" for t in shape.leaf.targets]
        if target.keeps_rows and recorder.attempt("two_pass", pieces[0]):
            # Both passes read the piece, which stays in cache, so blocks can be as large as the piece.
            whole = Sized(size, "the whole piece: it stays in cache for the second pass")
            return tuple((piece, block if self.tile else whole) for piece in pieces)
        return ((pieces[0], block),)

    def kernel(self, recorder: Recorder, target: Target, lanes: Lanes) -> None:
        pieces_of_rows(recorder, target, lanes, self.asked)

    def _outer(self, rows: RaggedIterDomain) -> str:
        """The name of the loop over the pieces of a row."""
        return f"{rows.name}or" if self.uncut else f"{rows.name}o"

    @property
    def _lines(self) -> int:
        """How many inner rows of a product make a piece. Their length differs between components."""
        return max(self.piece // LINE, 1)

    def per_row(self, recorder: Recorder, shape: Shape, block: int | None) -> tuple[list[str], list[str], list[str]]:
        assert shape.component is not None and shape.ragged is not None
        row, ragged, rows = shape.component.name, shape.ragged.name, _cut_rows(shape)
        within = f"{ragged}i" if rows is shape.ragged else ragged
        serial, lanes = [within], []
        if block is not None:
            recorder.do("split", shape.phase, within, block)
            serial, lanes = [f"{within}o"], [f"{within}i"]
        if rows is None:
            return [row], serial, lanes
        self._beside(recorder, shape.phase, row, self._outer(rows))
        recorder.do("combine", shape.phase, row, self._outer(rows))
        return [f"{row}{self._outer(rows)}"], serial, lanes

    def product(self, recorder: Recorder, shape: Shape, target: Target) -> None:
        assert shape.component is not None and shape.ragged is not None
        row, ragged = shape.component.name, shape.ragged.name
        if self.uncut:
            raise ScheduleError("a product is cut into blocks, not into short and long rows")
        recorder.do(
            "split", shape.phase, ragged, Sized(target.matmul[0], "an entry of the work list is a block of a matrix product")
        )
        self._beside(recorder, shape.phase, row, f"{ragged}o")
        recorder.do("combine", shape.phase, row, f"{ragged}o")
        schedule_product(recorder, shape, target, rows=None, before=[f"{row}{ragged}o"], block=f"{ragged}i")

    def _beside(self, recorder: Recorder, phase: str, row: str, pieces: str) -> None:
        """Moves the loop over pieces right inside the one over rows."""
        names = loop_names(recorder, phase)
        order = [n for n in names if n != pieces]
        order.insert(order.index(row) + 1, pieces)
        if order != names:
            recorder.do("reorder", phase, *order)

    def _finish(self, recorder: Recorder, shape: Shape, target: Target) -> None:
        """Combines the partial results of a row, in order."""
        assert shape.component is not None and shape.ragged is not None
        target = self.for_components(target)
        kept, reduced, lanes = lane_regular(recorder, shape, target)
        row, pieces = shape.component.name, shape.ragged.name
        serial = pieces
        if target.finish > 1:
            recorder.do("split", shape.phase, pieces, finished_at_once(shape, width(shape, target), target))
            serial, lanes = f"{pieces}o", [f"{pieces}i", *lanes]
        grid = [row, *kept] if target.column_bytes else [row]
        finish_loops(recorder, shape.phase, [row, *kept, serial, *reduced, *lanes], grid, lanes)
