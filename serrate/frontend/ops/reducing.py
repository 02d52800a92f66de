"""How a reduction is recorded: what is left of a tensor's dims, over which domains it runs, how many elements it counts.

In: a `TensorView`, dims and a reduction. Out: one view for each state. `reductions` and `normalise` are built on this.
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
from serrate.ir.ragged_transforms import cover
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
    """Records a reduction of `x`; gives one view for each state, over the dims that are left.

    `extra` are further values of an element, each with a dtype of its own.
    """
    fusion = x.fusion
    _check_rows_are_owned(kind, x, dims)
    x, dims = _all_at_once(x, dims) if kind.commutative and not extra else (x, dims)
    x, dims = _flat(x, dims)
    inside = _inside_kept(x, dims)
    if inside:
        # Words are summed first, then sentences across documents.
        inner = reduced(kind, x, inside, state, state)[0]
        return reduced(kind, inner, tuple(d - len([k for k in inside if k < d]) for d in dims if d not in inside), dtype, state)
    over = tuple(x.domains[d] for d in dims)
    kept = tuple(_across(d, over) for k, d in enumerate(x.domains) if k not in dims)
    value = x.at(x.domains)
    lifted = value if carried_dtype(value.dtype) == state else call("cast", value, dtype=state)
    dtypes = (state, *(v.dtype for v in extra)) if extra else (state,) * len(kind.states)
    targets = tuple(fusion.tensor(t, kept) for t in dtypes)
    # Positions that rows are reduced across come first: they decide which rows reach that far.
    crossed = {d.uid for d in kept} - {d.uid for d in x.domains}
    first = tuple(d for d in kept if d.uid in crossed)
    domains = (*first, *over, *(d for d in kept if d.uid not in crossed)) if crossed else x.domains
    views = fusion.define(targets, domains, Accumulate(targets, kept, kind, (lifted, *extra), over))
    return views if dtype == state or len(views) > 1 else (typed(views[0], dtype), *views[1:])


def _flat(x: TensorView, dims: tuple[int, ...]) -> tuple[TensorView, tuple[int, ...]]:
    """Outer levels that are reduced together, rows inside them kept: sentences of all documents are sentences."""
    for r in dims:
        row = x.domains[r]
        c = next((k for k in dims if isinstance(row, RaggedIterDomain) and x.domains[k].uid == row.component.uid), None)
        if c is not None and any(k not in dims and _deep_inside(x, d, row) for k, d in enumerate(x.domains)):
            left = tuple(k - (k > r) for k in dims if k != r)
            return _flat(as_flattened(x, component_dim=c, ragged_dim=r), left)
    for k, rows in enumerate(x.domains):
        counts = counting(x, k)
        if isinstance(rows, RaggedIterDomain) and len(counts) > 1 and k not in dims and {*counts} <= {*dims}:
            # Parts of equal number: what counts the rows is made of both dims.
            g, *others = counts
            logical = [rows.component if j == g else d for j, d in enumerate(x.domains) if j not in others]
            return viewed(x, logical), tuple(j - len([o for o in others if o < j]) for j in dims if j not in others)
    return x, dims


def _check_rows_are_owned(kind: Reduction, x: TensorView, dims: tuple[int, ...]) -> None:
    """Raises where some of the dims that count rows are reduced and the rows are kept: rows of different lengths have no sum.

    Only all of them together have, position by position. What gives no elements again is reduced in one step or not at all.
    """
    for k in range(x.ndim):
        counts = [] if k in dims else counting(x, k)
        gone = [d for d in counts if d in dims]
        if gone and gone != counts:
            raise ShapeError(
                f"{kind}: dim {gone[-1]} of {shown(x)} counts the rows of dim {k}, which differ in length, so there is no {kind} "
                f"of them; reduce dim {k} as well, or, position by position, dims {tuple(counts)} together"
            )
        inner = counted(x, k) if gone else []
        if inner and not kind.is_plain:
            raise ShapeError(
                f"{kind}: dims {dims} of {shown(x)} cannot be reduced in one step, with dim {k} between them kept; reduce dim "
                f"{inner[-1]} first"
            )


def _inside_kept(x: TensorView, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dims that are rows inside of rows that are kept while what counts those is reduced."""
    across = [d for k, d in enumerate(x.domains) if k not in dims and any(c in dims for c in counting(x, k))]
    return tuple(k for k in dims if any(_deep_inside(x, x.domains[k], d) for d in across))


