"""The lowering pipeline: one ordered list of passes, for fusions and kernels and for every target.

In: a scheduled `TileProgram`. Out: the `LoopProgram` that backends print or run. A pass is a function from program to program; if
it does not find its pattern, it returns the program unchanged. Flags of the target select passes. The program is verified after
each pass, and `SERRATE_LOG=passes` prints it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

from serrate import logs
from serrate.ir.loops import LoopProgram
from serrate.ir.tile import Leaf, TileProgram, statements, verify
from serrate.lower.blocks import blocks
from serrate.lower.limits import limits_of
from serrate.lower.passes.barriers import barriers
from serrate.lower.passes.bound_sums import bound_sums
from serrate.lower.passes.boxes import boxes
from serrate.lower.passes.collect import collect
from serrate.lower.passes.end_loops import end_loops
from serrate.lower.passes.factor_operands import factor_operands
from serrate.lower.passes.gathers import gathers
from serrate.lower.passes.guess_maxima import guess_maxima
from serrate.lower.passes.hoist_guards import hoist_guards
from serrate.lower.passes.keep_in_bounds import keep_in_bounds
from serrate.lower.passes.lane_partials import lane_partials
from serrate.lower.passes.launch_bounds import launch_bounds
from serrate.lower.passes.long_sums import long_sums
from serrate.lower.passes.loop_partials import loop_partials
from serrate.lower.passes.name_indices import name_indices
from serrate.lower.passes.narrow import narrow
from serrate.lower.passes.pad_lanes import pad_lanes
from serrate.lower.passes.peel import peel
from serrate.lower.passes.prefetch import prefetch
from serrate.lower.passes.reuse_last_block import reuse_last_block
from serrate.lower.passes.row_ends import row_ends
from serrate.lower.passes.share_operands import share_operands
from serrate.lower.passes.split_selects import split_selects
from serrate.lower.passes.strip_mine import strip_mine
from serrate.lower.passes.tabulate import tabulate
from serrate.lower.passes.unfold import unfold
from serrate.lower.passes.unmask import unmask
from serrate.lower.passes.unswitch import unswitch
from serrate.lower.statements import block_statements
from serrate.lower.verify import verify_loops
from serrate.schedule.target import Target

log = logs.logger("passes")

Pass = Callable[[LoopProgram], LoopProgram]


def passes(target: Target) -> list[tuple[str, Pass]]:
    """The passes that a target wants, in order, with their names."""
    wanted: list[tuple[bool, Pass]] = [
        # let lanes wait for what other lanes have stored
        (not target.lanes_in_order, barriers),
        # pad lanes to sizes that the target has
        (target.power_of_two_lanes, functools.partial(pad_lanes, least=target.least_matmul)),
        # compute costly parts of operands once for several matrix products
        (target.lanes_in_order, share_operands),
        # compute operands of matrix products by fewer operations
        (not target.lanes_in_order, factor_operands),
        # folds of lanes are loops
        (not target.folds, unfold),
        # do not compute lanes of private blocks that nothing reads
        (True, narrow),
        # write blocks of many parts one part after another
        (target.lanes_in_order, split_selects),
        # stop loops past the last element; let idle workers exit at once
        (True, functools.partial(end_loops, branches=target.branches)),
        # drop the length of the longest row where a row's own length is the tighter bound
        (True, row_ends),
        # look up the owner of a grid position in a table; launch grids bounded only by lengths with a host-known bound
        (target.tables, tabulate),
        (target.tables, launch_bounds),
        # clamp values that a caller could still change, so that no access leaves its tensor
        (True, keep_in_bounds),
        # do not let the offsets of work lists exceed the bounds that memory is allocated for
        (target.tables, bound_sums),
        # hoist loop-invariant conditions out of loops
        (not target.lanes_in_order, hoist_guards),
        # combine lanes after the loop that reduces them
        (target.factors_blocks, functools.partial(loop_partials, most=target.simple_block)),
        # begin a second loop over a row with the block that the first ended with
        (not target.lanes_in_order, reuse_last_block),
        # do not mask private blocks, nor blocks that are whole
        (not target.lanes_in_order, unmask),
        (not target.lanes_in_order, peel),
        # prefetch the next row while processing the current one
        (True, prefetch),
        # loop over indices from memory, and prefetch the rows they select
        (target.lanes_in_order, gathers),
        # keep one partial result per innermost lane while reducing over several lanes
        (target.lanes_in_order, lane_partials),
        # hoist array reads and searches as far out as possible, and name them
        (True, name_indices),
        # guess the maximum of a softmax where possible, instead of computing it in a separate pass
        (target.guesses_maxima, guess_maxima),
        # split deep sums: over lanes by strip-mining, over loops by flushing into a wider block
        (target.lanes_in_order, strip_mine),
        (True, functools.partial(long_sums, branches=target.branches)),
        # test conditions of reads once, where they are the same in all lanes
        (target.lanes_in_order, unswitch),
        # let a copy engine read operands of matrix products
        (not target.lanes_in_order, boxes),
        # list the arrays and extents that the caller supplies
        (True, collect),
    ]
    return [(getattr(p, "func", p).__name__, p) for applies, p in wanted if applies]


def lower(program: TileProgram, name: str, header: tuple[str, ...], target: Target) -> LoopProgram:
    """The loop program of a scheduled tile program."""
    return optimised(loops_of(program, name, header), target)


def loops_of(program: TileProgram, name: str, header: tuple[str, ...]) -> LoopProgram:
    """The loop program of a scheduled tile program, before any pass."""
    verify(program)
    if not any(
        isinstance(s, Leaf) for phase in program.phases for s in statements(phase.body)
    ):  # of a kernel, which may do nothing
        return block_statements(program, name, header)
    return replace(blocks(program, name, header), limits=tuple(limits_of(program).items()))


def optimised(program: LoopProgram, target: Target) -> LoopProgram:
    """The program after all passes that its target wants."""
    verify_loops(program, complete=False)
    shown = log.isEnabledFor(logging.DEBUG)
    before = str(program) if shown else ""
    if shown:
        log.debug("%s, before all passes\n%s", program.name, before)
    for name, each in passes(target):
        made = each(program)
        if made is program:
            continue
        verify_loops(made, complete=each is collect)
        program = made
        if shown and (text := str(program)) != before:
            log.debug("%s, after %s\n%s", program.name, name, text)
            before = text
    return program
