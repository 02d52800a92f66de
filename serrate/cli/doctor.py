"""`serrate doctor`: reports whether serrate can run here, with which backends, and what is missing.

In: this machine (torch, the compiler, the GPU, triton, the cache folder). Out: one row each with its state, what was found and
what to do about it; exit status 1 only if no backend can run.
"""

from __future__ import annotations

import ctypes
import importlib
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serrate import settings
from serrate.cli import cache
from serrate.errors import CacheError
from serrate.runtime import cache_folder

TORCH_RANGE = ((2, 11), (2, 15))
TRITON_RANGE = ((3, 6), (3, 9))
"""First and last supported (major, minor); pyproject.toml states the same bounds for pip."""


class Status(Enum):
    """The result of a check: fine, absent but optional, degraded, or unable to run."""

    OK = "ok"
    ABSENT = "-"
    WARN = "warn"
    FAIL = "FAIL"


_STYLE = {Status.OK: "green", Status.ABSENT: "dim", Status.WARN: "yellow", Status.FAIL: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    name: str
    status: Status
    found: str
    advice: str = ""


# Needs the OpenMP runtime to link and load, and its result shows that it ran.
_PROBE_SOURCE = """\
#ifndef _OPENMP
#error "the compiler ignored -fopenmp"
#endif
#include <cstdint>
extern "C" std::int64_t serrate_probe(std::int64_t n) {
  std::int64_t total = 0;
#pragma omp parallel for reduction(+ : total) num_threads(2)
  for (std::int64_t i = 0; i < n; ++i) total += i;
  return total;
}
"""


def check_torch() -> Finding:
    """torch can be imported, in a supported version."""
    advice = f"pip install 'torch>={_dotted(TORCH_RANGE[0])},<{TORCH_RANGE[1][0]}.{TORCH_RANGE[1][1] + 1}'"
    try:
        # Imported here and by name, so that a broken torch shows up in the report instead of a traceback.
        version = str(importlib.import_module("torch").__version__)
    except (ImportError, OSError) as error:
        return Finding("torch", Status.FAIL, f"cannot be imported: {error}", advice)
    if not _in_range(version, TORCH_RANGE):
        return Finding("torch", Status.FAIL, f"{version}, supported are {_span(TORCH_RANGE)}", advice)
    return Finding("torch", Status.OK, version)


def check_compiler(cxx: str | None) -> Finding:
    """A C++ compiler exists and builds an OpenMP program that loads; `cxx` is the user's choice, else g++ then clang++."""
    name = "C++ compiler"
    if cxx is not None:
        command = shlex.split(cxx)
        # A compiler requested by name is not replaced by another, which would hide the mistake.
        if not command or shutil.which(command[0]) is None:
            return Finding(name, Status.WARN, f"CXX is {cxx!r}, which was not found", "unset CXX or correct it")
    else:
        path = shutil.which("g++") or shutil.which("clang++")
        if path is None:
            return Finding(
                name, Status.WARN, "none found; the slow reference backend runs instead", "install g++ or clang++, or set CXX"
            )
        command = [path]
    described = f"{' '.join(command)} ({_compiler_version(command)})"
    fault = probe_compiler(command)
    if fault is not None:
        return Finding(name, Status.WARN, f"{described}: {fault}", "install the compiler's C++ and OpenMP runtime, or set CXX")
    return Finding(name, Status.OK, f"{described}, builds and loads OpenMP code")


def probe_compiler(command: list[str]) -> str | None:
    """Compiles, loads and runs a small OpenMP program; returns what went wrong, or None."""
    with tempfile.TemporaryDirectory(prefix="serrate-doctor-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE_SOURCE)
        try:
            build = subprocess.run(
                [*command, "-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", str(source), "-o", str(library)],
                capture_output=True,
                text=True,
                timeout=120,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"cannot be run: {error}"
        if build.returncode != 0:
            return f"cannot build OpenMP code: {_first_error(build.stderr)}"
        try:
            probe = ctypes.CDLL(str(library)).serrate_probe
        except (OSError, AttributeError) as error:
            return f"its output cannot be loaded: {error}"
        probe.argtypes, probe.restype = [ctypes.c_int64], ctypes.c_int64
        got, expected = probe(100), sum(range(100))
    return None if got == expected else f"its output computes {got} instead of {expected}"


def check_gpu() -> Finding:
    """Whether torch sees a GPU, which is optional."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return Finding("GPU", Status.ABSENT, "unknown without torch")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(0)
        count = torch.cuda.device_count()
        more = f", and {count - 1} more" if count > 1 else ""
        return Finding("GPU", Status.OK, f"{torch.cuda.get_device_name(0)} (capability {major}.{minor}){more}")
    if torch.version.cuda is None and torch.version.hip is None:
        return Finding("GPU", Status.ABSENT, "torch is a CPU build", "if there is a GPU, install a GPU build of torch")
    return Finding("GPU", Status.ABSENT, "none found", "if there is one, check its driver")


def check_triton(gpu: bool) -> Finding:
    """triton can be imported, in a supported version; needed only with a GPU."""
    absent = Status.WARN if gpu else Status.ABSENT
    advice = "pip install 'serrate[gpu]'"
    try:
        version = str(importlib.import_module("triton").__version__)
    except ModuleNotFoundError:
        return Finding("triton", absent, "not installed", advice if gpu else f"to use a GPU, {advice}")
    except (ImportError, OSError) as error:
        return Finding("triton", Status.WARN, f"cannot be imported: {error}", advice)
    if not _in_range(version, TRITON_RANGE):
        return Finding("triton", Status.WARN, f"{version}, supported are {_span(TRITON_RANGE)}", advice)
    return Finding("triton", Status.OK, version)


def check_cache(folder: Path) -> Finding:
    """The cache folder is writable; tested by writing, because permission bits do not show read-only mounts and quotas."""
    try:
        programs = folder / cache_folder.PROGRAMS
        cache_folder.make_private(programs)
        cache_folder.check_private(programs)
        with tempfile.NamedTemporaryFile(dir=programs, prefix=cache_folder.BUILDING):
            pass
        held = cache.entries(folder)
    except CacheError as error:
        return Finding("cache", Status.WARN, str(error), "fix the folder; nothing compiles until then")
    except OSError as error:
        advice = "set SERRATE_CACHE_DIR to a writable folder; until then every process recompiles its programs"
        return Finding("cache", Status.WARN, f"{folder}: {error}", advice)
    size = cache.format_bytes(sum(entry.bytes for entry in held))
    return Finding("cache", Status.OK, f"{folder}, {len(held)} programs, {size}")


def usable_backends(torch_row: Finding, compiler: Finding, gpu: Finding, triton: Finding) -> list[str]:
    """The backends that can run, given the findings; the reference needs only torch."""
    if torch_row.status is not Status.OK:
        return []
    names = ["reference"]
    if compiler.status is Status.OK:
        names.append("cpp")
    if gpu.status is Status.OK and triton.status is Status.OK:
        names.append("triton")
    return names


def doctor() -> None:
    """Check what serrate needs on this machine."""
    using = settings.current()
    torch_row, compiler, gpu = check_torch(), check_compiler(using.cxx), check_gpu()
    triton = check_triton(gpu.status is Status.OK)
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "status", "found", "what to do"):
        # Long paths and messages wrap instead of being truncated.
        table.add_column(heading, overflow="fold")
    for row in (torch_row, compiler, gpu, triton, check_cache(using.cache_dir)):
        # Text, not markup: the advice contains brackets.
        table.add_row(row.name, Text(row.status.value, style=_STYLE[row.status]), Text(row.found), Text(row.advice))
    Console().print(table)
    backends = usable_backends(torch_row, compiler, gpu, triton)
    typer.echo(f"\nbackends that run here: {', '.join(backends) or 'none'}")
    if not backends:
        raise typer.Exit(1)


def _in_range(version: str, bounds: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    parts = version.split(".")
    try:
        # Compares only major and minor; suffixes such as 2.13.0a0+git are ignored.
        return bounds[0] <= (int(parts[0]), int(parts[1])) <= bounds[1]
    except (ValueError, IndexError):
        return False


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _span(bounds: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return f"{_dotted(bounds[0])} to {_dotted(bounds[1])}"


def _compiler_version(command: list[str]) -> str:
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "version unknown"
    return answer.stdout.partition("\n")[0].strip() or "version unknown"


def _first_error(output: str) -> str:
    """The line with the actual error; compilers print the include stack first."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
