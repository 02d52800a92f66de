"""Triton programs: written to the cache as modules, imported, launched.

In: a loop program. Out: an executable for CUDA tensors, and for CPU tensors under Triton's interpreter.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from serrate.codegen.triton.derived import BLOCK, COMPONENTS, can_derive, print_derived, table_size
from serrate.codegen.triton.printer import Launch, print_triton
from serrate.errors import BackendError
from serrate.ir.expr import Array, Symbol, const, numbers_function, size_function
from serrate.ir.loops import LoopProgram
from serrate.ir.recipes import RunningSum
from serrate.runtime import cache_folder
from serrate.runtime.launch import Execute, Numbers, Tensors
from serrate.runtime.memory import ALIGNMENT, InMemory, Scratch, whole
from serrate.tensor.torch_private import is_recorded

SHARED = 8192
"""How many warps share a work list that is mostly empty: enough to fill a GPU, few enough to be gone at once."""

LAYOUTS = 64
"""For how many sizes the layout of derived arrays is kept; the oldest is dropped first."""

__all__ = ["Derivation", "TritonExecutable", "TritonFunction", "can_derive", "load"]

_modules: dict[str, ModuleType] = {}


Grid = tuple[int, int]
"""How many programs are launched along each axis."""


class TritonFunction:
    """A Triton function, compiled once for each device and for the widths of its integers.

    The first launch goes through Triton, which compiles. Later ones go straight to the compiled kernel, whatever the values of
    their integers, because none of these is specialised.
    """

    def __init__(self, function: Any, options: Mapping[str, int]) -> None:
        self.function, self._options = function, options
        self.compiled: dict[tuple[torch.device, tuple[int, ...]], LoadedKernel] = {}
        """By device and `wide` integers."""

    def __call__(self, grid: Grid, tensors: Sequence[InMemory], numbers: Numbers, device: torch.device) -> None:
        """A launch: of the compiled kernel, if there is one for such arguments."""
        addresses = [t.data_ptr() for t in tensors]
        compiled = self.compiled.get((device, wide(numbers))) if is_direct(addresses) else None
        if compiled is None:
            self.launch(grid, tensors, numbers)
            return
        compiled(*grid, stream_reader(device)(), *addresses, *numbers)

    def launch(self, grid: Grid, tensors: Sequence[InMemory], numbers: Numbers) -> None:
        """A launch through Triton."""
        given = [whole(t) for t in tensors]
        device = given[0].device
        if device.type == "cpu" and not _interpreted():
            raise BackendError("the triton backend runs CPU tensors only under its interpreter; set TRITON_INTERPRET=1 first")
        with torch.cuda.device(device) if _is_one_of_several(device) else nullcontext():
            kernel = self._compiled_and_launched((*grid, 1), given, numbers)
        # None under the interpreter. Triton compiles for aligned addresses, and anew for others.
        if kernel is not None and not functools.reduce(operator.or_, [t.data_ptr() for t in given], 0) & 15:
            self.compiled[device, wide(numbers)] = direct(kernel, device)

    def prepare(self, tensors: Sequence[InMemory], numbers: Numbers) -> None:
        """Compiles for such arguments and launches nothing, unless something is compiled already."""
        given = [whole(t) for t in tensors]
        device = given[0].device
        if self.compiled or device.type == "cpu" or not is_direct([t.data_ptr() for t in given]) or is_recorded(given[0]):
            return
        with torch.cuda.device(device):
            self.compiled[device, wide(numbers)] = self._fitting(
                lambda options: direct(self.function.warmup(*given, *numbers, grid=(1,), **options), device)
            )

    def _compiled_and_launched(self, grid: tuple[int, int, int], tensors: Tensors, numbers: Numbers) -> Any:
        """The compiled kernel, after a launch."""
        return self._fitting(lambda options: self.function[grid](*tensors, *numbers, **options))

    def _fitting(self, compiled_with: Callable[[Mapping[str, int]], Any]) -> Any:
        """What is compiled with the options of this kernel. If it does not fit the device's shared memory, fewer blocks are in
        flight."""
        from triton.runtime.errors import OutOfResources

        for options in fewer_stages(self._options):
            try:
                compiled = compiled_with(options)
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


class LoadedKernel(NamedTuple):
    """A compiled kernel, and what its launcher takes besides the grid, a stream and arguments: addresses that are multiples of
    16, and numbers."""

    run: Callable[..., None]
    function: Any
    metadata: Any

    def __call__(self, x: int, y: int, stream: int, *arguments: int) -> None:
        """Launches it as Triton does, without its hooks."""
        self.run(x, y, 1, stream, self.function, self.metadata, None, None, None, *arguments)


def direct(kernel: Any, device: torch.device) -> LoadedKernel:
    """What Triton has compiled, to be launched without Triton."""
    run = kernel.run

    def run_there(*arguments: Any) -> None:
        with torch.cuda.device(device):
            run(*arguments)

    return LoadedKernel(run_there if _is_one_of_several(device) else run, kernel.function, kernel.packed_metadata)


def _is_one_of_several(device: torch.device) -> bool:
    """Whether there are other GPUs: Triton launches on the current one, which need not be that of the tensors."""
    return device.type == "cuda" and torch.cuda.device_count() > 1


def is_direct(addresses: Sequence[int]) -> bool:
    """Whether a compiled kernel may be launched without Triton: all addresses are multiples of 16, and no profiler has asked
    Triton to be called at every launch."""
    if functools.reduce(operator.or_, addresses, 0) & 15:
        return False
    knobs = _triton().knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    # A chain of hooks; in earlier releases one hook, or None.
    return not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def stream_reader(device: torch.device) -> Callable[[], int]:
    """The address of a device's current stream, as a function."""
    if device.type != "cuda":
        return lambda: 0
    return functools.partial(_triton().runtime.driver.active.get_current_stream, device.index)


