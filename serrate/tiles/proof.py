"""Whether the size of a tile is the compiler's to choose (rule 6).

In: the program of a kernel. Out: the carried values of which that is not known from what they are; and what to try it on.

A recognised reduction is the same however a row is cut into tiles. Any other carried value is tried: with tiles of one position,
of three, and of the whole row, on random numbers. Where they agree, that is tested and not proven; where they do not, the user
must say how large a tile is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from serrate.errors import KernelError
from serrate.ir.tile import SERIAL, Axis, Carry, Loop, TileProgram, statements
from serrate.tensor import JaggedTensor

WHOLE = 512
"""The longest row that is tried in one tile."""
FEW = 1 << 11
"""Elements up to which programs are tried on the reference backend, which has nothing to build."""


def unproven(program: TileProgram) -> list[tuple[Axis, Carry]]:
    """Carried values that may depend on the size of a tile that nobody has fixed."""
    found: dict[Carry, Axis] = {}
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Loop) and node.kind is SERIAL:
            axis = program.axis_of(node.domain)
            if axis is not None and axis.block is None:
                found |= {carry: axis for carry in node.carried if carry.reduction is None and carry not in found}
    return [(axis, carry) for carry, axis in found.items()]


def tiles_to_try(env: Mapping[str, Any]) -> tuple[int, int, int]:
    """One position, three, and as many as the longest row has."""
    sizes = [x.max_length for x in env.values() if isinstance(x, JaggedTensor)]
    sizes += [n for x in env.values() if isinstance(x, torch.Tensor) for n in x.shape]
    return 1, 3, max(4, min(max(sizes, default=4), WHOLE))


def backend_to_try(env: Mapping[str, Any]) -> str:
    """Where a program is tried: few elements need no compiler."""
    tensors = [x.values if isinstance(x, JaggedTensor) else x for x in env.values()]
    return "reference" if sum(t.numel() for t in tensors if isinstance(t, torch.Tensor)) <= FEW else "cpp"


def at_random(env: Mapping[str, Any]) -> dict[str, Any]:
    """The same things with other numbers in them, on a CPU: random where they are floats, copies where they may be indices."""
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
    """Whether results are the same, as far as rounding lets them be."""
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
        f"{names}, carried around {axis}, depends on how rows are cut into tiles: it is no reduction that is known (sum, prod, "
        "max, min, any, all, products, statistics rescaled by a maximum), and tiles of "
        f"{', '.join(map(str, tiles))} positions give different results. Fix the tile, as in hl.tile(..., block_size=16), or "
        f"write {carry} as a reduction"
    )
