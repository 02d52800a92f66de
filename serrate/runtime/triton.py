"""Triton programs: written to the cache as modules, imported, launched.

In: a loop program. Out: an executable for CUDA tensors, and for CPU tensors under Triton's interpreter.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from serrate.codegen.triton.derived import BLOCK, COMPONENTS, can_derive, print_derived, table_size
from serrate.codegen.triton.printer import Launch, print_triton
from serrate.errors import BackendError, CacheError
from serrate.ir.expr import Array, Symbol, const, size_function
from serrate.ir.loops import LoopProgram
from serrate.ir.recipes import RunningSum
from serrate.runtime import cache_folder
from serrate.runtime.launch import Numbers, Tensors
from serrate.runtime.memory import ALIGNMENT, InMemory, Scratch, whole

SHARED = 4096
"""How many programs share a work list that is mostly empty: enough to fill a GPU, few enough to be gone at once."""

__all__ = ["Derivation", "TritonExecutable", "TritonFunction", "can_derive", "load"]

_modules: dict[str, ModuleType] = {}


class TritonFunction:
    """A Triton function, compiled once for each device and for the widths of its integers.

    The first launch goes through Triton, which compiles. Later ones go straight to the compiled kernel's launcher, whatever the
    values of their integers, because none of these is specialised.
    """

    def __init__(self, function: Any, options: Mapping[str, int]) -> None:
        self.function, self._options = function, options
        self._compiled: dict[tuple[torch.device, tuple[int, ...]], Any] = {}

    @functools.cached_property
    def _several(self) -> bool:
        """Whether there are several GPUs. Triton launches on the current one, which need not be that of the tensors."""
        return torch.cuda.device_count() > 1

    def launcher(self, grid: Grid, numbers: Numbers, device: torch.device) -> Callable[..., None] | None:
        """Launches the compiled kernel, given addresses that are multiples of 16 and then the numbers; None before it is compiled
        for such numbers."""
        compiled = self._compiled.get((device, _wide(numbers)))
        if compiled is None:
            return None
        launcher: Callable[..., None] = compiled[grid]
        return functools.partial(_launch_on, device, launcher) if device.type == "cuda" and self._several else launcher

    def launch(self, grid: Grid, tensors: Sequence[InMemory], numbers: Numbers) -> None:
        """A launch through Triton."""
        given = [whole(t) for t in tensors]
        device = given[0].device
        if device.type == "cpu" and not _interpreted():
            raise BackendError("the triton backend runs CPU tensors only under its interpreter; set TRITON_INTERPRET=1 first")
        with torch.cuda.device(device) if device.type == "cuda" and self._several else nullcontext():
            compiled = self._compiled_and_launched(grid, given, numbers)
        # None under the interpreter. Triton compiles for aligned addresses, and anew for others.
        if compiled is not None and _aligned([t.data_ptr() for t in given]):
            self._compiled[device, _wide(numbers)] = compiled

    def _compiled_and_launched(self, grid: Grid, tensors: Tensors, numbers: Numbers) -> Any:
        """The compiled kernel, after a launch. If it does not fit the device's shared memory, fewer blocks are in flight."""
        from triton.runtime.errors import OutOfResources

        for options in fewer_stages(self._options):
            try:
                compiled = self.function[grid](*tensors, *numbers, **options)
            except OutOfResources:
                if options.get("num_stages", 1) == 1:
                    raise
                continue
            self._options = options
            return compiled


