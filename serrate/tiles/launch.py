"""Calls of kernels: which program serves which arguments, and how it is bound.

In: the variables that a device loop uses, at every call. Out: the loop, run. A loop is traced once per signature (dtypes, ranks,
row formats, compiled-in sizes); everything else is an argument of the program. A size is compiled in until it is seen to change.
Numbers of rows, their lengths and first dims of tensors are never compiled in, unless the loop needs them at compile time; then
each value gets its own program. The program is a `CompiledStage` like those of fusions: built by the same compiler, bound by the
same binder, and dispatched by the same fast path.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import logging
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import get_num_threads, is_grad_enabled

from serrate.engine import BuiltProgram, CompiledStage, default_backend
from serrate.errors import CallError, InvarianceError, KernelError, StrategyError, choices
from serrate.frontend.kernel.machine import (
    BlockSize,
    BlockSizes,
    LazyMachine,
    NamedBlock,
    activate,
    current,
    deactivate,
    refuse,
    running,
    user_frame,
)
from serrate.ir.expr import const
from serrate.ir.loops import Declare, LoopProgram, Write, load, nodes, number
from serrate.ir.tile import Axis, Carry, TileProgram, statements
from serrate.ir.values import Tensor
from serrate.runtime import dispatch
from serrate.runtime.bind import BoundCall
from serrate.runtime.dispatch import Binding, Doubles, FastPath, Key, Leaves, Prepared, bound, remember
from serrate.runtime.launch import CppExecutable, Executable
from serrate.runtime.locks import making
from serrate.schedule.heuristic import LONG_BYTES, RowStatistics, waits
from serrate.schedule.plan import Plan
from serrate.schedule.statistics import below_their_maximum
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, Target
from serrate.tensor import JaggedTensor
from serrate.tensor.structure import Structure
from serrate.tensor.torch_private import in_dual_level
from serrate.tiles.aliasing import Aliasing
from serrate.tiles.loops import Again, RetraceFacts
from serrate.tiles.memory import TracedRows, first_of
from serrate.tiles.proof import agree, at_random, backend_to_try, refusal, tiles_to_try, unproven
from serrate.tiles.signature import Fixed, Reading, attributes, counts_of, is_read, key_of, signature, single, widths
from serrate.tiles.source import DeviceLoop, outside, split
from serrate.tiles.sources import CPU_DEVICE, NUMBERS, ArgumentSources, Container, Env, GivenTensor, Path, flattened, number_at
from serrate.tiles.trace import DEFAULT_BLOCK, Trace
from serrate.tiles.values import Traced

log = logging.getLogger("serrate")


@dataclass
class Options:
    """How a kernel's loops are compiled."""

    strategy: str | None = None
    backend: str | None = None
    """Where nothing is asked for, what runs on the device of the arguments."""
    blocks: tuple[int | None, ...] = ()
    lanes: dict[str, int] = field(default_factory=dict)
    """Lanes by axis name, overriding those that the strategy chooses."""
    static_shapes: bool | None = None
    """Which sizes are compiled in: all (True), only those that must be (False), or those that have not changed so far (None)."""
    alone: bool = False
    """Whether the bits of a row must depend on that row alone. Only widths of ragged tensors are compiled in then, because other
    sizes may depend on the batch, and additions in no fixed order are refused."""


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


def _require_order(name: str, program: TileProgram) -> None:
    """Raises for atomic additions whose order affects the result."""
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Write) and node.add and node.tensor.dtype.is_floating_point:
            raise InvarianceError(
                f"{name}: hl.atomic_add to {node.tensor.name} ({node.tensor.dtype}) adds in an order that varies by run, "
                "and serrate.batch_invariant() promises the same bits: carry the sum in a loop, or add integers"
            )


POSITION_BYTES = 64
"""Assumed bytes per position of a row: one program may process tensors of different widths over one structure."""


def _waits(structure: Structure) -> bool:
    """Whether threads would wait for one long row unless it is cut."""
    longest = structure.known_max_length()
    if longest is None:
        # On a device nothing is copied to the host only to choose a plan: whatever the rows are, cutting has no worst case.
        return structure.levels == 1
    if longest * POSITION_BYTES < LONG_BYTES or structure.levels != 1:
        return False
    total = structure.total_elements(why="how rows are shared out")
    return waits(RowStatistics(structure.num_rows(), total, longest, POSITION_BYTES), CPU)


