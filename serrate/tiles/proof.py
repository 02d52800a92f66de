"""Whether the compiler may choose a tile size (rule 6).

In: the program of a kernel. Out: the carried values and stores for which this is not proven, and the inputs of a test.

After its loop, a recognised reduction does not depend on how the row is cut into tiles; inside the loop, it covers only the
tiles so far. A store to the same place in every iteration leaves what the last tile gave. A reduction over the lanes of a tile
covers that tile only, which no longer matters once a carried value or an atomic add has combined all of them. If a carried
value is read inside its loop, or is not recognised, if stores overwrite each other, or if they store a reduction of one tile, the
kernel runs on random data with tiles of one position, three positions, and the whole row. If the results agree, the tile size is
"tested, not proven"; if not, the user must fix it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from serrate.errors import KernelError
from serrate.ir.expr import Symbol
from serrate.ir.loops import Block, Declare, Held, Running, Write, values_of, written_by
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
    found: dict[tuple[Axis, Doubt], None] = {}
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Loop):
            axis = program.axis_of(node.domain)
            if axis is not None and axis.block is None:
                axes = [a for a in program.axes if a.original is axis]
                doubtful: list[Doubt] = [*_partial(node, axes)]
                if node.kind is SERIAL:
                    doubtful += [c for c in node.carried if c.reduction is None or is_read_inside(c, node)]
                    doubtful += _overwritten(node, {s for a in axes for s in _symbols(a)})
                found |= dict.fromkeys((axis, each) for each in doubtful)
    return list(found)


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


def _partial(loop: Loop, axes: Sequence[Axis]) -> Iterator[Tensor]:
    """Tensors to which a loop over these axes stores a value that was reduced over the lanes of one tile.

    A store whose place is computed from the number or the bounds of the tile is meant for that tile. A reduction may bound loops,
    as the longest row of a tile does: only values are followed, not conditions."""
    lanes = {a.position for a in axes}
    tile = {s for a in axes for s in _symbols(a)} - lanes
    nodes = list(statements(loop.body))
    inside = {node.local for node in nodes if isinstance(node, Declare)}
    partial: set[str] = set()
    for node in nodes:
        if not isinstance(node, Block):
            continue
        reads = any(v.local.name in partial for value in values_of(node) for v in value.walk() if isinstance(v, Held))
        scanned = {node.axis.symbol} if isinstance(node, Running) and node.axis is not None else set()
        for local in written_by(node):
            over = {lane.symbol for lane in node.lanes} - {lane.symbol for lane in local.lanes} | scanned
            if local in inside and (reads or over & lanes):
                partial.add(local.name)
        if isinstance(node, Write) and not node.add and reads and not {s for e in node.index for s in e.symbols} & tile:
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
            f"what is stored to {tensor.name} depends on how rows are cut into tiles: in {axis}, it is computed from one tile, "
            "or every iteration stores to the same elements, so the last tile decides. Tiles of "
            f"{', '.join(map(str, tiles))} positions give different results. Accumulate over all tiles (total = total + ...) and "
            "store after the loop, add with hl.atomic_add, or fix the tile, as in hl.tile(..., block_size=16)"
        )
    axis, carry = next((axis, each) for axis, each in values if not isinstance(each, Tensor))
    names = ", ".join(dict.fromkeys(named(each) for _, each in values if not isinstance(each, Tensor)))
    return KernelError(
        f"{names}, carried around {axis}, depends on how rows are cut into tiles: it is not a recognised reduction (sum, prod, "
        "max, min, any, all, products, statistics rescaled by a maximum) that is read after its loop, and tiles of "
        f"{', '.join(map(str, tiles))} positions give different results. Fix the tile, as in hl.tile(..., block_size=16), or "
        f"write {carry} as a reduction"
    )
