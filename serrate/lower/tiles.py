"""A kernel as a loop program.

In: a scheduled tile program of block statements. Out: a `LoopProgram`, which every backend prints. Passes, in order:

    statements axes of one lane are loop indices, others lanes; positions become index expressions, guards that hold are dropped
    narrowed   lanes of private blocks that nobody reads are not worked out
    ended      a loop over tiles ends where nothing in it exists any more; programs without work end at once
    ahead      the next row is fetched while one is worked on
    inside     numbers that callers could still change are clamped, so that no access leaves its tensor
    stepped    a reduction over several lanes keeps one result for each of the innermost until a block is done
    named      boundaries of rows that are read several times get a name, where it is known that there is such a row
    collect    which arrays and extents the program needs from its caller

All but the first and the last are in `tile_passes.py`, and `inside` is that of fusions.
"""

from __future__ import annotations

from serrate.ir.loops import Kernel, LoopProgram, Write, nodes
from serrate.ir.tile import TileProgram
from serrate.ir.values import Role
from serrate.lower.inside import kept_inside
from serrate.lower.pipeline import check, collect
from serrate.lower.statements import BlockStatements
from serrate.lower.tile_passes import Names, ahead, ended, named, narrowed, stepped


def lower_kernel(program: TileProgram, header: tuple[str, ...] = ()) -> LoopProgram:
    """The loop program of a kernel, phase after phase."""
    kernels: list[Kernel] = []
    private = tuple({t: None for p in program.phases for t in p.writes if t.role is Role.PRIVATE})
    tensors = (*program.inputs, *program.outputs, *program.scratch, *private)
    for phase in program.phases:
        body = BlockStatements(program, phase).run()
        if any(isinstance(n, Write) for n in nodes(body)):
            body = kept_inside(ahead(ended(narrowed(body))), dict(program.limits))
            names = Names(tensors, body)
            body = named(stepped(body, names), dict(program.counts), names)
            kernels.append(Kernel(program.name if not kernels else f"{program.name}_{len(kernels)}", body))
    scratch = (*program.scratch, *private)
    loops = LoopProgram(program.name, tuple(kernels), program.inputs, program.outputs, scratch, (), (), header)
    loops = collect(loops)
    check(loops, complete=True)
    return loops
