"""The program of a device loop: one stage, compiled and bound like the stages of fusions.

In: a tile program, and the variables that a device loop uses. Out: a `LoopStage`, which chooses a strategy from the rows it is
given, builds the program through the engine, and binds it to arguments.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from serrate import logs
from serrate.engine import BACKENDS, ONE_PLAN, BuiltProgram, CallFacts, CompiledStage, SizedProgram, default_backend
from serrate.errors import KernelError, StrategyError
from serrate.ir.expr import Array, Environment
from serrate.ir.loops import Block, Declare, Dot, Load, LoopProgram, Write, map_values, nodes, values_of
from serrate.ir.tile import Statement, TileProgram, inner, statements, with_inner
from serrate.ir.values import Call, Tensor, Value, rewrite
from serrate.modes import is_deterministic
from serrate.runtime.arguments import BoundCall, known_variation
from serrate.runtime.dispatch import Binding, Doubles, Leaves, Prepared, bound, remember
from serrate.runtime.launch import Executable
from serrate.runtime.results import Result
from serrate.schedule.heuristic import LONG_BYTES, WHY_PRODUCTS, RowStatistics, product_sizes, similar_mean, waits
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, Target
from serrate.tensor.structure import Structure
from serrate.tensor.sync import is_host
from serrate.tiles.aliasing import Aliasing
from serrate.tiles.lift import LiftedLoop, Source, lift
from serrate.tiles.sources import ArgumentSources, Items, Path, TensorSource
from serrate.tuner.buffers import CopiedBuffers
from serrate.tuner.candidates import Candidate, Space
from serrate.tuner.measure import ProgramMeasurer
from serrate.tuner.policy import NEVER, Policy, paused
from serrate.tuner.record import Tuning

if TYPE_CHECKING:
    from serrate.report.collect import StageFacts

log = logs.logger("plan")


@dataclass
class Options:
    """How a kernel's loops are compiled."""

    strategy: str | None = None
    backend: str | None = None
    """None for the default backend of the arguments' device."""
    blocks: tuple[int | None, ...] = ()
    lanes: dict[str, int] = field(default_factory=dict)
    """Lanes by axis name, overriding those that the strategy chooses."""
    warps: int | None = None
    """The warps of each GPU program; None for those of the plan."""
    stages: int | None = None
    """How many blocks the loops of GPU programs keep in flight; None for what the plan says."""
    static_shapes: bool | None = None
    """Which sizes are compiled in: all (True), only those that must be (False), or those that have not changed so far (None)."""
    alone: bool = False
    """Whether the bits of a row must depend on that row alone. Only widths of ragged tensors are compiled in then, because other
    sizes may depend on the batch, and additions in no fixed order are refused."""
    policy: Policy = NEVER
    """When plans are measured."""
    shares: int = 1
    """How many device loops share a budget for tuning."""


ONLY_IF_CUT = "only_if_cut"
"""An option of the usual choice: rows stay whole if they cannot be cut."""
ROOM = 1 << 28
"""The most bytes that the values of one tile may take in each thread."""


def _require_room(loops: LoopProgram) -> None:
    """Raises if the private blocks of a program take too much memory per thread."""
    for kernel in loops.kernels:
        blocks = {n.local.name: n.local for n in nodes(kernel.body) if isinstance(n, Declare) and n.local.lanes}.values()
        # The first block with the most elements is the user's own; passes may have added wider ones.
        total, largest = sum(b.nbytes for b in blocks), max(blocks, key=lambda b: prod(n.size for n in b.lanes), default=None)
        if largest is not None and total > ROOM:
            lanes = " x ".join(str(lane.size) for lane in largest.lanes)
            raise KernelError(
                f"the values of one tile take {total >> 20} MiB per thread, and the limit is {ROOM >> 20} MiB: "
                f"{largest.name} alone has {lanes} lanes. Choose smaller block sizes, or put another loop over tiles around it"
            )


POSITION_BYTES = 64
"""Assumed bytes per position of a row: one program may process tensors of different widths over one structure."""


def _waits(structure: Structure, distribution: str | None) -> bool:
    """Whether threads would wait for one long row unless it is cut, as far as is known, or as the user says."""
    if distribution is not None:
        return distribution == "giant" and structure.levels == 1
    longest = structure.known_max_length()
    if longest is None:
        # On a device nothing is copied to the host only to choose a plan: whatever the rows are, cutting has no worst case.
        return structure.levels == 1
    if longest * POSITION_BYTES < LONG_BYTES or structure.levels != 1:
        return False
    total = structure.total_elements(why="how rows are shared out")
    return waits(RowStatistics(structure.num_rows(), total, longest, POSITION_BYTES), CPU)


