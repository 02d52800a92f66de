"""Transforms of ragged domains: combine, cover, product, ordered, regroup. `partition` creates them.

In: ragged domains and their components. Out: new domains whose `definition` is the transform that made them (see `transforms`).

| transform        | from -> to           | to_inputs                     | extents                     |
| partition        | I -> (C, R)          | i = start[c] + r              | K, lengths                  |
|   under G (or of a ragged domain, which is under its component): i = start[g][c] + r; merge(G, C) owns R   |
| combine          | (C, R) -> I          | c = search(off, i), r = rest  | sum of lengths              |
|   of an inner pair (C under G, R) -> ragged under G: the ragged domain it came from, or one like it        |
| spread           | (C, R) -> I          | c = search(starts, i), r = rest | positions of the rows, and gaps |
| cover            | R -> longer rows     | r = r' (guard r < length[c])  | the longest of a group      |
| within_row       | I -> R, no longer    | i = r                         | lengths                     |
| product          | (R1, R2) -> ragged   | a = m // len2, b = m % len2   | len1*len2, row by row       |
| ordered          | C -> C'              | c = order[c']                 | K                           |
| regroup          | (G, R[g][c]) -> R'   | g = search in row c, r = rest | sum over g, for each c      |
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import cast

from serrate.errors import DomainError, StructureMismatch
from serrate.ir.domains import COORDINATE, IterDomain, NestedInts
from serrate.ir.expr import Array, Expr, const, maximum, search, symbol
from serrate.ir.nested import flattened
from serrate.ir.partition import Pair, Partition
from serrate.ir.ragged import RaggedIterDomain, offsets_array, running_sum, total_of
from serrate.ir.recipes import InverseOrder, Order
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


@dataclass(frozen=True, eq=False)
class Combine(Transform):
    """(C, R) -> I, where `offsets` says at which i each row begins.

    `twin` is R's own component if C is a different domain of the same structure: their indices are equal.
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

    @property
    def nests(self) -> bool:
        return True

    def nest(self, component: IterDomain, flat: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
        if self.offsets.data is None:
            return flat
        outer = self.inputs[0]
        groups = tuple(flat[a:b] for a, b in itertools.pairwise(self.offsets.data))
        return outer.definition.nest(outer, groups) if outer.definition else groups


@dataclass(frozen=True, eq=False)
class CombineInner(Transform):
    """(C under G, R) -> ragged under G: words of sentences into words of documents. `offsets` says where each row of R begins.

    C is ragged, or has the same number of parts for every g; merge(G, C) then owns R.
    """

    offsets: Array
    group: IterDomain
    first: Expr
    """The number of the first part of g among all parts, as an expression in COORDINATE."""

    @property
    def label(self) -> str:
        return "combine"

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return (self.group,)

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        first = self._first(known)
        position = self.offsets[first] + known[self.outputs[0].uid]
        owner = search(self.offsets, cast(RaggedIterDomain, self.inputs[1]).component.extent_expr, position)
        return (owner - first, position - self.offsets[owner])

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = self.inputs
        first = self._first(known)
        return (self.offsets[first + known[component.uid]] - self.offsets[first] + known[ragged.uid],)

    def _first(self, known: Known) -> Expr:
        return self.first.substitute({COORDINATE: known[self.group.uid]})


@dataclass(frozen=True, eq=False)
class Spread(Transform):
    """(C, R) -> I, where `starts` says at which i each row begins; gaps between them belong to no row."""

    starts: Array

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        index = known[self.outputs[0].uid]
        # There are K starts and no end: the last row has no next boundary to compare with.
        component = search(self.starts, maximum(self.inputs[0].extent_expr - 1, 0), index)
        return (component, index - self.starts[component])

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = (known[d.uid] for d in self.inputs)
        return (self.starts[component] + ragged,)


class Cover(Shift):
    """R -> the longest row of a group, as a regular domain."""


class WithinRow(Shift):
    """I -> R, the positions of a domain that lie inside the row, for loops that do nothing past a row's end."""


@dataclass(frozen=True, eq=False)
class Ordered(Transform):
    """C -> C' with c = order[c']: the components sorted by the lengths of their rows, within runs of fixed size."""

    order: Array

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        return (self.order[known[self.outputs[0].uid]],)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        places = Array(f"places({self.order.name})", recipe=InverseOrder(self.order))
        return (places[known[self.inputs[0].uid]],)


class RaggedProduct(Merge):
    """(R1, R2) of one component -> ragged: as merge, row by row."""

    @property
    def label(self) -> str:
        return "product"


@dataclass(frozen=True, eq=False)
class Regroup(Transform):
    """(G, R[g][c]) beside C -> R'[c]: for each c, the rows of all g back to back.

    `starts` holds where they begin, ordered by c and then by g; its row c has one boundary per g, followed by the first boundary
    of the next c.
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


# --- combine -----------------------------------------------------------------------------------------------------------


def combine(component: IterDomain, ragged: IterDomain) -> IterDomain:
    """(C, R) -> I, the inverse of partition: returns the domain that was partitioned, regular or ragged.

    Rows that were transformed since, or that had gaps between them, are laid back to back in a new domain.

    *Pairing.* Both outputs of a partition carry the identity of the structure, and domains derived from the ragged one keep it.
    `combine` accepts the ragged domain's own component, or one with the same identity: two partitions by equal offsets are one
    structure, whatever domains they partition. Anything else is refused, naming both sides. A component without an identity is
    *trusted*, if its extent fits, but only with rows that have none either.

    >>> from serrate.ir import partition
    >>> d = IterDomain(325)
    >>> c, r = partition(d, [0, 127, 127, 325])
    >>> combine(c, r) is d
    True
    >>> equal, other = partition(IterDomain(325), [0, 127, 127, 325])[0], partition(IterDomain(325), [0, 1, 2, 325])[0]
    >>> combine(equal, r).extent
    325
    >>> combine(other, r)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.StructureMismatch: combine: ... is the component of offsets[0, 1, 2, 325], but ... belongs to ...
    """
    plain("combine", component), plain("combine", ragged)
    if not isinstance(ragged, RaggedIterDomain):
        raise DomainError(f"combine: the second domain must be ragged, got {ragged}; use merge for regular ones")
    made = ragged.definition
    if isinstance(made, Partition) and made.lengths is None and _is_pair(made, component, ragged):
        return made.inputs[0]
    inner = _inner_pair(component, ragged)
    if inner is not None:
        return _combine_inner(component, ragged, *inner)
    if ragged.component.uid != component.uid:
        _check_pair(component, ragged)

    def make() -> Outputs:
        offsets = offsets_array(ragged)
        output = IterDomain(ragged.extent_expr, name=f"{component.name}{ragged.name}", bound=ragged.host_bound)
        twin = None if ragged.component.uid == component.uid else ragged.component
        return finish(Combine((component, ragged), (), offsets, twin), (output,))

    return once(component, ("combine", ragged.uid), make)[0]


def spread(component: IterDomain, ragged: RaggedIterDomain, starts: Array, extent: Expr) -> IterDomain:
    """(C, R) -> I of `extent` positions: each row begins where `starts` says. `combine` lays them back to back instead.

    >>> from serrate.ir import partition
    >>> c, r = partition(IterDomain(5), [0, 3, 5])
    >>> spread(c, r, Array("starts", (0, 8)), const(12)).extent
    12
    """
    plain("spread", component), plain("spread", ragged)
    if ragged.component.uid != component.uid:
        _check_pair(component, ragged)

    def make() -> Outputs:
        output = IterDomain(extent, name=f"{component.name}{ragged.name}")
        return finish(Spread((component, ragged), (), starts), (output,))

    return once(component, ("spread", ragged.uid, starts, extent), make)[0]


def _is_pair(made: Partition, component: IterDomain, ragged: IterDomain) -> bool:
    return made.outputs[0].uid == component.uid and made.outputs[1].uid == ragged.uid


def _check_pair(component: IterDomain, ragged: RaggedIterDomain) -> None:
    if component.pairing is None or ragged.pairing is None:
        paired = component.pairing is None and ragged.pairing is None and component.extent == ragged.component.extent
    else:
        # Offsets under other domains share one identity; only the merged domain indexes their parts.
        paired = component.pairing == ragged.pairing and component.extent == ragged.component.extent
    # Both sides of a pair carry its identity, so a ragged domain could be mistaken for the component of another one.
    if not paired or isinstance(component, RaggedIterDomain):
        other = " of another program" if str(component.pairing) == str(ragged.pairing) != "None" else ""
        raise StructureMismatch(
            f"combine: {component} is the component of {component.pairing or 'no partition'}, "
            f"but {ragged} belongs to {ragged.pairing or ragged.component}{other}; pass the component it was made with"
        )


def _inner_pair(component: IterDomain, ragged: RaggedIterDomain) -> tuple[IterDomain, Expr] | None:
    """If the component indexes parts of a domain G, and both together own the rows: G, and the number of the first part of each
    g among all parts."""
    made, owner = component.definition, ragged.component.definition
    if isinstance(component, RaggedIterDomain) and isinstance(made, Partition) and made.inputs[0].uid == ragged.component.uid:
        return component.component, component.start_of(COORDINATE)
    if not isinstance(owner, Merge | Combine) or owner.inputs[1].uid != component.uid or owner.inputs[0].is_ragged:
        return None
    parts = owner.offsets[COORDINATE] if isinstance(owner, Combine) else COORDINATE * component.extent_expr
    return owner.inputs[0], parts


def _combine_inner(component: IterDomain, ragged: RaggedIterDomain, group: IterDomain, first: Expr) -> IterDomain:
    def make() -> Outputs:
        offsets = offsets_array(ragged)
        output = RaggedIterDomain(
            ragged.extent_expr,
            name=f"{component.name}{ragged.name}",
            pairing=component.pairing if component.is_ragged else group.pairing,
            component=group,
            length=offsets[first + component.row_length] - offsets[first],
            row_start=offsets[first],
            bound=ragged.host_bound,
        )
        return finish(CombineInner((component, ragged), (), offsets, group, first), (output,))

    return once(component, ("combine", ragged.uid), make)[0]


# --- rows in another shape ---------------------------------------------------------------------------------------------


def cover(ragged: IterDomain, bound: Expr | int, group: IterDomain | None = None) -> IterDomain:
    """R -> positions up to `bound`, which is at least the longest row; shorter rows leave holes.

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


def within_row(component: IterDomain, whole: IterDomain, length: Expr, bound: Expr | None = None) -> RaggedIterDomain:
    """I -> its leading positions, as many as a component's row has; `length` is an expression in COORDINATE.

    `bound` is an upper bound of all lengths together.

    >>> str(within_row(IterDomain(3, name="c"), IterDomain(9, name="k"), Array("n")[COORDINATE]))
    'ragged.kr{n[c]}'
    """
    plain("within_row", component), plain("within_row", whole)

    def make() -> Outputs:
        total = total_of(component, length)
        row = RaggedIterDomain(total, name=f"{whole.name}r", component=component, length=length, bound=bound)
        return finish(WithinRow((whole,), (), const(0)), (row,))

    return cast(RaggedIterDomain, once(whole, ("within_row", component.uid, length), make)[0])


def ordered(component: IterDomain, ragged: RaggedIterDomain, size: int) -> IterDomain:
    """C -> C', its positions in the order of the lengths of their rows, within each run of `size`.

    >>> from serrate.ir import partition
    >>> c, r = partition(IterDomain(10, name="d"), [0, 7, 8, 10], names=("c", "r"))
    >>> str(ordered(c, r, 2).definition)
    'ordered: i.c{3} -> i.cp{3}'
    """
    plain("ordered", component)
    if ragged.component.uid != component.uid:
        raise DomainError(f"ordered: {component} does not own {ragged}")

    def make() -> Outputs:
        spelled = ragged.length.substitute({COORDINATE: symbol("c")})
        order = Array(f"order{size}({spelled})", recipe=Order(ragged.length, COORDINATE, component.extent_expr, size))
        output = IterDomain(component.extent_expr, name=f"{component.name}p", bound=component.bound)
        return finish(Ordered((component,), (), order), (output,))

    return once(component, ("ordered", ragged.uid, size), make)[0]


def lists_long_rows(domain: IterDomain) -> bool:
    """Whether a domain lists pieces of rows, but some rows have none."""
    made = domain.definition
    return isinstance(made, Combine) and isinstance(made.inputs[1].definition, WithinRow)


def _longest(ragged: RaggedIterDomain) -> int | None:
    """The longest row, if lengths are known."""
    try:
        return max(flattened(ragged.extents), default=0)
    except DomainError:
        return None


def product(outer: IterDomain, inner: IterDomain, *, total: Expr | None = None, bound: Expr | None = None) -> RaggedIterDomain:
    """(R1, R2) of one component -> ragged, each row of length len1*len2 (queries x keys of one sequence).

    Legal for two ragged domains of one component: within a row, the inner one has a fixed width. `total` is the sum of all
    products, if known independently of lengths; `bound` is an upper bound of it.

    >>> from serrate.ir import partition
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
            f"product: {a} and {b} have different components, {a.component} and {b.component}; "
            "use two ragged domains of one component"
        )
    same_iter_type("product", a, b)

    def make() -> Outputs:
        most = bound
        if total is None and bound is None:
            # The sum of products of lengths is at most the product of their sums, or of one length and the other's sum.
            one = next(((n, other) for rows, other in ((a, b), (b, a)) if (n := rows.one_length) is not None), None)
            most = a.host_bound * b.host_bound if one is None else one[0] * one[1].host_bound
        output = a.with_rows(a.length * b.length, name=f"{a.name}{b.name}", bound=most, total=total)
        return finish(RaggedProduct((a, b), ()), (output,))

    return cast(RaggedIterDomain, once(a, ("product", b.uid), make)[0])


def regroup(group: IterDomain, component: IterDomain, ragged: IterDomain) -> Pair:
    """(G, C, R[g][c]) -> (C, R'): for each c, the rows of all g back to back. A block permutation, which moves data.

    Legal if merge(G, C) owns R, so that every g has the same number of parts. C is unchanged.

    >>> from serrate.ir import partition
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
        # Part p = c*G + g in the new order is row g*K + c in the old one.
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
