"""Broadcasting: the domains of an operation's result, and the index at which each operand is read.

In: operands (tensors of a fusion, Python numbers). Out: the result's domains and one index per operand. Dims are aligned from the
right, as in torch. Ragged dims must have the same structure: the same offsets, or offsets that are equal at run time. The dim of
a dense operand next to a ragged one may have extent 1, or be at least as long as the longest row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from serrate.errors import ShapeError, StructureMismatch
from serrate.frontend.shapes import equal_now, shown, size_shown
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array
from serrate.ir.fusion import AtLeastLongest, Equal, Fusion
from serrate.ir.ragged import RaggedIterDomain, lengths_array
from serrate.ir.transforms import entangled
from serrate.ir.values import Index
from serrate.ir.view import TensorView


def broadcast(fusion: Fusion, operation: str, views: Sequence[TensorView]) -> tuple[tuple[IterDomain, ...], list[Index]]:
    """The result's domains and the index at which each view is read."""
    rank = max(view.ndim for view in views)
    _check_not_crossed(operation, views)
    _check_counted_alike(operation, views)
    result: list[IterDomain] = []
    # If one operand has all ragged dims and the dims that index their rows, take them all from it.
    ordered = sorted(views, key=lambda view: -len([d for d in view.domains if d.is_ragged]))
    for dim in range(rank):
        found = [view.domains[dim - rank] for view in ordered if rank - dim <= view.ndim]
        ragged = [d for d in found if d.is_ragged]
        counting = [d for d in found if d.pairing is not None]
        wide = [d for d in found if d.extent != 1]
        chosen = (ragged or counting or wide or found)[0]
        short = next((v for v in views if v.ndim == rank - dim and dim and not v.domains[0].is_ragged), None)
        if short is not None and isinstance(chosen, RaggedIterDomain) and short.domains[0].extent != 1:
            if any(d.is_ragged for d in short.domains):
                raise ShapeError(
                    f"{operation} of {_operands(views)}: dims are aligned from the last, so dim 0 of {shown(short)}, which "
                    f"counts rows, is aligned with the ragged dim {dim}; unsqueeze(-1) adds a last dim"
                )
            raise ShapeError(f"{operation} of {_operands(views)}: {_beside_rows(fusion, dim, short, chosen)}")
        for other in found:
            if other is not chosen:
                later = f"{operation} of {_operands(views, later=True)}, dim {dim}"
                try:
                    match(fusion, f"{operation} of {_operands(views)}, dim {dim}", chosen, other, later)
                except ShapeError as error:
                    raise ShapeError(f"{error}{_per_row(fusion, rank, ordered)}") from None
        result.append(_second_index(fusion, chosen) if any(entangled(chosen, d) for d in result) else chosen)
    result = [_counted_here(fusion, dim - rank, result, ordered) for dim in range(rank)]
    return tuple(result), [index_into(view, result) for view in views]


def _check_not_crossed(operation: str, views: Sequence[TensorView]) -> None:
    """Raises if each of two ragged operands has a ragged dim where the other has a regular one: rows meet features."""
    for one, other in itertools.combinations([v for v in views if any(d.is_ragged for d in v.domains)], 2):
        pairs = list(zip(reversed(one.domains), reversed(other.domains), strict=False))
        ragged = [a.is_ragged and not b.is_ragged and b.extent != 1 for a, b in pairs]
        regular = [b.is_ragged and not a.is_ragged and a.extent != 1 for a, b in pairs]
        if one.ndim == other.ndim and any(ragged) and any(regular):
            raise ShapeError(
                f"{operation} of {_operands(views)}: ragged dims of one operand are aligned with regular dims of another, and "
                "the other way round; transpose one of them"
            )


def _check_counted_alike(operation: str, views: Sequence[TensorView]) -> None:
    """Raises if two aligned ragged dims have the dims that count their rows in different places: row i of one would meet all rows
    of the other, which have other lengths."""
    for one, other in itertools.combinations(views, 2):
        for rows, its in zip(reversed(one.domains), reversed(other.domains), strict=False):
            mine, theirs = _counting_place(one, rows), _counting_place(other, its)
            if mine is not None and theirs is not None and mine != theirs:
                first, second, at = (one, other, mine) if mine < theirs else (other, one, theirs)
                raise ShapeError(
                    f"{operation} of {_operands(views)}: dims are aligned from the last, so dim {at + first.ndim} of "
                    f"{shown(first)}, which counts rows, is not aligned with the dim of {shown(second)} that does; "
                    f"unsqueeze({second.ndim + max(mine, theirs) + 1}) adds a dim to {shown(second)}"
                )


def _counting_place(view: TensorView, rows: IterDomain) -> int | None:
    """The dim, counted from the end, that counts the rows of a ragged dim; None if no single dim does."""
    if not isinstance(rows, RaggedIterDomain):
        return None
    return next((k - view.ndim for k, d in enumerate(view.domains) if d.uid == rows.component.uid), None)


def _beside_rows(fusion: Fusion, dim: int, short: TensorView, rows: RaggedIterDomain) -> str:
    """A message: why a dense operand without a dim for rows cannot be aligned with ragged dim `dim`, and how to fix it."""
    first = short.domains[0]
    if size_shown(fusion, first) == size_shown(fusion, rows.component):
        return (
            f"dims are aligned from the last, so dim 0 of {shown(short)} is aligned with the ragged dim {dim}; "
            "to use one value for each row, add a dim there: y[:, None]"
        )
    return (
        f"the {size_shown(fusion, first)} positions of {shown(short)} are aligned with the ragged dim {dim}, but have no dim for "
        "the rows; use jt.with_values(y) for a flat [total, ...] tensor, [1, L, ...] for positions that all rows share"
    )


