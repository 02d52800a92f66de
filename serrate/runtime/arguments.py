"""The arguments of a call: the values of a program's symbols, extents and arrays.

In: named tensors and numbers. Out: a `BoundCall`, and functions of it. `Arguments` serves all programs, including those of
kernels; `bind.py` adds the declared inputs of a fusion, and their checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from serrate.ir.expr import Array, Environment, Expr, Symbol
from serrate.ir.size_functions import numbers_function, shape_function, size_function
from serrate.runtime.arrays import derive, remembered
from serrate.runtime.memory import InMemory
from serrate.tensor import Structure
from serrate.tensor.checks.validate import Validate
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.rows import Rows
from serrate.tensor.sync import host_copy, on_host
from serrate.tensor.torch_private import stream_of

if TYPE_CHECKING:
    from serrate.runtime.derivation import Derivation

T = TypeVar("T")


class KnownRows(NamedTuple):
    """The rows of a call's ragged arguments that were checked when they were constructed, and are not checked again."""

    levels: Mapping[int, tuple[Rows, int]]
    """By the argument that holds the offsets of a level: the rows, and the number of the level."""
    structures: Mapping[tuple[object, ...], Structure]
    """By `structure_key`: the structures in canonical order. Results over the same rows have them."""


def structure_key(dims: tuple[int, ...], depths: tuple[int, ...], arguments: tuple[int, ...]) -> tuple[object, ...]:
    """The key of a structure: the dims that are partitioned, the number of levels of each, the arguments that hold offsets."""
    return (dims, depths, arguments)


NOTHING_KNOWN = KnownRows({}, {})


@dataclass(slots=True, eq=False)
class BoundCall:
    """One call of a program: its arguments, and the values of the fusion's symbols in the order of `Binder.symbols`."""

    args: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    device: torch.device
    known: KnownRows = NOTHING_KNOWN
    computed: dict[str, torch.Tensor] | None = None
    """The results of earlier stages, by name; None if there is one stage."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What was derived in this call. Computed tensors are new in every call, and so is everything derived from them."""
    hints: Hints = NO_HINTS
    """Those of the first ragged argument."""
    checked: dict[int, torch.Tensor] = field(default_factory=dict)
    """Computed offsets whose check has begun, by id."""
    unchecked: list[Callable[[BoundCall], bool]] | None = None
    """Checks that wait for something to be computed; None before the first stage."""
    sizes: dict[Any, Any] | None = None
    """What earlier calls with the same outline left about their sizes; None if nobody has looked for such calls."""
    unread: dict[int, Callable[[], int]] | None = None
    """By place, numbers whose reading takes a host copy of lengths: read only if a program needs them, and 0 until then."""

    def read(self, places: Iterable[int]) -> None:
        """Reads those of the unread numbers that are at these places."""
        unread = self.unread or {}
        found = {place: unread.pop(place)() for place in places if place in unread}
        if found:
            self.numbers = tuple([found.get(place, number) for place, number in enumerate(self.numbers)])

    def validate(self, offsets: Iterable[torch.Tensor]) -> Validate:
        """The `validate=` of a structure with these offsets: False if their check has begun."""
        return False if all(id(each) in self.checked for each in offsets) else None

    def remember(self, owners: tuple[torch.Tensor, ...], key: Any, make: Callable[[], T]) -> T:
        """What `make` returns for these tensors: cached with them, or only for this call if one of them was computed."""
        if not self.computed:
            return remembered(owners, key, make)
        full = (key, *map(id, owners))
        if full not in self.memo:
            ours = any(owner is tensor for owner in owners for tensor in self.computed.values())
            self.memo[full] = make() if ours else remembered(owners, key, make)
        made: T = self.memo[full]
        return made


Number = Callable[[BoundCall], int]
ArraysReader = Callable[[BoundCall], tuple[InMemory, ...]]
"""The arrays of a program, as a function of a call."""