def fewer_stages(options: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """The options of a kernel, and then the same with fewer blocks of a product in flight, which take less shared memory."""
    yield options
    for stages in range(options.get("num_stages", 1) - 1, 0, -1):
        yield {**options, "num_stages": stages}


Grid = tuple[int, int, int]


def _launch_on(device: torch.device, launcher: Callable[..., None], *args: int) -> None:
    with torch.cuda.device(device):
        launcher(*args)


def _wide(numbers: Numbers) -> tuple[int, ...]:
    """Which integers do not fit 32 bits: Triton compiles anew for them."""
    if not numbers or max(numbers) < 1 << 31:
        return ()
    return tuple([k for k, number in enumerate(numbers) if number >= 1 << 31])


def _aligned(addresses: Sequence[int]) -> bool:
    return not functools.reduce(operator.or_, addresses, 0) & 15


class TritonExecutable:
    """Launches generated Triton kernels; `warps` and `stages` are those of each."""

    def __init__(self, program: LoopProgram, warps: Sequence[int], stages: Sequence[int] = ()) -> None:
        self.program = program
        self._printed = print_triton(program, stages=stages, interpreted=_interpreted())
        self.source = self._printed.text
        self._module = load(self._printed.text, program.name)
        self._launches = [self._ready(*each) for each in zip(self._printed.launches, warps, strict=True)]

    def __call__(self, tensors: Sequence[InMemory], arrays: Sequence[InMemory], symbols: Numbers) -> None:
        own, others = [t.data_ptr() for t in tensors], [a.data_ptr() for a in arrays]
        aligned, device = _aligned([*own, *others]), tensors[0].device
        for each in self._launches:
            programs = each.programs(symbols)
            if not programs:
                continue
            grid, numbers = (programs, 1, 1), [symbols[k] for k in each.symbols]
            launcher = each.kernel.launcher(grid, numbers, device) if aligned else None
            if launcher is not None:
                launcher(*[own[k] for k in each.tensors], *[others[k] for k in each.arrays], *numbers)
            else:
                each.kernel.launch(grid, [*[tensors[k] for k in each.tensors], *[arrays[k] for k in each.arrays]], numbers)

    def bound(self, arrays: Sequence[InMemory], symbols: Numbers, device: torch.device) -> Callable[[Sequence[InMemory]], None]:
        """The program with everything but the addresses of its tensors."""
        launches = [(each, (programs, 1, 1)) for each in self._launches if (programs := each.programs(symbols))]
        places = [a.data_ptr() for a in arrays]
        ready: list[tuple[Callable[..., None], tuple[int, ...], list[int]]] | None = None

        def prepare() -> None:
            nonlocal ready
            found = []
            for each, grid in launches:
                numbers = [symbols[k] for k in each.symbols]
                launcher = each.kernel.launcher(grid, numbers, device)
                if launcher is None:
                    return
                found.append((launcher, each.tensors, [*[places[k] for k in each.arrays], *numbers]))
            ready = found

        def run(tensors: Sequence[InMemory]) -> None:
            addresses = [t.data_ptr() for t in tensors]
            if ready is not None and not functools.reduce(operator.or_, addresses, 0) & 15:
                for launcher, own, rest in ready:
                    launcher(*[addresses[k] for k in own], *rest)
                return
            for each, grid in launches:
                given = [*[tensors[k] for k in each.tensors], *[arrays[k] for k in each.arrays]]
                each.kernel.launch(grid, given, [symbols[k] for k in each.symbols])
            if aligned and ready is None:
                prepare()

        aligned = _aligned(places)
        if aligned:
            prepare()
        return run

    def _ready(self, launch: Launch, warps: int) -> _PreparedLaunch:
        program = self._printed.program
        # A product and a sum round twice, as in torch; fused multiply-adds are written explicitly.
        options = {"num_warps": warps, "enable_fp_fusion": False, **({"num_stages": launch.stages} if launch.stages else {})}
        return _PreparedLaunch(
            TritonFunction(getattr(self._module, launch.function), options),
            tuple(program.tensors.index(t) for t in launch.tensors),
            tuple(program.arrays.index(a) for a in launch.arrays),
            tuple(program.symbols.index(s) for s in launch.symbols),
            tuple(size_function(extent, program.symbols) for extent in launch.grid),
            launch.shared,
        )


@dataclass(frozen=True)
class _PreparedLaunch:
    kernel: TritonFunction
    tensors: tuple[int, ...]
    arrays: tuple[int, ...]
    symbols: tuple[int, ...]
    grid: tuple[Callable[[Sequence[int]], int], ...]
    shared: bool

    def programs(self, symbols: Numbers) -> int:
        """How many programs are launched."""
        count = 1
        for extent in self.grid:
            count *= extent(symbols)
        return min(count, SHARED) if self.shared else count


# --- derived arrays ----------------------------------------------------------------------------------------------------------


class Derivation:
    """Arrays, all of which `can_derive`, computed in a few launches, in one allocation.

    `names` are the tensors that they are derived from.
    """

    def __init__(self, arrays: Sequence[Array], symbols: Sequence[Symbol]) -> None:
        printed = print_derived(tuple(arrays))
        self.names = tuple(a.name for a in printed.inputs)
        made = (*printed.sums, *printed.tables)
        self._order = tuple(made.index(array) for array in arrays)
        self._sums = len(printed.sums)
        one = const(1)
        counts = [_recipe(a).count + one for a in printed.sums] + [table_size(a) for a in printed.tables]
        self._sizes = [size_function(count, tuple(symbols)) for count in counts]
        self._symbols = [tuple(symbols).index(s) for s in printed.symbols]
        module = load(printed.text, "derived")
        self._block_sums = TritonFunction(module.block_sums, {}) if printed.sums else None
        self._running_sums = TritonFunction(module.running_sums, {}) if printed.sums else None
        self._tables = TritonFunction(module.tables, {}) if printed.tables else None

    def numbers(self, numbers: Numbers) -> tuple[int, ...]:
        """Everything besides tensors that the arrays depend on."""
        return tuple([size(numbers) for size in self._sizes]) + tuple([numbers[k] for k in self._symbols])

    def __call__(self, inputs: Tensors, numbers: Numbers, device: torch.device) -> list[Scratch]:
        """The arrays, given the tensors that they are derived from and the values of all symbols."""
        sizes = [size(numbers) for size in self._sizes]
        components = max(-(-(max(sizes[: self._sums], default=1) - 1) // COMPONENTS), 1)
        # Without components, code may still ask for the length of the first. Partial sums of blocks of components come last.
        counts = [*(max(size, 2) for size in sizes), max(self._sums * components, 1)]
        starts = [0, *itertools.accumulate(-(-count * 8 // ALIGNMENT) * ALIGNMENT for count in counts)]
        memory = (torch.empty if min(sizes) > 1 else torch.zeros)(starts.pop(), dtype=torch.uint8, device=device)
        *made, partial = (Scratch(memory, start, (n,), torch.int64) for start, n in zip(starts, counts, strict=True))
        own = [numbers[k] for k in self._symbols]
        if self._running_sums is not None and self._block_sums is not None:
            grid = (components, self._sums, 1)
            if components > 1:
                self._run(self._block_sums, grid, [*inputs, partial], own, device)
            self._run(self._running_sums, grid, [*inputs, partial, *made[: self._sums]], own, device)
        if self._tables is not None:
            tables = sizes[self._sums :]
            blocks = -(-max(tables) // BLOCK)
            if blocks:
                self._run(self._tables, (blocks, len(tables), 1), [*inputs, *made], own, device)
        return [made[k] for k in self._order]

    def _run(
        self, kernel: TritonFunction, grid: Grid, tensors: Sequence[InMemory], numbers: list[int], device: torch.device
    ) -> None:
        addresses = [t.data_ptr() for t in tensors]
        launcher = kernel.launcher(grid, numbers, device) if _aligned(addresses) else None
        if launcher is None:
            kernel.launch(grid, tensors, numbers)
        else:
            launcher(*addresses, *numbers)


def _recipe(array: Array) -> RunningSum:
    assert isinstance(array.recipe, RunningSum)
    return array.recipe


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def load(text: str, name: str) -> ModuleType:
    """The module with this text, written to the cache and imported once."""
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
