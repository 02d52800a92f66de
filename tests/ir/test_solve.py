"""Conditions solved for a symbol, against all small numbers."""

from __future__ import annotations

import itertools
from random import Random

from serrate.ir.expr import Array, Environment, Expr, Less, const, minimum, symbol
from serrate.ir.solve import end_of, loosest, start_of

S, A, B = symbol("s"), symbol("a"), symbol("b")
SMALL = range(6)


def conditions(count: int) -> list[Less]:
    """Random conditions on three symbols, with and without things that cannot be solved."""
    random, found = Random(0), list[Less]()
    for _ in range(count):
        sides = []
        for _ in range(2):
            e: Expr = const(random.randrange(-4, 8))
            for s in (S, A, B):
                e = e + s * random.choice([-3, -1, 0, 0, 1, 1, 2])
            more = random.randrange(8)
            e = e + (
                (S + A) // 2 if more == 0 else minimum(A, B) * 2 if more == 1 else (A + 3 * B) % 4 if more == 2 else const(0)
            )
            sides.append(e)
        found.append(Less(*sides))
    return found


def holds(condition: Less, s: int, a: int, b: int) -> bool:
    environment = Environment({S: s, A: a, B: b})
    return bool(condition.left.evaluate(environment) < condition.right.evaluate(environment))


def value(e: Expr, a: int, b: int) -> int:
    assert S not in e.symbols
    return int(e.evaluate(Environment({A: a, B: b})))


def test_an_end_is_where_a_condition_stops_to_hold_and_a_start_where_it_begins() -> None:
    solved = {"end": 0, "start": 0, "neither": 0}
    for condition in conditions(300):
        end, start = end_of(condition, S), start_of(condition, S)
        assert end is None or start is None
        solved["end" if end is not None else "start" if start is not None else "neither"] += 1
        for s, a, b in itertools.product(range(-6, 14), SMALL, SMALL):
            if end is not None:
                assert holds(condition, s, a, b) == (s < value(end, a, b)), (str(condition), str(end), s, a, b)
            if start is not None:
                assert holds(condition, s, a, b) == (s >= value(start, a, b)), (str(condition), str(start), s, a, b)
    assert min(solved.values()) > 30, solved


def test_what_is_linear_in_a_symbol_is_solved() -> None:
    for factor, other in itertools.product([-3, -1, 1, 2], [-2, 0, 1]):
        condition = Less(S * factor + A, B * 2 + S * other + 3)
        assert (end_of(condition, S) is not None) == (factor > other)
        assert (start_of(condition, S) is not None) == (factor < other)


def test_a_symbol_inside_of_something_else_is_not_solved_for() -> None:
    rows = Array("rows")
    for left in (S // 2, S % 3, minimum(S, A), rows[S], S * A, S + S // 2):
        assert end_of(Less(left, B), S) is None and start_of(Less(left, B), S) is None
        assert loosest(Less(left, B), [S]) is None


def test_the_loosest_condition_holds_wherever_the_condition_does_for_some_position() -> None:
    solved = 0
    for condition in conditions(300):
        loose = loosest(condition, [S, B])
        if loose is None:
            continue
        solved += 1
        assert not loose.symbols & {S, B}
        for a in SMALL:
            somewhere = any(holds(condition, s, a, b) for s, b in itertools.product(SMALL, SMALL))
            assert holds(loose, 0, a, 0) == somewhere, (str(condition), str(loose), a)
    assert solved > 20
