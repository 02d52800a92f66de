"""The tile language: functions for the body of a `@serrate.kernel`, in addition to torch's own functions.

In: bounds, indices, values of tiles. Out: tiles and values. Names and semantics are Helion's. Ragged tensors are indexed by
tiles like plain tensors; loads add the conditions under which positions exist. `docs/kernels.md` is the guide.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from serrate.frontend.kernel import random
from serrate.frontend.kernel.machine import current
from serrate.frontend.kernel.tunables import EnumFragment, IntegerFragment, PowerOfTwoFragment, fragment_of
from serrate.frontend.kernel.values import Tile, TileValue
from serrate.tensor import JaggedTensor

__all__ = [
    "EnumFragment",
    "IntegerFragment",
    "JaggedTensor",
    "PowerOfTwoFragment",
    "Tile",
    "TileValue",
    "arange",
    "associative_scan",
    "atomic_add",
    "device_num_sms",
    "dot",
    "fill",
    "full",
    "grid",
    "jagged_tile",
    "load",
    "rand",
    "randint",
    "register_block_size",
    "register_tunable",
    "specialize",
    "store",
    "tile",
    "zeros",
]

Bound: TypeAlias = Any
"""A number, a scalar tensor, or a value of one number."""
Sizes: TypeAlias = Any
"""A block size: a number, the result of `register_block_size`, or None if the compiler may choose it; or one for each dim."""


def tile(begin_or_end: Bound | Sequence[Bound], end: Bound | Sequence[Bound] | None = None, *, block_size: Sizes = None) -> Any:
    """The range of a loop over tiles: `hl.tile(n)`, `hl.tile(begin, end)`, or several dims at once.

    >>> import serrate
    >>> import serrate.language as hl
    >>> @serrate.kernel
    ... def begins(n: int):
    ...     out = torch.zeros(n, dtype=torch.int64)
    ...     for tile in hl.tile(n, block_size=4):
    ...         out[tile] = tile.begin
    ...     return out
    >>> begins(6)
    tensor([0, 0, 0, 0, 4, 4])

    In the outermost loop, tiles are independent programs, which may run in any order. Inner loops run in order.
    """
    return current("hl.tile").ranges("hl.tile", begin_or_end, end, block_size)


def grid(begin_or_end: Bound | Sequence[Bound], end: Bound | Sequence[Bound] | None = None, step: Any = None) -> Any:
    """The range of a loop over single positions, which are plain numbers or tuples of them."""
    return current("hl.grid").ranges("hl.grid", begin_or_end, end, step, step=True)


def jagged_tile(lengths: TileValue, *, block_size: Sizes = None) -> Any:
    """Tiles up to the longest row of a tile; anything indexed by such a tile exists only inside its row.

    For plain tensors with offsets that the kernel handles itself. Ragged tensors do not need it: use `hl.tile(jt.max_length)`.
    """
    return current("hl.jagged_tile").jagged_range(lengths, block_size)


def load(tensor: torch.Tensor | JaggedTensor, index: Sequence[Any], extra_mask: Any = None) -> TileValue:
    """`tensor[index]`. Where the mask is false, nothing is read, and the lane exists and holds 0."""
    return current("hl.load").load(tensor, list(index), extra_mask)  # type: ignore[no-any-return]


def store(tensor: torch.Tensor | JaggedTensor, index: Sequence[Any], value: Any, extra_mask: Any = None) -> None:
    """`tensor[index] = value`. Where the mask is false, nothing is written."""
    current("hl.store").store(tensor, list(index), value, extra_mask)


def atomic_add(tensor: torch.Tensor | JaggedTensor, index: Sequence[Any], value: Any) -> None:
    """Adds to elements of a tensor atomically. Lanes and programs may add to the same element, in any order."""
    current("hl.atomic_add").store(tensor, list(index), value, add=True)


def full(shape: Sequence[Any], value: float, dtype: torch.dtype = torch.float32, device: Any = None) -> TileValue:
    """A value for every lane of these tiles, block sizes or numbers. `device` is ignored: values are on the kernel's device.

    >>> import serrate
    >>> import serrate.language as hl
    >>> @serrate.kernel
    ... def sevens(n: int):
    ...     out = torch.zeros(n)
    ...     for tile in hl.tile(n):
    ...         out[tile] = hl.full([tile], 7.0)
    ...     return out
    >>> sevens(2)
    tensor([7., 7.])
    """
    return current("hl.full").full(shape, value, dtype)  # type: ignore[no-any-return]


def zeros(shape: Sequence[Any], dtype: torch.dtype = torch.float32, device: Any = None) -> TileValue:
    """Zero for every lane of these tiles, block sizes or numbers. `device` is ignored."""
    return current("hl.zeros").full(shape, 0, dtype)  # type: ignore[no-any-return]


def arange(start: Any, end: Any = None, step: int = 1, dtype: torch.dtype = torch.int64, device: Any = None) -> TileValue:
    """Numbers for a fixed number of lanes, as `torch.arange`; for a block size, one for each lane of its tile. `device` is
    ignored."""
    return current("hl.arange").arange(start, end, step, dtype)  # type: ignore[no-any-return]


def rand(shape: Sequence[Any], seed: Any) -> TileValue:
    """Uniform random numbers in [0, 1) for every lane of these tiles, block sizes or numbers.

    A number is a function of the seed and of its lane's positions; it does not depend on the backend or the block sizes. A seed
    is a whole number or a 0-dim tensor; pass `torch.randint(2**62, ())` to draw new numbers in each call.

    >>> import serrate
    >>> import serrate.language as hl
    >>> @serrate.kernel
    ... def dropped(x: torch.Tensor, p: float, seed: torch.Tensor):
    ...     out = torch.empty_like(x)
    ...     for tile in hl.tile(x.shape[0]):
    ...         out[tile] = torch.where(hl.rand([tile], seed) < p, 0.0, x[tile] / (1 - p))
    ...     return out
    >>> dropped(torch.ones(6), 0.5, torch.tensor(3))
    tensor([2., 0., 2., 2., 0., 2.])
    """
    return random.rand(shape, seed)  # type: ignore[no-any-return]


def randint(shape: Sequence[Any], low: int, high: int, seed: Any) -> TileValue:
    """Random int32 from `low` to `high` - 1, as `hl.rand` draws."""
    return random.randint(shape, low, high, seed)  # type: ignore[no-any-return]


def specialize(value: Any) -> Any:
    """Returns a number (or several) unchanged, and compiles it in as a constant."""
    if isinstance(value, (tuple, list, torch.Size)):
        return tuple(specialize(v) for v in value)
    return current("hl.specialize").number(value, "hl.specialize")


def register_block_size(low: Bound, high: Bound | None = None) -> int:
    """A block size, up to an extent, that the compiler may choose; for shapes and for `block_size=` of loops."""
    return current("hl.register_block_size").block_size(low, high)  # type: ignore[no-any-return]


def register_tunable(name: str, choices: Any) -> Any:
    """A value that a tuner may choose, before the loops over tiles: one of several, `hl.EnumFragment(...)`, an integer,
    `hl.IntegerFragment(low, high)`, or a power of two, `hl.PowerOfTwoFragment(low, high)`. The results must not depend on it.

    >>> import serrate
    >>> import serrate.language as hl
    >>> @serrate.kernel
    ... def doubled(x):
    ...     out = torch.empty_like(x)
    ...     block = hl.register_tunable("block", hl.PowerOfTwoFragment(16, 64))
    ...     for tile in hl.tile(x.size(0), block_size=block):
    ...         out[tile] = x[tile] * 2
    ...     return out
    >>> doubled(torch.ones(3))
    tensor([2., 2., 2.])
    """
    machine = current("hl.register_tunable")
    fragment = fragment_of(name, choices)
    choose = getattr(machine, "tunable", None)
    return fragment.default if choose is None else choose(name, fragment)


def device_num_sms() -> int:
    """The number of workers that the device runs concurrently: threads on a CPU."""
    current("hl.device_num_sms")
    return torch.get_num_threads() or os.cpu_count() or 1


def dot(a: Any, b: Any, acc: Any = None, out_dtype: torch.dtype | None = None) -> TileValue:
    """A product of tiles, carried in float32: added to `acc` in its dtype, or float32 for 16-bit operands."""
    return current("hl.dot").dot(a, b, acc, out_dtype)  # type: ignore[no-any-return]


def associative_scan(combine: Callable[..., Any], x: Any, dim: int, reverse: bool = False) -> Any:
    """A scan along a dim by a function of two values; positions that do not exist are skipped. For a tuple of values, the
    function takes two tuples, or all values of both as separate arguments."""
    machine = current("hl.associative_scan")
    count = len(x) if isinstance(x, (tuple, list)) else 1
    if count > 1 and len(inspect.signature(combine).parameters) == 2 * count:
        return machine.associative_scan(lambda left, right: combine(*left, *right), x, dim, reverse)
    return machine.associative_scan(combine, x, dim, reverse)


def fill(x: TileValue, value: float) -> TileValue:
    """Makes every position exist; former holes contain `value`."""
    return current("hl.fill").fill(x, value)  # type: ignore[no-any-return]
