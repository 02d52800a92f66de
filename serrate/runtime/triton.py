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

from serrate.analysis.boxes import ALIGNMENT as BOX_ALIGNMENT
from serrate.codegen.triton.module import Descriptor, Launch
from serrate.codegen.triton.printer import print_triton
from serrate.errors import BackendError
from serrate.ir.expr import Expr, Symbol, const, minimum
from serrate.ir.loops import LoopProgram
from serrate.ir.size_functions import numbers_function
from serrate.runtime import cache_folder
from serrate.runtime.host_code import (
    Allocated,
    Boxes,
    HostBox,
    HostCode,
    HostLaunch,
    HostProgram,
    host_code,
)
from serrate.runtime.launch import Execute, Numbers, Tensors, device_workers
from serrate.runtime.memory import InMemory, address, whole
from serrate.schedule.plan import LaunchOptions
from serrate.tensor.torch_private import is_recorded

SHARED = 8192
"""How many warps share a work list that is mostly empty: enough to fill a GPU, few enough to be gone at once."""

REGISTERS = "maxnreg"
"""Triton's option that limits the registers of a thread. Given the option, the assembler uses as many as it may."""
MOST_REGISTERS = 128
"""The limit for kernels that wait for memory: sixteen warps then share a multiprocessor. (Softmax of 16 bits on an H200: 66% of a
copy's speed with 155 registers, 70% with 128.)"""
TWO_PROGRAMS = 65536 // (2 * 32)
"""The registers of a thread times the warps of a program, when two programs share the registers of a multiprocessor. Programs of
many warps should use all of these: otherwise the assembler may save registers to make room for a third program; each then has
fewer loads in flight, and more rows compete for the cache."""

INTERPRETED = 2
"""The number of multiprocessors that is assumed under Triton's interpreter, which runs programs one after another."""

_modules: dict[str, ModuleType] = {}


Grid = tuple[int, int]
"""How many programs are launched along each axis."""


class TritonFunction:
    """A Triton function, compiled once for each device and for the widths of its integers.

    The first launch goes through Triton, which compiles. Later ones go straight to the compiled kernel, whatever the values of
    their integers, because none of these is specialised.
    """

    def __init__(self, function: Any, options: Mapping[str, int], registers: int | None = None) -> None:
        self.function, self._options = function, options
        self._registers = registers
        """The most registers of a thread; None for no limit. A limit below `MOST_REGISTERS` is also the number to use."""
        self.compiled: dict[tuple[torch.device, tuple[int, ...]], LoadedKernel] = {}
        """By device and `wide` integers."""

    def __call__(self, grid: Grid, tensors: Sequence[InMemory], numbers: Numbers, device: torch.device) -> None:
        """A launch of a kernel that reads no boxes: of the compiled kernel, if there is one for such arguments."""
        addresses = [address(t) for t in tensors]
        compiled = self.compiled.get((device, wide(numbers)))
        if compiled is None or not is_direct(addresses):
            self.launch(grid, tensors, numbers)
            return
        run, function, metadata = compiled
        run(*grid, 1, stream_reader(device)(), function, metadata, None, None, None, *addresses, *numbers)

    def launch(self, grid: Grid, tensors: Sequence[InMemory], numbers: Numbers, matrices: Sequence[Matrix] = ()) -> None:
        """A launch through Triton; `matrices` are those that boxes are read from."""
        given = [whole(t) for t in tensors]
        device = given[0].device
        if device.type == "cpu" and not _interpreted():
            raise BackendError("the triton backend runs CPU tensors only under its interpreter; set TRITON_INTERPRET=1 first")
        with torch.cuda.device(device) if _is_one_of_several(device) else nullcontext():
            kernel = self._compiled_and_launched((*grid, 1), given, numbers, matrices)
        # None under the interpreter. Triton compiles for aligned addresses, and anew for others.
        if kernel is not None and not functools.reduce(operator.or_, [t.data_ptr() for t in given], 0) & 15:
            self.compiled[device, wide(numbers)] = self._limited(kernel, direct(kernel, device), (*given, *numbers))

    def prepare(self, tensors: Sequence[InMemory], numbers: Numbers, matrices: Sequence[Matrix] = ()) -> None:
        """Compiles for such arguments and launches nothing, unless something is compiled already."""
        given = [whole(t) for t in tensors]
        device = given[0].device
        if self.compiled or device.type == "cpu" or not is_direct([t.data_ptr() for t in given]) or is_recorded(given[0]):
            return
        arguments = [*given, *(m.of(given) for m in matrices), *numbers]

        def warm(options: Mapping[str, int]) -> tuple[Any, LoadedKernel]:
            kernel = self.function.warmup(*arguments, grid=(1,), **options)
            return kernel, direct(kernel, device)

        with torch.cuda.device(device):
            kernel, loaded = self._fitting(warm)
        self.compiled[device, wide(numbers)] = self._limited(kernel, loaded, arguments)

    def limit(self, used: int) -> int | None:
        """The limit with which to compile a kernel again whose threads use `used` registers; None to keep it as it is."""
        if self._registers is None or used == self._registers or (used < self._registers and self._registers == MOST_REGISTERS):
            return None
        return self._registers

    def _limited(self, kernel: Any, loaded: LoadedKernel, arguments: Sequence[Any]) -> LoadedKernel:
        """The kernel, or, if it should use another number of registers, the kernel compiled with that limit, unless it spills."""
        used = getattr(kernel, "n_regs", None)
        if used is None or self.limit(used) is None:
            return loaded
        device = arguments[0].device
        with torch.cuda.device(device):
            limited = self.function.warmup(*arguments, grid=(1,), **self._options, **{REGISTERS: self._registers})
            found = direct(limited, device)
        return loaded if limited.n_spills else found

    def _compiled_and_launched(
        self, grid: tuple[int, int, int], tensors: Tensors, numbers: Numbers, matrices: Sequence[Matrix]
    ) -> Any:
        """The compiled kernel, after a launch."""
        arguments = [*tensors, *(m.of(tensors) for m in matrices), *numbers]
        return self._fitting(lambda options: self.function[grid](*arguments, **options))

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


