"""Derived arrays and structures, computed once per offsets tensor and cached with it.

In: arrays with recipes, and the tensors that they derive from. Out: integer tensors on the same device, and validated
structures. The cache is bounded, and an entry is dropped if its offsets tensor was written to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from serrate.ir.expr import Array, Environment, Expr, Symbol
from serrate.ir.recipes import GroupMaximum, InverseOrder, Joined, Largest, Order, Owners, RunningSum
from serrate.runtime.locks import Lock
from serrate.tensor.torch_private import is_recorded, versions

T = TypeVar("T")

TENSORS = 32
"""The most offsets tensors in the cache; the least recently used is dropped first."""
ENTRIES = 64
"""The most cached results per tensor."""


@dataclass
class _DerivedArray:
    versions: list[int]
    owners: tuple[torch.Tensor, ...]
    made: Any


_memory: OrderedDict[int, dict[Any, _DerivedArray]] = OrderedDict()
"""By id of the first offsets tensor. An entry keeps its tensors alive, so that the id is not reused."""


_NOTHING: dict[Any, _DerivedArray] = {}
_lock = Lock()


def remembered(owners: tuple[torch.Tensor, ...], key: Any, make: Callable[[], T]) -> T:
    """The cached result of `make` for these tensors and this key, unless one of them was written to since.

    Nothing is cached in a call that a CUDA graph records: each replay derives arrays from the offsets that it finds.
    """
    if is_recorded(owners[0]):
        return make()
    place, full = id(owners[0]), key if len(owners) == 1 else (key, *map(id, owners[1:]))
    current = versions(owners)
    with _lock.own:
        found = _memory.get(place, _NOTHING).get(full)
        if found is not None and found.versions == current:
            _memory.move_to_end(place)
            made: T = found.made
            return made
    # Not under the lock: it may take long, and may use the cache itself.
    made = make()
    with _lock.own:
        entries = _memory.setdefault(place, {})
        _memory.move_to_end(place)
        while len(_memory) > TENSORS:
            _memory.popitem(last=False)
        entries.pop(full, None)
        while len(entries) >= ENTRIES:
            del entries[next(iter(entries))]
        entries[full] = _DerivedArray(current, owners, made)
    return made


Remember = Callable[[tuple[torch.Tensor, ...], Any, Callable[[], Any]], Any]


def derive(
    array: Array,
    tensors: Mapping[str, torch.Tensor],
    symbols: Mapping[Symbol, int],
    device: torch.device,
    remember: Remember = remembered,
) -> torch.Tensor:
    """The elements of an array: those of an argument, of a constant, or computed from other arrays by its recipe."""
    if array.recipe is None and array.data is None:
        # The tensor object itself if possible: the cache is keyed by identity.
        tensor = tensors[array.name]
        return tensor if tensor.ndim == 1 else tensor.reshape(-1)
    if array.recipe is None:
        return torch.tensor(array.data, dtype=torch.int64, device=device)
    owners = tuple(tensors[a.name] for a in sorted(array.sources, key=lambda a: a.name))
    numbers = tuple(symbols[s] for s in sorted(symbols_of(array), key=str))
    if not owners:
        return _make(array, tensors, symbols, device, remember)
    # Keyed by the whole array: sums over the first rows and over all rows have the same name.
    made: torch.Tensor = remember(owners, (array, numbers), lambda: _make(array, tensors, symbols, device, remember))
    return made


def _on_device(x: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """A number as a tensor: filled in on the device, because a copy from the host would wait."""
    return x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=torch.int64, device=device)


def symbols_of(array: Array) -> frozenset[Symbol]:
    """The symbols that the elements of an array depend on."""
    if array.recipe is None:
        return frozenset()
    return array.recipe.symbols | {s for a in array.recipe.arrays for s in symbols_of(a)}


def _make(
    array: Array,
    tensors: Mapping[str, torch.Tensor],
    symbols: Mapping[Symbol, int],
    device: torch.device,
    remember: Remember,
) -> torch.Tensor:
    recipe = array.recipe
    assert recipe is not None

    def element(array: Array, index: Any) -> Any:
        data, places = derive(array, tensors, symbols, device, remember), _on_device(index, device)
        if not len(data):
            return torch.zeros_like(places)
        # A row selected from an empty batch has no length; any element will do.
        places = places.clamp(0, len(data) - 1)
        # Unlike `data[places]`, this wakes no threads for a few elements.
        return data.index_select(0, places.reshape(-1)).view(places.shape).long()

    def owner(array: Array, count: Any, position: Any, first: Any) -> Any:
        assert isinstance(first, int) and first == 0
        ends = derive(array, tensors, symbols, device, remember)[1 : int(count) + 1].contiguous()
        return torch.searchsorted(ends, _on_device(position, device).to(ends.dtype), right=True)

    numbers = Environment(symbols, element, owner)

    def evaluated(term: Expr, coordinate: Symbol, count: int) -> torch.Tensor:
        positions = torch.arange(count, device=device)
        terms = term.evaluate(Environment({**symbols, coordinate: positions}, element, owner))
        return _on_device(terms, device).expand(count)

    if isinstance(recipe, Owners):
        count = int(recipe.count.evaluate(numbers))
        offsets = derive(recipe.offsets, tensors, symbols, device, remember)[1 : count + 1].contiguous()
        positions = torch.arange(int(recipe.size.evaluate(numbers)), dtype=offsets.dtype, device=device)
        return torch.searchsorted(offsets, positions, right=True).clamp_(max=max(count - 1, 0))
    if isinstance(recipe, GroupMaximum):
        count = int(recipe.count.evaluate(numbers))
        groups = -(-count // recipe.size)
        padded = torch.zeros(groups * recipe.size, dtype=torch.int64, device=device)
        padded[:count] = evaluated(recipe.term, recipe.coordinate, count)
        return padded.reshape(groups, recipe.size).amax(1) if groups else padded
    if isinstance(recipe, Order):
        count = int(recipe.count.evaluate(numbers))
        runs = -(-count // recipe.size)
        most = torch.iinfo(torch.int32).max
        padded = torch.full((runs * recipe.size,), most, dtype=torch.int32, device=device)
        padded[:count] = evaluated(recipe.term, recipe.coordinate, count).clamp(max=most - 1)
        order = padded.view(runs, recipe.size).sort(dim=1, stable=True).indices
        return (order + torch.arange(runs, device=device)[:, None] * recipe.size).view(-1)[:count].contiguous()
    if isinstance(recipe, InverseOrder):
        order = derive(recipe.order, tensors, symbols, device, remember)
        return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    if isinstance(recipe, Largest):
        terms = evaluated(recipe.term, recipe.coordinate, int(recipe.count.evaluate(numbers)))
        return terms.amax(0, keepdim=True) if len(terms) else torch.zeros(1, dtype=torch.int64, device=device)
    parts = recipe.terms if isinstance(recipe, Joined) else (recipe.term,)
    counts = recipe.counts if isinstance(recipe, Joined) else (recipe.count,)
    pairs = zip(parts, counts, strict=True)
    terms = torch.cat([evaluated(term, recipe.coordinate, int(count.evaluate(numbers))) for term, count in pairs])
    total = torch.zeros(len(terms) + 1, dtype=torch.int64, device=device)
    if isinstance(recipe, RunningSum) and recipe.most is not None:
        most = int(recipe.most.evaluate(numbers))
        torch.cumsum(terms.clamp(0, most), 0, out=total[1:])
        return total.clamp_(max=most)
    torch.cumsum(terms, 0, out=total[1:])
    return total
