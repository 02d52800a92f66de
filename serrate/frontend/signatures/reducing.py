"""Reductions, softmax, norms, scans and sorting under torch's signatures.

In: traced tensors, dims and options as torch's functions take them. Out: traced tensors, or named tuples of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from serrate.errors import CallError, ShapeError
from serrate.frontend import ops
from serrate.frontend.ops.common import Dims, Number
from serrate.frontend.ops.elementwise import typed
from serrate.frontend.ops.sorting import ValuesIndices
from serrate.frontend.shapes import shown
from serrate.ir.values import carried_dtype
from serrate.ir.view import TensorView

Dtype = torch.dtype | None


def _as(input: TensorView, dtype: Dtype) -> TensorView:
    return input if dtype is None else ops.cast(input, dtype)


def sum(input: TensorView, dim: Dims | None = None, keepdim: bool = False, *, dtype: Dtype = None) -> TensorView:
    return _as(ops.sum(_as(input, dtype), dim, keepdim), dtype)


def prod(input: TensorView, dim: Dims | None = None, keepdim: bool = False, *, dtype: Dtype = None) -> TensorView:
    return _as(ops.prod(_as(input, dtype), dim, keepdim), dtype)


def mean(input: TensorView, dim: Dims | None = None, keepdim: bool = False, *, dtype: Dtype = None) -> TensorView:
    return ops.mean(_as(input, dtype), dim, keepdim)


def nansum(input: TensorView, dim: Dims | None = None, keepdim: bool = False, *, dtype: Dtype = None) -> TensorView:
    known = ops.where(ops.isnan(input), 0.0, input) if input.dtype.is_floating_point else input
    return sum(known, dim, keepdim, dtype=dtype)


def amax(input: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    return ops.amax(input, dim, keepdim)


def amin(input: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    return ops.amin(input, dim, keepdim)


class MinMax(NamedTuple):
    """Like the named tuple of `torch.aminmax`."""

    min: TensorView
    max: TensorView


def aminmax(input: TensorView, *, dim: int | None = None, keepdim: bool = False) -> MinMax:
    return MinMax(ops.amin(input, dim, keepdim), ops.amax(input, dim, keepdim))


def any(input: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    return ops.cast(input, torch.bool) if dim == () else ops.any(input, dim, keepdim)


def all(input: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    return ops.cast(input, torch.bool) if dim == () else ops.all(input, dim, keepdim)


def count_nonzero(input: TensorView, dim: Dims | None = None) -> TensorView:
    return ops.sum(ops.ne(input, 0), dim)


def argmax(input: TensorView, dim: int | None = None, keepdim: bool = False) -> TensorView:
    return ops.argmax(input, _named("argmax", input, dim), keepdim)


def argmin(input: TensorView, dim: int | None = None, keepdim: bool = False) -> TensorView:
    return ops.argmin(input, _named("argmin", input, dim), keepdim)


def _named(name: str, input: TensorView, dim: int | None) -> int:
    if dim is None:
        raise ShapeError(f"{name}: dim is required for a tensor of shape {shown(input)}")
    return dim


def max(input: TensorView, *args: Any, **kwargs: Any) -> Any:
    """`torch.max`: over everything, along a dim, or of two tensors, distinguished as in torch."""
    return _extremum("max", ops.max, ops.amax, ops.maximum, input, args, kwargs)


def min(input: TensorView, *args: Any, **kwargs: Any) -> Any:
    """`torch.min`, likewise."""
    return _extremum("min", ops.min, ops.amin, ops.minimum, input, args, kwargs)


def _extremum(
    name: str, along: Callable[..., Any], whole: Callable[..., Any], each: Callable[..., Any], input: Any, args: Any, kwargs: Any
) -> Any:
    def of_two(other: Any) -> Any:
        return each(input, other)

    def of_a_dim(dim: int, keepdim: bool = False) -> Any:
        return ValuesIndices(*along(input, dim, keepdim))

    if not args and not kwargs:
        return whole(input)
    two = "other" in kwargs or (args and isinstance(args[0], TensorView))
    chosen: Callable[..., Any] = of_two if two else of_a_dim
    try:
        inspect.signature(chosen).bind(*args, **kwargs)
    except TypeError as error:
        raise CallError(f"{name}: {error}; it takes input, or input and other, or input, dim and keepdim") from None
    return chosen(*args, **kwargs)


def _corrected(compute: Callable[[TensorView, Dims | None, Number, bool], Any]) -> Callable[..., Any]:
    """A function of an input, dims, a correction and keepdim, under the signature of `torch.var`."""

    def call(
        input: TensorView,
        dim: Dims | bool | None = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: Number | None = None,
    ) -> Any:
        if isinstance(dim, bool):  # the second argument of `torch.var(x, False)` is `unbiased`, not a dim
            dim, unbiased = None, dim
        if unbiased is not None and correction is not None:
            raise CallError("pass either unbiased or correction, not both")
        if unbiased is not None:
            correction = int(unbiased)
        return compute(input, dim, 1 if correction is None else correction, keepdim)

    return call


var = _corrected(ops.var)
std = _corrected(ops.std)
var_mean = _corrected(lambda x, dims, correction, keepdim: (ops.var(x, dims, correction, keepdim), ops.mean(x, dims, keepdim)))
std_mean = _corrected(lambda x, dims, correction, keepdim: (ops.std(x, dims, correction, keepdim), ops.mean(x, dims, keepdim)))


def vector_norm(
    x: TensorView, ord: Number = 2, dim: Dims | None = None, keepdim: bool = False, *, dtype: Dtype = None
) -> TensorView:
    """`torch.linalg.vector_norm`; 16-bit values are squared and summed in float32."""
    x = _as(x, dtype)
    size = ops.abs(typed(x, carried_dtype(x.dtype)))
    if ord == torch.inf:
        # The norm of nothing is 0.
        found = ops.maximum(ops.amax(size, dim, keepdim), 0.0)
    elif ord == -torch.inf:
        found = ops.amin(size, dim, keepdim)
    elif ord == 0:
        found = ops.cast(ops.sum(ops.ne(size, 0), dim, keepdim), size.dtype)
    elif ord == 1:
        found = ops.sum(size, dim, keepdim)
    elif ord == 2:
        found = _unless_zero(ops.sqrt, ops.sum(ops.square(size), dim, keepdim))
    elif ord < 0:
        found = ops.pow(ops.sum(ops.pow(size, float(ord)), dim, keepdim), 1.0 / ord)
    else:
        powers = ops.pow(size, float(ord)) if ord >= 1 else _unless_zero(lambda each: ops.pow(each, float(ord)), size)
        found = _unless_zero(lambda total: ops.pow(total, 1.0 / ord), ops.sum(powers, dim, keepdim))
    return typed(found, x.dtype)


def _unless_zero(root: Callable[[TensorView], TensorView], x: TensorView) -> TensorView:
    """A root of a tensor; where that is 0, its gradient is 0, as in torch, and not infinite."""
    zero = ops.eq(x, 0.0)
    return ops.where(zero, 0.0, root(ops.where(zero, 1.0, x)))


def norm(
    input: TensorView, p: Number | str | None = "fro", dim: Dims | None = None, keepdim: bool = False, dtype: Dtype = None
) -> TensorView:
    if isinstance(p, str) and p != "fro":
        raise CallError(f"norm: p must be a number or 'fro', got {p!r}")
    return vector_norm(input, 2 if p is None or isinstance(p, str) else p, dim, keepdim, dtype=dtype)


def softmax(input: TensorView, dim: int | None = None, dtype: Dtype = None, *, _stacklevel: int = 3) -> TensorView:
    return ops.softmax(input, _named("softmax", input, dim), dtype)


def log_softmax(input: TensorView, dim: int | None = None, dtype: Dtype = None, *, _stacklevel: int = 3) -> TensorView:
    return ops.log_softmax(input, _named("log_softmax", input, dim), dtype)


def softmin(input: TensorView, dim: int | None = None, dtype: Dtype = None, *, _stacklevel: int = 3) -> TensorView:
    return ops.softmax(ops.neg(input), _named("softmin", input, dim), dtype)


def functional_softmax(input: TensorView, dim: int | None = None, _stacklevel: int = 3, dtype: Dtype = None) -> TensorView:
    return softmax(input, dim, dtype)


def functional_log_softmax(input: TensorView, dim: int | None = None, _stacklevel: int = 3, dtype: Dtype = None) -> TensorView:
    return log_softmax(input, dim, dtype)


def logsumexp(input: TensorView, dim: Dims, keepdim: bool = False) -> TensorView:
    floating = input if input.dtype.is_floating_point else ops.cast(input, torch.get_default_dtype())
    return ops.logsumexp(floating, dim, keepdim)


def cumsum(input: TensorView, dim: int, *, dtype: Dtype = None) -> TensorView:
    return ops.cumsum(_as(input, dtype), dim)


def cummax(input: TensorView, dim: int) -> ops.ValuesIndices:
    return ops.cummax(input, dim)


def cummin(input: TensorView, dim: int) -> ops.ValuesIndices:
    return ops.cummin(input, dim)


def cumprod(input: TensorView, dim: int, *, dtype: Dtype = None) -> TensorView:
    return ops.cumprod(_as(input, dtype), dim)


def sort(input: TensorView, dim: int = -1, descending: bool = False, stable: bool = False) -> ValuesIndices:
    return ops.sort(input, dim, descending)


def argsort(input: TensorView, dim: int = -1, descending: bool = False, stable: bool = False) -> TensorView:
    return ops.argsort(input, dim, descending)


def topk(input: TensorView, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> ValuesIndices:
    return ops.topk(input, k, dim, largest)
