"""The derivative of every elementwise function of the IR.

In: the adjoint of a call, its result and its arguments, as values. Out: the adjoint of each argument, as a value; None where it
is zero almost everywhere (rounding, comparisons, integers). Adjoints are values of the same IR, so backward programs can be
differentiated again.

    >>> from serrate.ir.values import argument, call
    >>> g, x = argument("g", torch.float32), argument("x", torch.float32)
    >>> print(*ELEMENTWISE["square"](g, call("square", x, dtype=torch.float32), x))
    mul(g, mul(2.0, x))
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from serrate.ir.values import Constant, Read, Value, call, constant

Adjoints = tuple[Value | None, ...]
Rule = Callable[..., Adjoints]
"""From the adjoint of a call, its result and its arguments."""

NOTHING: Adjoints = (None, None, None)
"""The adjoints of a function whose arguments all have zero derivatives or are integers; cut to the number of arguments."""


# --- values of the adjoint's dtype -----------------------------------------------------------------------------------------


def apply(function: str, *args: Value) -> Value:
    """A function whose result has the dtype of its first argument."""
    return call(function, *args, dtype=args[0].dtype)


def times(a: Value, *factors: Value | float) -> Value:
    for factor in factors:
        a = apply("mul", a, number(factor, a) if isinstance(factor, float) else factor)
    return a


def number(given: float, like: Value) -> Value:
    return constant(given, like.dtype)


def zero(like: Value) -> Value:
    return constant(0.0, like.dtype)


def is_(comparison: str, a: Value, b: Value | float) -> Value:
    return call(comparison, a, number(b, a) if isinstance(b, float) else b, dtype=torch.bool)


def select(condition: Value, a: Value, b: Value | None = None) -> Value:
    """`a` where the condition holds, else `b`, or 0."""
    return call("where", condition, a, zero(a) if b is None else b, dtype=a.dtype)


def minus(g: Value) -> Value:
    return apply("neg", g)


def _over(g: Value, x: Value) -> Value:
    return apply("div", g, x)


def _square(g: Value, x: Value) -> Value:
    """x * x in the dtype of g."""
    return call("mul", x, x, dtype=g.dtype)


def _plus(g: Value, a: Value | float, b: Value | float) -> Value:
    return call("add", *(number(x, g) if isinstance(x, float) else x for x in (a, b)), dtype=g.dtype)


def _less(g: Value, a: Value | float, b: Value | float) -> Value:
    return call("sub", *(number(x, g) if isinstance(x, float) else x for x in (a, b)), dtype=g.dtype)


def _of(g: Value, function: str, x: Value) -> Value:
    return call(function, x, dtype=g.dtype)


# --- one argument ------------------------------------------------------------------------------------------------------------


def _abs(g: Value, out: Value, x: Value) -> Adjoints:
    # A product, as in torch: at 0, a gradient that is NaN or infinite gives NaN.
    sign = select(is_("gt", x, 0.0), number(1.0, g), select(is_("lt", x, 0.0), number(-1.0, g)))
    return (times(g, sign),)


def _sigmoid(g: Value, out: Value, x: Value) -> Adjoints:
    return (times(g, times(_less(g, 1.0, out), out)),)


def _silu(g: Value, out: Value, x: Value) -> Adjoints:
    s = _of(g, "sigmoid", x)
    return (times(g, times(s, _plus(g, 1.0, times(_less(g, 1.0, s), x)))),)


def _gelu(g: Value, out: Value, x: Value) -> Adjoints:
    below = times(_plus(g, 1.0, _of(g, "erf", times(number(math.sqrt(0.5), g), x))), 0.5)
    density = times(_of(g, "exp", times(_square(g, x), -0.5)), 1.0 / math.sqrt(2.0 * math.pi))
    return (times(g, _plus(g, below, times(density, x))),)


def _bell(scale: float) -> Rule:
    """g * scale * e^(-x^2)."""
    return lambda g, out, x: (times(g, times(_of(g, "exp", minus(_square(g, x))), scale)),)


def _trigamma(g: Value, out: Value, x: Value) -> Adjoints:
    """The sum of 1 / (x + k)^2 over all k: six terms, and the asymptotic series of the rest; below 1/2 by reflection."""
    below = is_("lt", x, 0.5)
    y = select(below, _less(g, 1.0, x), x if x.dtype == g.dtype else _plus(g, x, 0.0))
    total = zero(g)
    for _ in range(6):
        total = _plus(g, total, _of(g, "reciprocal", _square(g, y)))
        y = _plus(g, y, 1.0)
    away = _of(g, "reciprocal", _square(g, y))
    series = times(_less(g, 1.0 / 42.0, times(away, 1.0 / 30.0)), away)
    series = times(_less(g, 1.0 / 6.0, times(_less(g, 1.0 / 30.0, series), away)), away)
    tail = _over(_plus(g, _plus(g, 1.0, series), times(_of(g, "reciprocal", y), 0.5)), y)
    total = _plus(g, total, tail)
    sine = _of(g, "sin", times(number(math.pi, g), x))
    reflected = _less(g, _over(number(math.pi**2, g), _square(g, sine)), total)
    return (times(g, select(below, reflected, total)),)


def _finite_or_zero(g: Value, out: Value, x: Value) -> Adjoints:
    return (select(is_("eq", out, x), g),)


def _cast(g: Value, out: Value, x: Value) -> Adjoints:
    return (g if x.dtype.is_floating_point else None,)


# --- two and three arguments ---------------------------------------------------------------------------------------------------


def _div(g: Value, out: Value, a: Value, b: Value) -> Adjoints:
    share = _over(g, b)
    return share, minus(times(share, out))


def _pow(g: Value, out: Value, a: Value, b: Value) -> Adjoints:
    less = call("pow", a, _less(g, b, 1.0), dtype=g.dtype)
    base = select(is_("eq", b, 0.0), zero(g), times(g, times(less, b)))
    # 0 to a positive power does not change with the power.
    still = call("logical_and", is_("eq", a, 0.0), is_("ge", b, 0.0), dtype=torch.bool)
    return base, select(still, zero(g), times(g, times(_of(g, "log", a), out)))


def _extremum(beats: str) -> Rule:
    """The larger operand gets the whole adjoint. Equal operands get half each, unless one is a number, which is only a bound, as
    in `clamp`."""

    def rule(g: Value, out: Value, a: Value, b: Value) -> Adjoints:
        half = times(g, 0.5)

        def side(own: Value, other: Value) -> Value:
            tie = g if _is_bound(other) else zero(g) if _is_bound(own) else half
            return select(is_("eq", own, other), tie, select(is_(beats, other, own), zero(g), g))

        return side(a, b), side(b, a)

    return rule


def _is_bound(value: Value) -> bool:
    """Whether a value is the same for all elements: a number, also one that the program reads."""
    if isinstance(value, Read):
        return not value.index
    return isinstance(value, Constant) or (bool(value.args) and all(map(_is_bound, value.args)))


def _exp_diff(g: Value, out: Value, x: Value, m: Value) -> Adjoints:
    grown = times(g, out)
    return grown, minus(grown)


def _fmod(g: Value, out: Value, a: Value, b: Value) -> Adjoints:
    return g, times(g, _over(_less(g, out, a), b))


def _atan2(g: Value, out: Value, a: Value, b: Value) -> Adjoints:
    distance = _plus(g, _square(g, a), _square(g, b))
    share = select(is_("eq", distance, 0.0), zero(g), _over(g, distance))  # as torch
    return times(share, b), minus(times(share, a))


def _hypot(g: Value, out: Value, a: Value, b: Value) -> Adjoints:
    share = select(is_("eq", out, 0.0), zero(g), _over(g, out))
    return times(share, a), times(share, b)


def _copysign(g: Value, out: Value, a: Value, b: Value) -> Adjoints:
    return select(is_("eq", a, 0.0), zero(g), times(g, call("div", out, a, dtype=g.dtype))), None


def _where(g: Value, out: Value, condition: Value, a: Value, b: Value) -> Adjoints:
    return None, select(condition, g), call("where", condition, zero(g), g, dtype=g.dtype)


_ROOT_PI = math.sqrt(math.pi)

ELEMENTWISE: dict[str, Rule] = {
    "neg": lambda g, out, x: (minus(g),),
    "abs": _abs,
    "exp": lambda g, out, x: (times(g, out),),
    "log": lambda g, out, x: (_over(g, x),),
    "sqrt": lambda g, out, x: (_over(times(g, 0.5), out),),
    "rsqrt": lambda g, out, x: (times(times(g, -0.5), times(_square(g, out), out)),),
    "reciprocal": lambda g, out, x: (minus(times(g, _square(g, out))),),
    "sigmoid": _sigmoid,
    "tanh": lambda g, out, x: (times(g, _less(g, 1.0, _square(g, out))),),
    "relu": lambda g, out, x: (select(is_("le", x, 0.0), zero(g), g),),
    "silu": _silu,
    "gelu": _gelu,
    "erf": _bell(2.0 / _ROOT_PI),
    "floor": lambda g, out, x: (None,),
    "ceil": lambda g, out, x: (None,),
    "square": lambda g, out, x: (times(g, times(number(2.0, g), x)),),
    "isnan": lambda g, out, x: (None,),
    "logical_not": lambda g, out, x: (None,),
    "cast": _cast,
    "sin": lambda g, out, x: (times(g, _of(g, "cos", x)),),
    "cos": lambda g, out, x: (minus(times(g, _of(g, "sin", x))),),
    "tan": lambda g, out, x: (times(g, _plus(g, 1.0, _square(g, out))),),
    "atan": lambda g, out, x: (_over(g, _plus(g, 1.0, _square(g, x))),),
    "asin": lambda g, out, x: (times(g, _of(g, "rsqrt", _less(g, 1.0, _square(g, x)))),),
    "acos": lambda g, out, x: (minus(times(g, _of(g, "rsqrt", _less(g, 1.0, _square(g, x))))),),
    "sinh": lambda g, out, x: (times(g, _of(g, "cosh", x)),),
    "cosh": lambda g, out, x: (times(g, _of(g, "sinh", x)),),
    "asinh": lambda g, out, x: (times(g, _of(g, "rsqrt", _plus(g, 1.0, _square(g, x)))),),
    "acosh": lambda g, out, x: (times(g, _of(g, "rsqrt", _less(g, _square(g, x), 1.0))),),
    "atanh": lambda g, out, x: (_over(g, _less(g, 1.0, _square(g, x))),),
    "erfc": _bell(-2.0 / _ROOT_PI),
    "erfinv": lambda g, out, x: (times(g, times(_of(g, "exp", _square(g, out)), _ROOT_PI / 2.0)),),
    "lgamma": lambda g, out, x: (times(g, _of(g, "digamma", x)),),
    "digamma": _trigamma,
    "finite_or_zero": _finite_or_zero,
    "detach": lambda g, out, x: (None,),
    "differentiated_as": lambda g, out, x, y: (None, g),
    "add": lambda g, out, a, b: (g, g),
    "sub": lambda g, out, a, b: (g, minus(g)),
    "mul": lambda g, out, a, b: (times(g, b), times(g, a)),
    "div": _div,
    "maximum": _extremum("gt"),
    "minimum": _extremum("lt"),
    "pow": _pow,
    "exp_diff": _exp_diff,
    "exp_below": _exp_diff,
    "fmod": _fmod,
    "atan2": _atan2,
    "hypot": _hypot,
    "copysign": _copysign,
    "where": _where,
    **dict.fromkeys("lt le gt ge eq ne logical_and logical_or".split(), lambda g, out, a, b: (None, None)),  # noqa: SIM905
    **dict.fromkeys("floordiv rem bitand bitor bitxor shl shr gcd".split(), lambda g, out, a, b: (None, None)),  # noqa: SIM905
    "random_bits": lambda g, out, seed, word, position: NOTHING,
}
"""Function name -> rule."""
