"""Calls of kernels: which program serves which arguments, and how it gets them.

In: what a device loop uses, by name, at every call. Out: the loop, run. A program is traced once for each form of these (dtypes,
numbers of dims, how rows are described, sizes that are compiled in); what changes from call to call is given to it. A size is
compiled in until it is seen to change; numbers of rows, their lengths and the first dim of a tensor never are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from serrate import settings
from serrate.errors import DeviceError, GradientError, KernelError
from serrate.interpret.axes import Axis as NamedBlock
from serrate.interpret.axes import BlockSize
from serrate.interpret.run import Run, refuse, running, user_frame
from serrate.ir.expr import Symbol, const
from serrate.ir.kernel import KernelProgram
from serrate.ir.loops import load, number
from serrate.ir.values import Role, Tensor
from serrate.lower.tiles import lower_kernel
from serrate.runtime.launch import CppExecutable, Executable, ReferenceExecutable
from serrate.schedule.chunks import scheduled
from serrate.schedule.target import CPU
from serrate.schedule.tiles import TilePlan
from serrate.tensor import JaggedTensor
from serrate.tiles.derived import Derived
from serrate.tiles.memory import TracedRows, first_of
from serrate.tiles.source import DeviceLoop, outside, split
from serrate.tiles.statistics import in_two_passes
from serrate.tiles.tidy import tidy
from serrate.tiles.trace import DEFAULT_BLOCK, Again, Known, Trace
from serrate.tiles.values import Traced

NUMBERS = "numbers"
"""The tensor that holds all the floats a loop uses: they are given to the program, so that others need no other program."""


CONTAINERS = (tuple, list, dict)


@dataclass(frozen=True)
class Container:
    """A tuple, list or dictionary of things that are given by names of their own."""

    kind: type
    names: tuple[str, ...]
    keys: tuple[Any, ...]

    def of(self, made: dict[str, Any]) -> Any:
        """The container, of what stands for its parts."""
        parts = [made[n] for n in self.names]
        return dict(zip(self.keys, parts, strict=True)) if self.kind is dict else self.kind(parts)


@dataclass
class Options:
    """How a kernel's loops are compiled."""

    strategy: str | None = None
    backend: str = "cpp"
    blocks: tuple[int | None, ...] = ()
    lanes: dict[str, int] = field(default_factory=dict)
    """Lanes of axes by name, where a plan is tried that no strategy makes."""


@dataclass
class Variant:
    """A program for one form of what a loop uses."""

    program: KernelProgram
    plan: TilePlan
    executable: Executable
    tensors: list[Callable[[dict[str, Any]], torch.Tensor]]
    arrays: list[Callable[[dict[str, Any]], torch.Tensor]]
    symbols: list[Callable[[dict[str, Any]], int]]
    outputs: list[int]

    def explained(self) -> str:
        """The plan, and what every loop carries."""
        return "\n".join([str(self.plan), *(f"  {each}" for each in self.program.carried)])