def _statistics(structure: Structure | None) -> tuple[RowStatistics | None, float | None]:
    """What the host knows about rows, and the variation of their lengths."""
    if structure is None:
        return None, None
    longest, variation = structure.known_max_length(), known_variation(*structure.at(-1))
    if longest is None or structure.levels != 1:
        return None, variation
    return RowStatistics(structure.num_rows(), structure.total_elements(why="a plan"), longest, POSITION_BYTES), variation


def _accumulates(program: LoopProgram) -> bool:
    """Whether a program reads what it stores to, or adds to it."""
    stored = set(program.outputs)
    for node in (n for kernel in program.kernels for n in nodes(kernel.body)):
        if isinstance(node, Write) and node.add:
            return True
        if isinstance(node, Block) and any(isinstance(v, Load) and v.tensor in stored for x in values_of(node) for v in x.walk()):
            return True
    return False


@dataclass(frozen=True)
class Variant:
    """A program as built for some arguments."""

    program: TileProgram
    plan: Plan
    executable: Executable


class TensorSources(NamedTuple):
    """The tensors of a program that come from the call: their sources, and which may share memory."""

    tensors: Sequence[TensorSource]
    aliasing: Aliasing
    bindable: bool
    """False if every call needs a new binding: a loop that stores to offsets changes them without changing any key."""


NO_FLOATS = torch.empty(0, dtype=torch.float64, device="cpu")
"""Stands for the floats of a call, which a binding collects when it runs."""


def _as_computed(program: TileProgram) -> TileProgram:
    """The program without what only its gradient depends on: `differentiated_as(x, y)` is x."""

    def computed(value: Value) -> Value | None:
        is_ours = isinstance(value, Call) and value.function == "differentiated_as"
        return rewrite(value.args[0], computed) if is_ours else None

    def statement(node: Statement) -> Statement:
        if inner(node):
            return with_inner(node, tuple(tuple(map(statement, part)) for part in inner(node)))
        return map_values(node, lambda value: rewrite(value, computed)) if isinstance(node, Block) else node

    return program.with_phases(tuple(replace(p, body=tuple(map(statement, p.body))) for p in program.phases))


