"""Executables: a loop program ready to run on one backend.

In: a loop program. Out: an object that takes a call's tensors, arrays and symbols, in the program's own order, and runs it.
`source` is kept for whoever wants to read what runs. A private tensor is passed as a meta tensor: its shape, no memory.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from serrate.codegen import reference
from serrate.codegen.cpp import printer as cpp
from serrate.codegen.cpp.names import PRELUDE
from serrate.ir.expr import Array
from serrate.ir.loops import LoopProgram
from serrate.ir.values import Role
from serrate.runtime import cache
from serrate.runtime.compiler import Compiler, find_compiler

Tensors = Sequence[torch.Tensor]
Numbers = Sequence[int]


class Executable(Protocol):
    """A program ready to run."""

    program: LoopProgram
    source: str

    def __call__(self, tensors: Tensors, arrays: Tensors, symbols: Numbers) -> None: ...


def bound(executable: Executable, like: Tensors, arrays: Tensors, symbols: Numbers) -> Callable[[Tensors], None]:
    """The executable with everything but the addresses of its tensors, which must be as large as those it is made with."""
    if isinstance(executable, CppExecutable):
        return executable.bound(like, arrays, symbols)
    return lambda tensors: executable(tensors, arrays, symbols)


class ReferenceExecutable:
    """Runs a loop program with torch."""

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self.source = str(program)

    def __call__(self, tensors: Tensors, arrays: Tensors, symbols: Numbers) -> None:
        program = self.program
        own = [torch.empty(t.shape, dtype=t.dtype, device=tensors[0].device) if t.device.type == "meta" else t for t in tensors]
        # The program says in which dtypes it computes.
        with torch.autocast(own[0].device.type if own else "cpu", enabled=False):
            reference.run(
                program,
                dict(zip(program.tensors, own, strict=True)),
                dict(zip(program.arrays, arrays, strict=True)),
                dict(zip(program.symbols, symbols, strict=True)),
            )


class CppExecutable:
    """Calls generated C++."""

    SMALL = 1 << 15
    """Elements below which one thread is faster than waking others."""

    def __init__(self, program: LoopProgram, wide: frozenset[Array], compiler: Compiler | None = None) -> None:
        self.program = program
        printed = cpp.print_cpp(program, wide)
        self.source = printed.text
        self.unit = cache.Unit(printed.name, printed.text)
        self.compiler = compiler or find_compiler()
        self._function: Any = None
        self._outputs = [k for k, t in enumerate(program.tensors) if t.role is Role.OUTPUT]
        self._private = [k for k, t in enumerate(program.tensors) if t.role is Role.PRIVATE]
        # Bytes are made faster than arrays of ctypes, and may be shared by threads.
        self._pointers = struct.Struct(f"{len(program.tensors) + len(program.arrays)}P").pack
        self._numbers = struct.Struct(f"{2 + len(program.symbols) + len(self._private)}q").pack
        self._rows = threading.local()

    def __call__(self, tensors: Tensors, arrays: Tensors, symbols: Numbers) -> None:
        self.bound(tensors, arrays, symbols)(tensors)

    def function(self) -> Any:
        """The function itself, built and loaded if it is not: it takes addresses and numbers, each as bytes."""
        if self._function is None:
            load_together([self])
        return self._function

    def bound(self, like: Tensors, arrays: Tensors, symbols: Numbers) -> Callable[[Tensors], None]:
        """The program with everything but addresses; `like` tells how large its tensors are."""
        function, pointers_of = self.function(), self._pointers
        threads = torch.get_num_threads() if max([t.numel() for t in like]) >= self.SMALL else 1
        stream = any(like[k].nbytes > last_level_cache() for k in self._outputs)
        known = [a.data_ptr() for a in arrays]
        private = [(k, like[k]) for k in self._private]
        if private:
            sizes = [row_size(row) for _, row in private]
            numbers = self._numbers(threads, stream, *symbols, *sizes)

            def with_rows(tensors: Tensors, _alive: Tensors = arrays) -> None:
                pointers = [t.data_ptr() for t in tensors]
                rows = [self.row(k, row, size * threads) for (k, row), size in zip(private, sizes, strict=True)]
                for (k, _), row in zip(private, rows, strict=True):
                    pointers[k] = row.data_ptr()
                function(pointers_of(*pointers, *known), numbers)

            return with_rows
        numbers = self._numbers(threads, stream, *symbols)

        def run(tensors: Tensors, _alive: Tensors = arrays) -> None:
            function(pointers_of(*[t.data_ptr() for t in tensors], *known), numbers)

        return run

    def row(self, k: int, like: torch.Tensor, count: int) -> torch.Tensor:
        """Memory for one private row of each thread, kept from call to call."""
        rows: dict[int, torch.Tensor] = self._rows.__dict__.setdefault("rows", {})
        kept = rows.get(k)
        if kept is None or kept.numel() < count:
            kept = rows[k] = torch.empty(count, dtype=like.dtype, device="cpu")
        return kept


def row_size(like: torch.Tensor) -> int:
    """The elements of a private row: whole cache lines, so that threads do not share one."""
    return -(-max(like.numel(), 1) * like.itemsize // 64) * 64 // like.itemsize


def load_together(executables: Sequence[CppExecutable]) -> None:
    """Loads programs, building all that are missing in one translation unit: most of a build is the compiler's start."""
    by_compiler: dict[Compiler, list[CppExecutable]] = {}
    for executable in executables:
        by_compiler.setdefault(executable.compiler, []).append(executable)
    for compiler, group in by_compiler.items():
        functions = cache.functions([e.unit for e in group], PRELUDE, compiler)
        for executable, function in zip(group, functions, strict=True):
            executable._function = function


@functools.cache
def last_level_cache() -> int:
    """Bytes of the largest cache; results beyond it are written past the cache."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 10, "M": 20}.get(text[-1:], 0)
        sizes.append(int(text[:-1] if unit else text) << unit)
    return max(sizes, default=32 << 20)
