"""Two nests, one iteration: the case study with its numbers, symbolic extents by rule, and brute force on all small ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serrate.analysis import guards, same_iteration, split_commutes, visits
from serrate.analysis.inspection.iteration import simplified
from serrate.ir import IterDomain, combine, merge, partition, split
from serrate.ir.expr import Environment, const, symbol
from tests.analysis.chains import Chain, build, chains


def both(a: IterDomain, b: IterDomain, factor: int) -> tuple[list[IterDomain], list[IterDomain]]:
    """Split then merge, merge then split."""
    o, n = split(b, factor)
    return [merge(a, o), n], list(split(merge(a, b), factor))


def extents(loops: Sequence[IterDomain]) -> list[object]:
    return [d.extent for d in loops]


@pytest.mark.parametrize(
    ("na", "nb", "first", "second", "same"),
    [(2, 5, [4, 4], [3, 4], False), (2, 8, [4, 4], [4, 4], True), (2, 6, [4, 4], [3, 4], False)],
)
def test_case_study(na: int, nb: int, first: list[int], second: list[int], same: bool) -> None:
    one, other = both(IterDomain(na), IterDomain(nb), 4)
    assert (extents(one), extents(other)) == (first, second)
    assert same_iteration(one, other) is same
    assert split_commutes(IterDomain(nb), 4) is same


def test_symbolic_extents_by_rule() -> None:
    n, m = symbol("n"), symbol("m", 1)
    assert same_iteration(*both(IterDomain(n), IterDomain(m * 4), 4)) is True
    assert same_iteration(*both(IterDomain(n), IterDomain(m * 12), 4)) is True
    assert same_iteration(*both(IterDomain(n), IterDomain(m), 4)) is None
    assert split_commutes(IterDomain(m), 4) is None


def test_many_positions_by_rule() -> None:
    assert same_iteration(*both(IterDomain(10**6), IterDomain(4096), 128)) is True


def test_other_orders_and_other_domains() -> None:
    a, b = IterDomain(3), IterDomain(3)
    assert same_iteration([a, b], [a, b]) is True
    assert same_iteration([a, b], [b, a]) is False
    assert same_iteration([a], [b]) is False
    assert same_iteration([a, b], [merge(a, b)]) is False


def test_one_outer_position_needs_no_divisibility() -> None:
    assert same_iteration(*both(IterDomain(1), IterDomain(5), 4)) is True


def test_rows() -> None:
    d = IterDomain(10)
    c, r = partition(d, [0, 3, 8, 10])
    assert same_iteration([c, r], [c, r]) is True
    o, n = split(r, 2)
    assert same_iteration([combine(c, o), n], split(d, 2)) is False
    even, rows = partition(IterDomain(10), [0, 4, 8, 10])
    o, n = split(rows, 2)
    assert same_iteration([combine(even, o), n], split(combine(even, rows), 2)) is True


def sequence(logical: Sequence[IterDomain], loops: Sequence[IterDomain]) -> set[object]:
    return set(visits([*logical, *loops], loops, guards(logical, loops)))


def cases() -> Iterator[tuple[int, int, int]]:
    return ((na, nb, f) for na in range(5) for nb in range(1, 10) for f in range(1, 8))


def test_exactly_when_the_factor_divides_the_inner_extent() -> None:
    for na, nb, factor in cases():
        a, b = IterDomain(na), IterDomain(nb)
        one, other = both(a, b, factor)
        brute = extents(one) == extents(other) and sequence([a, b], one) == sequence([a, b], other)
        assert same_iteration(one, other) is brute
        if na >= 2:
            assert brute is (nb % factor == 0)


@settings(max_examples=100, deadline=None)
@given(chains, chains, st.integers(0, 50))
def test_random_nests(first: Chain, second: Chain, seed: int) -> None:
    built = build(first, seed)
    assume(built is not None and 0 < built.size < 500)
    assert built is not None
    assert same_iteration(built.loop, built.loop) is True
    again = build(second, seed)
    assume(again is not None)
    assert again is not None
    assert same_iteration(built.loop, again.loop) is False, "nests over domains that have nothing in common"


q, r, n, k = symbol("q", 0, 9), symbol("r", 0, 2), symbol("n", 0, 3), symbol("k", 1, 5)


def test_simplified_means_the_same_for_all_values() -> None:
    values = torch.cartesian_prod(*(torch.arange(s.bounds[0], s.bounds[1] + 1) for s in (q, r, n, k)))  # type: ignore[operator]
    environment = Environment(dict(zip((q, r, n, k), values.unbind(1), strict=True)))
    tops = [q, r, n, k, q * 4 + n, q * 12 + n * 3 + r, q * 4 + n + 1, q * 4 + n + r, r - q]
    for top, divisor in itertools.product(tops, [k * 4, k * 12, k, const(2), k * 3 * k, const(6), const(8)]):
        for expr in (top // divisor, top % divisor * 3 + n):
            got, want = (torch.as_tensor(e.evaluate(environment)).expand(len(values)) for e in (simplified(expr), expr))
            assert torch.equal(got, want), f"{expr} is not {simplified(expr)}"