@dataclass(frozen=True)
class Variant:
    """A program as built for some arguments."""

    program: TileProgram
    plan: Plan
    executable: Executable

    def explained(self) -> str:
        """The plan, and what every loop carries."""
        return "\n".join([*self.plan.lines, *(f"  {each}" for each in self.program.notes)])


class GivenTensors(NamedTuple):
    """The tensors that a call gives to a program: where they are found, and which may share memory."""

    tensors: Sequence[GivenTensor]
    aliasing: Aliasing


class LoopStage(CompiledStage):
    """The program of a device loop for one signature."""

    def __init__(self, name: str, program: TileProgram, sources: ArgumentSources, options: Options) -> None:
        super().__init__(program, sources.arguments)
        self.name, self._sources, self._options = name, sources, options
        self.reasons: tuple[str, ...] = ()
        """Reasons to add to its plans."""
        self._given: dict[Executable, GivenTensors] = {}

    def header(self, chosen: Plan) -> str:
        return f"{self.name}: {chosen.strategy}"

    def allocated(self, program: LoopProgram) -> tuple[Tensor, ...]:
        # Tensors it stores to belong to the caller.
        return program.scratch

    def planned(self, strategy: str, options: dict[str, Any], target: Target) -> Plan:
        lanes = self._options.lanes
        if not options:
            return plan(self.naive, strategy, target, lanes)
        try:
            chosen = plan(self.naive, strategy, target, lanes)
            if any(step.primitive in ("cut", "combine") for step in chosen.steps):
                return chosen
            why = chosen.reasons[-1]
        except StrategyError as error:
            why = str(error)
        log.debug("%s: one row has most of the work, and stays whole: %s", self.name, why)
        return plan(self.naive, "maskless", target, lanes)

    def _build(self, call: BoundCall, backend: str, strategy: str, options: dict[str, Any]) -> BuiltProgram:
        built = super()._build(call, backend, strategy, options)
        _require_room(built.executable.program)
        return built

    def _prepared(self, env: Env) -> Prepared:
        call = self._sources.call(env)
        return self.prepare(call, self._options.backend or default_backend(call.device), *self._choice(env))

    def _choice(self, env: Env) -> tuple[str, dict[str, Any]]:
        if self._options.strategy is not None:
            return self._options.strategy, {}
        structures = {id(x.structure): x.structure for x in env.values() if isinstance(x, JaggedTensor)}
        # Only if rows can be cut; otherwise there are no pieces to distribute.
        cut = any(map(_waits, structures.values()))
        return ("persistent_dynamic", {"only_if_cut": True}) if cut else ("maskless", {})

    def _given_to(self, executable: Executable) -> GivenTensors:
        found = self._given.get(executable)
        if found is None:
            program = executable.program
            given = self._sources.given((*program.inputs, *program.outputs))
            found = self._given[executable] = GivenTensors(given, Aliasing(program, [each.path for each in given]))
        return found

    def variant(self, env: Env) -> Variant:
        """The program as it is built for these arguments."""
        ready = self._prepared(env)
        return Variant(self.naive, functools.reduce(Plan.because, self.reasons, ready.plan), ready.executable)

    def bind(self, env: Env) -> Binding | None:
        """A binding for these arguments and others with the same key.

        None if every call must be bound anew: non-contiguous tensors are copied first, and a loop that stores to offsets changes
        them without changing any key.
        """
        ready = self._prepared(env)
        program = ready.executable.program
        if not program.kernels:
            return _nothing
        given, aliasing = self._given_to(ready.executable)
        tensors = [each.now(env) for each in given]
        stored = given[len(program.inputs) :]
        if not all(isinstance(each.warm, int) for each in stored):
            return None
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        apart = aliasing.check(tensors)
        sources = [own if each.warm is None else each.warm for each, own in zip(given, tensors, strict=True)]
        if not isinstance(ready.executable, CppExecutable) and (apart or any(isinstance(s, Doubles) for s in sources)):
            return None
        structures = [x.structure for x in env.values() if isinstance(x, JaggedTensor)]
        return bound(ready, sources, tensors, apart=apart, keep=structures)

    def ready(self, env: Env) -> Callable[[], None]:
        """The program bound to exactly these arguments, for timing it without the cost of a call."""
        ready = self._prepared(env)
        program = ready.executable.program
        if not program.kernels:
            return lambda: None
        places, aliasing = self._given_to(ready.executable)
        given = [each.now(env) for each in places]
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

    def outputs(self, env: Env) -> list[torch.Tensor]:
        """The tensors that the program stores to."""
        return [each.now(env) for each in self._sources.given(self.naive.outputs)]


