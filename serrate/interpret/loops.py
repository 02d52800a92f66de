"""Loops of a kernel: what they iterate over, and what they carry.

In: the bounds of `hl.tile` and `hl.grid`. Out: tiles, one per iteration; and at the end of every iteration, the corrected carried
values.

A finished row rests (rule 5). The interpreter runs the user's own loop; `source.py` finds the carried names and calls
`Loop.carry` for each of them at the end of an iteration. Every value records the reductions that feed it: when each ran, and for
which lanes of the value something existed. The reductions of this iteration decide: where none of them had an existing lane, the
old value stays. If no reduction of the iteration feeds a value, the new value replaces the old one. Each lane of the carried
value is decided separately. A component is one lane, or all of its lanes agree, unless they are positions or columns of the row;
in that case, only a decision per lane does not depend on which lanes share a tile.

A carried value keeps only loop-invariant conditions (rule 6). The bound of a plain range is dropped, because reads past it gave
zeros; a condition on a row's length is refused, because the contents of holes would count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from serrate.errors import RaggedSizeError
from serrate.frontend.kernel.machine import BlockSize, current, refuse, user_frame
from serrate.frontend.kernel.vocabulary import loop_bounds, ragged_bound_hint
from serrate.interpret.axes import ConcreteAxis, FedLanes, LaneMask, Pending
from serrate.interpret.run import KernelRun
from serrate.interpret.values import ConcreteTile, ConcreteValue, Unusable, value_of


class LoopRun:
    """One execution of a `for` or `while` statement of a kernel. A `for` over anything but tiles is plain Python: it only repeats
    its body, as if the statements were written several times."""

    def __init__(self, run: KernelRun, is_while: bool) -> None:
        self._run = run
        self._is_while = is_while
        self._carried: dict[str, Any] = {}
        self.iterations = 0
        self.tile_born: int | None = None
        self.parallel = False
        self.start: int = run.loops[-1].start if run.loops else run.clock
        run.loops.append(self)

    def step(self) -> None:
        """Begins an iteration."""
        self.iterations += 1
        if self.tile_born is not None:
            self.start = self.tile_born
        elif self._is_while:
            self._run.clock += 1
            self.start = self._run.clock

    def carry(self, name: str, value: Any) -> Any:
        """A carried value at the end of an iteration, or before the first, as the next iteration or the rest of the kernel sees
        it."""
        before = self._carried.get(name)
        is_plain = self.tile_born is None and not self._is_while
        if self.iterations and not is_plain and value is not before and isinstance(value, ConcreteValue):
            if self.parallel:
                value = _unusable(
                    before,
                    f"{name} is carried from one program to the next, but programs run in any order: "
                    "put a loop inside, or use hl.atomic_add",
                )
            else:
                value = self._rested(name, before, value)
        self._carried[name] = value
        return value

    def _rested(self, name: str, before: Any, value: ConcreteValue) -> ConcreteValue | Unusable:
        old = value_of(before) if isinstance(before, (int, float, torch.Tensor, ConcreteValue)) else None
        with torch._C.DisableTorchFunction():
            if old is not None and old.ndim < value.ndim:
                # The first iteration may add dims by broadcasting, as in torch.
                grown = value.ndim - old.ndim
                lead = old.data.reshape((1,) * grown + tuple(old.data.shape))
                old = old.arranged(lead, range(grown, value.ndim), (None,) * grown + old.axes)
            known = old.conditions if old is not None else ()
            new = [c for c in value.conditions if not any(_same(c, k) for k in known)]
            for c in new:
                if c.row and (c.born >= self.start or self.iterations > 1):
                    return _unusable(
                        before,
                        f"the carried value {name} exists under a condition on the length of a row that varies with the loop: "
                        "reduce over that dim first, or make its lanes exist with hl.fill(x, 0)",
                    )
            was = before.dtype if isinstance(before, ConcreteValue) else value.dtype
            if value.dtype.is_floating_point and not was.is_floating_point:
                refuse(
                    f"the carried value {name} is {was} before the loop and {value.dtype} after an iteration, "
                    "so it would be rounded only when it is stored: "
                    f"start with that dtype, or convert what is added, as in x.sum(1).to({was})"
                )
            kept = [k for k in known if any(_same(c, k) for c in value.conditions)]
            kept += [c for c in new if c.row or c.born < self.start]
            data = value.data
            now = [f.mask for f in value.fed if f.time >= self.start]
            if now and old is not None:
                if not all(_fits(o, n) for o, n in zip(_dims(old), _dims(value), strict=True)):
                    refuse(
                        f"the carried value {name} has shape {tuple(old.data.shape)} before an iteration and "
                        f"{tuple(data.shape)} after it"
                    )
                mask = now[0]
                for each in now[1:]:
                    mask = mask | each
                data = torch.where(mask, data, old.data.to(data.dtype)).to(data.dtype)
            return ConcreteValue(data, value.axes, kept, self._outer(value.fed), value.pending, value.dtype)

    def _outer(self, fed: Sequence[FedLanes]) -> list[FedLanes]:
        """The reductions as enclosing loops see them: merged, per iteration of the enclosing loop."""
        outer = self._run.loops[-2].start if len(self._run.loops) > 1 else None
        found = [f.mask for f in fed if outer is not None and f.time >= outer]
        if outer is None or not found:
            return []
        mask = found[0]
        for each in found[1:]:
            mask = mask | each
        return [FedLanes(mask, outer)]

    def leave(self) -> None:
        """Ends the loop."""
        del self._run.loops[self._run.loops.index(self) :]


def _unusable(before: Any, reason: str) -> Unusable:
    """Refuses to carry a value that existed before the loop; one that did not may be set before it is read."""
    if before is not None and not isinstance(before, Unusable):
        refuse(reason)
    return Unusable(reason)


def _dims(x: ConcreteValue) -> list[tuple[ConcreteAxis | None, int]]:
    return list(zip(x.axes, x.data.shape, strict=True))


def _fits(old: tuple[ConcreteAxis | None, int], new: tuple[ConcreteAxis | None, int]) -> bool:
    """Whether a dim of a carried value is unchanged, or broadcasts to its new size."""
    return old[0] is None or old[1] == new[1]


def _same(one: LaneMask, other: LaneMask) -> bool:
    """Whether two conditions are equal, on the same dims."""
    if one.dims != other.dims or one.row != other.row:
        return False
    return one.key == other.key or (one.mask.shape == other.mask.shape and torch.equal(one.mask, other.mask))


class ConcreteRange:
    """The result of `hl.tile`, `hl.jagged_tile` and `hl.grid`: iterated once, by a `for` statement of the kernel."""

    def __init__(self, what: str, dims: Sequence[tuple[int, int, int, ConcreteAxis]], *, single: bool) -> None:
        self._what = what
        self._dims = dims
        self._single = single

    def __iter__(self) -> Iterator[Any]:
        run = current(self._what)
        frame = user_frame()
        if not run.loops or frame is None or frame.f_lineno not in run.lines:
            refuse(f"{self._what} must be used in a `for` statement of the kernel itself, not in a function it calls")
        loop = run.loops[-1]
        loop.parallel = run.depth == 0
        if loop.parallel and run.accesses is not None:
            run.accesses.new_phase()
        run.depth += 1
        try:
            counts = [-(-max(0, end - begin) // block) for begin, end, block, *_ in self._dims]
            for numbers in product(*map(range, counts)):
                run.clock += 1
                loop.tile_born = run.clock
                if loop.parallel:
                    run.program += 1
                made = tuple(self._one(n, count, *dim) for n, count, dim in zip(numbers, counts, self._dims, strict=True))
                yield made[0] if self._single else made
        finally:
            run.depth -= 1

    def _one(self, number: int, count: int, begin: int, end: int, block: int, axis: ConcreteAxis) -> Any:
        if self._what == "hl.grid":
            return begin + number * block
        return ConcreteTile(axis, number, (begin, end), block, count)


def number_of(x: Any, what: str) -> int:
    """A bound as a number."""
    if isinstance(x, ConcreteValue):
        return x.__index__()
    if isinstance(x, torch.Tensor) and x.dim() == 0 and not x.is_floating_point():
        return int(x.item())
    try:
        return x.__index__()  # type: ignore[no-any-return]
    except (AttributeError, RaggedSizeError):
        refuse(f"{what}: bounds must be integers, not a {type(x).__name__}{ragged_bound_hint(x)}")


def ranges(what: str, begin_or_end: Any, end: Any, block_size: Any, *, step: bool = False) -> ConcreteRange:
    """The loops of an `hl.tile` or `hl.grid`: an end or list of ends, optionally with begins."""
    run = current(what)
    single = not isinstance(begin_or_end, (list, tuple))
    frame = user_frame()
    assert frame is not None
    dims = []
    for n, (first, last, size) in enumerate(loop_bounds(what, begin_or_end, end, block_size, step=step)):
        bounds = (number_of(first, what), number_of(last, what))
        if step:
            dims.append((*bounds, 1 if size is None else number_of(size, what), ConcreteAxis("the grid")))
            continue
        site = (frame.f_code, frame.f_lasti, n)
        block = run.block_of(site, bounds[1] - bounds[0]) if size is None else number_of(size, what)
        if block < 1:
            refuse(f"{what}: a block size must be at least 1, not {block}")
        named = ConcreteAxis(
            f"the tile of line {frame.f_lineno}" + ("" if single else f", number {n}"), lanes=block if size is not None else None
        )
        dims.append((*bounds, block, size.axis if isinstance(size, BlockSize) else named))
    return ConcreteRange(what, dims, single=single)


def jagged_range(lengths: Any, block_size: Any) -> ConcreteRange:
    """`hl.jagged_tile`: up to the longest row; each position exists if its row is long enough."""
    what = "hl.jagged_tile"
    run = current(what)
    value = value_of(lengths)
    if not isinstance(value, ConcreteValue) or value.ndim == 0:
        refuse("hl.jagged_tile takes the lengths of a tile of rows, such as jt.lengths[tile]; for one row, use hl.tile(length)")
    frame = user_frame()
    assert frame is not None
    with torch._C.DisableTorchFunction():
        rows = torch.where(
            value.exists().broadcast_to(value.data.shape), value.data, torch.zeros((), dtype=value.data.dtype, device="cpu")
        )
    longest = int(rows.max()) if rows.numel() else 0
    block = run.block_of((frame.f_code, frame.f_lasti, 0), longest) if block_size is None else number_of(block_size, what)
    axis = ConcreteAxis(f"the jagged tile of line {frame.f_lineno}")
    return _Jagged(what, (0, longest, block, axis), rows, value)


class _Jagged(ConcreteRange):
    """Tiles whose lanes exist where their row is long enough."""

    def __init__(self, what: str, dim: tuple[int, int, int, ConcreteAxis], rows: torch.Tensor, value: ConcreteValue) -> None:
        super().__init__(what, [dim], single=True)
        self._rows, self._value = rows, value

    def _one(self, number: int, count: int, begin: int, end: int, block: int, axis: ConcreteAxis) -> Any:
        with torch._C.DisableTorchFunction():
            positions = torch.arange(number * block, (number + 1) * block, device="cpu")
            mask = positions < self._rows[..., None]
        named = [own for own in self._value.axes if own is not None]
        shape = [size for size, own in zip(self._rows.shape, self._value.axes, strict=True) if own is not None]
        condition = Pending(
            mask.reshape([*shape, block]), (*named, axis), ("jagged", id(self), number), current(self._what).clock, (self,)
        )
        return ConcreteTile(axis, number, (begin, end), block, count, (condition,))
