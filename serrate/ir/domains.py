"""Iteration domains: what a loop or a tensor dim runs over.

In: extents (ints or index expressions). Out: immutable `IterDomain` objects; the ragged subclass is in `ragged`. Each object is a
separate index: two domains of extent 64 are equal by structure (`==`) but are different indices (`uid`). Transforms between
domains are in `transforms` and `ragged_transforms`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING

from serrate.errors import DomainError, choices
from serrate.ir.expr import Array, Environment, Expr, Symbol, as_expr, ceildiv, symbol
from serrate.ir.uids import Uid, fresh_uid, sent

if TYPE_CHECKING:
    from serrate.ir.transforms import Transform

COORDINATE: Symbol = symbol("@c")
"""The component's index, as it appears in the lengths and starts of ragged domains."""

NestedInts = int | tuple["NestedInts", ...]


class IterType(Enum):
    """The role of a dim in its tensor."""

    ITERATION = "i"
    REDUCTION = "r"
    BROADCAST = "b"


class ParallelType(Enum):
    """How a domain's positions are mapped to the machine.

    Tile programs use only `grid`, `serial` and `lanes`. The others are for schedules by hand.
    """

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


def parallel_type(kind: ParallelType | str) -> ParallelType:
    """The parallel type, given itself or its name.

    >>> parallel_type("grid")
    <ParallelType.GRID: 'grid'>
    """
    try:
        return ParallelType(kind)
    except ValueError:
        known = choices(kind, (each.value for each in ParallelType))
        raise DomainError(f"parallelize: {kind!r} is not a parallel type: {known}") from None


@dataclass(frozen=True)
class Identity:
    """The identity of a structure with runtime offsets: the array that holds them, and its program.

    A value, equal in clones, pickles and stages of the program. Constant offsets are their own identity.
    """

    offsets: Array
    program: str

    def __str__(self) -> str:
        return str(self.offsets)


def identity_of(offsets: Array, program: str | None) -> Hashable:
    """The identity that both outputs of a partition carry; without a program, offsets of one name are one structure."""
    return offsets if program is None or offsets.data is not None else Identity(offsets, program)