def _nothing(leaves: Leaves, into: Sequence[torch.Tensor] = ()) -> None:
    """A loop that does nothing."""


@dataclass
class Form:
    """One form of a loop's arguments: the sizes seen so far, and those that the loop needs at compile time."""

    seen: list[dict[Path, int]] = field(default_factory=list)
    static: set[Path] = field(default_factory=set)


STATES = 32
"""For how many states of the objects that a loop reads bindings are remembered; the oldest is dropped first."""
ITSELF = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, torch.dtype)
"""Types of values that are compared by identity."""


class Settled(NamedTuple):
    """Outer names that are compared with their earlier values instead of being described in every key."""

    token: object
    """Part of every key; replaced whenever this changes."""
    names: tuple[tuple[str, Any, Any], ...]
    """Each name with the builtin of that name, if any, and its value."""
    others: tuple[str, ...]


class DeviceLoopState:
    """Bindings of a device loop for one reading of the objects that it uses; None if it uses no objects."""

    __slots__ = ("bindings", "reading")

    def __init__(self, reading: Reading | None) -> None:
        self.reading = reading
        self.bindings: OrderedDict[Key, Binding] = OrderedDict()

    def read(self, objects: Sequence[Any]) -> Sequence[Any] | None:
        """An empty tuple, because no tensors are reached through objects; None if an object has changed."""
        return () if self.reading is None or self.reading.holds(objects) else None


