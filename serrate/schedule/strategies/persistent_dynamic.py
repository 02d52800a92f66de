"""persistent_dynamic: rows are cut into parts, and one flat list of parts is shared by all workers.

    for c: for r[c]: s  ->  (o, q) = split r;  grid t = combine(c, o):  serial qo:  lanes qi: s
A reduction over a cut row leaves one partial result for each part; a later phase finishes them, in the order of the parts,
so results do not depend on who computed what.
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
    loop_names,
    row_block,
    schedule_product,
    schedule_regular,
    width,
)
from serrate.schedule.target import Target, power_of_two_at_least


def persistent_dynamic(program: TileProgram, target: Target, tile: int | None = None, chunk: int | None = None) -> Plan:
    """A plan with parts of rows on the grid; `chunk` positions are one part, `tile` of them one block."""
    recorder = Recorder(program)
    prepare(recorder)
    shapes = [describe(recorder.program, p.name) for p in recorder.program.phases]
    for shape in shapes:
        _schedule(recorder, shape, shapes, target, tile, chunk)
    fuse_neighbours(recorder)
    return recorder.plan("persistent_dynamic", 8 if target.power_of_two else 4)


def _schedule(recorder: Recorder, shape: Shape, shapes: list[Shape], target: Target, tile: int | None, chunk: int | None) -> None:
    if shape.component is None:
        schedule_regular(recorder, shape, shapes, target)
        return
    row = shape.component.name
    if shape.ragged is None:
        kept, reduced, lanes = lane_regular(recorder, shape, target)
        finish_loops(recorder, shape.phase, [row, *kept, *reduced, *lanes], [row], lanes)
        return
    if shape.is_product:
        _schedule_product(recorder, shape, target)
        return
    if shape.regular and factor_lanes(recorder, shape, shape.regular[-1].name):
        first = f"{shape.leaf.targets[0].name}_{shape.regular[-1].name}"
        _schedule(recorder, describe(recorder.program, first), shapes, target, tile, chunk)
        _schedule(recorder, describe(recorder.program, shape.phase), shapes, target, tile, chunk)
        return
    block = block_size(tile, row_block(shape, shapes, target), target)
    part = max(chunk or target.chunk // max(width(s, target) for s in shapes), 1)
    part = power_of_two_at_least(part) if target.power_of_two else part
    block = min(block, part)
    # A part must be whole blocks, or its last block would reach into the next part.
    part = -(-part // block) * block
    ragged = shape.ragged.name
    outer, inner = f"{ragged}o", f"{ragged}i"
    recorder.do("split", shape.phase, ragged, part)
    phase = shape.phase
    if shape.reduces_rows:
        recorder.do("rfactor", phase, outer)
        _finish(recorder, describe(recorder.program, phase), target)
        phase = f"{shape.leaf.targets[0].name}_{outer}"
    partial = Shape(phase, shape.leaf, shape.component, shape.ragged, shape.regular, shape.reduced)
    kept, reduced, lanes = lane_regular(recorder, partial, target)
    recorder.do("split", phase, inner, block)
    recorder.do("combine", phase, row, outer)
    parts = f"{row}{outer}"
    serial, lane = f"{inner}o", f"{inner}i"
    order = [parts, *kept, serial, *reduced] if shape.reduces_rows else [parts, serial, *kept, *reduced]
    finish_loops(recorder, phase, [*order, lane, *lanes], [parts], [lane, *lanes])


def _finish(recorder: Recorder, shape: Shape, target: Target) -> None:
    """Combines the partial results of a row, in order."""
    assert shape.component is not None and shape.ragged is not None
    kept, reduced, lanes = lane_regular(recorder, shape, target)
    row, parts = shape.component.name, shape.ragged.name
    if target.finish > 1:
        recorder.do("split", shape.phase, parts, target.finish)
        order = [row, *kept, f"{parts}o", *reduced, f"{parts}i", *lanes]
        finish_loops(recorder, shape.phase, order, [row], [f"{parts}i", *lanes])
    else:
        finish_loops(recorder, shape.phase, [row, *kept, parts, *reduced, *lanes], [row], lanes)


def _schedule_product(recorder: Recorder, shape: Shape, target: Target) -> None:
    """Blocks of rows of all components in one list; columns beside it on the grid."""
    assert shape.component is not None and shape.ragged is not None
    row, ragged = shape.component.name, shape.ragged.name
    recorder.do("split", shape.phase, ragged, target.matmul[0])
    recorder.do("combine", shape.phase, row, f"{ragged}o")
    inner = describe(recorder.program, shape.phase)
    plain = Shape(shape.phase, shape.leaf, None, None, shape.regular, inner.reduced)
    block = next(d for d in inner.regular if d.name == f"{ragged}i")
    _blocks(recorder, plain, target, f"{row}{ragged}o", block.name)


def _blocks(recorder: Recorder, shape: Shape, target: Target, parts: str, rows: str) -> None:
    schedule_product(recorder, shape, target, rows=None, before=[parts, rows])
    found = [name for name in loop_names(recorder, shape.phase) if name != rows]
    lanes = [name for name in found if name.endswith("i") and name != parts]
    outside = [name for name in found if name not in lanes]
    recorder.do("reorder", shape.phase, *outside, rows, *lanes)
    recorder.do("mark", shape.phase, rows, "lanes")
