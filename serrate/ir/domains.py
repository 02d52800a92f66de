"""Iteration domains: what a loop or a tensor dim runs over.

In: extents (ints or index expressions), and for ragged domains lengths as a function of their component's coordinate.
Out: immutable `IterDomain` and `RaggedIterDomain` objects. Each object is one index of its own: two domains of extent 64
are equal by structure (`==`), yet they are different indices (`uid`). Transforms between domains are in `transforms`.

A ragged extent is a function of a *coordinate*, not of a neighbouring loop. In ten lines, `RaggedIterDomain` means:

    class Ragged:
        component: the domain whose index picks the row
        def length(c): how many elements row c has        # an expression in COORDINATE
        def start(c):  where row c begins in the domain that was partitioned (None: rows have no common place)
        extent = sum(length(c) for c in range(component.extent))       # the total, never the longest row
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from serrate.errors import DomainError
from serrate.ir.expr import Environment, Expr, Symbol, as_expr, const, symbol

if TYPE_CHECKING:
    from serrate.ir.transforms import Transform

COORDINATE: Symbol = symbol("@c")
"""Stands for the component's index in the lengths and starts of ragged domains."""

_uids = itertools.count()

NestedInts = int | tuple["NestedInts", ...]


class IterType(Enum):
    """What a dim is in its tensor."""

    ITERATION = "i"
    REDUCTION = "r"
    BROADCAST = "b"


class ParallelType(Enum):
    """How a domain's positions are spread over the machine."""

    SERIAL = "serial"
    GRID = "grid"
    LANES = "lanes"
    VECTORIZE = "vectorize"
    UNROLL = "unroll"
    BLOCK_X = "block_x"
    BLOCK_Y = "block_y"
    BLOCK_Z = "block_z"
    THREAD_X = "thread_x"
    THREAD_Y = "thread_y"
    THREAD_Z = "thread_z"
    MESH = "mesh"


@dataclass(frozen=True, eq=False)
class IterDomain:
    """Positions `0 .. extent-1`.

    >>> IterDomain(325).extent
    325
    """

    _extent: Expr | int
    iter_type: IterType = IterType.ITERATION
    parallel: ParallelType = ParallelType.SERIAL
    name: str = ""
    pairing: Hashable = None
    """Identity of the structure whose components this domain counts (see `transforms.partition`)."""
    definition: Transform | None = field(default=None, repr=False)
    bound: Expr | None = field(default=None, repr=False)
    """Not less than the extent, and known without looking at lengths; None where the extent itself is."""
    uid: int = field(default_factory=lambda: next(_uids))
    derived: dict[Hashable, tuple[IterDomain, ...]] = field(default_factory=dict, repr=False)
    """What transforms have made of this domain, so that the same transform gives the same domains again."""

    def __post_init__(self) -> None:
        try:
            value = as_expr(self._extent)
        except TypeError:
            raise DomainError(f"IterDomain: an extent must be an integer or an expression, got {self._extent!r}") from None
        if value.value is not None and value.value < 0:
            raise DomainError(f"IterDomain: an extent must not be negative, got {value}")
        object.__setattr__(self, "_extent", value)
        if not self.name:
            object.__setattr__(self, "name", f"i{self.uid}")

    @property
    def extent(self) -> Expr | int:
        """The number of positions: an int where known, else an expression."""
        return self.extent_expr if self.extent_expr.value is None else self.extent_expr.value

    @property
    def extent_expr(self) -> Expr:
        """The number of positions as an expression."""
        return as_expr(self._extent)

    @property
    def host_bound(self) -> Expr:
        """A bound of the extent that needs no lengths on the host."""
        return self.extent_expr if self.bound is None else self.bound

    @property
    def is_ragged(self) -> bool:
        return False

    def parallelize(self, parallel: ParallelType) -> IterDomain:
        """The same domain, spread over the machine in another way."""
        return replace(self, parallel=parallel)

    def _structure(self) -> tuple[object, ...]:
        return (type(self), self.extent_expr, self.iter_type, self.parallel)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IterDomain) and self._structure() == other._structure()

    def __hash__(self) -> int:
        return hash((type(self), self.iter_type, self.parallel))

    def __str__(self) -> str:
        mark = "" if self.parallel is ParallelType.SERIAL else f".{self.parallel.value}"
        return f"{self.iter_type.value}.{self.name}{{{self.extent_expr}}}{mark}"


