"""Peak memory of one call, as the system counts it.

In: a call. Out: the process's peak memory minus its memory before the call, or None if the system does not report it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serrate.runtime import memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def held() -> int | None:
    """The process's current memory in bytes."""
    return _field("VmRSS")


def peak_of(call: Callable[[], Any]) -> tuple[int | None, Any]:
    """The peak, and the result of the call. Cached memory is released first.

    >>> peak, made = peak_of(lambda: bytearray(64 << 20))
    >>> peak is None or peak > 0.9 * len(made)
    True
    """
    settle()
    before = held()
    try:
        # Resets the kernel's peak counter.
        _CLEAR.write_text("5")
    except OSError:
        return None, call()
    result = call()
    most = _field("VmHWM")
    return (None if before is None or most is None else most - before), result


def settle() -> None:
    """Releases free memory: garbage, serrate's result memory, and the C library's if possible."""
    gc.collect()
    memory.trim()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else 1024 * int(found.split()[1])
