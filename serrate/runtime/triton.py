"""Triton programs: written to the cache as modules, imported, launched.

In: a loop program. Out: an executable for CUDA tensors, and for CPU tensors under Triton's interpreter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from serrate.codegen.triton.printer import Launch, print_triton
from serrate.errors import BackendError, CacheError
from serrate.ir.expr import size_function
from serrate.ir.loops import LoopProgram
from serrate.runtime import cache_folder
from serrate.runtime.launch import Numbers, Tensors

STAGES = 4
"""How many blocks of a matrix product are in flight."""

_modules: dict[str, ModuleType] = {}


class TritonExecutable:
    """Launches generated Triton kernels."""

    def __init__(self, program: LoopProgram, warps: int) -> None:
        self.program = program
        self._printed = print_triton(program, interpreted=_interpreted())
        self.source = self._printed.text
        self.warps = warps
        self._module = _load(self._printed.text, program.name)
        self._launches = [self._ready(launch) for launch in self._printed.launches]

    def __call__(self, tensors: Tensors, arrays: Tensors, symbols: Numbers) -> None:
        if tensors[0].device.type == "cpu" and not _interpreted():
            raise BackendError("the triton backend runs CPU tensors only under its interpreter; set TRITON_INTERPRET=1 first")
        for launch in self._launches:
            programs = 1
            for extent in launch.grid:
                programs *= extent(symbols)
            if programs:
                args = [tensors[k] for k in launch.tensors]
                args += [arrays[k] for k in launch.arrays]
                launch.kernel[(programs,)](*args, *(symbols[k] for k in launch.symbols), **launch.options)

    def _ready(self, launch: Launch) -> _PreparedLaunch:
        program = self._printed.program
        # A product and a sum round twice, as in torch; fused multiply-adds are written explicitly.
        options = {"num_warps": self.warps, "enable_fp_fusion": False, **({"num_stages": STAGES} if launch.has_dot else {})}
        return _PreparedLaunch(
            getattr(self._module, launch.function),
            tuple(program.tensors.index(t) for t in launch.tensors),
            tuple(program.arrays.index(a) for a in launch.arrays),
            tuple(program.symbols.index(s) for s in launch.symbols),
            tuple(size_function(extent, program.symbols) for extent in launch.grid),
            options,
        )


@dataclass(frozen=True)
class _PreparedLaunch:
    kernel: Any
    tensors: tuple[int, ...]
    arrays: tuple[int, ...]
    symbols: tuple[int, ...]
    grid: tuple[Callable[[Sequence[int]], int], ...]
    options: dict[str, int]


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _load(text: str, name: str) -> ModuleType:
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    key = f"{digest}{'i' if _interpreted() else ''}"
    if key not in _modules:
        try:
            import triton  # noqa: F401  the message below is better than the module's own
        except ImportError as error:
            raise BackendError("the triton backend needs triton; install serrate[gpu]") from error
        path = _write(text, digest)
        spec = importlib.util.spec_from_file_location(f"serrate_{name}_{digest[:8]}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _modules[key] = module
    return _modules[key]


def _write(text: str, digest: str) -> Path:
    """The file that holds `text`, written if it does not exist: Triton reads a kernel's source from its file."""
    for _ in range(3):
        for place in cache_folder.places():
            path = place / digest / "program.py"
            if path.is_file():
                if path.read_text() != text:
                    raise CacheError(f"{path} is not what was written; run `serrate cache clear`")
                return path
        cache_folder.write(lambda folder: cache_folder.put(folder, digest, {"program.py": text.encode()}))
    raise CacheError("built programs are deleted as soon as they are written; is something clearing the cache folder?")
