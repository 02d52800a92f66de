"""The stages of a fusion: programs, and library calls.

In: a stage of a fusion, and the arguments of calls. Out: its program under the plan for a call, with the sizes and arrays of that
call. What calls with the same sizes need is cached here; `compiled.py` binds arguments, and runs the stages in order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from serrate import settings
from serrate.analysis.vectors import MustDivide
from serrate.engine import (
    BACKENDS,
    ONE_PLAN,
    BuiltProgram,
    CallFacts,
    CompiledStage,
    ShapeReader,
    SizedProgram,
    default_backend,
)
from serrate.errors import StrategyError
from serrate.ir.expr import Expr
from serrate.ir.loops import LoopProgram
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.storage import row_dims, storage_of
from serrate.ir.tile import Library, TileProgram
from serrate.ir.values import Read, Tensor
from serrate.modes import is_batch_invariant, is_deterministic
from serrate.runtime import library
from serrate.runtime.arguments import BoundCall, Number
from serrate.runtime.arrays import remembered
from serrate.runtime.bind import Binder
from serrate.runtime.dispatch import Prepared
from serrate.runtime.launch import Executable, device_workers
from serrate.runtime.outlined import OutlinedProgram
from serrate.runtime.results import ResultReader
from serrate.schedule.by_hand import by_hand, vector_checks
from serrate.schedule.hand import HandSchedule
from serrate.schedule.heuristic import Choice, RowStatistics, choose, invariant, similar_mean
from serrate.schedule.plan import Plan
from serrate.schedule.prepare import RowFacts, row_facts
from serrate.schedule.strategies import plan
from serrate.schedule.strategies.library import LIBRARY
from serrate.schedule.target import Target
from serrate.tensor import JaggedTensor
from serrate.tensor.hints import NO_HINTS
from serrate.tensor.sync import is_host
from serrate.tensor.torch_private import stream_of
from serrate.tuner.buffers import Buffers, OutputBuffers
from serrate.tuner.candidates import Candidate
from serrate.tuner.policy import Policy, is_paused
from serrate.tuner.record import Tuning

if TYPE_CHECKING:
    from serrate.report.collect import StageFacts

_numbers = itertools.count()
SIZES = 64
"""The most sets of sizes for which something is cached; the oldest is dropped first."""


class PlannedProgram(NamedTuple):
    """The program under the plan for a call."""

    built: BuiltProgram
    holds: Callable[[], bool] | None
    """Whether calls of the same sizes still have that plan; None if the next one may have another."""
    by_mean: bool
    """Whether these are also all calls with rows of a similar mean length, where the host does not know the longest row."""


class Owner(Protocol):
    """A compiled fusion, as its stages see it."""

    binder: Binder
    policy: Policy
    backend: str | None
    strategy: str | None
    options: dict[str, Any]
    hand: HandSchedule | None
    results: tuple[ResultReader, ...]
    result_names: frozenset[str]


class FusionStage(CompiledStage):
    """A stage of a fusion."""

    def __init__(self, owner: Owner, program: TileProgram, shares: int) -> None:
        super().__init__(program, owner.binder, owner.policy, shares)
        self.owner, self.binder = owner, owner.binder
        self._flat: dict[Any, Prepared] = {}
        self._sizes: dict[Any, tuple[SizedProgram, Callable[[], bool]]] = {}
        """By everything that a plan and sizes depend on, besides what is remembered about plans: each with a function that says
        whether that is still the same."""
        self._usually: dict[tuple[Any, ...], BuiltProgram] = {}
        """By backend, strategy and options."""
        self._means: list[int] = []
        """The mean lengths of rows that plans were chosen for."""
        self._outlined: dict[tuple[Executable, torch.device], OutlinedProgram] = {}
        self._number = next(_numbers)
        self.input_names = tuple(t.name for t in program.inputs)
        self._places: dict[Executable, tuple[tuple[str, int], ...]] = {}

    def output_places(self, executable: Executable) -> tuple[tuple[str, int], ...]:
        """The names of the stage's outputs, each with its place among the tensors of a program."""
        found = self._places.get(executable)
        if found is None:
            tensors, outputs = executable.program.tensors, self.naive.outputs
            found = self._places[executable] = tuple((t.name, k) for k, t in enumerate(tensors) if t in outputs)
        return found

    @functools.cached_property
    def _facts(self) -> RowFacts | None:
        return row_facts(self.naive)

    @functools.cached_property
    def _facts_readers(self) -> tuple[list[Number], Number, Number, Number]:
        """Of the rows: the inner extents, the number of components, the total and a bound of it that the host knows."""
        facts, reader = self._facts, self.binder.number_reader
        assert facts is not None
        ragged = facts.ragged
        sizes = (ragged.component.host_bound, ragged.extent_expr, ragged.host_bound)
        count, exact, bound = (reader(size) for size in sizes)
        return [reader(extent) for extent in facts.inner], count, exact, bound

    @functools.cached_property
    def _mean(self) -> Number:
        """The mean length of the rows of a call; on a device, a bound of it that the host knows."""
        _, count, exact, bound = self._facts_readers
        return lambda call: (exact if is_host(call.device) else bound)(call) // max(count(call), 1)

    @functools.cached_property
    def _vector_checks(self) -> tuple[MustDivide, ...]:
        return () if self.owner.hand is None else vector_checks(self.naive, self.owner.hand)

    def prepared(self, call: BoundCall) -> Prepared:
        """The cached `Prepared` for calls with these offsets and extents, for calls without a binding."""
        if call.computed or is_paused():
            return self.bound(call)
        modes = (settings.current().plans, is_batch_invariant(), is_deterministic(), stream_of(call.device))
        key = (self._number, call.numbers, call.device, call.hints, *modes)
        owners = tuple(call.args[k] for k in self.binder.offsets)
        if owners:
            return remembered(owners, key, lambda: self.bound(call))
        ready = self._flat.get(key)
        if ready is None:
            ready = self.bound(call)
            _keep(self._flat, key, ready)
        return ready

    def bound(self, call: BoundCall) -> Prepared:
        """Everything that calls with these offsets and extents run with; checks them."""
        self.binder.check(call)
        if self._vector_checks:
            self.binder.check_vectors(call, self._vector_checks)
        sized = self._sized(call)
        if call.computed is not None:
            return self.with_arrays(call, sized, ())
        readers = zip(self.owner.results, sized.built.results, strict=True)
        return self.with_arrays(call, sized, tuple([read(call, k) for read, k in readers]))

    def run_new(self, call: BoundCall, inputs: Sequence[torch.Tensor]) -> tuple[Executable, Sequence[torch.Tensor]] | None:
        """Runs a call with the outline of an earlier one by host code. Returns the program with its inputs and outputs; None if
        the call must be prepared like any other."""
        if is_host(call.device) or self._vector_checks or self._longest(call) is not None:
            return None
        built, holds, _ = self._planned_by_size(call)
        if holds is None or built.host_code(call.device) is None:
            return None
        self.binder.check(call)
        tensors = self.run_host_code(call, inputs, built)
        return None if tensors is None else (built.executable, tensors)

    def outlined(self, call: BoundCall) -> list[torch.Tensor | JaggedTensor] | None:
        """The results of a call with the outline of an earlier one, of a stage that is the whole fusion; None if it must be bound
        like any other."""
        if is_host(call.device) or self._longest(call) is not None:
            return None
        built, holds, _ = self._planned_by_size(call)
        if holds is None:
            return None
        key = (built.executable, call.device)
        program = self._outlined.get(key)
        if program is None:
            program = self._outlined_program(built, call.device)
            if program is None:
                return None
            self._outlined[key] = program
        return program(call)

    def _outlined_program(self, built: BuiltProgram, device: torch.device) -> OutlinedProgram | None:
        checks = self.binder.simple_checks
        results = [reader.outlined(k) for reader, k in zip(self.owner.results, built.results, strict=True)]
        if checks is None or None in results or self._vector_checks or built.host_code(device) is None:
            return None
        run = functools.partial(self.run_host_code, built=built)
        return OutlinedProgram(checks, run, tuple([each for each in results if each is not None]))

    def _longest(self, call: BoundCall) -> int | None:
        """The length of the longest row, on which the plan depends if the host knows it."""
        return None if self._facts is None else self.binder.known_longest(call, self._facts.ragged)

    def _sized(self, call: BoundCall) -> SizedProgram:
        """The program under the plan for a call, with its sizes. Lengths often change while sizes do not, or come back."""
        key: tuple[Any, ...]
        longest = self._longest(call)
        sizes, key = call.sizes, (self._number, call.numbers, longest)
        if sizes is None:
            modes = (settings.current().plans, torch.get_num_threads(), is_batch_invariant(), is_deterministic())
            sizes, key = self._sizes, (*key, call.device, call.hints, *modes)
        known = sizes.get(key)
        if known is not None and known[1]():
            return known[0]
        built, holds, _ = self._planned(call) if longest is not None else self._planned_by_mean(call)
        found = self.sized(call, built)
        if holds is not None and built.by_size[is_host(call.device)] is not None:
            _keep(sizes, key, (found, holds))
        return found

    def _planned_by_size(self, call: BoundCall) -> PlannedProgram:
        """As `_planned_by_mean`, for calls with an outline: a plan that does not follow from the mean is cached by sizes."""
        assert call.sizes is not None
        key = (self._number, call.numbers)
        known: PlannedProgram | None = call.sizes.get(key)
        if known is not None and known.holds is not None and known.holds():
            return known
        found = self._planned_by_mean(call)
        if found.holds is not None and not found.by_mean:
            _keep(call.sizes, key, found)
        return found

    def _planned_by_mean(self, call: BoundCall) -> PlannedProgram:
        """As `_planned`, where the host does not know the longest row: rows of a similar mean length often have one plan."""
        outlined, facts = call.sizes, self._facts
        if outlined is None or call.hints is not NO_HINTS:
            return self._planned(call)
        mean = 0 if facts is None else self._mean(call)
        key = (self._number, mean if is_deterministic() else similar_mean(mean, self._means))
        known: PlannedProgram | None = outlined.get(key)
        if known is None or known.holds is None or not known.holds():
            known = self._planned(call)
            if known.by_mean:
                outlined[key] = known
        return known

    def _planned(self, call: BoundCall) -> PlannedProgram:
        """The program under the plan for a call: the one that is named, remembered, measured or usual."""
        backend = self.owner.backend or default_backend(call.device)
        if backend == "reference" or self._named(backend) is not None:
            return PlannedProgram(self._named_or_usual(call, backend), lambda: True, by_mean=True)
        tuner = self._tuner(backend, call.device)
        if tuner.is_idle():
            paused = is_paused()
            return PlannedProgram(self._named_or_usual(call, backend), None if paused else tuner.is_idle, by_mean=not paused)
        facts = self._call_facts(call, backend)
        tuning = self.tuning(call, backend, facts, self._buffers(call))
        built = self.built_or(call, backend, tuning.chosen, facts.usual)

        def holds() -> bool:
            return tuner.records.known.get(tuning.bucket) is tuning

        return PlannedProgram(built, holds if holds() else None, by_mean=False)

    def planned(self, chosen: Candidate, target: Target) -> Plan:
        hand = self.owner.hand
        return (
            by_hand(self.naive, hand, target) if hand else plan(self.naive, chosen.strategy, target, None, **dict(chosen.options))
        )

    def fixed(self) -> Mapping[str, int]:
        return {}

    def is_exact(self, tensor: Tensor) -> bool:
        return tensor.name in self.owner.result_names

    def result_places(self, program: LoopProgram) -> tuple[int, ...]:
        names = [t.name for t in (*program.inputs, *program.outputs)]
        return tuple(names.index(each.name) if each.name in names else -1 for each in self.owner.results)

    def _row_reader(self, tensor: Tensor, chosen: Plan) -> ShapeReader:
        dims = row_dims(tensor.logical)
        row = next(d for d in dims if isinstance(d, RaggedIterDomain))
        inner = [self.binder.number_reader(d.extent_expr) for d in dims if d.uid != row.uid]

        def read(call: BoundCall) -> tuple[int, ...]:
            longest = self.binder.longest(call, row)
            return (longest if chosen.most is None else min(longest, chosen.most), *[size(call) for size in inner])

        return read

    def _named_or_usual(self, call: BoundCall, backend: str) -> BuiltProgram:
        """The program under the plan that is named, or else under the usual one for this call."""
        named = self._named(backend)
        if named is not None:
            return self.built(call, backend, named)
        strategy, options, _ = self._usual(call, backend)[1]
        key = (backend, strategy, *options.items())
        found = self._usually.get(key)
        if found is None:
            found = self._usually[key] = self.built(call, backend, Candidate(strategy, tuple(options.items())))
        return found

    def _named(self, backend: str) -> Candidate | None:
        """What the user has chosen, or a mode."""
        owner = self.owner
        if is_batch_invariant():
            named = "by_hand" if owner.hand else owner.strategy
            strategy, options = invariant(named, owner.options, BACKENDS[backend], self.naive.name)
            return Candidate(strategy, tuple(options.items()))
        if owner.strategy == LIBRARY and is_deterministic():
            raise StrategyError(
                f"{self.naive.name}: library calls are not used under torch.use_deterministic_algorithms(True): their bits may "
                "depend on the number of threads; name another strategy, or none"
            )
        if owner.strategy is not None or owner.hand is not None:
            return Candidate(owner.strategy or "by_hand", tuple(owner.options.items()))
        return None

    def _usual(self, call: BoundCall, backend: str) -> tuple[RowStatistics | None, Choice]:
        """The row statistics of a call that the host knows, and the heuristic's choice of a plan."""
        binder, target, facts = self.binder, BACKENDS[backend], self._facts
        rows, about = None, dict[str, Any]()
        if facts is not None:
            width, count, exact, bound = self._facts_readers
            # On a device, lengths are not copied to the host just to choose a plan.
            longest = binder.known_longest(call, facts.ragged)
            # If rows have gaps, the host knows the space they take.
            total = (exact if is_host(call.device) else bound)(call)
            rows = RowStatistics(count(call), total, longest, prod([size(call) for size in width]) * facts.itemsize)
            # In deterministic mode, earlier calls decide nothing.
            mean = rows.mean if is_deterministic() else similar_mean(rows.mean, self._means)
            about = {"product": facts.product, "carried": facts.carried, "over_features": facts.over_features, "mean": mean}
        workers, distribution = device_workers(call.device), call.hints.distribution
        return rows, choose(rows, target, workers, **about, distribution=distribution)

    def _call_facts(self, call: BoundCall, backend: str) -> CallFacts:
        facts = self._facts
        rows, (strategy, options, why) = self._usual(call, backend)

        def statistics() -> tuple[RowStatistics | None, float | None]:
            return rows, None if facts is None else self.binder.known_variation(call, facts.ragged)

        return CallFacts(Candidate(strategy, tuple(options.items())), statistics, why)

    def known(self, call: BoundCall) -> Tuning | None:
        """What is known about the plans for a call; None if the user has chosen one."""
        backend = self.owner.backend or default_backend(call.device)
        return None if self._named(backend) is not None else self.tuning(call, backend, self._call_facts(call, backend))

    def facts(self, call: BoundCall, ready: Prepared) -> StageFacts:
        """What `explain` reads."""
        backend = self.owner.backend or default_backend(call.device)
        if self._named(backend) is None:
            return self.explained(call, backend, ready, self._call_facts(call, backend).why, self.known(call))
        why = "it was scheduled by hand" if self.owner.hand else "it was requested"
        return self.explained(call, backend, ready, ONE_PLAN if is_batch_invariant() else why, None)

    def _buffers(self, call: BoundCall) -> Callable[[bool], Buffers]:
        def buffers(copies: bool) -> Buffers:
            every = dict(zip((t.name for t in self.binder.inputs), call.args, strict=True)) | (call.computed or {})
            inputs = [every[t.name].detach() for t in self.naive.inputs]
            return OutputBuffers([t.clone() for t in inputs] if copies else inputs, call.device)

        return buffers


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Caches a value as the newest; the oldest are dropped."""
    cache.pop(key, None)
    cache[key] = value
    while len(cache) > SIZES:
        cache.pop(next(iter(cache)))


class LibraryStage(NamedTuple):
    """A library call that is a stage of a fusion."""

    function: str
    tensors: tuple[str, ...]
    """The names of its arguments."""
    shapes: tuple[ShapeReader | None, ...]
    """For each argument, the shape to view it in; None for its own shape."""
    options: tuple[Any, ...]
    """Numbers, or functions of a call that return numbers."""
    targets: tuple[Tensor, ...]

    @classmethod
    def of(cls, call: Library, binder: Binder) -> LibraryStage:
        """A library call, with everything that can be determined before the first call of the fusion."""
        given = [v.tensor for v in call.values if isinstance(v, Read)]
        shapes: list[ShapeReader | None] = []
        for tensor in given:
            sizes = [d.extent_expr for d in storage_of(tensor.logical)]
            shapes.append(None if len(sizes) == len(tensor.memory.storage) else binder.shape_reader(sizes))
        options = tuple(binder.number_reader(o) if isinstance(o, Expr) else o for o in call.options)
        return cls(call.function, tuple(t.memory.name for t in given), tuple(shapes), options, tuple(call.targets))

    def run(self, call: BoundCall, tensors: Mapping[str, torch.Tensor], backend: str) -> tuple[torch.Tensor, ...]:
        """Runs the library function on the tensors of a call, which are given by name."""
        shaped = zip(self.tensors, self.shapes, strict=True)
        given = [tensors[name] if shape is None else tensors[name].view(shape(call)) for name, shape in shaped]
        return library.run(self.function, given, [each(call) if callable(each) else each for each in self.options], backend)
