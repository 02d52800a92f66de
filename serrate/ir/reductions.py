"""Reductions: associative operations, which can be cut into tiles and between workers and combined in order.

In: functions on values. Out: a `Reduction`: its states, `lift` (the states of one element) and `combine` (the states of two
adjacent runs of elements). Nothing else is needed: one Accumulate statement serves a whole row, a tile of it, and the ordered
combination of partial results. Both functions return values, so they can be evaluated, printed and differentiated.

    >>> print(WELFORD.text)
    lift(x) = 1.0, x, 0.0
    combine(a, b):
      count = add(a.count, b.count)
      mean = add(a.mean, mul(sub(b.mean, a.mean), div(b.count, maximum(add(a.count, b.count), 1.0))))
      square = add(a.square, add(b.square,
        mul(square(sub(b.mean, a.mean)), mul(a.count, div(b.count, maximum(add(a.count, b.count), 1.0))))))

Lowering relies on these laws: combine is associative, and the identity is neutral on both sides. Elements are combined in order
unless the reduction is `commutative`. No stage refers to a reduction by name; anything useful beyond the two functions is part
of the definition: `in_block`, `two_pass`, `one_pass`, `about_pivot`, `weighing`, `neutral_value`, `State.free`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from serrate.errors import DtypeError
from serrate.ir.values import Call, Constant, Value, argument, call, carried_dtype, constant

Number = float | int | bool
States = tuple[Value, ...]
OPERATORS: dict[str, str] = {
    "add": "sum",
    "mul": "prod",
    "maximum": "max",
    "minimum": "min",
    "logical_or": "any",
    "logical_and": "all",
}
"""Binary functions that every backend can apply to a whole block, and the name of that block operator."""


@dataclass(frozen=True)
class State:
    """One of the values that a reduction carries."""

    name: str
    identity: Callable[[torch.dtype], Number]
    """Its value for zero elements."""
    free: bool = False
    """Whether its value is irrelevant for zero elements. It then starts with the first element's state, so that it has the
    magnitude of the data and sums relative to it stay small."""


class Block(Protocol):
    """A block of lifted elements, to be combined into the states that a loop carries. States are numbered."""

    def reduced(self, state: int, operator: str, value: Value) -> Value:
        """`value` reduced over all elements by a block operator, starting from the identity of `state`."""

    def once(self, state: int, value: Value) -> Value:
        """`value`, computed once per block; shaped like `state`."""

    def each(self, value: Value) -> Value:
        """`value` of every element, computed once if it is expensive; 0 for elements that do not exist."""

    def update(self, states: States) -> None:
        """Assigns all states simultaneously."""

    def into(self, state: int, operator: str, value: Value) -> None:
        """Combines `value` of all elements into a state by a block operator."""


@dataclass(frozen=True)
class TwoPass:
    """The same states by simpler reductions: the first state alone, then the others relative to it."""

    first: Reduction
    second: Reduction
    terms: Callable[[States, Value], States]
    """The inputs of `second` for the other states, from an element's states and the final first state."""


@dataclass(frozen=True)
class OnePass:
    """How to compute a reduction relative to the result of another one over the same elements, without a second pass."""

    first: Reduction
    """The other reduction, over the elements."""
    second: Reduction
    """This reduction, over terms."""
    terms: tuple[Callable[[Value, Value], Value], ...]
    """The forms a term may have, as functions of an element and that result."""
    result: Callable[[States, Value], Value]
    """The result of the second, from the states and any value in place of that result."""
    in_block: Callable[[Block, States, States], None]
    """As `Reduction.in_block`, for blocks that are cheap to read twice and when no element is known beforehand."""


@dataclass(frozen=True)
class AboutPivot:
    """The same states from plain sums relative to a pivot: one number per result, known beforehand, near the elements."""

    sums: Reduction
    """Takes an element and the pivot."""
    result: Callable[[States, Value, Value], States]
    """The states, from the sums, the pivot and the number of elements."""


