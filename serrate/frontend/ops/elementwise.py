"""Elementwise operations, with broadcasting and torch's result dtypes.

In: `TensorView`s and Python numbers. Out: a `TensorView` with the structure of its ragged operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import broadcast
from serrate.frontend.capture import records_gradients
from serrate.frontend.ops.common import Lifted, Number, Operand, fits, fusion_of, is_number, stand_in, torch_dtype
from serrate.ir.tile import Store
from serrate.ir.values import Place, Role, Value, call, carried_dtype, computed, constant
from serrate.ir.view import Size, TensorView


def elementwise(name: str, dtype: torch.dtype, *operands: Operand, compute: torch.dtype | None = None) -> TensorView:
    """Records `name` over broadcast operands. `compute` is the dtype that arguments are cast to first, if they differ."""
    fusion = fusion_of(*operands)
    views = [o for o in operands if isinstance(o, TensorView)]
    domains, indices = broadcast(fusion, name, views)
    places = iter(indices)
    values = [v.at(next(places)) if isinstance(v, TensorView) else number(name, v, compute or dtype) for v in operands]
    if compute is not None:
        # A scalar, even in a 0-dim tensor, has the precision of the arithmetic, not of the tensors it is combined with.
        exact = carried_dtype(compute)
        alone = [isinstance(o, Lifted | Size) or (isinstance(o, TensorView) and not o.ndim and bool(domains)) for o in operands]
        values = [as_dtype(v, exact if one else compute) for v, one in zip(values, alone, strict=True)]
    out = fusion.tensor(dtype, domains)
    return fusion.define([out], domains, Store(out, domains, call(name, *values, dtype=dtype)))[0]


def number(name: str, given: Number | Size, dtype: torch.dtype) -> Value:
    """A Python number, or a size, among operands that are computed in `dtype`."""
    if isinstance(given, Size):
        return computed(Place(given.expr))
    if not dtype.is_floating_point and isinstance(given, int) and not fits(given, torch.int64):
        raise DtypeError(f"{name}: integers have at most 64 bits, got {given}; use a float")
    return constant(given, dtype)


def held(operand: Operand | Size, dtype: torch.dtype) -> Operand:
    """A scalar, even in a 0-dim tensor, rounded to a 16-bit `dtype`, as torch does in comparisons, powers and remainders. In
    sums, products and quotients it has the precision of the arithmetic."""
    if carried_dtype(dtype) == dtype or isinstance(operand, bool):
        return operand
    if isinstance(operand, TensorView | Size):
        known = isinstance(operand, TensorView) and (operand.ndim or operand.dtype == dtype)
        return operand if known else elementwise("cast", dtype, operand)
    # Through float32, as in torch; overflow gives infinity.
    return torch.tensor(float(operand), dtype=torch.float32, device="cpu").to(dtype).item()


def as_dtype(value: Value, dtype: torch.dtype) -> Value:
    same = carried_dtype(value.dtype) == carried_dtype(dtype)
    return value if same else call("cast", value, dtype=dtype)


def _of_numbers(name: str, torch_function: Callable[..., Any], *numbers: Operand) -> TensorView:
    """An operation on scalars only, some of them read by the program: computed with Python's precision; the result is a
    scalar."""
    kinds = [torch.float64 if type(stand_in(n)) is float else torch.int64 for n in numbers]
    stands = [torch.tensor(stand_in(n), dtype=kind, device="cpu") for n, kind in zip(numbers, kinds, strict=True)]
    dtype = torch_function(*stands).dtype
    compute = torch.result_type(*stands) if len(stands) == 2 and dtype == torch.bool else dtype
    out = elementwise(name, dtype, *numbers, compute=compute)
    return out if dtype == torch.bool else Lifted(out.tensor, out.fusion)


def unary(name: str, torch_function: Callable[..., Any]) -> Callable[[TensorView], TensorView]:
    """Makes an operation from one function of the IR, with the dtypes of the torch function."""

    def operation(x: TensorView) -> TensorView:
        if isinstance(x, Lifted):
            return _of_numbers(name, torch_function, x)
        dtype = torch_dtype(torch_function, x)
        return elementwise(name, dtype, x, compute=None if name in ("isnan", "logical_not") else dtype)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"`torch.{torch_function.__name__}`, elementwise; the result has the operand's structure."
    return operation


def binary(name: str, torch_function: Callable[..., Any]) -> Callable[[Operand, Operand], TensorView]:
    """Likewise, for two operands."""
    comparison = name in ("lt", "le", "gt", "ge", "eq", "ne")

    def operation(a: Operand, b: Operand) -> TensorView:
        if is_number(a) and is_number(b):
            return _of_numbers(name, torch_function, a, b)
        dtype = torch_dtype(torch_function, a, b)
        compute = torch_dtype(torch.result_type, a, b) if comparison else dtype
        if comparison or name == "pow":
            a, b = held(a, compute), held(b, compute)
        return elementwise(name, dtype, a, b, compute=compute)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"`torch.{torch_function.__name__}`, elementwise with broadcasting."
    return operation


neg = unary("neg", torch.neg)
abs = unary("abs", torch.abs)
exp = unary("exp", torch.exp)
log = unary("log", torch.log)
sqrt = unary("sqrt", torch.sqrt)
rsqrt = unary("rsqrt", torch.rsqrt)
reciprocal = unary("reciprocal", torch.reciprocal)
sigmoid = unary("sigmoid", torch.sigmoid)
tanh = unary("tanh", torch.tanh)
relu = unary("relu", torch.relu)
silu = unary("silu", torch.nn.functional.silu)
erf = unary("erf", torch.erf)
floor = unary("floor", torch.floor)
ceil = unary("ceil", torch.ceil)
square = unary("square", torch.square)
isnan = unary("isnan", torch.isnan)
sin = unary("sin", torch.sin)
cos = unary("cos", torch.cos)
add = binary("add", torch.add)
sub = binary("sub", torch.sub)
mul = binary("mul", torch.mul)
div = binary("div", torch.true_divide)
_pow = binary("pow", torch.pow)
lt = binary("lt", torch.lt)
le = binary("le", torch.le)
gt = binary("gt", torch.gt)
ge = binary("ge", torch.ge)
eq = binary("eq", torch.eq)
ne = binary("ne", torch.ne)


def pow(a: Operand, b: Operand) -> TensorView:
    """`torch.pow`, elementwise with broadcasting; small powers become products and roots, as in torch."""
    if torch_dtype(torch.pow, a, b) == torch.bool:
        return logical_or(a, logical_not(b) if isinstance(b, TensorView) else not b)
    if not isinstance(a, TensorView) or isinstance(b, TensorView | Size | bool) or b not in (2, 3, 0.5, -0.5, -1, -2):
        return _pow(a, b)
    dtype = torch_dtype(torch.pow, a, b)
    if b == 2 or b == 3:
        x = typed(a, dtype)
        return square(x) if b == 2 else mul(square(x), x)
    if not dtype.is_floating_point:
        return _pow(a, b)
    x = typed(a, dtype)
    if b == 0.5:
        return sqrt(x)
    return rsqrt(x) if b == -0.5 else reciprocal(x if b == -1 else square(x))


def maximum(a: Operand, b: Operand) -> TensorView:
    """`torch.maximum`, elementwise with broadcasting; NaN propagates."""
    return _extremum("maximum", a, b)


def minimum(a: Operand, b: Operand) -> TensorView:
    """`torch.minimum`, elementwise with broadcasting; NaN propagates."""
    return _extremum("minimum", a, b)


def _extremum(name: str, a: Operand, b: Operand) -> TensorView:
    dtype = torch_dtype(torch.result_type, a, b)
    return elementwise(name, dtype, a, b, compute=dtype)


def clamp(x: TensorView, min: Operand | None = None, max: Operand | None = None) -> TensorView:
    """`torch.clamp`; bounds are numbers or tensors."""
    if min is None and max is None:
        raise ShapeError("clamp: give min, max or both")
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def gelu(x: TensorView, approximate: str = "none") -> TensorView:
    """`torch.nn.functional.gelu`, exact or with the tanh approximation."""
    if approximate == "tanh":
        inner = mul(add(x, mul(mul(x, square(x)), 0.044715)), 0.7978845608028654)
        return mul(mul(x, 0.5), add(tanh(inner), 1.0))
    if approximate != "none":
        raise ShapeError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    if not x.dtype.is_floating_point:
        raise DtypeError(f"gelu: needs a floating-point dtype, got {x.dtype}; convert it first, with .float()")
    return elementwise("gelu", x.dtype, x)


def floor_divide(a: Operand, b: Operand) -> TensorView:
    """`torch.floor_divide`."""
    dtype = torch_dtype(torch.floor_divide, a, b)
    if not dtype.is_floating_point:
        return elementwise("floordiv", dtype, a, b, compute=dtype)
    a, b = brought(a, dtype), brought(b, dtype)
    rest = elementwise("fmod", dtype, a, b, compute=dtype)
    whole = div(sub(a, rest), b)
    whole = where(_crosses(rest, b), sub(whole, 1.0), whole)
    low = floor(whole)
    # The quotient is an integer up to rounding, which must not decide which integer.
    low = where(gt(sub(whole, low), 0.5), add(low, 1.0), low)
    if isinstance(b, TensorView):
        return where(eq(b, 0), div(a, b), low)
    return low if b else div(a, b)


def fmod(a: Operand, b: Operand) -> TensorView:
    """`torch.fmod`: the remainder of a division rounded towards 0, with the sign of `a`."""
    dtype = torch_dtype(torch.remainder, a, b)
    if dtype.is_floating_point:
        return elementwise("fmod", dtype, held(a, dtype), held(b, dtype), compute=dtype)
    a, b = brought(a, dtype), brought(b, dtype)
    rest = remainder(a, b)
    below = lt(a, 0) if isinstance(a, TensorView) else a < 0
    return where(logical_and(ne(rest, 0), ne(lt(rest, 0), below)), sub(rest, b), rest)


def remainder(a: Operand, b: Operand) -> TensorView:
    """`torch.remainder`, with the sign of the divisor."""
    dtype = torch_dtype(torch.remainder, a, b)
    if not dtype.is_floating_point:
        return elementwise("rem", dtype, a, b, compute=dtype)
    a, b = brought(held(a, dtype), dtype), brought(held(b, dtype), dtype)
    rest = fmod(a, b)
    return where(_crosses(rest, b), add(rest, b), rest)


def brought(x: Operand, dtype: torch.dtype) -> Operand:
    """An operand in the dtype of the result. A tensor with dims decides the dtype, so the other operand may still be a scalar."""
    if isinstance(x, TensorView) and not is_number(x):
        return typed(x, dtype)
    return int(x) if isinstance(x, bool) and dtype != torch.bool else x


def _crosses(rest: TensorView, b: Operand) -> TensorView:
    """Whether a remainder is nonzero and its sign differs from the divisor's."""
    if isinstance(b, TensorView):
        other = ne(lt(rest, 0), lt(b, 0))
    else:
        other = ge(rest, 0) if b < 0 else lt(rest, 0)
    return logical_and(ne(rest, 0), other)


