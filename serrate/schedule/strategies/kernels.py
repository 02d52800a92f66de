"""Scheduling of kernels, shared by all strategies: tile sizes, two-pass statistics, rows cut into pieces.

In: a recorder with a program of block statements, and how a strategy wants its rows. Out: recorded steps. The loops of a kernel
are already fused and ordered, so most of a plan is tile sizes.
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
from serrate.schedule.sizes import shares_columns, sizes, tiled
from serrate.schedule.statistics import side_by_side
from serrate.schedule.target import Target, power_of_two_at_least

Lanes = Mapping[str, int]
"""Requested numbers of lanes, by axis name; `chunk` is the size of pieces of rows."""

COMBINED = 256
"""The most partial results that are combined at once: workers that store a piece next need registers for it."""


def whole_rows(recorder: Recorder, target: Target, lanes: Lanes, rows: int, *, near: bool) -> None:
    """Each worker takes `rows` whole rows. `near`: a row stays in cache, so a second pass over it is cheap."""
    program = recorder.program
    (phase,) = (p.name for p in program.phases)
    passes = near and _in_two_passes(recorder, phase)
    recorder.do("share", phase)
    tiled(recorder, phase, sizes(recorder.program, rows, target, lanes))
    if passes and side_by_side(recorder.program, recorder.program.phases[0]):
        recorder.restart(program)
        whole_rows(recorder, target, lanes, rows, near=False)


def _in_two_passes(recorder: Recorder, phase: str, most: int = 0) -> bool:
    """Computes statistics in two passes; with `most`, only for rows of at most so many positions, which a fork has separated."""

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


def pieces_of_rows(recorder: Recorder, target: Target, lanes: Lanes, chunk: int | None) -> None:
    """Distributes rows by a work list: of their tiles, or of pieces of `chunk` positions."""
    try:
        _pieces_of_rows(recorder, target, lanes, chunk)
    except ScheduleError as error:
        raise StrategyError(f"persistent_dynamic cannot cut these rows: {error}") from None


def _pieces_of_rows(recorder: Recorder, target: Target, lanes: Lanes, chunk: int | None) -> None:
    program = recorder.program
    (phase,) = (p.name for p in program.phases)
    rows = _shared_rows(program, program.phases[0])
    if rows is None:
        _share_out_evenly(recorder, phase, target, lanes, chunk)
        return
    loops = [n for n in statements(program.phases[0].body) if isinstance(n, Loop)]
    along = [loop for loop in loops if program.axis_of(loop.domain) in rows.along]
    # A loop nested in another over the same row stays as it is.
    along = [loop for loop in along if not any(loop in statements(outer.body) for outer in along)]
    if any(loop.kind is GRID for loop in along):
        _list_tiles(recorder, phase, rows, target, lanes)
        recorder.because("programs are the tiles of all rows")
        return
    size, lanes = _piece_size(program, target, lanes, chunk, [loop.domain.name for loop in along])
    for loop in along:
        recorder.do("ragged", phase, loop.domain.name)
    if _needs_second_phase(program, along):
        recorder.do("fork", phase, f"{along[0].domain.name}r", size)
        if target.keeps_rows:
            _in_two_passes(recorder, phase, most=size)
    passes = _in_one_pass(recorder, phase, [f"{loop.domain.name}r" for loop in along])
    recorder.do("share", phase)
    chosen = sizes(recorder.program, 1, target, lanes)
    # Otherwise the last tile of a piece would reach into the next piece.
    chosen |= {loop.domain.name: _dividing(size, chosen[loop.domain.name]) for loop in along}
    _require_single(rows, chosen)
    for name in passes:
        at_once = _combined_at_once(find(recorder.program, phase), name, chosen, target)
        recorder.do("cut", phase, name, size, *((at_once,) if at_once > 1 else ()))
    for each in recorder.program.phases:
        tiled(recorder, each.name, chosen)
    short = "; shorter ones are finished where they are read" if any(s.primitive == "fork" for s in recorder.steps) else ""
    recorder.because(f"rows of more than {size} positions are cut into pieces of {size}{short}")


def _in_one_pass(recorder: Recorder, phase: str, loops: Sequence[str]) -> list[str]:
    """Merges loops over a cut row where one pass can serve two, and returns the loops that remain. A cut row is too long to stay
    in cache for a second pass."""
    left = list(loops[:1])
    for name in loops[1:]:
        if not recorder.attempt("one_pass", phase, left[-1], name):
            left.append(name)
    return left


def _combined_at_once(phase: Phase, name: str, lanes: Lanes, target: Target) -> int:
    """How many partial results of a row a GPU combines at once: combining those of a very long row one by one would take as long
    as everything else."""
    (loop,) = (n for n in statements(phase.body) if isinstance(n, Loop) and n.domain.name == name)
    if target.finish == 1 or not loop.carried:
        return 1
    blocks = [local.lanes for carry in loop.carried for local in carry.locals]
    across = max(math.prod(max(lanes.get(lane.symbol.name, 1), 1) for lane in block) for block in blocks)
    return max(min(target.near_block // power_of_two_at_least(across), COMBINED), 1)


def _dividing(size: int, most: int) -> int:
    """The largest divisor of a size that is at most `most`."""
    return next(n for n in range(min(size, most), 0, -1) if size % n == 0)


def _share_out_evenly(recorder: Recorder, phase: str, target: Target, lanes: Lanes, chunk: int | None) -> None:
    """Without a store guarded by a row length, all rows cost the same: cuts the first serial loop evenly, if that is legal."""
    reason = "no store is guarded by a row length: all programs do equal work, and rows stay whole"
    loop = next((n for n in statements(recorder.program.phases[0].body) if isinstance(n, Loop) and n.kind is SERIAL), None)
    recorder.do("share", phase)
    if loop is not None:
        name = loop.domain.name
        size, smaller = _piece_size(recorder.program, target, lanes, chunk, [name])
        trial = Recorder(recorder.program)
        if trial.attempt("split", phase, name, size) and trial.attempt("mark", phase, f"{name}o", "grid"):
            recorder.do("split", phase, name, size)
            recorder.do("mark", phase, f"{name}o", "grid")
            reason, lanes = f"all rows are stored to the same length: programs are pieces of {size} positions", smaller
    chosen = sizes(recorder.program, 1, target, lanes)
    tiled(recorder, phase, chosen)
    recorder.because(reason)


def _needs_second_phase(program: TileProgram, loops: Sequence[Loop]) -> bool:
    """Whether work is left after the pieces of a row. A single loop that only stores, and carries nothing, leaves none."""
    inside = {n for loop in loops for n in statements(loop.body)}
    others = [n for n in statements(program.phases[0].body) if isinstance(n, Write) and n not in inside]
    return len(loops) > 1 or bool(loops[0].carried) or bool(others)


def _list_tiles(recorder: Recorder, phase: str, rows: CutRows, target: Target, lanes: Lanes) -> None:
    """One work list of the tiles that rows have, instead of as many tiles for every row as the longest has."""
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
            f"persistent_dynamic takes one row at a time, but {rows.component} has {lanes[rows.component.name]} lanes: "
            "leave its block_size open, or make it 1"
        )


def _piece_size(
    program: TileProgram, target: Target, lanes: Lanes, chunk: int | None, loops: list[str]
) -> tuple[int, dict[str, int]]:
    """The size of a piece, as requested or as large as is worth a worker, in whole tiles of all `loops`; and the lanes, reduced
    where a tile would be larger than a piece."""
    trial = Recorder(program)
    trial.do("share", program.phases[0].name)
    asked = dict(lanes)
    chosen = sizes(trial.program, 1, target, asked)
    # Workers that share the columns of a row take shorter pieces of it.
    elements = target.chunk // 2 if shares_columns(program, chosen, target) else target.chunk
    size = chunk or asked.get("chunk") or _worthwhile(trial.program, chosen, elements, loops)
    asked |= {name: size for name in loops if chosen[name] > size}
    whole = math.lcm(*(sizes(trial.program, 1, target, asked)[name] for name in loops))
    return -(-size // whole) * whole, asked


def _shared_rows(program: TileProgram, phase: Phase) -> CutRows | None:
    """The rows to cut: the first that loops run along. If a grid loop does, every store must be guarded by their length."""
    programs = {n.domain.uid for n in statements(phase.body) if isinstance(n, Loop) and n.kind is GRID}
    for rows in rows_of(program, phase):
        own = [Less(a.position, rows.length) for a in rows.along if a.domain.uid in programs]
        stores = [n for n in statements(phase.body) if isinstance(n, Write)]
        if not own or all(own[0] in n.guard for n in stores):
            return rows
    return None


def _worthwhile(program: TileProgram, lanes: Lanes, elements: int, along: Sequence[str]) -> int:
    """How many positions of a row are worth a worker: whole tiles of the loops `along` it, about `elements` elements."""
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
