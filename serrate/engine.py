"""The engine joins the stages: naive program -> plan -> loop program -> executable.

In: a tile program, and the facts about a call. Out: the program under a plan, ready to run. The whole compiler is `build`, read
top to bottom. `CompiledStage` is a tile program with everything built for it so far; it also chooses the plan.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from serrate import logs, settings
from serrate.errors import BackendError, CompilerMissing, SerrateError
from serrate.ir.expr import Array, Expr, Symbol
from serrate.ir.loops import LoopProgram
from serrate.ir.size_functions import shapes_function
from serrate.ir.tile import TileProgram
from serrate.ir.values import Role, Tensor
from serrate.lower.passes.join_launches import join_launches
from serrate.lower.pipeline import lower
from serrate.modes import is_deterministic
from serrate.runtime import memory
from serrate.runtime.arguments import Arguments, ArraysReader, BoundCall
from serrate.runtime.arrays import symbols_of
from serrate.runtime.compiler import find_compiler
from serrate.runtime.dispatch import Prepared, profiled
from serrate.runtime.host_code import Allocated, HostCode
from serrate.runtime.launch import CppExecutable, Execute, ReferenceExecutable, TensorExecutable
from serrate.runtime.library_executable import LibraryExecutable
from serrate.runtime.locks import making
from serrate.runtime.memory import InMemory, address, no_address
from serrate.runtime.results import Result
from serrate.schedule.heuristic import RowStatistics
from serrate.schedule.plan import Plan
from serrate.schedule.strategies.library import LIBRARY, functions
from serrate.schedule.target import CPU, GPU, Target
from serrate.tensor.sync import is_host
from serrate.tensor.torch_private import PROFILER
from serrate.tuner.buckets import bucket_of
from serrate.tuner.buffers import Buffers
from serrate.tuner.candidates import Candidate, Space, space_of
from serrate.tuner.identity import compiler_identity, device_identity
from serrate.tuner.measure import ProgramMeasurer
from serrate.tuner.policy import Policy
from serrate.tuner.record import ProgramKey, Tuning
from serrate.tuner.tuner import ProgramTuner, text_digest

if TYPE_CHECKING:
    from serrate.report.collect import StageFacts

_plans, _sources = logs.logger("plan"), logs.logger("source")

ShapeReader = Callable[[BoundCall], tuple[int, ...]]
ShapesReader = Callable[[Sequence[int]], tuple[tuple[int, ...], ...]]


ONE_PLAN = "one plan serves all rows under batch_invariant()"
"""The reason for a plan in that mode."""

BACKENDS: dict[str, Target] = {"reference": CPU, "cpp": CPU, "triton": GPU}


def build(
    program: TileProgram, chosen: Plan, name: str, backend: str, is_wide: Callable[[Array], bool], title: str | None = None
) -> CppExecutable | TensorExecutable:
    """The compiler in one function: schedule, lower, print, build. `is_wide` says which arrays hold int64; `title` is the first
    line of the generated source. A plan that makes the program a library call leaves nothing to lower."""
    scheduled = chosen.apply(program)
    header = (title or f"{name}: {chosen.strategy}", *chosen.lines[1:])
    if scheduled.call is not None:
        return LibraryExecutable(scheduled, scheduled.call, name, header)
    loops = lower(scheduled, name, header, chosen.lowered_for(BACKENDS[backend]))
    if backend == "reference":
        return ReferenceExecutable(loops)
    if backend == "cpp":
        return CppExecutable(loops, frozenset(filter(is_wide, loops.arrays)))
    from serrate.runtime.triton import TritonExecutable  # triton is optional: only its backend may import it

    short = chosen.short or chosen
    if short.launch_options == chosen.launch_options:
        loops = join_launches(loops)
    plans = [short if kernel.is_short else chosen for kernel in loops.kernels]
    return TritonExecutable(loops, [plan.launch_options for plan in plans])


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def default_backend(device: torch.device) -> str:
    """The default backend of a device."""
    asked = settings.current().backend
    if asked is not None:
        return asked
    if device.type == "cuda":
        return "triton"
    if device.type != "cpu":
        raise BackendError(f"no backend runs on {device.type}; move the tensors to a CPU or a CUDA device")
    try:
        find_compiler()
    except CompilerMissing as error:
        _warn_once(f"{error}. Running on the reference backend, which is slow.")
        return "reference"
    return "cpp"


class BuiltProgram(NamedTuple):
    """A program built under a plan, and what a call must supply for it."""

    plan: Plan
    executable: CppExecutable | TensorExecutable
    indices: tuple[tuple[int, Array], ...]
    """As in `Prepared`."""
    allocated: tuple[Tensor, ...]
    """Outputs, and then scratch."""
    outputs: int
    """The number of outputs among these."""
    private: tuple[Tensor, ...]
    """Private rows, one per thread."""
    shapes: tuple[ShapeReader, ...]
    """The shapes of the allocated tensors, as functions of a call."""
    rows: tuple[ShapeReader, ...]
    """The shapes of private rows, as functions of a call."""
    arrays: ArraysReader
    numbers: Callable[[BoundCall], tuple[int, ...]]
    """The program's arrays and symbols, as functions of a call."""
    results: tuple[int, ...]
    """The positions of the fusion's results among the program's tensors; -1 for results of other stages."""
    by_size: tuple[ShapesReader | None, ShapesReader | None]
    """All shapes as a function of the sizes of a call's tensors, if these and the symbols depend on nothing else: on a device,
    and on the host."""
    needed: tuple[int, ...]
    """The places of those numbers of a call that any of this depends on."""
    host_code: Callable[[torch.device], HostCode | None]
    """The code that runs the program on a GPU; None for a program without such code, or before its kernels are compiled."""


