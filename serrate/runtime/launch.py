"""Executables: a loop program ready to run on one backend.

In: a loop program. Out: an object that takes the tensors, arrays and symbols of a call and runs it. `Source` text is kept
for whoever wants to read what runs.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from serrate.codegen import reference
from serrate.codegen.cpp import printer as cpp
from serrate.ir.expr import Array, Symbol
from serrate.ir.loops import LoopProgram
from serrate.ir.values import Role, Tensor
from serrate.runtime import cache
from serrate.runtime.compiler import Compiler, find_compiler

PRELUDE = (Path(cpp.__file__).parent / "prelude.h").read_text()

Tensors = Mapping[Tensor, torch.Tensor]
Arrays = Mapping[Array, torch.Tensor]
Symbols = Mapping[Symbol, int]


class Executable(Protocol):
    """A program ready to run."""

    program: LoopProgram
    source: str

    def __call__(self, tensors: Tensors, arrays: Arrays, symbols: Symbols) -> None: ...


class ReferenceExecutable:
    """Runs a loop program with torch."""

    def __init__(self, program: LoopProgram) -> None:
        self.program, self.source = program, str(program)

    def __call__(self, tensors: Tensors, arrays: Arrays, symbols: Symbols) -> None:
        reference.run(self.program, tensors, arrays, symbols)


class CppExecutable:
    """Calls generated C++."""

    SMALL = 1 << 15
    """Elements below which one thread is faster than waking others."""

    def __init__(self, program: LoopProgram, wide: frozenset[Array], compiler: Compiler | None = None) -> None:
        self.program = program
        self._source = cpp.print_cpp(program, wide)
        self.source = self._source.text
        self._compiler = compiler or find_compiler()
        self._function = cache.functions([self.unit], PRELUDE, self._compiler)[0]
        self._private = threading.local()
        self._outputs = [k for k, t in enumerate(self._source.tensors) if t.role is Role.OUTPUT]

    @property
    def unit(self) -> cache.Unit:
        return cache.Unit(self._source.name, self._source.text)

    def __call__(self, tensors: Tensors, arrays: Arrays, symbols: Symbols) -> None:
        source = self._source
        given = [tensors.get(t) for t in source.tensors]
        work = max((t.numel() for t in given if t is not None), default=0)
        threads = torch.get_num_threads() if work >= self.SMALL else 1
        written = max((t.nbytes for k in self._outputs if (t := given[k]) is not None), default=0)
        private = [self._row(t, tensors[t], threads) for t in source.private]
        # The row buffers of all threads stand in for the one row the caller describes.
        by_private = dict(zip(source.private, private, strict=True))
        pointers = [
            by_private[t].data_ptr() if t in by_private else x.data_ptr() if x is not None else 0
            for t, x in zip(source.tensors, given, strict=True)
        ]
        pointers += [arrays[a].data_ptr() for a in source.arrays]
        numbers = [threads, int(written > last_level_cache())]
        numbers += [symbols[s] for s in source.symbols]
        numbers += [p.numel() // max(threads, 1) for p in private]
        self._function((ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_longlong * len(numbers))(*numbers))

    def _row(self, tensor: Tensor, like: torch.Tensor, threads: int) -> torch.Tensor:
        """Memory for one private row of each thread, kept from call to call; whole cache lines apart."""
        size = -(-like.numel() * like.itemsize // 64) * 64 // like.itemsize * threads
        rows: dict[Tensor, torch.Tensor] = self._private.__dict__.setdefault("rows", {})
        kept = rows.get(tensor)
        if kept is None or kept.numel() < size or kept.numel() % threads:
            kept = rows[tensor] = torch.empty(size, dtype=like.dtype)
        return kept


@functools.cache
def last_level_cache() -> int:
    """Bytes of the largest cache; results beyond it are written past the cache."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}.get(text[-1], 0) if text[-1] in "KM" else int(text))
    return max(sizes[1:], default=sizes[0])
