"""The form of what a device loop uses: what a program is made for, and what it is given at every call.

In: what a loop uses, by name. Out: its form (dtypes, numbers of dims, how rows are described, what is no number), the sizes in it
that may be compiled in, and the way to everything that a program is given.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from serrate.errors import DeviceError, GradientError, KernelError
from serrate.frontend.dependencies import PLAIN, snapshot
from serrate.frontend.kernel.machine import BlockSize
from serrate.frontend.trace import described
from serrate.ir.expr import Symbol
from serrate.ir.values import Tensor
from serrate.schedule.heuristic import RowStatistics, choose
from serrate.schedule.target import CPU
from serrate.tensor import JaggedTensor
from serrate.tensor.structure import Structure
from serrate.tensor.torch_private import has_tangent, version
from serrate.tiles.memory import first_of
from serrate.tiles.trace import Trace

Path = tuple[Any, ...]
"""The way to a tensor or number: a name, then what is asked of it."""
Env = Mapping[str, Any]
"""What a loop uses, by name."""
Get = Callable[[Env], Any]

NUMBERS = "(numbers)"
"""The tensor that holds all the floats a loop uses: they are given to the program, so that others need no other program.
No name of the user's is this one."""
CONTAINERS = (tuple, list, dict)


class Fixed(int):
    """A size that the user wants compiled in."""


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


def parts_of(name: str, value: Any) -> dict[str, tuple[Any, Any]]:
    """What is in a container, by names of their own, each with its key.

    >>> parts_of("pair", (4, 5))
    {'pair[0]': (0, 4), 'pair[1]': (1, 5)}
    """
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {f"{name}[{k!r}]": (k, x) for k, x in items}


def flattened(given: dict[str, Any]) -> dict[str, Any]:
    """What a loop uses, with everything that is in a tuple, list or dictionary by itself.

    >>> flattened({"pair": (4, 5)})
    {'pair': Container(kind=<class 'tuple'>, names=('pair[0]', 'pair[1]'), keys=()), 'pair[0]': 4, 'pair[1]': 5}
    """
    while any(type(x) in CONTAINERS for x in given.values()):
        flat: dict[str, Any] = {}
        for name, value in given.items():
            if type(value) in CONTAINERS:
                parts = parts_of(name, value)
                flat[name] = Container(type(value), tuple(parts), tuple(value) if isinstance(value, dict) else ())
                flat |= {part: x for part, (_, x) in parts.items()}
            else:
                flat[name] = value
        given = flat
    return given


def refuse_shared(stored: Path, other: Path) -> NoReturn:
    """Raises for memory that a loop knows under two names and stores to under one: what the other holds would be a guess."""
    first, second = (".".join(str(p) for p in path if p != "values") for path in (stored, other))
    raise KernelError(
        f"{first}, which the kernel stores to, shares memory with {second}: "
        f"use one name for both, or give a copy, as {second}.clone()"
    )


# --- structures ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Remembered:
    """What is known of one structure as long as it is there."""

    reference: weakref.ref[Structure]
    form: int
    """A number for everything that a program may be made for: structures of one form have the same."""
    rows: tuple[int, ...]
    """Which rows they are: programs may be made for ragged tensors that have the very same ones."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors that describe its rows and count how often they are written to; those of inference mode do not."""
    versions: list[int]
    """How often each of them had been written to."""
    records: dict[object, tuple[Any, ...]] = field(default_factory=dict)
    """What programs are given of it."""

    def stale(self) -> bool:
        """Whether one of these tensors was written to since."""
        return [t._version for t in self.tensors] != self.versions


structures: dict[int, Remembered] = {}
"""By identity. A structure that is gone takes what is known of it along."""
_forms: dict[Any, int] = {}
_numbers = itertools.count()


