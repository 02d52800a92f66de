"""Random numbers: pure functions of a seed and of an element's index in its tensor.

In: tensors that give a result its shape and structure, or that dropout is applied to. Out: tensors of random numbers. A seed is
an input that every call draws (`Fusion.seed`), unless one is passed. So the numbers do not depend on the backend, the plan, the
number of threads or the storage of rows, and can be recomputed from the same seed. `ir/philox.py` defines the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import torch

from serrate.errors import CallError, DtypeError
from serrate.frontend.ops.common import Operand, floating
from serrate.frontend.ops.elementwise import add, cast, div, elementwise, ge, lt, mul, sub, typed, where
from serrate.ir.domains import IterDomain
from serrate.ir.tile import Store
from serrate.ir.values import Value, call, carried_dtype, constant, ordinal
from serrate.ir.view import TensorView

BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
"""The bits of a uniform number: as many as its dtype represents exactly everywhere in [0, 1)."""
ROOM = 2**32
"""How many random numbers each query reserves for its keys."""
SELU_LIMIT = 1.7580993408473766
"""The negated lower limit of SELU: dropped elements of `alpha_dropout` get its negative."""


def rand_like(x: TensorView, dtype: torch.dtype | None = None, *, seed: TensorView | None = None) -> TensorView:
    """`torch.rand_like`: uniform in [0, 1), in steps of 2^-24; of 2^-53 in float64, 2^-11 in float16, 2^-8 in bfloat16.

    >>> from serrate import ir
    >>> with ir.Fusion() as f:
    ...     x = f.input((None,), torch.float32)
    ...     f.output(rand_like(x))
    >>> torch.equal(f.evaluate(torch.zeros(4)), f.evaluate(torch.zeros(4)))
    False
    """
    dtype = _floating("rand_like", x, dtype)
    return _drawn(x, dtype, seed, lambda bits: uniform(bits, dtype))


def randn_like(x: TensorView, dtype: torch.dtype | None = None, *, seed: TensorView | None = None) -> TensorView:
    """`torch.randn_like`: standard normal, by the Box-Muller transform."""
    dtype = _floating("randn_like", x, dtype)
    return _drawn(x, dtype, seed, lambda bits: _normal(bits, carried_dtype(dtype)))


def randint_like(
    x: TensorView, low: int, high: int, dtype: torch.dtype | None = None, *, seed: TensorView | None = None
) -> TensorView:
    """`torch.randint_like`: integers from `low` to `high` - 1, uniform up to a bias of `high - low` / 2^32."""
    if not low < high:
        raise CallError(f"randint_like: low must be less than high, got {low} and {high}")
    if not -(2**63) <= low < high <= 2**63 or high - low >= 2**63:
        raise CallError(f"randint_like: low and high must be less than 2^63 apart, got {low} and {high}")
    whole = _drawn(x, torch.int64, seed, lambda bits: _below(bits, high - low))
    return cast(add(whole, low) if low else whole, dtype or x.dtype)


def bernoulli(x: TensorView, p: Operand | None = None, *, seed: TensorView | None = None) -> TensorView:
    """`torch.bernoulli`: 1 with the probability in each element of `x`, or with probability `p`; otherwise 0."""
    dtype = x.dtype if p is not None else floating("bernoulli", x)
    chance = x if p is None else p
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    return cast(lt(rand_like(x, precise, seed=seed), chance), dtype)


def dropout(x: TensorView, p: Operand = 0.5, *, seed: TensorView | None = None) -> TensorView:
    """`torch.nn.functional.dropout` in training: an element is 0 with probability `p`, otherwise `x / (1 - p)`."""
    floating("dropout", x)
    return typed(mul(x, _survival(rand_like(x, torch.float32, seed=seed), p, x.dtype)), x.dtype)


def attention_dropout(weights: TensorView, p: Operand, *, seed: TensorView | None = None) -> TensorView:
    """Dropout of attention weights `[..., queries, keys]`. The numbers depend on the query's index among all queries and on the
    key's index in its sequence, so no sequence needs to know how many weights earlier sequences have."""
    fusion, domains = weights.fusion, weights.domains
    place = ordinal(fusion.tensor(torch.float32, (*domains[:-1], IterDomain(ROOM, name=fusion.fresh("d")))), domains)
    drawn = _drawn(weights, torch.float32, seed, lambda bits: uniform(bits, torch.float32), place)
    return mul(weights, _survival(drawn, p, weights.dtype))


def _survival(drawn: TensorView, p: Operand, dtype: torch.dtype) -> TensorView:
    """The factor of an element, from a uniform number: 0 with probability `p`, otherwise 1 / (1 - p)."""
    dtype = carried_dtype(dtype)
    if isinstance(p, TensorView):
        return elementwise("where", dtype, ge(drawn, p), typed(div(1.0, sub(1.0, p)), dtype), 0.0)
    return elementwise("where", dtype, ge(drawn, p), 1.0 / (1.0 - p) if p < 1 else 0.0, 0.0)