def sign(x: TensorView) -> TensorView:
    """`torch.sign`: -1, 0 or 1; 0 for NaN."""
    if x.dtype == torch.bool or not x.dtype.is_floating_point:
        return x if x.dtype == torch.bool else sub(cast(gt(x, 0), x.dtype), cast(lt(x, 0), x.dtype))
    # One definition of `x`, so that the result requires a gradient, which is 0.
    state, here = carried_dtype(x.dtype), x.at(x.domains)
    sides = (call(test, here, constant(0, here.dtype), dtype=torch.bool) for test in ("gt", "lt"))
    value = call("sub", *(call("cast", side, dtype=state) for side in sides), dtype=state)
    out = x.fusion.tensor(state, x.domains)
    return typed(x.fusion.define([out], x.domains, Store(out, x.domains, value))[0], x.dtype)


def detach(x: TensorView) -> TensorView:
    """`x`, and no gradient flows back through it."""
    return elementwise("detach", x.dtype, x) if x.dtype.is_floating_point else x


def differentiated_as(x: TensorView, other: TensorView) -> TensorView:
    """`x` with the gradient of `other`: for functions whose accurate form has no useful derivative."""
    return elementwise("differentiated_as", x.dtype, x, other)


def under_mode(result: Any) -> Any:
    """The results of an operation; under `torch.no_grad()` in a traced function they are constants."""
    if records_gradients():
        return result
    if isinstance(result, tuple | list):
        parts = [under_mode(part) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return detach(result) if type(result) is TensorView else result


def trunc(x: TensorView) -> TensorView:
    """`torch.trunc`: rounds towards 0."""
    return where(lt(x, 0), ceil(x), floor(x)) if x.dtype.is_floating_point else x


def round(x: TensorView) -> TensorView:
    """`torch.round`: rounds to the nearest integer, halves to even."""
    if not x.dtype.is_floating_point:
        return x
    low = floor(x)
    rest = sub(x, low)
    odd = ne(mul(floor(mul(low, 0.5)), 2.0), low)
    up = logical_or(gt(rest, 0.5), logical_and(eq(rest, 0.5), odd))
    return where(up, add(low, 1), low)


def isinf(x: TensorView) -> TensorView:
    """`torch.isinf`."""
    return eq(abs(x), float("inf")) if x.dtype.is_floating_point else ne(x, x)


def isfinite(x: TensorView) -> TensorView:
    """`torch.isfinite`."""
    return lt(abs(x), float("inf")) if x.dtype.is_floating_point else eq(x, x)


def log1p(x: TensorView) -> TensorView:
    """`torch.log1p`: log(1 + x), accurate for small x."""
    x = as_float(x)
    one = add(x, 1.0)
    away = sub(one, 1.0)
    # (log u) * x / (u - 1) compensates for the rounding of u = 1 + x; no compensation is needed where u - 1 is infinite.
    near = mul(log(one), div(x, away))
    return differentiated_as(where(eq(away, 0.0), x, where(isinf(away), log(one), near)), log(one))


def expm1(x: TensorView) -> TensorView:
    """`torch.expm1`: exp(x) - 1, accurate for small x."""
    x = as_float(x)
    power = exp(x)
    less = sub(power, 1.0)
    near = mul(less, div(x, log(power)))
    far = logical_or(isinf(power), eq(less, -1.0))
    return differentiated_as(where(eq(less, 0.0), x, where(far, less, near)), power)


def exp2(x: TensorView) -> TensorView:
    """`torch.exp2`."""
    return exp(mul(as_float(x), 0.6931471805599453))


def log2(x: TensorView) -> TensorView:
    """`torch.log2`."""
    return mul(log(as_float(x)), 1.4426950408889634)


def log10(x: TensorView) -> TensorView:
    """`torch.log10`."""
    return mul(log(as_float(x)), 0.4342944819032518)


def as_float(x: TensorView) -> TensorView:
    """Floating point unchanged, anything else converted as torch's functions do."""
    return x if x.dtype.is_floating_point else cast(x, torch.get_default_dtype())


def softplus(x: TensorView, beta: float = 1.0, threshold: float = 20.0) -> TensorView:
    """`torch.nn.functional.softplus`."""
    scaled = mul(x, beta)
    return where(gt(scaled, threshold), x, div(log1p(exp(minimum(scaled, threshold))), beta))


def log_sigmoid(x: TensorView) -> TensorView:
    """`torch.nn.functional.logsigmoid`."""
    below = where(eq(x, 0.0), mul(x, 0.5), minimum(x, 0.0))  # both sides of 0 share the gradient
    return sub(below, log1p(exp(neg(abs(x)))))


def leaky_relu(x: TensorView, negative_slope: float = 0.01) -> TensorView:
    """`torch.nn.functional.leaky_relu`."""
    return where(gt(x, 0), x, mul(x, negative_slope))


def elu(x: TensorView, alpha: float = 1.0) -> TensorView:
    """`torch.nn.functional.elu`."""
    return where(gt(x, 0), x, mul(expm1(minimum(x, 0.0)), alpha))


def lerp(start: TensorView, end: Operand, weight: Operand) -> TensorView:
    """`torch.lerp`: start + weight * (end - start)."""
    # Computed from the nearer end, so that both ends are exact.
    away = sub(end, start)
    near = add(start, mul(weight, away))
    if isinstance(weight, TensorView):
        return where(lt(abs(weight), 0.5), near, sub(end, mul(away, sub(1.0, weight))))
    return near if -0.5 < weight < 0.5 else sub(end, mul(away, 1.0 - weight))


def addcmul(x: TensorView, a: Operand, b: Operand, value: Number = 1) -> TensorView:
    """`torch.addcmul`: x + value * a * b."""
    return add(x, mul(mul(a, b), value))


def logical_not(x: TensorView) -> TensorView:
    """`torch.logical_not`."""
    return elementwise("logical_not", torch.bool, cast(x, torch.bool))


def logical_and(a: Operand, b: Operand) -> TensorView:
    """`torch.logical_and`."""
    return elementwise("logical_and", torch.bool, _as_truth(a), _as_truth(b))


def logical_or(a: Operand, b: Operand) -> TensorView:
    """`torch.logical_or`."""
    return elementwise("logical_or", torch.bool, _as_truth(a), _as_truth(b))


def logical_xor(a: Operand, b: Operand) -> TensorView:
    """`torch.logical_xor`."""
    return elementwise("ne", torch.bool, _as_truth(a), _as_truth(b), compute=torch.bool)


def bits(name: str, a: Operand, b: Operand) -> TensorView:
    """A function of the bits of integers, by its name in the IR; `bitand`, `bitor` and `bitxor` also of bools."""
    dtype = torch_dtype(BITS[name], a, b)
    return elementwise(name, dtype, a, b, compute=dtype)


BITS: dict[str, Callable[..., Any]] = {
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "gcd": torch.gcd,
}
"""Functions of integers: names in the IR, and torch's."""


def _as_truth(x: Operand) -> Operand:
    return cast(x, torch.bool) if isinstance(x, TensorView) else bool(x)


def where(condition: TensorView, a: Operand, b: Operand) -> TensorView:
    """`torch.where`, with broadcasting."""
    if condition.dtype != torch.bool:
        raise DtypeError(f"where: the condition must be bool, got {condition.dtype}")
    fusion = condition.fusion
    dtype = torch_dtype(torch.where, condition, a, b)
    views = [o for o in (condition, a, b) if isinstance(o, TensorView)]
    domains, indices = broadcast(fusion, "where", views)
    places = iter(indices)
    choice = condition.at(next(places))
    arms = [
        as_dtype(o.at(next(places)), dtype) if isinstance(o, TensorView) else as_dtype(number("where", o, dtype), dtype)
        for o in (a, b)
    ]
    out = fusion.tensor(dtype, domains)
    return fusion.define([out], domains, Store(out, domains, call("where", choice, *arms, dtype=dtype)))[0]


def cast(x: TensorView, dtype: torch.dtype) -> TensorView:
    """`x.to(dtype)`; rounds to a narrower dtype. A value of a 16-bit dtype, computed in float32, is rounded to it here."""
    rounded = carried_dtype(dtype) == dtype or x.tensor.memory.role is Role.INPUT
    return x if x.dtype == dtype and rounded else elementwise("cast", dtype, x)


def typed(x: TensorView, dtype: torch.dtype) -> TensorView:
    """`x` as a tensor of another dtype without rounding: intermediates keep the precision they are computed in."""
    if x.dtype == dtype:
        return x
    out = x.fusion.tensor(dtype, x.domains)
    value = as_dtype(x.at(x.domains), carried_dtype(dtype))
    return x.fusion.define([out], x.domains, Store(out, x.domains, value))[0]
