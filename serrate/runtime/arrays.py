"""Derived arrays and structures, made once for each tensor of offsets and remembered with it.

In: arrays (with recipes) and the tensors that programs' arrays stand for. Out: integer tensors on the same device, and
validated structures. What is remembered goes away with the offsets tensor, and is made again if it was written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from serrate.ir.expr import Array, Environment, GroupMaximum, RunningSum, Symbol

T = TypeVar("T")

_memory: dict[int, tuple[weakref.ref[torch.Tensor], dict[Any, tuple[tuple[int, ...], Any]]]] = {}
"""By id of the offsets tensor: the tensor, and {key: (versions, what was made)}. Entries go when the tensor goes."""


def remembered(owners: tuple[torch.Tensor, ...], key: Any, make: Callable[[], T]) -> T:
    """What `make` gave for these tensors and this key before, unless one of them was written to since."""
    first = owners[0]
    place = id(first)
    entry = _memory.get(place)
    if entry is None or entry[0]() is not first:
        entry = _memory[place] = (weakref.ref(first, lambda gone: _forget(place, gone)), {})
    full = (key, *map(id, owners[1:]))
    version = tuple([t._version for t in owners])
    found = entry[1].get(full)
    if found is None or found[0] != version:
        found = entry[1][full] = (version, make())
    made: T = found[1]
    return made


def _forget(place: int, gone: weakref.ref[torch.Tensor]) -> None:
    entry = _memory.get(place)
    if entry is not None and entry[0] is gone:
        del _memory[place]


def derive(
    array: Array, tensors: Mapping[str, torch.Tensor], symbols: Mapping[Symbol, int], device: torch.device
) -> torch.Tensor:
    """The elements of an array: an argument's own, a constant's, or what its recipe makes of others."""
    if array.recipe is None and array.data is None:
        return tensors[array.name]
    if array.recipe is None:
        return torch.tensor(array.data, dtype=torch.int64, device=device)
    recipe = array.recipe
    owners = tuple(tensors[a.name] for a in sorted(_sources(array), key=lambda a: a.name))
    count = int(recipe.count.evaluate(Environment(symbols)))
    return remembered(owners, (array.name, count), lambda: _make(recipe, count, tensors, symbols, device))


def _sources(array: Array) -> set[Array]:
    """The arguments that a derived array is made from."""
    if array.recipe is None:
        return {array}
    return {source for a in array.recipe.term.arrays for source in _sources(a)}


def _make(
    recipe: RunningSum | GroupMaximum,
    count: int,
    tensors: Mapping[str, torch.Tensor],
    symbols: Mapping[Symbol, int],
    device: torch.device,
) -> torch.Tensor:
    def element(array: Array, index: Any) -> Any:
        return derive(array, tensors, symbols, device)[index].long()

    positions = torch.arange(count, device=device)
    terms = recipe.term.evaluate(Environment({**symbols, recipe.coordinate: positions}, element))
    terms = torch.as_tensor(terms, device=device).expand(count)
    if isinstance(recipe, RunningSum):
        total = torch.zeros(count + 1, dtype=torch.int64, device=device)
        torch.cumsum(terms, 0, out=total[1:])
        return total
    groups = -(-count // recipe.size)
    padded = torch.zeros(groups * recipe.size, dtype=torch.int64, device=device)
    padded[:count] = terms
    return padded.reshape(groups, recipe.size).amax(1) if groups else padded
