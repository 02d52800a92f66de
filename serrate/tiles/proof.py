"""Whether the compiler may choose a tile size (rule 6).

In: the program of a kernel. Out: the carried values for which this is not proven, and the inputs of a test.

After its loop, a recognised reduction does not depend on how the row is cut into tiles; inside the loop, it covers only the
tiles so far. If a carried value is read inside its loop, or is not recognised, the kernel runs on random data with tiles of one
position, three positions, and the whole row. If the results agree, the tile size is "tested, not proven"; if not, the user must
fix it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from serrate.errors import KernelError
from serrate.ir.loops import Block, If, While, written_by
from serrate.ir.tile import SERIAL, Axis, Carry, Loop, TileProgram, statements
from serrate.lower.passes.common import blocks_read, names_in
from serrate.tensor import JaggedTensor

WHOLE = 512
"""The longest row that is tested in one tile."""
FEW = 1 << 11
"""The most elements for which programs are tested on the reference backend, which needs no compiler."""


def unproven(program: TileProgram) -> list[tuple[Axis, Carry]]:
    """Carried values that may depend on a tile size that the user left open."""
    found: dict[Carry, Axis] = {}
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Loop) and node.kind is SERIAL:
            axis = program.axis_of(node.domain)
            if axis is not None and axis.block is None:
                doubtful = (c for c in node.carried if c.reduction is None or _is_read(c, node))
                found |= {carry: axis for carry in doubtful if carry not in found}
    return [(axis, carry) for carry, axis in found.items()]


def _is_read(carry: Carry, loop: Loop) -> bool:
    """Whether anything but its own update depends on a carried value inside its loop: what is stored, what decides a branch, or
    another carried value."""
    own = {local.name for local in carry.locals}
    others = {local.name for each in loop.carried if each is not carry for local in each.locals}
    reached, before = set(own), set[str]()
    while reached != before:
        before = set(reached)
        for node in statements(loop.body):
            if not isinstance(node, Block | If | While):
                continue
            tests = node.guard if isinstance(node, If | While) else ()
            read = names_in(*(side for test in tests for side in (test.left, test.right))) if tests else blocks_read(node)
            if not read & reached:
                continue
            written = {local.name for local in written_by(node)}
            if not written or written & others:
                return True
            reached |= written
    return False


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


def refusal(values: Sequence[tuple[Axis, Carry]], tiles: Sequence[int]) -> KernelError:
    """The error for values that depend on the size of a tile."""
    (axis, carry), *_ = values
    names = ", ".join(dict.fromkeys(str(c) for _, c in values))
    return KernelError(
        f"{names}, carried around {axis}, depends on how rows are cut into tiles: it is not a recognised reduction (sum, prod, "
        "max, min, any, all, products, statistics rescaled by a maximum) that is read after its loop, and tiles of "
        f"{', '.join(map(str, tiles))} positions give different results. Fix the tile, as in hl.tile(..., block_size=16), or "
        f"write {carry} as a reduction"
    )