@dataclass(frozen=True, eq=False, repr=False)
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
    """Identity of the structure whose components this domain counts (see `ragged_transforms.partition`)."""
    definition: Transform | None = field(default=None, repr=False)
    bound: Expr | None = field(default=None, repr=False)
    """An upper bound of the extent that does not depend on lengths; None if the extent itself does not."""
    uid: int = field(default_factory=fresh_uid)
    derived: dict[Hashable, tuple[IterDomain, ...]] = field(default_factory=dict, repr=False)
    """Outputs of earlier transforms of this domain, so that the same transform returns the same domains."""
    start: int = 0
    """The first position. Only domains that start at 0 can be transformed; `restrict` renumbers a sub-range from 0."""
    is_rfactor: bool = False
    """Whether the dim was introduced by `rfactor`."""

    def __post_init__(self) -> None:
        try:
            value = as_expr(self._extent)
        except TypeError:
            raise DomainError(f"IterDomain: an extent must be an integer or an expression, got {self._extent!r}") from None
        if value.value is not None and value.value < 0:
            raise DomainError(f"IterDomain: an extent must not be negative, got {value}")
        if isinstance(self._extent, bool):
            raise DomainError(f"IterDomain: an extent must be an integer or an expression, got {self._extent!r}")
        if not isinstance(self.start, int) or self.start < 0:
            raise DomainError(f"IterDomain: the start must be an integer and not negative, got {self.start!r}")
        object.__setattr__(self, "_extent", value)
        if not self.name:
            object.__setattr__(self, "name", f"i{self.uid}")

    @property
    def extent(self) -> Expr | int:
        """The number of positions: an int if known, else an expression."""
        return self.extent_expr if self.extent_expr.value is None else self.extent_expr.value

    @property
    def extent_expr(self) -> Expr:
        """The number of positions as an expression."""
        return as_expr(self._extent)

    @property
    def host_bound(self) -> Expr:
        """An upper bound of the extent that needs no lengths on the host."""
        return self.extent_expr if self.bound is None else self.bound

    @property
    def is_ragged(self) -> bool:
        return False

    @property
    def owners(self) -> tuple[IterDomain, ...]:
        """The domain whose index selects the row: the component of a ragged domain; empty for a regular one."""
        return ()

    @property
    def row_length(self) -> Expr:
        """The extent; for a ragged domain, the length of one row as an expression in COORDINATE."""
        return self.extent_expr

    @property
    def is_single(self) -> bool:
        """Whether its index is always 0, so that it broadcasts and needs no loop. A ragged domain with a total of one position
        is not single, and neither is the component that selects its row."""
        return self.pairing is None and self.row_length.value == 1

    def extent_at(self, known: Mapping[int, Expr]) -> Expr:
        """The extent in the row selected by the known indices (by uid); for a regular domain, simply the extent."""
        return self.extent_expr

    def in_row(self, expr: Expr, known: Mapping[int, Expr]) -> Expr:
        """An expression in COORDINATE, evaluated in the row selected by the known indices."""
        return expr

    def with_rows(self, length: Expr, *, name: str, bound: Expr | None = None, total: Expr | None = None) -> IterDomain:
        """A new domain of the same kind and iter type with a different length; `total` is the sum over all rows, if known."""
        return IterDomain(length, self.iter_type, name=name, bound=bound)

    def bound_in_parts(self, size: Expr) -> Expr | None:
        """An upper bound of the number of parts of `size` when every row is cut separately."""
        return None if self.bound is None else ceildiv(self.bound, size)

    def parallelize(self, parallel: ParallelType | str) -> IterDomain:
        """The same domain with another parallel type, given itself or by name.

        >>> print(IterDomain(4, name="d").parallelize("grid"))
        i.d{4}.grid
        """
        return replace(self, parallel=parallel_type(parallel))

    def __reduce__(self) -> tuple[object, ...]:
        # Pickles what it was derived from, but not what was derived from it; domains and transforms refer to each other.
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("uid", "derived")}
        return (_arrived, (type(self), sent(self.uid)), state)

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def _structure(self) -> tuple[object, ...]:
        return (type(self), self.extent_expr, *self._uniform())

    def _uniform(self) -> tuple[object, ...]:
        """Properties that must be the same in all rows of a ragged domain."""
        return (self.iter_type, self.parallel, self.start, self.is_rfactor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IterDomain) and self._structure() == other._structure()

    def __hash__(self) -> int:
        return hash((type(self), *self._uniform()))

    def __str__(self) -> str:
        return f"{self.iter_type.value}.{self.name}{{{self.extent_expr}}}{self._mark}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def _mark(self) -> str:
        return "" if self.parallel is ParallelType.SERIAL else f".{self.parallel.value}"


def origins(domain: IterDomain) -> set[int]:
    """A domain and all that it is made from, by uid. Domains with a common origin are connected by transforms."""
    found, pending = set[int](), [domain]
    while pending:
        each = pending.pop()
        if each.uid not in found:
            found.add(each.uid)
            pending += each.definition.inputs if each.definition is not None else ()
    return found


def shape_text(domains: Sequence[IterDomain], sizes: Mapping[Symbol, int] | None = None) -> str:
    """The shape of a tensor over `domains` as users see it, for messages: `(B, r0, 64)`.

    Sizes that are not known are taken from `sizes`; without them a number of rows is `B`, and any other size `?`.

    >>> shape_text([IterDomain(4), IterDomain(symbol("n"))], {symbol("n"): 3})
    '(4, 3)'
    """
    ragged = iter(range(len(domains)))
    shown = [f"r{next(ragged)}" if d.is_ragged else size_text(d, sizes) for d in domains]
    return f"({', '.join(shown)}{',' * (len(shown) == 1)})"


def size_text(domain: IterDomain, sizes: Mapping[Symbol, int] | None = None) -> str:
    """The size of a regular dim, likewise."""
    extent = domain.extent_expr
    if extent.value is not None:
        return str(extent.value)
    if sizes is not None and not extent.arrays and extent.symbols <= sizes.keys():
        return str(extent.evaluate(Environment(sizes)))
    return "B" if domain.pairing is not None else "?"


def _arrived(kind: type[IterDomain], uid: Uid) -> IterDomain:
    """A domain being unpickled, before its fields are set."""
    domain = kind.__new__(kind)
    object.__setattr__(domain, "uid", uid.here)
    object.__setattr__(domain, "derived", {})
    return domain