@dataclass(frozen=True)
class Weighing:
    """A reduction with states (first, total) whose total sums weights; in the same pass it can sum other values with these
    weights."""

    function: str
    """The weight of an element: this elementwise function of the element and of the final first state."""
    with_totals: Callable[[int, bool, bool], Reduction]
    """The same reduction with several totals; it takes the element and, for each total, the values to weigh. If the first flag
    is set, it also takes a scale for the last values. If the second is set, the first total is used only as the divisor of the
    others: it may be NaN where they are, which makes it cheaper."""


@dataclass(frozen=True)
class Reduction:
    """One kind of reduction. `lift` and `combine` define it; everything after them is optional."""

    name: str
    states: tuple[State, ...]
    lift: Callable[..., States]
    """The states of one element, from its values."""
    combine: Callable[[States, States], States]
    """The states of a run of elements, from those of its two halves."""
    commutative: bool = False
    """Whether the order of elements matters only for rounding; lanes may then take every n-th element."""
    in_block: Callable[[Block, States, States], None] | None = None
    """Combines a whole block into the carried states with a few block operators; takes the carried and the new states."""
    two_pass: TwoPass | None = None
    one_pass: OnePass | None = None
    about_pivot: AboutPivot | None = None
    weighing: Weighing | None = None
    neutral_value: Callable[[torch.dtype], Number] | None = None
    """The value of an element that changes nothing, if that is not the identity."""

    def __str__(self) -> str:
        return self.name

    def identity(self, state: int, dtype: torch.dtype) -> Number:
        """The value of a state for zero elements."""
        return self.states[state].identity(dtype)

    def lifted(self, values: Sequence[Value]) -> States:
        """The states of one element, one for each declared state."""
        states = self.lift(*values)
        if len(states) != len(self.states):
            names = ", ".join(s.name for s in self.states)
            raise DtypeError(
                f"{self}: lift returns {len(states)} states for {len(values)} values, but the reduction declares {names}"
            )
        return states

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether an element is its own state, so that results can be reduced again like elements."""
        x = argument("x", torch.float32)
        return len(self.states) == 1 and self.lift(x) == (x,)

    @functools.cached_property
    def operators(self) -> tuple[str, ...] | None:
        """The block operators that combine the states, if each is combined on its own."""
        a, b = (tuple(argument(f"{side}{k}", torch.float32) for k in range(len(self.states))) for side in "ab")
        found = []
        for x, y, combined in zip(a, b, self.combine(a, b), strict=True):
            name = OPERATORS.get(combined.function) if isinstance(combined, Call) and combined.args == (x, y) else None
            if name is None:
                return None
            found.append(name)
        return tuple(found)

    @property
    def operator(self) -> str | None:
        """The block operator that combines the only state, if the reduction is just that."""
        return self.operators[0] if len(self.states) == 1 and self.operators is not None else None

    @property
    def folds(self) -> bool:
        """Whether a block must be combined element by element."""
        return self.operators is None and self.in_block is None

    def neutral(self, dtype: torch.dtype) -> Number | None:
        """The value of an element that changes nothing; None if no such value is known."""
        if self.neutral_value is not None:
            return self.neutral_value(dtype)
        return self.identity(0, dtype) if self.is_plain else None

    @property
    def text(self) -> str:
        """Both functions as text, with arguments named after the states."""
        dtype = torch.float32
        taken = inspect.signature(self.lift).parameters.values()
        names = [p.name for p in taken if p.kind is not p.VAR_POSITIONAL]
        more = next((p.name for p in taken if p.kind is p.VAR_POSITIONAL), "")
        while more and len(self.lift(*(argument(name, dtype) for name in names))) < len(self.states):
            names.append(f"{more}{len(names)}")
        values = [argument(name, dtype) for name in names]
        a, b = (tuple(argument(f"{side}.{s.name}", dtype) for s in self.states) for side in "ab")
        lines = [f"lift({', '.join(names)}) = {', '.join(map(str, self.lift(*values)))}"]
        lines.append("combine(a, b):")
        lines += (f"  {s.name} = {v}" for s, v in zip(self.states, self.combine(a, b), strict=True))
        return "\n".join(lines)


# --- identities ----------------------------------------------------------------------------------------------------------


def _zero(dtype: torch.dtype) -> Number:
    return 0.0 if dtype.is_floating_point else 0


def _one(dtype: torch.dtype) -> Number:
    return 1.0 if dtype.is_floating_point else 1


def _false(dtype: torch.dtype) -> Number:
    return False


def _true(dtype: torch.dtype) -> Number:
    return True


def _lowest(dtype: torch.dtype) -> Number:
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Number:
    if dtype.is_floating_point:
        return math.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _lowest_finite(dtype: torch.dtype) -> Number:
    """Finite, so that e^(maximum - maximum) is 1, not NaN, before the first element."""
    return torch.finfo(dtype).min


NO_PLACE = torch.iinfo(torch.int64).max
"""Larger than every position, so that any position comes before it."""


def _no_place(dtype: torch.dtype) -> Number:
    return NO_PLACE


# --- values, each with the dtype of the first operand ------------------------------------------------------------------------


def _call(function: str, *args: Value) -> Value:
    return call(function, *args, dtype=args[0].dtype)


def _is(function: str, *args: Value) -> Value:
    return call(function, *args, dtype=torch.bool)


def _where(test: Value, a: Value, b: Value) -> Value:
    return call("where", test, a, b, dtype=a.dtype)


def _add(a: Value, b: Value) -> Value:
    return a if _is_number(b, 0) else _call("add", a, b)


def _mul(a: Value, b: Value) -> Value:
    return b if _is_number(a, 1) else a if _is_number(b, 1) else _call("mul", a, b)


def _is_number(value: Value, number: Number) -> bool:
    return isinstance(value, Constant) and value.number == number


# --- one state, one operator -------------------------------------------------------------------------------------------------


def _itself(x: Value) -> States:
    return (x,)


@dataclass(frozen=True)
class _Operator:
    """Combines one state by a binary function."""

    function: str

    def __call__(self, a: States, b: States) -> States:
        return (_call(self.function, a[0], b[0]),)


def _simple(function: str, identity: Callable[[torch.dtype], Number]) -> Reduction:
    name = OPERATORS[function]
    return Reduction(name, (State(name, identity),), _itself, _Operator(function), commutative=True)


SUM = _simple("add", _zero)
PROD = _simple("mul", _one)
MAX = _simple("maximum", _lowest)
"""NaN propagates, as in torch; the backends' maximum and minimum do the same."""
MIN = _simple("minimum", _highest)
ANY = _simple("logical_or", _false)
ALL = _simple("logical_and", _true)


