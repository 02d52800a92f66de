"""Index expressions: simplified or not, they mean the same integer.

In: random trees of operations, built once with expressions and once as plain Python. Out: failures where value, bounds, text,
substitution or identity disagree; sympy is the second opinion.
"""

from __future__ import annotations

import gc
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from serrate.ir.expr import (
    Array,
    Const,
    Element,
    Environment,
    Expr,
    Less,
    Sum,
    Symbol,
    as_expr,
    ceildiv,
    const,
    maximum,
    minimum,
    search,
    symbol,
)

RANGES = {"x": (0, 7), "y": (0, 40), "z": (-9, 12), "n": (1, 5)}
"""The symbols of the trees with their bounds; n is one that can be divided by."""
SYMBOLS = {name: symbol(name, *bounds) for name, bounds in RANGES.items()}
OFFSETS = Array("offsets", (0, 127, 127, 325))
PARTS = Array("parts", (0, 3, 7, 0, 0, 5, 0, 2, 2))
"""Three rows of three boundaries."""
TABLE = Array("table", (3, 0, 7, 2, 2))
EVERY = settings(max_examples=400)


@dataclass(frozen=True)
class Tree:
    """An operation on other trees, a symbol's name, or a number."""

    head: str | int
    args: tuple[Tree, ...] = ()


def owner(position: int) -> int:
    """The row of OFFSETS that holds a position; 3 past the end."""
    rows = [k for k in range(3) if OFFSETS.data[k] <= position < OFFSETS.data[k + 1]]  # type: ignore[index]
    return rows[0] if rows else (0 if position < 0 else 3)


def parts_owner(row: int, position: int) -> int:
    """The part of a row of PARTS that holds a position: those that end at or before it are passed."""
    return sum(1 for end in PARTS.data[row * 3 + 1 : row * 3 + 3] if end <= position)  # type: ignore[index]


@dataclass(frozen=True)
class Operation:
    """One operation in each of the three worlds."""

    expression: Callable[..., Any]
    plain: Callable[..., int]
    symbolic: Callable[..., Any] | None = None


