"""Softmax and norms, composed of reductions and elementwise steps; no later stage knows them by name.

In: a `TensorView` and dims. Out: a `TensorView` of the same structure.
"""

from __future__ import annotations

import torch

from serrate.frontend.ops.common import Dims, Operand, dims_of, floating
from serrate.frontend.ops.elementwise import (
    add,
    cast,
    div,
    elementwise,
    eq,
    log,
    mul,
    reciprocal,
    rsqrt,
    square,
    sub,
    typed,
    where,
)
from serrate.frontend.ops.reducing import count, keep, reduced
from serrate.frontend.ops.reductions import moments
from serrate.ir.reductions import SOFTMAX, SUM
from serrate.ir.values import carried_dtype
from serrate.ir.view import TensorView


def softmax_states(x: TensorView, dim: Dims) -> tuple[tuple[int, ...], TensorView, TensorView]:
    dims = dims_of("softmax", x, dim)
    state = carried_dtype(floating("softmax", x))
    largest, total = reduced(SOFTMAX, x, dims, state, state)
    return dims, largest, total


def _undefined(largest: TensorView) -> TensorView:
    """0, or NaN where the maximum is infinite: such a row has no softmax."""
    return sub(largest, largest)


def softmax(x: TensorView, dim: Dims, dtype: torch.dtype | None = None) -> TensorView:
    """`torch.softmax` over one or more dims, ragged or regular."""
    x = x if dtype is None else cast(x, dtype)
    dims, largest, total = softmax_states(x, dim)
    return _weights(x, dims, largest, add(reciprocal(total), _undefined(largest)))


def softmax_or_zero(x: TensorView, dim: Dims) -> TensorView:
    """The same, and 0 in rows that have nothing but -inf: weights of a query that sees no key, as torch has them."""
    dims, largest, total = softmax_states(x, dim)
    scale = add(reciprocal(total), _undefined(largest))
    return _weights(x, dims, largest, where(eq(total, 0), 0.0, scale))


def _weights(x: TensorView, dims: tuple[int, ...], largest: TensorView, scale: TensorView) -> TensorView:
    scale = keep(x, scale, dims, True)
    power = elementwise("exp_diff", scale.dtype, x, keep(x, largest, dims, True), compute=scale.dtype)
    return typed(mul(power, scale), x.dtype)


def log_softmax(x: TensorView, dim: Dims, dtype: torch.dtype | None = None) -> TensorView:
    """`torch.log_softmax` over a ragged or a regular dim."""
    x = x if dtype is None else cast(x, dtype)
    dims, largest, total = softmax_states(x, dim)
    scale = keep(x, add(log(total), _undefined(largest)), dims, True)
    return typed(sub(sub(x, keep(x, largest, dims, True)), scale), x.dtype)


def logsumexp(x: TensorView, dim: Dims, keepdim: bool = False) -> TensorView:
    """`torch.logsumexp`; an empty row gives -inf."""
    dims, largest, total = softmax_states(x, dim)
    return keep(x, typed(add(largest, log(total)), x.dtype), dims, keepdim)


def _affine(x: TensorView, normal: TensorView, weight: Operand | None, bias: Operand | None) -> TensorView:
    normal = normal if weight is None else mul(normal, weight)
    return typed(normal if bias is None else add(normal, bias), x.dtype)


def layer_norm(
    x: TensorView, dim: Dims = -1, weight: TensorView | None = None, bias: TensorView | None = None, eps: float = 1e-5
) -> TensorView:
    """Normalises to mean 0 and variance 1 over `dim` (any dims, including ragged ones), then scales and shifts."""
    dims = dims_of("layer_norm", x, dim)
    count, average, squares = moments(x, dims)
    scale = rsqrt(add(div(squares, count), eps))
    normal = mul(sub(x, keep(x, average, dims, True)), keep(x, scale, dims, True))
    return _affine(x, normal, weight, bias)


def rms_norm(x: TensorView, dim: Dims = -1, weight: TensorView | None = None, eps: float | None = None) -> TensorView:
    """Divides by the root of the mean square over `dim`, then scales."""
    dims, state = dims_of("rms_norm", x, dim), carried_dtype(floating("rms_norm", x))
    total = reduced(SUM, square(typed(x, state)), dims, state, state)[0]
    scale = rsqrt(add(div(total, count(x, dims, total, state)), torch.finfo(x.dtype).eps if eps is None else eps))
    return _affine(x, mul(x, keep(x, scale, dims, True)), weight, None)
