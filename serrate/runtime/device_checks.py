"""Checks on a GPU in one launch each, which writes to memory of the host.

In: offsets on a device, or numbers that were computed there. Out: an `Arrival`, which reads the numbers that a check needs once
they are there. Nothing is copied and no event is recorded: the memory is pinned, so that the device can write to it, and it holds
a number that no check writes until then.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from serrate.codegen.triton.offsets import NUMBERS, UNSET, print_checks
from serrate.runtime.memory import Scratch
from serrate.runtime.triton import TritonFunction, load
from serrate.tensor.checks.deferred import Arrival

SLOTS = 512
"""The most checks of a device that have not reported yet; further ones go another way."""
LEVELS = 4
"""The most levels of one check."""
MOST = 1 << 18
"""The most offsets that one program goes through: for more of them, several launches of torch are faster."""


class Slots:
    """Memory of the host for the numbers of checks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._size = device, NUMBERS * LEVELS
        pinned = device.type == "cuda"
        self.memory = torch.full((SLOTS * self._size,), UNSET, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._bytes = self.memory.view(torch.uint8)
        self._numbers = (ctypes.c_int64 * len(self.memory)).from_address(self.memory.data_ptr())
        self._free = deque(range(0, len(self.memory), self._size))

    def take(self) -> int | None:
        """Where the numbers of a check begin; None if no slot is free."""
        return self._free.popleft() if self._free else None

    def part(self, place: int) -> Scratch:
        """The memory for the numbers of one level."""
        return Scratch(self._bytes, 8 * place, (NUMBERS,), torch.int64)

    def arrival(self, start: int, count: int) -> Arrival:
        """Reads `count` numbers, and frees their slot."""

        def read(wait: bool) -> list[int] | None:
            found = self._numbers[start : start + count]
            if UNSET in found:
                if not wait:
                    return None
                torch.accelerator.synchronize(self.device)
                found = self._numbers[start : start + count]
            self._numbers[start : start + count] = [UNSET] * count
            self._free.append(start)
            return found

        return read


@functools.cache
def _slots(device: torch.device) -> Slots:
    return Slots(device)


@functools.cache
def _summary(dtype: torch.dtype) -> TritonFunction:
    return TritonFunction(load(print_checks(), "checks").summary, {"num_warps": 8})


@functools.cache
def _report(dtype: torch.dtype) -> TritonFunction:
    return TritonFunction(load(print_checks(), "checks").report, {"num_warps": 1})


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def summarise(levels: Sequence[Tensor]) -> Arrival | None:
    """Starts to look at offsets on a device; for each level: the first, the last, the shortest and the longest length.

    None if it must be done another way.
    """
    device = levels[0].device
    if not _has_triton() or len(levels) > LEVELS:
        return None
    if any(level.dim() != 1 or not 2 <= level.shape[0] <= MOST or not level.is_contiguous() for level in levels):
        return None
    slots = _slots(device)
    start = slots.take()
    if start is None:
        return None
    for k, level in enumerate(levels):
        _summary(level.dtype)((1, 1), [level, slots.part(start + NUMBERS * k)], (level.shape[0],), device)
    return slots.arrival(start, NUMBERS * len(levels))


def report(numbers: Sequence[Tensor]) -> Arrival | None:
    """Starts to send a few integers from a device to the host. None if it must be done another way."""
    first, count = numbers[0], len(numbers)
    if not _has_triton() or count > NUMBERS or first.dtype not in (torch.int32, torch.int64):
        return None
    if any(number.numel() != 1 or number.dtype is not first.dtype for number in numbers):
        return None
    slots = _slots(first.device)
    start = slots.take()
    if start is None:
        return None
    every = [*numbers, *[first] * (NUMBERS - count)]
    _report(first.dtype)((1, 1), [*every, slots.part(start)], (), first.device)
    arrival = slots.arrival(start, NUMBERS)
    return lambda wait: None if (found := arrival(wait)) is None else found[:count]