class Site:
    """One device loop of a kernel, with all programs made for it so far."""

    def __init__(
        self,
        name: str,
        function: types.FunctionType,
        loop: DeviceLoop,
        options: Options,
        traced: Callable[[Site, TileProgram], None],
    ) -> None:
        self.name, self.function, self.loop, self.options = name, function, loop, options
        self._report = traced
        """Called with every program before it is built."""
        self.programs: dict[Any, LoopStage] = {}
        self.changing: set[Path] = set()
        """Sizes that were seen to change, and integers that were a number of rows or a length when first seen."""
        self.forms: dict[Any, Form] = {}
        self.open_blocks = 0
        """How many block sizes of the configuration it takes."""
        self._decided: set[Path] = set()
        self._without = DeviceLoopState(None)
        """The bindings of calls that read no objects."""
        self._fast = FastPath[DeviceLoopState](STATES)
        self._numbers = itertools.count(1)
        self._attributes = attributes(function.__code__)
        self._plain: set[Any] = set()
        """Modules, functions, classes and dtypes whose attributes are not read."""
        self._settled = Settled(object(), (), loop.outside)

    def __call__(self, given: dict[str, Any]) -> None:
        leaves: Leaves = []
        objects: list[Any] = []
        key = self._key(given, leaves, objects)
        state, _ = self._fast.state(objects) if objects else (self._without, ())
        binding = None if state is None else state.bindings.get(key)
        if binding is None or in_dual_level():
            self._call(given, key, leaves, objects)
        else:
            binding(leaves)

    def _key(self, given: Mapping[str, Any], leaves: Leaves, objects: list[Any]) -> Key:
        """Everything that a binding depends on. Fills `leaves` with tensors and floats, and `objects` with what is read."""
        # A kernel is compiled for one choice of backend and one mode, so neither is part of its keys.
        key = dispatch.key_of(given.values(), leaves, objects, self._other, True, [get_num_threads(), is_grad_enabled()])
        if len(given) != len(self.loop.names):
            key.append(tuple(given))
        settled, names = self._settled, self.function.__globals__
        for name, builtin, value in settled.names:
            if names.get(name, builtin) is not value:
                settled = self._settled = Settled(object(), (), self.loop.outside)
                break
        key.append(settled.token)
        if settled.others:
            dispatch.key_of([outside(self.function, n) for n in settled.others], leaves, objects, self._other, True, key)
        if objects:
            # Two blocks of one size are the same only if they are of one axis.
            axes = [value.axis for value in objects if type(value) is BlockSize]
            key += [next(k for k, other in enumerate(axes) if other is axis) for axis in axes]
            objects[:] = [value for value in objects if type(value) is not BlockSize]
        return tuple(key)

    def _settle(self) -> bool:
        """Removes outer names whose attributes are not read from the keys; returns whether there are any."""
        names, free = self.function.__globals__, self.function.__code__.co_freevars
        every = [(name, getattr(builtins, name, None)) for name in self.loop.outside if name not in free]
        found = [(name, builtin, names.get(name, builtin)) for name, builtin in every]
        plain = tuple((n, builtin, value) for n, builtin, value in found if isinstance(value, ITSELF) and value in self._plain)
        if plain:
            settled = {name for name, _, _ in plain}
            self._settled = Settled(object(), plain, tuple(n for n in self.loop.outside if n not in settled))
        return bool(plain)

    def _other(self, value: Any, key: list[Any], leaves: Leaves, objects: list[Any]) -> None:
        kind = type(value)
        if isinstance(value, float):
            key.append(kind)
            leaves.append(value)
        elif isinstance(value, ITSELF):
            key.append(value)
            if value not in self._plain:
                if is_read(value):
                    objects.append(value)
                else:
                    self._plain.add(value)
        else:
            key += (kind, key_of(value))
            if kind is BlockSize or is_read(value):
                objects.append(value)

    def _call(self, given: dict[str, Any], key: Key, leaves: Leaves, objects: Sequence[Any]) -> None:
        """Serves a call that has no binding yet, and remembers one."""
        env = self.complete(given)
        state = self._state(objects)
        program = self.program(env, state.reading)
        binding = program.bind(env)
        if binding is None:
            program.ready(env)()
            return
        if not self._settled.names and self._settle():
            key = self._key(given, [], [])
        remember(state.bindings, key, binding)
        binding(leaves)

    def _state(self, objects: Sequence[Any]) -> DeviceLoopState:
        """The state of these objects, read if it is new."""
        if not objects:
            return self._without
        state, _ = self._fast.state(objects)
        if state is None:
            with making:
                state, _ = self._fast.state(objects)
                if state is None:
                    state = self._fast.add(DeviceLoopState(Reading(objects, self._attributes, next(self._numbers))))
        return state

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Everything that the loop uses: local variables, outer names, and the contents of containers."""
        return flattened(given | {name: outside(self.function, name) for name in self.loop.outside})

    def asked(self, given: dict[str, Any]) -> tuple[LoopStage, Env]:
        """The program for these, and everything that the loop uses."""
        env, objects = self.complete(given), list[Any]()
        self._key(given, [], objects)
        return self.program(env, self._state(objects).reading), env

    def program(self, env: Env, reading: Reading | None) -> LoopStage:
        """The program for these, traced if there is none yet."""
        form_key, sizes = signature(env)
        form_key = (0 if reading is None else reading.number, form_key)
        form = self.forms.get(form_key)
        found = None if form is None else self.programs.get((form_key, self._compiled_in(form, sizes, env)))
        if found is None:
            with making, CPU_DEVICE:
                found = self._new(env, form_key, sizes)
        return found

    def _new(self, env: Env, form_key: Key, sizes: dict[Path, int]) -> LoopStage:
        """The program for a new form or new sizes. The caller holds the lock `making`."""
        form = self.forms.setdefault(form_key, Form())
        new = {path for path in sizes if len(path) == 1} - self._decided
        if new:
            counts = counts_of(env)
            self.changing |= {path for path in new if sizes[path] in counts and self.options.static_shapes is not True}
            self._decided |= new
        if self.options.alone:
            self.changing |= sizes.keys() - form.static - widths(env)
        elif self.options.static_shapes is False:
            self.changing |= {path for path in sizes if path not in form.static}
        found = self.programs.get((form_key, self._compiled_in(form, sizes, env)))
        if found is not None:
            return found
        # Sizes that differ from an earlier call of the same form are no longer compiled in, unless they must be.
        for other in form.seen if self.options.static_shapes is None and not self.options.alone else ():
            self.changing |= {p for p, v in sizes.items() if other[p] != v and p not in form.static}
        form.seen.append(sizes)
        found = self.programs.get((form_key, self._compiled_in(form, sizes, env)))
        if found is None:
            found = self._make(env, sizes, form)
            # Tracing may have found more sizes that it needs.
            self.programs[form_key, self._compiled_in(form, sizes, env)] = found
        return found

    def _compiled_in(self, form: Form, sizes: dict[Path, int], env: Env) -> tuple[tuple[Path, int], ...]:
        """The sizes that are compiled into a program for these arguments."""
        chosen = {p: v for p, v in sizes.items() if p not in self.changing}
        needed = form.static - chosen.keys()
        for path in sorted(needed, key=repr) if needed else ():
            chosen[path] = number_at(path)(env)
        return tuple(chosen.items())

    def _make(self, env: Env, sizes: dict[Path, int], form: Form) -> LoopStage:
        program, trace = self._traced(env, sizes, form)
        self._report(self, program)
        if self.options.alone:
            _require_order(self.name, program)
        program = below_their_maximum(program)
        sources = ArgumentSources(trace, env)
        made = LoopStage(self.name, program, sources, self.options)
        made.variant(env)
        doubtful = unproven(program)
        if doubtful:
            self._try(program, sources, env, doubtful)
            names = ", ".join(dict.fromkeys(str(c) for _, c in doubtful))
            made.reasons = (f"the tiles around {names}: tested, not proven",)
        return made

    def _try(self, program: TileProgram, sources: ArgumentSources, env: Env, doubtful: Sequence[tuple[Axis, Carry]]) -> None:
        """Raises if the results depend on the tile size."""
        tiles = tiles_to_try(env)
        found = []
        for size in tiles:
            options = Options("maskless", backend_to_try(env), lanes={axis.name: size for axis, _ in doubtful})
            stage, trial = LoopStage(self.name, program, sources, options), at_random(env)
            stage.ready(trial)()
            found.append(stage.outputs(trial))
        if not agree(found):
            raise refusal(doubtful, tiles)

    def _traced(self, env: Env, sizes: dict[Path, int], form: Form) -> tuple[TileProgram, Trace]:
        # Carried values are determined anew for every program: their dtypes may differ.
        known = RetraceFacts()
        known.static = form.static
        for _ in range(20):
            trace = Trace(self.name, known, self.options.blocks)

            def size(path: Path) -> int | None:
                if path[-1] == "now":
                    return number_at(path[:-1])(env)
                if path[0] == NUMBERS:
                    return sum(isinstance(x, float) for x in env.values())
                if path in sizes and path not in self.changing:
                    return sizes[path]
                return 1 if _is_single(path, env) else None

            trace.sizes = size
            try:
                made = {name: proxied(trace, name, value, env) for name, value in env.items()}
                for name in reversed([n for n, value in env.items() if isinstance(value, Container)]):
                    made[name] = made[name].of(made)
                used = {n: made[n] for n in (*self.loop.names, *self.loop.outside) if n in made}
                program = trace.run(self.loop.make(trace), used)
                self.open_blocks = trace.open_blocks
                return program, trace
            except Again:
                continue
        raise KernelError(f"{self.name}: the values that its loops carry change shape or dtype in every iteration")


def _is_single(path: Path, env: Env) -> bool:
    """Whether a size is 1, which is part of a form."""
    match path:
        case (name, "shape", k) if isinstance(env[name], torch.Tensor):
            return single(env[name])[k]
        case (name, "values", "shape", k) if k > 0:
            return single(env[name].values)[k]
    return False


def proxied(trace: Trace, name: str, value: Any, env: Env) -> Any:
    """The symbolic value of a name while a loop is traced."""
    if isinstance(value, torch.Tensor):
        return trace.tensor((name,), value)
    if isinstance(value, JaggedTensor):
        return TracedRows(trace, name, value, first_of(name, env))
    if isinstance(value, (bool, BlockSize, Fixed)):
        return value
    if isinstance(value, int):
        expr = trace.size((name,))
        return expr.value if expr.value is not None else Traced(number(expr), ())
    if isinstance(value, float):
        floats = [n for n, x in env.items() if isinstance(x, float)]
        held = trace.tensor((NUMBERS,), torch.empty(len(floats), dtype=torch.float64, device="meta"))
        return Traced(load(held.tensor, (const(floats.index(name)),)), ())
    return value


class Host(BlockSizes):
    """The machine behind `serrate.language` outside of device loops."""

    def __init__(self, blocks: tuple[int | None, ...]) -> None:
        super().__init__(blocks, DEFAULT_BLOCK)
        self.first: dict[int, int] = {}
        """How many block sizes were taken before each device loop."""

    def passed(self, loop: int, count: int) -> None:
        """Notes that a device loop has run and taken `count` block sizes."""
        if loop not in self.first:
            self.first[loop] = self.taken
            self.taken += count

    def number(self, value: Any, what: str) -> Any:
        """`hl.specialize`."""
        return Fixed(value)

    def block_size(self, low: Any, high: Any) -> int:
        """`hl.register_block_size`."""
        frame = user_frame()
        assert frame is not None
        extent, least = int(low if high is None else high), 1 if high is None else int(low)
        size = min(max(least, self.block_of(self.registered(frame), extent)), max(extent, 1))
        return BlockSize(size, NamedBlock(f"the block of line {frame.f_lineno}"))

    def full(self, shape: Any, value: Any, dtype: torch.dtype) -> Any:
        """A value without tile dims is a plain number."""
        if len(shape):
            self.zeros()
        return value if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)

    def ranges(self, what: str, *_: Any, **__: Any) -> Any:
        """`hl.tile` and `hl.grid` outside the source that the compiler sees."""
        refuse(f"{what} must be used in a `for` statement of the kernel itself, not in a function it calls")

    def __getattr__(self, name: str) -> Any:
        refuse(
            "values of tiles belong inside a loop over tiles. What programs carry from one to the next has no order: "
            "put a loop inside, or use hl.atomic_add"
        )


class CompiledKernel:
    """A kernel on one backend: its function, with device loops replaced by launches."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        if not isinstance(function, types.FunctionType):
            raise KernelError(f"@serrate.kernel takes a plain function, not a {type(function).__name__}")
        self._function, self._options = function, options
        with making:
            self._parts = split(function)
            self.sites = [self._made(number, options) for number in range(len(self._parts.loops))]
            # Loops that take block sizes of the configuration look up first which.
            by_number = [functools.partial(self._launch, number) for number in range(len(self.sites))]
            self.host = self._parts.host(by_number if options.blocks else self.sites)
            """The function, in which device loops are launches; it runs while `machine` is the current one."""
        self.machine = LazyMachine(functools.partial(Host, options.blocks))
        self._axes: dict[int, frozenset[str]] = {}
        """The names of axes of the device loops that were traced."""
        self._later_sites: dict[tuple[int, int], Site] = {}
        """Device loops before which a call has asked for block sizes: these take the next ones of the configuration."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = activate(self.machine)
        try:
            return self.host(*args, **kwargs)
        finally:
            deactivate(token)

    def _launch(self, number: int, env: dict[str, Any]) -> None:
        host: Host = current("a kernel")
        site = self._site(number, host)
        site(env)
        host.passed(number, site.open_blocks)

    def _site(self, number: int, host: Host) -> Site:
        """A device loop, with what is left of the block sizes of the configuration."""
        first = host.first.get(number, host.taken)
        if not first:
            return self.sites[number]
        if (number, first) not in self._later_sites:
            options = replace(self._options, blocks=self._options.blocks[first:])
            self._later_sites.setdefault((number, first), self._made(number, options))
        return self._later_sites[number, first]

    def _made(self, number: int, options: Options) -> Site:
        told = functools.partial(self._require_used, number)
        return Site(self._function.__name__, self._function, self._parts.loops[number], options, told)

    def _require_used(self, number: int, site: Site, program: TileProgram) -> None:
        """Raises for lanes of axes that no device loop has, and for more block sizes than all of them take.

        Which these are is known when every loop was traced; a loop that is never reached may have any.
        """
        self._axes[number] = frozenset(axis.name for axis in program.axes)
        if len(self._axes) < len(self.sites):
            return
        names = ("chunk", *sorted(frozenset[str]().union(*self._axes.values())))
        for name in sorted(self._options.lanes.keys() - names):
            raise CallError(f"lanes: {self._function.__name__} has no axis {name!r}: {choices(name, names)}")
        host: Host = current("a kernel")
        taken, given = host.taken + (0 if number in host.first else site.open_blocks), len(self._options.blocks)
        if len(host.first.keys() | {number}) == len(self.sites) and taken < given:
            raise CallError(
                f"block_sizes: {self._function.__name__} leaves {taken} open, got {given}; they are for the dims of hl.tile that "
                "have no block_size, and for hl.register_block_size"
            )

    def variants(self, *args: Any, **kwargs: Any) -> list[Variant]:
        """The programs that run for these arguments; none is run."""
        return [program.variant(env) for program, env in self._asked(args, kwargs)]

    def ready(self, *args: Any, **kwargs: Any) -> list[Callable[[], None]]:
        """These programs, each bound to its arguments: what a call does beside them is not the kernel's own work."""
        return [program.ready(env) for program, env in self._asked(args, kwargs)]

    def _asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[LoopStage, Env]]:
        found: list[tuple[LoopStage, Env]] = []

        def ask(number: int, given: dict[str, Any]) -> None:
            host: Host = current("a kernel")
            site = self._site(number, host)
            found.append(site.asked(given))
            host.passed(number, site.open_blocks)

        with making:
            host = self._parts.host([functools.partial(ask, number) for number in range(len(self.sites))])
        with running(Host(self._options.blocks)):
            host(*args, **kwargs)
        return found
