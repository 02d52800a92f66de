"""Elementwise operations under torch's signatures, whole families of them made of `serrate.ops`.

In: traced tensors and Python numbers, as torch's functions take them. Out: traced tensors with the structure of their operands.
"""

from __future__ import annotations

from typing import Any

import torch

from serrate.errors import CallError, DtypeError, TraceError
from serrate.frontend import ops
from serrate.frontend.ops.common import Number, Operand, stand_in
from serrate.frontend.ops.elementwise import typed
from serrate.frontend.ops.movement import pulled
from serrate.ir.values import constant
from serrate.ir.view import TensorView


def add(input: Operand, other: Operand, *, alpha: Number = 1) -> TensorView:
    return ops.add(input, _scaled(other, alpha))


def sub(input: Operand, other: Operand, *, alpha: Number = 1) -> TensorView:
    return ops.sub(input, _scaled(other, alpha))


def rsub(input: Operand, other: Operand, *, alpha: Number = 1) -> TensorView:
    return sub(other, input, alpha=alpha)


def _scaled(other: Operand, alpha: Number) -> Operand:
    if not isinstance(alpha, TensorView) and alpha == 1:
        return other
    fraction = alpha.dtype.is_floating_point if isinstance(alpha, TensorView) else isinstance(alpha, float)
    if isinstance(other, TensorView) and fraction and not other.dtype.is_floating_point:
        raise DtypeError(f"alpha must be a whole number for {other.dtype}, got {alpha}")
    return ops.mul(other, alpha) if isinstance(other, TensorView) else other * alpha


def div(input: Operand, other: Operand, *, rounding_mode: str | None = None) -> TensorView:
    if rounding_mode is None:
        return ops.div(input, other)
    if rounding_mode == "floor":
        return ops.floor_divide(input, other)
    if rounding_mode != "trunc":
        raise CallError(f"div: rounding_mode must be None, 'trunc' or 'floor', got {rounding_mode!r}")
    quotient = ops.div(input, other)
    whole = torch.result_type(stand_in(input), stand_in(other))
    if whole.is_floating_point:
        return ops.trunc(quotient)
    return ops.floor_divide(ops.sub(input, ops.fmod(input, other)), other)


def round(input: TensorView, *, decimals: int = 0) -> TensorView:
    if decimals == 0:
        return ops.round(input)
    if not input.dtype.is_floating_point:
        raise DtypeError(f"round: decimals are of floating point, got {input.dtype}")
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
        raise CallError("where of a condition alone gives positions, which are rows of no structure: use jt.values.nonzero()")
    return ops.where(condition, input, other)


def where_method(self: Operand, condition: TensorView, other: Operand) -> TensorView:
    return ops.where(condition, self, other)


def masked_fill(input: TensorView, mask: TensorView, value: Operand) -> TensorView:
    if isinstance(value, TensorView) and value.ndim != 0:
        raise CallError(f"masked_fill: value must be a number or a tensor without dims, got {value}; use torch.where")
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
    near = ops.le(ops.abs(ops.sub(input, other)), ops.add(ops.mul(ops.abs(other), rtol), atol))
    # Infinities are near only what they are equal to.
    found = ops.logical_or(ops.eq(input, other), ops.logical_and(near, ops.isfinite(other)))
    if equal_nan and input.dtype.is_floating_point:
        found = ops.logical_or(found, ops.logical_and(ops.isnan(input), ops.isnan(other)))
    return found


def lerp(input: TensorView, end: Operand, weight: Operand) -> TensorView:
    return ops.lerp(input, end, weight)


def addcmul(input: TensorView, tensor1: Operand, tensor2: Operand, *, value: Number = 1) -> TensorView:
    return ops.addcmul(input, tensor1, tensor2, value)


def addcdiv(input: TensorView, tensor1: Operand, tensor2: Operand, *, value: Number = 1) -> TensorView:
    return ops.add(input, ops.mul(ops.div(tensor1, tensor2), value))


def bitwise_not(input: TensorView) -> TensorView:
    return ops.logical_not(_truth("bitwise_not", input))


def bitwise_and(input: Operand, other: Operand) -> TensorView:
    return ops.logical_and(_truth("bitwise_and", input), _truth("bitwise_and", other))


def bitwise_or(input: Operand, other: Operand) -> TensorView:
    return ops.logical_or(_truth("bitwise_or", input), _truth("bitwise_or", other))


def bitwise_xor(input: Operand, other: Operand) -> TensorView:
    return ops.logical_xor(_truth("bitwise_xor", input), _truth("bitwise_xor", other))


def _truth(name: str, x: Any) -> Any:
    dtype = x.dtype if isinstance(x, TensorView) else torch.bool if isinstance(x, bool) else type(x).__name__
    if dtype != torch.bool:
        raise DtypeError(f"{name}: takes bools, got {dtype}; compare first, or use torch.logical_and and its like")
    return x