class Matrix(NamedTuple):
    """A tensor among a kernel's, by position, as a matrix of which a copy engine reads blocks."""

    position: int
    shape: tuple[int, int]
    block: tuple[int, int]

    def of(self, tensors: Tensors) -> Any:
        """What Triton takes for it."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensors[self.position], list(self.shape), [self.shape[1], 1], list(self.block))


class MatrixInMemory:
    """The same by its address, as the launchers of compiled kernels take it."""

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.base, self._address = self, address
        self.shape, self.strides = shape, (shape[1], 1)

    def data_ptr(self) -> int:
        return self._address


def fewer_stages(options: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """The options of a kernel, and then the same with fewer blocks of a product in flight, which take less shared memory."""
    yield options
    for stages in range(options.get("num_stages", 1) - 1, 0, -1):
        yield {**options, "num_stages": stages}


class LoadedKernel(NamedTuple):
    """The launcher of a compiled kernel. It is called as Triton does, without hooks: `run(x, y, 1, stream, function, metadata,
    None, None, None, *arguments)`, with addresses that are multiples of 16, and numbers."""

    run: Callable[..., None]
    function: Any
    metadata: Any


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
    """Whether a compiled kernel may be launched without Triton: all addresses are multiples of 16, and Triton need not be called
    at every launch."""
    return not (functools.reduce(operator.or_, addresses, 0) & 15 or is_hooked())


def is_hooked() -> bool:
    """Whether Triton must be called at every launch: a profiler has asked for that, or kernels depend on the sizes of tensors."""
    knobs = _knobs()
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    # A chain of hooks; in earlier releases one hook, or None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or _depends_on_sizes())


def _depends_on_sizes() -> bool:
    """Whether Triton compiles another kernel for tensors of more than 2 GiB, as it does for AMD's buffer instructions: these have
    32-bit offsets, and read 0 past them."""
    return torch.version.hip is not None and _triton().knobs.amd.use_buffer_ops


@functools.cache
def stream_reader(device: torch.device) -> Callable[[], int]:
    """The address of a device's current stream, as a function."""
    if device.type != "cuda":
        return lambda: 0
    return functools.partial(_triton().runtime.driver.active.get_current_stream, device.index)


