"""Whether the compiler may choose a tile size (rule 6).

In: the program of a kernel. Out: the carried values and stores for which this is not proven, and the inputs of a test.

After its loop, a recognised reduction does not depend on how the row is cut into tiles; inside the loop, it covers only the
tiles so far. A store to the same place in every iteration leaves what the last tile gave. If a carried value is read inside its
loop, or is not recognised, or if stores overwrite each other, the kernel runs on random data with tiles of one position, three
positions, and the whole row. If the results agree, the tile size is "tested, not proven"; if not, the user must fix it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from serrate.errors import KernelError
from serrate.ir.expr import Symbol
from serrate.ir.loops import Write
from serrate.ir.tile import SERIAL, Axis, Carry, Loop, TileProgram, statements
from serrate.ir.values import Tensor
from serrate.lower.passes.common import names_in
from serrate.schedule.dependences import is_read_inside
from serrate.tensor import JaggedTensor

WHOLE = 512
"""The longest row that is tested in one tile."""
FEW = 1 << 11
"""The most elements for which programs are tested on the reference backend, which needs no compiler."""


Doubt: TypeAlias = Carry | Tensor
"""A carried value, or a tensor that is overwritten, which may depend on a tile size."""


def unproven(program: TileProgram) -> list[tuple[Axis, Doubt]]:
    """Carried values and stores that may depend on a tile size that the user left open."""
    found: dict[Doubt, Axis] = {}
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Loop) and node.kind is SERIAL:
            axis = program.axis_of(node.domain)
            if axis is not None and axis.block is None:
                own = {s for a in program.axes if a.original is axis for s in _symbols(a)}
                doubtful: list[Doubt] = [c for c in node.carried if c.reduction is None or is_read_inside(c, node)]
                doubtful += _overwritten(node, own)
                found |= {each: axis for each in doubtful if each not in found}
    return [(axis, each) for each, axis in found.items()]


def named(each: Doubt) -> str:
    """Its name in messages."""
    return each.name if isinstance(each, Tensor) else str(each)


def _overwritten(loop: Loop, own: set[Symbol]) -> Iterator[Tensor]:
    """Tensors that every iteration of a loop, with its `own` symbols, stores to at the same place. (Which place an index from
    memory selects is not known.)"""
    for node in statements(loop.body):
        if isinstance(node, Write) and not node.add:
            used = {s for e in node.index for s in e.symbols}
            if not used & own and names_in(*node.index) == {s.name for s in used}:
                yield node.tensor


def _symbols(axis: Axis) -> set[Symbol]:
    return {axis.position, axis.lane, axis.lanes, axis.number, axis.first, axis.last}


def tiles_to_try(env: Mapping[str, Any]) -> tuple[int, int, int]:
    """One position, three, and as many as the longest row has."""
    sizes = [x.max_length for x in env.values() if isinstance(x, JaggedTensor)]
    sizes += [n for x in env.values() if isinstance(x, torch.Tensor) for n in x.shape]
    return 1, 3, max(4, min(max(sizes, default=4), WHOLE))


def backend_to_try(env: Mapping[str, Any]) -> str:
    """The backend to test on: few elements need no compiler."""
    tensors = [x.values if isinstance(x, JaggedTensor) else x for x in env.values()]
    return "reference" if sum(t.numel() for t in tensors if isinstance(t, torch.Tensor)) <= FEW else "cpp"


def at_random(env: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments with other contents, on a CPU: floats are random, integers are copied because they may be indices."""
    generator = torch.Generator("cpu").manual_seed(0)

    def other(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x.to("cpu", copy=True)
        return torch.randn(x.shape, generator=generator, device="cpu").to(x.dtype)

    with torch.no_grad():
        return {
            name: x.cpu().with_values(other(x.values))
            if isinstance(x, JaggedTensor)
            else other(x)
            if isinstance(x, torch.Tensor)
            else x
            for name, x in env.items()
        }


def agree(results: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether results agree within rounding."""
    first, *others = results
    for other in others:
        for a, b in zip(first, other, strict=True):
            near = 1e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-4
            if not torch.allclose(a.double(), b.double(), rtol=near, atol=near, equal_nan=True):
                return False
    return True


def refusal(values: Sequence[tuple[Axis, Doubt]], tiles: Sequence[int]) -> KernelError:
    """The error for values that depend on the size of a tile."""
    stores = [(axis, each) for axis, each in values if isinstance(each, Tensor)]
    if len(stores) == len(values):
        axis, tensor = stores[0]
        return KernelError(
            f"every iteration of {axis} stores to the same elements of {tensor.name}, so the last tile decides, and the result "
            f"depends on how rows are cut into tiles: tiles of {', '.join(map(str, tiles))} positions give different results. "
            "Accumulate in the loop (total = total + ...) and store after it, or fix the tile, as in hl.tile(..., block_size=16)"
        )
    axis, carry = next((axis, each) for axis, each in values if not isinstance(each, Tensor))
    names = ", ".join(dict.fromkeys(named(each) for _, each in values if not isinstance(each, Tensor)))
    return KernelError(
        f"{names}, carried around {axis}, depends on how rows are cut into tiles: it is not a recognised reduction (sum, prod, "
        "max, min, any, all, products, statistics rescaled by a maximum) that is read after its loop, and tiles of "
        f"{', '.join(map(str, tiles))} positions give different results. Fix the tile, as in hl.tile(..., block_size=16), or "
        f"write {carry} as a reduction"
    )
