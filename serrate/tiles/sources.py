"""Where the arguments of a device loop's program come from.

In: the variables that a loop uses (`Env`). Out: the tensors, numbers and arrays of its program, found by paths: a name, then
attributes. `("jt", "values")` are the values of the ragged tensor `jt`, `("x", "shape", 1)` is a size of `x`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from serrate.errors import DeviceError
from serrate.ir.values import Tensor
from serrate.runtime.bind import Arguments, BoundCall
from serrate.runtime.dispatch import Doubles, Source
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
CONTAINERS = (tuple, list, dict)


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


def tensor_at(path: Path, env: Env) -> torch.Tensor:
    """The tensor that a path leads to."""
    name, *rest = path
    found: torch.Tensor
    if name == NUMBERS:
        return torch.tensor([x for x in env.values() if isinstance(x, float)], dtype=torch.float64, device=device_of(env))
    if not rest:
        found = env[name]
    elif rest[0] == "tile_list":
        found = env[name].tile_list(rest[1])[rest[2]]
    else:
        found = getattr(env[name], rest[0])
    return found


def number_at(path: Path, env: Env) -> int:
    """The number that a path leads to."""
    if len(path) == 1:
        return int(env[path[0]])
    if path[-2] == "shape":
        return tensor_at(path[:-2], env).shape[path[-1]]
    name, what, *more = path
    if what == "total_tiles":
        return int(env[name].total_tiles(more[0]))
    if what == "longest":
        return int(env[name].structure.max_length(more[0]))
    if what == "rows_of":
        return int(env[name].structure.num_rows(more[0]))
    return int(getattr(env[name], what))


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


class ArgumentSources:
    """Where each argument of a traced loop's program comes from."""

    def __init__(self, trace: Trace) -> None:
        self._tensors: dict[str, Path] = {t.tensor.name: path for path, t in trace.tensors.items()}
        self._numbers: tuple[Path, ...] = tuple(trace.numbers)
        self._arrays = tuple(trace.described)
        self.arguments = Arguments([a.name for a in trace.described.values()], trace.numbers.values())

    def call(self, env: Env) -> BoundCall:
        """The arrays and numbers of a call."""
        arrays = tuple(array_of(env[jt], axis, what) for jt, axis, what in self._arrays)
        return BoundCall(arrays, tuple(number_at(path, env) for path in self._numbers), device_of(env))

    def path(self, tensor: Tensor) -> Path:
        """The path to a tensor that the loop uses."""
        return self._tensors[tensor.name]

    def tensor(self, tensor: Tensor, env: Env) -> torch.Tensor:
        """A tensor that the loop uses."""
        return tensor_at(self.path(tensor), env)

    def source(self, tensor: Tensor, env: Env, places: Mapping[str, int]) -> Source:
        """Where a warm call finds a tensor, given the places of names among its leaves; the binding holds what only a structure
        tells."""
        path = self.path(tensor)
        if path == (NUMBERS,):
            return Doubles(tuple(places[name] for name, x in env.items() if isinstance(x, float)))
        return places[path[0]] if path[1:] in ((), ("values",)) else tensor_at(path, env)
