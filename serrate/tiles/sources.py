"""Where the arguments of a device loop's program come from.

In: the variables that a loop uses, by name (`Env`) when it is traced, in order (`Items`) when it is called. Out: the tensors,
numbers and arrays of its program, found by paths: a name, then attributes. `("jt", "values")` are the values of the ragged tensor
`jt`, `("x", "shape", 1)` is a size of `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from serrate.errors import DeviceError
from serrate.frontend.kernel.machine import BlockSize
from serrate.ir.values import Tensor
from serrate.runtime.arguments import Arguments, BoundCall
from serrate.runtime.dispatch import Doubles, doubles_on
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tiles.trace import Trace

Path = tuple[Any, ...]
Env = Mapping[str, Any]
"""The variables that a loop uses, by name; items of containers have separate names."""
Items = Sequence[Any]
"""The variables that a program takes arguments from: tensors, ragged tensors, integers and floats, in the same order."""

CPU_DEVICE = torch.device("cpu")
"""Programs are built on this device, whatever torch's default is."""
NUMBERS = "(numbers)"
"""The tensor that holds all floats of a loop: they are arguments, so that new values need no new program. Not a name that users
can choose."""
CONTAINERS = frozenset({tuple, list, dict})
LEAVES = (torch.Tensor, JaggedTensor, float)
"""The values that a binding of a loop reads at every call."""


class Fixed(int):
    """A size that the user wants compiled in."""


def is_item(value: Any) -> bool:
    """Whether a variable may be an argument of a program; other integers are compiled in."""
    return isinstance(value, LEAVES) or (isinstance(value, int) and not isinstance(value, bool | Fixed | BlockSize))


def names_of(env: Env) -> tuple[str, ...]:
    """The names of the items."""
    return tuple([name for name, value in env.items() if is_item(value)])


# --- containers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Container:
    """A tuple, list or dictionary whose items are passed under their own names."""

    kind: type
    names: tuple[str, ...]
    keys: tuple[Any, ...]

    def of(self, made: dict[str, Any]) -> Any:
        """The container, filled with these items."""
        parts = [made[n] for n in self.names]
        return dict(zip(self.keys, parts, strict=True)) if self.kind is dict else self.kind(parts)


def flattened(given: dict[str, Any]) -> dict[str, Any]:
    """The variables of a loop, with the items of tuples, lists and dictionaries as separate entries.

    >>> flattened({"pair": (4, 5)})
    {'pair': Container(kind=<class 'tuple'>, names=('pair[0]', 'pair[1]'), keys=()), 'pair[0]': 4, 'pair[1]': 5}
    """
    while not CONTAINERS.isdisjoint(map(type, given.values())):
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


# --- paths ---------------------------------------------------------------------------------------------------------------


def device_of(items: Items) -> torch.device:
    """The device that a loop runs on: that of its tensors."""
    found = dict.fromkeys([x.device for x in items if isinstance(x, torch.Tensor | JaggedTensor)])
    if len(found) > 1:
        raise DeviceError(
            f"the tensors of a device loop must be on one device, got {', '.join(map(str, found))}: allocate results where the "
            "arguments are, as in torch.empty(..., device=x.device)"
        )
    return next(iter(found), CPU_DEVICE)


def is_longest(path: Path) -> bool:
    """Whether the number at a path is the length of the longest row of a level."""
    return path[1:] == ("max_length",) or (len(path) == 3 and path[1] == "longest")