class Site:
    """One device loop of a kernel, and every program made of it so far."""

    def __init__(self, name: str, function: types.FunctionType, loop: DeviceLoop, options: Options) -> None:
        self.name, self.function, self.loop, self.options = name, function, loop, options
        self.variants: dict[Any, Variant] = {}
        self.changing: set[tuple[Any, ...]] = set()
        """Sizes that were seen to change."""
        self.seen: dict[Any, list[dict[tuple[Any, ...], int]]] = {}
        self.known = Known()

    def __call__(self, given: dict[str, Any]) -> None:
        env = self._complete(given)
        variant = self.variant(env)
        tensors = [get(env) for get in variant.tensors]
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, t in enumerate(tensors):
            if not t.is_contiguous():
                tensors[k] = t.contiguous()
                if k in variant.outputs:
                    kept.append((t, tensors[k]))
        if not variant.executable.program.kernels:
            return
        variant.executable(tensors, [get(env) for get in variant.arrays], [get(env) for get in variant.symbols])
        for target, made in kept:
            target.copy_(made)

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        for name in self.loop.outside:
            given[name] = outside(self.function, name)
        # What is in a tuple, list or dictionary is given by itself.
        while any(type(x) in CONTAINERS for x in given.values()):
            flat: dict[str, Any] = {}
            for name, value in given.items():
                if type(value) in CONTAINERS:
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    parts = {f"{name}[{k!r}]": x for k, x in items}
                    flat[name] = Container(type(value), tuple(parts), tuple(value) if isinstance(value, dict) else ())
                    flat |= parts
                else:
                    flat[name] = value
            given = flat
        return given

    def variant(self, env: dict[str, Any]) -> Variant:
        """The program for these, traced and built if there is none yet."""
        form, sizes = describe(env)
        key = (form, tuple(v for p, v in sizes.items() if p not in self.changing))
        found = self.variants.get(key)
        if found is None:
            self._note_changes(form, sizes)
            key = (form, tuple(v for p, v in sizes.items() if p not in self.changing))
            found = self.variants.get(key)
        if found is None:
            found = self.variants[key] = self._make(env, sizes)
        return found

    def _note_changes(self, form: Any, sizes: dict[tuple[Any, ...], int]) -> None:
        """Sizes that differ from an earlier call of the same form are not compiled in any more, unless they must be."""
        earlier = self.seen.setdefault(form, [])
        for other in earlier:
            self.changing |= {p for p, v in sizes.items() if other[p] != v and p not in self.known.static}
        earlier.append(sizes)

    def _make(self, env: dict[str, Any], sizes: dict[tuple[Any, ...], int]) -> Variant:
        program, trace = self._traced(env, sizes)
        strategy = self.options.strategy or "maskless"
        # A row is near for a second pass where one worker has all of it.
        program = tidy(in_two_passes(program) if strategy == "maskless" else program)
        chosen, phases, lanes = scheduled(program, strategy, CPU, self.options.lanes)
        header = (f"{self.name}: {chosen}".split("\n")[0], *str(chosen).split("\n")[1:])
        loops = lower_kernel(phases, lanes, header)
        executable: Executable
        getters = Getters(trace)
        derived = Derived(getters.array, getters.number)
        arrays = [derived.array(a) for a in loops.arrays]
        if self.options.backend == "reference":
            executable = ReferenceExecutable(loops)
        else:
            wide = frozenset(a for a, get in zip(loops.arrays, arrays, strict=True) if get(env).dtype == torch.int64)
            executable = CppExecutable(loops, wide)
        if "source" in settings.current().log:
            import logging

            logging.getLogger("serrate").warning("%s", executable.source)
        tensors = [getters.tensor(t) for t in (*loops.inputs, *loops.outputs)] + [derived.scratch(t) for t in loops.scratch]
        outputs = [k for k, t in enumerate(loops.tensors) if t.role is Role.OUTPUT]
        return Variant(program, chosen, executable, tensors, arrays, [getters.number(s) for s in loops.symbols], outputs)

    def _traced(self, env: dict[str, Any], sizes: dict[tuple[Any, ...], int]) -> tuple[KernelProgram, Trace]:
        for _ in range(20):
            trace = Trace(self.name, self.known, self.options.blocks)

            def size(path: tuple[Any, ...]) -> int | None:
                if path[-1] == "now":
                    return now(path[:-1], env)
                if path[0] == NUMBERS:
                    return sum(isinstance(x, float) for x in env.values())
                if path in sizes and path not in self.changing:
                    return sizes[path]
                return None

            trace.sizes = size
            try:
                made = {name: proxied(trace, name, value, env) for name, value in env.items()}
                for name in reversed([n for n, value in env.items() if isinstance(value, Container)]):
                    made[name] = made[name].of(made)
                used = {n: made[n] for n in (*self.loop.names, *self.loop.outside) if n in made}
                return trace.run(self.loop.make(trace), used), trace
            except Again:
                continue
        raise KernelError(f"{self.name}: the values that its loops carry change their form in every iteration")

    def sources(self) -> str:
        """What was generated so far."""
        return "\n".join(v.executable.source for v in self.variants.values())


def now(path: tuple[Any, ...], env: dict[str, Any]) -> int:
    """A number of the outside at this call."""
    return int(_number(path)(env))


def proxied(trace: Trace, name: str, value: Any, env: dict[str, Any]) -> Any:
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
        held = trace.tensor((NUMBERS,), torch.empty(len(floats), dtype=torch.float64))
        return Traced(load(held.tensor, (const(floats.index(name)),)), ())
    return value


def describe(env: dict[str, Any]) -> tuple[Any, dict[tuple[Any, ...], int]]:
    """The form of what a loop uses, and the sizes in it that may be compiled in."""
    form: list[Any] = []
    sizes: dict[tuple[Any, ...], int] = {}
    counts: set[int] = set()
    widths: set[int] = set()
    for value in env.values():
        if isinstance(value, JaggedTensor):
            counts |= {value.num_rows, value.num_groups, value.max_length, value.total_elements}
            widths |= set(value.values.shape[1:])
        elif isinstance(value, torch.Tensor) and value.dim():
            counts |= {value.shape[0], value.shape[0] - 1}
            widths |= set(value.shape[1:])
    for name, value in env.items():
        if isinstance(value, torch.Tensor):
            check(value)
            form.append((name, value.dtype, value.dim()))
            sizes |= {(name, "shape", k): value.shape[k] for k in range(1, value.dim())}
        elif isinstance(value, JaggedTensor):
            check(value)
            own = value.structure
            rows = tuple(r.form for r in own.rows)
            form.append((name, value.dtype, value.values.dim(), rows, own.dims, first_of(name, env)))
            sizes |= {(name, "values", "shape", k): value.values.shape[k] for k in range(1, value.values.dim())}
        elif isinstance(value, (bool, BlockSize, Fixed)) or not isinstance(value, (int, float)):
            form.append((name, value if _hashable(value) else id(value)))
        elif isinstance(value, int):
            form.append((name, int))
            if value not in counts or value in widths:
                sizes[(name,)] = value
        else:
            form.append((name, float))
    return tuple(form), sizes


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def check(x: torch.Tensor | JaggedTensor) -> None:
    """Raises for what compiled kernels do not take."""
    if x.device.type != "cpu":
        raise DeviceError(f"compiled kernels run on a CPU, and an argument is on {x.device}: move it with .cpu()")
    if x.requires_grad and torch.is_grad_enabled():
        raise GradientError("a kernel has no gradient: call it under torch.no_grad(), or with detached tensors")