# --- statistics of a softmax -------------------------------------------------------------------------------------------------


def _minus_infinity(dtype: torch.dtype) -> Number:
    return -math.inf


SOFTMAX_MAX = Reduction(
    "softmax_max",
    (State("maximum", _lowest_finite),),
    _itself,
    _Operator("maximum"),
    commutative=True,
    neutral_value=_minus_infinity,
)
"""The maximum alone, with softmax's identity, so that a row of only -inf gives the same result in one pass and in two."""


def _weighed(x: Value, *weight: Value) -> States:
    return (x, *(weight or (constant(1.0, carried_dtype(x.dtype)),)))


def _scaled(x: Value, *weights_and_scale: Value) -> States:
    *weights, last, scale = weights_and_scale
    return (x, *weights, call("mul", scale, last, dtype=scale.dtype))


def _rescaled(a: States, b: States) -> States:
    """M = max(m1, m2);  t1*e^(m1 - M) + t2*e^(m2 - M).  One of the powers is 1, so one exponential suffices."""
    (m1, *totals1), (m2, *totals2) = a, b
    apart = call("abs", call("sub", m2, m1, dtype=m1.dtype), dtype=m1.dtype)
    power = _where(_is("eq", m2, m1), constant(1.0, m1.dtype), _call("exp", _call("neg", apart)))
    grows = _is("gt", m2, m1)
    totals = (
        _where(grows, _call("add", _mul(t1, power), t2), _call("add", t1, _mul(power, t2)))
        for t1, t2 in zip(totals1, totals2, strict=True)
    )
    return (_call("maximum", m1, m2), *totals)


