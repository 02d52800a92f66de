"""Triton programs: written to the cache as modules, imported, launched.

In: a loop program. Out: an executable for CUDA tensors, and for CPU tensors under Triton's interpreter.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from serrate.codegen.triton.derived import BLOCK, DerivedSource, can_derive, print_derived
from serrate.codegen.triton.printer import Launch, print_triton
from serrate.errors import BackendError, CacheError
from serrate.ir.expr import Array, Environment, Symbol, size_function
from serrate.ir.loops import LoopProgram
from serrate.ir.recipes import Owners, RunningSum
from serrate.runtime import cache_folder
from serrate.runtime.launch import Numbers, Tensors
from serrate.runtime.memory import InMemory, Scratch

STAGES = 4
"""How many blocks of a matrix product are in flight."""

SHARED = 1024
"""How many programs share a work list that is mostly empty: enough to fill a GPU, few enough to be gone at once."""

__all__ = ["TritonExecutable", "can_derive", "derived_on_device"]

_modules: dict[str, ModuleType] = {}


class TritonExecutable:
    """Launches generated Triton kernels."""

    def __init__(self, program: LoopProgram, warps: int, stages: int = 1) -> None:
        self.program = program
        self._printed = print_triton(program, stages=stages, interpreted=_interpreted())
        self.source = self._printed.text
        self.warps = warps
        self._module = _load(self._printed.text, program.name)
        self._launches = [self._ready(launch) for launch in self._printed.launches]

    def __call__(self, tensors: Tensors, arrays: Tensors, symbols: Numbers) -> None:
        self.bound(arrays, symbols)(tensors)

    def bound(self, arrays: Tensors, symbols: Numbers) -> Callable[[Sequence[InMemory]], None]:
        """The program with everything but the addresses of its tensors.

        The first call goes through Triton, which compiles; later ones go straight to the compiled kernels' launchers. Triton
        compiles for aligned addresses, so tensors that begin elsewhere go through it again.
        """
        launches = [(each, programs) for each in self._launches if (programs := each.programs(symbols))]
        fixed = [([arrays[k] for k in each.arrays], [symbols[k] for k in each.symbols]) for each, _ in launches]
        ready: list[tuple[Callable[..., None], tuple[int, ...], list[int]]] = []

        def run(tensors: Sequence[InMemory]) -> None:
            addresses = [t.data_ptr() for t in tensors]
            aligned = not any(address & 15 for address in addresses)
            if ready and aligned:
                for launcher, places, rest in ready:
                    launcher(*[addresses[k] for k in places], *rest)
                return
            whole = [t.tensor() if isinstance(t, Scratch) else t for t in tensors]
            if whole[0].device.type == "cpu" and not _interpreted():
                raise BackendError("the triton backend runs CPU tensors only under its interpreter; set TRITON_INTERPRET=1 first")
            made = []
            for (each, programs), (own, numbers) in zip(launches, fixed, strict=True):
                compiled = each.kernel[(programs,)](*[whole[k] for k in each.tensors], *own, *numbers, **each.options)
                made.append((compiled, programs, each.tensors, [*(a.data_ptr() for a in own), *numbers]))
            if aligned and not ready and all(compiled is not None for compiled, *_ in made):
                ready.extend((compiled[(programs, 1, 1)], places, rest) for compiled, programs, places, rest in made)

        return run

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
            launch.shared,
            options,
        )


# --- derived arrays ----------------------------------------------------------------------------------------------------------


def derived_on_device(
    arrays: Sequence[Array], tensors: Mapping[str, torch.Tensor], symbols: Mapping[Symbol, int], device: torch.device
) -> dict[Array, torch.Tensor]:
    """Arrays, all of which `can_derive`, computed in at most two launches."""
    printed = _printed_derived(tuple(arrays))
    numbers = Environment(symbols)
    sizes = [int(_recipe(a).count.evaluate(numbers)) + 1 for a in printed.sums]
    sizes += [int(_table(a).size.evaluate(numbers)) for a in printed.tables]
    # Without components, code may still ask for the length of the first.
    least = [max(size, 2) for size in sizes]
    room = (torch.empty if least == sizes else torch.zeros)(sum(least), dtype=torch.int64, device=device)
    made = list(torch.split(room, least))
    inputs = [tensors[a.name].reshape(-1) for a in printed.inputs]
    own = [symbols[s] for s in printed.symbols]
    module = _load(printed.text, "derived")
    module.running_sums[(len(printed.sums),)](*inputs, *made[: len(printed.sums)], *own)
    blocks = max((-(-size // BLOCK) for size in sizes[len(printed.sums) :]), default=0)
    if blocks:
        module.owners[(blocks, len(printed.tables))](*made, *own)
    return dict(zip((*printed.sums, *printed.tables), made, strict=True))


@functools.lru_cache(256)
def _printed_derived(arrays: tuple[Array, ...]) -> DerivedSource:
    return print_derived(arrays)


def _recipe(array: Array) -> RunningSum:
    assert isinstance(array.recipe, RunningSum)
    return array.recipe


def _table(array: Array) -> Owners:
    assert isinstance(array.recipe, Owners)
    return array.recipe


@dataclass(frozen=True)
class _PreparedLaunch:
    kernel: Any
    tensors: tuple[int, ...]
    arrays: tuple[int, ...]
    symbols: tuple[int, ...]
    grid: tuple[Callable[[Sequence[int]], int], ...]
    shared: bool
    options: dict[str, int]

    def programs(self, symbols: Numbers) -> int:
        """How many programs are launched."""
        count = math.prod(extent(symbols) for extent in self.grid)
        return min(count, SHARED) if self.shared else count


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
