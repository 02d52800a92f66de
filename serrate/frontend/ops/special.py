"""Further elementwise functions of torch's: inverse and hyperbolic ones, error and gamma functions, logarithms of sums, bits.

In: `TensorView`s and Python numbers. Out: a `TensorView` with the structure of its ragged operands. Functions of the C library
are functions of the IR; the others are composed of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from serrate.frontend.ops.common import Operand, torch_dtype
from serrate.frontend.ops.elementwise import (
    abs,
    add,
    as_float,
    binary,
    bits,
    brought,
    cast,
    div,
    elementwise,
    eq,
    exp,
    exp2,
    floor_divide,
    ge,
    isnan,
    le,
    log,
    log1p,
    logical_or,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    neg,
    pow,
    sign,
    sin,
    sub,
    trunc,
    typed,
    unary,
    where,
)
from serrate.ir.view import TensorView

tan = unary("tan", torch.tan)
atan = unary("atan", torch.atan)
asin = unary("asin", torch.asin)
acos = unary("acos", torch.acos)
sinh = unary("sinh", torch.sinh)
cosh = unary("cosh", torch.cosh)
asinh = unary("asinh", torch.asinh)
acosh = unary("acosh", torch.acosh)
atanh = unary("atanh", torch.atanh)
erfc = unary("erfc", torch.erfc)
erfinv = unary("erfinv", torch.erfinv)
lgamma = unary("lgamma", torch.lgamma)
digamma = unary("digamma", torch.digamma)


def _taking_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that takes tensors only, for dtypes: a number promotes like a tensor without dims."""

    @functools.wraps(function)
    def run(*operands: Any) -> Any:
        return function(*map(torch.as_tensor, operands))

    return run


atan2 = binary("atan2", _taking_numbers(torch.atan2))
hypot = binary("hypot", _taking_numbers(torch.hypot))
copysign = binary("copysign", _taking_numbers(torch.copysign))


def bitwise_and(a: Operand, b: Operand) -> TensorView:
    """`torch.bitwise_and`: of integers, or of bools."""
    return bits("bitand", a, b)


def bitwise_or(a: Operand, b: Operand) -> TensorView:
    """`torch.bitwise_or`: of integers, or of bools."""
    return bits("bitor", a, b)


def bitwise_xor(a: Operand, b: Operand) -> TensorView:
    """`torch.bitwise_xor`: of integers, or of bools."""
    return bits("bitxor", a, b)


def bitwise_not(x: TensorView) -> TensorView:
    """`torch.bitwise_not`: of integers, or of bools."""
    # Of integers, in which -1 has all bits.
    return bits("bitxor", x, True if x.dtype == torch.bool else -1)


def bitwise_left_shift(a: Operand, b: Operand) -> TensorView:
    """`torch.bitwise_left_shift`; 0 where all bits are shifted out."""
    return bits("shl", a, b)


def bitwise_right_shift(a: Operand, b: Operand) -> TensorView:
    """`torch.bitwise_right_shift`; the sign stays."""
    return bits("shr", a, b)


def gcd(a: Operand, b: Operand) -> TensorView:
    """`torch.gcd`: the greatest common divisor of integers, not negative; gcd(0, 0) is 0."""
    return bits("gcd", a, b)


def lcm(a: Operand, b: Operand) -> TensorView:
    """`torch.lcm`: the non-negative least common multiple of integers; 0 if one of them is 0."""
    dtype = torch_dtype(torch.lcm, a, b)
    # As in C, narrow integers are multiplied in 32 bits, and the result wraps afterwards.
    wide = torch.promote_types(dtype, torch.int32)
    a, b = brought(a, wide), brought(b, wide)
    # Integer division by 0 gives 0 here, and lcm(0, 0) is 0.
    return cast(abs(mul(floor_divide(a, gcd(a, b)), b)), dtype)


def fmax(a: Operand, b: Operand) -> TensorView:
    """`torch.fmax`: as `maximum`, but a number wins over NaN, and of equal numbers the first has the gradient."""
    return _number_of(maximum(a, b), a, b, ge)


