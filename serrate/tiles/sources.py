"""Where the arguments of a device loop's program come from.

In: the variables that a loop uses (`Env`). Out: the tensors, numbers and arrays of its program, found by paths: a name, then
attributes. `("jt", "values")` are the values of the ragged tensor `jt`, `("x", "shape", 1)` is a size of `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from serrate.errors import DeviceError
from serrate.ir.values import Tensor
from serrate.runtime.bind import Arguments, BoundCall
from serrate.runtime.dispatch import Doubles
from serrate.tensor import JaggedTensor
from serrate.tiles.trace import Trace

Path = tuple[Any, ...]
Env = Mapping[str, Any]
"""The variables that a loop uses, by name."""

CPU_DEVICE = torch.device("cpu")
"""Programs are built on this device, whatever torch's default is."""
NUMBERS = "(numbers)"
"""The tensor that holds all the floats a loop uses: they are given to the program, so that others need no other program.
No name of the user's is this one."""
CONTAINERS = frozenset({tuple, list, dict})
LEAVES = (torch.Tensor, JaggedTensor, float)
"""What a binding of a loop reads at every call."""


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


def device_of(env: Env) -> torch.device:
    """The device that a loop runs on: that of its tensors."""
    found = dict.fromkeys(x.device for x in env.values() if isinstance(x, torch.Tensor | JaggedTensor))
    if len(found) > 1:
        raise DeviceError(
            f"the tensors of a device loop must be on one device, got {', '.join(map(str, found))}: allocate results where the "
            "arguments are, as in torch.empty(..., device=x.device)"
        )
    return next(iter(found), CPU_DEVICE)


def _floats(env: Env) -> list[float]:
    return [x for x in env.values() if isinstance(x, float)]


def tensor_at(path: Path) -> Callable[[Env], torch.Tensor]:
    """Finds the tensor that a path leads to."""
    match path:
        case (name,) if name == NUMBERS:
            return lambda env: torch.tensor(_floats(env), dtype=torch.float64, device=device_of(env))
        case (name,):
            return itemgetter(name)
        case (name, "tile_list", size, k):
            return lambda env: env[name].tile_list(size)[k]
        case (name, what):
            return lambda env: getattr(env[name], what)
    raise AssertionError(f"no tensor is at {path}")


def number_at(path: Path) -> Callable[[Env], int]:
    """Finds the number that a path leads to."""
    match path:
        case (name,):
            return lambda env: int(env[name])
        case (*at, "shape", k):
            tensor = tensor_at(tuple(at))
            return lambda env: tensor(env).shape[k]
        case (name, "total_tiles", size):
            return lambda env: int(env[name].total_tiles(size))
        case (name, "longest", level):
            return lambda env: int(env[name].structure.max_length(level))
        case (name, "rows_of", level):
            return lambda env: int(env[name].structure.num_rows(level))
        case (name, what):
            return lambda env: int(getattr(env[name], what))
    raise AssertionError(f"no number is at {path}")


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


class GivenTensor(NamedTuple):
    """Where a tensor that a loop uses is found."""

    path: Path
    now: Callable[[Env], torch.Tensor]
    warm: int | Doubles | None
    """Where a warm call finds it among its leaves; None where only a structure tells it, so that a binding holds it."""


class ArgumentSources:
    """Where each argument of a traced loop's program comes from; `env` is what it was traced for."""

    def __init__(self, trace: Trace, env: Env) -> None:
        self._paths: dict[str, Path] = {t.tensor.name: path for path, t in trace.tensors.items()}
        self._numbers = [number_at(path) for path in trace.numbers]
        leaves = [name for name, x in env.items() if isinstance(x, LEAVES)]
        # Which names stand for leaves is part of what a program is made for.
        self._places = {name: k for k, name in enumerate(leaves)}
        self._floats = Doubles(tuple(k for name, k in self._places.items() if isinstance(env[name], float)))
        self._arrays = tuple(trace.described)
        self.arguments = Arguments([a.name for a in trace.described.values()], trace.numbers.values())

    def call(self, env: Env) -> BoundCall:
        """The arrays and numbers of a call."""
        arrays = tuple(array_of(env[jt], axis, what) for jt, axis, what in self._arrays)
        return BoundCall(arrays, tuple([number(env) for number in self._numbers]), device_of(env))

    def given(self, tensors: Iterable[Tensor]) -> list[GivenTensor]:
        """Where tensors that the loop uses are found."""
        return [self._given(self._paths[tensor.name]) for tensor in tensors]

    def _given(self, path: Path) -> GivenTensor:
        if path == (NUMBERS,):
            return GivenTensor(path, tensor_at(path), self._floats)
        return GivenTensor(path, tensor_at(path), self._places[path[0]] if path[1:] in ((), ("values",)) else None)
