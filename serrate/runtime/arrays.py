"""Derived arrays and structures, made once for each tensor of offsets and remembered with it.

In: arrays (with recipes) and the tensors that programs' arrays stand for. Out: integer tensors on the same device, and
validated structures. What is remembered is bounded in number, and made again if an offsets tensor was written to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from serrate.ir.expr import Array, Environment, Owners, RunningSum, Symbol

T = TypeVar("T")

TENSORS = 32
"""How many offsets tensors are remembered; the least recently used goes first."""
ENTRIES = 64
"""How many things are remembered for one of them."""


@dataclass
class _Entry:
    versions: tuple[int, ...]
    owners: tuple[torch.Tensor, ...]
    made: Any


_memory: OrderedDict[int, dict[Any, _Entry]] = OrderedDict()
"""By id of the first offsets tensor. An entry holds its tensors, so that no id is used again while it is here."""


def remembered(owners: tuple[torch.Tensor, ...], key: Any, make: Callable[[], T]) -> T:
    """What `make` gave for these tensors and this key before, unless one of them was written to since."""
    place = id(owners[0])
    entries = _memory.get(place)
    if entries is None:
        entries = _memory[place] = {}
        while len(_memory) > TENSORS:
            _memory.popitem(last=False)
    else:
        _memory.move_to_end(place)
    full = (key, *map(id, owners[1:]))
    versions = tuple([t._version for t in owners])
    found = entries.get(full)
    if found is None or found.versions != versions:
        found = _Entry(versions, owners, make())
        while len(entries) >= ENTRIES:
            del entries[next(iter(entries))]
        entries[full] = found
    made: T = found.made
    return made


def derive(
    array: Array, tensors: Mapping[str, torch.Tensor], symbols: Mapping[Symbol, int], device: torch.device
) -> torch.Tensor:
    """The elements of an array: an argument's own, a constant's, or what its recipe makes of others."""
    if array.recipe is None and array.data is None:
        return tensors[array.name]
    if array.recipe is None:
        return torch.tensor(array.data, dtype=torch.int64, device=device)
    owners = tuple(tensors[a.name] for a in sorted(array.sources, key=lambda a: a.name))
    numbers = tuple(symbols[s] for s in sorted(_symbols(array), key=str))
    return remembered(owners, (array.name, numbers), lambda: _make(array, tensors, symbols, device))


def _symbols(array: Array) -> set[Symbol]:
    recipe = array.recipe
    if recipe is None:
        return set()
    if isinstance(recipe, Owners):
        return set(recipe.count.symbols | recipe.size.symbols) | _symbols(recipe.offsets)
    inner = {s for a in recipe.term.arrays for s in _symbols(a)}
    return (set(recipe.term.symbols) | set(recipe.count.symbols) | inner) - {recipe.coordinate}


def _make(array: Array, tensors: Mapping[str, torch.Tensor], symbols: Mapping[Symbol, int], device: torch.device) -> torch.Tensor:
    recipe = array.recipe
    assert recipe is not None
    count = int(recipe.count.evaluate(Environment(symbols)))
    if isinstance(recipe, Owners):
        offsets = derive(recipe.offsets, tensors, symbols, device)[1 : count + 1].contiguous()
        positions = torch.arange(int(recipe.size.evaluate(Environment(symbols))), dtype=offsets.dtype, device=device)
        return torch.searchsorted(offsets, positions, right=True).clamp_(max=max(count - 1, 0))

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
