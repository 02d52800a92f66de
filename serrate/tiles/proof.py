"""Whether the compiler may choose a tile size (rule 6).

In: the program of a kernel. Out: the carried values and stores for which this is not proven, and the inputs of a test.

After its loop, a recognised reduction does not depend on how the row is cut into tiles; inside the loop, it covers only the
tiles so far. If every iteration stores to the same place, the last tile decides. A reduction or scan of the lanes of a tile
covers that tile only, which no longer matters once a carried value or an atomic add has combined all of them. All lanes of a tile
read before any of them stores, so what one reads of what another stores depends on whether they are in one tile. A kernel is
tested if a carried value is read inside its loop, is not recognised, or depends on a reduction of one tile; if stores overwrite
each other, or depend on such a reduction; or if an iteration may read what another one stores (`read_back.py`). It runs on random
data with tiles of one position, three positions, and the whole row. If the results agree, the tile size is "tested, not proven";
if not, the user must fix it. The rows are those of a call: if none has two positions, the test shows nothing, and a later call is
tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from serrate.errors import KernelError
from serrate.ir.expr import Element, Environment, Expr, Symbol
from serrate.ir.loops import Block, Held, Running, While, Write, values_of, written_by
from serrate.ir.tile import SERIAL, Axis, Carry, Loop, TileProgram, statements, walk
from serrate.ir.values import Call, Tensor, Value
from serrate.lower.passes.common import names_in
from serrate.schedule.dependences import is_read_inside
from serrate.tensor import JaggedTensor
from serrate.tiles.carried import COMBINES
from serrate.tiles.read_back import ReadBack, read_back

WHOLE = 512
"""The longest row that is tested in one tile."""
FEW = 1 << 11
"""The most elements for which programs are tested on the reference backend, which needs no compiler."""


@dataclass(frozen=True)
class OfOneTile:
    """A tensor to which values are stored that depend on a reduction or scan of one tile."""

    tensor: Tensor


Suspect: TypeAlias = Carry | Tensor | OfOneTile | ReadBack
"""A carried value, or a tensor that is overwritten, gets values of one tile or is read beside the place of a store, which may
depend on a tile size."""


def unproven(program: TileProgram) -> list[tuple[Axis, Suspect]]:
    """Carried values and stores that may depend on a tile size that the user left open."""
    found: dict[tuple[Axis, Suspect], None] = {}
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Loop):
            axis = program.axis_of(node.domain)
            if axis is not None and axis.block is None:
                axes = [a for a in program.axes if a.original is axis]
                suspects: list[Suspect] = []
                if node.kind is SERIAL:
                    suspects += [c for c in node.carried if c.reduction is None or is_read_inside(c, node)]
                    suspects += _overwritten(node, {s for a in axes for s in _symbols(a)})
                suspects += _of_one_tile(node, axes)
                suspects += read_back(program, node)
                found |= dict.fromkeys((axis, each) for each in suspects)
    return list(found)


def name_of(each: Suspect) -> str:
    """Its name in messages."""
    return each.name if isinstance(each, Tensor) else each.tensor.name if isinstance(each, OfOneTile | ReadBack) else str(each)


def _overwritten(loop: Loop, own: set[Symbol]) -> Iterator[Tensor]:
    """Tensors that every iteration of a loop, with its `own` symbols, stores to at the same place. (Which place an index from
    memory selects is not known.)"""
    for node in statements(loop.body):
        if isinstance(node, Write) and not node.add:
            used = {s for e in node.index for s in e.symbols}
            if not used & own and names_in(*node.index) == {s.name for s in used}:
                yield node.tensor


def _of_one_tile(loop: Loop, axes: Sequence[Axis]) -> Iterator[Suspect]:
    """Carried values and stores that depend on a reduction or scan of one tile of a loop over these axes, other than by combining
    it with a carried value.

    A store whose place is computed from the number or the bounds of the tile is meant for that tile. A reduction may bound loops,
    as the longest row of a tile does: only values are followed, not conditions."""
    lanes = {a.position for a in axes}
    tile = {s for a in axes for s in _symbols(a)} - lanes
    carries = {local.name: each for each in loop.carried if each.reduction is not None for local in each.locals}
    tainted: set[str] = set()

    def reads(value: Value) -> bool:
        pending, seen = [value], set[int]()
        while pending:
            each = pending.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            names = [v.local.name for v in each.args if isinstance(v, Held)]
            if isinstance(each, Held) and each.local.name in tainted:
                return True
            # Combined with a carried value, it stands for all tiles so far: `is_read_inside` judges who reads that.
            is_combined = isinstance(each, Call) and each.function in COMBINES and len(names) == len(each.args)
            if not (is_combined and carries.keys() & names):
                pending += each.args
        return False

    for node in statements(loop.body):
        if isinstance(node, Write):
            # A sum of sums is one over all tiles.
            is_sum = node.add and isinstance(node.value, Held)
            if not is_sum and {s for e in node.index for s in e.symbols}.isdisjoint(tile) and reads(node.value):
                yield OfOneTile(node.tensor)
        elif isinstance(node, Block):
            scanned = {node.axis.symbol} if isinstance(node, Running) and node.axis is not None else set()
            depends = any(map(reads, values_of(node)))
            for local in written_by(node):
                over = {lane.symbol for lane in node.lanes} - {lane.symbol for lane in local.lanes} | scanned
                if local.name in carries:
                    if depends:
                        yield carries[local.name]
                elif depends or over & lanes:
                    tainted.add(local.name)


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


def is_telling(
    program: TileProgram, suspects: Sequence[tuple[Axis, Suspect]], environment: Environment, env: Mapping[str, Any]
) -> bool:
    """Whether the loops of suspects run over several positions in a call with these numbers and arguments: only then does a tile
    of one differ from the whole row."""
    axes = {axis for axis, _ in suspects}
    for phase in program.phases:
        for node, around in walk(phase.body):
            if not isinstance(node, Loop) or program.axis_of(node.domain) not in axes:
                continue
            if _most(node, around, environment, env) < 2:
                return False
            if any(_most(loop, around[:k], environment, env) < 1 for k, loop in enumerate(around)):
                return False
    return True


def _most(loop: Loop, around: Sequence[Loop], environment: Environment, env: Mapping[str, Any]) -> int:
    """How many positions a loop has at most. What it reads from memory is at most a length or an integer of the arguments, and a
    bound that moves with an outer loop is at most that loop's extent."""
    extent = loop.domain.extent_expr
    reads, own = any(isinstance(e, Element) for e in extent.walk()), _symbols_outside_memory(extent)
    if not reads and own <= environment.symbols.keys():
        return int(extent.evaluate(environment))
    given = (
        [_most(outer, around[:k], environment, env) for k, outer in enumerate(around)] if own - environment.symbols.keys() else []
    )
    if reads:
        given += [x.max_length for x in env.values() if isinstance(x, JaggedTensor)]
        given += [int(x.max()) for x in env.values() if isinstance(x, torch.Tensor) and not x.is_floating_point() and x.numel()]
    return max(given, default=0)


