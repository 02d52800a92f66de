"""Executables: a loop program ready to run on one backend.

In: a loop program. Out: an object that takes a call's tensors, arrays and symbols, in the program's order, and runs it. `source`
is kept for readers. A private tensor is passed as a meta tensor: a shape without memory.
"""

from __future__ import annotations

import copy
import functools
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from serrate.codegen import reference
from serrate.codegen.cpp import printer as cpp
from serrate.codegen.cpp.names import PRELUDE
from serrate.ir.expr import Array
from serrate.ir.loops import LoopProgram
from serrate.ir.values import Role
from serrate.runtime import cache
from serrate.runtime.compiler import Compiler, find_compiler
from serrate.runtime.memory import InMemory, address, whole
from serrate.schedule.plan import ORDERS

Tensors = Sequence[torch.Tensor]
Numbers = Sequence[int]


class Executable(Protocol):
    """A program ready to run."""

    program: LoopProgram
    source: str

    def __call__(self, tensors: Sequence[InMemory], arrays: Sequence[InMemory], symbols: Numbers) -> None: ...

    def sized(self, symbols: Numbers, device: torch.device) -> Execute | None:
        """The program with everything but its memory, whatever its arrays; None if it depends on them."""


class TensorExecutable(Executable, Protocol):
    """A program that may need more than addresses, as one in C++ never does."""

    def bound(self, arrays: Sequence[InMemory], symbols: Numbers, device: torch.device) -> Execute:
        """The program with everything but its memory, which is on that device."""


Execute = Callable[[list[int], Callable[[], Sequence[InMemory]]], None]
"""Runs a program, given the addresses of its tensors and arrays; and the same as memory, in case that addresses do not do."""


class BoundProgram(NamedTuple):
    """A compiled program with everything but the addresses of its tensors."""

    function: Callable[[bytes, bytes], None]
    """The compiled function; it takes addresses and numbers, each as bytes."""
    packed: Callable[..., bytes]
    """Packs addresses into bytes."""
    addresses: list[int]
    """The addresses of tensors, 0 because they differ between calls; then those of arrays."""
    numbers: bytes
    rows: Sequence[tuple[int, Callable[[], int]]]
    """Which tensors are private rows, each with a function that returns the address of this thread's."""
    arrays: Sequence[InMemory]
    """Tensors to keep alive while their addresses are in use."""

    def __call__(self, tensors: Tensors) -> None:
        """Runs it; private tensors are passed as meta tensors."""
        pointers = [*map(address, tensors), *self.addresses[len(tensors) :]]
        for k, row in self.rows:
            pointers[k] = row()
        self.function(self.packed(*pointers), self.numbers)


class ReferenceExecutable:
    """Runs a loop program with torch."""

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self.source = str(program)

    def __call__(self, tensors: Sequence[InMemory], arrays: Sequence[InMemory], symbols: Numbers) -> None:
        program = self.program
        every = [whole(t) for t in tensors]
        own = [torch.empty(t.shape, dtype=t.dtype, device=every[0].device) if t.device.type == "meta" else t for t in every]
        # The program determines the dtypes it computes in.
        with torch.autocast(own[0].device.type if own else "cpu", enabled=False):
            reference.run(
                program,
                dict(zip(program.tensors, own, strict=True)),
                dict(zip(program.arrays, map(whole, arrays), strict=True)),
                dict(zip(program.symbols, symbols, strict=True)),
            )

    def sized(self, symbols: Numbers, device: torch.device) -> Execute:
        """The program with everything but its memory."""
        return self.bound((), symbols, device)

    def bound(self, arrays: Sequence[InMemory], symbols: Numbers, device: torch.device) -> Execute:
        """The program with everything but its memory."""
        count = len(self.program.tensors)

        def run(_: list[int], memory: Callable[[], Sequence[InMemory]]) -> None:
            every = memory()
            self(every[:count], [whole(a).reshape(-1) for a in every[count:]], symbols)

        return run


