"""masked: several rows at once, as far as the longest of them.

for c: for r[c]: s  ->  grid co: serial xo: lanes ci, xi: s where r < length[c]      (x covers the rows of a group)
"""

from __future__ import annotations

from serrate.ir.tile import TileProgram
from serrate.schedule.plan import Plan, Recorder
from serrate.schedule.prepare import Shape, describe, prepare
from serrate.schedule.strategies.common import (
    block_size,
    factor_lanes,
    finish_loops,
    fuse_neighbours,
    lane_regular,
    row_block,
    schedule_product,
    schedule_regular,
)
from serrate.schedule.target import Target


def masked(program: TileProgram, target: Target, tile: int | None = None, rows: int | None = None) -> Plan:
    """A plan with groups of `rows` rows on the grid, each row one lane."""
    recorder = Recorder(program)
    prepare(recorder)
    shapes = [describe(recorder.program, p.name) for p in recorder.program.phases]
    for shape in shapes:
        _schedule(recorder, shape, shapes, target, tile, block_size(rows, target.rows_together, target))
    fuse_neighbours(recorder)
    return recorder.plan("masked", 8 if target.power_of_two else 4)


def _schedule(recorder: Recorder, shape: Shape, shapes: list[Shape], target: Target, tile: int | None, rows: int) -> None:
    if shape.component is None:
        schedule_regular(recorder, shape, shapes, target)
        return
    name = shape.component.name
    if shape.is_product and shape.ragged is not None:
        # Rows of a group have different weights: a product's lanes are the rows of one component, whole groups serial.
        schedule_product(recorder, shape, target, rows=shape.ragged, before=[name], grid=2)
        return
    if shape.ragged is not None and shape.regular and factor_lanes(recorder, shape, shape.regular[-1].name):
        first = f"{shape.leaf.targets[0].name}_{shape.regular[-1].name}"
        _schedule(recorder, describe(recorder.program, first), shapes, target, tile, rows)
        shape = describe(recorder.program, shape.phase)
    kept, reduced, lanes = lane_regular(recorder, shape, target)
    recorder.do("split", shape.phase, name, rows)
    group, member = f"{name}o", f"{name}i"
    if shape.ragged is None:
        finish_loops(recorder, shape.phase, [group, *kept, *reduced, member, *lanes], [group], [member, *lanes])
        return
    recorder.do("cover", shape.phase, shape.ragged.name, group, rows)
    cover = f"{shape.ragged.name}x"
    size = block_size(tile, max(row_block(shape, shapes, target) // rows, 1), target)
    recorder.do("split", shape.phase, cover, size)
    outer, inner = f"{cover}o", f"{cover}i"
    order = [group, *kept, outer, *reduced] if shape.reduces_rows else [group, outer, *kept, *reduced]
    finish_loops(recorder, shape.phase, [*order, member, inner, *lanes], [group], [member, inner, *lanes])
