"""Join launches: a single launch for short rows and for the pieces of long ones.

In: a loop program. Out: the same; a kernel over a work list that is mostly empty is joined with the kernel before it, if they are
independent and have no matrix products, which need all registers. The first programs share the list, so that long rows start
early; each of the others takes one position of the other grid.

    kernel a: grid c < n: s;   kernel b: grid p < parts[n]: t   ->   kernel a: (grid p < parts[n]: t;  grid c < n: s)
"""

from __future__ import annotations

from dataclasses import replace

from serrate.ir.loops import Dot, For, Load, LoopKernel, LoopProgram, Write, nodes, values_of
from serrate.ir.tile import GRID


def join_launches(program: LoopProgram) -> LoopProgram:
    """Joins every kernel over a sparse grid with the one before it, if they are independent."""
    kernels: list[LoopKernel] = []
    for kernel in program.kernels:
        before = kernels[-1] if kernels else None
        if before is not None and _is_sparse(kernel) is True and _is_sparse(before) is False and _independent(before, kernel):
            kernels[-1] = replace(before, body=(*kernel.body, *before.body))
        else:
            kernels.append(kernel)
    return program if len(kernels) == len(program.kernels) else replace(program, kernels=tuple(kernels))


def _is_sparse(kernel: LoopKernel) -> bool | None:
    """Whether the grid of a kernel is sparse; None if it has not exactly one, at its end, or has products."""
    grids = [n for n in kernel.body if isinstance(n, For) and n.kind is GRID]
    every = list(nodes(kernel.body))
    if len(grids) != 1 or grids[0] is not kernel.body[-1] or any(isinstance(n, Dot) for n in every):
        return None
    return any(n.sparse for n in every if isinstance(n, For) and n.kind is GRID)


def _independent(a: LoopKernel, b: LoopKernel) -> bool:
    """Whether neither kernel writes what the other reads or writes."""
    (read_a, written_a), (read_b, written_b) = _memory(a), _memory(b)
    return not (written_a & (read_b | written_b) or written_b & read_a)


def _memory(kernel: LoopKernel) -> tuple[set[object], set[object]]:
    """The memory that a kernel reads, and what it writes."""
    every = list(nodes(kernel.body))
    loads = (v for n in every for value in values_of(n) for v in value.walk() if isinstance(v, Load))
    return {v.tensor.memory for v in loads}, {n.tensor.memory for n in every if isinstance(n, Write)}