class CppExecutable:
    """Calls generated C++."""

    def __init__(self, program: LoopProgram, wide: frozenset[Array]) -> None:
        self.program = program
        self._most_threads, self._order = sys.maxsize, 0
        printed = cpp.print_cpp(program, wide)
        self.source = printed.text
        self.unit = cache.Unit(printed.name, printed.text)
        self.compiler = find_compiler()
        self._function: Any = None
        self._dtypes = [t.dtype for t in program.tensors]
        self._outputs = [k for k, t in enumerate(program.tensors) if t.role is Role.OUTPUT]
        self._private = [k for k, t in enumerate(program.tensors) if t.role is Role.PRIVATE]
        # bytes are faster to create than ctypes arrays, and threads may share them.
        self._pointers = struct.Struct(f"{len(program.tensors) + len(program.arrays)}P").pack
        self._numbers = struct.Struct(f"{2 + len(program.symbols) + len(self._private)}q").pack
        self._rows = threading.local()

    def __call__(self, tensors: Sequence[InMemory], arrays: Sequence[InMemory], symbols: Numbers) -> None:
        every = [whole(t) for t in tensors]
        self.bound([t.numel() for t in every], arrays, symbols)(every)

    def sized(self, symbols: Numbers, device: torch.device) -> None:
        """Its addresses are those of arrays too."""
        return None

    @property
    def is_loaded(self) -> bool:
        """Whether nothing is left to be compiled or loaded."""
        return self._function is not None

    def shared(self, threads: int | None, order: str) -> CppExecutable:
        """The same program, whose grid positions at most so many threads take in another order."""
        made = copy.copy(self)
        made._most_threads, made._order = threads or sys.maxsize, ORDERS.index(order)
        return made

    def function(self) -> Any:
        """The compiled function, built and loaded on first use; it takes addresses and numbers, each as bytes."""
        if self._function is None:
            load_together([self])
        return self._function

    def bound(self, sizes: Numbers, arrays: Sequence[InMemory], symbols: Numbers) -> BoundProgram:
        """The program with everything but the addresses of its tensors; `sizes` are their numbers of elements."""
        dtypes = self._dtypes
        threads, stream = 1, False
        if max(sizes) >= cpp.SMALL:
            threads, stream = (
                min(torch.get_num_threads(), self._most_threads),
                any(sizes[k] * dtypes[k].itemsize > last_level_cache() for k in self._outputs),
            )
        lengths: list[int] = []
        rows: list[tuple[int, Callable[[], int]]] = []
        for k in self._private:
            count = row_size(sizes[k], dtypes[k].itemsize)
            lengths.append(count)
            rows.append((k, functools.partial(self._row, k, count * threads)))
        addresses = [0] * len(sizes)
        addresses += [a.data_ptr() for a in arrays]
        numbers = self._numbers(threads, stream | self._order << 1, *symbols, *lengths)
        return BoundProgram(self.function(), self._pointers, addresses, numbers, rows, arrays)

    def _row(self, k: int, count: int) -> int:
        """The address of scratch memory for one private row per thread, kept between calls."""
        rows: dict[int, torch.Tensor] = self._rows.__dict__.setdefault("rows", {})
        kept = rows.get(k)
        if kept is None or kept.numel() < count:
            kept = rows[k] = torch.empty(count, dtype=self._dtypes[k], device="cpu")
        return kept.data_ptr()


def row_size(elements: int, itemsize: int) -> int:
    """The size of a private row in elements: whole cache lines, so that threads do not share one."""
    return -(-max(elements, 1) * itemsize // 64) * 64 // itemsize


def load_together(executables: Sequence[CppExecutable]) -> None:
    """Loads programs; missing ones are compiled in one translation unit, since most of a build is compiler startup."""
    by_compiler: dict[Compiler, list[CppExecutable]] = {}
    for executable in executables:
        by_compiler.setdefault(executable.compiler, []).append(executable)
    for compiler, group in by_compiler.items():
        functions = cache.functions([e.unit for e in group], PRELUDE, compiler)
        for executable, function in zip(group, functions, strict=True):
            executable._function = function


@functools.cache
def last_level_cache() -> int:
    """Bytes of the largest cache; larger results bypass the cache."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 10, "M": 20}.get(text[-1:], 0)
        sizes.append(int(text[:-1] if unit else text) << unit)
    return max(sizes, default=32 << 20)


@functools.cache
def device_workers(device: torch.device) -> int:
    """How many workers a device runs concurrently."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