def remembered(structure: Structure, values: torch.Tensor) -> Remembered:
    """What is known of a structure, which is looked at if nothing is. Rows that were written to are checked: do they fit the
    values?"""
    place = id(structure)
    found = structures.get(place)
    if found is None or found.reference() is not structure or found.stale():
        tensors = tuple(t for r in structure.rows for t in (*r.offsets, r.starts) if t is not None and not t.is_inference())
        versions = [t._version for t in tensors]
        if not all(r.verified() for r in structure.rows):
            structure.check_rows(values)
        rows = tuple(
            (r.form, tuple(each.dtype for each in r.offsets), None if r.starts is None else r.starts.dtype)
            for r in structure.rows
        )
        number = _forms.setdefault((rows, structure.dims, strategy_for(structure)), next(_numbers))
        reference = weakref.ref(structure, lambda _: structures.pop(place, None))
        found = structures[place] = Remembered(reference, number, tuple(map(id, structure.rows)), tensors, versions)
    return found


def least(structure: Structure) -> tuple[tuple[int, int], ...]:
    """Dims of the values, and how many positions each must have for the rows to be there."""
    found: list[tuple[int, int]] = []
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        found.append((dim, rows.extent("a kernel") if rows.starts is None else rows.reach("a kernel")))
        if rows.takes == 2:
            found.append((dim + 1, rows.max_length(rows.depth, "a kernel")))
    return tuple(found)


POSITION_BYTES = 64
"""What a position of a row is taken to hold: one structure serves tensors of different widths, by one program."""


def strategy_for(structure: Structure) -> str:
    """The strategy when nobody names one, by the lengths of rows."""
    if structure.levels != 1:
        return "maskless"
    why = "how rows are shared out"
    total, longest = structure.total_elements(why=why), structure.max_length(why=why)
    return choose(RowStatistics(structure.num_rows(), total, longest, POSITION_BYTES), CPU)[0]


# --- forms ---------------------------------------------------------------------------------------------------------------


class Same:
    """Something that cannot be hashed, as a key: the very same thing."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        # Kept alive, so that nothing else has its identity.
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def describe(env: Env) -> tuple[Any, dict[Path, int]]:
    """The form of what a loop uses, and the sizes in it that may be compiled in.

    >>> describe({"x": torch.zeros(2, 3), "n": 4, "scale": 0.5})
    ((('x', torch.float32, (False, False)), ('n', <class 'int'>), ('scale', <class 'float'>)), {('x', 'shape', 1): 3, ('n',): 4})
    """
    form: list[Any] = []
    sizes: dict[Path, int] = {}
    axes: list[Any] = []
    for name, value in env.items():
        if isinstance(value, torch.Tensor):
            check(value)
            form.append((name, value.dtype, single(value)))
            sizes |= {(name, "shape", k): value.shape[k] for k in range(1, value.dim())}
        elif isinstance(value, JaggedTensor):
            check(value)
            rows = remembered(value.structure, value.values).form
            form.append((name, value.dtype, single(value.values)[1:], rows, first_of(name, env)))
            sizes |= {(name, "values", "shape", k): value.values.shape[k] for k in range(1, value.values.dim())}
        elif isinstance(value, BlockSize):
            # Two blocks of one size are the same only if they are of one axis.
            own = next((k for k, axis in enumerate(axes) if axis is value.axis), len(axes))
            axes.append(value.axis)
            form.append((name, BlockSize, int(value), own))
        elif isinstance(value, (bool, Fixed)) or not isinstance(value, (int, float)):
            form.append((name, type(value), key_of(value)))
        elif isinstance(value, int):
            form.append((name, type(value)))
            sizes[(name,)] = value
        else:
            form.append((name, type(value)))
    return tuple(form), sizes


def widths(env: Env) -> set[Path]:
    """The sizes of dims of ragged tensors that no row has a part in: they are the same in every batch."""
    found: set[Path] = set()
    for name, value in env.items():
        if isinstance(value, JaggedTensor):
            structure = value.structure
            taken = {d for dim, rows in zip(structure.dims, structure.rows, strict=True) for d in range(dim, dim + rows.takes)}
            found |= {(name, "values", "shape", k) for k in range(1, value.values.dim()) if k not in taken}
    return found


def single(x: torch.Tensor) -> tuple[bool, ...]:
    """Which dims have size 1: a tile that reads one reads its one element in every lane, so programs are made for it."""
    return tuple(size == 1 for size in x.shape)


def counts_of(env: Env) -> set[int]:
    """Numbers of rows, their lengths, and first dims, that are no other dim: an integer that is one will change with them."""
    found: set[int] = set()
    widths: set[int] = set()
    for value in env.values():
        if isinstance(value, JaggedTensor):
            found |= {value.num_rows, value.num_groups, value.max_length, value.total_elements}
            widths |= set(value.values.shape[1:])
        elif isinstance(value, torch.Tensor) and value.dim():
            found |= {value.shape[0], value.shape[0] - 1}
            widths |= set(value.shape[1:])
    return found - widths


def key_of(value: Any) -> Any:
    """What stands for something that is no number, tensor or container."""
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return described(value) if isinstance(value, complex) else value


# --- what a trace reads of functions, classes, modules and objects -----------------------------------------------------------


def is_read(value: Any) -> bool:
    """Whether a trace may read more of something than itself: functions, classes, modules and objects of the user's."""
    if isinstance(value, (*PLAIN, torch.Tensor, JaggedTensor, Container, *CONTAINERS, types.BuiltinFunctionType)):
        return False
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return module.split(".")[0] not in ("torch", "serrate", "builtins")


