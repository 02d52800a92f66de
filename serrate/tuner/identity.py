"""Identity of the device and the toolchain that a record is valid for.

In: a device, a backend. Out: texts that name the processor, and the versions of everything that turns a plan into code.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from pathlib import Path

import torch

from serrate.runtime.compiler import find_compiler
from serrate.version import VERSION


def device_identity(device: torch.device, threads: int) -> str:
    """The processor; a CPU with its number of threads, because a plan that is good for one may be bad for another."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} multiprocessors, {found.total_memory >> 30} GiB"
    return f"{_processor()}, {threads} threads"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def compiler_identity(backend: str) -> str:
    """The versions of serrate, torch and the compiler of a backend."""
    return f"serrate {VERSION}, torch {torch.__version__}, {_backend(backend)}"


def _backend(backend: str) -> str:
    if backend == "cpp":
        return find_compiler().version
    try:
        return f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return backend
