"""Reductions over regular, ragged and component dims.

In: a `TensorView` and dims. Out: a `TensorView` without them (or with extent 1 in their place). Holes never count.
"""

from __future__ import annotations

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.common import Dims, Number, dims_of, floating
from serrate.frontend.ops.elementwise import cast, div, eq, maximum, sqrt, square, sub, typed, where
from serrate.frontend.ops.reducing import count, crosses_rows, keep, reduced
from serrate.ir.reductions import ALL, ANY, ARGMAX, ARGMIN, MAX, MIN, NO_PLACE, PROD, SUM, WELFORD, Reduction
from serrate.ir.values import carried_dtype, position
from serrate.ir.view import TensorView


def sum(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.sum`; integers and bools sum to int64."""
    dims = dims_of("sum", x, dim)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return keep(x, reduced(SUM, x, dims, dtype, carried_dtype(dtype))[0], dims, keepdim)


def prod(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """The product; integers and bools multiply to int64."""
    dims = dims_of("prod", x, dim)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return keep(x, reduced(PROD, x, dims, dtype, carried_dtype(dtype))[0], dims, keepdim)


def amax(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.amax`; NaN propagates, an empty row gives the smallest value of the dtype."""
    dims = dims_of("amax", x, dim)
    return keep(x, reduced(MAX, x, dims, x.dtype, carried_dtype(x.dtype))[0], dims, keepdim)


def amin(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.amin`; NaN propagates, an empty row gives the largest value of the dtype."""
    dims = dims_of("amin", x, dim)
    return keep(x, reduced(MIN, x, dims, x.dtype, carried_dtype(x.dtype))[0], dims, keepdim)


def argmax(x: TensorView, dim: int, keepdim: bool = False) -> TensorView:
    """`torch.argmax` over one dim: the first position of the largest element (NaN is largest); -1 for an empty row.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(argmax(ops.as_nested(x, offsets), 1))
    >>> f.evaluate(torch.tensor([1.0, 5.0, 5.0, 2.0]), torch.tensor([0, 3, 3, 4]))
    tensor([ 1, -1,  0])
    """
    return _arg(ARGMAX, x, dim, keepdim)[1]


def argmin(x: TensorView, dim: int, keepdim: bool = False) -> TensorView:
    """`torch.argmin` over one dim: the first position of the smallest element (NaN is smallest); -1 for an empty row."""
    return _arg(ARGMIN, x, dim, keepdim)[1]


def max(x: TensorView, dim: int, keepdim: bool = False) -> tuple[TensorView, TensorView]:
    """`torch.max` over one dim: the largest elements and their first positions."""
    return _arg(ARGMAX, x, dim, keepdim)


def min(x: TensorView, dim: int, keepdim: bool = False) -> tuple[TensorView, TensorView]:
    """`torch.min` over one dim: the smallest elements and their first positions."""
    return _arg(ARGMIN, x, dim, keepdim)


def _arg(kind: Reduction, x: TensorView, dim: int, keepdim: bool) -> tuple[TensorView, TensorView]:
    dims = dims_of(kind.name, x, dim)
    if len(dims) != 1:
        raise ShapeError(f"{kind}: expected one dim, got {dim}")
    state = torch.uint8 if x.dtype == torch.bool else carried_dtype(x.dtype)
    best, place = reduced(kind, cast(x, state), dims, state, state, position(x.domains[dims[0]]))
    found = where(eq(place, NO_PLACE), -1, place)
    return keep(x, typed(best, x.dtype), dims, keepdim), keep(x, found, dims, keepdim)


def any(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.any`."""
    dims = dims_of("any", x, dim)
    return keep(x, reduced(ANY, cast(x, torch.bool), dims, torch.bool, torch.bool)[0], dims, keepdim)


def all(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.all`."""
    dims = dims_of("all", x, dim)
    return keep(x, reduced(ALL, cast(x, torch.bool), dims, torch.bool, torch.bool)[0], dims, keepdim)


def mean(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.mean`; an empty row gives NaN."""
    dtype, dims = floating("mean", x), dims_of("mean", x, dim)
    state = carried_dtype(dtype)
    total = reduced(SUM, x, dims, state, state)[0]
    result = div(total, count(x, dims, total, state))
    return keep(x, typed(result, dtype), dims, keepdim)


def moments(x: TensorView, dims: tuple[int, ...]) -> tuple[TensorView, TensorView, TensorView]:
    """The number of elements, their mean, and the sum of squared distances from it."""
    state = carried_dtype(floating("var", x))
    if not crosses_rows(x, dims):
        counted, average, squares = reduced(WELFORD, x, dims, state, state)
        return counted, average, squares
    # Across rows there is no first element to measure distances from, so the mean is computed first.
    wide = typed(x, state)
    total = reduced(SUM, wide, dims, state, state)[0]
    counted = count(x, dims, total, state)
    average = div(total, counted)
    away = square(sub(wide, keep(x, average, dims, True)))
    return counted, average, reduced(SUM, away, dims, state, state)[0]


def var(x: TensorView, dim: Dims | None = None, correction: Number = 1, keepdim: bool = False) -> TensorView:
    """`torch.var`; an empty row gives NaN."""
    dims = dims_of("var", x, dim)
    count, _, squares = moments(x, dims)
    result = div(squares, maximum(sub(count, correction), 0.0))
    return keep(x, typed(result, x.dtype), dims, keepdim)


def std(x: TensorView, dim: Dims | None = None, correction: Number = 1, keepdim: bool = False) -> TensorView:
    """`torch.std`: the root of `var`, rounded once."""
    dims = dims_of("std", x, dim)
    count, _, squares = moments(x, dims)
    variance = div(squares, maximum(sub(count, correction), 0.0))
    # Where nothing varies, the gradient is 0, as in torch.
    still = eq(variance, 0.0)
    result = where(still, 0.0, sqrt(where(still, 1.0, variance)))
    return keep(x, typed(result, x.dtype), dims, keepdim)
