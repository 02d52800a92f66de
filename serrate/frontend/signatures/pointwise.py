"""Elementwise operations under torch's signatures, built from `serrate.ops`.

In: traced tensors and Python numbers, as torch's functions take them. Out: traced tensors with the structure of their operands.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from serrate.errors import CallError, DtypeError, TraceError
from serrate.frontend import ops
from serrate.frontend.ops.common import Number, Operand, refuse_in_place, torch_dtype
from serrate.frontend.ops.elementwise import brought, differentiated_as, typed
from serrate.frontend.ops.movement import pulled
from serrate.frontend.shapes import shown
from serrate.ir.values import constant
from serrate.ir.view import TensorView


def add(input: Operand, other: Operand, *, alpha: Number = 1) -> TensorView:
    return ops.add(input, _scaled(input, other, alpha))


def sub(input: Operand, other: Operand, *, alpha: Number = 1) -> TensorView:
    return ops.sub(input, _scaled(input, other, alpha))


def rsub(input: Operand, other: Operand, *, alpha: Number = 1) -> TensorView:
    return sub(other, input, alpha=alpha)


def _scaled(input: Operand, other: Operand, alpha: Number) -> Operand:
    """`alpha * other` in the dtype of the sum, since `other`'s own dtype may be too narrow."""
    if not isinstance(alpha, TensorView) and alpha == 1:
        return other
    dtype = torch_dtype(torch.result_type, input, other)
    if dtype == torch.bool:
        return ops.logical_and(other, alpha)
    if not isinstance(other, TensorView) and not isinstance(alpha, TensorView):
        return other * alpha
    return ops.mul(brought(other, dtype), alpha)


def div(input: Operand, other: Operand, *, rounding_mode: str | None = None) -> TensorView:
    if rounding_mode is None:
        return ops.div(input, other)
    if rounding_mode == "floor":
        return ops.floor_divide(input, other)
    if rounding_mode != "trunc":
        raise CallError(f"div: rounding_mode must be None, 'trunc' or 'floor', got {rounding_mode!r}")
    if torch_dtype(torch.result_type, input, other).is_floating_point:
        return ops.trunc(ops.div(input, other))
    dtype = torch_dtype(torch.remainder, input, other)
    whole, by = brought(input, dtype), brought(other, dtype)
    return ops.floor_divide(ops.sub(whole, ops.fmod(whole, by)), by)


def round(input: TensorView, *, decimals: int = 0) -> TensorView:
    if decimals == 0:
        return ops.round(input)
    if not input.dtype.is_floating_point:
        raise DtypeError(f"round: decimals needs a floating-point dtype, got {input.dtype}")
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return ops.div(ops.round(ops.mul(input, scale)), scale)
    return ops.mul(ops.round(ops.div(input, scale)), scale)


def clamp(input: TensorView, min: Operand | None = None, max: Operand | None = None) -> TensorView:
    return ops.clamp(input, min, max)


def clamp_min(input: TensorView, min: Operand) -> TensorView:
    return ops.clamp(input, min)


def clamp_max(input: TensorView, max: Operand) -> TensorView:
    return ops.clamp(input, None, max)


def where(condition: TensorView, input: Operand | None = None, other: Operand | None = None) -> TensorView:
    if input is None or other is None:
        raise CallError("where(condition) returns positions, which have no ragged structure: use jt.values.nonzero()")
    return ops.where(condition, input, other)


def where_method(self: Operand, condition: TensorView, other: Operand) -> TensorView:
    return ops.where(condition, self, other)


def masked_fill(input: TensorView, mask: TensorView, value: Operand) -> TensorView:
    if isinstance(value, TensorView) and value.ndim != 0:
        raise CallError(f"masked_fill: value must be a number or a 0-dim tensor, got shape {shown(value)}; use torch.where")
    return typed(ops.where(mask, value, input), input.dtype)


