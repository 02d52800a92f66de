"""What strategies share for kernels: tiles of all loops, statistics in two passes, rows that are cut.

In: a recorder with a program of block statements, and what a strategy says of its rows. Out: recorded steps. A kernel's loops are
fused and ordered already, so that sizes of tiles are most of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from serrate.errors import ScheduleError, StrategyError
from serrate.ir.expr import Less
from serrate.ir.loops import Assign, Dot, Reduce, Running, Write
from serrate.ir.tile import GRID, SERIAL, ByLength, Loop, Phase, TileProgram, statements
from serrate.schedule.block_loops import find
from serrate.schedule.cutting import CutRows, rows_of
from serrate.schedule.plan import Recorder
from serrate.schedule.sizes import sizes, tiled
from serrate.schedule.statistics import side_by_side
from serrate.schedule.target import Target

Lanes = Mapping[str, int]
"""Lanes by the names of axes, where others than the usual ones are asked for; `chunk` is the size of parts of rows."""


def whole_rows(recorder: Recorder, target: Target, lanes: Lanes, rows: int, *, near: bool) -> None:
    """Programs have `rows` whole rows each; a row is `near` for a second pass where it is alone."""
    program = recorder.program
    (phase,) = (p.name for p in program.phases)
    passes = near and _in_two_passes(recorder, phase)
    recorder.do("share", phase)
    tiled(recorder, phase, sizes(recorder.program, rows, target, lanes))
    if passes and side_by_side(recorder.program, recorder.program.phases[0]):
        recorder.restart(program)
        whole_rows(recorder, target, lanes, rows, near=False)


def _in_two_passes(recorder: Recorder, phase: str, most: int = 0) -> bool:
    """Statistics in two passes; with `most`, only of the rows that a fork has set apart as having at most so many positions."""

    def loops() -> list[str]:
        body = find(recorder.program, phase).body
        if most:
            body = tuple(n for fork in statements(body) if isinstance(fork, ByLength) for n in fork.short)
        return [n.domain.name for n in statements(body) if isinstance(n, Loop) and n.kind is SERIAL and n.carried]

    before = loops()
    done = [name for name in before if recorder.attempt("two_pass", phase, name)]
    again = [name for name in loops() if name not in before]
    for name in again:
        recorder.attempt("keep", phase, name, *((most,) if most else ()))
    return bool(done)


def parts_of_rows(recorder: Recorder, target: Target, lanes: Lanes, chunk: int | None) -> None:
    """Rows are shared out in parts: one list of the tiles that there are, or of parts of `chunk` positions."""
    try:
        _parts_of_rows(recorder, target, lanes, chunk)
    except ScheduleError as error:
        raise StrategyError(f"persistent_dynamic cuts rows, and {error}") from None


def _parts_of_rows(recorder: Recorder, target: Target, lanes: Lanes, chunk: int | None) -> None:
    program = recorder.program
    (phase,) = (p.name for p in program.phases)
    rows = _shared_rows(program, program.phases[0])
    if rows is None:
        _share_out_evenly(recorder, phase, target, lanes, chunk)
        return
    loops = [n for n in statements(program.phases[0].body) if isinstance(n, Loop)]
    along = [loop for loop in loops if program.axis_of(loop.domain) in rows.along]
    # What runs along a row inside a part of it stays as it is.
    along = [loop for loop in along if not any(loop in statements(outer.body) for outer in along)]
    if any(loop.kind is GRID for loop in along):
        _list_tiles(recorder, phase, rows, target, lanes)
        recorder.because("programs are the tiles of rows that there are")
        return
    size, lanes = _part_size(program, target, lanes, chunk, [loop.domain.name for loop in along])
    for loop in along:
        recorder.do("ragged", phase, loop.domain.name)
    if _needs_second_phase(program, along):
        recorder.do("fork", phase, f"{along[0].domain.name}r", size)
        if target.keeps_rows:
            _in_two_passes(recorder, phase, most=size)
    passes = _in_one_pass(recorder, phase, [f"{loop.domain.name}r" for loop in along])
    recorder.do("share", phase)
    chosen = sizes(recorder.program, 1, target, lanes)
    # The last tile of a part would reach into the next one.
    chosen |= {loop.domain.name: _dividing(size, chosen[loop.domain.name]) for loop in along}
    _require_single(rows, chosen)
    for name in passes:
        recorder.do("cut", phase, name, size)
    for each in recorder.program.phases:
        tiled(recorder, each.name, chosen)
    short = "; others are finished where they are read" if any(s.primitive == "fork" for s in recorder.steps) else ""
    recorder.because(f"rows of more than {size} positions are cut into parts of as many{short}")


def _in_one_pass(recorder: Recorder, phase: str, loops: Sequence[str]) -> list[str]:
    """The loops over cut rows that are left: where one needs nothing of a row but what the one before it could find, it is read
    once for both. Its parts are far away by the time that all of them are read."""
    left = list(loops[:1])
    for name in loops[1:]:
        if not recorder.attempt("one_pass", phase, left[-1], name):
            left.append(name)
    return left


def _dividing(size: int, most: int) -> int:
    """The largest number up to `most` that a size is a multiple of."""
    return next(n for n in range(min(size, most), 0, -1) if size % n == 0)


def _share_out_evenly(recorder: Recorder, phase: str, target: Target, lanes: Lanes, chunk: int | None) -> None:
    """Where nothing that is stored goes by the length of a row, all rows are alike: parts of what a loop stores are programs."""
    reason = "no store goes by the length of a row: programs are alike, and rows stay whole"
    loop = next((n for n in statements(recorder.program.phases[0].body) if isinstance(n, Loop) and n.kind is SERIAL), None)
    recorder.do("share", phase)
    if loop is not None:
        name = loop.domain.name
        size, smaller = _part_size(recorder.program, target, lanes, chunk, [name])
        trial = Recorder(recorder.program)
        if trial.attempt("split", phase, name, size) and trial.attempt("mark", phase, f"{name}o", "grid"):
            recorder.do("split", phase, name, size)
            recorder.do("mark", phase, f"{name}o", "grid")
            reason, lanes = f"all rows are stored as far: programs are parts of {size} positions", smaller
    chosen = sizes(recorder.program, 1, target, lanes)
    tiled(recorder, phase, chosen)
    recorder.because(reason)


def _needs_second_phase(program: TileProgram, loops: Sequence[Loop]) -> bool:
    """Whether work is left when the parts of a row are done; a single loop that carries nothing and stores leaves none."""
    inside = {n for loop in loops for n in statements(loop.body)}
    others = [n for n in statements(program.phases[0].body) if isinstance(n, Write) and n not in inside]
    return len(loops) > 1 or bool(loops[0].carried) or bool(others)


def _list_tiles(recorder: Recorder, phase: str, rows: CutRows, target: Target, lanes: Lanes) -> None:
    """One list of the tiles that rows have, in the place of as many for each row as the longest has."""
    recorder.do("share", phase)
    chosen = sizes(recorder.program, 1, target, lanes)
    _require_single(rows, chosen)
    loops = {n.domain.uid for n in statements(recorder.program.phases[0].body) if isinstance(n, Loop) and n.kind is GRID}
    name = next(a.name for a in rows.along if a.domain.uid in loops)
    recorder.do("ragged", phase, name)
    tiled(recorder, phase, chosen)
    recorder.do("combine", phase, rows.component.name, f"{name}ro" if chosen[name] > 1 else f"{name}r")


def _require_single(rows: CutRows, lanes: Lanes) -> None:
    if lanes[rows.component.name] > 1:
        raise StrategyError(
            f"persistent_dynamic takes one row at a time, and {rows.component} has {lanes[rows.component.name]}: "
            "leave its block_size open, or make it 1"
        )


def _part_size(
    program: TileProgram, target: Target, lanes: Lanes, chunk: int | None, loops: list[str]
) -> tuple[int, dict[str, int]]:
    """How many positions are one part: as many as asked for, or as it takes to be worth a worker; whole tiles of all loops, which
    are smaller if a part is."""
    trial = Recorder(program)
    trial.do("share", program.phases[0].name)
    asked = dict(lanes)
    chosen = sizes(trial.program, 1, target, asked)
    size = chunk or asked.get("chunk") or _worthwhile(trial.program, chosen, target.chunk, loops)
    asked |= {name: size for name in loops if chosen[name] > size}
    whole = math.lcm(*(sizes(trial.program, 1, target, asked)[name] for name in loops))
    return -(-size // whole) * whole, asked


def _shared_rows(program: TileProgram, phase: Phase) -> CutRows | None:
    """The rows that are shared out: the first that loops run along. Where programs do, all they store must go by them."""
    programs = {n.domain.uid for n in statements(phase.body) if isinstance(n, Loop) and n.kind is GRID}
    for rows in rows_of(program, phase):
        own = [Less(a.position, rows.length) for a in rows.along if a.domain.uid in programs]
        stores = [n for n in statements(phase.body) if isinstance(n, Write)]
        if not own or all(own[0] in n.guard for n in stores):
            return rows
    return None


def _worthwhile(program: TileProgram, lanes: Lanes, elements: int, along: Sequence[str]) -> int:
    """How many positions of a row are worth a worker: whole tiles of the loops `along` it, of about `elements` elements."""
    size = 1
    for loop in (n for phase in program.phases for n in statements(phase.body)):
        axis = program.axis_of(loop.domain) if isinstance(loop, Loop) and loop.kind is SERIAL else None
        if axis is not None and isinstance(loop, Loop) and loop.domain.name in along:
            work = [n for n in statements(loop.body) if isinstance(n, Reduce | Dot | Running | Write | Assign)]
            tile = lanes[axis.name]
            width = 1
            for node in work:
                across = 1
                for lane in node.lanes:
                    across *= max(1, lanes.get(lane.symbol.name, 1)) if lane.symbol is not axis.position else 1
                width = max(width, across)
            products = any(isinstance(n, Dot) for n in work)
            size = max(size, tile if products else tile * max(1, elements // max(1, width * tile)))
    return size
