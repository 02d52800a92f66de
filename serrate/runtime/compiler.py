"""The system C++ compiler: found, described, called.

In: source text. Out: a shared library, or an error. The flags do not affect the process that loads the library: none enables
flush-to-zero or assumes finite numbers.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from serrate import settings
from serrate.errors import CompilerError, CompilerMissing

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    # A product and a sum round twice, as in torch; fused multiply-adds are written explicitly.
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-shared",
    "-fPIC",
    "-w",
)


@dataclass(frozen=True)
class Compiler:
    """A compiler and everything about it that affects its output."""

    command: tuple[str, ...]
    """The command, including wrappers such as `ccache g++`."""
    version: str
    native: tuple[str, ...]
    """The flags that enable all instructions of this CPU, and its widest vectors."""
    features: str
    """The CPU's instruction sets: a library built for one CPU must not be loaded on another."""
    extra: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return "\n".join((*self.command, self.version, *self.native, self.features, *FLAGS, *self.extra))

    def build(self, source: Path, library: Path) -> None:
        """Compiles `source` to `library`; raises `OSError` if the disk is full or read-only."""
        command = [*self.command, *FLAGS, *self.native, *self.extra, "-o", str(library), str(source)]
        # The C locale gives the messages that are searched for below.
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
        if done.returncode:
            for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                if os.strerror(code) in done.stderr:
                    raise OSError(code, os.strerror(code), str(library))
            raise CompilerError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


def find_compiler(extra: tuple[str, ...] = ()) -> Compiler:
    """The compiler that `CXX` names, else g++, else clang++."""
    return _describe(settings.current().cxx, extra)


@functools.cache
def _describe(cxx: str | None, extra: tuple[str, ...]) -> Compiler:
    candidates = [shlex.split(cxx)] if cxx else [["g++"], ["clang++"]]
    for first, *rest in candidates:
        path = shutil.which(first)
        if path is not None:
            command = (path, *rest)
            version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
            features = _cpu_features()
            return Compiler(command, version[0] if version else "", _native(features), features, extra)
    if cxx:
        raise CompilerMissing(f"CXX names {cxx!r}, which is not found; install it, or unset CXX to use g++ or clang++")
    raise CompilerMissing("no C++ compiler is found; install g++ or clang++, or name one in CXX")


def _native(features: str) -> tuple[str, ...]:
    """The flags for a CPU with these features.

    >>> _native("flags : sse2 avx512f avx512vl")[1:]
    ('-mprefer-vector-width=512',)
    """
    if platform.machine() == "aarch64":
        return ("-mcpu=native",)
    # For many CPUs, compilers prefer vectors of half the width, and then compute blocks of matrix products number by number.
    return ("-march=native", "-mprefer-vector-width=512") if "avx512f" in features.split() else ("-march=native",)


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