class LoopStage(CompiledStage):
    """The program of a device loop for one signature."""

    def __init__(self, name: str, program: TileProgram, sources: ArgumentSources, options: Options) -> None:
        super().__init__(_as_computed(program), sources.arguments, options.policy, options.shares)
        self.name, self._sources, self._options = name, sources, options
        self.traced = program
        """The program as it was traced."""
        self._backend = options.backend or default_backend(sources.device)
        self.reasons: tuple[str, ...] = ()
        """Reasons to add to its plans."""
        self._given: dict[Executable, TensorSources] = {}
        self._means: list[int] = []
        """The mean lengths for which blocks of matrix products were chosen."""
        self._sizes: OrderedDict[tuple[Executable, tuple[int, ...]], SizedProgram] = OrderedDict()
        """By the numbers of a call, which often stay the same when lengths change."""

    def header(self, chosen: Plan) -> str:
        return f"{self.name}: {chosen.strategy}"

    def allocated(self, program: LoopProgram) -> tuple[Tensor, ...]:
        # Tensors it stores to belong to the caller.
        return program.scratch

    def planned(self, chosen: Candidate, target: Target) -> Plan:
        found = self._arranged(chosen, target)
        return found.launched_with(self._options.warps, self._options.stages) if target.many_workers else found

    def _arranged(self, chosen: Candidate, target: Target) -> Plan:
        """The plan of a candidate, before the warps and stages that the user has fixed."""
        options, lanes = dict(chosen.options), dict(chosen.lanes) | self._options.lanes
        if not options.pop(ONLY_IF_CUT, False):
            return plan(self.naive, chosen.strategy, target, lanes, **options)
        try:
            found = plan(self.naive, chosen.strategy, target, lanes, **options)
            if any(step.primitive in ("cut", "combine") for step in found.steps):
                return found
            why = found.reasons[-1]
        except StrategyError as error:
            why = str(error)
        log.debug("%s: one row has most of the work, and stays whole: %s", self.name, why)
        return plan(self.naive, "maskless", target, lanes)

    def fixed(self) -> Mapping[str, int]:
        # With a dot, these cannot be names of axes.
        launch = {"Config.num_warps": self._options.warps, "Config.num_stages": self._options.stages}
        return self._options.lanes | {name: number for name, number in launch.items() if number is not None}

    def overridden(self) -> frozenset[str]:
        return frozenset() if self._options.warps is None else frozenset(("warps",))

    def _build(self, call: BoundCall, backend: str, chosen: Plan) -> BuiltProgram:
        built = super()._build(call, backend, chosen)
        _require_room(built.executable.program)
        return built

    def _prepared(self, items: Items) -> Prepared:
        call = self._sources.call(items)
        return self.prepare(call, self._built_for(items, call))

    def _built_for(self, items: Items, call: BoundCall) -> BuiltProgram:
        """The program under the plan for a call: the one that is named, remembered, measured or usual."""
        backend = self._backend
        if self._options.strategy is not None:
            return self.built(call, backend, Candidate(self._options.strategy))
        facts = self._call_facts(items, call)

        def buffers(copies: bool) -> CopiedBuffers:
            return self._buffers(items, call, facts.usual, copies)

        return self.built_or(call, backend, self.chosen(call, backend, facts, buffers), facts.usual)

    def prepare(self, call: BoundCall, built: BuiltProgram, results: tuple[Result, ...] = ()) -> Prepared:
        if built.by_size[is_host(call.device)] is None:
            return super().prepare(call, built, results)
        if call.unread:
            call.read(built.needed)
        key = (built.executable, call.numbers)
        sized = self._sizes.get(key)
        if sized is None:
            sized = self.sized(call, built)
            remember(self._sizes, key, sized)
        return self.with_arrays(call, sized, results)

    def _call_facts(self, items: Items, call: BoundCall) -> CallFacts:
        structures = self._sources.structures(items)
        call.hints = self._sources.hints(items)
        statistics = functools.partial(_statistics, structures[0] if structures else None)
        if structures and structures[0].levels == 1 and self._multiplies and BACKENDS[self._backend].many_workers:
            options = {ONLY_IF_CUT: True} | self._product_sizes(structures[0])
            return CallFacts(Candidate("persistent_dynamic", tuple(options.items())), statistics, WHY_PRODUCTS)
        usual = Candidate("maskless")
        why = "no row is so long that other workers would wait for it: one worker per row leaves no lanes idle"
        last = None
        for structure in structures:
            if structure is not last and _waits(structure, call.hints.distribution):
                # Only if rows can be cut; otherwise there are no pieces to distribute.
                usual = Candidate("persistent_dynamic", ((ONLY_IF_CUT, True),))
                why = "the longest row is, or may be, a large share of the work: other workers would wait for it"
                break
            last = structure
        return CallFacts(usual, statistics, why)

    @functools.cached_property
    def _multiplies(self) -> bool:
        """Whether the program has matrix products."""
        return any(isinstance(n, Dot) for phase in self.naive.phases for n in statements(phase.body))

    def _product_sizes(self, rows: Structure) -> dict[str, int]:
        """The sizes for matrix products of rows as long as these, as far as the host knows."""
        if not rows.knows_total() or not rows.num_rows():
            return {}
        mean = rows.total_elements(why="a plan") // rows.num_rows()
        return product_sizes(mean if is_deterministic() else similar_mean(mean, self._means), BACKENDS[self._backend])

    def known(self, items: Items) -> Tuning | None:
        """What is known about the plans for these arguments; None if the user has chosen one."""
        if self._options.strategy is not None:
            return None
        call = self._sources.call(items)
        return self.tuning(call, self._backend, self._call_facts(items, call))

    def measurer(self, items: Items) -> tuple[Space, ProgramMeasurer]:
        """All candidates for these arguments, and what they are measured with; for benchmarks of the tuner."""
        call = self._sources.call(items)
        usual = self._call_facts(items, call).usual
        return self._space(usual, self._backend), self._measurer(call, self._backend, self._buffers(items, call, usual, False))

    def _buffers(self, items: Items, call: BoundCall, usual: Candidate, copies: bool) -> CopiedBuffers:
        """Copies of the memory that the program stores to, which is the caller's."""
        executable = self.built(call, self._backend, usual).executable
        program = executable.program
        given = [each.now(items).contiguous() for each in self._given_to(executable).tensors]
        written = [k >= len(program.inputs) for k in range(len(given))]
        return CopiedBuffers(given, written, call.device, accumulates=_accumulates(program), copies=copies)

    def _given_to(self, executable: Executable) -> TensorSources:
        found = self._given.get(executable)
        if found is None:
            program = executable.program
            given = self._sources.given((*program.inputs, *program.outputs))
            bindable = all(isinstance(each.warm, int) for each in given[len(program.inputs) :])
            found = TensorSources(given, Aliasing(self.naive, program, [each.path for each in given]), bindable)
            self._given[executable] = found
        return found

    def facts(self, items: Items) -> StageFacts:
        """What `explain` reads."""
        call = self._sources.call(items)
        with paused():
            ready = self._prepared(items)
        ready = ready._replace(plan=functools.reduce(Plan.because, self.reasons, ready.plan))
        if self._options.strategy is None:
            return self.explained(call, self._backend, ready, self._call_facts(items, call).why, self.known(items))
        return self.explained(call, self._backend, ready, ONE_PLAN if self._options.alone else "it was requested", None)

    def variant(self, items: Items) -> Variant:
        """The program as it is built for these arguments."""
        with paused():
            ready = self._prepared(items)
        return Variant(self.naive, functools.reduce(Plan.because, self.reasons, ready.plan), ready.executable)

    def bind_or_run(self, items: Items) -> Binding | None:
        """A binding for these arguments and others with the same key.

        None if calls like this one must each be bound anew, as this one then was: it has run.
        """
        ready = self._prepared(items)
        binding = self._bound(items, ready)
        if binding is None:
            self._work(items, ready)()
        return binding

    def once(self, items: Items) -> None:
        """Runs a call for which nothing is kept."""
        call = self._sources.call(items)
        built = self._built_for(items, call)
        if not built.executable.program.kernels:
            return
        given, aliasing, _ = self._given_to(built.executable)
        tensors = [each.now(items) for each in given]
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            self._work(items, self.prepare(call, built))()
            return
        aliasing.require_apart(tensors)
        if self.run_host_code(call, tensors, built) is None:
            self.run(call, tensors, self.prepare(call, built))

    def _bound(self, items: Items, ready: Prepared) -> Binding | None:
        """A binding; None if tensors are not contiguous, because they are copied."""
        if not ready.executable.program.kernels:
            return _nothing
        given, aliasing, bindable = self._given_to(ready.executable)
        if not bindable:
            return None
        tensors = [NO_FLOATS if type(each.warm) is Doubles else each.now(items) for each in given]
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        apart = aliasing.check(tensors)
        sources = [own if each.warm is None else each.warm for each, own in zip(given, tensors, strict=True)]
        return bound(ready, sources, tensors, apart=apart, keep=self._sources.structures(items))

    def ready(self, items: Items) -> Callable[[], None]:
        """The program bound to exactly these arguments, for timing it without the cost of a call."""
        with paused():
            return self._work(items, self._prepared(items))

    def with_options(self, options: Options) -> LoopStage:
        """The same loop, compiled otherwise."""
        return LoopStage(self.name, self.traced, self._sources, options)

    def tried(self, env: Mapping[str, Any]) -> list[torch.Tensor]:
        """Runs the program on these variables, and returns the tensors that it stores to."""
        items = [env[name] for name in self._sources.names]
        self.ready(items)()
        return self.outputs(items)

    def _work(self, items: Items, ready: Prepared) -> Callable[[], None]:
        program = ready.executable.program
        if not program.kernels:
            return lambda: None
        places, aliasing, _ = self._given_to(ready.executable)
        given = [each.now(items) for each in places]
        aliasing.require_apart(given)
        tensors = [t.contiguous() for t in given]
        first = len(program.inputs)
        copied = [(t, made) for t, made in zip(given[first:], tensors[first:], strict=True) if made is not t]
        binding = bound(ready, range(len(tensors)), tensors)

        def work() -> None:
            binding(tensors)
            for target, made in copied:
                target.copy_(made)

        return work

    @functools.cached_property
    def lifted(self) -> LiftedLoop:
        """The loop as a fusion, for its gradient."""
        return lift(self.traced, self._sources.lines, self._sources.longest)

    @property
    def options(self) -> Options:
        """How it is compiled."""
        return self._options

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return self._sources.device

    def environment(self, items: Items) -> Environment:
        """The numbers of a call."""
        return Environment({symbol: number(items) for symbol, number in self._sources.numbers.items()})

    def source(self, source: Source, items: Items) -> torch.Tensor:
        """An input of the lifted loop that has contents."""
        match source:
            case Source("tensor", Tensor() as tensor):
                return self._sources.given([tensor])[0].now(items)
            case Source("array", Array() as array):
                counts = dict(self.naive.counts)
                # Without rows, the loop gets more elements than there are boundaries.
                last = None if array not in counts else int(counts[array].evaluate(self.environment(items))) + 1
                return self._sources.arrays[array](items)[:last].long()
        raise AssertionError(source)

    def path(self, tensor: Tensor) -> Path:
        """Where a tensor of the loop is found."""
        return self._sources.given([tensor])[0].path

    def outputs(self, items: Items) -> list[torch.Tensor]:
        """The tensors that the program stores to."""
        return [each.now(items) for each in self._sources.given(self.naive.outputs)]


def _nothing(leaves: Leaves, into: Sequence[torch.Tensor] = ()) -> None:
    """A loop that does nothing."""