@dataclass(frozen=True)
class _RescaledOnce:
    """Takes the block's maximum first: totals are rescaled once, and every element adds its power relative to the new maximum.

    If the last weight is `scaled`, the scale multiplies the power, so that the weight alone is one operand of a matrix product.
    """

    scaled: bool
    power: str

    def __call__(self, block: Block, carried: States, new: States) -> None:
        (m, *totals), (x, *weights) = carried, new
        x = block.each(x) if len(totals) > 1 else x
        grown = _call("maximum", m, block.reduced(0, "max", x))
        scale = _call("exp_diff", m, grown)
        scale = block.once(0, scale) if len(totals) > 1 else scale
        block.update((grown, *(_call("mul", t, scale) for t in totals)))
        powers = call(self.power, x, m, dtype=m.dtype)
        powers = block.each(powers) if len(totals) > 1 else powers
        if self.scaled:
            assert isinstance(weights[-1], Call)
            scale, weights[-1] = weights[-1].args
        for k, weight in enumerate(weights, 1):
            if self.scaled and k == len(weights):
                powers = block.each(_call("mul", powers, scale))
            block.into(k, "sum", _weighted(powers, weight))


def _weighted(power: Value, weight: Value) -> Value:
    """A power times a weight; for 16-bit weights the power is rounded to 16 bits, like the operands of a matrix product."""
    if carried_dtype(weight.dtype) == weight.dtype:
        return _mul(weight, power)
    return call("mul", call("cast", power, dtype=weight.dtype), weight, dtype=power.dtype)


def _powers(new: States, maximum: Value) -> States:
    x, *weights = new
    return tuple(_mul(w, call("exp_diff", x, maximum, dtype=maximum.dtype)) for w in weights)


@functools.cache
def softmax(totals: int, scaled: bool = False, divides: bool = False) -> Reduction:
    """The maximum, and totals of weights times e^(x - maximum): for attention, the weights are 1 and the columns of the values.

    Takes x and a weight for each total; with x alone, one total with weights 1. With `scaled`, also takes a factor of the last
    weight: for attention with dropout, 0 for dropped elements. With `divides`, the first total only divides the others, and may
    be NaN if the maximum is infinite.
    """
    names = ["total"] if totals == 1 else [f"total{k}" for k in range(1, totals + 1)]
    return Reduction(
        "softmax",
        (State("maximum", _lowest_finite), *(State(name, _zero) for name in names)),
        _scaled if scaled else _weighed,
        _rescaled,
        commutative=True,
        in_block=_RescaledOnce(scaled, "exp_below" if divides else "exp_diff"),
        two_pass=TwoPass(SOFTMAX_MAX, SUM, _powers),
        weighing=Weighing("exp_diff", softmax) if totals == 1 else None,
        neutral_value=_minus_infinity,
    )


SOFTMAX = softmax(1)


@functools.cache
def rescaled(totals: int) -> Reduction:
    """Softmax statistics as a kernel's loop carries them: the maximum starts at -inf, and stays -inf for a row of only -inf."""
    return replace(softmax(totals), name="rescaled sums", states=(*MAX.states, *softmax(totals).states[1:]))


# --- extrema and where they are ------------------------------------------------------------------------------------------------


def _placed(x: Value, place: Value) -> States:
    return x, place


def _nan(x: Value) -> Value:
    return _is("isnan", x)