def alpha_dropout(x: TensorView, p: float = 0.5, *, seed: TensorView | None = None) -> TensorView:
    """`torch.nn.functional.alpha_dropout` in training: dropped elements get SELU's lower limit, and an affine transform keeps
    mean and variance."""
    floating("alpha_dropout", x)
    if p == 1:
        return mul(x, 0.0)
    a = 1.0 / sqrt((SELU_LIMIT**2 * p + 1.0) * (1.0 - p))
    b = SELU_LIMIT * a * p
    return where(ge(rand_like(x, torch.float32, seed=seed), p), add(mul(x, a), b), b - SELU_LIMIT * a)


def require_probability(name: str, p: Any) -> None:
    """Raises unless `p` is a probability."""
    if not 0.0 <= p <= 1.0:
        raise CallError(f"{name}: the probability must be between 0 and 1, got {p}")


# --- bits ----------------------------------------------------------------------------------------------------------------


class Bits:
    """The random bits of one element: 32 in each word, as int32."""

    def __init__(self, seed: Value, position: Value) -> None:
        self.seed, self.position = seed, position

    def word(self, word: int) -> Value:
        return call("random_bits", self.seed, constant(word, torch.int64), self.position, dtype=torch.int32)

    def top(self, word: int, count: int) -> Value:
        """The upper bits of a word, as a non-negative number."""
        shifted = call("shr", self.word(word), constant(32 - count, torch.int32), dtype=torch.int32)
        return call("bitand", shifted, constant(2**count - 1, torch.int32), dtype=torch.int32)

    def whole(self, word: int) -> Value:
        """A word as a non-negative 64-bit number."""
        wide = call("cast", self.word(word), dtype=torch.int64)
        return call("bitand", wide, constant(2**32 - 1, torch.int64), dtype=torch.int64)


def _drawn(
    x: TensorView, dtype: torch.dtype, seed: TensorView | None, number: Callable[[Bits], Value], place: Value | None = None
) -> TensorView:
    """A tensor like `x` with a number from random bits in each element; the bits at `place`, or at the element's index."""
    fusion, domains = x.fusion, x.domains
    if seed is not None and (seed.ndim or seed.dtype != torch.int64):
        raise CallError(f"a seed is an int64 without dims, got {seed.dtype} with {seed.ndim}")
    out = fusion.tensor(dtype, domains)
    bits = Bits((seed if seed is not None else fusion.seed()).at(()), ordinal(out, domains) if place is None else place)
    return fusion.define([out], domains, Store(out, domains, number(bits)))[0]


def uniform(bits: Bits, dtype: torch.dtype, word: int = 0) -> Value:
    """A number in [0, 1) from one word, or from two in float64."""
    state, count = carried_dtype(dtype), BITS[dtype]
    if dtype != torch.float64:
        top = call("cast", bits.top(word, count), dtype=state)
        return call("mul", top, constant(2.0**-count, state), dtype=state)
    high, low = (call("cast", bits.top(word + k, n), dtype=state) for k, n in enumerate((27, 26)))
    both = call("add", call("mul", high, constant(2.0**26, state), dtype=state), low, dtype=state)
    return call("mul", both, constant(2.0**-53, state), dtype=state)


def _normal(bits: Bits, dtype: torch.dtype) -> Value:
    """sqrt(-2 log u) cos(2 pi v), of u in (0, 1] and v in [0, 1)."""
    wide = dtype == torch.float64
    u = _above_zero(bits, dtype)
    v = uniform(bits, dtype, 2 if wide else 1)
    radius = call("sqrt", call("mul", call("log", u, dtype=dtype), constant(-2.0, dtype), dtype=dtype), dtype=dtype)
    turn = call("cos", call("mul", v, constant(2 * pi, dtype), dtype=dtype), dtype=dtype)
    return call("mul", radius, turn, dtype=dtype)


def _above_zero(bits: Bits, dtype: torch.dtype) -> Value:
    """A number in (0, 1]. In float32 it uses all 32 bits: near 0, where normal numbers are large, floats are dense enough."""
    if dtype == torch.float64:
        return call("sub", constant(1.0, dtype), uniform(bits, dtype), dtype=dtype)
    high = call("cast", bits.top(0, 16), dtype=dtype)
    low = call("cast", call("bitand", bits.word(0), constant(0xFFFF, torch.int32), dtype=torch.int32), dtype=dtype)
    low = call("add", low, constant(1.0, dtype), dtype=dtype)
    both = call("add", call("mul", high, constant(65536.0, dtype), dtype=dtype), low, dtype=dtype)
    return call("mul", both, constant(2.0**-32, dtype), dtype=dtype)


def _below(bits: Bits, limit: int) -> Value:
    """An integer from 0 to `limit` - 1: the upper half of a product, or for large limits the remainder of 63 bits."""
    if limit <= 2**31:
        product = call("mul", bits.whole(0), constant(limit, torch.int64), dtype=torch.int64)
        return call("shr", product, constant(32, torch.int64), dtype=torch.int64)
    high = call("cast", bits.top(0, 31), dtype=torch.int64)
    shifted = call("shl", high, constant(32, torch.int64), dtype=torch.int64)
    return call("rem", call("bitor", shifted, bits.whole(1), dtype=torch.int64), constant(limit, torch.int64), dtype=torch.int64)


def _floating(name: str, x: TensorView, dtype: torch.dtype | None) -> torch.dtype:
    dtype = x.dtype if dtype is None else dtype
    if dtype not in BITS:
        raise DtypeError(f"{name}: needs a floating-point dtype, got {dtype}; pass dtype=torch.float32")
    return dtype