def tan(input: TensorView) -> TensorView:
    return ops.div(ops.sin(input), ops.cos(input))


# --- activations -------------------------------------------------------------------------------------------------------


def _kept(name: str, inplace: bool) -> None:
    """Eager calls are done in place before they come here; a traced tensor is a value, which never changes."""
    if inplace:
        raise TraceError(f"{name}: inplace=True cannot be traced; use what it returns instead")


def relu(input: TensorView, inplace: bool = False) -> TensorView:
    _kept("relu", inplace)
    return ops.relu(input)


def relu6(input: TensorView, inplace: bool = False) -> TensorView:
    return hardtanh(input, 0.0, 6.0, inplace)


def hardtanh(input: TensorView, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> TensorView:
    _kept("hardtanh", inplace)
    return ops.clamp(input, min_val, max_val)


def hardsigmoid(input: TensorView, inplace: bool = False) -> TensorView:
    _kept("hardsigmoid", inplace)
    return ops.div(ops.clamp(ops.add(input, 3.0), 0.0, 6.0), 6.0)


def hardswish(input: TensorView, inplace: bool = False) -> TensorView:
    _kept("hardswish", inplace)
    return ops.div(ops.mul(input, ops.clamp(ops.add(input, 3.0), 0.0, 6.0)), 6.0)


def silu(input: TensorView, inplace: bool = False) -> TensorView:
    _kept("silu", inplace)
    return ops.silu(input)


def mish(input: TensorView, inplace: bool = False) -> TensorView:
    _kept("mish", inplace)
    return ops.mul(input, ops.tanh(ops.softplus(input)))


def elu(input: TensorView, alpha: float = 1.0, inplace: bool = False) -> TensorView:
    _kept("elu", inplace)
    return ops.elu(input, alpha)


def celu(input: TensorView, alpha: float = 1.0, inplace: bool = False) -> TensorView:
    _kept("celu", inplace)
    return ops.where(ops.gt(input, 0), input, ops.mul(ops.expm1(ops.div(ops.minimum(input, 0.0), alpha)), alpha))


def selu(input: TensorView, inplace: bool = False) -> TensorView:
    _kept("selu", inplace)
    return ops.mul(ops.elu(input, 1.6732632423543772), 1.0507009873554805)


def leaky_relu(input: TensorView, negative_slope: float = 0.01, inplace: bool = False) -> TensorView:
    _kept("leaky_relu", inplace)
    return ops.leaky_relu(input, negative_slope)


def threshold(input: TensorView, threshold: float, value: float, inplace: bool = False) -> TensorView:
    _kept("threshold", inplace)
    # NaN stays: it is not below the threshold.
    return ops.where(ops.le(input, threshold), value, input)


def softplus(input: TensorView, beta: float = 1.0, threshold: float = 20.0) -> TensorView:
    return ops.softplus(input, beta, threshold)


def logsigmoid(input: TensorView) -> TensorView:
    return ops.sub(ops.minimum(input, 0.0), ops.log1p(ops.exp(ops.neg(ops.abs(input)))))


def softsign(input: TensorView) -> TensorView:
    return ops.div(input, ops.add(ops.abs(input), 1.0))


def tanhshrink(input: TensorView) -> TensorView:
    return ops.sub(input, ops.tanh(input))


def gelu(input: TensorView, *, approximate: str = "none") -> TensorView:
    return ops.gelu(input, approximate)


# --- dtypes, and tensors like others -----------------------------------------------------------------------------------


def to(input: TensorView, *args: Any, **kwargs: Any) -> TensorView:
    """`x.to(dtype)` or `x.to(other)`; a device is what the arguments of a call decide."""
    asked = [*args[:1], *kwargs.values()][:1]
    dtype = asked[0].dtype if asked and isinstance(asked[0], TensorView | torch.Tensor) else asked[0] if asked else None
    if not isinstance(dtype, torch.dtype):
        raise TraceError("to: a traced tensor changes its dtype, and no device; move the arguments before the call")
    return ops.cast(input, dtype)


def type_as(input: TensorView, other: TensorView) -> TensorView:
    return ops.cast(input, other.dtype)


def full_like(input: TensorView, fill_value: Number, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    _plain("full_like", options)
    wanted = dtype or input.dtype
    return pulled(input.fusion, wanted, input.domains, constant(fill_value, wanted))


def zeros_like(input: TensorView, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    return full_like(input, 0, dtype=dtype, **options)


def ones_like(input: TensorView, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    return full_like(input, 1, dtype=dtype, **options)


def _plain(name: str, options: dict[str, Any]) -> None:
    unknown = [key for key, given in options.items() if given not in (None, False, torch.preserve_format, torch.strided)]
    if unknown:
        raise TraceError(f"{name}: {', '.join(unknown)} cannot be asked of a traced tensor; it has the device of the arguments")
