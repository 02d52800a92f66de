"""The interpreter's implementation of `serrate.language`, on concrete data.

In: calls made by a kernel. Out: tiles and values that hold data. The compiler implements the same interface symbolically
(`tiles/trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.frontend.kernel.machine import BlockSize, user_frame
from serrate.interpret import functions, loops, memory, reducing
from serrate.interpret.axes import ConcreteAxis, fixed
from serrate.interpret.run import KernelRun
from serrate.interpret.values import ConcreteTile, ConcreteValue, value_of


class Interpreting(KernelRun):
    """One kernel call in the interpreter."""

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A torch function on tiles."""
        return functions.call(function, args, kwargs)

    def ranges(self, what: str, begin_or_end: Any, end: Any, block_size: Any, *, step: bool = False) -> Any:
        """The iteration of `hl.tile` and `hl.grid`."""
        return loops.ranges(what, begin_or_end, end, block_size, step=step)

    def jagged_range(self, lengths: Any, block_size: Any) -> Any:
        """The iteration of `hl.jagged_tile`."""
        return loops.jagged_range(lengths, block_size)

    def load(self, tensor: Any, key: Any, extra_mask: Any = None) -> ConcreteValue:
        """`tensor[key]`."""
        return memory.load(tensor, key, extra_mask)

    def store(self, tensor: Any, key: Any, x: Any, extra_mask: Any = None, *, add: bool = False) -> None:
        """`tensor[key] = x`."""
        memory.store(tensor, key, x, extra_mask, add=add)

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> ConcreteValue:
        """The same number in every lane."""
        ones = [_lanes(dim) for dim in shape]
        number = value.item() if isinstance(value, (ConcreteValue, torch.Tensor)) else value
        with torch._C.DisableTorchFunction():
            conditions = [c.moved([d], len(ones)) for d, lanes in enumerate(ones) for c in lanes.conditions]
            data = torch.full([lanes.data.shape[0] for lanes in ones], number, dtype=dtype, device="cpu")
            pending = [p for lanes in ones for p in lanes.pending]
            return ConcreteValue(data, [lanes.axes[0] for lanes in ones], conditions, (), pending)

    def arange(self, start: Any, end: Any, step: int, dtype: torch.dtype) -> ConcreteValue:
        """Consecutive numbers over a fixed number of lanes, or over those of a block size."""
        if end is None and step == 1:
            lanes = _lanes(start)
            begin = start.tile.begin if isinstance(start, BlockSize) and start.tile is not None else 0
            return (lanes - begin).to(dtype)  # type: ignore[no-any-return]
        first, last = (0, start) if end is None else (start, end)
        if isinstance(last, BlockSize) and loops.number_of(first, "hl.arange") == 0 and step == 1:
            return self.arange(last, None, 1, dtype)
        numbers = range(loops.number_of(first, "hl.arange"), loops.number_of(last, "hl.arange"), step)
        with torch._C.DisableTorchFunction():
            return ConcreteValue(torch.tensor(list(numbers), dtype=dtype, device="cpu"), [fixed(len(numbers))])

    def positions(self, dim: Any) -> ConcreteValue:
        """The positions of a tile, also where its block size stands for it, or of the lanes of a number."""
        tile = dim.axis.tile if isinstance(dim, BlockSize) else None
        return _lanes(dim if tile is None else tile)

    def number(self, value: Any, what: str) -> int:
        """A size as a number."""
        return loops.number_of(value, what)

    def block_size(self, low: Any, high: Any) -> int:
        """The result of `hl.register_block_size`."""
        frame = user_frame()
        assert frame is not None
        extent = loops.number_of(low if high is None else high, "hl.register_block_size")
        least = 1 if high is None else loops.number_of(low, "hl.register_block_size")
        size = max(least, self.block_of(self.registered(frame), extent))
        return BlockSize(size, ConcreteAxis(f"the block of line {frame.f_lineno}"))

    def dot(self, a: Any, b: Any, acc: Any, out_dtype: torch.dtype | None) -> Any:
        """A matrix product of tiles."""
        return reducing.dot(a, b, acc, out_dtype)

    def associative_scan(self, combine: Callable[..., Any], x: Any, dim: int, reverse: bool) -> Any:
        """A scan with a function."""
        with torch._C.DisableTorchFunction():
            return reducing.associative_scan(combine, x, dim, reverse)

    def fill(self, x: Any, value: float) -> ConcreteValue:
        """Makes every lane exist."""
        with torch._C.DisableTorchFunction():
            return reducing.fill(value_of(x), value)


def _lanes(dim: Any) -> ConcreteValue:
    if isinstance(dim, BlockSize) and dim.tile is not None:
        dim = dim.tile
    if isinstance(dim, ConcreteTile):
        return dim.index
    size = loops.number_of(dim, "a shape")
    with torch._C.DisableTorchFunction():
        lanes = torch.arange(size, device="cpu")
    axis = dim.axis if isinstance(dim, BlockSize) else fixed(size)
    return ConcreteValue(lanes, [axis])