def _same(a: Value, b: Value) -> Value:
    """Whether two values are equal, NaN equal to NaN."""
    same = _is("eq", a, b)
    return _is("logical_or", same, _is("logical_and", _nan(a), _nan(b))) if a.dtype.is_floating_point else same


@dataclass(frozen=True)
class _Better:
    """The better extremum; among equal ones, the first position. NaN beats any number."""

    function: str
    above: str

    def __call__(self, a: States, b: States) -> States:
        (best, place), (seen, first) = a, b
        better = _is(self.above, seen, best)
        if best.dtype.is_floating_point:
            news = _is("logical_and", _nan(seen), _is("logical_not", _nan(best)))
            better = _is("logical_or", better, news)
        kept = _where(_same(seen, best), _call("minimum", place, first), place)
        return call(self.function, best, seen, dtype=best.dtype), _where(better, first, kept)


@dataclass(frozen=True)
class _FirstBest:
    """The block's extremum, then the first position that holds it."""

    better: _Better

    def __call__(self, block: Block, carried: States, new: States) -> None:
        x, at = new
        seen = block.reduced(0, OPERATORS[self.better.function], x)
        first = block.reduced(1, "min", _where(_same(x, seen), at, constant(NO_PLACE, torch.int64)))
        block.update(self.better(carried, (seen, first)))


def _arg(name: str, better: _Better, identity: Callable[[torch.dtype], Number]) -> Reduction:
    states = (State("extremum", identity), State("place", _no_place))
    return Reduction(name, states, _placed, better, commutative=True, in_block=_FirstBest(better))


ARGMAX = _arg("argmax", _Better("maximum", "gt"), _lowest)
ARGMIN = _arg("argmin", _Better("minimum", "lt"), _highest)


# --- moments -------------------------------------------------------------------------------------------------------------------

COUNT, MEAN, SQUARE = range(3)


def _counted(x: Value) -> States:
    dtype = carried_dtype(x.dtype)
    return constant(1.0, dtype), x, constant(0.0, dtype)


def _merged(a: States, b: States) -> States:
    """n = n1 + n2;  d = m2 - m1;  m1 + d*n2/n;  s1 + s2 + d*d*n1*n2/n"""
    return _grown(a, b[COUNT], call("sub", b[MEAN], a[MEAN], dtype=a[MEAN].dtype), b[SQUARE])


def _grown(states: States, seen: Value, delta: Value, within: Value) -> States:
    """The moments after adding `seen` elements whose mean differs by `delta`."""
    count, mean, square = states
    total = _call("add", count, seen)
    share = call("div", seen, _call("maximum", total, constant(1.0, count.dtype)), dtype=count.dtype)
    between = _call("mul", _call("square", delta), _call("mul", count, share))
    more = between if _is_number(within, 0) else _call("add", within, between)
    return total, _call("add", mean, _call("mul", delta, share)), _call("add", square, more)


def _moments_in_block(block: Block, carried: States, new: States) -> None:
    if isinstance(new[COUNT], Constant):
        _of_elements(block, carried, new)
    else:
        _of_parts(block, carried, new)


def _of_elements(block: Block, carried: States, new: States) -> None:
    """Sums of (x - mean) and of its square, relative to the mean so far, which has the magnitude of the data, so that the squares
    do not cancel: if the first element is an outlier, its contribution is real."""
    one, x, _ = new
    away = call("sub", x, carried[MEAN], dtype=carried[MEAN].dtype)
    seen = block.reduced(COUNT, "sum", one)
    near, squares = block.reduced(MEAN, "sum", away), block.reduced(SQUARE, "sum", _call("square", away))
    delta = _call("div", near, _at_least_one(seen))
    block.update(_grown(carried, seen, delta, _left(squares, delta, near)))


