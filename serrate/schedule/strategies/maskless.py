"""maskless: one worker per row, with the exact length of the row as its loop bound.

for c:  for r[c]: s   ->   grid c:  serial ro:  lanes ri: s       (ro ends with the row; only the last block has holes)
"""

from __future__ import annotations

from dataclasses import dataclass

from serrate.ir.tile import TileProgram
from serrate.ir.values import Role
from serrate.schedule.plan import Plan, Recorder
from serrate.schedule.prepare import Shape, describe, prepare
from serrate.schedule.strategies.common import (
    PhaseBlocks,
    for_look_ups,
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
from serrate.schedule.strategies.kernels import Lanes, whole_rows
from serrate.schedule.target import Target


def maskless(
    program: TileProgram,
    target: Target,
    tile: int | None = None,
    keep_rows: bool | None = None,
    warps: int | None = None,
    stages: int | None = None,
    lanes: Lanes | None = None,
    short: bool = False,
    pivots: bool = False,
) -> Plan:
    """A plan with rows on the grid; `tile` is the number of positions per block, `lanes` the tile sizes of a kernel. `short`:
    whether most rows are short; `pivots`: whether moments are sums about a pivot, for which lengths must have a known bound."""
    recorder, given = Recorder(program), target
    prepare(recorder)
    small = False
    if target.factors_blocks and (short or program.axes):
        work = work_of(program)
        small, target = work.halvings > 0, work.in_blocks(target)
        target = work.in_narrow_columns(target) if short else target
        if pivots and not program.axes:
            _about_pivots(recorder, target)
    look_ups = target.many_workers and sums_look_ups(shapes(recorder.program))
    target = for_look_ups(target) if look_ups else target
    keep = target.keeps_rows if keep_rows is None else keep_rows
    if (target.keeps_rows or keep) and not program.axes:
        in_two_passes(recorder, keep)
    target = with_threads(recorder.program, target, warps, small=small, look_ups=look_ups)
    schedule(recorder, target, WholeRows(tile), lanes)
    if keep and not program.axes and _shares_rows(recorder.program):
        return maskless(program, given, tile, False, warps, stages, lanes, short, pivots)
    warps = warps or warps_for(program, target, small=small, look_ups=look_ups)
    stages = stages or stages_for(program, target, look_ups=look_ups)
    return recorder.plan("maskless", warps, stages, combines_lanes=look_ups)


@dataclass(frozen=True)
class WholeRows:
    """Components on the grid; a worker runs through its row in blocks."""

    tile: int | None

    def per_component(self, recorder: Recorder, shape: Shape) -> tuple[list[str], list[str]]:
        assert shape.component is not None
        return [shape.component.name], []

    def for_components(self, target: Target) -> Target:
        return target

    def per_row(self, recorder: Recorder, shape: Shape, block: int | None) -> tuple[list[str], list[str], list[str]]:
        assert shape.component is not None and shape.ragged is not None
        if block is None:
            return [shape.component.name], [shape.ragged.name], []
        recorder.do("split", shape.phase, shape.ragged.name, block)
        return [shape.component.name], [f"{shape.ragged.name}o"], [f"{shape.ragged.name}i"]

    def product(self, recorder: Recorder, shape: Shape, target: Target) -> None:
        assert shape.component is not None
        schedule_product(recorder, shape, target, rows=shape.ragged, before=[shape.component.name], grid=2)

    def cut(self, recorder: Recorder, shape: Shape, block: int | None, target: Target) -> PhaseBlocks:
        return ((shape.phase, block),)

    def kernel(self, recorder: Recorder, target: Target, lanes: Lanes) -> None:
        whole_rows(recorder, target, lanes, 1, near=target.keeps_rows)


def _about_pivots(recorder: Recorder, target: Target) -> None:
    """Computes moments of whole rows from plain sums, so that lanes are combined once per row."""
    for shape in shapes(recorder.program):
        if shape.reduces_rows and shape.regular and shape.regular[-1].uid in shape.reduced:
            recorder.attempt("about_pivot", shape.phase, max(target.simple_block // width(shape, target), 1))


def _shares_rows(program: TileProgram) -> bool:
    """Whether a row that is private to a worker is also needed by another phase."""
    private = {t for p in program.phases for t in p.writes if t.role is Role.PRIVATE}
    return any(sum(1 for p in program.phases if t in p.writes | p.reads) > 1 for t in private)


def in_two_passes(recorder: Recorder, keep: bool) -> None:
    """Computes reductions in two passes where they have such a form; with `keep`, keeps the terms that a later phase needs."""
    for phase in [p.name for p in recorder.program.phases]:
        shape = describe(recorder.program, phase)
        if shape.reduces_rows and not any(d.uid in shape.reduced for d in shape.regular) and recorder.attempt("two_pass", phase):
            total = shape.leaf.targets[1].name
            if keep:
                recorder.attempt("keep", total)
