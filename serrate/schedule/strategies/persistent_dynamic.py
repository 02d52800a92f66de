"""persistent_dynamic: rows are cut into parts, and one flat list of parts is shared by all workers.

    for c: for r[c]: s  ->  (o, q) = split r;  grid t = combine(c, o):  serial qo:  lanes qi: s
A reduction over a cut row leaves one partial result for each part; a later phase finishes them, in the order of the parts,
so results do not depend on who computed what. Of a rectangle, the side that is kept is cut: then nothing is partial.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serrate.errors import ScheduleError
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.tile import Accumulate, Scan, TileProgram
from serrate.schedule.plan import Plan, Recorder
from serrate.schedule.prepare import Shape, describe, prepare
from serrate.schedule.short_rows import by_length, longest_part
from serrate.schedule.strategies.common import (
    Pieces,
    block_size,
    finish_loops,
    lane_regular,
    loop_names,
    schedule,
    schedule_product,
    shapes,
    warps_for,
    width,
)
from serrate.schedule.strategies.kernels import Lanes, parts_of_rows
from serrate.schedule.strategies.maskless import maskless
from serrate.schedule.target import Target

LINE = 512
"""About how long a line of a rectangle is, where parts are made of whole lines."""

FOLDED = 64
"""Elements of partial results that are combined at once by a fold, which takes the longer the more lanes it has."""


def persistent_dynamic(
    program: TileProgram,
    target: Target,
    tile: int | None = None,
    chunk: int | None = None,
    warps: int | None = None,
    lanes: Lanes | None = None,
) -> Plan:
    """A plan with parts of rows on the grid; `chunk` positions are one part, `tile` of them one block."""
    recorder = Recorder(program)
    prepare(recorder)
    across = max((width(s, target) for s in shapes(recorder.program)), default=1)
    part = block_size(chunk, max(target.chunk // across, 1), target)
    # Parts are short enough that large blocks would leave most of their lanes without work.
    simple_block = target.block if target.simple_block else 0
    schedule(recorder, replace(target, simple_block=simple_block), PartsOfRows(tile, part, chunk), lanes)
    plan = recorder.plan("persistent_dynamic", warps or warps_for(program, target))
    return _with_short_rows(plan, program, target, tile) if target.keeps_rows and not program.axes else plan


def _with_short_rows(plan: Plan, program: TileProgram, target: Target, tile: int | None) -> Plan:
    """The plan with rows that are one part done as a whole, where all it does is done row by row."""
    parts, short = plan.apply(program), maskless(program, target, tile)
    try:
        by_length(short.apply(program), parts)
    except ScheduleError:
        return plan
    return replace(plan, short=short, most=longest_part(parts))


def _cut_rows(shape: Shape) -> RaggedIterDomain | None:
    """Which rows are cut; None where they stay whole, because a running value goes from part to part, or because partial
    results are combined in order. Of a rectangle, the outer side that is kept, so that parts do not share results."""
    if isinstance(shape.leaf, Accumulate) and shape.leaf.merge:
        return None
    kept = [rows for rows in shape.own_rows if rows.uid not in shape.reduced]
    if kept:
        return kept[0]
    return None if isinstance(shape.leaf, Scan) else shape.own_rows[0]


@dataclass(frozen=True)
class PartsOfRows:
    """One list of the parts of all rows on the grid, a part serially in blocks."""

    tile: int | None
    part: int
    asked: int | None
    """The size of a part, if the caller said so."""

    def per_component(self, recorder: Recorder, shape: Shape) -> tuple[list[str], list[str]]:
        assert shape.component is not None
        return [shape.component.name], []

    def cut(self, recorder: Recorder, shape: Shape, block: int | None, target: Target) -> Pieces:
        rows = _cut_rows(shape)
        if rows is None:
            return ((shape.phase, block),)
        # A part is whole blocks, or its last block would reach into the next part.
        size = self._lines if rows is not shape.ragged or block is None else -(-self.part // block) * block
        recorder.do("split", shape.phase, rows.name, size)
        if rows.uid not in shape.reduced:
            return ((shape.phase, block),)
        recorder.do("rfactor", shape.phase, f"{rows.name}o")
        self._finish(recorder, describe(recorder.program, shape.phase), target)
        parts = [f"{t.name}_{rows.name}o" for t in shape.leaf.targets]
        if target.keeps_rows and recorder.attempt("two_pass", parts[0]):
            # What is read twice is the part, which is near enough, so blocks of it need not be.
            return tuple((part, block if self.tile else size) for part in parts)
        return ((parts[0], block),)

    def kernel(self, recorder: Recorder, target: Target, lanes: Lanes) -> None:
        parts_of_rows(recorder, target, lanes, self.asked)

    @property
    def _lines(self) -> int:
        """Lines of a rectangle that are one part; how long each is differs from one rectangle to the next."""
        return max(self.part // LINE, 1)

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
        self._beside(recorder, shape.phase, row, f"{rows.name}o")
        recorder.do("combine", shape.phase, row, f"{rows.name}o")
        return [f"{row}{rows.name}o"], serial, lanes

    def product(self, recorder: Recorder, shape: Shape, target: Target) -> None:
        assert shape.component is not None and shape.ragged is not None
        row, ragged = shape.component.name, shape.ragged.name
        recorder.do("split", shape.phase, ragged, target.matmul[0])
        self._beside(recorder, shape.phase, row, f"{ragged}o")
        recorder.do("combine", shape.phase, row, f"{ragged}o")
        schedule_product(recorder, shape, target, rows=None, before=[f"{row}{ragged}o"], block=f"{ragged}i")

    def _beside(self, recorder: Recorder, phase: str, row: str, parts: str) -> None:
        """Brings the loop over parts right inside the one over rows, where another loop stands between them."""
        names = loop_names(recorder, phase)
        order = [n for n in names if n != parts]
        order.insert(order.index(row) + 1, parts)
        if order != names:
            recorder.do("reorder", phase, *order)

    def _finish(self, recorder: Recorder, shape: Shape, target: Target) -> None:
        """Combines the partial results of a row, in order."""
        assert shape.component is not None and shape.ragged is not None
        kept, reduced, lanes = lane_regular(recorder, shape, target)
        row, parts = shape.component.name, shape.ragged.name
        serial = parts
        if target.finish > 1:
            folds = isinstance(shape.leaf, Accumulate) and shape.leaf.reduction.folds
            size = (min(target.finish, FOLDED) if folds else target.finish) // width(shape, target)
            recorder.do("split", shape.phase, parts, block_size(None, max(size, 1), target))
            serial, lanes = f"{parts}o", [f"{parts}i", *lanes]
        finish_loops(recorder, shape.phase, [row, *kept, serial, *reduced, *lanes], [row], lanes)
