"""Elementwise functions that the tile language has and the front end of traced functions does not.

In: traced tensors and numbers. Out: traced tensors, made of what every backend has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from serrate.frontend import ops, torch_names  # noqa: F401  fills the table of operators
from serrate.frontend.ops.elementwise import elementwise
from serrate.ir.view import TensorView


def _float(x: Any) -> Any:
    if not isinstance(x, TensorView):
        return float(x)
    return x if x.dtype.is_floating_point else ops.cast(x, torch.get_default_dtype())


def atan(x: Any) -> Any:
    x = _float(x)
    return elementwise("atan", x.dtype, x, compute=x.dtype)


def asin(x: Any) -> Any:
    x = _float(x)
    side = ops.sqrt(ops.mul(ops.sub(1.0, x), ops.add(x, 1.0)))
    return ops.where(ops.eq(side, 0.0), ops.mul(x, math.pi / 2), atan(ops.div(x, side)))


def acos(x: Any) -> Any:
    return ops.sub(math.pi / 2, asin(x))


def atan2(y: Any, x: Any) -> Any:
    y, x = _float(y), _float(x)
    near = atan(ops.div(y, x))
    # On the left the quotient points the other way; upwards and downwards it is infinite.
    turned = ops.where(ops.lt(y, 0.0), ops.sub(near, math.pi), ops.add(near, math.pi))
    return ops.where(ops.lt(x, 0.0), turned, near)


def logaddexp(a: Any, b: Any) -> Any:
    # Two infinities of one sign have no difference.
    apart = ops.where(ops.eq(a, b), 0.0, ops.sub(a, b))
    return ops.add(ops.maximum(a, b), ops.log1p(ops.exp(ops.neg(ops.abs(apart)))))


def xlogy(x: Any, y: Any) -> Any:
    found = ops.mul(x, ops.log(_float(y)))
    return ops.where(ops.logical_and(ops.eq(x, 0), ops.logical_not(ops.isnan(y))), 0.0, found)


def sinh(x: Any) -> Any:
    return ops.mul(ops.sub(ops.expm1(x), ops.expm1(ops.neg(x))), 0.5)


def cosh(x: Any) -> Any:
    return ops.mul(ops.add(ops.exp(x), ops.exp(ops.neg(x))), 0.5)


def erfc(x: Any) -> Any:
    return ops.sub(1.0, ops.erf(x))


def float_power(x: Any, y: Any) -> Any:
    x, y = (ops.cast(v, torch.float64) if isinstance(v, TensorView) else float(v) for v in (x, y))
    return ops.pow(x, y)


def left_shift(x: Any, by: Any) -> Any:
    return ops.mul(x, ops.pow(2, by)) if isinstance(by, TensorView) else ops.mul(x, 1 << by)


def right_shift(x: Any, by: Any) -> Any:
    return ops.floor_divide(x, ops.pow(2, by) if isinstance(by, TensorView) else 1 << by)


MORE: dict[str, Callable[..., Any]] = {
    "acos": acos,
    "asin": asin,
    "atan": atan,
    "atan2": atan2,
    "bitwise_left_shift": left_shift,
    "bitwise_right_shift": right_shift,
    "cosh": cosh,
    "erfc": erfc,
    "float_power": float_power,
    "log_sigmoid": TensorView.operators["logsigmoid"],
    "logaddexp": logaddexp,
    "sinh": sinh,
    "special_expit": ops.sigmoid,
    "xlogy": xlogy,
}