def _symbols_outside_memory(e: Expr) -> set[Symbol]:
    """The symbols of an expression, except those that only select what it reads from memory."""
    if isinstance(e, Element):
        return set()
    return {e} if isinstance(e, Symbol) else {s for operand in e.operands for s in _symbols_outside_memory(operand)}


def passes_floats(program: TileProgram, env: Mapping[str, Any]) -> bool:
    """Whether there are float arguments that may be any number; one that a `while` compares with may keep it from ending."""
    loops = (isinstance(n, While) for phase in program.phases for n in statements(phase.body))
    return any(isinstance(x, float) for x in env.values()) and not any(loops)


def at_random(env: Mapping[str, Any], *, floats: bool = False) -> dict[str, Any]:
    """The same arguments with other contents, on a CPU: floats are random, those passed as arguments only if `floats` is set.
    Integers are copied, because they may be indices."""
    generator = torch.Generator("cpu").manual_seed(0)

    def other(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x.to("cpu", copy=True)
        return torch.randn(x.shape, generator=generator, device="cpu").to(x.dtype)

    def argument(x: Any) -> Any:
        if isinstance(x, JaggedTensor):
            return x.cpu().with_values(other(x.values))
        if isinstance(x, torch.Tensor):
            return other(x)
        if floats and isinstance(x, float):
            return float(torch.rand((), generator=generator, dtype=torch.float64, device="cpu")) / 2 + 0.25
        return x

    with torch.no_grad():
        return {name: argument(x) for name, x in env.items()}


def agree(results: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether results agree within rounding."""
    first, *others = results
    for other in others:
        for a, b in zip(first, other, strict=True):
            near = 1e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-4
            if not torch.allclose(a.double(), b.double(), rtol=near, atol=near, equal_nan=True):
                return False
    return True


def refusal(values: Sequence[tuple[Axis, Suspect]], tiles: Sequence[int]) -> KernelError:
    """The error for values that depend on the size of a tile."""
    sizes = ", ".join(map(str, tiles))
    beside = sorted(((axis, each) for axis, each in values if isinstance(each, ReadBack)), key=lambda pair: not pair[1].reads)
    if beside:
        axis, access = beside[0]
        return KernelError(
            f"iterations of {axis} {'read' if access.reads else 'overwrite'} elements of {access.tensor.name} that other "
            "iterations store, so the result depends on how rows are cut into tiles: tiles of "
            f"{sizes} positions give different results. "
            f"{'Read from a copy made before the loop' if access.reads else 'Store each element once'}, store to another tensor, "
            "or fix the tile, as in hl.tile(..., block_size=16): tiles of a loop inside of another one run in order"
        )
    carried = [(axis, each) for axis, each in values if isinstance(each, Carry)]
    stores = [(axis, each) for axis, each in values if isinstance(each, Tensor)]
    if not carried and len(stores) == len(values):
        axis, tensor = stores[0]
        return KernelError(
            f"every iteration of {axis} stores to the same elements of {tensor.name}, so the last tile decides, and the result "
            f"depends on how rows are cut into tiles: tiles of {sizes} positions give different results. "
            "Accumulate in the loop (total = total + ...) and store after it, or fix the tile, as in hl.tile(..., block_size=16)"
        )
    if not carried:
        axis, each = next((axis, each) for axis, each in values if isinstance(each, OfOneTile))
        return KernelError(
            f"what is stored to {name_of(each)} depends on how rows are cut into tiles: in {axis}, it is computed from a "
            f"reduction or scan of one tile, and tiles of {sizes} positions give different results. Accumulate over all tiles "
            "(total = total + ...) and store after the loop or in a second one, add with hl.atomic_add, or fix the tile, as in "
            "hl.tile(..., block_size=16)"
        )
    axis, carry = carried[0]
    names = ", ".join(dict.fromkeys(name_of(each) for _, each in carried))
    return KernelError(
        f"{names}, carried around {axis}, depends on how rows are cut into tiles: it is not a recognised reduction (sum, prod, "
        "max, min, any, all, products, statistics rescaled by a maximum) that is read after its loop, and tiles of "
        f"{sizes} positions give different results. Fix the tile, as in hl.tile(..., block_size=16), or "
        f"write {carry} as a reduction"
    )