class SizedProgram(NamedTuple):
    """A built program, and everything that a call supplies that depends only on the sizes of its tensors."""

    built: BuiltProgram
    symbols: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    private: tuple[torch.Tensor, ...]
    allocate: Callable[[], list[InMemory]]
    """Outputs and scratch, new ones at every call."""
    execute: Execute | None
    """The program with everything but its memory; None if it depends on arrays."""


class CallFacts(NamedTuple):
    """The facts on which the choice of a plan for a call depends."""

    usual: Candidate
    """The choice that is made without measuring."""
    statistics: Callable[[], tuple[RowStatistics | None, float | None]]
    """Statistics of the rows, as far as the host knows them, and the standard deviation of their lengths over the mean."""
    why: str
    """The reason for the usual choice."""


class CompiledStage(ABC):
    """A tile program and everything built for it so far: a stage of a fusion, or a device loop of a kernel."""

    def __init__(self, program: TileProgram, arguments: Arguments, policy: Policy, shares: int = 1) -> None:
        """`shares`: how many programs share a budget for tuning."""
        self.naive, self.arguments = program, arguments
        self._policy, self._shares = policy, shares
        self._built: dict[tuple[str, Candidate], BuiltProgram] = {}
        self._tuners: dict[tuple[str, torch.device, int, tuple[str, ...]], ProgramTuner] = {}
        self._spaces: dict[tuple[str, Candidate, int, tuple[str, ...]], Space] = {}
        self._calls: dict[str, tuple[str, ...]] = {}

    @abstractmethod
    def planned(self, chosen: Candidate, target: Target) -> Plan:
        """The plan that a candidate stands for."""

    @abstractmethod
    def fixed(self) -> Mapping[str, int]:
        """Tile sizes by axis, and options of launches, that the user has fixed besides the program: part of the key of what is
        remembered about it."""

    def overridden(self) -> frozenset[str]:
        """Options of strategies that are not varied, because a choice of the user replaces them."""
        return frozenset()

    def header(self, chosen: Plan) -> str:
        """The first line of the generated source."""
        return f"{self.naive.name}: {chosen.strategy}"

    def allocated(self, program: LoopProgram) -> tuple[Tensor, ...]:
        """The tensors of a program that are allocated for a call."""
        return (*program.outputs, *program.scratch)

    def is_exact(self, tensor: Tensor) -> bool:
        """Whether a tensor must have its exact size, even if that takes a host copy of lengths."""
        return False

    def chosen(self, call: BoundCall, backend: str, facts: CallFacts, buffers: Callable[[bool], Buffers]) -> Candidate:
        """The candidate for a call: remembered, measured now on `buffers`, or the usual one."""
        return facts.usual if self.is_idle(call, backend) else self.tuning(call, backend, facts, buffers).chosen

    def is_idle(self, call: BoundCall, backend: str) -> bool:
        """Whether there are no records about the plans for a call, and nothing is measured now."""
        return backend == "reference" or self._tuner(backend, call.device).is_idle()

    def tuning(self, call: BoundCall, backend: str, facts: CallFacts, buffers: Callable[[bool], Buffers] | None = None) -> Tuning:
        """The tuning record for a call; without `buffers`, nothing is measured."""

        def measurer(copies: bool) -> ProgramMeasurer:
            assert buffers is not None
            return self._measurer(call, backend, buffers(copies))

        rows, variation = facts.statistics()
        sizes = call.numbers if rows is None else (*call.numbers, rows.count, rows.total)
        bucket = bucket_of(sizes, rows, variation, call.hints)
        tuner = self._tuner(backend, call.device)
        return tuner.tuning(bucket, self._space(facts.usual, backend), None if buffers is None else measurer)

    def _measurer(self, call: BoundCall, backend: str, buffers: Buffers) -> ProgramMeasurer:
        return ProgramMeasurer(
            lambda candidate: self.prepare(call, self.built(call, backend, candidate)),
            lambda candidate: candidate.strategy == LIBRARY or (backend, candidate.compiled) in self._built,
            buffers,
            call.device,
        )

    def _library_calls(self, backend: str) -> tuple[str, ...]:
        """The library functions that are candidates: none under torch's deterministic mode."""
        found = self._calls.get(backend)
        if found is None:
            found = self._calls[backend] = functions(self.naive, BACKENDS[backend])
        return () if is_deterministic() else found

    def _tuner(self, backend: str, device: torch.device) -> ProgramTuner:
        calls = self._library_calls(backend)
        at = (backend, device, torch.get_num_threads(), calls)
        found = self._tuners.get(at)
        if found is None:
            tensors = (*self.naive.inputs, *self.naive.outputs)
            key = ProgramKey(
                # Notes name lines of the source: a kernel that moves within its file keeps its records.
                text_digest(replace(self.naive, notes=()), *sorted(self.fixed().items()), *calls),
                tuple(f"{str(t.dtype).removeprefix('torch.')}[{len(t.storage)}]" for t in tensors),
                backend,
                device_identity(device, at[2]),
                compiler_identity(backend),
            )
            found = self._tuners[at] = ProgramTuner(self.naive.name, key, device, self._policy, self._shares)
        return found

    def _space(self, usual: Candidate, backend: str) -> Space:
        key = (backend, usual, torch.get_num_threads(), self._library_calls(backend))
        found = self._spaces.get(key)
        if found is None:
            found = self._spaces[key] = space_of(
                self.naive, usual, BACKENDS[backend], key[2], self.fixed(), key[3], self.overridden()
            )
        return found

    def built(self, call: BoundCall, backend: str, chosen: Candidate) -> BuiltProgram:
        """The program under a plan, built on first use."""
        key = (backend, chosen)
        found = self._built.get(key)
        if found is None:
            with making:
                found = self._built.get(key)
                if found is None:
                    found = self._built[key] = self._new(call, backend, chosen)
        return found

    def _new(self, call: BoundCall, backend: str, chosen: Candidate) -> BuiltProgram:
        if chosen == chosen.compiled:
            return self._build(call, backend, self.planned(chosen, BACKENDS[backend]))
        made = self.built(call, backend, chosen.compiled)
        if not isinstance(made.executable, CppExecutable):
            return made
        executable = made.executable.shared(chosen.threads, chosen.order)
        return made._replace(plan=replace(made.plan, threads=chosen.threads, order=chosen.order), executable=executable)

    def built_or(self, call: BoundCall, backend: str, chosen: Candidate, usual: Candidate) -> BuiltProgram:
        """The program under a plan from a record; if that plan is not legal, warns and uses the usual one."""
        try:
            return self.built(call, backend, chosen)
        except SerrateError as error:
            if chosen == usual:
                raise
            message = (
                f"{self.naive.name}: the remembered plan {chosen} cannot be used ({error}); `serrate cache clear` removes it"
            )
            _warn_once(message)
            return self.built(call, backend, usual)

    def _build(self, call: BoundCall, backend: str, chosen: Plan) -> BuiltProgram:
        _plans.info("%s: %s", self.naive.name, chosen)

        def wide(array: Array) -> bool:
            return self.arguments.array(call, array).dtype == torch.int64

        built = build(self.naive, chosen, self.naive.name, backend, wide, self.header(chosen))
        if isinstance(built, LibraryExecutable):
            built.require(call.device)
        _sources.debug("%s", built.source)
        allocated = self.allocated(built.program)
        private = tuple(t for t in allocated if t.role is Role.PRIVATE)
        count = len(allocated) - len(private)
        assert allocated[count:] == private, "private tensors are the last"
        program, arguments = built.program, self.arguments
        indices, numbers = tuple((k, a) for k, a in enumerate(program.arrays) if a.signed), self._numbers_of(program)
        of_lengths = any(n.arrays for n in numbers)
        return BuiltProgram(
            chosen,
            built,
            indices,
            allocated[:count],
            sum(t in program.outputs for t in allocated),
            private,
            tuple(self._shape_reader(t) for t in allocated[:count]),
            tuple(self._row_reader(t, chosen) for t in private),
            arguments.arrays_reader(program.arrays, together=backend == "triton"),
            arguments.numbers_reader(numbers),
            self.result_places(program),
            (None, None) if of_lengths else (self._by_size(allocated, False), self._by_size(allocated, True)),
            self._needed(program),
            self._host_code(built, allocated, numbers) if backend == "triton" else _no_host_code,
        )

    def _host_code(
        self, built: CppExecutable | TensorExecutable, allocated: Sequence[Tensor], values: Sequence[Expr]
    ) -> Callable[[torch.device], HostCode | None]:
        """As in `BuiltProgram`; `values` are the symbols of the program."""
        from serrate.runtime.triton import TritonExecutable  # triton is optional: only its backend may import it

        sizes, program = self._size_exprs(allocated, False), built.program
        if sizes is None or any(value.arrays for value in values) or not isinstance(built, TritonExecutable):
            return _no_host_code
        memory = [Allocated(own, t.dtype, t in program.outputs) for own, t in zip(sizes, allocated, strict=True)]
        inputs, found = len(program.tensors) - len(allocated), dict[torch.device, HostCode]()

        def host_code(device: torch.device) -> HostCode | None:
            code = found.get(device)
            if code is None:
                code = built.host_code(tuple(self.arguments.symbols), values, inputs, memory, device)
                if code is not None:
                    found[device] = code
            return code

        return host_code

    def _needed(self, program: LoopProgram) -> tuple[int, ...]:
        """The places of those numbers of a call that determine a program's symbols, its arrays or the sizes of its tensors."""
        domains = [domain for tensor in self.allocated(program) for domain in tensor.storage]
        sizes = [size for domain in domains for size in (domain.extent_expr, domain.host_bound)]
        exprs = [*self._numbers_of(program), *sizes]
        arrays = {*program.arrays, *(array for expr in exprs for array in expr.arrays)}
        used = {s for expr in exprs for s in expr.symbols}.union(*map(symbols_of, arrays))
        return tuple(place for symbol, place in self.arguments.symbols.items() if symbol in used)

    def _numbers_of(self, program: LoopProgram) -> list[Expr]:
        """A program's symbols, in terms of those of a call."""
        launched = dict(program.launched)
        return [s if s in self.arguments.symbols else launched[s] for s in program.symbols]

    def explained(self, call: BoundCall, backend: str, ready: Prepared, why: str, known: Tuning | None) -> StageFacts:
        """The facts that `explain` reports: what runs for a call and why, and the `known` results for other plans."""
        from serrate.report.collect import StageFacts  # imported here because `import serrate` must stay fast

        def data(program: LoopProgram) -> tuple[dict[Array, InMemory], dict[Symbol, int]]:
            call.read(self._needed(program))
            arrays = self.arguments.arrays_reader(program.arrays, together=False)(call)
            numbers = self.arguments.numbers_reader(self._numbers_of(program))(call)
            return dict(zip(program.arrays, arrays, strict=True)), dict(zip(program.symbols, numbers, strict=True))

        target = BACKENDS[backend]
        return StageFacts(self.naive, call.device, backend, target, ready, why, known, lambda c: self.planned(c, target), data)

    def result_places(self, program: LoopProgram) -> tuple[int, ...]:
        """The positions of the fusion's results among the program's tensors."""
        return ()

    def prepare(self, call: BoundCall, built: BuiltProgram, results: tuple[Result, ...] = ()) -> Prepared:
        """Prepares the program for calls with these offsets and extents."""
        return self.with_arrays(call, self.sized(call, built), results)

    @staticmethod
    def sized(call: BoundCall, built: BuiltProgram) -> SizedProgram:
        """The program with the sizes of a call."""
        if call.unread:
            call.read(built.needed)
        by_size, device = built.by_size[is_host(call.device)], call.device
        sizes = [shape(call) for shape in built.shapes] if by_size is None else by_size(call.numbers)
        shapes = tuple(zip(sizes, [t.dtype for t in built.allocated], strict=True))
        private = tuple([_row(shape(call), t.dtype) for shape, t in zip(built.rows, built.private, strict=True)])
        symbols = built.numbers(call)
        allocate = memory.CallMemory(shapes, built.outputs, device)
        return SizedProgram(built, symbols, shapes, private, allocate, built.executable.sized(symbols, device))

    @staticmethod
    def with_arrays(call: BoundCall, sized: SizedProgram, results: tuple[Result, ...]) -> Prepared:
        """The program with the sizes and the arrays of a call."""
        built, symbols, shapes, private, allocate, execute = sized
        plan, executable, indices, outputs, arrays = (
            built.plan,
            built.executable,
            built.indices,
            built.outputs,
            built.arrays(call),
        )
        return Prepared(plan, executable, arrays, indices, symbols, shapes, outputs, private, allocate, execute, results)

    @staticmethod
    def run_host_code(call: BoundCall, inputs: Sequence[torch.Tensor], built: BuiltProgram) -> tuple[torch.Tensor, ...] | None:
        """Runs the program by its host code; returns its inputs and outputs. None, and nothing was run, if host code cannot serve
        the call, or the call is profiled."""
        code = None if PROFILER._is_profiler_enabled else built.host_code(call.device)
        if code is None:
            return None
        if call.unread:
            call.read(built.needed)
        arrays = built.arrays(call)
        return code(call.numbers, inputs, [array.data_ptr() or no_address(array) for array in arrays])

    def run(self, call: BoundCall, inputs: Sequence[torch.Tensor], ready: Prepared) -> list[Any]:
        """Runs the stage; returns its tensors: `inputs`, and what was allocated for the call."""
        tensors = [*inputs, *ready.allocate(), *ready.private]
        arrays = ready.arrays
        if ready.indices:
            fresh: dict[int, InMemory] = {k: self.arguments.array_reader(array)(call) for k, array in ready.indices}
            arrays = tuple([fresh.get(k, a) for k, a in enumerate(arrays)])
        if PROFILER._is_profiler_enabled:
            with profiled(ready):
                _execute(ready, tensors, arrays)
        else:
            _execute(ready, tensors, arrays)
        return tensors

    def _shape_reader(self, tensor: Tensor) -> ShapeReader:
        """The shape in memory, as a function of a call: exact for results and if lengths are on the host, else an upper bound
        that the host knows.

        For a product of ragged dims that bound would be the square of all positions, far more than fits in memory.
        """
        arguments, is_exact = self.arguments, self.is_exact(tensor)
        exact, bounds = [d.extent_expr for d in tensor.storage], [d.host_bound for d in tensor.storage]
        needed = [array for size in exact for array in size.arrays]
        if not needed and exact == bounds:
            return arguments.shape_reader(bounds)
        bound = arguments.shape_reader(bounds)
        # Sizes may be known in different stages: an early stage runs before the values of later sizes are computed.
        ready = [arguments.shape_reader((size,)) for size in exact]

        def read(call: BoundCall) -> tuple[int, ...]:
            if not is_exact and not is_host(call.device):
                return bound(call)
            known = [arguments.ready(call, *size.arrays) for size in exact]
            if not all(known):
                return tuple([r(call)[0] if k else b for r, k, b in zip(ready, known, bound(call), strict=True)])
            return tuple([r(call)[0] for r in ready])

        return read

    def _by_size(self, tensors: Sequence[Tensor], on_host: bool) -> ShapesReader | None:
        """The shapes of tensors in memory as a function of a call's sizes; None if one depends on lengths, or is of a row."""
        shapes = self._size_exprs(tensors, on_host)
        return None if shapes is None else shapes_function(shapes, tuple(self.arguments.symbols))

    def _size_exprs(self, tensors: Sequence[Tensor], on_host: bool) -> list[list[Expr]] | None:
        """The shapes of tensors in memory, in terms of a call's sizes; None as for `_by_size`."""
        shapes: list[list[Expr]] = []
        for tensor in tensors:
            exact, bounds = [d.extent_expr for d in tensor.storage], [d.host_bound for d in tensor.storage]
            shapes.append(exact if on_host or self.is_exact(tensor) else bounds)
            if tensor.role is Role.PRIVATE or any(size.arrays for size in (*shapes[-1], *bounds)):
                return None
        return shapes

    def _row_reader(self, tensor: Tensor, chosen: Plan) -> ShapeReader:
        """The shape of a private row: a kernel declares it; in a fusion it is as long as the longest row of one worker."""
        return self._shape_reader(tensor)


def _no_host_code(device: torch.device) -> None:
    """For programs without host code."""


@functools.lru_cache(1024)
def _row(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Stands for a private row."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _execute(ready: Prepared, tensors: Sequence[InMemory], arrays: Sequence[InMemory]) -> None:
    """Runs a program that was prepared."""
    if ready.execute is None:
        ready.executable(tensors, arrays, ready.symbols)
    else:
        every = [*tensors, *arrays]
        ready.execute([address(each) for each in every], lambda: every)