Get = Callable[[dict[str, Any]], Any]


class Getters:
    """How everything that a program is given is found in what a loop uses."""

    def __init__(self, trace: Trace) -> None:
        self._tensors = {t.tensor.name: path for path, t in trace.tensors.items()}
        self._numbers = {s.name: path for path, s in trace.numbers.items()}
        self._arrays = {a.name: key for key, a in trace.described.items()}

    def tensor(self, tensor: Tensor) -> Get:
        """A tensor of the outside."""
        path = self._tensors[tensor.name]
        if path == (NUMBERS,):
            return lambda env: torch.tensor([x for x in env.values() if isinstance(x, float)], dtype=torch.float64)
        return _found(path)

    def number(self, what: Symbol) -> Get:
        """A number of the outside."""
        return _number(self._numbers[what.name])

    def array(self, name: str) -> Get:
        """An array that describes rows."""
        jt, axis, what = self._arrays[name]

        def get(env: dict[str, Any]) -> torch.Tensor:
            rows = env[jt].structure.rows[axis]
            if what == "where":
                found = rows.where()
            elif what == "counts":
                found = rows.counts()
            else:
                found = rows.offsets[int(what.removeprefix("offsets"))]
            found = found if found.dtype in (torch.int32, torch.int64) else found.long()
            # Without components, code may still ask for the length of the first.
            return found if found.numel() > 1 else torch.cat([found, found.new_zeros(2 - found.numel())])

        return get


def _found(path: tuple[Any, ...]) -> Get:
    name, *rest = path
    if not rest:
        return lambda env: env[name]
    if rest[0] == "tile_list":
        return lambda env: env[name].tile_list(rest[1])[rest[2]]
    attribute = rest[0]
    return lambda env: getattr(env[name], attribute)


def _number(path: tuple[Any, ...]) -> Get:
    if len(path) == 1:
        return lambda env: env[path[0]]
    if "shape" in path:
        at = path.index("shape")
        tensor, dim = _found(path[:at]), path[at + 1]
        return lambda env: tensor(env).shape[dim]
    name, what, *more = path
    if what == "total_tiles":
        return lambda env: env[name].total_tiles(more[0])
    if what == "longest":
        return lambda env: env[name].structure.max_length(more[0])
    if what == "rows_of":
        return lambda env: env[name].structure.num_rows(more[0])
    return lambda env: getattr(env[name], what)


class Fixed(int):
    """A size that the user wants compiled in."""


class Host(Run):
    """The machine behind `serrate.language` outside of device loops."""

    def __init__(self, blocks: tuple[int | None, ...]) -> None:
        super().__init__(blocks, DEFAULT_BLOCK, None, 0, 0)

    def number(self, value: Any, what: str) -> Any:
        """`hl.specialize`."""
        return Fixed(value)

    def block_size(self, low: Any, high: Any) -> int:
        """`hl.register_block_size`."""
        frame = user_frame()
        assert frame is not None
        extent, least = int(low if high is None else high), 1 if high is None else int(low)
        size = min(max(least, self.block_of((frame.f_code, frame.f_lasti, 0), extent)), max(extent, 1))
        return BlockSize(size, NamedBlock(f"the block of line {frame.f_lineno}"))

    def full(self, shape: Any, value: Any, dtype: torch.dtype) -> Any:
        """A number that no tile has a part in is a number."""
        if len(shape):
            self.zeros()
        return value if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)

    def ranges(self, what: str, *_: Any, **__: Any) -> Any:
        """`hl.tile` and `hl.grid` in a place where no compiler sees them."""
        refuse(f"{what} is for a `for` statement of the kernel itself: functions that it calls have no loops over tiles")

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
        parts = split(function)
        self.sites = [Site(function.__name__, function, loop, options) for loop in parts.loops]
        self._host = parts.host(self._launch)
        self._asked: list[Variant] | None = None
        self._blocks = options.blocks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with running(Host(self._blocks)):
            return self._host(*args, **kwargs)

    def _launch(self, number: int, env: dict[str, Any]) -> None:
        site = self.sites[number]
        if self._asked is not None:
            self._asked.append(site.variant(site._complete(env)))
        else:
            site(env)

    def variants(self, *args: Any, **kwargs: Any) -> list[Variant]:
        """The programs that run for these arguments; none is run."""
        self._asked = []
        try:
            self(*args, **kwargs)
            return self._asked
        finally:
            self._asked = None