@dataclass(frozen=True, eq=False)
class RaggedIterDomain(IterDomain):
    """Positions `0 .. length(c)-1`, where `c` is the index of `component`; `extent` is the sum over all components."""

    component: IterDomain = None  # type: ignore[assignment]  # the base class's defaults force one here
    length: Expr = field(default_factory=lambda: const(0))
    start: Expr | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.component, IterDomain):
            raise DomainError(f"RaggedIterDomain: needs the domain of its components, got {self.component!r}")

    @property
    def is_ragged(self) -> bool:
        return True

    def length_of(self, component: Expr | int) -> Expr:
        """The length of one component, as an expression of its index."""
        return self.length.substitute({COORDINATE: as_expr(component)})

    def start_of(self, component: Expr | int) -> Expr:
        """Where one component begins in the domain that was partitioned."""
        if self.start is None:
            raise DomainError(f"{self}: its rows have no place in a common domain; combine it with {self.component} first")
        return self.start.substitute({COORDINATE: as_expr(component)})

    @property
    def extents(self) -> NestedInts:
        """The lengths of all components, nested as the components are; refused where they are known only when run.

        >>> from serrate.ir.transforms import partition
        >>> partition(IterDomain(325), [0, 127, 127, 325])[1].extents
        (127, 0, 198)
        """
        return _nested(self, self.length)

    @property
    def offsets(self) -> NestedInts:
        """Boundaries of all components, first 0, last the total (of a nested domain: for each outer component)."""
        return _boundaries(self.extents)

    def extent_for_component(self, index: int) -> Expr | int:
        """The length of component `index`, an int where known."""
        length = self.length_of(self._component(index))
        return length if length.value is None else length.value

    def offset_for_component(self, index: int) -> Expr | int:
        """The position at which component `index` begins, an int where known."""
        if self.start is not None:
            start = self.start_of(self._component(index))
        else:
            start = sum((self.length_of(k) for k in range(self._component(index))), const(0))
        return start if start.value is None else start.value

    def _component(self, index: int) -> int:
        count = self.component.extent_expr.value
        if index < 0 or (count is not None and index >= count):
            raise DomainError(f"{self}: there is no component {index}; there are {self.component.extent_expr}")
        return index

    def _structure(self) -> tuple[object, ...]:
        known = _try_nested(self)
        return (type(self), self.length if known is None else known, self.component._structure(), self.iter_type, self.parallel)

    def __str__(self) -> str:
        mark = "" if self.parallel is ParallelType.SERIAL else f".{self.parallel.value}"
        known = _try_nested(self)
        shown = str(list(known)) if isinstance(known, tuple) else str(self.length.substitute({COORDINATE: symbol("c")}))
        return f"ragged.{self.name}{{{shown}}}{mark}"

    __hash__ = IterDomain.__hash__


def _try_nested(domain: RaggedIterDomain) -> NestedInts | None:
    try:
        return domain.extents
    except DomainError:
        return None


def _nested(domain: RaggedIterDomain, value: Expr) -> NestedInts:
    count = domain.component.extent_expr.value
    if count is None or any(array.data is None for array in value.arrays) or value.symbols - {COORDINATE}:
        raise DomainError(f"extents of {domain.name}: known only when the program runs")
    flat = tuple(int(value.evaluate(Environment({COORDINATE: c}))) for c in range(count))
    return domain.component.definition.nest(domain.component, flat) if domain.component.definition else flat


def _boundaries(extents: NestedInts) -> NestedInts:
    assert isinstance(extents, tuple)
    if extents and isinstance(extents[0], tuple):
        return tuple(_boundaries(inner) for inner in extents)
    return (0, *itertools.accumulate(e for e in extents if isinstance(e, int)))