def nothing() -> None:
    """A function that reads nothing."""


class Reading:
    """What a trace read of some objects: the same objects give the same program as long as it is as it was."""

    def __init__(self, objects: Mapping[str, Any], names: frozenset[str]) -> None:
        self.objects = tuple(objects)
        """The names of the objects."""
        self.snapshot, self._tensors = snapshot(nothing, tuple(objects.values()), names)
        self._versions = [version(_values(t)) for t in self._tensors]

    def holds(self, objects: Sequence[Any]) -> bool:
        """Whether everything is as it was. Tensors are the same ones, and were not written to: a trace holds their numbers."""
        found = self.snapshot.read(nothing, objects)
        if type(found) is not tuple:
            return False
        return all(
            now is then and version(_values(now)) == known
            for now, then, known in zip(found, self._tensors, self._versions, strict=True)
        )


def _values(x: torch.Tensor | JaggedTensor) -> torch.Tensor:
    return x.values if isinstance(x, JaggedTensor) else x


READINGS = 32
"""How many readings of one device loop are remembered; the oldest goes first."""


class Readings:
    """All that was read of objects so far; each reading has a number, which programs are made for."""

    def __init__(self, function: types.FunctionType) -> None:
        self._names = _attributes(function.__code__)
        self._known: dict[tuple[str, ...], dict[int, Reading]] = {}
        self._count = itertools.count(1)

    def number(self, env: Env) -> tuple[int, Reading | None]:
        """The number of a reading that holds, which is taken if there is none; 0 where nothing is read."""
        objects = {name: env[name] for name in sorted(env) if is_read(env[name])}
        if not objects:
            return 0, None
        known = self._known.setdefault(tuple(objects), {})
        for number, reading in known.items():
            if reading.holds(tuple(objects.values())):
                return number, reading
        while len(known) >= READINGS:
            del known[next(iter(known))]
        made = next(self._count)
        known[made] = Reading(objects, self._names)
        return made, known[made]


def _attributes(code: types.CodeType) -> frozenset[str]:
    """The names of attributes that code, and the functions made in it, may read."""
    return frozenset(code.co_names).union(*(_attributes(c) for c in code.co_consts if isinstance(c, types.CodeType)))


# --- what programs take --------------------------------------------------------------------------------------------------


def check(x: torch.Tensor | JaggedTensor) -> None:
    """Raises for what compiled kernels do not take."""
    if x.device.type != "cpu":
        raise DeviceError(f"compiled kernels run on a CPU, and an argument is on {x.device}: move it with .cpu()")
    if x.requires_grad and torch.is_grad_enabled():
        raise GradientError("a kernel has no gradient: call it under torch.no_grad(), or with detached tensors")
    if has_tangent(x.values if isinstance(x, JaggedTensor) else x):
        raise GradientError("a kernel has no forward-mode gradient, but an argument has a tangent: call it with detached tensors")
    if isinstance(x, JaggedTensor):
        # Its values may have been resized.
        x.structure.check_values(x.values)


