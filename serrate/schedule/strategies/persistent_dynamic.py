"""persistent_dynamic: rows are cut into parts, and one flat list of parts is shared by all workers.

    for c: for r[c]: s  ->  (o, q) = split r;  grid t = combine(c, o):  serial qo:  lanes qi: s
A reduction over a cut row leaves one partial result for each part; a later phase finishes them, in the order of the parts,
so results do not depend on who computed what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serrate.ir.tile import Accumulate, Scan, TileProgram
from serrate.schedule.plan import Plan, Recorder
from serrate.schedule.prepare import Shape, describe, prepare
from serrate.schedule.strategies.common import (
    block_size,
    finish_loops,
    lane_regular,
    loop_names,
    schedule,
    schedule_product,
    warps_for,
    width,
)
from serrate.schedule.target import Target


def persistent_dynamic(
    program: TileProgram, target: Target, tile: int | None = None, chunk: int | None = None, warps: int | None = None
) -> Plan:
    """A plan with parts of rows on the grid; `chunk` positions are one part, `tile` of them one block."""
    recorder = Recorder(program)
    prepare(recorder)
    across = max((width(describe(recorder.program, p.name), target) for p in recorder.program.phases), default=1)
    part = block_size(chunk, max(target.chunk // across, 1), target)
    # Parts are short enough that large blocks would leave most of their lanes without work.
    simple_block = target.block if target.simple_block else 0
    schedule(recorder, replace(target, simple_block=simple_block), PartsOfRows(tile, part))
    return recorder.plan("persistent_dynamic", warps or warps_for(program, target))


def _stays_whole(shape: Shape) -> bool:
    """Whether rows are not cut: a running value goes from part to part, partial results are combined in order, and what is
    reduced for each of other rows would need a place for each part of those."""
    if shape.reduces_rows and shape.has_other_rows:
        return True
    return isinstance(shape.leaf, Scan) or (isinstance(shape.leaf, Accumulate) and shape.leaf.merge)


@dataclass(frozen=True)
class PartsOfRows:
    """One list of the parts of all rows on the grid, a part serially in blocks."""

    tile: int | None
    part: int

    def per_component(self, recorder: Recorder, shape: Shape) -> tuple[list[str], list[str]]:
        assert shape.component is not None
        return [shape.component.name], []

    def cut(self, recorder: Recorder, shape: Shape, block: int, target: Target) -> str:
        assert shape.ragged is not None
        ragged = shape.ragged.name
        if _stays_whole(shape):
            return shape.phase
        # A part is whole blocks, or its last block would reach into the next part.
        recorder.do("split", shape.phase, ragged, -(-self.part // block) * block)
        if not shape.reduces_rows:
            return shape.phase
        recorder.do("rfactor", shape.phase, f"{ragged}o")
        self._finish(recorder, describe(recorder.program, shape.phase), target)
        return f"{shape.leaf.targets[0].name}_{ragged}o"

    def per_row(self, recorder: Recorder, shape: Shape, block: int) -> tuple[list[str], list[str], list[str]]:
        assert shape.component is not None and shape.ragged is not None
        row, ragged = shape.component.name, shape.ragged.name
        if _stays_whole(shape):
            recorder.do("split", shape.phase, ragged, block)
            return [row], [f"{ragged}o"], [f"{ragged}i"]
        recorder.do("split", shape.phase, f"{ragged}i", block)
        self._beside(recorder, shape.phase, row, f"{ragged}o")
        recorder.do("combine", shape.phase, row, f"{ragged}o")
        return [f"{row}{ragged}o"], [f"{ragged}io"], [f"{ragged}ii"]

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
            recorder.do("split", shape.phase, parts, block_size(None, max(target.finish // width(shape, target), 1), target))
            serial, lanes = f"{parts}o", [f"{parts}i", *lanes]
        finish_loops(recorder, shape.phase, [row, *kept, serial, *reduced, *lanes], [row], lanes)
