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
    scale = keep(x, add(reciprocal(total), _undefined(largest)), dims, True)
    return typed(mul(_powers(x, dims, largest), scale), x.dtype)


def softmax_terms(x: TensorView, dim: Dims) -> tuple[TensorView, TensorView]:
    """The exponentials of a softmax, and what they are multiplied by, with a dim of extent 1 in place of `dim`. That is 0 for
    rows that have nothing but -inf: a query that sees no key gets zeros, as in torch."""
    dims, largest, total = softmax_states(x, dim)
    nothing = eq(total, 0)
    # A total of 0 is never divided by: the gradient would multiply the infinity by 0.
    scale = add(reciprocal(where(nothing, 1.0, total)), _undefined(largest))
    return _powers(x, dims, largest), keep(x, where(nothing, 0.0, scale), dims, True)


def _powers(x: TensorView, dims: tuple[int, ...], largest: TensorView) -> TensorView:
    return elementwise("exp_diff", largest.dtype, x, keep(x, largest, dims, True), compute=largest.dtype)


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
