"""Recording a reduction: the dims it keeps, the domains it runs over, and the number of elements it counts.

In: a `TensorView`, dims and a reduction. Out: one view per state. `reductions` and `normalise` build on this.
"""

from __future__ import annotations

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.common import counted, counting
from serrate.frontend.ops.elementwise import eq, typed, where
from serrate.frontend.ops.structure import as_flattened, viewed
from serrate.frontend.shapes import shown
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, symbol
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine, cover
from serrate.ir.recipes import Largest
from serrate.ir.reductions import SUM, Reduction
from serrate.ir.storage import collapse
from serrate.ir.tile import Accumulate, Store
from serrate.ir.transforms import Merge
from serrate.ir.values import Value, call, carried_dtype, constant, extent
from serrate.ir.view import TensorView


def reduced(
    kind: Reduction, x: TensorView, dims: tuple[int, ...], dtype: torch.dtype, state: torch.dtype, *extra: Value
) -> tuple[TensorView, ...]:
    """Records a reduction of `x`; returns one view per state, over the remaining dims.

    `extra` are additional values per element, each with its own dtype.
    """
    fusion = x.fusion
    _check_rows_are_owned(kind, x, dims)
    x, dims = _all_at_once(x, dims) if kind.commutative and not extra else (x, dims)
    x, dims = _flat(x, dims)
    inside = _inside_kept(x, dims)
    if inside:
        # Sum words first, then sentences across documents.
        inner = reduced(kind, x, inside, state, state)[0]
        return reduced(kind, inner, tuple(d - len([k for k in inside if k < d]) for d in dims if d not in inside), dtype, state)
    over = tuple(x.domains[d] for d in dims)
    kept = tuple(_across(d, over) for k, d in enumerate(x.domains) if k not in dims)
    value = x.at(x.domains)
    lifted = value if carried_dtype(value.dtype) == state else call("cast", value, dtype=state)
    dtypes = (state, *(v.dtype for v in extra)) if extra else (state,) * len(kind.states)
    targets = tuple(fusion.tensor(t, kept) for t in dtypes)
    # Positions across which rows are reduced come first: they determine which rows are long enough.
    crossed = {d.uid for d in kept} - {d.uid for d in x.domains}
    first = tuple(d for d in kept if d.uid in crossed)
    domains = (*first, *over, *(d for d in kept if d.uid not in crossed)) if crossed else x.domains
    views = fusion.define(targets, domains, Accumulate(targets, kept, kind, (lifted, *extra), over))
    return views if dtype == state or len(views) > 1 else (typed(views[0], dtype), *views[1:])


def _flat(x: TensorView, dims: tuple[int, ...]) -> tuple[TensorView, tuple[int, ...]]:
    """Merges outer levels that are reduced together while the rows inside them are kept: sentences of all documents."""
    for r in dims:
        row = x.domains[r]
        c = next((k for k in dims if isinstance(row, RaggedIterDomain) and x.domains[k].uid == row.component.uid), None)
        if c is not None and any(k not in dims and _deep_inside(x, d, row) for k, d in enumerate(x.domains)):
            left = tuple(k - (k > r) for k in dims if k != r)
            return _flat(as_flattened(x, component_dim=c, ragged_dim=r), left)
    for k, rows in enumerate(x.domains):
        counts = counting(x, k)
        if isinstance(rows, RaggedIterDomain) and len(counts) > 1 and k not in dims and {*counts} <= {*dims}:
            # Equal numbers of parts: the rows are indexed by both dims merged.
            g, *others = counts
            logical = [rows.component if j == g else d for j, d in enumerate(x.domains) if j not in others]
            return viewed(x, logical), tuple(j - len([o for o in others if o < j]) for j in dims if j not in others)
    return x, dims


def _check_rows_are_owned(kind: Reduction, x: TensorView, dims: tuple[int, ...]) -> None:
    """Raises if only some of the dims that index rows are reduced while the rows are kept: rows of different lengths have no sum.

    All of these dims can be reduced together, position by position. A reduction whose states are not elements again must run in
    one step.
    """
    for k in range(x.ndim):
        counts = [] if k in dims else counting(x, k)
        gone = [d for d in counts if d in dims]
        if gone and gone != counts:
            raise ShapeError(
                f"{kind}: dim {gone[-1]} of {shown(x)} counts the rows of dim {k}, which differ in length, so it cannot be "
                f"reduced alone; reduce dim {k} as well, or dims {tuple(counts)} together, position by position"
            )
        inner = counted(x, k) if gone else []
        if inner and not kind.is_plain:
            raise ShapeError(
                f"{kind}: dims {dims} of {shown(x)} cannot be reduced in one step while dim {k} between them is kept; reduce dim "
                f"{inner[-1]} first"
            )


