"""Ragged domains: iteration domains whose extent depends on a component.

In: component domains, extents or offsets (ints nested to any depth, integer tensors, runtime arrays).
Out: immutable `RaggedIterDomain` objects, and the derived arrays that say where their rows begin.

A ragged extent is a function of a *coordinate*, not of a neighbouring loop, so it survives when the component is tiled,
combined or recovered by search. A model of `RaggedIterDomain` in ten lines:

    class Ragged:
        component: the domain whose index selects the row
        def length(c):    how many elements row c has        # an expression in COORDINATE
        def row_start(c): where row c begins in the domain that was partitioned (None: there is no such domain)
        extent = sum(length(c) for c in range(component.extent))       # the total, never the longest row
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain, NestedInts, ParallelType, parallel_type
from serrate.ir.expr import Array, Environment, Expr, as_expr, const, symbol
from serrate.ir.nested import boundaries_of, differences, flattened, integers, listed
from serrate.ir.recipes import Largest, RunningSum

_SHOWN = symbol("c")
"""How a component's coordinate is printed."""

Lengths = Sequence[object] | torch.Tensor | Array
"""Integers nested to any depth, an integer tensor of one dim or more, or a runtime array."""


@dataclass(frozen=True, eq=False, repr=False)
class RaggedIterDomain(IterDomain):
    """Positions `0 .. length(c)-1`, where `c` is the index of `component`; `extent` is the sum over all components.

    >>> RaggedIterDomain.of([IterDomain(3), IterDomain(5), IterDomain(2)]).offsets
    (0, 3, 8, 10)
    """

    component: IterDomain = None  # type: ignore[assignment]  # the base class's defaults force one here
    length: Expr = field(default_factory=lambda: const(0))
    row_start: Expr | None = None
    given: tuple[IterDomain, ...] = field(default=(), repr=False)
    """The domains of the components, if the domain was built from them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.component, IterDomain):
            raise DomainError(f"RaggedIterDomain: needs the domain of its components, got {self.component!r}")

    @staticmethod
    def of(components: Sequence[IterDomain], *, name: str = "") -> RaggedIterDomain:
        """The ragged domain whose rows are these domains, one per component; they may be ragged themselves.

        >>> inner = RaggedIterDomain.of([IterDomain(3), IterDomain(5)])
        >>> RaggedIterDomain.of([inner, RaggedIterDomain.of([IterDomain(2)])]).extents
        ((3, 5), (2,))
        """
        if isinstance(components, IterDomain) or not isinstance(components, Sequence):
            raise DomainError(f"RaggedIterDomain.of: expected a sequence of domains, got {components!r}")
        for k, domain in enumerate(components):
            if not isinstance(domain, IterDomain):
                raise DomainError(f"RaggedIterDomain.of: component {k} must be an IterDomain, got {domain!r}")
            if domain.start != 0:
                raise DomainError(
                    f"RaggedIterDomain.of: every component must start at 0, but component {k} starts at {domain.start}"
                )
        for what, values in (
            ("parallel type", [d.parallel.value for d in components]),
            ("iter type", [d.iter_type.name.lower() for d in components]),
            ("rfactor mark", [d.is_rfactor for d in components]),
        ):
            other = next((k for k, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise DomainError(
                    f"RaggedIterDomain.of: components must have one {what}, "
                    f"but component 0 has {values[0]} and component {other} has {values[other]}"
                )
        if len({d.is_ragged for d in components}) > 1:
            raise DomainError("RaggedIterDomain.of: either all components are ragged or none is, got both")
        made = RaggedIterDomain.from_extents(tuple(_known_extents(k, d) for k, d in enumerate(components)), name=name)
        if not components:
            return made
        first = components[0]
        return replace(
            made, given=tuple(components), iter_type=first.iter_type, parallel=first.parallel, is_rfactor=first.is_rfactor
        )

    @staticmethod
    def from_extents(extents: Lengths, count: int | Expr | None = None, *, name: str = "") -> RaggedIterDomain:
        """The ragged domain with these lengths; a runtime `Array` needs a `count`.

        >>> RaggedIterDomain.from_extents([[3, 5], [2]]).extent
        10
        """
        what = "RaggedIterDomain.from_extents: extents"
        if isinstance(extents, Array):
            component = IterDomain(_counted(what, extents, count))
            return _under(component, extents[COORDINATE], running_sum(component, extents[COORDINATE]), name)
        known = integers(what, extents)
        flat = flattened(known)
        negative = next((length for length in flat if length < 0), None)
        if negative is not None:
            raise DomainError(f"{what} must not be negative, got {negative}")
        offsets = constant_offsets(flat)
        return _under(_component_of(known, offsets), offsets[COORDINATE + 1] - offsets[COORDINATE], offsets, name)

    @staticmethod
    def from_offsets(offsets: Lengths, count: int | Expr | None = None, *, name: str = "") -> RaggedIterDomain:
        """The ragged domain with these boundaries; if nested, one row of boundaries per outer component.

        >>> RaggedIterDomain.from_offsets([0, 3, 8, 10]).extents
        (3, 5, 2)
        """
        what = "RaggedIterDomain.from_offsets: offsets"
        if isinstance(offsets, Array):
            component = IterDomain(_counted(what, offsets, count), pairing=offsets)
            return _under(component, offsets[COORDINATE + 1] - offsets[COORDINATE], offsets, name)
        return RaggedIterDomain.from_extents(differences(what, integers(what, offsets)), name=name)

    @property
    def one_length(self) -> Expr | None:
        """The length of all rows, if it is one that does not depend on data."""
        return None if COORDINATE in self.length.symbols or self.length.arrays else self.length

    @property
    def is_ragged(self) -> bool:
        return True

    @property
    def owners(self) -> tuple[IterDomain, ...]:
        return (self.component,)

    @property
    def row_length(self) -> Expr:
        return self.length

    def extent_at(self, known: Mapping[int, Expr]) -> Expr:
        return self.in_row(self.length, known)

    def in_row(self, expr: Expr, known: Mapping[int, Expr]) -> Expr:
        return expr.substitute({COORDINATE: known[self.component.uid]}) if COORDINATE in expr.symbols else expr

    def with_rows(self, length: Expr, *, name: str, bound: Expr | None = None, total: Expr | None = None) -> IterDomain:
        """A ragged domain under the same component, with the same pairing."""
        return RaggedIterDomain(
            total_of(self.component, length) if total is None else total,
            iter_type=self.iter_type,
            name=name,
            pairing=self.pairing,
            component=self.component,
            length=length,
            bound=bound,
        )

    def bound_in_parts(self, size: Expr) -> Expr | None:
        # Each row has at most one incomplete part.
        return self.host_bound // size + self.component.host_bound

    def length_of(self, component: Expr | int) -> Expr:
        """The length of one component, as an expression in its index."""
        return self.length.substitute({COORDINATE: as_expr(component)})

    def start_of(self, component: Expr | int) -> Expr:
        """Where one component begins in the domain that was partitioned."""
        if self.row_start is None:
            raise DomainError(f"{self}: its rows do not come from a partitioned domain; combine it with {self.component} first")
        return self.row_start.substitute({COORDINATE: as_expr(component)})

    @property
    def extents(self) -> NestedInts:
        """The lengths of all components, nested as the components are; raises if they are known only at run time.

        >>> RaggedIterDomain.from_offsets([0, 127, 127, 325]).extents
        (127, 0, 198)
        """
        definition = self.component.definition
        return definition.nest(self.component, self._lengths()) if definition else self._lengths()

    @property
    def offsets(self) -> NestedInts:
        """Boundaries of all components, first 0, last the total (per outer component, if nested)."""
        return boundaries_of(self.extents)

    def extents_under(self, *domains: IterDomain) -> NestedInts:
        """The lengths arranged by domains derived from the component; positions added by an indivisible split are left out.

        The ragged domain itself does not change when its component is transformed: its length is a function of the coordinate.

        >>> from serrate.ir import split
        >>> r = RaggedIterDomain.from_extents([55, 35, 65, 45])
        >>> r.extents_under(*split(r.component, 2))
        ((55, 35), (65, 45))
        """
        lengths = self._lengths()

        def arranged(depth: int, known: dict[int, Expr]) -> Iterator[NestedInts]:
            if depth == len(domains):
                found = _filled(known, domains)
                place = _derived(found, self.component)
                if place is None:
                    names = ", ".join(map(str, domains))
                    raise DomainError(f"extents_under: the index of {self.component} does not follow from {names}")
                if _inside(found, domains):
                    yield lengths[cast(int, place.value)]
                return
            extent = domains[depth].extent_at(_filled(known, domains)).value
            if extent is None:
                raise DomainError(f"extents_under: the extent of {domains[depth]} is known only when the program runs")
            for k in range(extent):
                inner = arranged(depth + 1, {**known, domains[depth].uid: const(k)})
                if depth == len(domains) - 1:
                    yield from inner
                else:
                    yield tuple(inner)

        return tuple(arranged(0, {}))

    @property
    def nested_domains(self) -> tuple[IterDomain, ...]:
        """One domain per component, of its length; ragged themselves if the domain is nested."""
        key = ("nested domains", *self._uniform())
        if key not in self.derived:
            self.derived[key] = self._nested_domains()
        return self.derived[key]

    def _nested_domains(self) -> tuple[IterDomain, ...]:
        if self.given:
            return self.given
        count = self.component.extent_expr.value
        if count is None:
            raise DomainError(f"nested_domains of {self}: the number of components is known only when the program runs")
        try:
            extents = cast(tuple[NestedInts, ...], self.extents)
        except DomainError:
            return tuple(self._uniformly(IterDomain(self.length_of(k), name=f"{self.name}{k}")) for k in range(count))
        made = (
            IterDomain(e, name=f"{self.name}{k}")
            if isinstance(e, int)
            else RaggedIterDomain.from_extents(e, name=f"{self.name}{k}")
            for k, e in enumerate(extents)
        )
        return tuple(map(self._uniformly, made))

    def _uniformly(self, domain: IterDomain) -> IterDomain:
        return replace(domain, iter_type=self.iter_type, parallel=self.parallel, is_rfactor=self.is_rfactor)

    def extent_for_component(self, index: int) -> Expr | int:
        """The length of component `index`, an int if known."""
        length = self.length_of(self._component(index))
        return length if length.value is None else length.value

    def offset_for_component(self, index: int) -> Expr | int:
        """Where component `index` begins when all rows are laid back to back, an int if known."""
        offset = offsets_array(self)[self._component(index)]
        return offset if offset.value is None else offset.value

    def parallelize(self, parallel: ParallelType | str) -> RaggedIterDomain:
        """The same domain with another parallel type in every component."""
        kind = parallel_type(parallel)
        return replace(self, parallel=kind, given=tuple(d.parallelize(kind) for d in self.given))

    def _component(self, index: int) -> int:
        count = self.component.extent_expr.value
        if index < 0 or (count is not None and index >= count):
            raise DomainError(f"{self}: component {index} does not exist; it has {self.component.extent_expr} components")
        return index

    def _lengths(self) -> tuple[int, ...]:
        count = self.component.extent_expr.value
        if count is None or any(array.data is None for array in self.length.arrays) or self.length.symbols - {COORDINATE}:
            raise DomainError(f"extents of {self.name}: known only when the program runs")
        return tuple(int(self.length.evaluate(Environment({COORDINATE: c}))) for c in range(count))

    def _known(self) -> NestedInts | None:
        try:
            return self.extents
        except DomainError:
            return None

    def _structure(self) -> tuple[object, ...]:
        known = self._known()
        return (type(self), self.length if known is None else known, self.component._structure(), *self._uniform())

    def __str__(self) -> str:
        known = self._known()
        shown = str(listed(known)) if known is not None else str(self.length.substitute({COORDINATE: _SHOWN}))
        return f"ragged.{self.name}{{{shown}}}{self._mark}"

    __hash__ = IterDomain.__hash__


# --- derived arrays ----------------------------------------------------------------------------------------------------


def running_sum(component: IterDomain, length: Expr) -> Array:
    """The derived array `[0, length(0), length(0)+length(1), ...]` over a component domain."""
    count = component.extent_expr
    name = f"sum({length.substitute({COORDINATE: _SHOWN})})"
    if count.value is not None and all(a.data is not None for a in length.arrays) and not (length.symbols - {COORDINATE}):
        lengths = (int(length.evaluate(Environment({COORDINATE: c}))) for c in range(count.value))
        return Array(name, (0, *itertools.accumulate(lengths)))
    return Array(name, recipe=RunningSum(length, COORDINATE, count))


def longest(length: Expr, count: Expr) -> Expr:
    """The length of the longest of `count` rows: the only element of a derived array."""
    name = f"longest({length.substitute({COORDINATE: _SHOWN})})"
    return Array(name, recipe=Largest(length, COORDINATE, count))[0]


def total_of(component: IterDomain, length: Expr) -> Expr:
    """The sum of the lengths: a constant if known, else the last element of their running sum."""
    return running_sum(component, length)[component.extent_expr]


def offsets_array(ragged: RaggedIterDomain) -> Array:
    """The array whose element c is where row c begins when all rows are laid back to back."""
    if ragged.row_start is not None and len(ragged.row_start.arrays) == 1:
        (array,) = ragged.row_start.arrays
        # Rows with gaps are laid back to back by their own running sum.
        if ragged.row_start is array[COORDINATE] and ragged.length is array[COORDINATE + 1] - array[COORDINATE]:
            return array
    return running_sum(ragged.component, ragged.length)


def lengths_array(rows: RaggedIterDomain) -> Array:
    """The array that gives the lengths of rows; the same for rows that another dim of the same extent counts."""
    for array in rows.length.arrays:
        if rows.length is array[COORDINATE + 1] - array[COORDINATE]:
            return array
    return offsets_array(rows)


def constant_offsets(lengths: Sequence[int]) -> Array:
    """The constant array of offsets for known lengths, named as in a partition."""
    offsets = (0, *itertools.accumulate(lengths))
    return Array(f"offsets{list(offsets)}", offsets)


# --- building ----------------------------------------------------------------------------------------------------------


def _counted(what: str, array: Array, count: int | Expr | None) -> Expr:
    if count is None:
        raise DomainError(f"{what} are the array {array}: the number of components must be given")
    return as_expr(count)


def _known_extents(place: int, domain: IterDomain) -> NestedInts:
    if isinstance(domain, RaggedIterDomain):
        return domain.extents
    if domain.extent_expr.value is None:
        raise DomainError(
            f"RaggedIterDomain.of: component {place} has the extent {domain.extent_expr}, known only when the program runs; "
            "build the domain from an array of extents"
        )
    return domain.extent_expr.value


def _under(component: IterDomain, length: Expr, offsets: Array, name: str) -> RaggedIterDomain:
    if component.pairing is None and component.definition is None:
        component = replace(component, pairing=offsets)
    total = offsets[component.extent_expr]
    return RaggedIterDomain(total, name=name, pairing=offsets, component=component, length=length, row_start=offsets[COORDINATE])


def _component_of(extents: tuple[NestedInts, ...], offsets: Array) -> IterDomain:
    """The domain that indexes the innermost rows of nested extents.

    If all components have the same number of parts, the two levels are merged; otherwise the parts are ragged and combined.
    """
    from serrate.ir.ragged_transforms import combine
    from serrate.ir.transforms import merge

    if not (extents and isinstance(extents[0], tuple)):
        return IterDomain(len(extents), pairing=offsets)
    component = IterDomain(len(extents))
    level = cast(tuple[tuple[NestedInts, ...], ...], extents)
    while True:
        counts = [len(inner) for inner in level]
        if len(set(counts)) <= 1:
            component = merge(component, IterDomain(counts[0] if counts else 0))
        else:
            lengths = constant_offsets(counts)
            parts = _under(component, lengths[COORDINATE + 1] - lengths[COORDINATE], lengths, "")
            component = combine(component, parts)
        inner = tuple(part for parts_ in level for part in parts_)
        if not (inner and isinstance(inner[0], tuple)):
            return component
        level = cast(tuple[tuple[NestedInts, ...], ...], inner)


# --- indices of components -------------------------------------------------------------------------------------------


def _filled(known: dict[int, Expr], domains: Sequence[IterDomain]) -> dict[int, Expr]:
    """Adds the indices of the domains that `domains` were derived from."""
    found, waiting = dict(known), [d.definition for d in domains if d.definition is not None]
    for transform in waiting:
        waiting.extend(d.definition for d in transform.inputs if d.definition is not None and d.definition not in waiting)
    while True:
        ready = next((t for t in waiting if all(d.uid in found for d in (*t.outputs, *t.beside))), None)
        if ready is None:
            return found
        waiting.remove(ready)
        for source, index in zip(ready.inputs, ready.to_inputs(found), strict=True):
            found.setdefault(source.uid, index)


def _derived(found: dict[int, Expr], domain: IterDomain) -> Expr | None:
    """The index of a domain, computed if necessary from known indices of the domains it was derived from."""
    made = domain.definition
    unknown = domain.uid not in found and made is not None
    if unknown and made and all(_derived(found, d) is not None for d in (*made.inputs, *made.beside)):
        found.update(zip((d.uid for d in made.outputs), made.to_outputs(found), strict=True))
    return found.get(domain.uid)


def _inside(found: Mapping[int, Expr], domains: Sequence[IterDomain]) -> bool:
    """Whether every index lies in its domain."""
    pending: list[IterDomain] = list(domains)
    while pending:
        domain = pending.pop()
        if domain.uid in found and all(d.uid in found for d in domain.owners):
            index, extent = found[domain.uid].value, domain.extent_at(found).value
            if index is None or extent is None or not 0 <= index < extent:
                return False
        if domain.definition is not None:
            pending.extend(domain.definition.inputs)
    return True
