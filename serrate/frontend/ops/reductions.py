"""Reductions over regular, ragged and component dims.

In: a `TensorView` and dims. Out: a `TensorView` without them (or with extent 1 in their place). Holes never count.
"""

from __future__ import annotations

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.common import Dims, Number, dims_of, floating
from serrate.frontend.ops.elementwise import cast, div, maximum, sub
from serrate.frontend.ops.structure import viewed
from serrate.ir.domains import IterDomain
from serrate.ir.fusion import TensorView, collapse, storage_of
from serrate.ir.reductions import reduction
from serrate.ir.tile import Accumulate, Store
from serrate.ir.values import call, carried_dtype, constant, extent


def reduced(name: str, x: TensorView, dims: tuple[int, ...], dtype: torch.dtype, state: torch.dtype) -> tuple[TensorView, ...]:
    """Records a reduction of `x`; gives one view for each state, over the dims that are left."""
    fusion, kind = x.fusion, reduction(name)
    over = tuple(x.domains[d] for d in dims)
    kept = tuple(d for k, d in enumerate(x.domains) if k not in dims)
    try:
        storage_of(kept)
    except ShapeError:
        raise ShapeError(
            f"{name} over a component dim alone: its rows have different lengths; reduce the ragged dim too, or to_padded first"
        ) from None
    value = x.at(x.domains)
    lifted = value if carried_dtype(value.dtype) == state else call("cast", value, dtype=state)
    targets = tuple(fusion.tensor(state, kept) for _ in kind.states)
    views = fusion.define(targets, x.domains, Accumulate(targets, kept, kind, (lifted,), over))
    return views if dtype == state or len(views) > 1 else (cast(views[0], dtype),)


def keep(x: TensorView, reduced: TensorView, dims: tuple[int, ...], keepdim: bool) -> TensorView:
    """Puts extent-1 dims back where `dims` were reduced."""
    if not keepdim:
        return reduced
    logical = list(reduced.domains)
    for dim in sorted(dims):
        logical.insert(dim, IterDomain(1, name=x.fusion.fresh("o")))
    return viewed(reduced, logical)


def sum(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.sum`; integers and bools sum to int64."""
    dims = dims_of(x, dim)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return keep(x, reduced("sum", x, dims, dtype, carried_dtype(dtype))[0], dims, keepdim)


def prod(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """The product; integers and bools multiply to int64."""
    dims = dims_of(x, dim)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return keep(x, reduced("prod", x, dims, dtype, carried_dtype(dtype))[0], dims, keepdim)


def amax(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.amax`; NaN wins, an empty row gives the smallest value of the dtype."""
    dims = dims_of(x, dim)
    return keep(x, reduced("max", x, dims, x.dtype, carried_dtype(x.dtype))[0], dims, keepdim)


def amin(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.amin`; NaN wins, an empty row gives the largest value of the dtype."""
    dims = dims_of(x, dim)
    return keep(x, reduced("min", x, dims, x.dtype, carried_dtype(x.dtype))[0], dims, keepdim)


def any(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.any`."""
    dims = dims_of(x, dim)
    return keep(x, reduced("any", cast(x, torch.bool), dims, torch.bool, torch.bool)[0], dims, keepdim)


def all(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.all`."""
    dims = dims_of(x, dim)
    return keep(x, reduced("all", cast(x, torch.bool), dims, torch.bool, torch.bool)[0], dims, keepdim)


def count(x: TensorView, dims: tuple[int, ...], like: TensorView, dtype: torch.dtype) -> TensorView:
    """How many elements a reduction over `dims` counts, as a tensor over `like`'s domains."""
    fusion = x.fusion
    value = constant(1.0, dtype)
    # A ragged dim and its component, both reduced, count the elements of all rows.
    for domain in collapse([x.domains[d] for d in dims]):
        value = call("mul", value, call("cast", extent(domain), dtype=dtype), dtype=dtype)
    out = fusion.tensor(dtype, like.domains)
    return fusion.define([out], like.domains, Store(out, like.domains, value))[0]


def mean(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.mean`; an empty row gives NaN."""
    dtype, dims = floating("mean", x), dims_of(x, dim)
    state = carried_dtype(dtype)
    total = reduced("sum", x, dims, state, state)[0]
    result = div(total, count(x, dims, total, state))
    return keep(x, cast(result, dtype), dims, keepdim)


def moments(x: TensorView, dims: tuple[int, ...]) -> tuple[TensorView, TensorView, TensorView]:
    state = carried_dtype(floating("var", x))
    count, average, squares = reduced("welford", x, dims, state, state)
    return count, average, squares


def var(x: TensorView, dim: Dims | None = None, correction: Number = 1, keepdim: bool = False) -> TensorView:
    """`torch.var`; an empty row gives NaN."""
    dims = dims_of(x, dim)
    count, _, squares = moments(x, dims)
    result = div(squares, maximum(sub(count, correction), 0.0))
    return keep(x, cast(result, x.dtype), dims, keepdim)
