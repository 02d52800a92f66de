"""maskless: one worker for each row, which runs over exactly that row.

for c:  for r[c]: s   ->   grid c:  serial ro:  lanes ri: s       (ro ends with the row; only the last block has holes)
"""

from __future__ import annotations

from serrate.ir.tile import TileProgram
from serrate.ir.values import Role
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


def maskless(program: TileProgram, target: Target, tile: int | None = None, keep_rows: bool | None = None) -> Plan:
    """A plan with rows on the grid; `tile` overrides how many positions of a row are one block."""
    recorder = Recorder(program)
    prepare(recorder)
    keep = target.keeps_rows if keep_rows is None else keep_rows
    if keep:
        _keep_rows(recorder)
    shapes = [describe(recorder.program, p.name) for p in recorder.program.phases]
    for shape in shapes:
        _schedule(recorder, shape, shapes, target, tile)
    fuse_neighbours(recorder)
    if keep and _shares_rows(recorder.program):
        return maskless(program, target, tile, keep_rows=False)
    return recorder.plan("maskless", 8 if target.power_of_two else 4)


def _shares_rows(program: TileProgram) -> bool:
    """Whether a row that is private to a worker is needed by another launch."""
    private = {t for p in program.phases for t in p.writes if t.role is Role.PRIVATE}
    return any(sum(1 for p in program.phases if t in p.writes | p.reads) > 1 for t in private)


def _keep_rows(recorder: Recorder) -> None:
    """Softmax statistics in two passes where a later phase needs the same exponentials: they are kept, not computed again."""
    for phase in [p.name for p in recorder.program.phases]:
        shape = describe(recorder.program, phase)
        if shape.reduces_rows and not any(d.uid in shape.reduced for d in shape.regular):
            recorder.attempt("two_pass", phase)


def _schedule(recorder: Recorder, shape: Shape, shapes: list[Shape], target: Target, tile: int | None) -> None:
    if shape.component is None:
        schedule_regular(recorder, shape, shapes, target)
        return
    row = [shape.component.name]
    if shape.is_product and shape.ragged is not None:
        schedule_product(recorder, shape, target, rows=shape.ragged, before=row, grid=2)
        return
    if shape.ragged is not None and shape.regular and factor_lanes(recorder, shape, shape.regular[-1].name):
        suffix = shape.regular[-1].name
        first = f"{shape.leaf.targets[0].name}_{suffix}"
        _schedule(recorder, describe(recorder.program, first), shapes, target, tile)
        shape = describe(recorder.program, shape.phase)
    kept, reduced, lanes = lane_regular(recorder, shape, target)
    if shape.ragged is None:
        finish_loops(recorder, shape.phase, [*row, *kept, *reduced, *lanes], row, lanes)
        return
    recorder.do("split", shape.phase, shape.ragged.name, block_size(tile, row_block(shape, shapes, target), target))
    outer, inner = f"{shape.ragged.name}o", f"{shape.ragged.name}i"
    order = [*row, *kept, outer, *reduced] if shape.reduces_rows else [*row, outer, *kept, *reduced]
    finish_loops(recorder, shape.phase, [*order, inner, *lanes], row, [inner, *lanes])