class DeviceArrays:
    """The arrays of a program on a GPU, as a function of a call. Those that a GPU derives are derived at once."""

    def __init__(
        self,
        derivation: Derivation | None,
        sources: Sequence[tuple[int | None, str]],
        arrays: Sequence[tuple[int | None, Callable[[BoundCall], torch.Tensor]]],
    ) -> None:
        """`sources` are the tensors that arrays are derived from, by argument and name. Each of the arrays is one of those that
        are derived, by number, or is read from a call."""
        self._derivation, self._sources, self._arrays = derivation, sources, arrays

    def __call__(self, call: BoundCall) -> tuple[InMemory, ...]:
        if self._derivation is None:
            return tuple([read(call) for _, read in self._arrays])
        computed = call.computed or {}
        given = tuple([computed[name] if place is None else call.args[place] for place, name in self._sources])
        numbers = self._derivation.numbers(call.numbers)
        derive = functools.partial(self._derivation, given, numbers, call.device)
        # A call on another stream would not wait for these arrays.
        key = (self._derivation.text, numbers, stream_of(call.device))
        made = call.remember(given, key, derive) if given else derive()
        return tuple([read(call) if k is None else made[k] for k, read in self._arrays])


class Arguments:
    """The named tensors and the symbols of a program: what its extents and arrays are evaluated from."""

    def __init__(self, names: Sequence[str], symbols: Iterable[Symbol]) -> None:
        self.names = tuple(names)
        self.symbols = {symbol: k for k, symbol in enumerate(symbols)}
        self._place = {name: k for k, name in enumerate(self.names)}
        self.offsets = tuple(range(len(self.names)))
        """Which of the tensors describe rows."""
        self._sizes: dict[Expr, Callable[[Sequence[int]], int]] = {}

    def size(self, expr: Expr) -> Callable[[Sequence[int]], int]:
        """An extent without arrays, as a function of a call's numbers."""
        if expr not in self._sizes:
            self._sizes[expr] = size_function(expr, tuple(self.symbols))
        return self._sizes[expr]

    def shape_reader(self, sizes: Sequence[Expr]) -> Callable[[BoundCall], tuple[int, ...]]:
        """Sizes of a tensor's dims, at least 0, as a function of a call."""
        if any(size.arrays for size in sizes):
            readers = [self.number_reader(size) for size in sizes]
            return lambda call: tuple([max(0, read(call)) for read in readers])
        shape = shape_function(sizes, tuple(self.symbols))
        return lambda call: shape(call.numbers)

    def numbers_reader(self, exprs: Sequence[Expr]) -> Callable[[BoundCall], tuple[int, ...]]:
        """Several extents, as a function of a call."""
        if any(expr.arrays for expr in exprs):
            readers = [self.number_reader(expr) for expr in exprs]
            return lambda call: tuple([read(call) for read in readers])
        numbers = numbers_function(exprs, tuple(self.symbols))
        return lambda call: numbers(call.numbers)

    def number_reader(self, expr: Expr) -> Callable[[BoundCall], int]:
        """An extent, as a function of a call."""
        if isinstance(expr, Symbol) and (place := self.symbols.get(expr)) is not None:
            return lambda call: call.numbers[place]
        if expr.arrays:
            return lambda call: self.extent(call, expr)
        size = self.size(expr)
        return lambda call: size(call.numbers)

    def arrays_reader(self, arrays: Sequence[Array], *, together: bool) -> ArraysReader:
        """All arrays of a program, as a function of a call; `together`, those that a GPU derives are derived at once."""
        readers = [self.array_reader(array) for array in arrays]
        if not together:
            return lambda call: tuple([read(call) for read in readers])
        from serrate.runtime.derivation import Derivation, can_derive  # triton is optional: only its backend may import it

        places = [k for k, array in enumerate(arrays) if can_derive(array)]
        derivation = Derivation([arrays[k] for k in places], tuple(self.symbols)) if places else None
        names = [] if derivation is None else [(self._place.get(name), name) for name in derivation.names]
        order = {} if derivation is None else dict(zip(places, derivation.order, strict=True))
        return DeviceArrays(derivation, names, [(order.get(k), each) for k, each in enumerate(readers)])

    def place_of(self, array: Array) -> int | None:
        """The argument whose elements an array has; None for an array that is constant, derived or computed."""
        return self._place.get(array.name) if array.recipe is None and array.data is None else None

    def array_reader(self, array: Array) -> Callable[[BoundCall], torch.Tensor]:
        """The elements of one array, as a function of a call. There are at least two: even without components, programs may
        read the length of the first."""
        place = self.place_of(array)
        longest = self._longest_reader(array)

        def read(call: BoundCall) -> torch.Tensor:
            if longest is not None and (known := longest(call)) is not None:
                return torch.tensor((known, 0), device="cpu")
            found = self.array(call, array) if place is None else call.args[place]
            if found.ndim != 1:
                found = found.reshape(-1)
            return found if found.numel() > 1 else torch.cat([found, found.new_zeros(2 - found.numel())])

        return read

    def extent(self, call: BoundCall, expr: Expr) -> int:
        """An extent as a number. One that depends on lengths is read from them, on the host."""
        if not expr.arrays:
            return self.size(expr)(call.numbers)
        symbols = dict(zip(self.symbols, call.numbers, strict=True))
        why = f"the extent {expr}"

        def read(array: Array, k: int) -> int:
            known = self._longest_of(call, array, why)
            return int(host_copy(self.array(call, array)[k], why)) if known is None else known

        return int(expr.evaluate(Environment(symbols, read)))

    def _longest_of(self, call: BoundCall, array: Array, why: str) -> int | None:
        """The value of an array that holds the longest length, if it is known without a host copy."""
        return None

    def _longest_reader(self, array: Array) -> Callable[[BoundCall], int | None] | None:
        """If an array holds the longest length: that length, as a function of a call, None in calls where it must be derived."""
        return None

    def array(self, call: BoundCall, array: Array) -> torch.Tensor:
        """The elements of an array in a call."""
        if array.recipe is None and array.data is None:
            place, computed = self._place.get(array.name), call.computed
            tensor = call.args[place] if place is not None else computed[array.name] if computed else None
            assert tensor is not None, f"{array.name} is neither an argument nor computed"
            # The same tensor object if possible: caches identify tensors by identity.
            return tensor if tensor.ndim == 1 else tensor.reshape(-1)
        named = dict(zip(self.names, call.args, strict=True)) | (call.computed or {})
        symbols = dict(zip(self.symbols, call.numbers, strict=True))
        return derive(array, named, symbols, call.device, call.remember)

    def ready(self, call: BoundCall, *arrays: Array) -> bool:
        """Whether everything that arrays are derived from has been computed."""
        computed = call.computed or {}
        return all(source.name in self._place or source.name in computed for array in arrays for source in array.sources)


def known_total(rows: Rows, level: int) -> float | None:
    """The total length of a level, if nothing needs to be copied to the host to say it."""
    return rows.num_rows(level + 1) if level < rows.depth - 1 else rows.noted("total", level)


def known_longest(rows: Rows, level: int) -> int | None:
    """The longest length of a level, if nothing needs to be copied to the host to say it."""
    found = rows.noted("max", level)
    if found is None and on_host(rows.offsets[level]):
        return rows.max_length(level, "max_length")
    return None if found is None else int(found)


def known_variation(rows: Rows, level: int) -> float | None:
    """The standard deviation of a level's lengths over their mean, if nothing needs to be copied to the host to say it."""
    if rows.known("variance", level) is None and not on_host(rows.offsets[level]):
        return None
    why = "the variance of lengths"
    mean = rows.total(level, why) / max(rows.num_rows(level), 1)
    return float(rows.variance(level, why) ** 0.5 / mean) if mean else 0.0


def known_key(size: int) -> tuple[object, ...]:
    """What the structure of offsets over `size` positions is remembered under: it was checked, and is not checked again."""
    return ("structure", size)