def nan_to_num(
    input: TensorView, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> TensorView:
    if not input.dtype.is_floating_point:
        return ops.set(input)
    info = torch.finfo(input.dtype)
    high, low = info.max if posinf is None else posinf, info.min if neginf is None else neginf
    finite = ops.where(ops.eq(input, torch.inf), float(high), ops.where(ops.eq(input, -torch.inf), float(low), input))
    return ops.where(ops.isnan(input), float(nan or 0.0), finite)


def isclose(
    input: TensorView, other: TensorView, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> TensorView:
    if input.dtype == torch.bool:
        return ops.eq(input, other)
    near = ops.le(ops.abs(ops.sub(input, other)), ops.add(ops.mul(ops.abs(other), rtol), atol))
    # Infinities are close only to themselves.
    found = ops.logical_or(ops.eq(input, other), ops.logical_and(near, ops.isfinite(other)))
    if equal_nan and input.dtype.is_floating_point:
        found = ops.logical_or(found, ops.logical_and(ops.isnan(input), ops.isnan(other)))
    return found


def lerp(input: TensorView, end: Operand, weight: Operand) -> TensorView:
    return ops.lerp(input, end, weight)


def addcmul(input: TensorView, tensor1: Operand, tensor2: Operand, *, value: Number = 1) -> TensorView:
    dtype = _common(input, tensor1, tensor2)
    return ops.addcmul(typed(input, dtype), brought(tensor1, dtype), brought(tensor2, dtype), value)


def addcdiv(input: TensorView, tensor1: Operand, tensor2: Operand, *, value: Number = 1) -> TensorView:
    dtype = _common(input, tensor1, tensor2)
    return ops.add(input, ops.mul(ops.div(brought(tensor1, dtype), brought(tensor2, dtype)), value))


def _common(*operands: Operand) -> torch.dtype:
    """The common dtype of all operands."""
    return functools.reduce(torch.promote_types, (torch_dtype(torch.result_type, operands[0], o) for o in operands))


# --- activations -------------------------------------------------------------------------------------------------------


def relu(input: TensorView, inplace: bool = False) -> TensorView:
    refuse_in_place("relu", inplace)
    return ops.relu(input)


def relu6(input: TensorView, inplace: bool = False) -> TensorView:
    return hardtanh(input, 0.0, 6.0, inplace)


def hardtanh(input: TensorView, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> TensorView:
    refuse_in_place("hardtanh", inplace)
    if not input.dtype.is_floating_point:
        return ops.clamp(input, min_val, max_val)
    # Unlike those of `clamp`, the bounds themselves have no gradient.
    return ops.where(ops.le(input, min_val), min_val, ops.where(ops.ge(input, max_val), max_val, input))


def hardsigmoid(input: TensorView, inplace: bool = False) -> TensorView:
    refuse_in_place("hardsigmoid", inplace)
    return ops.div(hardtanh(ops.add(input, 3.0), 0.0, 6.0), 6.0)


def hardswish(input: TensorView, inplace: bool = False) -> TensorView:
    refuse_in_place("hardswish", inplace)
    found = ops.div(ops.mul(input, ops.clamp(ops.add(input, 3.0), 0.0, 6.0)), 6.0)
    # Where parts meet, torch takes the gradient of the outer one.
    inner = ops.where(ops.lt(ops.abs(input), 3.0), input, 0.0)
    curve = ops.div(ops.mul(inner, ops.add(inner, 3.0)), 6.0)
    parts = ops.where(ops.le(input, -3.0), 0.0, ops.where(ops.lt(input, 3.0), curve, input))
    return differentiated_as(found, parts)


def silu(input: TensorView, inplace: bool = False) -> TensorView:
    refuse_in_place("silu", inplace)
    return ops.silu(input)


def mish(input: TensorView, inplace: bool = False) -> TensorView:
    refuse_in_place("mish", inplace)
    return ops.mul(input, ops.tanh(ops.softplus(input)))


def elu(input: TensorView, alpha: float = 1.0, inplace: bool = False) -> TensorView:
    refuse_in_place("elu", inplace)
    return ops.elu(input, alpha)


def celu(input: TensorView, alpha: float = 1.0, inplace: bool = False) -> TensorView:
    refuse_in_place("celu", inplace)
    return ops.where(ops.gt(input, 0), input, ops.mul(ops.expm1(ops.div(ops.minimum(input, 0.0), alpha)), alpha))


def selu(input: TensorView, inplace: bool = False) -> TensorView:
    refuse_in_place("selu", inplace)
    return ops.mul(ops.elu(input, 1.6732632423543772), 1.0507009873554805)


def leaky_relu(input: TensorView, negative_slope: float = 0.01, inplace: bool = False) -> TensorView:
    refuse_in_place("leaky_relu", inplace)
    return ops.leaky_relu(input, negative_slope)


def threshold(input: TensorView, threshold: float, value: float, inplace: bool = False) -> TensorView:
    refuse_in_place("threshold", inplace)
    # NaN is kept: it is not below the threshold.
    return ops.where(ops.le(input, threshold), value, input)


def softplus(input: TensorView, beta: float = 1.0, threshold: float = 20.0) -> TensorView:
    return ops.softplus(input, beta, threshold)


def logsigmoid(input: TensorView) -> TensorView:
    return ops.log_sigmoid(input)


def softsign(input: TensorView) -> TensorView:
    return ops.div(input, ops.add(ops.abs(input), 1))


def tanhshrink(input: TensorView) -> TensorView:
    return ops.sub(input, ops.tanh(input))


def softshrink(input: TensorView, lambd: float = 0.5) -> TensorView:
    near = ops.where(ops.lt(input, -lambd), ops.add(input, lambd), ops.mul(input, 0.0))  # NaN is kept
    return ops.where(ops.gt(input, lambd), ops.sub(input, lambd), near)


def hardshrink(input: TensorView, lambd: float = 0.5) -> TensorView:
    return ops.where(ops.logical_and(ops.ge(input, -lambd), ops.le(input, lambd)), 0.0, input)


def prelu(input: TensorView, weight: TensorView) -> TensorView:
    """`weight` has one number, or one for each feature of the last dim."""
    if weight.ndim == 1 and weight.size_of(0) == 1:
        weight = ops.select(weight, 0, 0)
    return ops.where(ops.gt(input, 0), input, ops.mul(input, weight))


def glu(input: TensorView, dim: int = -1) -> TensorView:
    size = None if input.domains[dim].is_ragged else input.size_of(dim)
    if not isinstance(size, int) or size % 2:
        raise CallError(f"glu: dim {dim} of {shown(input)} must be regular and even")
    value, gate = ops.split(input, (size // 2, size // 2), dim)
    return ops.mul(value, ops.sigmoid(gate))


def gelu(input: TensorView, *, approximate: str = "none") -> TensorView:
    return ops.gelu(input, approximate)


# --- dtypes, and tensors like others -----------------------------------------------------------------------------------


def to(input: TensorView, *args: Any, **kwargs: Any) -> TensorView:
    """`x.to(dtype)` or `x.to(other)`; the arguments of a call determine the device."""
    asked = [*args[:1], *kwargs.values()][:1]
    dtype = asked[0].dtype if asked and isinstance(asked[0], TensorView | torch.Tensor) else asked[0] if asked else None
    if not isinstance(dtype, torch.dtype):
        raise TraceError("to: the device cannot change in a traced function; move the arguments before the call")
    return ops.cast(input, dtype)


def type_as(input: TensorView, other: TensorView) -> TensorView:
    return ops.cast(input, other.dtype)


def full_like(input: TensorView, fill_value: Number, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    _plain("full_like", options)
    wanted = dtype or input.dtype
    try:
        held = torch.full((2,), fill_value, dtype=wanted, device="cpu")[0].item()  # torch does not check a single element
    except (RuntimeError, OverflowError):
        message = f"full_like: {fill_value} does not fit {wanted}: use another value or dtype"
        raise DtypeError(message) from None
    return pulled(input.fusion, wanted, input.domains, constant(held, wanted))


def zeros_like(input: TensorView, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    return full_like(input, 0, dtype=dtype, **options)


def ones_like(input: TensorView, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    return full_like(input, 1, dtype=dtype, **options)


def _plain(name: str, options: dict[str, Any]) -> None:
    unknown = [key for key, given in options.items() if given not in (None, False, torch.preserve_format, torch.strided)]
    if unknown:
        raise TraceError(
            f"{name}: {', '.join(unknown)} cannot be set in a traced function; the result has the device of the arguments"
        )
