"""Random numbers in kernels: functions of a seed and of the positions of lanes.

In: tiles and a seed. Out: random numbers for every lane. The seed of a row is derived from the caller's seed and the row's
position, dim by dim, so a lane's bits do not depend on extents, block sizes or the lengths of other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from serrate.frontend.kernel.machine import current, refuse
from serrate.frontend.kernel.values import called
from serrate.ir import philox

LOW = 0xFFFFFFFF


def random_bits(seed: Any, word: Any, position: Any) -> torch.Tensor:
    """32 random bits for each position, as int32: the definition, on plain tensors; machines implement it for tiles."""
    return philox.random_bits(*(torch.as_tensor(x, device="cpu") for x in (seed, word, position)))


def bits_of(what: str, shape: Sequence[Any], seed: Any) -> Any:
    """Random bits for every lane of these tiles, block sizes or numbers."""
    if isinstance(seed, float) or getattr(seed, "dtype", torch.int64) not in (torch.int32, torch.int64):
        refuse(f"{what}: a seed is a whole number, got {seed}")
    places = [current(what).positions(dim) for dim in shape]
    *outer, last = [p[(slice(None), *[None] * (len(places) - 1 - k))] for k, p in enumerate(places)] or [0]
    for place in outer:
        low, high = (_whole(called(random_bits, seed, word, place)) for word in (1, 2))
        seed = low | high << 32
    return called(random_bits, seed, 0, last)


def rand(shape: Sequence[Any], seed: Any) -> Any:
    """Uniform numbers in [0, 1), with 24 bits."""
    return ((bits_of("hl.rand", shape, seed) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def randint(shape: Sequence[Any], low: Any, high: Any, seed: Any) -> Any:
    """Whole numbers from `low` to `high` - 1, as int32."""
    if type(low) is not int or type(high) is not int or not -(2**31) <= low < high <= 2**31 or high - low > 2**31:
        refuse(f"hl.randint: low and high are numbers of int32, low the smaller one, less than 2^31 apart; got {low} and {high}")
    return ((_whole(bits_of("hl.randint", shape, seed)) * (high - low) >> 32) + low).to(torch.int32)


def _whole(bits: Any) -> Any:
    """32 bits as a number that is not negative."""
    return bits.to(torch.int64) & LOW
