"""The hardware limit, measured in the same run as everything it is compared with.

In: tensors of the task's size. Out: callables that copy, read and multiply, the limit that their times imply for a task, and the
machine's description.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import mmap
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import native
from benchmarks.measure import Timing
from serrate.runtime.launch import last_level_cache


@dataclass(frozen=True)
class Machine:
    """Where and when a table was measured, for its header."""

    processor: str
    threads: int
    date: str
    python: str
    torch: str
    compiler: str
    command: str


def machine() -> Machine:
    version = subprocess.run([native.compiler(), "--version"], check=True, capture_output=True, text=True).stdout
    return Machine(
        processor=_processor(),
        threads=torch.get_num_threads(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        python=platform.python_version(),
        torch=torch.__version__,
        compiler=version.splitlines()[0],
        # the program's name without its path, which is private
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Traffic:
    """Bytes that a task must move. `twice`: the longest row, if a two-pass task must read it again when it is large."""

    read: int
    written: int = 0
    twice: int | None = None


@dataclass(frozen=True)
class Limit:
    """Calls to time for the limit (each with an untimed call before it), and how to compute the limit from their times."""

    calls: Mapping[str, Callable[[], object]]
    milliseconds: Callable[[Mapping[str, Timing]], float]
    before: Mapping[str, Callable[[], object]]


def of_traffic(traffic: Traffic, values: Tensor, offsets: Tensor) -> Limit:
    """Bytes at the rate of a copy, or of a read if nothing large is written."""
    # Data that fits the cache says nothing about memory.
    source = values if values.nbytes >= 2 * last_level_cache() else _large()
    calls: dict[str, Callable[[], object]] = {}
    before: dict[str, Callable[[], object]] = {}
    if traffic.written:
        # The placement of a buffer changes the time by a tenth: the limit is the fastest of several.
        calls = {f"limit: copy {number}": _copy(source, number) for number in range(3)}
    else:
        calls["limit: read"] = _read(source)
    if traffic.twice is not None:
        row = values[int(offsets[traffic.twice]) : int(offsets[traffic.twice + 1])]
        if row.nbytes > own_cache():
            calls["limit: read again"] = before["limit: read again"] = _read(row)

    def milliseconds(timings: Mapping[str, Timing]) -> float:
        fastest = min(timings[name].median for name in calls if name != "limit: read again")
        moved = source.nbytes * (2 if traffic.written else 1)
        again = timings["limit: read again"].median if "limit: read again" in calls else 0.0
        return fastest * (traffic.read + traffic.written) / moved + again

    return Limit(calls, milliseconds, before)


def of_product(tokens: Tensor, weight: Tensor, passes: float = 1.0) -> Limit:
    """One dense float32 product with the FLOPs of the grouped one, as often as that has passes."""
    tokens, weight = tokens.float(), weight.float().contiguous()
    out = tokens.new_empty(tokens.shape[0], weight.shape[1])
    name = "limit: dense mm"
    return Limit({name: lambda: torch.mm(tokens, weight, out=out)}, lambda timings: passes * timings[name].median, {})


def own_cache() -> int:
    """The size of a core's largest private cache; 1 MiB if the system does not report it."""
    name = "SC_LEVEL2_CACHE_SIZE"
    size = os.sysconf(name) if name in os.sysconf_names else 0
    return size if size > 0 else 1 << 20


def _copy(source: Tensor, number: int) -> Callable[[], object]:
    library, target = native.load("limits.cpp"), _target(source.nbytes, number)
    arguments = (native.pointer(source), native.pointer(target), ctypes.c_longlong(source.nbytes // 4))
    # the closure keeps the tensors alive; addresses alone do not
    return lambda: (library.copy(*arguments), source, target)


@functools.cache
def _large() -> Tensor:
    return torch.ones(2 * last_level_cache() // 4)


@functools.cache
def _target(size: int, number: int) -> Tensor:
    """A buffer to copy to, kept for the whole run: later the system may have run out of huge pages."""
    return huge_pages(size)


def huge_pages(size: int) -> Tensor:
    """Bytes in huge pages, if the system has them."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memoryview(block), dtype=torch.uint8).fill_(0)


def _read(source: Tensor) -> Callable[[], object]:
    library = native.load("limits.cpp")
    arguments = (native.pointer(source), ctypes.c_longlong(source.nbytes // 4))
    return lambda: (library.read(*arguments), source)
