"""Calls of kernels: which program serves which arguments, and how it gets them.

In: what a device loop uses, by name, at every call. Out: the loop, run. A program is traced once for each form of these (dtypes,
numbers of dims, how rows are described, sizes that are compiled in); what changes from call to call is given to it. A size is
compiled in until it is seen to change; numbers of rows, their lengths and the first dim of a tensor never are, unless the loop
needs them when it is compiled: then there is a program for each. Calls like one before take a shorter way (`later.py`).
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from serrate import settings
from serrate.errors import CallError, InvarianceError, KernelError, StrategyError, choices
from serrate.frontend.kernel.machine import BlockSize, BlockSizes, NamedBlock, current, refuse, running, user_frame
from serrate.ir.expr import const
from serrate.ir.loops import Declare, Load, LoopProgram, Write, load, nodes, number, values_of
from serrate.ir.tile import Axis, Carry, TileProgram, statements
from serrate.ir.values import Role
from serrate.lower.pipeline import lower
from serrate.runtime.launch import CppExecutable, Executable, ReferenceExecutable, bound
from serrate.runtime.locks import making
from serrate.schedule.plan import Plan
from serrate.schedule.statistics import below_their_maximum
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU
from serrate.tensor import JaggedTensor
from serrate.tiles.derived import Derived
from serrate.tiles.forms import (
    NUMBERS,
    Container,
    Env,
    Fixed,
    Given,
    Path,
    Readings,
    Ways,
    counts_of,
    describe,
    flattened,
    number_at,
    refuse_shared,
    single,
    strategy_for,
    widths,
)
from serrate.tiles.later import Later
from serrate.tiles.loops import Again, RetraceFacts
from serrate.tiles.memory import TracedRows, first_of
from serrate.tiles.proof import agree, at_random, backend_to_try, refusal, tiles_to_try, unproven
from serrate.tiles.source import DeviceLoop, outside, split
from serrate.tiles.trace import DEFAULT_BLOCK, Trace
from serrate.tiles.values import Traced

log = logging.getLogger("serrate")
CPU_DEVICE = torch.device("cpu")
"""Programs are made and given what they need on this device, whatever torch's default is."""


@dataclass
class Options:
    """How a kernel's loops are compiled."""

    strategy: str | None = None
    backend: str = "cpp"
    blocks: tuple[int | None, ...] = ()
    lanes: dict[str, int] = field(default_factory=dict)
    """Lanes of axes by name, where a plan is tried that no strategy makes."""
    static_shapes: bool | None = None
    """Whether all sizes are compiled in (True), none that can be given (False), or those that were not seen to change (None)."""
    alone: bool = False
    """Whether the bits of a row must follow from that row alone: of all sizes only widths of ragged tensors are compiled in,
    because others may be those of the batch, and additions in no fixed order are refused."""


ROOM = 1 << 28
"""Bytes that the values of a tile may have, together, in each thread."""


def _require_room(loops: LoopProgram) -> None:
    """Raises for a program whose private blocks are larger than a thread should have memory for."""
    for kernel in loops.kernels:
        blocks = {n.local.name: n.local for n in nodes(kernel.body) if isinstance(n, Declare) and n.local.lanes}.values()
        # The first with the most elements is one of the user's; passes may have put wider ones beside it.
        total, largest = sum(b.nbytes for b in blocks), max(blocks, key=lambda b: prod(n.size for n in b.lanes), default=None)
        if largest is not None and total > ROOM:
            lanes = " x ".join(str(lane.size) for lane in largest.lanes)
            raise KernelError(
                f"the values of one tile take {total >> 20} MiB in each thread, and may take {ROOM >> 20}: "
                f"{largest.name} alone has {lanes} lanes. Choose smaller block sizes, or put another loop over tiles around it"
            )