@functools.cache
def _knobs() -> Any:
    return _triton().knobs.runtime


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
    """Launches generated Triton kernels, each with its options. With `boxes`, a copy engine reads operands of products; where it
    cannot, because memory is not aligned or too large, an executable without boxes runs instead."""

    def __init__(self, program: LoopProgram, options: Sequence[LaunchOptions], *, boxes: bool | None = None) -> None:
        self.program = program
        boxes = _copy_engine() if boxes is None else boxes
        self._printed = print_triton(program, options, boxes=boxes, interpreted=_interpreted())
        self.source = self._printed.text
        self._module = load(self._printed.text, program.name)
        self._launches = [self._ready(*each) for each in zip(self._printed.launches, options, strict=True)]
        self._options = options
        with_options = [*zip(self._printed.launches, options, strict=True)]
        self._programs = functools.cache(
            lambda device: numbers_function(
                [_programs(launch, _most_shared(launch, own, device)) for launch, own in with_options],
                self._printed.program.symbols,
            )
        )
        """For a device, the number of programs of each launch as a function of the symbols."""
        self._boxes = [box for each in self._launches for box in each.boxes]
        self._by_pointers = functools.cache(lambda: TritonExecutable(program, options, boxes=False))
        self._is_prepared = False

    def __call__(self, tensors: Sequence[InMemory], arrays: Sequence[InMemory], symbols: Numbers) -> None:
        memory = [*tensors, *arrays]
        self.sized(symbols, tensors[0].device)([address(m) for m in memory], lambda: memory)

    def bound(self, arrays: Sequence[InMemory], symbols: Numbers, device: torch.device) -> Execute:
        """The program with everything but its memory."""
        return self.sized(symbols, device)

    def sized(self, symbols: Numbers, device: torch.device) -> Execute:
        """The program with everything but its memory."""
        if self._boxes and not all(box.fits(symbols) for box in self._boxes):
            return self._by_pointers().sized(symbols, device)
        counts = zip(self._launches, self._programs(device)(symbols), strict=True)
        launches = [(each, (programs, 1)) for each, programs in counts if programs]
        sized = SizedLaunches(launches, symbols, device)
        if self._is_prepared and not self._boxes:
            return sized

        def run(addresses: list[int], memory: Callable[[], Sequence[InMemory]]) -> None:
            if self._boxes and any(addresses[box.memory] % BOX_ALIGNMENT for box in self._boxes):
                self._by_pointers().sized(symbols, device)(addresses, memory)
                return
            sized(addresses, memory)
            if not self._is_prepared:
                prepare_all(self._launches, memory(), symbols)
                self._is_prepared = True

        return run

    def host_code(
        self, numbers: Sequence[Symbol], values: Sequence[Expr], inputs: int, allocated: Sequence[Allocated], device: torch.device
    ) -> HostCode | None:
        """The code that runs this program on a device; None as long as a kernel is not compiled. `numbers` are those of a call,
        `values` the program's symbols in terms of them; of its tensors, the first are `inputs`, and the others are allocated."""
        launches: list[HostLaunch] = []
        for launch, own, ready in zip(self._printed.launches, self._options, self._launches, strict=True):
            compiled = ready.kernel.compiled.get((device, ()))
            if compiled is None:
                return None
            programs = _programs(launch, _most_shared(launch, own, device))
            descriptors = zip(ready.boxes, launch.descriptors, strict=True)
            boxes = [HostBox(box.memory, d.rows, d.columns) for box, d in descriptors]
            launches.append(HostLaunch(programs, *compiled, ready.memory, boxes, ready.symbols))
        program = self._printed.program
        symbols, limits = [*zip(program.symbols, values, strict=True)], Boxes(MatrixInMemory, FARTHEST, BOX_ALIGNMENT)
        made = HostProgram(numbers, symbols, inputs, allocated, len(program.arrays), launches, limits)
        return host_code(made, device, stream=stream_reader(device), is_hooked=is_hooked)

    def _ready(self, launch: Launch, own: LaunchOptions) -> PreparedLaunch:
        program, warps = self._printed.program, own.warps
        # A product and a sum round twice, as in torch; fused multiply-adds are written explicitly.
        options = {"num_warps": warps, "enable_fp_fusion": False}
        if launch.stages:
            options["num_stages"] = own.product_stages or launch.stages
        memory = [*(program.tensors.index(t) for t in launch.tensors)]
        memory += [len(program.tensors) + program.arrays.index(a) for a in launch.arrays]
        registers = min(MOST_REGISTERS, TWO_PROGRAMS // warps) if not launch.stages and torch.version.hip is None else None
        kernel = TritonFunction(getattr(self._module, launch.function), options, registers)
        symbols = [program.symbols.index(s) for s in launch.symbols]
        boxes = [_PreparedBox.of(d, launch, program) for d in launch.descriptors]
        return PreparedLaunch(kernel, memory, symbols, len(program.tensors) + len(program.arrays), boxes)


def _programs(launch: Launch, most: int) -> Expr:
    """The number of programs of a launch; at most `most` of them share a grid."""
    grid, shared = (
        const(0) if sizes is None else functools.reduce(operator.mul, sizes, const(1)) for sizes in (launch.grid, launch.shared)
    )
    return grid + minimum(shared, most)


def _most_shared(launch: Launch, own: LaunchOptions, device: torch.device) -> int:
    """The most programs that share a grid: for resident programs, as many as a device runs at a time; otherwise enough for a list
    that is mostly empty."""
    if launch.resident and own.resident is not None:
        return own.resident * (device_workers(device) if device.type == "cuda" else INTERPRETED)
    return max(SHARED // own.warps, 1)


FARTHEST = 1 << 31
"""How many rows a matrix has at most, if a copy engine reads it."""


class _PreparedBox(NamedTuple):
    """A tensor from which a launch reads boxes: its place among all tensors, and among those of the launch."""

    memory: int
    position: int
    shape: Callable[[Numbers], tuple[int, ...]]
    block: tuple[int, int]

    @staticmethod
    def of(descriptor: Descriptor, launch: Launch, program: LoopProgram) -> _PreparedBox:
        places = program.tensors.index(descriptor.tensor), launch.tensors.index(descriptor.tensor)
        shape = numbers_function([descriptor.rows, descriptor.columns], program.symbols)
        return _PreparedBox(*places, shape, descriptor.block)

    def fits(self, symbols: Numbers) -> bool:
        """Whether a copy engine can count its rows."""
        return 0 < self.shape(symbols)[0] < FARTHEST

    def matrix(self, symbols: Numbers) -> Matrix:
        rows, columns = self.shape(symbols)
        return Matrix(self.position, (rows, columns), self.block)

    def in_memory(self, every: Sequence[int], count: int) -> MatrixInMemory:
        """Given all addresses and symbols of the program; `count` are addresses."""
        rows, columns = self.shape(every[count:])
        return MatrixInMemory(every[self.memory], (rows, columns))


class PreparedLaunch:
    """A launch, and which of a program's tensors, arrays and symbols it takes; `count` is the number of tensors and arrays."""

    def __init__(
        self,
        kernel: TritonFunction,
        memory: Sequence[int],
        symbols: Sequence[int],
        count: int,
        boxes: Sequence[_PreparedBox] = (),
    ) -> None:
        self.kernel, self.memory, self.symbols, self.boxes = kernel, memory, symbols, boxes
        numbers = [count + k for k in symbols]
        self.arguments: Callable[[Sequence[int]], Sequence[Any]]
        """The arguments of the kernel, of all addresses and symbols of the program."""
        if boxes:
            self.arguments = lambda every: [
                *[every[k] for k in memory],
                *[box.in_memory(every, count) for box in boxes],
                *[every[k] for k in numbers],
            ]
        else:
            places = [*memory, *numbers]
            self.arguments = operator.itemgetter(*places) if len(places) > 1 else lambda every: [every[k] for k in places]

    def matrices(self, symbols: Numbers) -> list[Matrix]:
        """The tensors that boxes are read from."""
        return [box.matrix(symbols) for box in self.boxes]


class SizedLaunches:
    """Launches, in order, with everything but their memory. What is not compiled yet goes through Triton; later calls go straight
    to the compiled kernels."""

    def __init__(self, launches: Sequence[tuple[PreparedLaunch, Grid]], symbols: Numbers, device: torch.device) -> None:
        self._launches, self._symbols, self._device = launches, symbols, device
        self._stream = stream_reader(device)
        self._kernels: list[tuple[Any, ...]] | None = None
        """If all are compiled: of each, its launcher, the arguments of that before addresses, and a function of all addresses and
        symbols that returns its own."""

    def __call__(self, addresses: list[int], memory: Callable[[], Sequence[InMemory]]) -> None:
        """Launches them, given the addresses of all tensors and arrays of a program; and these as memory, in case that addresses
        do not do."""
        kernels = self._kernels or self._compiled()
        if kernels is None or not is_direct(addresses):
            every = memory()
            for each, grid in self._launches:
                own = [every[k] for k in each.memory], [self._symbols[k] for k in each.symbols]
                if each.boxes:
                    each.kernel.launch(grid, *own, each.matrices(self._symbols))
                else:
                    each.kernel(grid, *own, self._device)
            return
        current, given = self._stream(), [*addresses, *self._symbols]
        for run, x, y, function, metadata, arguments in kernels:
            run(x, y, 1, current, function, metadata, None, None, None, *arguments(given))

    def _compiled(self) -> list[tuple[Any, ...]] | None:
        found: list[tuple[Any, ...]] = []
        narrow = not wide(self._symbols)
        for each, grid in self._launches:
            own = () if narrow else wide([self._symbols[k] for k in each.symbols])
            compiled = each.kernel.compiled.get((self._device, own))
            if compiled is None:
                return None
            found.append((compiled.run, *grid, compiled.function, compiled.metadata, each.arguments))
        self._kernels = found
        return found


def prepare_all(launches: Sequence[PreparedLaunch], memory: Sequence[InMemory], symbols: Numbers) -> None:
    """Compiles kernels that the first call had no work for, such as those for long rows: a later call does not wait for them."""
    for each in launches:
        own = [memory[k] for k in each.memory], [symbols[k] for k in each.symbols]
        each.kernel.prepare(*own, each.matrices(symbols))


@functools.cache
def _copy_engine() -> bool:
    """Whether there is a copy engine: in Hopper GPUs and later ones, and in Triton's interpreter."""
    return _interpreted() or (
        torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    )


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
