"""Memory for large results on a CPU: huge pages, reused. For temporaries on a GPU: one allocation for all of a call's.

In: sizes. Out: tensors whose memory returns here when they are freed. The page faults of a fresh large allocation cost more than
many programs take to run; reused memory has none. At most `LIMIT` bytes are kept, the most recently used.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from serrate.errors import CallError

ALIGNMENT = 256
"""Bytes at whose multiples temporaries and derived arrays on a GPU begin: Triton compiles anew for other addresses."""
SMALLEST = 1 << 20
"""Below this size, torch's own allocator is as good."""
HUGE = 1 << 21
"""Bytes of a huge page."""
LIMIT = max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
"""The most bytes that are kept. A padded result may be many times the size of its rows, and page faults cost as much there."""

_lock = threading.Lock()
_free: list[mmap.mmap] = []
"""Blocks for reuse, the most recently used last."""
_returned: deque[mmap.mmap] = deque()
"""Blocks that were returned but are not on the free list yet: they may arrive at any time, even while the lock is held."""


def _after_fork() -> None:
    # The thread that held the lock does not exist in the child.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Scratch(NamedTuple):
    """A temporary or a derived array on a GPU: a part of one allocation, because every allocation takes microseconds."""

    room: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.room.device

    def data_ptr(self) -> int:
        return self.room.data_ptr() + self.offset

    def tensor(self) -> torch.Tensor:
        """The same as a tensor."""
        size = prod(self.shape) * self.dtype.itemsize
        return self.room[self.offset : self.offset + size].view(self.dtype).view(self.shape)


InMemory = torch.Tensor | Scratch


def address(memory: InMemory) -> int:
    """The address of a tensor; 0 if it has no elements or represents a private row.

    >>> address(torch.zeros(0)), address(torch.zeros(3, device="meta")), address(torch.zeros(3)) > 0
    (0, 0, True)
    """
    return memory.data_ptr() or no_address(memory)


def no_address(memory: InMemory) -> int:
    """Returns 0; raises if a program would read elements of this tensor, which has no address."""
    if isinstance(memory, torch.Tensor) and memory.numel() and not memory.is_meta:
        raise CallError(
            f"a {type(memory).__name__} of shape {tuple(memory.shape)} has elements but no memory that a compiled program can "
            "read: pass plain tensors, such as the to_local() of a DTensor, and weights that FSDP has gathered"
        )
    return 0


Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


def scratch(shapes: Shapes, device: torch.device) -> Callable[[], list[InMemory]] | None:
    """Allocates the temporaries of a call; None if there are none."""
    if not shapes:
        return None
    if device.type == "cpu":
        return lambda: [empty(shape, dtype, device) for shape, dtype in shapes]
    room, places = _laid_out(shapes)

    def allocate() -> list[InMemory]:
        memory = torch.empty(room, dtype=torch.uint8, device=device)
        return [Scratch(memory, *place) for place in places]

    return allocate


def _laid_out(shapes: Shapes) -> tuple[int, list[tuple[int, tuple[int, ...], torch.dtype]]]:
    """The bytes that temporaries take together, and where each of them is."""
    room, places = 0, []
    for shape, dtype in shapes:
        places.append((room, shape, dtype))
        room += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return room, places


class CallMemory:
    """Allocates everything that a call needs: the outputs, then temporaries (`scratch`). Cheap to create, because calls
    often differ in their sizes."""

    __slots__ = ("_device", "_outputs", "_scratch", "_shapes")

    def __init__(self, shapes: Shapes, outputs: int, device: torch.device) -> None:
        self._shapes, self._outputs, self._device = shapes, outputs, device
        self._scratch: Callable[[], list[InMemory]] | None = None

    def __call__(self) -> list[InMemory]:
        made: list[InMemory] = [empty(shape, dtype, self._device) for shape, dtype in self._shapes[: self._outputs]]
        if len(self._shapes) == self._outputs:
            return made
        if self._scratch is None:
            self._scratch = scratch(self._shapes[self._outputs :], self._device)
            assert self._scratch is not None
        return made + self._scratch()


def allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """`empty` for one shape, dtype and device."""
    if device.type != "cpu" or prod(shape) * dtype.itemsize < SMALLEST:
        return functools.partial(torch.empty, shape, dtype=dtype, device=device)
    return functools.partial(empty, shape, dtype, device)


def whole(memory: InMemory) -> torch.Tensor:
    """The same as a tensor."""
    return memory.tensor() if isinstance(memory, Scratch) else memory


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.empty`; large CPU tensors reuse memory of earlier ones."""
    count = 1
    for size in shape:
        count *= size
    if device.type != "cpu" or count * dtype.itemsize < SMALLEST:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    # Rounded up so that results of similar size share memory.
    step = max(1 << (count * dtype.itemsize).bit_length() >> 4, HUGE)
    size = -(-count * dtype.itemsize // step) * step
    try:
        block = _take(size, count * dtype.itemsize)
    except (OSError, OverflowError):
        # Let torch raise its error for a size that cannot be allocated.
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    view = memoryview(block)
    # The tensor holds the view; when both are freed, the block is returned.
    weakref.finalize(view, _give_back, block).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(tuple(shape))


def _take(size: int, used: int) -> mmap.mmap:
    """A block of `size` bytes, kept or new, of which the first `used` are needed."""
    with _lock:
        _sort_in()
        for k in reversed(range(len(_free))):
            if len(_free[k]) == size:
                return _free.pop(k)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A huge page of which a part is used would be memory on top of the result.
    whole = used // HUGE * HUGE
    if whole:
        block.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    return block


def _give_back(block: mmap.mmap) -> None:
    # The garbage collector may call this at any point, so it must never wait.
    _returned.append(block)
    if _lock.acquire(blocking=False):
        try:
            _sort_in()
        finally:
            _lock.release()


def _sort_in() -> None:
    """Moves returned blocks to the free list and drops the oldest beyond the limit. The caller holds the lock."""
    while _returned:
        block = _returned.popleft()
        if len(block) <= LIMIT:
            _free.append(block)
    while sum(map(len, _free)) > LIMIT:
        del _free[0]


def kept() -> int:
    """The number of bytes kept for reuse."""
    return sum(map(len, (*_free, *_returned)))


def trim() -> int:
    """Returns all kept memory to the system; returns the number of bytes."""
    with _lock:
        freed = kept()
        _free.clear()
        _returned.clear()
    return freed