def _require_order(name: str, program: TileProgram) -> None:
    """Raises for atomic additions whose order shows in the result."""
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Write) and node.add and node.tensor.dtype.is_floating_point:
            raise InvarianceError(
                f"{name}: hl.atomic_add to {node.tensor.name} ({node.tensor.dtype}) adds in an order that varies by run, "
                "and serrate.batch_invariant() promises the same bits: carry the sum in a loop, or add integers"
            )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies; none of one that has no elements, or no memory."""
    if not x.numel() or x.device.type != "cpu":
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize


@dataclass(eq=False)
class Variant:
    """A program for one form of what a loop uses, and what it is given."""

    program: TileProgram
    plan: Plan
    executable: Executable
    tensors: list[Given]
    arrays: list[Given]
    symbols: list[Given]
    outputs: list[int]

    def explained(self) -> str:
        """The plan, and what every loop carries."""
        return "\n".join([*self.plan.lines, *(f"  {each}" for each in self.program.notes)])

    def __call__(self, env: Env) -> None:
        """Runs it."""
        self.ready(env)()

    def _require_apart(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises where something that is stored to shares memory with something else."""
        spans = [_span(t) for t in tensors]
        for k in self.outputs:
            for j, (begin, end) in enumerate(spans):
                mine, theirs = self.tensors[k].path, self.tensors[j].path
                same = spans[k] == (begin, end) and tensors[k].shape == tensors[j].shape
                if j == k or mine is None or theirs is None or (same and self.in_place(k, j)):
                    continue
                if spans[k][0] < end and begin < spans[k][1]:
                    refuse_shared(mine, theirs)

    def in_place(self, stored: int, read: int) -> bool:
        """Whether one tensor is read only where the other is stored to, element by element: then they may be the same one."""
        x, y = (self.executable.program.tensors[k] for k in (stored, read))
        if read in self.outputs:
            return False
        for kernel in self.executable.program.kernels:
            for node in nodes(kernel.body):
                for v in (v for value in values_of(node) for v in value.walk() if isinstance(v, Load) and v.tensor is y):
                    if not (isinstance(node, Write) and node.tensor is x and node.index == v.index):
                        return False
        return True

    def ready(self, env: Env) -> Callable[[], None]:
        """The program with everything it is given: what is left is its own work."""
        if not self.executable.program.kernels:
            return lambda: None
        tensors = [each.now(env) for each in self.tensors]
        self._require_apart(tensors)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, t in enumerate(tensors):
            if not t.is_contiguous():
                tensors[k] = t.contiguous()
                if k in self.outputs:
                    kept.append((t, tensors[k]))
        arrays = [each.now(env) for each in self.arrays]
        run = bound(self.executable, tensors, arrays, [each.now(env) for each in self.symbols])

        def work() -> None:
            run(tensors)
            for target, made in kept:
                target.copy_(made)

        return work


@dataclass
class Form:
    """One form of what a loop uses: sizes that it was called with, and those that the loop needs when it is compiled."""

    seen: list[dict[Path, int]] = field(default_factory=list)
    static: set[Path] = field(default_factory=set)