def _inside_kept(x: TensorView, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Ragged dims nested in rows that are kept while the dims that index those rows are reduced."""
    across = [d for k, d in enumerate(x.domains) if k not in dims and any(c in dims for c in counting(x, k))]
    return tuple(k for k in dims if any(_deep_inside(x, x.domains[k], d) for d in across))


def _across(domain: IterDomain, over: tuple[IterDomain, ...]) -> IterDomain:
    """A dim of the result. If only the component of a ragged dim is reduced, the ragged dim becomes regular, as long as the
    longest row: each position is reduced across the rows that reach it."""
    if not isinstance(domain, RaggedIterDomain) or all(d.uid != domain.component.uid for d in over):
        return domain
    length, count = domain.length, domain.component.extent_expr
    longest = Array(f"longest({length.substitute({COORDINATE: symbol('c')})})", recipe=Largest(length, COORDINATE, count))
    return cover(domain, longest[0])


def _all_at_once(x: TensorView, dims: tuple[int, ...]) -> tuple[TensorView, tuple[int, ...]]:
    """Flattens several ragged dims that are not nested and are all reduced: the same elements, as they lie in memory."""
    over = [x.domains[d] for d in dims]
    ragged = [d for d in over if isinstance(d, RaggedIterDomain)]
    kept = [d for k, d in enumerate(x.domains) if k not in dims]
    flat = collapse(over)
    if len(ragged) < 2 or any(d.is_ragged for d in (*kept, *flat)):
        return x, dims
    products = len({d.component.uid for d in ragged}) < len(ragged)
    independent = len([d for d in flat if all(d.uid != own.uid for own in x.domains)]) > 1
    if not products and not independent:
        return x, dims
    return viewed(x, (*flat, *kept)), tuple(range(len(flat)))


def _inside(domain: IterDomain, outer: IterDomain) -> bool:
    """Whether the rows of one ragged domain are nested in those of another, either way."""
    if not isinstance(domain, RaggedIterDomain) or domain.uid == outer.uid:
        return False
    made = domain.component.definition
    combined = made.inputs if isinstance(made, Combine) else ()
    return any(d.uid == outer.uid for user in (combined, *domain.component.derived.values()) for d in user)


def _deep_inside(x: TensorView, domain: IterDomain, outer: IterDomain) -> bool:
    """Whether rows are nested, directly or indirectly, in those of another dim."""
    return _inside(domain, outer) or any(_inside(domain, d) and _deep_inside(x, d, outer) for d in x.domains)


def _merged_from(component: IterDomain) -> list[IterDomain]:
    made = component.definition
    return [p for part in made.inputs for p in (part, *_merged_from(part))] if isinstance(made, Merge) else []


def keep(x: TensorView, reduced: TensorView, dims: tuple[int, ...], keepdim: bool) -> TensorView:
    """Inserts extent-1 dims where `dims` were reduced."""
    if not keepdim:
        return reduced
    logical = list(reduced.domains)
    for dim in sorted(dims):
        logical.insert(dim, IterDomain(1, name=x.fusion.fresh("o")))
    return viewed(reduced, logical)


def count(x: TensorView, dims: tuple[int, ...], like: TensorView, dtype: torch.dtype) -> TensorView:
    """The number of elements in a reduction over `dims`, as a tensor over `like`'s domains."""
    fusion = x.fusion
    if crosses_rows(x, dims):
        # Across rows, only those that are long enough count.
        ones = where(eq(x, x), 1.0, 1.0)
        return reduced(SUM, ones, dims, dtype, dtype)[0]
    value = constant(1.0, dtype)
    # If a ragged dim and its component are both reduced, the elements of all rows count; the remaining dims are independent.
    for domain in collapse([x.domains[d] for d in dims]):
        value = call("mul", value, call("cast", extent(domain), dtype=dtype), dtype=dtype)
    out = fusion.tensor(dtype, like.domains)
    return fusion.define([out], like.domains, Store(out, like.domains, value))[0]


def crosses_rows(x: TensorView, dims: tuple[int, ...]) -> bool:
    """Whether a reduction runs across rows, position by position: the rows stay, and the dims that index them are reduced."""
    x, dims = _flat(x, dims)
    over = {x.domains[d].uid for d in dims}
    kept = [d for k, d in enumerate(x.domains) if k not in dims]
    return any(isinstance(d, RaggedIterDomain) and {o.uid for o in (d.component, *d.owners)} & over for d in kept)
