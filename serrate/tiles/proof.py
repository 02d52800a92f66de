"""Whether the compiler may choose a tile size (rule 6).

In: the program of a kernel. Out: the carried values and stores for which this is not proven, and the inputs of a test.

After its loop, a recognised reduction does not depend on how the row is cut into tiles; inside the loop, it covers only the
tiles so far. A store to the same place in every iteration leaves what the last tile gave. A reduction or scan of one tile covers
that tile. If a carried value is read inside its loop, is not recognised, or depends on a reduction of one tile, or if stores
overwrite each other or depend on one, the kernel runs on random data with tiles of one position, three
positions, and the whole row. If the results agree, the tile size is "tested, not proven"; if not, the user must fix it. The rows
are those of a call: if none has two positions, the test shows nothing, and a later call is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from serrate.errors import KernelError
from serrate.ir.expr import Element, Environment, Expr, Symbol
from serrate.ir.loops import Block, Held, Reduce, Running, While, Write, values_of, written_by
from serrate.ir.tile import SERIAL, Axis, Carry, Loop, TileProgram, statements, walk
from serrate.ir.values import Call, Tensor, Value
from serrate.lower.passes.common import names_in
from serrate.schedule.dependences import is_read_inside
from serrate.tensor import JaggedTensor
from serrate.tiles.carried import COMBINES

WHOLE = 512
"""The longest row that is tested in one tile."""
FEW = 1 << 11
"""The most elements for which programs are tested on the reference backend, which needs no compiler."""


@dataclass(frozen=True)
class OfOneTile:
    """A tensor to which values are stored that depend on a reduction or scan of one tile."""

    tensor: Tensor


Doubt: TypeAlias = Carry | Tensor | OfOneTile
"""A carried value, or a tensor that is overwritten or gets values of one tile, which may depend on a tile size."""


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
                doubtful += [each for each in _of_one_tile(node, own) if each not in doubtful]
                found |= {each: axis for each in doubtful if each not in found}
    return [(axis, each) for each, axis in found.items()]


def named(each: Doubt) -> str:
    """Its name in messages."""
    return each.name if isinstance(each, Tensor) else each.tensor.name if isinstance(each, OfOneTile) else str(each)


def _overwritten(loop: Loop, own: set[Symbol]) -> Iterator[Tensor]:
    """Tensors that every iteration of a loop, with its `own` symbols, stores to at the same place. (Which place an index from
    memory selects is not known.)"""
    for node in statements(loop.body):
        if isinstance(node, Write) and not node.add:
            used = {s for e in node.index for s in e.symbols}
            if not used & own and names_in(*node.index) == {s.name for s in used}:
                yield node.tensor


def _of_one_tile(loop: Loop, own: set[Symbol]) -> Iterator[Doubt]:
    """Carried values and stores that depend on a reduction or scan of one tile of a loop, with its `own` symbols, other than by
    combining it with a carried value."""
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
            if not (node.add and isinstance(node.value, Held)) and reads(node.value):
                yield OfOneTile(node.tensor)
        elif isinstance(node, Block):
            partial = isinstance(node, Reduce | Running) and any(lane.symbol in own for lane in node.lanes)
            if isinstance(node, Reduce):
                partial = partial and not any(lane.symbol in own for lane in node.local.lanes)
            depends = any(map(reads, values_of(node)))
            for local in written_by(node):
                if local.name in carries:
                    if depends:
                        yield carries[local.name]
                elif partial or depends:
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
    program: TileProgram, doubtful: Sequence[tuple[Axis, Doubt]], environment: Environment, env: Mapping[str, Any]
) -> bool:
    """Whether the loops in doubt run over several positions in a call with these numbers and arguments: only then does a tile of
    one differ from the whole row."""
    axes = {axis for axis, _ in doubtful}
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


def refusal(values: Sequence[tuple[Axis, Doubt]], tiles: Sequence[int]) -> KernelError:
    """The error for values that depend on the size of a tile."""
    carried = [(axis, each) for axis, each in values if isinstance(each, Carry)]
    stores = [(axis, each) for axis, each in values if isinstance(each, Tensor)]
    sizes = ", ".join(map(str, tiles))
    if not carried and stores:
        axis, tensor = stores[0]
        return KernelError(
            f"{tensor.name} is stored to at the same place in every iteration of {axis}, and what the last one leaves depends on "
            f"how rows are cut into tiles: tiles of {sizes} positions give different results. "
            "Accumulate before the store (total = total + ...) and store after the loop, or fix the tile, as in "
            "hl.tile(..., block_size=16)"
        )
    if not carried:
        axis, doubt = values[0]
        return KernelError(
            f"what is stored to {named(doubt)} depends on how rows are cut into tiles: it is computed from a reduction or scan "
            f"in one iteration of {axis}, and tiles of {sizes} positions give different results. Carry the reduction around the "
            "loop and store in a second one, or fix the tile, as in hl.tile(..., block_size=16)"
        )
    axis, carry = carried[0]
    names = ", ".join(dict.fromkeys(named(each) for _, each in carried))
    return KernelError(
        f"{names}, carried around {axis}, depends on how rows are cut into tiles: it is not a recognised reduction (sum, prod, "
        "max, min, any, all, products, statistics rescaled by a maximum) that is read after its loop, and tiles of "
        f"{sizes} positions give different results. Fix the tile, as in hl.tile(..., block_size=16), or "
        f"write {carry} as a reduction"
    )