class Site:
    """One device loop of a kernel, and every program made of it so far."""

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
        """Told of every program before it is built."""
        self.variants: dict[Any, Variant] = {}
        self.changing: set[Path] = set()
        """Sizes that were seen to change, and integers that were a number of rows or a length when first seen."""
        self.forms: dict[Any, Form] = {}
        self.open_blocks = 0
        """How many block sizes of the configuration it takes."""
        self._decided: set[Path] = set()
        self.readings = Readings(function)
        self._later = Later(function, loop.outside, self.readings)

    def __call__(self, given: dict[str, Any]) -> None:
        if self._later(given):
            return
        env = self.complete(given)
        with making, CPU_DEVICE:
            variant = self.variant(env)
        variant(env)
        if isinstance(variant.executable, CppExecutable):
            with making, CPU_DEVICE:
                static = {path for form in self.forms.values() for path in form.static}
                self._later.note(given, env, variant, frozenset(self.changing), frozenset(static))

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Everything that the loop uses: what it is given, what is outside of the kernel, and what is in containers."""
        return flattened(given | {name: outside(self.function, name) for name in self.loop.outside})

    def variant(self, env: Env) -> Variant:
        """The program for these, traced and built if there is none yet."""
        described, sizes = describe(env)
        described = (self.readings.number(env)[0], described)
        form = self.forms.setdefault(described, Form())
        new = {path for path in sizes if len(path) == 1} - self._decided
        if new:
            counts = counts_of(env)
            self.changing |= {path for path in new if sizes[path] in counts and self.options.static_shapes is not True}
            self._decided |= new
        if self.options.alone:
            self.changing |= sizes.keys() - form.static - widths(env)
        elif self.options.static_shapes is False:
            self.changing |= {path for path in sizes if path not in form.static}
        found = self.variants.get((described, self._compiled_in(form, sizes, env)))
        if found is None:
            # Sizes that differ from an earlier call of the same form are not compiled in any more, unless they must be.
            for other in form.seen if self.options.static_shapes is None and not self.options.alone else ():
                self.changing |= {p for p, v in sizes.items() if other[p] != v and p not in form.static}
            form.seen.append(sizes)
            found = self.variants.get((described, self._compiled_in(form, sizes, env)))
        if found is None:
            found = self._make(env, sizes, form)
            # While it was made, more may have been found that it needs.
            self.variants[described, self._compiled_in(form, sizes, env)] = found
        return found

    def _compiled_in(self, form: Form, sizes: dict[Path, int], env: Env) -> tuple[tuple[Path, int], ...]:
        """The sizes that a program for these has in it."""
        chosen = {p: v for p, v in sizes.items() if p not in self.changing}
        return (*chosen.items(), *((p, now(p, env)) for p in sorted(form.static - chosen.keys(), key=repr)))

    def _make(self, env: Env, sizes: dict[Path, int], form: Form) -> Variant:
        program, trace = self._traced(env, sizes, form)
        self._report(self, program)
        if self.options.alone:
            _require_order(self.name, program)
        program = below_their_maximum(program)
        made = self._built(program, trace, env, self.options)
        doubtful = unproven(program)
        if doubtful:
            self._try(program, trace, env, doubtful)
            names = ", ".join(dict.fromkeys(str(c) for _, c in doubtful))
            made.plan = made.plan.because(f"the tiles around {names}: tested, not proven")
        return made

    def _try(self, program: TileProgram, trace: Trace, env: Env, doubtful: Sequence[tuple[Axis, Carry]]) -> None:
        """Raises unless the size of a tile is not part of what the program means."""
        tiles = tiles_to_try(env)
        found = []
        for size in tiles:
            options = Options("maskless", backend_to_try(env), lanes={axis.name: size for axis, _ in doubtful})
            variant, trial = self._built(program, trace, env, options), at_random(env)
            variant(trial)
            found.append([variant.tensors[k].now(trial) for k in variant.outputs])
        if not agree(found):
            raise refusal(doubtful, tiles)

    def _built(self, program: TileProgram, trace: Trace, env: Env, options: Options, *, cut: bool = False) -> Variant:
        """A program under a strategy, built; `cut` asks for one that has something to share out."""
        strategy = options.strategy or "maskless"
        wanted = {strategy_for(x.structure) for x in env.values() if isinstance(x, JaggedTensor)}
        if options.strategy is None and "persistent_dynamic" in wanted:
            try:
                return self._built(program, trace, env, replace(options, strategy="persistent_dynamic"), cut=True)
            except StrategyError as error:
                log.debug("%s: one row has most of the work, and stays whole: %s", self.name, error)
        chosen = plan(program, strategy, CPU, options.lanes)
        if cut and not any(step.primitive in ("cut", "combine") for step in chosen.steps):
            raise StrategyError(chosen.reasons[-1])
        first, *rest = chosen.lines
        loops = lower(chosen.apply(program), program.name, (f"{self.name}: {first}", *rest), CPU)
        _require_room(loops)
        executable: Executable
        ways = Ways(trace)
        derived = Derived(ways.array, ways.number)
        arrays = [derived.array(a) for a in loops.arrays]
        if options.backend == "reference":
            executable = ReferenceExecutable(loops)
        else:
            wide = frozenset(a for a, own in zip(loops.arrays, arrays, strict=True) if own.now(env).dtype == torch.int64)
            executable = CppExecutable(loops, wide)
        if "source" in settings.current().log:
            log.warning("%s", executable.source)
        outputs = [k for k, t in enumerate(loops.tensors) if t.role is Role.OUTPUT]
        tensors = [ways.tensor(t) for t in (*loops.inputs, *loops.outputs)] + [derived.scratch(t) for t in loops.scratch]
        return Variant(program, chosen, executable, tensors, arrays, [ways.number(s) for s in loops.symbols], outputs)

    def _traced(self, env: Env, sizes: dict[Path, int], form: Form) -> tuple[TileProgram, Trace]:
        # What loops carry is found anew for every program: it may be another dtype.
        known = RetraceFacts()
        known.static = form.static
        for _ in range(20):
            trace = Trace(self.name, known, self.options.blocks)

            def size(path: Path) -> int | None:
                if path[-1] == "now":
                    return now(path[:-1], env)
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
        raise KernelError(f"{self.name}: the values that its loops carry change their form in every iteration")

    def sources(self) -> str:
        """What was generated so far."""
        return "\n".join(v.executable.source for v in self.variants.values())


def _is_single(path: Path, env: Env) -> bool:
    """Whether a size of a tensor is 1, which is part of a form."""
    match path:
        case (name, "shape", k) if isinstance(env[name], torch.Tensor):
            return single(env[name])[k]
        case (name, "values", "shape", k) if k > 0:
            return single(env[name].values)[k]
    return False


def now(path: Path, env: Env) -> int:
    """A number of the outside at this call."""
    return int(number_at(path)(env))


def proxied(trace: Trace, name: str, value: Any, env: Env) -> Any:
    """What a name stands for while a loop is traced."""
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
        """How many block sizes there were before each device loop."""

    def passed(self, loop: int, count: int) -> None:
        """A device loop has run, and taken so many block sizes."""
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
        """A number that no tile has a part in is a number."""
        if len(shape):
            self.zeros()
        return value if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)

    def ranges(self, what: str, *_: Any, **__: Any) -> Any:
        """`hl.tile` and `hl.grid` in a place where no compiler sees them."""
        refuse(f"{what} must be used in a `for` statement of the kernel itself, not in a function it calls")

    def __getattr__(self, name: str) -> Any:
        refuse(
            "values of tiles belong inside a loop over tiles. What programs carry from one to the next has no order: "
            "put a loop inside, or use hl.atomic_add"
        )


class CompiledKernel:
    """A kernel on one backend: its function, in which device loops are programs."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        if not isinstance(function, types.FunctionType):
            raise KernelError(f"@serrate.kernel takes a plain function, not a {type(function).__name__}")
        with making:
            self._parts = split(function)
            self._host = self._parts.host(self._launch)
        self._function, self._options = function, options
        self.sites = [self._made(number, options) for number in range(len(self._parts.loops))]
        self._axes: dict[int, frozenset[str]] = {}
        """The names of axes of the device loops that were traced."""
        self._later_sites: dict[tuple[int, int], Site] = {}
        """Device loops before which a call has asked for block sizes: these take the next ones of the configuration."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with running(Host(self._options.blocks)):
            return self._host(*args, **kwargs)

    def _launch(self, number: int, env: dict[str, Any]) -> None:
        if not self._options.blocks:
            self.sites[number](env)
            return
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
        return [variant for variant, _ in self._asked(args, kwargs)]

    def ready(self, *args: Any, **kwargs: Any) -> list[Callable[[], None]]:
        """These programs, each with everything it is given: what a call does beside them is not the kernel's own work."""
        return [variant.ready(env) for variant, env in self._asked(args, kwargs)]

    def _asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Variant, Env]]:
        found: list[tuple[Variant, Env]] = []

        def ask(number: int, given: dict[str, Any]) -> None:
            host: Host = current("a kernel")
            site = self._site(number, host)
            env = site.complete(given)
            with making, CPU_DEVICE:
                found.append((site.variant(env), env))
            host.passed(number, site.open_blocks)

        with making:
            host = self._parts.host(ask)
        with running(Host(self._options.blocks)):
            host(*args, **kwargs)
        return found