# --- what a program is given ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor or number that a program is given, and the way to it."""

    get: Get
    path: Path | None = None
    of: str | None = None
    """The ragged tensor whose structure alone tells it."""
    memory: torch.dtype | None = None
    """Of memory that lives inside a program, the dtype: then `get` gives its shape."""
    private: bool = False
    """Whether that is a row of each thread's own."""

    def now(self, env: Env) -> Any:
        """What the program is given at this call; of private memory only a shape."""
        found = self.get(env)
        return found if self.memory is None else torch.empty(found, dtype=self.memory, device="meta" if self.private else "cpu")


def made_of(get: Get, parts: Iterable[Given], *, memory: torch.dtype | None = None, private: bool = False) -> Given:
    """Something that is made of other things, and so told by a structure if all of them are told by it.

    >>> rows, count = Given(lambda env: 3, of="jt"), Given(lambda env: 4, ("n",))
    >>> made_of(lambda env: 3, [rows]).of, made_of(lambda env: 7, [rows, count]).of
    ('jt', None)
    """
    of = {part.of for part in parts}
    return Given(get, of=of.pop() if len(of) == 1 else None, memory=memory, private=private)


class Ways:
    """The way to everything that a program is given."""

    def __init__(self, trace: Trace) -> None:
        self._tensors = {t.tensor.name: path for path, t in trace.tensors.items()}
        self._numbers = {s.name: path for path, s in trace.numbers.items()}
        self._arrays = {a.name: key for key, a in trace.described.items()}

    def tensor(self, tensor: Tensor) -> Given:
        """A tensor of the outside."""
        path = self._tensors[tensor.name]
        return Given(tensor_at(path), path, _structure_of(path))

    def number(self, what: Symbol) -> Given:
        """A number of the outside."""
        path = self._numbers[what.name]
        return Given(number_at(path), path, _structure_of(path))

    def array(self, name: str) -> Given:
        """An array that describes rows."""
        jt, axis, what = self._arrays[name]
        return Given(lambda env: array_of(env[jt], axis, what), of=jt)


def _structure_of(path: Path) -> str | None:
    """The ragged tensor whose structure alone tells what is found this way."""
    if len(path) == 1 or path[1] in ("values", "shape"):
        return None
    name: str = path[0]
    return name


def array_of(jt: JaggedTensor, axis: int, what: str) -> torch.Tensor:
    """An array that describes rows."""
    rows = jt.structure.rows[axis]
    if what == "where":
        found = rows.where()
    elif what == "counts":
        found = rows.counts()
    else:
        found = rows.offsets[int(what.removeprefix("offsets"))]
    found = (found if found.dtype in (torch.int32, torch.int64) else found.long()).contiguous()
    # Without components, code may still ask for the length of the first.
    return found if found.numel() > 1 else torch.cat([found, found.new_zeros(2 - found.numel())])


def tensor_at(path: Path) -> Get:
    """How a tensor is found in what a loop uses."""
    name, *rest = path
    if name == NUMBERS:
        return lambda env: torch.tensor([x for x in env.values() if isinstance(x, float)], dtype=torch.float64, device="cpu")
    if not rest:
        return lambda env: env[name]
    if rest[0] == "tile_list":
        return lambda env: env[name].tile_list(rest[1])[rest[2]]
    attribute = rest[0]
    return lambda env: getattr(env[name], attribute)


def number_at(path: Path) -> Get:
    """How a number is found in what a loop uses."""
    if len(path) == 1:
        return lambda env: env[path[0]]
    if "shape" in path:
        at = path.index("shape")
        tensor, dim = tensor_at(path[:at]), path[at + 1]
        return lambda env: tensor(env).shape[dim]
    name, what, *more = path
    if what == "total_tiles":
        return lambda env: env[name].total_tiles(more[0])
    if what == "longest":
        return lambda env: env[name].structure.max_length(more[0])
    if what == "rows_of":
        return lambda env: env[name].structure.num_rows(more[0])
    return lambda env: getattr(env[name], what)
