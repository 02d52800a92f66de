"""Partition: one domain into components and the rows they own.

In: a domain and offsets, or starts and lengths, constant or known at run time. Out: the component domain and the ragged domain,
both with the identity of the structure (`pairing`), which `combine` checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain, IterType, NestedInts, identity_of
from serrate.ir.expr import Array, Expr, as_expr, const, maximum, search
from serrate.ir.nested import check_boundaries, depth_of, integers, listed
from serrate.ir.ragged import Lengths, RaggedIterDomain, total_of
from serrate.ir.recipes import RunningSum
from serrate.ir.transforms import Known, Outputs, Transform, divisor, finish, merge, once, plain, serial

Pair = tuple[IterDomain, RaggedIterDomain]


@dataclass(frozen=True, eq=False)
class Partition(Transform):
    """I -> (C, R) with i = start[c] + r.

    Under G, `starts` holds one row of K+1 boundaries per g, and row g*K + c of R is part c of g:
    i = starts[g*(K+1) + c] + r.
    With `lengths`, rows are described by two arrays of K elements (per g), and gaps between them belong to no row.
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
        """Whether the rows, back to back, cover the whole domain: the last of the K+1 boundaries is then its end."""
        return self.lengths is None and self.group is None

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = self.outputs
        return (self.starts[self._first(known) + known[component.uid]] + known[ragged.uid],)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        index, first, count = known[self.inputs[0].uid], self._first(known), self.outputs[0].extent_expr
        # There are K starts and no end: the last row has no next boundary to compare with.
        boundaries = count if self.lengths is None else maximum(count - 1, 0)
        component = search(self.starts, boundaries, index, first)
        return (component, index - self.starts[first + component])

    def _first(self, known: Known) -> Expr:
        width = self.outputs[0].extent_expr + (1 if self.lengths is None else 0)
        return const(0) if self.group is None else known[self.group.uid] * width


def partition(
    domain: IterDomain,
    offsets: Lengths,
    count: int | Expr | None = None,
    *,
    lengths: Lengths | None = None,
    under: Sequence[IterDomain] = (),
    names: tuple[str, str] | None = None,
    program: str | None = None,
) -> Pair:
    """I -> (C, R) by K+1 boundaries: ints, a tensor, or a runtime `Array` (then `count` is K).

    `under` names preceding regular domains that each have a row of boundaries per position. A ragged domain is under its
    component. All rows have the same number K of parts; the merge of the preceding domains with C owns R.

    With `lengths`, the first argument holds the start of each row, and there may be gaps between rows, as in padded or aligned
    storage. Rows must not overlap. Under other domains both have K numbers per position.

    `program` names the program that an `Array` belongs to: arrays of one name in two programs are two structures.

    Legal for serial iteration domains. Offsets start at 0, do not decrease and end at the extent (of the row). This is checked
    immediately if they are known, else at run time.

    >>> c, r = partition(IterDomain(325), [0, 127, 127, 325])
    >>> c.extent, r.extents, r.extent, r.offsets
    (3, (127, 0, 198), 325, (0, 127, 127, 325))
    >>> partition(IterDomain(100), [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[IterDomain(2)])[1].extents
    ((30, 0, 40, 30), (25, 35, 25, 15))
    >>> partition(r, [[0, 50, 127], [0, 0, 0], [0, 100, 198]])[1].extents
    ((50, 77), (0, 0), (100, 98))
    >>> partition(IterDomain(12), [0, 4, 8], lengths=[3, 0, 2])[1].extents
    (3, 0, 2)
    >>> partition(r, [[0, 60], [0, 0], [8, 98]], lengths=[[50, 60], [0, 0], [90, 100]])[1].extents
    ((50, 60), (0, 0), (90, 100))
    """
    serial("partition", domain)
    if domain.iter_type is not IterType.ITERATION:
        raise DomainError(
            f"partition: {domain} is a {domain.iter_type.name.lower()} domain; only iteration domains can be partitioned"
        )
    for each in under:
        if plain("partition", each).is_ragged:
            raise DomainError(
                f"partition: under must name regular domains, got {each}; a ragged domain is under its own component"
            )
    leading = (*under, *domain.owners)
    if lengths is not None:
        return _partition_by_rows(domain, offsets, lengths, count, leading, names, program)
    starts, number = _boundaries(domain, offsets, count, leading)
    return _partitioned(domain, starts, number, None, leading, names, program)