def _per_row(fusion: Fusion, rank: int, views: Sequence[TensorView]) -> str:
    """A hint for an operand [B] next to rows [B, r, D], to end a message; empty if there is no such operand."""
    counts = [size_shown(fusion, d.component) for d in views[0].domains if isinstance(d, RaggedIterDomain)]
    for view in views:
        if view.ndim == 1 and view.ndim < rank - 1 and size_shown(fusion, view.domains[0]) in counts[:1]:
            return f"; to use one value for each row, write y[:{', None' * (rank - 1)}]"
    return ""


def _counted_here(fusion: Fusion, dim: int, result: Sequence[IterDomain], views: Sequence[TensorView]) -> IterDomain:
    """A dim of the result; a ragged dim of one operand may be indexed by another operand's component of the same extent."""
    rows = result[dim]
    if not isinstance(rows, RaggedIterDomain) or any(d.uid == rows.component.uid for d in result):
        return rows
    owner = next(view for view in views if -dim <= view.ndim and view.domains[dim] is rows)
    place = next((k - owner.ndim for k, d in enumerate(owner.domains) if d.uid == rows.component.uid), None)
    return rows if place is None else under(result[place], rows, fusion.fresh("r"))


def under(component: IterDomain, rows: RaggedIterDomain, name: str) -> RaggedIterDomain:
    """Rows of the same lengths, indexed by another component domain of the same extent."""
    return RaggedIterDomain(
        rows.extent_expr, name=name, pairing=rows.pairing, component=component, length=rows.length, bound=rows.bound
    )


def _second_index(fusion: Fusion, domain: IterDomain) -> IterDomain:
    """A second index over the extent of a dim that the result already has, as in `x.unsqueeze(2) - x.unsqueeze(1)`, or that a dim
    of the result is made from, as in `x.unsqueeze(2) - x.unflatten(1, (2, 2)).unsqueeze(3)`."""
    if isinstance(domain, RaggedIterDomain):
        return under(domain.component, domain, fusion.fresh("r"))
    return apart(fusion, [domain], [domain])[0]


def apart(fusion: Fusion, domains: Sequence[IterDomain], taken: Collection[IterDomain]) -> tuple[IterDomain, ...]:
    """`domains`, with others over the same extents in place of those entangled with `taken`: a second index over one extent.

    Rows come with the dim that counts them: `[c0, r0]` becomes `[c1, r1]`. Outer levels are not copied.
    """
    copies: dict[int, IterDomain] = {}
    found: list[IterDomain] = []
    for domain in domains:
        if isinstance(domain, RaggedIterDomain) and domain.component.uid in copies:
            domain = under(copies[domain.component.uid], domain, fusion.fresh("r"))
        elif any(entangled(domain, d) for d in taken):
            if domain.is_ragged and copies:
                raise ShapeError("rows of several levels cannot be dims of one result twice; flatten the outer level first")
            name = fusion.fresh("r" if domain.is_ragged else "d")
            copy = domain.with_rows(domain.row_length, name=name, bound=domain.bound, total=domain.extent_expr)
            copies[domain.uid] = domain = copy
        found.append(domain)
    return tuple(found)


def _operands(views: Sequence[TensorView], *, later: bool = False) -> str:
    *first, last = (shown(view, later=later) for view in views)
    return f"{', '.join(first)} and {last}" if first else last


def index_into(view: TensorView, domains: Sequence[IterDomain]) -> Index:
    """The index at which `view` is read for a result over `domains`: aligned from the right, None for extent-1 dims."""
    aligned = domains[len(domains) - view.ndim :]
    return tuple(None if own.is_single and to.uid != own.uid else to for own, to in zip(view.domains, aligned, strict=True))


def match(fusion: Fusion, what: str, chosen: IterDomain, other: IterDomain, later: str | None = None) -> None:
    """Raises unless the dims of two operands can be aligned; whatever depends on lengths is checked at each call.

    `what` names operation, operands and dim; `later` does the same for messages of later calls.
    """
    later = later or what
    if other is chosen or (other.extent == 1 and not other.is_ragged):
        return
    if isinstance(chosen, RaggedIterDomain) and isinstance(other, RaggedIterDomain):
        # Rows and columns of one component, or rows and their permutation, also have one structure.
        if chosen.pairing == other.pairing and chosen.length is other.length:
            return
        left, right = lengths_array(chosen), lengths_array(other)
        if left.data is not None and right.data is not None:
            if left.data != right.data:
                raise StructureMismatch(f"{what}: the rows differ in length")
            return
        _require(fusion, Equal(left, right, f"{later}: the rows"))
        return
    if isinstance(chosen, RaggedIterDomain):
        fusion.checks.append(AtLeastLongest(other.extent_expr, chosen, f"{later}: the dense operand"))
        return
    if isinstance(other, RaggedIterDomain):
        raise ShapeError(f"{what}: one operand is ragged in this dim, and the other is not")
    if not equal_now(fusion, chosen, other):
        raise ShapeError(f"{what}: the sizes differ: {size_shown(fusion, chosen)} and {size_shown(fusion, other)}")
    if chosen.extent_expr is not other.extent_expr:
        _require(fusion, Equal(chosen.extent_expr, other.extent_expr, f"{later}: the sizes"))


def _require(fusion: Fusion, check: Equal) -> None:
    if check not in fusion.checks and not (isinstance(check.left, Array) and check.left == check.right):
        fusion.checks.append(check)