def _of_parts(block: Block, carried: States, new: States) -> None:
    """The mean of all parts first, then squares within and between them, without subtracting large numbers."""
    n, m, s = new
    seen = block.reduced(COUNT, "sum", n)
    average = block.once(MEAN, _call("div", block.reduced(MEAN, "sum", _call("mul", n, m)), _at_least_one(seen)))
    away = _call("square", _call("sub", m, average))
    within = block.reduced(SQUARE, "sum", _call("add", s, _call("mul", n, away)))
    block.update(_grown(carried, seen, _call("sub", average, carried[MEAN]), within))


def _in_two_reads(block: Block, carried: States, new: States) -> None:
    """About the mean of the block first, then sums relative to that, in the dtype of the elements; states may be wider."""
    one, x = new[COUNT], _cast(new[MEAN], carried_dtype(new[MEAN].dtype))
    seen = block.reduced(COUNT, "sum", one)
    about = block.once(MEAN, _call("div", block.reduced(MEAN, "sum", x), _at_least_one(seen)))
    pivot = _cast(about, x.dtype)
    away = _call("sub", x, pivot)
    near, squares = block.reduced(MEAN, "sum", away), block.reduced(SQUARE, "sum", _call("square", away))
    rest = _call("div", near, _at_least_one(seen))
    delta = _call("add", _call("sub", _cast(pivot, rest.dtype), carried[MEAN]), rest)
    block.update(_grown(carried, seen, delta, _left(squares, rest, near)))


def _left(squares: Value, mean: Value, total: Value) -> Value:
    """Squares relative to the mean, from those relative to a value near it."""
    # Rounding can leave a tiny negative remainder if all elements are equal.
    return _call("maximum", _call("sub", squares, _call("mul", mean, total)), constant(0.0, total.dtype))


def _cast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else call("cast", value, dtype=dtype)


def _at_least_one(count: Value) -> Value:
    return _call("maximum", count, constant(1.0, count.dtype))


def _squares_from(states: States, center: Value) -> Value:
    """The squares relative to a value other than the mean, without subtraction."""
    away = _call("sub", states[MEAN], _cast(center, states[MEAN].dtype))
    return _call("add", states[SQUARE], _call("mul", states[COUNT], _call("square", away)))


def _square_away(x: Value, center: Value) -> Value:
    return _call("square", call("sub", x, center, dtype=center.dtype))


def _product_away(x: Value, center: Value) -> Value:
    away = call("sub", x, center, dtype=center.dtype)
    return _call("mul", away, away)


def _from_pivot(x: Value, pivot: Value) -> States:
    away = call("sub", x, pivot, dtype=pivot.dtype)
    return away, _call("square", away)


def _each_added(a: States, b: States) -> States:
    return tuple(_call("add", one, other) for one, other in zip(a, b, strict=True))


def _about_mean(sums: States, pivot: Value, count: Value) -> States:
    near, squares = sums
    delta = _call("div", near, _at_least_one(count))
    return count, _call("add", pivot, delta), _left(squares, delta, near)


FROM_PIVOT = Reduction(
    "sums from a pivot", (State("near", _zero), State("squares", _zero)), _from_pivot, _each_added, commutative=True
)
"""Sums of x - pivot and of its square."""

WELFORD = Reduction(
    "welford",
    (State("count", _zero), State("mean", _zero, free=True), State("square", _zero)),
    _counted,
    _merged,
    commutative=True,
    in_block=_moments_in_block,
    one_pass=OnePass(SUM, SUM, (_square_away, _product_away), _squares_from, _in_two_reads),
    about_pivot=AboutPivot(FROM_PIVOT, _about_mean),
)


REDUCTIONS: dict[str, Reduction] = {
    r.name: r for r in (SUM, PROD, MAX, MIN, ANY, ALL, ARGMAX, ARGMIN, SOFTMAX_MAX, SOFTMAX, WELFORD)
}


def reduction(name: str) -> Reduction:
    """The reduction of that name."""
    if name not in REDUCTIONS:
        raise DtypeError(f"unknown reduction {name!r}: choose from {', '.join(REDUCTIONS)}")
    return REDUCTIONS[name]