class Places:
    """Where the items of a loop are found, by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: k for k, name in enumerate(names)}

    def tensor(self, path: Path) -> Callable[[Items], torch.Tensor]:
        """Finds the tensor that a path leads to."""
        place = self._places[path[0]]
        match path[1:]:
            case ():
                return itemgetter(place)
            case ("tile_list", size, k):
                return lambda items: items[place].tile_list(size)[k]
            case (what,):
                return lambda items: getattr(items[place], what)
        raise AssertionError(f"no tensor is at {path}")

    def number(self, path: Path) -> Callable[[Items], int]:
        """Finds the number that a path leads to."""
        if path[-2:-1] == ("shape",):
            tensor, dim = self.tensor(path[:-2]), path[-1]
            return lambda items: tensor(items).shape[dim]
        place = self._places[path[0]]
        match path[1:]:
            case ():
                return lambda items: int(items[place])
            case ("total_tiles", size):
                return lambda items: int(items[place].total_tiles(size))
            case ("longest", level):
                return lambda items: items[place].structure.max_length(level)
            case ("rows_of", level):
                return lambda items: items[place].structure.num_rows(level)
            case (what,):
                return lambda items: int(getattr(items[place], what))
        raise AssertionError(f"no number is at {path}")

    def known_longest(self, path: Path) -> Callable[[Items], int | None]:
        """The number at a path for which `is_longest` holds; None if reading it needs a host copy."""
        place, level = self._places[path[0]], -1 if path[1] == "max_length" else path[2]
        return lambda items: items[place].structure.known_max_length(level)

    def array(self, name: str, axis: int, what: str) -> Callable[[Items], torch.Tensor]:
        """Finds an array that describes rows."""
        place = self._places[name]
        return lambda items: array_of(items[place], axis, what)


def array_of(jt: JaggedTensor, axis: int, what: str) -> torch.Tensor:
    """An array that describes rows."""
    rows = jt.structure.rows[axis]
    if what == "where":
        found = rows.row_starts()
    elif what == "counts":
        found = rows.counts()
    else:
        found = rows.offsets[int(what.removeprefix("offsets"))]
    found = (found if found.dtype in (torch.int32, torch.int64) else found.long()).contiguous()
    # Without components, code may still ask for the length of the first.
    return found if found.numel() > 1 else torch.cat([found, found.new_zeros(2 - found.numel())])


class TensorSource(NamedTuple):
    """Where a tensor of a loop comes from."""

    path: Path
    now: Callable[[Items], torch.Tensor]
    warm: int | Doubles | None
    """Its position among the leaves of a warm call; None if it comes from a structure, and the binding holds it."""


LONGEST = (("max_length",), ("longest", 0), ("longest", -1))
"""Paths to the length of the longest row of a tensor with one ragged dim."""


class ArgumentSources:
    """Where each argument of a traced loop's program comes from; `env` is what it was traced for."""

    def __init__(self, trace: Trace, env: Env) -> None:
        self.names = names_of(env)
        self.lines = trace.lines
        """The user's lines of what the loop loads and stores."""
        self._paths: dict[str, Path] = {t.tensor.name: path for path, t in trace.tensors.items()}
        self._places = Places(self.names)
        self._numbers = [self._places.number(path) for path in trace.numbers]
        self._longest = [(k, self._places.known_longest(path)) for k, path in enumerate(trace.numbers) if is_longest(path)]
        self._arrays = [self._places.array(*described) for described in trace.described]
        self.arrays = dict(zip(trace.described.values(), self._arrays, strict=True))
        """How the arrays that describe rows are found."""
        self.numbers = dict(zip(trace.numbers.values(), self._numbers, strict=True))
        """How numbers are found."""
        self.longest = {
            array: [number for path, number in trace.numbers.items() if path[0] == name and path[1:] in LONGEST]
            for (name, axis, what), array in trace.described.items()
            if what == "offsets0" and (len(env[name].structure.rows), env[name].structure.levels) == (1, 1)
        }
        """The numbers that are the length of the longest row, by the boundaries of rows."""
        # Programs are specialised on which names are leaves.
        leaves = [name for name in self.names if isinstance(env[name], LEAVES)]
        self._leaves = {name: k for k, name in enumerate(leaves)}
        self._float_items = [k for k, name in enumerate(self.names) if isinstance(env[name], float)]
        self._floats = Doubles(tuple(k for name, k in self._leaves.items() if isinstance(env[name], float)))
        self.arguments = Arguments([a.name for a in trace.described.values()], trace.numbers.values())
        self._ragged = [k for k, name in enumerate(self.names) if isinstance(env[name], JaggedTensor)]
        self.device = device_of([env[name] for name in self.names])
        """The device that the loop runs on; programs are specialised on the devices of their tensors."""

    def call(self, items: Items) -> BoundCall:
        """The arrays and numbers of a call. The length of the longest row, if the host does not know it, is left unread."""
        arrays = tuple([array(items) for array in self._arrays])
        unread: dict[int, Callable[[], int]] = {
            k: partial(self._numbers[k], items) for k, known in self._longest if known(items) is None
        }
        if not unread:
            return BoundCall(arrays, tuple([number(items) for number in self._numbers]), self.device)
        numbers = tuple([0 if k in unread else number(items) for k, number in enumerate(self._numbers)])
        return BoundCall(arrays, numbers, self.device, unread=unread)

    def structures(self, items: Items) -> list[Structure]:
        """The structures of the ragged tensors of a call."""
        return [items[k].structure for k in self._ragged]

    def hints(self, items: Items) -> Hints:
        """The hints of the first ragged tensor of a call that has any."""
        return next((items[k].hints for k in self._ragged if items[k].hints is not NO_HINTS), NO_HINTS)

    def given(self, tensors: Iterable[Tensor]) -> list[TensorSource]:
        """Where tensors that the loop uses are found."""
        return [self._given(self._paths[tensor.name]) for tensor in tensors]

    def _doubles(self, items: Items) -> torch.Tensor:
        """The floats of a call, in memory of the device."""
        return doubles_on(self.device, [items[k] for k in self._float_items])

    def _given(self, path: Path) -> TensorSource:
        if path == (NUMBERS,):
            return TensorSource(path, self._doubles, self._floats)
        return TensorSource(path, self._places.tensor(path), self._leaves[path[0]] if path[1:] in ((), ("values",)) else None)
