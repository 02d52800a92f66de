"""The laws that lowering relies on, of every reduction, by evaluating its definition on numbers with plain Python."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch

from serrate.errors import DtypeError
from serrate.ir.reductions import REDUCTIONS, SOFTMAX, SUM, WELFORD, Reduction, reduction, softmax
from serrate.ir.values import Argument, Call, Constant, Value, argument

Numbers = tuple[float, ...]


def _largest(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


FUNCTIONS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "square": lambda a: a * a,
    "exp": math.exp,
    "maximum": _largest,
    "minimum": lambda a, b: -_largest(-a, -b),
    "gt": lambda a, b: a > b,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "isnan": math.isnan,
    "logical_or": lambda a, b: bool(a or b),
    "logical_and": lambda a, b: bool(a and b),
    "logical_not": lambda a: not a,
    "where": lambda test, a, b: a if test else b,
}


def evaluate(value: Value, known: dict[str, float]) -> float:
    if isinstance(value, Argument):
        return known[value.name]
    if isinstance(value, Constant):
        return value.number
    assert isinstance(value, Call)
    return FUNCTIONS[value.function](*(evaluate(a, known) for a in value.args))


def applied(values: Sequence[Value], known: dict[str, float]) -> Numbers:
    return tuple(evaluate(v, known) for v in values)


def lift(kind: Reduction, *numbers: float) -> Numbers:
    names = [f"x{k}" for k in range(len(numbers))]
    return applied(kind.lift(*(argument(n, torch.float64) for n in names)), dict(zip(names, numbers, strict=True)))


def combine(kind: Reduction, a: Numbers, b: Numbers) -> Numbers:
    names = [[f"{side}{k}" for k in range(len(kind.states))] for side in "ab"]
    states = [tuple(argument(n, torch.float64) for n in side) for side in names]
    return applied(kind.combine(*states), dict(zip([*names[0], *names[1]], [*a, *b], strict=True)))


def same(a: Numbers, b: Numbers) -> bool:
    return all(
        x == y or math.isclose(x, y, rel_tol=1e-12) or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True)
    )


KINDS = {**REDUCTIONS, "softmax of two totals": softmax(2)}
ELEMENTS = (1.5, -2.0, 1.5, 0.0, 3.25, -math.inf)


def lifted(kind: Reduction) -> list[Numbers]:
    if kind.name in ("any", "all"):
        return [lift(kind, x) for x in (False, True, False, True)]
    if kind.name.startswith("arg"):
        return [lift(kind, x, k) for k, x in enumerate((*ELEMENTS, math.nan, math.nan))]
    if len(kind.states) == 3 and kind.name == "softmax":
        return [lift(kind, x, 1.0, 0.5 * k) for k, x in enumerate(ELEMENTS)]
    return [lift(kind, x) for x in (ELEMENTS[:-1] if kind is WELFORD else ELEMENTS)]


@pytest.mark.parametrize("name", KINDS)
def test_combine_is_associative_and_commutes_as_said(name: str) -> None:
    kind = KINDS[name]
    states = lifted(kind)
    states += [combine(kind, a, b) for a, b in itertools.pairwise(states)]
    for a, b, c in itertools.product(states, repeat=3):
        assert same(combine(kind, combine(kind, a, b), c), combine(kind, a, combine(kind, b, c))), (a, b, c)
    assert kind.commutative
    for a, b in itertools.product(states, repeat=2):
        assert same(combine(kind, a, b), combine(kind, b, a)), (a, b)


@pytest.mark.parametrize("name", KINDS)
def test_the_identity_changes_nothing(name: str) -> None:
    kind = KINDS[name]
    nothing = tuple(s.identity(torch.int64 if s.name == "place" else torch.float64) for s in kind.states)
    assert same(combine(kind, nothing, nothing), nothing)
    for state in lifted(kind):
        if kind.name.startswith("softmax") and state[0] == -math.inf:
            continue  # an infinite element is nothing itself
        assert same(combine(kind, nothing, state), state)
        assert same(combine(kind, state, nothing), state)


@pytest.mark.parametrize("name", KINDS)
def test_a_neutral_value_changes_nothing(name: str) -> None:
    kind = KINDS[name]
    value = kind.neutral(torch.float64)
    assert (value is None) is (name in ("welford", "argmax", "argmin"))
    if value is not None:
        extra = (1.0, 2.0) if len(kind.states) == 3 else ()
        for state in lifted(kind):
            if state[0] != -math.inf:
                assert same(combine(kind, state, lift(kind, value, *extra)), state)


def test_states_that_may_begin_anywhere() -> None:
    """Nothing counted and any mean at all: the other moments come out as they are."""
    assert [s.name for s in WELFORD.states if s.free] == ["mean"]
    for mean in (0.0, 7.0, -1e6):
        assert same(combine(WELFORD, (0.0, mean, 0.0), (3.0, 2.0, 1.5)), (3.0, 2.0, 1.5))


def test_operators_follow_from_combine() -> None:
    named = {name: kind.operator for name, kind in REDUCTIONS.items()}
    simple = {name: name for name in ("sum", "prod", "max", "min", "any", "all")}
    assert named == {**simple, "softmax_max": "max", **dict.fromkeys(("argmax", "argmin", "softmax", "welford"))}


def test_reductions_are_values() -> None:
    for kind in KINDS.values():
        assert pickle.loads(pickle.dumps(kind)) == kind
    assert softmax(1) is SOFTMAX and softmax(2) is not SOFTMAX and SUM is reduction("sum")
    with pytest.raises(DtypeError, match="unknown reduction 'total': choose from sum, prod"):
        reduction("total")
    with pytest.raises(
        DtypeError, match="softmax: lift returns 2 states for 1 values, but the reduction declares maximum, total1, total2"
    ):
        softmax(2).lifted((argument("x", torch.float32),))