def _across(domain: IterDomain, over: tuple[IterDomain, ...]) -> IterDomain:
    """A dim of the result. The ragged dim whose components are reduced alone becomes a regular one, as long as the longest
    row: each position is reduced across the rows that reach it."""
    if not isinstance(domain, RaggedIterDomain) or all(d.uid != domain.component.uid for d in over):
        return domain
    length, count = domain.length, domain.component.extent_expr
    longest = Array(f"longest({length.substitute({COORDINATE: symbol('c')})})", recipe=Largest(length, COORDINATE, count))
    return cover(domain, longest[0])


def _all_at_once(x: TensorView, dims: tuple[int, ...]) -> tuple[TensorView, tuple[int, ...]]:
    """Several ragged dims that are not rows of rows, all reduced, with none left: the same elements as they lie in memory."""
    over = [x.domains[d] for d in dims]
    ragged = [d for d in over if isinstance(d, RaggedIterDomain)]
    kept = [d for k, d in enumerate(x.domains) if k not in dims]
    flat = collapse(over)
    if len(ragged) < 2 or any(d.is_ragged for d in (*kept, *flat)):
        return x, dims
    rectangles = len({d.component.uid for d in ragged}) < len(ragged)
    independent = len([d for d in flat if all(d.uid != own.uid for own in x.domains)]) > 1
    if not rectangles and not independent:
        return x, dims
    return viewed(x, (*flat, *kept)), tuple(range(len(flat)))


def _inside(domain: IterDomain, outer: IterDomain) -> bool:
    """Whether the rows of a ragged domain are parts of the rows of another one (or the other way round)."""
    if not isinstance(domain, RaggedIterDomain) or domain.uid == outer.uid:
        return False
    return any(d.uid == outer.uid for user in domain.component.derived.values() for d in user)


def _deep_inside(x: TensorView, domain: IterDomain, outer: IterDomain) -> bool:
    """Whether rows are inside those of another dim, or inside rows that are."""
    return _inside(domain, outer) or any(_inside(domain, d) and _deep_inside(x, d, outer) for d in x.domains)


def _merged_from(component: IterDomain) -> list[IterDomain]:
    made = component.definition
    return [p for part in made.inputs for p in (part, *_merged_from(part))] if isinstance(made, Merge) else []


def keep(x: TensorView, reduced: TensorView, dims: tuple[int, ...], keepdim: bool) -> TensorView:
    """Puts extent-1 dims back where `dims` were reduced."""
    if not keepdim:
        return reduced
    logical = list(reduced.domains)
    for dim in sorted(dims):
        logical.insert(dim, IterDomain(1, name=x.fusion.fresh("o")))
    return viewed(reduced, logical)


def count(x: TensorView, dims: tuple[int, ...], like: TensorView, dtype: torch.dtype) -> TensorView:
    """How many elements a reduction over `dims` counts, as a tensor over `like`'s domains."""
    fusion = x.fusion
    if crosses_rows(x, dims):
        # Across rows, only those count that reach so far.
        ones = where(eq(x, x), 1.0, 1.0)
        return reduced(SUM, ones, dims, dtype, dtype)[0]
    value = constant(1.0, dtype)
    # A ragged dim and its component, both reduced, count the elements of all rows; what is left does not depend on each other.
    for domain in collapse([x.domains[d] for d in dims]):
        value = call("mul", value, call("cast", extent(domain), dtype=dtype), dtype=dtype)
    out = fusion.tensor(dtype, like.domains)
    return fusion.define([out], like.domains, Store(out, like.domains, value))[0]


def crosses_rows(x: TensorView, dims: tuple[int, ...]) -> bool:
    """Whether a reduction goes from row to row, position by position: rows stay, and what counts them does not."""
    x, dims = _flat(x, dims)
    over = {x.domains[d].uid for d in dims}
    kept = [d for k, d in enumerate(x.domains) if k not in dims]
    return any(isinstance(d, RaggedIterDomain) and {o.uid for o in (d.component, *d.owners)} & over for d in kept)