OPERATIONS = {
    "+": Operation(*[lambda a, b: a + b] * 3),
    "-": Operation(*[lambda a, b: a - b] * 3),
    "*": Operation(*[lambda a, b: a * b] * 3),
    "//": Operation(lambda a, b: a // b, lambda a, b: a // b, lambda a, b: sympy.floor(a / b)),
    "%": Operation(lambda a, b: a % b, lambda a, b: a % b, lambda a, b: sympy.Mod(a, b)),
    "min": Operation(minimum, min, sympy.Min),
    "max": Operation(maximum, max, sympy.Max),
    "^": Operation(lambda a, b: a ^ b, lambda a, b: a ^ b),
    "in row": Operation(lambda a: search(PARTS, 2, a, (a % 3) * 3), lambda a: parts_owner(a % 3, a)),
    "ceildiv": Operation(ceildiv, lambda a, b: -(-a // b), lambda a, b: sympy.ceiling(a / b)),
    "table": Operation(lambda a: TABLE[a % 5], lambda a: TABLE.data[a % 5]),  # type: ignore[index]
    "owner": Operation(lambda a: search(OFFSETS, 3, a), owner),
}
ARITHMETIC = ("+", "-", "*")
DIVIDING = ("//", "%", "ceildiv")

leaves = st.one_of(st.sampled_from(list(SYMBOLS)), st.integers(-6, 9)).map(Tree)
divisors = st.one_of(st.just("n"), st.integers(1, 9)).map(Tree)


def larger(trees: st.SearchStrategy[Tree], lookups: bool) -> st.SearchStrategy[Tree]:
    pair = st.builds(
        lambda h, a, b: Tree(h, (a, b)), st.sampled_from((*ARITHMETIC, "min", "max", *(["^"] * lookups))), trees, trees
    )
    divided = st.builds(lambda h, a, b: Tree(h, (a, b)), st.sampled_from(DIVIDING), trees, divisors)
    looked_up = st.builds(lambda h, a: Tree(h, (a,)), st.sampled_from(("table", "owner", "in row")), trees)
    return st.one_of(pair, divided, looked_up) if lookups else st.one_of(pair, divided)


trees = st.recursive(leaves, lambda inner: larger(inner, True), max_leaves=10)
plain_trees = st.recursive(leaves, lambda inner: larger(inner, False), max_leaves=6)
values = st.fixed_dictionaries({name: st.integers(*bounds) for name, bounds in RANGES.items()})


def expression(tree: Tree) -> Expr:
    """The tree as an expression. Numbers stay plain ints where an operator takes one."""
    if not tree.args:
        return SYMBOLS[tree.head] if isinstance(tree.head, str) else const(tree.head)
    args: list[Expr | int] = [expression(a) for a in tree.args]
    if len(args) == 2 and isinstance(args[1], Const):
        args[1] = int(args[1].value)  # type: ignore[arg-type]
    return as_expr(OPERATIONS[str(tree.head)].expression(*args))


def evaluated(tree: Tree, at: dict[str, int]) -> int:
    if not tree.args:
        return at[tree.head] if isinstance(tree.head, str) else tree.head
    return OPERATIONS[str(tree.head)].plain(*(evaluated(a, at) for a in tree.args))


def symbolic(tree: Tree) -> Any:
    if not tree.args:
        return sympy.Symbol(tree.head, integer=True) if isinstance(tree.head, str) else sympy.Integer(tree.head)
    return OPERATIONS[str(tree.head)].symbolic(*(symbolic(a) for a in tree.args))  # type: ignore[misc]


def environment(at: dict[str, int]) -> Environment:
    return Environment({SYMBOLS[name]: value for name, value in at.items()})


@EVERY
@given(trees, values)
def test_simplified_means_the_same(tree: Tree, at: dict[str, int]) -> None:
    assert expression(tree).evaluate(environment(at)) == evaluated(tree, at)


@EVERY
@given(trees, values)
def test_bounds_hold(tree: Tree, at: dict[str, int]) -> None:
    low, high = expression(tree).bounds
    value = evaluated(tree, at)
    assert low is None or low <= value
    assert high is None or value <= high


@EVERY
@given(trees, values)
def test_text_reads_as_python(tree: Tree, at: dict[str, int]) -> None:
    names = {
        **at,
        "min": min,
        "max": max,
        "table": TABLE.data,
        "offsets": OFFSETS,
        "search": lambda row, i: owner(i) if row is OFFSETS else sum(e <= i for e in row[1:3]),
        "parts": PARTS.data,
    }
    assert eval(str(expression(tree)), {"__builtins__": {}}, names) == evaluated(tree, at)


@EVERY
@given(trees, st.fixed_dictionaries({"x": plain_trees, "z": plain_trees}), values)
def test_substitution_commutes_with_evaluation(tree: Tree, new: dict[str, Tree], at: dict[str, int]) -> None:
    # What is put in for a bounded symbol must lie in its bounds, as it does wherever the compiler substitutes.
    inside = {"x": Tree("%", (new["x"], Tree(8))), "z": Tree("-", (Tree("%", (new["z"], Tree(22))), Tree(9)))}
    replaced = expression(tree).substitute({SYMBOLS[name]: expression(t) for name, t in inside.items()})
    after = {**at, **{name: evaluated(t, at) for name, t in inside.items()}}
    assert replaced.evaluate(environment(at)) == evaluated(tree, after)


@EVERY
@given(trees)
def test_rebuilt_from_its_operands_it_is_the_same_object(tree: Tree) -> None:
    e = expression(tree)
    assert expression(tree) is e
    assert e.rebuild(e.operands) is e
    assert e.substitute({}) is e
    assert e.substitute({s: s for s in e.symbols}) is e


@settings(max_examples=60)
@given(plain_trees, values)
def test_sympy_agrees(tree: Tree, at: dict[str, int]) -> None:
    expected = symbolic(tree).subs({sympy.Symbol(name, integer=True): value for name, value in at.items()})
    assert expression(tree).evaluate(environment(at)) == int(expected)


@EVERY
@given(st.lists(st.tuples(st.sampled_from(list(SYMBOLS)), st.integers(-4, 4)), max_size=8), st.randoms())
def test_sums_do_not_depend_on_order(terms: list[tuple[str, int]], rng: Any) -> None:
    shuffled = list(terms)
    rng.shuffle(shuffled)
    first = sum((SYMBOLS[name] * factor for name, factor in terms), const(3))
    second = sum((factor * SYMBOLS[name] for name, factor in shuffled), const(3))
    assert first is second


@EVERY
@given(st.lists(st.sampled_from(list(SYMBOLS)), min_size=2, max_size=5), st.randoms())
def test_products_do_not_depend_on_order(names: list[str], rng: Any) -> None:
    def multiply(parts: list[Expr]) -> Expr:
        parts = list(parts)
        while len(parts) > 1:
            parts.append(parts.pop(rng.randrange(len(parts))) * parts.pop(rng.randrange(len(parts))))
        return parts[0]

    factors = [SYMBOLS[name] for name in names]
    assert multiply(factors) is multiply(factors)


def test_order_of_different_symbols_that_read_alike_does_not_matter() -> None:
    a, b = symbol("i", 0, 3), symbol("i", 0, 5)
    assert a is not b
    assert a + b is b + a
    assert a * b is b * a
    assert minimum(a, b) is minimum(b, a)
    assert (a + b) - (b + a) is const(0)


X, Y, N = symbol("x"), symbol("y"), symbol("n", 1)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (X + 0, "x"),
        (X * 1, "x"),
        (X * 0, "0"),
        (X - X, "0"),
        (X + Y - X, "y"),
        (3 - X, "-x + 3"),
        ((X * 64 + Y) - X * 64, "y"),
        ((2 * X) * Y, "x*y*2"),
        ((X * 64 + symbol("n", 0, 63)) // 64, "x"),
        ((X * 64 + symbol("n", 0, 63)) % 64, "n"),
        ((X * 4) // 4, "x"),
        ((X * 4 + 6) // 4, "x + 1"),
        (X // 1, "x"),
        (X % 1, "0"),
        (X // 3 // 4, "x // 12"),
        (X // X, "1"),
        (X % X, "0"),
        (ceildiv(X * 4, 2), "x*2"),
        (minimum(X, -1), "-1"),
        (maximum(X, 0), "x"),
        (minimum(X, X + 1), "x"),
        (minimum(X // 8, (X + 7) // 8), "x // 8"),
        (maximum(X // 8, (X + 7) // 8), "(x + 7) // 8"),
        (0 - X // 3, "-(x // 3)"),
        (X // (Y * N), "x // (n*y)"),
        (X % (Y * N), "x % (n*y)"),
        ((X + Y) * N, "n*(x + y)"),
        (X ^ 0, "x"),
        (X ^ X, "0"),
        (X ^ Y ^ X, "y"),
        ((X ^ Y) * 2 + 1, "(x ^ y)*2 + 1"),
        (X // 4 ^ Y + 1, "(x // 4 ^ y + 1)"),
        (search(PARTS, 2, X, Y * 3), "search(parts[y*3:], x)"),
    ],
    ids=str,
)
def test_canonical_forms(made: Expr, text: str) -> None:
    assert str(made) == text


@pytest.mark.parametrize(
    ("made", "value"),
    [
        (const(7) + 3, 10),
        (const(-7) // 2, -4),
        (const(-7) % 2, 1),
        (ceildiv(7, 2), 4),
        (minimum(3, 5), 3),
        (maximum(3, 5), 5),
        (TABLE[2], 7),
        (OFFSETS[const(3)], 325),
        (search(OFFSETS, 3, 127), 2),
        (search(PARTS, 2, 3, 0), 1),
        (search(PARTS, 2, 3, 3), 1),
        (search(PARTS, 2, 3, 6), 2),
        (const(6) ^ 3, 5),
        (const(-1) ^ 3, -4),
    ],
)
def test_constants_fold(made: Expr, value: int) -> None:
    assert made.value == value
    assert made is const(value)


@pytest.mark.parametrize("divide", [lambda: X // 0, lambda: X % 0, lambda: X // -2, lambda: const(4) % -1])
def test_divisors_are_positive(divide: Callable[[], Expr]) -> None:
    with pytest.raises(ZeroDivisionError, match="the divisor must be positive"):
        divide()


@pytest.mark.parametrize("value", [2.5, None, "3"])
def test_only_integers_are_constants(value: Any) -> None:
    with pytest.raises(TypeError):
        const(value)


def test_search_skips_empty_components() -> None:
    position = symbol("i")
    found = search(OFFSETS, 3, position)
    wanted = {0: 0, 126: 0, 127: 2, 128: 2, 324: 2}
    assert {i: found.evaluate(Environment({position: i})) for i in wanted} == wanted
    leading = search(Array("leading", (0, 0, 0, 4, 4)), 4, position)
    assert [leading.evaluate(Environment({position: i})) for i in range(4)] == [2, 2, 2, 2]


def test_past_the_end_there_is_no_owner() -> None:
    position = symbol("i")
    found = search(OFFSETS, 3, position)
    assert found.evaluate(Environment({position: 325})) == 3
    assert found.bounds == (0, 3)
    assert search(Array("none", (0,)), 0, position).evaluate(Environment({position: 5})) == 0


@pytest.mark.parametrize("index", [-1, 4, 99])
def test_an_element_outside_its_array_raises_when_evaluated(index: int) -> None:
    i = symbol("i", None)
    with pytest.raises(IndexError):
        OFFSETS[i].evaluate(Environment({i: index}))
    made = OFFSETS[index]
    assert isinstance(made, Element)
    with pytest.raises(IndexError):
        made.evaluate(Environment({}))


def test_arrays_of_one_name_and_other_elements_are_different() -> None:
    i = symbol("i")
    assert Array("a", (1, 2))[i] is Array("a", (1, 2))[i]
    assert Array("a", (1, 2))[i] is not Array("a", (1, 3))[i]


def test_what_an_expression_reads() -> None:
    i, j = symbol("i"), symbol("j")
    e = OFFSETS[search(TABLE, 4, i)] + j * 2
    assert e.symbols == {i, j}
    assert e.arrays == {OFFSETS, TABLE}
    assert isinstance(e, Sum)


def test_values_given_by_the_caller() -> None:
    i = symbol("i")
    off = Array("off")
    given_ = Environment({i: 4}, lambda array, index: (array.name, index), lambda array, count, at, first: count * 100 + at)
    assert off[i + 1].evaluate(given_) == ("off", 5)
    assert search(off, 3, i).evaluate(given_) == 304
    with pytest.raises(KeyError, match="no value given for symbol k"):
        symbol("k").evaluate(given_)


@EVERY
@given(trees, trees, values)
def test_conditions(left: Tree, right: Tree, at: dict[str, int]) -> None:
    condition = Less(expression(left), expression(right))
    holds = evaluated(left, at) < evaluated(right, at)
    assert condition.evaluate(environment(at)) == holds
    assert holds or not condition.proven


def test_what_bounds_prove() -> None:
    i = symbol("i", 0, 3)
    assert Less(i, const(4)).proven
    assert not Less(i, const(3)).proven
    assert Less(Y, Y + 1).proven
    assert str(Less(i, const(4))) == "i < 4"
    assert Less(i, Y).symbols == {i, Y}
    assert Less(i, Y).substitute({i: const(2)}) == Less(const(2), Y)


def test_bounds_of_xor() -> None:
    assert (symbol("a", 0, 5) ^ symbol("b", 0, 2)).bounds == (0, 7)
    assert (symbol("a", 0, 5) ^ symbol("b")).bounds == (0, None)
    assert (symbol("a", -1, 5) ^ symbol("b", 0, 2)).bounds == (None, None)


def test_a_row_outside_its_array_raises_when_searched() -> None:
    first = symbol("first", None)
    for at in (-3, 9):
        with pytest.raises(IndexError):
            search(PARTS, 2, 1, first).evaluate(Environment({first: at}))
        with pytest.raises(IndexError):
            search(PARTS, 2, 1, at).evaluate(Environment({}))


@EVERY
@given(trees, divisors, trees, st.integers(-4, 4), values)
def test_a_comparison_needs_no_division(i: Tree, n: Tree, p: Tree, shift: int, at: dict[str, int]) -> None:
    condition = Less(expression(i) // expression(n) + shift, expression(p))
    simple = condition.simplified
    assert simple.evaluate(environment(at)) == (evaluated(i, at) // evaluated(n, at) + shift < evaluated(p, at))
    assert simple.simplified == simple


def test_the_rule_of_merge() -> None:
    assert Less(X // 5, const(3)).simplified == Less(X, const(15))
    assert Less(X // N, Y).simplified == Less(X, Y * N)
    assert Less(X // 3 // 4 - 1, Y).simplified == Less(X, Y * 12 + 12)
    assert Less(X % 5, const(3)).simplified == Less(X % 5, const(3))


def test_nothing_is_kept_alive() -> None:
    before = len(Expr._interned)
    made = [symbol(f"short lived {k}") * 3 + k for k in range(50)]
    assert len(Expr._interned) >= before + 100
    del made
    gc.collect()
    assert len(Expr._interned) < before + 50


def test_symbols_keep_their_bounds() -> None:
    assert symbol("i").bounds == (0, None)
    assert symbol("i", None, 4).bounds == (None, 4)
    assert symbol("i", 0, 4) is symbol("i", 0, 4)
    assert isinstance(symbol("i"), Symbol)
    assert symbol("i").name == "i"


BOUNDS = ((None, None), (0, None), (-3, None), (2, None), (None, 3), (None, -1), (-3, 2), (1, 4), (0, 0))


@pytest.mark.parametrize("of", [minimum, maximum, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod])
def test_values_lie_within_bounds_that_are_known_in_part(of: Callable[[Expr, Expr], Expr]) -> None:
    values = range(-6, 7)
    for own, other in itertools.product(BOUNDS, BOUNDS):
        a, b = symbol("a", *own), symbol("b", *other)
        expr = of(a, b)
        low, high = expr.bounds
        for x, y in itertools.product(values, values):
            inside = all((lo is None or lo <= v) and (hi is None or v <= hi) for v, (lo, hi) in ((x, own), (y, other)))
            if inside and (y > 0 or of not in (operator.floordiv, operator.mod)):
                found = expr.evaluate(Environment({a: x, b: y}))
                assert (low is None or low <= found) and (high is None or found <= high), (
                    f"{expr} of {x} in {own}, {y} in {other}"
                )
