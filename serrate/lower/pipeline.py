"""The lowering pipeline: what becomes of a loop program on its way to a backend, for fusions, kernels and every target alike.

In: a scheduled `TileProgram`. Out: the `LoopProgram` that is printed or run as it is. A pass takes a program and returns one; it
applies where it finds its pattern and else returns what it was given. Which passes a target wants is said by facts about the
target. The program is verified after each of them, and `SERRATE_LOG=passes` prints it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

from serrate import settings
from serrate.ir.loops import Block, LoopProgram
from serrate.ir.tile import TileProgram, statements, verify
from serrate.lower.blocks import blocks
from serrate.lower.limits import limits_of
from serrate.lower.passes.collect import collect
from serrate.lower.passes.end_loops import end_loops
from serrate.lower.passes.guess_maxima import guess_maxima
from serrate.lower.passes.inside import inside
from serrate.lower.passes.lane_partials import lane_partials
from serrate.lower.passes.launch_bounds import launch_bounds
from serrate.lower.passes.long_sums import long_sums
from serrate.lower.passes.name_indices import name_indices
from serrate.lower.passes.narrow import narrow
from serrate.lower.passes.pad_lanes import pad_lanes
from serrate.lower.passes.prefetch import prefetch
from serrate.lower.passes.strip_mine import strip_mine
from serrate.lower.passes.tabulate import tabulate
from serrate.lower.passes.unfold import unfold
from serrate.lower.statements import block_statements
from serrate.lower.verify import verify_loops
from serrate.schedule.target import Target

log = logging.getLogger("serrate")

Pass = Callable[[LoopProgram], LoopProgram]


def passes(target: Target) -> list[tuple[str, Pass]]:
    """All passes over loop programs, in order, with their names."""
    wanted: list[tuple[bool, Pass]] = [
        # blocks have powers of two lanes
        (target.power_of_two_lanes, pad_lanes),
        # folds of lanes are loops
        (not target.folds, unfold),
        # lanes of private blocks that nobody reads are not computed
        (True, narrow),
        # loops end where nothing in them exists any more; workers without work end at once
        (True, functools.partial(end_loops, branches=target.branches)),
        # the component that owns a grid position comes from a table; a grid that only lengths bound is launched by a number
        (target.tables, tabulate),
        (target.tables, launch_bounds),
        # numbers that callers could still change are clamped, so that no access leaves its tensor
        (True, inside),
        # the next row is fetched while one is worked on
        (True, prefetch),
        # a reduction over several lanes keeps one result for each of the innermost until its block is done
        (target.lanes_in_order, lane_partials),
        # array reads and searches that several statements share get a name, as far out as possible
        (True, name_indices),
        # powers are relative to a guess, where that serves, and not to a maximum that takes a pass of its own
        (target.guesses_maxima, guess_maxima),
        # no statement adds many positions of a lane to one element, one by one; no loop adds to a float for long
        (target.lanes_in_order, strip_mine),
        (True, functools.partial(long_sums, branches=target.branches)),
        # which arrays and extents the program needs from its caller
        (True, collect),
    ]
    return [(getattr(p, "func", p).__name__, p) for applies, p in wanted if applies]


def lower(program: TileProgram, name: str, header: tuple[str, ...], target: Target) -> LoopProgram:
    """The loop program of a scheduled tile program."""
    return optimised(loops_of(program, name, header), target)


def loops_of(program: TileProgram, name: str, header: tuple[str, ...]) -> LoopProgram:
    """The loop program of a scheduled tile program, before any pass."""
    verify(program)
    if any(isinstance(s, Block) for phase in program.phases for s in statements(phase.body)):
        return block_statements(program, name, header)
    return replace(blocks(program, name, header), limits=tuple(limits_of(program).items()))


def optimised(program: LoopProgram, target: Target) -> LoopProgram:
    """The program after all passes that its target wants."""
    verify_loops(program, complete=False)
    shown = "passes" in settings.current().log
    before = str(program) if shown else ""
    if shown:
        log.warning("%s, as it is made\n%s", program.name, before)
    for name, each in passes(target):
        made = each(program)
        if made is program:
            continue
        verify_loops(made, complete=each is collect)
        program = made
        if shown and (text := str(program)) != before:
            log.warning("%s, after %s\n%s", program.name, name, text)
            before = text
    return program
