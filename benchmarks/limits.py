"""What the machine allows, measured in the same run as everything it is compared with.

Comes in: tensors of the work's own size. Goes out: callables that copy, read and multiply, and the machine's names.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import native


@dataclass(frozen=True)
class Machine:
    """Where and when a table was made; goes in its header."""

    processor: str
    threads: int
    last_level_cache: int
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
        last_level_cache=last_level_cache(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        python=platform.python_version(),
        torch=torch.__version__,
        compiler=version.splitlines()[0],
        command=" ".join(["python", *sys.orig_argv[1:]]),
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def last_level_cache() -> int:
    """Bytes of the largest cache; 32 MiB where the system does not say."""
    for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        size = os.sysconf(name) if name in os.sysconf_names else 0
        if size > 0:
            return size
    return 32 << 20


def copies(source: Tensor) -> dict[str, Callable[[], object]]:
    """Each reads and writes as many bytes as `source` has, with stores that bypass the cache.

    Several targets, for where the system puts a buffer moves the time by a tenth: the limit is the fastest of them.
    """
    return {f"limit: copy {number}": _copy(source) for number in range(3)}


def _copy(source: Tensor) -> Callable[[], object]:
    library, target = native.load("limits.cpp"), torch.zeros_like(source)
    arguments = (native.pointer(source), native.pointer(target), ctypes.c_longlong(source.numel()))
    # the tensors are kept alive by the closure, for the addresses alone do not
    return lambda: (library.copy(*arguments), source, target)


def read(source: Tensor) -> Callable[[], object]:
    """Reads all of `source`."""
    library = native.load("limits.cpp")
    arguments = (native.pointer(source), ctypes.c_longlong(source.numel()))
    return lambda: (library.read(*arguments), source)


def dense_mm(tokens: Tensor, weight: Tensor) -> Callable[[], object]:
    """One dense matmul with the flops of the grouped one."""
    out = tokens.new_empty(tokens.shape[0], weight.shape[1])
    return lambda: torch.mm(tokens, weight, out=out)
