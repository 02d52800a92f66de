"""Transforms that make rows, undo them, or give them another place: partition, combine, cover, product, regroup.

In: domains and offsets. Out: new domains whose `definition` is the transform that made them (see `transforms`).

| transform        | from -> to           | to_inputs                     | extents                     |
| partition        | I -> (C, R)          | i = start[c] + r              | K, lengths                  |
|   under G (or of a ragged domain, which is under its component): i = start[g][c] + r; merge(G, C) owns R   |
| combine          | (C, R) -> I          | c = search(off, i), r = rest  | sum of lengths              |
|   of an inner pair (C under G, R) -> ragged under G: the ragged domain it came from                        |
| cover            | R -> longer rows     | r = r' (guard r < length[c])  | the longest of a group      |
| product          | (R1, R2) -> ragged   | a = m // len2, b = m % len2   | len1*len2, row by row       |
| regroup          | (G, R[g][c]) -> R'   | g = search in row c, r = rest | sum over g, for each c      |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from serrate.errors import DomainError, StructureMismatch
from serrate.ir.domains import COORDINATE, IterDomain, IterType, NestedInts, ParallelType
from serrate.ir.expr import Array, Expr, as_expr, const, maximum, search
from serrate.ir.ragged import (
    Lengths,
    RaggedIterDomain,
    check_boundaries,
    depth_of,
    flattened,
    integers,
    offsets_array,
    running_sum,
    total_of,
)
from serrate.ir.transforms import (
    Known,
    Merge,
    Outputs,
    Shift,
    Transform,
    divisor,
    finish,
    merge,
    once,
    plain,
    same_iter_type,
    size_of,
)

Pair = tuple[IterDomain, RaggedIterDomain]


@dataclass(frozen=True, eq=False)
class Partition(Transform):
    """I -> (C, R) with i = start[c] + r.

    Under G, `starts` holds one row of K+1 boundaries for each g, and row g*K + c of R is part c of g:
    i = starts[g*(K+1) + c] + r.
    With `lengths`, rows are described by two arrays of K elements, and what lies between them belongs to no row.
    """

    starts: Array
    lengths: Array | None = None
    group: IterDomain | None = None

    @property
    def label(self) -> str:
        return f"partition {self.starts}" if self.lengths is None else f"partition {self.starts}, {self.lengths}"

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return () if self.group is None else (self.group,)

    @property
    def covers(self) -> bool:
        """Whether the rows, one after the other, are the whole domain: it then has its K+1st boundary at its end."""
        return self.lengths is None and self.group is None

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = self.outputs
        return (self.starts[self._first(known) + known[component.uid]] + known[ragged.uid],)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        index, first, count = known[self.inputs[0].uid], self._first(known), self.outputs[0].extent_expr
        # Starts without an end: the last row has no boundary behind it to compare with.
        boundaries = count if self.lengths is None else maximum(count - 1, 0)
        component = search(self.starts, boundaries, index, first)
        return (component, index - self.starts[first + component])

    def _first(self, known: Known) -> Expr:
        return const(0) if self.group is None else known[self.group.uid] * (self.outputs[0].extent_expr + 1)


@dataclass(frozen=True, eq=False)
class Combine(Transform):
    """(C, R) -> I, where `offsets` say at which i each component's rows begin.

    `twin` is R's own component where C is another one of the same structure: their indices are one.
    """

    offsets: Array
    twin: IterDomain | None = None

    @property
    def ties(self) -> tuple[tuple[IterDomain, IterDomain], ...]:
        return () if self.twin is None else ((self.inputs[0], self.twin),)

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        index = known[self.outputs[0].uid]
        component = search(self.offsets, self.inputs[0].extent_expr, index)
        return (component, index - self.offsets[component])

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = (known[d.uid] for d in self.inputs)
        return (self.offsets[component] + ragged,)

    def nest(self, component: IterDomain, flat: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
        if self.offsets.data is None:
            return flat
        outer = self.inputs[0]
        groups = tuple(flat[a:b] for a, b in itertools.pairwise(self.offsets.data))
        return outer.definition.nest(outer, groups) if outer.definition else groups


@dataclass(frozen=True, eq=False)
class CombineInner(Transform):
    """(C under G, R) -> ragged under G: sentences into their documents. `offsets` say where each sentence begins."""

    offsets: Array

    @property
    def label(self) -> str:
        return "combine"

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return (self._component.component,)

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        first = self._component.start_of(known[self._component.component.uid])
        position = self.offsets[first] + known[self.outputs[0].uid]
        owner = search(self.offsets, cast(RaggedIterDomain, self.inputs[1]).component.extent_expr, position)
        return (owner - first, position - self.offsets[owner])

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = self.inputs
        first = self._component.start_of(known[self._component.component.uid])
        return (self.offsets[first + known[component.uid]] - self.offsets[first] + known[ragged.uid],)

    @property
    def _component(self) -> RaggedIterDomain:
        return cast(RaggedIterDomain, self.inputs[0])


class Cover(Shift):
    """R -> the longest row of a group, as a regular domain."""


class Product(Merge):
    """(R1, R2) of one component -> ragged: as merge, row by row."""


@dataclass(frozen=True, eq=False)
class Regroup(Transform):
    """(G, R[g][c]) beside C -> R'[c]: for each c, the rows of all g one after the other.

    `starts` holds where they begin, ordered by c and then by g; row c of it has as many boundaries as there are g, and one more
    that is the first of the next c.
    """

    component: IterDomain
    starts: Array

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return (self.component,)

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        first = self._first(known)
        position = self.starts[first] + known[self.outputs[0].uid]
        group = search(self.starts, self.inputs[0].extent_expr, position, first)
        return (group, position - self.starts[first + group])

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        group, ragged = (known[d.uid] for d in self.inputs)
        first = self._first(known)
        return (self.starts[first + group] - self.starts[first] + ragged,)

    def _first(self, known: Known) -> Expr:
        return known[self.component.uid] * self.inputs[0].extent_expr


# --- partition ---------------------------------------------------------------------------------------------------------


def partition(
    domain: IterDomain,
    offsets: Lengths,
    count: int | Expr | None = None,
    *,
    lengths: Lengths | None = None,
    under: Sequence[IterDomain] = (),
    names: tuple[str, str] | None = None,
) -> Pair:
    """I -> (C, R) by K+1 boundaries: ints, a tensor, or an `Array` known when the program runs (then `count` is K).

    `under` names regular domains that precede this one and have boundaries of their own: one row of them for each position.
    A ragged domain is under its component. All rows have the same number K of parts; the parts of all rows together, merged of
    what precedes and C, own R.

    With `lengths`, the first argument is where each row starts, and rows may leave gaps: padded storage, blocks that are
    aligned. Rows must not overlap.

    Legal for serial iteration domains. Offsets start at 0, do not decrease and end at the extent (of the row): checked at once
    where both are known, else when the program runs.

    >>> c, r = partition(IterDomain(325), [0, 127, 127, 325])
    >>> c.extent, r.extents, r.extent, r.offsets
    (3, (127, 0, 198), 325, (0, 127, 127, 325))
    >>> partition(IterDomain(100), [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[IterDomain(2)])[1].extents
    ((30, 0, 40, 30), (25, 35, 25, 15))
    >>> partition(r, [[0, 50, 127], [0, 0, 0], [0, 100, 198]])[1].extents
    ((50, 77), (0, 0), (100, 98))
    >>> partition(IterDomain(12), [0, 4, 8], lengths=[3, 0, 2])[1].extents
    (3, 0, 2)
    """
    plain("partition", domain)
    if domain.iter_type is not IterType.ITERATION:
        raise DomainError(f"partition: {domain} is a {domain.iter_type.name.lower()} domain; only iteration domains have parts")
    if domain.parallel is not ParallelType.SERIAL:
        raise DomainError(f"partition: {domain} is already parallelized; partition it first, then parallelize the parts")
    for each in under:
        if plain("partition", each).is_ragged:
            raise DomainError(
                f"partition: under must name regular domains, got {each}; a ragged domain is under its own component"
            )
    if lengths is not None:
        return _partition_by_rows(domain, offsets, lengths, count, under, names)
    leading = (*under, *domain.owners)
    starts, number = _boundaries(domain, offsets, count, leading)
    return _partitioned(domain, starts, number, None, leading, names)


def _partitioned(
    domain: IterDomain,
    starts: Array,
    count: Expr,
    lengths: Array | None,
    leading: Sequence[IterDomain],
    names: tuple[str, str] | None,
) -> Pair:
    component_name, ragged_name = names or (f"{domain.name}c", f"{domain.name}r")

    def make() -> Outputs:
        component = IterDomain(count, name=component_name, pairing=starts)
        group, owner = None, component
        place: Expr = COORDINATE
        extent, bound = domain.extent_expr, domain.bound
        if leading:
            group = _merged(leading)
            owner = merge(group, component)
            # Row q = g*K + c of all parts begins at boundary g*(K+1) + c, which is q + g.
            place = COORDINATE + COORDINATE // divisor(count)
        for each in leading:
            if each.uid not in {d.uid for d in domain.owners}:
                bound = None if bound is None and each.bound is None else each.host_bound * (extent if bound is None else bound)
                extent = each.extent_expr * extent
        if lengths is None:
            length = starts[place + 1] - starts[place]
        else:
            length, bound = lengths[COORDINATE], domain.host_bound
            extent = total_of(component, length)
        ragged = RaggedIterDomain(
            extent, name=ragged_name, pairing=starts, component=owner, length=length, row_start=starts[place], bound=bound
        )
        return finish(Partition((domain,), (), starts, lengths, group), (component, ragged))

    key = ("partition", starts, count, lengths, *(d.uid for d in leading))
    return cast(Pair, once(domain, key, make))


def _merged(domains: Sequence[IterDomain]) -> IterDomain:
    merged = domains[0]
    for each in domains[1:]:
        merged = merge(merged, each)
    return merged


def _boundaries(
    domain: IterDomain, offsets: object, count: int | Expr | None, leading: Sequence[IterDomain]
) -> tuple[Array, Expr]:
    """The array of boundaries, one row after the other, and the number of parts in each; checked as far as they are known."""
    rows = math.prod((d.extent_expr for d in leading), start=const(1))
    if isinstance(offsets, Array):
        if count is None:
            raise DomainError(f"partition by {offsets}: the number of components must be given")
        number = as_expr(count)
        if offsets.data is not None and number.value is not None and rows.value is not None:
            width = number.value + 1
            for row in range(rows.value):
                check_boundaries(
                    "partition: offsets", offsets.data[row * width : (row + 1) * width], _length(domain, row, leading)
                )
        return offsets, number
    given = integers("partition: offsets", offsets)
    nested = max(depth_of(given) - 1, 0)
    # A ragged domain's own components may be nested; its rows are then given nested as well, or one after the other.
    allowed = len(leading) + (_nesting(domain) - 1 if isinstance(domain, RaggedIterDomain) else 0)
    if nested > allowed:
        raise DomainError(
            f"partition: offsets of {domain} have {nested} leading dims, but {allowed} precede it"
            + ("" if leading else "; say which with under=")
        )
    boundaries = _rows(given) if leading else [cast(tuple[int, ...], given)]
    if leading and rows.value is not None and len(boundaries) != rows.value:
        raise DomainError(
            f"partition of {domain}: expected one row of offsets for each of {rows} components, got {len(boundaries)}"
        )
    width = len(boundaries[0]) - 1 if boundaries else 0
    for k, row_ in enumerate(boundaries):
        if len(row_) - 1 != width and leading:
            raise DomainError(f"partition of {domain}: every component must have {width} parts, got the offsets {list(row_)}")
        check_boundaries("partition: offsets", row_, _length(domain, k, leading))
    if not leading:
        return Array(f"offsets{list(boundaries[0])}", boundaries[0]), const(width)
    flat = tuple(b for row_ in boundaries for b in row_)
    return Array(f"offsets{[list(row_) for row_ in boundaries]}", flat), const(width)


def _length(domain: IterDomain, row: int, leading: Sequence[IterDomain]) -> int | None:
    """What one row of boundaries must end at."""
    if not isinstance(domain, RaggedIterDomain):
        return domain.extent_expr.value
    count = domain.component.extent_expr.value
    return None if not count else domain.length_of(row % count).value


def _nesting(domain: RaggedIterDomain) -> int:
    """How many leading dims the rows of a ragged domain have: as many as were merged or combined into its component."""
    depth, component = 1, domain.component
    while isinstance(component.definition, Merge | Combine) and component.definition.outputs[0].uid == component.uid:
        depth, component = depth + 1, component.definition.inputs[0]
    return depth


def _rows(offsets: NestedInts) -> list[tuple[int, ...]]:
    """The innermost rows of nested offsets, in order."""
    assert isinstance(offsets, tuple)
    if offsets and isinstance(offsets[0], int):
        return [cast(tuple[int, ...], offsets)]
    return [row for inner in offsets for row in _rows(inner)]


def _partition_by_rows(
    domain: IterDomain,
    starts: Lengths,
    lengths: Lengths,
    count: int | Expr | None,
    under: Sequence[IterDomain],
    names: tuple[str, str] | None,
) -> Pair:
    if under or domain.is_ragged:
        raise DomainError(
            f"partition: rows of {domain} by starts and lengths cannot lie under other domains; partition by offsets"
        )
    first, length = _array("starts", starts), _array("lengths", lengths)
    if first.data is not None and length.data is not None:
        if len(first.data) != len(length.data):
            raise DomainError(f"partition: as many lengths as starts are needed, got {len(length.data)} and {len(first.data)}")
        _check_rows(first.data, length.data, domain.extent_expr.value)
        count = len(first.data)
    if count is None:
        raise DomainError(f"partition by {first}, {length}: the number of components must be given")
    return _partitioned(domain, first, as_expr(count), length, (), names)


def _array(what: str, given: Lengths) -> Array:
    if isinstance(given, Array):
        return given
    known = integers(f"partition: {what}", given)
    if depth_of(known) > 1:
        raise DomainError(f"partition: {what} must have one dim, got {given}")
    data = cast(tuple[int, ...], known)
    return Array(f"{what}{list(data)}", data)


def _check_rows(starts: tuple[int, ...], lengths: tuple[int, ...], total: int | None) -> None:
    for k, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length < 0 or start < 0:
            raise DomainError(f"partition: starts and lengths must not be negative, but row {k} has {start} and {length}")
        if k + 1 < len(starts) and start + length > starts[k + 1]:
            raise DomainError(
                f"partition: rows must be in order and not overlap, but row {k} ends at {start + length} "
                f"and row {k + 1} starts at {starts[k + 1]}"
            )
        if total is not None and start + length > total:
            raise DomainError(f"partition: row {k} ends at {start + length}, past the extent {total}")


# --- combine -----------------------------------------------------------------------------------------------------------


def combine(component: IterDomain, ragged: IterDomain) -> IterDomain:
    """(C, R) -> I, the inverse of partition: gives back the very domain that was partitioned, be it regular or ragged.

    Rows that were transformed since, or that had gaps between them, are laid back to back in a domain of their own.

    *When a pair is checked.* Both outputs of a partition carry the identity of the structure, and everything made of the ragged
    one keeps it. `combine` takes the component that the rows know as theirs, or one with the same identity: two partitions by
    equal offsets are one structure, whatever domains they cut. Anything else is refused, with both sides named. A component
    without an identity is *trusted*, if its extent fits, only with rows that have none either.

    >>> d = IterDomain(325)
    >>> c, r = partition(d, [0, 127, 127, 325])
    >>> combine(c, r) is d
    True
    >>> equal, other = partition(IterDomain(325), [0, 127, 127, 325])[0], partition(IterDomain(325), [0, 1, 2, 325])[0]
    >>> combine(equal, r).extent
    325
    >>> combine(other, r)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.StructureMismatch: combine: ... counts the components of offsets[0, 1, 2, 325], but ... belongs to ...
    """
    plain("combine", component), plain("combine", ragged)
    if not isinstance(ragged, RaggedIterDomain):
        raise DomainError(f"combine: the second domain must be ragged, got {ragged}; use merge for regular ones")
    made = ragged.definition
    if isinstance(made, Partition) and made.lengths is None and _is_pair(made, component, ragged):
        return made.inputs[0]
    owner = component.definition.inputs[0] if isinstance(component.definition, Partition) else None
    if isinstance(component, RaggedIterDomain) and owner is not None and ragged.component.uid == owner.uid:
        return _combine_inner(component, ragged)
    if ragged.component.uid != component.uid:
        _check_pair(component, ragged)

    def make() -> Outputs:
        offsets = offsets_array(ragged)
        total = offsets[ragged.component.extent_expr]
        output = IterDomain(total, name=f"{component.name}{ragged.name}", bound=ragged.host_bound)
        twin = None if ragged.component.uid == component.uid else ragged.component
        return finish(Combine((component, ragged), (), offsets, twin), (output,))

    return once(component, ("combine", ragged.uid), make)[0]


def _is_pair(made: Partition, component: IterDomain, ragged: IterDomain) -> bool:
    return made.outputs[0].uid == component.uid and made.outputs[1].uid == ragged.uid


def _check_pair(component: IterDomain, ragged: RaggedIterDomain) -> None:
    made = component.definition
    inner = isinstance(made, Partition) and made.group is not None and not component.is_ragged
    if isinstance(made, Partition) and inner and component.pairing == ragged.pairing:
        raise DomainError(
            f"combine: {component} counts the parts of one row and {ragged} was transformed since; combine them before that, "
            f"or combine merge({made.group}, {component}) with it"
        )
    if component.pairing is None or ragged.pairing is None:
        paired = component.pairing is None and ragged.pairing is None and component.extent == ragged.component.extent
    else:
        # Offsets under other domains have one identity for all of them; their parts are counted by the merged domain alone.
        paired = component.pairing == ragged.pairing and component.extent == ragged.component.extent
    # Both sides of a pair carry its identity, so a ragged domain could pass for the component of another one.
    if not paired or isinstance(component, RaggedIterDomain):
        raise StructureMismatch(
            f"combine: {component} counts the components of {component.pairing or 'no partition'}, "
            f"but {ragged} belongs to {ragged.pairing or ragged.component}; pass the component it was made with"
        )


def _combine_inner(component: RaggedIterDomain, ragged: RaggedIterDomain) -> IterDomain:
    def make() -> Outputs:
        offsets = offsets_array(ragged)
        first = component.start_of(COORDINATE)
        output = RaggedIterDomain(
            offsets[ragged.component.extent_expr],
            name=f"{component.name}{ragged.name}",
            pairing=component.pairing,
            component=component.component,
            length=offsets[first + component.length] - offsets[first],
            row_start=offsets[first],
            bound=ragged.host_bound,
        )
        return finish(CombineInner((component, ragged), (), offsets), (output,))

    return once(component, ("combine", ragged.uid), make)[0]


# --- rows in another shape ---------------------------------------------------------------------------------------------


def cover(ragged: IterDomain, bound: Expr | int, group: IterDomain | None = None) -> IterDomain:
    """R -> positions up to `bound`, at least the longest row it stands for; shorter rows leave holes.

    With `group`, a domain whose positions are groups of components, `bound` is an expression in COORDINATE: the longest
    row of that group.

    >>> cover(RaggedIterDomain.from_extents([3, 5, 2]), 5).extent
    5
    """
    plain("cover", ragged)
    if not isinstance(ragged, RaggedIterDomain):
        raise DomainError(f"cover: expected a ragged domain, got {ragged}; a regular domain covers itself")
    name, length = f"{ragged.name}x", size_of("cover: the bound", bound)
    longest = _longest(ragged)
    if group is None and length.value is not None and longest is not None and length.value < longest:
        raise DomainError(f"cover: {ragged} has a row of {longest}, which is longer than the bound {length}")

    def make() -> Outputs:
        output = IterDomain(length, name=name)
        if group is not None:
            output = RaggedIterDomain(total_of(group, length), name=name, component=group, length=length)
        return finish(Cover((ragged,), (), const(0)), (output,))

    return once(ragged, ("cover", length, None if group is None else group.uid), make)[0]


def _longest(ragged: RaggedIterDomain) -> int | None:
    """The longest row, where lengths are known."""
    try:
        return max(flattened(ragged.extents), default=0)
    except DomainError:
        return None


def product(outer: IterDomain, inner: IterDomain) -> RaggedIterDomain:
    """(R1, R2) of one component -> ragged, each row of length len1*len2 (queries x keys of one sequence).

    Legal for two ragged domains of one component: within a row, the inner one has one width.

    >>> c, queries = partition(IterDomain(10), [0, 3, 8, 10])
    >>> keys = cast(RaggedIterDomain, queries.with_rows(queries.length * 2, name="k"))
    >>> product(queries, keys).extents
    (18, 50, 8)
    """
    plain("product", outer), plain("product", inner)
    for each in (outer, inner):
        if not isinstance(each, RaggedIterDomain):
            raise DomainError(f"product: both domains must be ragged, got {each}; use merge for regular ones")
    a, b = cast(RaggedIterDomain, outer), cast(RaggedIterDomain, inner)
    if a.component.uid != b.component.uid:
        raise DomainError(
            f"product: {a} and {b} have different components, {a.component} and {b.component}; their rows do not meet"
        )
    same_iter_type("product", a, b)

    def make() -> Outputs:
        # The sum of products of lengths is no more than the product of their sums.
        output = a.with_rows(a.length * b.length, name=f"{a.name}{b.name}", bound=a.host_bound * b.host_bound)
        return finish(Product((a, b), ()), (output,))

    return cast(RaggedIterDomain, once(a, ("product", b.uid), make)[0])


def regroup(group: IterDomain, component: IterDomain, ragged: IterDomain) -> Pair:
    """(G, C, R[g][c]) -> (C, R'): the rows of all g that belong to one c, one after the other. A block permutation: data moves.

    Legal where merge(G, C) owns R: the same number of parts in every g. C is kept as it is.

    >>> g, tokens = IterDomain(2), IterDomain(100)
    >>> c, r = partition(tokens, [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[g])
    >>> regroup(g, c, r)[1].extents
    (55, 35, 65, 45)
    """
    plain("regroup", group), plain("regroup", component), plain("regroup", ragged)
    if not isinstance(ragged, RaggedIterDomain):
        raise DomainError(f"regroup: the third domain must be ragged, got {ragged}")
    made = ragged.component.definition
    if not isinstance(made, Merge) or [d.uid for d in made.inputs] != [group.uid, component.uid]:
        owned = f"merge({made.inputs[0]}, {made.inputs[1]})" if isinstance(made, Merge) else str(ragged.component)
        raise DomainError(f"regroup: {ragged} is owned by {owned}, not by merge({group}, {component})")

    def make() -> Outputs:
        groups, parts = group.extent_expr, component.extent_expr
        # Part p = c*G + g, in the new order, is row g*K + c in the old one.
        size = divisor(groups)
        old = (COORDINATE % size) * parts + COORDINATE // size
        starts = running_sum(merge(component, group), ragged.length_of(old))
        output = RaggedIterDomain(
            ragged.extent_expr,
            iter_type=ragged.iter_type,
            name=f"{ragged.name}g",
            pairing=component.pairing,
            component=component,
            length=starts[(COORDINATE + 1) * groups] - starts[COORDINATE * groups],
            bound=ragged.host_bound,
        )
        return finish(Regroup((group, ragged), (), component, starts), (output,))

    return component, cast(RaggedIterDomain, once(ragged, ("regroup", group.uid, component.uid), make)[0])