@functools.cache
def _triton() -> Any:
    import triton

    return triton


def wide(numbers: Numbers) -> tuple[int, ...]:
    """Which integers do not fit 32 bits: Triton compiles anew for them."""
    if not numbers or max(numbers) < 1 << 31:
        return ()
    return tuple([k for k, number in enumerate(numbers) if number >= 1 << 31])


class TritonExecutable:
    """Launches generated Triton kernels; `warps` and `stages` are those of each."""

    def __init__(self, program: LoopProgram, warps: Sequence[int], stages: Sequence[int] = ()) -> None:
        self.program = program
        self._printed = print_triton(program, stages=stages, interpreted=_interpreted())
        self.source = self._printed.text
        self._module = load(self._printed.text, program.name)
        self._launches = [self._ready(*each) for each in zip(self._printed.launches, warps, strict=True)]
        self._is_prepared = False

    def __call__(self, tensors: Sequence[InMemory], arrays: Sequence[InMemory], symbols: Numbers) -> None:
        self._launch([*tensors, *arrays], symbols, tensors[0].device)

    def _launch(self, memory: Sequence[InMemory], symbols: Numbers, device: torch.device) -> None:
        launches = [(each, (programs, 1)) for each in self._launches if (programs := each.programs(symbols))]
        launch_all(launches, [m.data_ptr() for m in memory], memory, symbols, device)
        if not self._is_prepared:
            prepare_all(self._launches, memory, symbols)
            self._is_prepared = True

    def bound(self, arrays: Sequence[InMemory], symbols: Numbers, device: torch.device) -> Execute:
        """The program with everything but its memory. The first call compiles; later ones go straight to the compiled kernels."""
        stream = stream_reader(device)
        kernels: list[BoundKernel] | None = None

        def run(addresses: list[int], memory: Callable[[], Sequence[InMemory]]) -> None:
            nonlocal kernels
            if kernels is None or not is_direct(addresses):
                self._launch(memory(), symbols, device)
                kernels = self._compiled(symbols, device)
                return
            current = stream()
            every = [*addresses, *symbols]
            for launch, function, metadata, programs, arguments in kernels:
                launch(programs, 1, 1, current, function, metadata, None, None, None, *arguments(every))

        return run

    def _compiled(self, symbols: Numbers, device: torch.device) -> list[BoundKernel] | None:
        """The kernels that have work, with everything but addresses; None unless all are compiled."""
        found: list[BoundKernel] = []
        for each in self._launches:
            programs = each.programs(symbols)
            if programs:
                compiled = each.kernel.compiled.get((device, wide([symbols[k] for k in each.symbols])))
                if compiled is None:
                    return None
                found.append((*compiled, programs, each.arguments))
        return found

    def _ready(self, launch: Launch, warps: int) -> _PreparedLaunch:
        program = self._printed.program
        # A product and a sum round twice, as in torch; fused multiply-adds are written explicitly.
        options = {"num_warps": warps, "enable_fp_fusion": False, **({"num_stages": launch.stages} if launch.stages else {})}
        memory = [*(program.tensors.index(t) for t in launch.tensors)]
        memory += [len(program.tensors) + program.arrays.index(a) for a in launch.arrays]
        kernel = TritonFunction(getattr(self._module, launch.function), options)
        grid = size_function(functools.reduce(operator.mul, launch.grid, const(1)), program.symbols)
        symbols = [program.symbols.index(s) for s in launch.symbols]
        most = max(SHARED // warps, 1) if launch.shared else None
        return _PreparedLaunch(kernel, memory, symbols, len(program.tensors) + len(program.arrays), grid, most)


BoundKernel = tuple[Callable[..., None], Any, Any, int, Callable[[Sequence[int]], Sequence[int]]]
"""A compiled kernel, the number of its programs, and its arguments, of all addresses and symbols of the program."""


class _PreparedLaunch:
    """A launch, and which of a program's tensors, arrays and symbols it takes; `count` is the number of tensors and arrays,
    `most` the number of programs that suffice, if they share the grid."""

    def __init__(
        self,
        kernel: TritonFunction,
        memory: Sequence[int],
        symbols: Sequence[int],
        count: int,
        grid: Callable[[Numbers], int],
        most: int | None,
    ) -> None:
        self.kernel, self.memory, self.symbols = kernel, memory, symbols
        self._grid, self._most = grid, most
        places = [*memory, *(count + k for k in symbols)]
        self.arguments: Callable[[Sequence[int]], Sequence[int]]
        """The arguments of the kernel, of all addresses and symbols of the program."""
        self.arguments = operator.itemgetter(*places) if len(places) > 1 else lambda every: [every[k] for k in places]

    def programs(self, symbols: Numbers) -> int:
        """How many programs are launched."""
        count = self._grid(symbols)
        return count if self._most is None else min(count, self._most)


def launch_all(
    launches: Sequence[tuple[_PreparedLaunch, Grid]],
    addresses: Sequence[int],
    memory: Sequence[InMemory],
    symbols: Numbers,
    device: torch.device,
) -> None:
    """The launches of a program, in order, given all its tensors and arrays, their addresses, and its symbols."""
    is_wide = bool(wide(symbols))
    direct, stream, every = is_direct(addresses), stream_reader(device)(), [*addresses, *symbols]
    for each, (x, y) in launches:
        widths = wide([symbols[k] for k in each.symbols]) if is_wide else ()
        compiled = each.kernel.compiled.get((device, widths)) if direct else None
        if compiled is not None:
            run, function, metadata = compiled
            run(x, y, 1, stream, function, metadata, None, None, None, *each.arguments(every))
        else:
            each.kernel.launch((x, y), [memory[k] for k in each.memory], [symbols[k] for k in each.symbols])


def prepare_all(launches: Sequence[_PreparedLaunch], memory: Sequence[InMemory], symbols: Numbers) -> None:
    """Compiles kernels that the first call had no work for, such as those for long rows: a later call does not wait for them."""
    for each in launches:
        each.kernel.prepare([memory[k] for k in each.memory], [symbols[k] for k in each.symbols])


# --- derived arrays ----------------------------------------------------------------------------------------------------------


class Derivation:
    """Arrays, all of which `can_derive`, computed in a few launches, in one allocation.

    `names` are the tensors that they are derived from. Programs over the same rows often derive the same arrays: `text` and
    `numbers` tell whether they do.
    """

    def __init__(self, arrays: Sequence[Array], symbols: Sequence[Symbol]) -> None:
        printed = print_derived(tuple(arrays))
        self.text, self.names = printed.text, tuple(a.name for a in printed.inputs)
        made = (*printed.sums, *printed.tables)
        self.order = tuple(made.index(array) for array in arrays)
        """Where each array is among those that are made."""
        self._sums = len(printed.sums)
        one = const(1)
        sizes = [_recipe(a).count + one for a in printed.sums] + [table_size(a) for a in printed.tables]
        self.numbers = numbers_function([*sizes, *printed.symbols], tuple(symbols))
        """Everything besides tensors that the arrays depend on, as a function of the values of all symbols."""
        self._count = len(made)
        module, first = load(printed.text, "derived"), len(printed.inputs)
        inputs, symbols_of = [*range(first)], [*range(len(printed.symbols))]
        count = first + 1 + len(made)

        def prepared(name: str, memory: Sequence[int]) -> _PreparedLaunch:
            return _PreparedLaunch(TritonFunction(getattr(module, name), {}), memory, symbols_of, count, lambda _: 1, None)

        # All memory: the inputs, partial sums, sums, tables.
        sums, tables = [*range(first + 1, first + 1 + self._sums)], [*range(first + 1 + self._sums, count)]
        self._block_sums = prepared("block_sums", [*inputs, first]) if sums else None
        self._running_sums = prepared("running_sums", [*inputs, first, *sums]) if sums else None
        self._tables = prepared("tables", [*inputs, *sums, *tables]) if tables else None
        self._layouts: dict[tuple[int, ...], _DerivedLayout] = {}
        self._is_prepared = False

    def __call__(self, inputs: Tensors, numbers: tuple[int, ...], device: torch.device) -> list[Scratch]:
        """The arrays that are made, given the tensors that they are derived from and `numbers`."""
        layout = self._layouts.get(numbers)
        if layout is None:
            layout = self._layouts[numbers] = self._laid_out(numbers)
            while len(self._layouts) > LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
        room, is_zeroed, parts, launches, symbols = layout
        memory = (torch.zeros if is_zeroed else torch.empty)(room, dtype=torch.uint8, device=device)
        base = memory.data_ptr()
        addresses = [*[t.data_ptr() for t in inputs], *[base + part[0] for part in parts]]
        made = [Scratch(memory, *part) for part in parts]
        launch_all(launches, addresses, [*inputs, *made], symbols, device)
        if not self._is_prepared:
            every = (self._block_sums, self._running_sums, self._tables)
            prepare_all([each for each in every if each is not None], [*inputs, *made], symbols)
            self._is_prepared = True
        return made[1:]

    def _laid_out(self, numbers: Numbers) -> _DerivedLayout:
        sizes, symbols = numbers[: self._count], numbers[self._count :]
        components = -(-(max(sizes[: self._sums], default=1) - 1) // COMPONENTS) or 1
        # Partial sums of blocks of components come first. Without components, code may still ask for the length of the first.
        counts = [self._sums * components or 1, *[max(size, 2) for size in sizes]]
        parts: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        room = 0
        for count in counts:
            parts.append((room, (count,), torch.int64))
            room += -(-count * 8 // ALIGNMENT) * ALIGNMENT
        launches: list[tuple[_PreparedLaunch, Grid]] = []
        if self._running_sums is not None and self._block_sums is not None:
            grid = (components, self._sums)
            launches += [(self._block_sums, grid), (self._running_sums, grid)][0 if components > 1 else 1 :]
        if self._tables is not None and (blocks := -(-max(sizes[self._sums :]) // BLOCK)):
            launches.append((self._tables, (blocks, self._count - self._sums)))
        return _DerivedLayout(room, min(sizes) < 2, parts, launches, symbols)


class _DerivedLayout(NamedTuple):
    """Where derived arrays of some sizes are in their memory, and the launches that fill them."""

    room: int
    is_zeroed: bool
    parts: Sequence[tuple[int, tuple[int, ...], torch.dtype]]
    launches: Sequence[tuple[_PreparedLaunch, Grid]]
    symbols: Numbers


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
    for place in cache_folder.places():
        path = place / digest / "program.py"
        if path.is_file() and path.read_text() == text:
            return path
    written: list[Path] = []

    def write(folder: Path) -> None:
        with cache_folder.locked(folder, [digest]):
            try:
                found = cache_folder.get(folder, digest)
                if found is not None and found.get("program.py") != text.encode():
                    raise cache_folder.Unsound("holds another program")
            except cache_folder.Unsound as reason:
                cache_folder.report(folder, digest, reason)
                found = None
            if found is None:
                cache_folder.put(folder, digest, {"program.py": text.encode()})
        written.append(folder / digest / "program.py")

    cache_folder.write(write)
    return written[-1]