def fmin(a: Operand, b: Operand) -> TensorView:
    """`torch.fmin`: as `minimum`, but a number wins over NaN, and of equal numbers the first has the gradient."""
    return _number_of(minimum(a, b), a, b, le)


def _number_of(chosen: TensorView, a: Operand, b: Operand, wins: Callable[[Operand, Operand], TensorView]) -> TensorView:
    if not chosen.dtype.is_floating_point:
        return chosen
    first = logical_or(wins(a, b), isnan(b)) if isinstance(b, TensorView) else wins(a, b)
    return where(first, brought(a, chosen.dtype), brought(b, chosen.dtype))


def logaddexp(a: TensorView, b: TensorView) -> TensorView:
    """`torch.logaddexp`: log(e^a + e^b), also where those are too large for the dtype."""
    return add(maximum(a, b), log1p(exp(neg(_apart(a, b)))))


def logaddexp2(a: TensorView, b: TensorView) -> TensorView:
    """`torch.logaddexp2`: the logarithm to base 2 of 2^a + 2^b."""
    return add(maximum(a, b), mul(log1p(exp2(neg(_apart(a, b)))), 1 / math.log(2)))


def _apart(a: TensorView, b: TensorView) -> TensorView:
    """The difference of two numbers; 0 for two infinities of the same sign."""
    return where(eq(a, b), 0.0, abs(sub(a, b)))


def xlogy(x: Operand, y: Operand) -> TensorView:
    """`torch.xlogy`: x * log(y), and 0 where x is 0, unless y is NaN."""
    dtype = torch_dtype(torch.xlogy, x, y)
    if not isinstance(y, TensorView):
        assert isinstance(x, TensorView)
        power = math.log(y) if y > 0 else -math.inf if y == 0 else math.nan
        found = mul(typed(x, dtype), power)
        return found if math.isnan(y) else where(eq(x, 0), 0.0, found)
    found = mul(brought(x, dtype), log(typed(y, dtype)))
    if not isinstance(x, TensorView):
        return found if x else where(isnan(y), float("nan"), mul(found, 0.0))
    return where(logical_or(ne(x, 0), isnan(y)), found, 0.0)


def sgn(x: TensorView) -> TensorView:
    """`torch.sgn`, which is `sign` of real numbers."""
    return sign(x)


def signbit(x: TensorView) -> TensorView:
    """`torch.signbit`: whether the sign is set, also that of 0 and NaN."""
    if not x.dtype.is_floating_point:
        return lt(x, 0) if x.dtype != torch.bool else ne(x, x)
    # copysign(1, x), in at least float32.
    return lt(elementwise("copysign", x.dtype, 1.0, x, compute=x.dtype), 0)


def frac(x: TensorView) -> TensorView:
    """`torch.frac`: the fractional part, with the sign of the number."""
    return sub(x, trunc(x))


def deg2rad(x: TensorView) -> TensorView:
    """`torch.deg2rad`."""
    return mul(as_float(x), math.pi / 180)


def rad2deg(x: TensorView) -> TensorView:
    """`torch.rad2deg`."""
    return mul(as_float(x), 180 / math.pi)


def sinc(x: TensorView) -> TensorView:
    """`torch.sinc`: sin(pi x) / (pi x), and 1 at 0."""
    angle = mul(as_float(x), math.pi)
    at_0 = eq(angle, 0.0)
    return where(at_0, 1.0, div(sin(angle), where(at_0, 1.0, angle)))


def float_power(a: Operand, b: Operand) -> TensorView:
    """`torch.float_power`: the power, computed in float64."""
    return pow(*(cast(x, torch.float64) if isinstance(x, TensorView) else float(x) for x in (a, b)))


def ldexp(x: TensorView, other: TensorView) -> TensorView:
    """`torch.ldexp`: x * 2^other."""
    return mul(x, pow(2.0, other))