def _partitioned(
    domain: IterDomain,
    starts: Array,
    count: Expr,
    lengths: Array | None,
    leading: Sequence[IterDomain],
    names: tuple[str, str] | None,
    program: str | None,
) -> Pair:
    pairing = identity_of(starts, program)
    component_name, ragged_name = names or (f"{domain.name}c", f"{domain.name}r")

    def make() -> Outputs:
        component = IterDomain(count, name=component_name, pairing=pairing)
        group, owner = None, component
        place: Expr = COORDINATE
        extent, bound = domain.extent_expr, domain.bound
        if leading:
            group = _merged(leading)
            owner = merge(group, component)
            if lengths is None:
                # Row q = g*K + c begins at boundary g*(K+1) + c, which is q + g.
                place = COORDINATE + COORDINATE // divisor(count)
        for each in leading:
            if each.uid not in {d.uid for d in domain.owners}:
                bound = None if bound is None and each.bound is None else each.host_bound * (extent if bound is None else bound)
                extent = each.extent_expr * extent
        start, sums = starts[place], starts.recipe
        if lengths is not None:
            length, bound = lengths[COORDINATE], domain.host_bound if bound is None else bound
            extent = total_of(owner, length)
        elif isinstance(sums, RunningSum) and not leading and sums.coordinate not in sums.term.symbols and not sums.term.arrays:
            # Rows of one length need no boundaries.
            length, start = sums.term, sums.term * COORDINATE
        else:
            length = starts[place + 1] - starts[place]
        ragged = RaggedIterDomain(
            extent, name=ragged_name, pairing=pairing, component=owner, length=length, row_start=start, bound=bound
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
    """The array of boundaries, row by row, and the number of parts in each; validated as far as they are known."""
    rows = math.prod((d.extent_expr for d in leading), start=const(1))
    if isinstance(offsets, Array):
        if count is None:
            raise DomainError(f"partition by {offsets}: the number of components must be given")
        number = as_expr(count)
        if offsets.data is not None and number.value is not None and rows.value is not None:
            width = number.value + 1
            for row in range(rows.value):
                check_boundaries("partition: offsets", offsets.data[row * width : (row + 1) * width], _length(domain, row))
        return offsets, number
    given = integers("partition: offsets", offsets)
    nested = max(depth_of(given) - 1, 0)
    # The components of a ragged domain may be nested; its rows are then given nested as well, or flat.
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
        check_boundaries("partition: offsets", row_, _length(domain, k))
    if not leading:
        return Array(f"offsets{list(boundaries[0])}", boundaries[0]), const(width)
    flat = tuple(b for row_ in boundaries for b in row_)
    return Array(f"offsets{[list(row_) for row_ in boundaries]}", flat), const(width)


def _length(domain: IterDomain, row: int) -> int | None:
    """The required end of one row of boundaries."""
    if not isinstance(domain, RaggedIterDomain):
        return domain.extent_expr.value
    count = domain.component.extent_expr.value
    return None if not count else domain.length_of(row % count).value


def _nesting(domain: RaggedIterDomain) -> int:
    """The number of leading dims of a ragged domain's rows: as many as were merged or combined into its component."""
    depth, component = 1, domain.component
    while component.definition is not None and component.definition.nests:
        depth, component = depth + 1, component.definition.inputs[0]
    return depth


def _rows(offsets: NestedInts) -> list[tuple[int, ...]]:
    """The innermost rows of nested offsets, in order."""
    assert isinstance(offsets, tuple)
    if offsets and isinstance(offsets[0], int):
        return [cast(tuple[int, ...], offsets)]
    return [row for inner in offsets for row in (_rows(inner) if inner else [()])]


def _partition_by_rows(
    domain: IterDomain,
    starts: Lengths,
    lengths: Lengths,
    count: int | Expr | None,
    leading: Sequence[IterDomain],
    names: tuple[str, str] | None,
    program: str | None,
) -> Pair:
    first, each = _array("starts", starts, domain, leading)
    length, widths = _array("lengths", lengths, domain, leading)
    if each is not None and widths is not None:
        if each != widths:
            raise DomainError(f"partition: as many lengths as starts are needed, got {_sizes(widths)} and {_sizes(each)}")
        assert first.data is not None and length.data is not None
        width = each[0] if each else 0
        for row in range(len(each)):
            part = slice(row * width, (row + 1) * width)
            _check_rows(first.data[part], length.data[part], _length(domain, row))
        count = width
    if count is None:
        raise DomainError(f"partition by {first}, {length}: the number of components must be given")
    return _partitioned(domain, first, as_expr(count), length, leading, names, program)


def _sizes(widths: Sequence[int]) -> str:
    return str(widths[0]) if len(widths) == 1 else str(list(widths))


def _array(what: str, given: Lengths, domain: IterDomain, leading: Sequence[IterDomain]) -> tuple[Array, list[int] | None]:
    """Starts or lengths as one array; and, if they are known, how many there are under each position of the leading domains."""
    if isinstance(given, Array):
        return given, None
    known = integers(f"partition: {what}", given)
    if depth_of(known) > 1 and not leading:
        raise DomainError(f"partition: {what} must have one dim, got {given}")
    rows = _rows(known) if leading else [cast(tuple[int, ...], known)]
    needed = math.prod((d.extent_expr for d in leading), start=const(1)).value
    if needed is not None and len(rows) != needed:
        raise DomainError(f"partition of {domain}: expected one row of {what} for each of {needed} components, got {len(rows)}")
    if len({len(row) for row in rows}) > 1:
        raise DomainError(f"partition of {domain}: every component must have the same number of {what}, got {listed(known)}")
    shown = listed(known) if leading else list(rows[0])
    return Array(f"{what}{shown}", tuple(b for row in rows for b in row)), [len(row) for row in rows]


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
