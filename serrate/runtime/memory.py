"""Memory for large results on a CPU: huge pages, used again.

In: sizes. Out: tensors whose memory comes back here when they are gone. A fresh large allocation costs more in page
faults than many programs take to run; memory that was used before costs nothing. At most `LIMIT` bytes are kept.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import torch

SMALLEST = 1 << 20
"""Below this torch's own allocator is as good."""
LIMIT = max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
"""The most that is kept: a padded result may be many times the size of its rows, and is as dear to touch first."""

_lock = threading.Lock()
_free: dict[int, list[mmap.mmap]] = {}
_kept = 0


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.empty`; large CPU tensors reuse memory of earlier ones."""
    count = 1
    for size in shape:
        count *= size
    if device.type != "cpu" or count * dtype.itemsize < SMALLEST:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    # Rounded up so that results of similar size share memory.
    step = 1 << max((count * dtype.itemsize).bit_length() - 4, 21)
    size = -(-count * dtype.itemsize // step) * step
    block = _take(size)
    view = memoryview(block)
    # The tensor holds the view; once both are gone the block is free again.
    weakref.finalize(view, _give_back, size, block).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(tuple(shape))


def _take(size: int) -> mmap.mmap:
    global _kept
    with _lock:
        blocks = _free.get(size)
        if blocks:
            _kept -= size
            return blocks.pop()
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _give_back(size: int, block: mmap.mmap) -> None:
    global _kept
    with _lock:
        if _kept + size <= LIMIT:
            _free.setdefault(size, []).append(block)
            _kept += size


def trim() -> int:
    """Gives all kept memory back to the system; says how many bytes it was."""
    global _kept
    with _lock:
        freed, _kept = _kept, 0
        _free.clear()
    return freed
