"""Guards against brute force: worked cases with their numbers, and random chains on random extents.

In: domains and loops. Out: failures where an element is missed, repeated or read outside, or where a guard is needless.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serrate.analysis import Guard, Indices, guards, visits
from serrate.analysis.guards import condition, loop_symbols, needed, settled
from serrate.errors import DomainError
from serrate.ir import IterDomain, combine, cover, merge, partition, product, regroup, resize, restrict, split, swizzle
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, Environment, const, symbol
from serrate.ir.ragged_transforms import spread
from tests.analysis.chains import Built, Chain, Step, all_positions, build, chains, moving_chains

FULL = os.environ.get("SERRATE_TEST_FULL") == "1"
LENGTHS = (127, 0, 198)
OFFSETS = (0, 127, 127, 325)

Domains = Sequence[IterDomain]


def bounds(domains: Domains, loop: Domains) -> list[Guard]:
    """The bounds of the given domains and no other."""
    indices = Indices(zip(loop, loop_symbols(loop), strict=True))
    return [Guard(d, condition(d, indices), "given") for d in domains]


def repeats(logical: Domains, loop: Domains) -> int:
    """How often an element is visited again when only the logical indices are bounded."""
    counted = visits(logical, loop, bounds(logical, loop))
    assert counted.pop(None, 0) == 0
    return sum(count - 1 for count in counted.values())


def once(logical: Domains, loop: Domains, kept: Sequence[Guard]) -> bool:
    """Whether every element is visited once and nothing else is."""
    counted = visits(logical, loop, kept)
    total = 1
    for domain in logical:
        assert isinstance(domain.extent, int)
        total *= domain.extent
    return counted[None] == 0 and set(counted.values()) <= {0, 1} and len(+counted) == total


def once_nested(logical: list[IterDomain], loop: Domains) -> bool:
    """Whether every element of rows is visited once, under the computed guards, and nothing else is."""
    return visits(logical, loop, guards(logical, loop)) == Counter(all_positions(logical))


def in_splits() -> tuple[Domains, Domains]:
    d = IterDomain(6)
    return [d], split(d, 4)


def both_parts_split() -> tuple[Domains, Domains]:
    d = IterDomain(15)
    o, n = split(d, 6)
    return [d], [*split(o, 2), *split(n, 4)]


def inner_split(extent: int, first: int, second: int) -> Callable[[], tuple[Domains, Domains]]:
    def made() -> tuple[Domains, Domains]:
        d = IterDomain(extent)
        o, n = split(d, first)
        return [d], [o, *split(n, second)]

    return made


def split_merge_split() -> tuple[Domains, Domains]:
    d, e = IterDomain(24), IterDomain(2)
    o, n = split(d, 5)
    return [d, e], [o, *split(merge(n, e), 3)]


def all_merged() -> tuple[Domains, Domains]:
    d, e = IterDomain(10), IterDomain(20)
    o, n = split(d, 5)
    return [d, e], [merge(merge(o, n), e)]


@pytest.mark.parametrize(
    ("case", "extents", "beyond", "again"),
    [
        (in_splits, [2, 4], [], 0),
        (both_parts_split, [2, 2, 2, 4], ["i2*4 + i3 < 6"], 4),
        (inner_split(24, 5, 3), [5, 2, 3], ["i1*3 + i2 < 5"], 4),
        (inner_split(999, 5, 3), [200, 2, 3], ["i1*3 + i2 < 5"], 199),
        (inner_split(24, 4, 2), [6, 2, 2], [], 0),
        (split_merge_split, [5, 4, 3], ["i1*3 + i2 < 10"], 8),
        (inner_split(8, 1, 4), [8, 1, 4], ["i1*4 + i2 < 1"], 18),
        (all_merged, [200], [], 0),
    ],
    ids=["6", "15", "24 by 5", "999 by 5", "24 by 4", "24, 2", "8 by 1", "10, 20"],
)
def test_worked_cases(case: Callable[[], tuple[Domains, Domains]], extents: list[int], beyond: list[str], again: int) -> None:
    logical, loop = case()
    assert [d.extent for d in loop] == extents
    found = guards(logical, loop)
    assert [str(g.condition) for g in found if all(g.domain is not d for d in logical)] == beyond
    assert repeats(logical, loop) == again
    assert once(logical, loop, found)


def test_nineteen_visits_of_fifteen() -> None:
    logical, loop = both_parts_split()
    assert sum(visits(logical, loop, bounds(logical, loop)).values()) == 19


@pytest.mark.parametrize(("extent", "same"), [(5, False), (8, True), (6, False)])
def test_split_then_merge_is_merge_then_split_only_when_the_inner_extent_divides(extent: int, same: bool) -> None:
    a, b = IterDomain(2), IterDomain(extent)
    o, n = split(b, 4)
    first = [merge(a, o), n]
    second = split(merge(a, b), 4)
    assert ([d.extent for d in first] == [d.extent for d in second]) is same
    assert [d.extent for d in first] == [4, 4]
    for loop in (first, second):
        assert once([a, b], loop, guards([a, b], loop))


def test_the_index_of_an_extent_of_one_is_not_dropped() -> None:
    d = IterDomain(8)
    o, n = split(d, 10)
    loop = [*split(o, 4), n]
    assert [x.extent for x in loop] == [1, 4, 10]
    (guard,) = guards([d], loop)
    assert str(guard.condition) == "i0*40 + i1*10 + i2 < 8"
    assert once([d], loop, [guard])


def test_an_outer_split_may_ask_for_more_than_there_is() -> None:
    d = IterDomain(3)
    loop = split(d, 8, inner=False)
    assert [x.extent for x in loop] == [8, 1]
    assert [g.domain for g in guards([d], loop)] == [d]
    assert once([d], loop, guards([d], loop))


class TestRows:
    """Rows of 127, 0 and 198 elements in tiles of 64."""

    def test_to_the_longest_row(self) -> None:
        d = IterDomain(325)
        c, r = partition(d, OFFSETS)
        loop = [c, *split(cover(r, 198), 64)]
        assert sum(visits([d], loop, bounds([d], loop)).values()) - visits([d], loop, bounds([d], loop))[None] == 652
        assert [g.domain is r for g in guards([d], loop)] == [True]
        assert once([d], loop, guards([d], loop))

    def test_to_their_own_number_of_tiles(self) -> None:
        d = IterDomain(325)
        c, r = partition(d, OFFSETS)
        loop = [c, *split(r, 64)]
        assert repeats([d], loop) == 1
        assert [g.domain is r for g in guards([d], loop)] == [True]
        assert once([d], loop, guards([d], loop))

    def test_one_list_of_tiles_for_a_number_of_workers(self) -> None:
        d = IterDomain(325)
        c, r = partition(d, OFFSETS)
        o, n = split(r, 64)
        t = combine(c, o)
        loop = [*split(t, 4), n]
        assert [x.extent for x in loop] == [2, 4, 64]
        assert [g.domain for g in guards([d], loop)] == [t, r]
        assert once([d], loop, guards([d], loop))
        with pytest.raises(DomainError, match="a guard that protects it is missing"):
            visits([d], loop, guards([d], loop)[1:])

    def test_lanes_of_rows_over_the_longest_of_their_group(self) -> None:
        d = IterDomain(325)
        c, r = partition(d, OFFSETS)
        co, ci = split(c, 2)
        longest = Array("longest", (127, 198))
        loop = [co, ci, *split(cover(r, longest[symbol("@c")], co), 64)]
        assert [g.domain for g in guards([d], loop)] == [c, r]
        assert once([d], loop, guards([d], loop))

    def test_no_rows(self) -> None:
        d = IterDomain(0)
        c, r = partition(d, [0])
        for loop in (
            [c, r],
            [*split(c, 2), r],
            [merge(IterDomain(3), c), r],
            [*split(combine(c, split(r, 4)[0]), 2), split(r, 4)[1]],
        ):
            assert visits([d], loop, guards([d], loop)) == Counter()

    def test_a_row_of_whole_tiles_in_any_case(self) -> None:
        d, e = IterDomain(10), IterDomain(4)
        c, r = partition(d, [0, 3, 8, 10])
        assert guards([d, e], [c, *split(merge(r, e), 2)]) == ()


def test_a_guard_comes_after_those_that_protect_it() -> None:
    d = IterDomain(325)
    c, r = partition(d, OFFSETS)
    o, n = split(r, 64)
    co, ci = split(c, 2)
    # The tile's own lanes first: nearest to the end of the chain, and yet its guard reads the length of row c.
    loop = [n, co, ci, o]
    assert [g.domain for g in guards([d], loop)] == [c, r]
    assert once([d], loop, guards([d], loop))
    with pytest.raises(DomainError, match="a guard that protects it is missing"):
        visits([d], loop, guards([d], loop)[1:])


def test_what_follows_from_another_guard_is_left_out() -> None:
    d, e = IterDomain(7), IterDomain(3)
    o, n = split(d, 4)
    loop = [*split(merge(o, e), 4), n]
    assert [g.domain for g in guards([d, e], loop)] == [d]
    assert once([d, e], loop, guards([d, e], loop))


def test_an_inner_part_that_holds_everything_needs_no_guard() -> None:
    d = IterDomain(4)
    o, n = split(d, 5)
    loop = [o, *split(n, 3)]
    assert [x.extent for x in loop] == [1, 2, 3]
    assert [g.domain is d for g in guards([d], loop)] == [True]
    assert once([d], loop, guards([d], loop))


def test_a_combined_domain_is_bounded_by_what_its_rows_are_part_of() -> None:
    d, e = IterDomain(7), IterDomain(3)
    o, n = split(d, 4)
    c, r = partition(o, [0, 1, 2])
    loop = [*split(combine(c, merge(r, e)), 4), n]
    assert [g.domain is d for g in guards([d, e], loop)] == [True]
    assert once([d, e], loop, guards([d, e], loop))


def test_but_not_where_the_length_of_a_row_is_read() -> None:
    d = IterDomain(39)
    o, n = split(d, 4)
    c, r = partition(o, [0, 5, 5, 10])
    tiles, lane = split(r, 2)
    t = combine(c, tiles)
    loop = [*split(t, 4), lane, n]
    found = guards([d], loop)
    assert [g.domain.uid for g in found] == [t.uid, r.uid, d.uid]
    assert once([d], loop, found)
    with pytest.raises(DomainError, match="a guard that protects it is missing"):
        visits([d], loop, found[1:])


def test_a_sub_range_is_guarded_where_it_may_reach_past_the_end() -> None:
    d = IterDomain(10)
    assert guards([d], [restrict(d, 2, 7)]) == ()
    assert visits([d], [restrict(d, 2, 7)], ()) == Counter(range(2, 7))
    loop = [restrict(d, 8, 12)]
    assert [str(g.condition) for g in guards([d], loop)] == ["i0 + 8 < 10"]
    assert visits([d], loop, guards([d], loop)) == Counter([8, 9])
    assert visits([d], loop, ())[None] == 2


def test_a_sub_range_known_when_run_is_guarded() -> None:
    n, m = symbol("n"), symbol("m")
    d = IterDomain(n)
    assert [str(g.condition) for g in guards([d], [restrict(d, 0, m)])] == ["i0 < n"]
    assert guards([d], [restrict(d, 0, n)]) == ()


def test_every_small_split_of_an_inner_part() -> None:
    """i = o*f + n and n = a*g + b: a position is an element iff n is one of the inner part and i one of the whole."""
    for extent, first, second in itertools.product(range(1, 10), range(1, 7), range(1, 5)):
        d = IterDomain(extent)
        o, n = split(d, first)
        loop = [o, *split(n, second)]
        conditions = [g.condition for g in guards([d], loop)]
        for at in itertools.product(*(range(x.extent) for x in loop)):  # type: ignore[arg-type]
            inner = at[1] * second + at[2]
            here = Environment(dict(zip(loop_symbols(loop), at, strict=True)))
            assert all(c.evaluate(here) for c in conditions) == (inner < first and at[0] * first + inner < extent)


def test_a_loop_launched_by_a_bound_is_guarded_itself() -> None:
    d = IterDomain(10)
    assert needed([d]) == []
    assert needed([d], unbounded=[d]) == [(d, "launched by a bound", False)]
    o, n = split(d, 4)
    assert [x.domain is d for x in needed([o, n], unbounded=[o])] == [True]


class TestResize:
    def test_positions_that_were_added_are_guarded_at_both_ends(self) -> None:
        d = IterDomain(6)
        loop = [resize(d, 2, 1)]
        assert [str(g.condition) for g in guards([d], loop)] == ["-1 < i0 - 2", "i0 - 2 < 6"]
        assert once([d], loop, guards([d], loop))
        assert visits([d], loop, ())[None] == 3

    def test_one_end(self) -> None:
        d = IterDomain(6)
        assert [str(g.condition) for g in guards([d], [resize(d, 0, 2)])] == ["i0 < 6"]
        assert [str(g.condition) for g in guards([d], [resize(d, 2, 0)])] == ["-1 < i0 - 2"]
        assert guards([d], [resize(d, -1, -2)]) == ()
        assert visits([d], [resize(d, -1, -2)], ()) == Counter([1, 2, 3])

    def test_what_was_added_twice_is_guarded_once(self) -> None:
        d = IterDomain(6)
        loop = [resize(resize(d, 2, 1), 1, 2)]
        assert [str(g.condition) for g in guards([d], loop)] == ["-1 < i0 - 3", "i0 - 3 < 6"]
        assert once([d], loop, guards([d], loop))

    def test_what_was_added_and_taken_away_again_keeps_both_guards(self) -> None:
        d = IterDomain(6)
        wide = resize(resize(d, -2, -2), 3, 3)
        found = guards([d], [wide])
        assert [str(g.condition) for g in found] == ["-1 < i0 - 3", "i0 - 3 < 2"]
        assert visits([d], [wide], found) == Counter([2, 3])

    def test_what_was_taken_away_is_not_visited_because_more_was_added(self) -> None:
        d = IterDomain(6)
        short = resize(resize(d, 1, 0), -2, 0)
        loop = [resize(short, 3, 0)]
        found = guards([d], loop)
        assert [str(g.condition) for g in found] == ["-1 < i0 - 3", "-1 < i0 - 2"]
        assert visits([d], loop, found) == Counter(range(1, 6))

    def test_the_bound_of_the_whole_does_not_replace_that_of_less(self) -> None:
        d = IterDomain(10)
        o, n = split(d, 4)
        short = resize(o, 0, -1)
        loop = [*split(short, 3), n]
        found = guards([d], loop)
        assert [g.domain.uid for g in found] == [short.uid, d.uid]
        assert visits([d], loop, found) == Counter(range(8))

    def test_of_rows(self) -> None:
        c, r = partition(IterDomain(10), [0, 3, 8, 10])
        loop = [c, resize(r, 1, 1)]
        assert [g.domain is r for g in guards([c, r], loop)] == [True, True]
        assert once_nested([c, r], loop)

    @given(st.integers(0, 40), st.integers(1, 9))
    def test_an_indivisible_split_is_a_resize_and_a_divisible_one(self, extent: int, factor: int) -> None:
        # Same indices, same guards, as many places.
        d, e = IterDomain(extent), IterDomain(extent)
        direct = split(d, factor)
        padded = resize(e, 0, -extent % factor)
        by_steps = split(padded, factor)
        assert [x.extent for x in direct] == [x.extent for x in by_steps]
        assert padded.extent == direct[0].extent * direct[1].extent  # type: ignore[operator]
        assert by_steps[0].definition.divides  # type: ignore[union-attr]
        assert [str(g.condition) for g in guards([d], direct)] == [str(g.condition) for g in guards([e], by_steps)]
        first, second = (Indices(zip(loop, loop_symbols(loop), strict=True)) for loop in (direct, by_steps))
        assert first.of(d) is second.of(e)
        assert once([e], by_steps, guards([e], by_steps))

    def test_negative_positions_are_divided_downwards(self) -> None:
        # The first of two positions before m is m = -2, in row -1 of three: rounded towards zero it would be row 0.
        a, b = IterDomain(2), IterDomain(3)
        loop = [resize(merge(a, b), 2, 1)]
        found = guards([a, b], loop)
        assert once([a, b], loop, found)
        position = Indices(zip(loop, loop_symbols(loop), strict=True)).of(a)
        assert [int(position.evaluate(Environment({symbol("i0", 0, 8): k}))) for k in range(3)] == [-1, -1, 0]


class TestSwizzle:
    def test_needs_no_guard(self) -> None:
        a, b = IterDomain(4), IterDomain(8)
        loop = swizzle(a, b)
        assert guards([a, b], loop) == ()
        assert once([a, b], loop, ())

    def test_each_axis_has_its_own_guard(self) -> None:
        a, b = IterDomain(4), IterDomain(8)
        x = swizzle(a, b)[1]
        loop = [*split(a, 3), *split(x, 5)]
        assert [g.domain.uid for g in guards([a, b], loop)] == [a.uid, x.uid]
        assert once([a, b], loop, guards([a, b], loop))

    def test_by_a_longer_axis(self) -> None:
        a, b = IterDomain(16), IterDomain(4)
        loop = swizzle(a, b)
        assert once([a, b], loop, guards([a, b], loop))


class TestRowsOfOneComponent:
    def test_product(self) -> None:
        c, r = partition(IterDomain(7), [0, 2, 2, 7])
        s = r.with_rows(Array("other", (3, 2, 0))[COORDINATE], name="s")
        m = product(r, s)
        assert m.extents == (6, 0, 0)
        loop = [c, *split(m, 4)]
        assert [g.domain is m for g in guards([c, r, s], loop)] == [True]
        assert once_nested([c, r, s], loop)

    def test_a_row_that_the_other_has_not_is_not_visited(self) -> None:
        # Tiles of r are in bounds by r's own guard, and yet the product with an empty row of s has no positions.
        c, r = partition(IterDomain(7), [0, 2, 2, 7])
        s = r.with_rows(Array("other", (3, 2, 0))[COORDINATE], name="s")
        o, n = split(r, 2)
        m = product(o, s)
        loop = [c, cover(m, 3), n]
        assert [g.domain.uid for g in guards([c, r, s], loop)] == [m.uid, r.uid]
        assert once_nested([c, r, s], loop)

    def test_outer_split(self) -> None:
        c, r = partition(IterDomain(10), [0, 3, 8, 10])
        loop = [c, *split(r, 2, inner=False)]
        assert loop[1].extent == 2
        (guard,) = guards([c, r], loop)
        assert guard.domain is r
        assert guard.reason == "rows are not 2 equal parts"
        assert once_nested([c, r], loop)

    def test_the_outer_part_is_bounded_by_the_row(self) -> None:
        c, r = partition(IterDomain(10), [0, 3, 8, 10])
        o, n = split(r, 6, inner=False)
        first, rest = split(o, 6)
        loop = [c, first, *split(rest, 5), n]
        assert [g.domain.uid for g in guards([c, r], loop)] == [r.uid]
        assert once_nested([c, r], loop)


class TestUnder:
    """Two groups of 100 tokens, each cut into four parts."""

    OFFSETS = ((0, 30, 30, 70, 100), (0, 25, 60, 85, 100))

    def test_parts(self) -> None:
        g, i = IterDomain(2), IterDomain(100)
        c, r = partition(i, self.OFFSETS, under=[g])
        assert guards([g, i], [g, c, r]) == ()
        assert once([g, i], [g, c, r], ())
        tiles = [g, c, *split(r, 16)]
        assert [x.domain is r for x in guards([g, i], tiles)] == [True]
        assert once([g, i], tiles, guards([g, i], tiles))

    def test_a_group_is_guarded_before_its_offsets_are_read(self) -> None:
        # The bound of d would imply that of o, and comes too late: the parts of n are found by o.
        d = IterDomain(10)
        o, n = split(d, 4)
        c, r = partition(n, [[0, 1, 4], [0, 4, 4], [0, 2, 4]], under=[o])
        loop = [*split(o, 2), c, r]
        assert [x.domain.uid for x in guards([d], loop)] == [o.uid, d.uid]
        assert once([d], loop, guards([d], loop))
        with pytest.raises(DomainError, match="a guard that protects it is missing"):
            visits([d], loop, guards([d], loop)[1:])
        assert guards([d], loop, idempotent=True) == guards([d], loop)

    def test_regrouped(self) -> None:
        g, i = IterDomain(2), IterDomain(100)
        c, r = partition(i, self.OFFSETS, under=[g])
        _, moved = regroup(g, c, r)
        assert guards([g, i], [c, moved]) == ()
        assert once([g, i], [c, moved], ())
        tiles = [*split(c, 3), *split(moved, 16)]
        assert [x.domain.uid for x in guards([g, i], tiles)] == [c.uid, moved.uid]
        assert once([g, i], tiles, guards([g, i], tiles))


class TestGaps:
    def test_rows_in_padded_storage(self) -> None:
        d = IterDomain(15)
        c, r = partition(d, [0, 5, 10], lengths=[3, 5, 0])
        assert guards([c, r], [c, r]) == ()
        assert visits([d], [c, r], ()) == Counter([0, 1, 2, 5, 6, 7, 8, 9])
        assert once_nested([c, r], [*split(c, 2), *split(r, 2)])

    def test_a_place_in_a_gap_is_no_element(self) -> None:
        d = IterDomain(12)
        c, r = partition(d, [2, 5], lengths=[2, 4])
        found = guards([c, r], [d])
        assert [g.reason for g in found] == ["the position may lie before the first row", "the position may lie between two rows"]
        assert visits([c, r], [d], found) == Counter([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])

    def test_a_list_of_rows_ends_before_the_starts_do(self) -> None:
        # The bound of d would imply that of t if there were a start behind the last row.
        d = IterDomain(14)
        o, n = split(d, 4)
        c, r = partition(o, [0, 2], lengths=[1, 2])
        t = combine(c, r)
        loop = [*split(t, 2), n]
        found = guards([d], loop)
        assert [g.domain.uid for g in found] == [t.uid, d.uid]
        assert visits([d], loop, found) == Counter([0, 1, 2, 3, *range(8, 14)])
        with pytest.raises(DomainError, match="a guard that protects it is missing"):
            visits([d], loop, found[1:])


def test_duplicates_that_do_no_harm() -> None:
    logical, loop = both_parts_split()
    assert [g.domain.uid for g in guards(logical, loop, idempotent=True)] == [logical[0].uid]
    counted = visits(logical, loop, guards(logical, loop, idempotent=True))
    assert (set(counted), sum(counted.values())) == (set(range(15)), 19)


def test_a_guard_that_keeps_a_logical_index_in_bounds_stays() -> None:
    # 4 divides 24, so that the guard of the inner part is all there is to keep i below 24.
    d = IterDomain(24)
    o, n = split(d, 4)
    loop = [o, *split(n, 3)]
    assert [g.domain.uid for g in guards([d], loop)] == [n.uid]
    assert guards([d], loop, idempotent=True) == guards([d], loop)


def test_a_guard_that_protects_a_read_stays() -> None:
    d = IterDomain(325)
    c, r = partition(d, OFFSETS)
    loop = [*split(c, 2), *split(r, 64)]
    assert guards([d], loop, idempotent=True) == guards([d], loop)


def test_split_by_more_than_itself_and_merged_again() -> None:
    d = IterDomain(8)
    m = merge(*split(d, 10))
    o, n = split(m, 9)
    loop = [o, *split(n, 4)]
    assert [g.domain.uid for g in guards([d], loop)] == [d.uid]
    assert once([d], loop, guards([d], loop))


def test_loops_that_do_not_determine_the_elements_are_refused() -> None:
    d = IterDomain(10)
    o, _ = split(d, 4)
    with pytest.raises(DomainError, match="does not follow from the loops"):
        guards([d], [o])


def test_reasons_are_given() -> None:
    d = IterDomain(6)
    (guard,) = guards([d], split(d, 4))
    assert str(guard) == "i0*4 + i1 < 6  (4 may not divide 6)"


def correct(built: Built, kept: Sequence[Guard]) -> bool:
    """Whether every element is visited once and nothing outside is; a read out of range is not correct."""
    try:
        counted = visits(built.logical, built.loop, kept)
    except DomainError:
        return False
    return counted == Counter(built.elements)


def needless(chain: Chain, seed: int, tries: int = 150, largest: int = 20_000) -> list[str]:
    """The guards of the chain that could be left out on every extent tried, those that only ever keep position 0 aside."""
    built = build(chain, seed)
    assert built is not None
    found = []
    for guard in guards(built.logical, built.loop):
        which, others = built.numbers[guard.domain.uid], False
        for k in range(tries):
            variant = build(chain, seed + 1_000_003 * k)
            if variant is None or variant.size > largest:
                continue
            all_ = guards(variant.logical, variant.loop)
            rest = [g for g in all_ if variant.numbers[g.domain.uid] != which]
            if len(rest) < len(all_):
                if not correct(variant, rest):
                    break
                (left_out,) = (g.domain for g in all_ if variant.numbers[g.domain.uid] == which)
                others = others or not set(visits([left_out], variant.loop, all_)) <= {0}
        else:
            if others:
                found.append(str(guard))
    return found


def check(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    if built is None or built.size > 3000:
        return
    found = guards(built.logical, built.loop)
    counted = visits(built.logical, built.loop, found)
    assert counted[None] == 0
    assert +counted == Counter(built.elements), [str(d) for d in built.loop]
    if built.elements:
        assert needless(chain, seed) == [], [str(d) for d in built.loop]


@given(chains, st.integers(0, 10_000))
# One chain in some ten thousand has a guard that only arithmetic on several limits at once would show to be needless, so the
# choice of chains is fixed.
@settings(max_examples=3000 if FULL else 150, derandomize=True)
def test_random_chains(chain: Chain, seed: int) -> None:
    check(chain, seed)


@given(moving_chains, st.integers(0, 10_000))
@settings(max_examples=3000 if FULL else 150)
def test_random_chains_that_move_and_add_positions(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    if built is None or built.size > 3000:
        return
    counted = visits(built.logical, built.loop, guards(built.logical, built.loop))
    assert counted[None] == 0
    assert +counted <= Counter(built.elements), [str(d) for d in built.loop]
    assert built.cropped or +counted == Counter(built.elements), [str(d) for d in built.loop]


@given(st.one_of(chains, moving_chains), st.integers(0, 10_000))
def test_random_chains_that_may_visit_again(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    if built is None or built.size > 3000:
        return
    every, few = (guards(built.logical, built.loop, idempotent=again) for again in (False, True))
    assert [str(g) for g in few] == [str(g) for g in every if str(g) in {str(x) for x in few}]
    counted = visits(built.logical, built.loop, few)
    assert counted[None] == 0
    assert set(+counted) == set(+visits(built.logical, built.loop, every))


@given(st.one_of(chains, moving_chains), st.integers(0, 10_000))
def test_what_is_settled_is_in_bounds_wherever_the_guards_hold(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    if built is None or built.size > 1000:
        return
    kept, found = guards(built.logical, built.loop), settled(built.loop)
    assert not {need.domain.uid for need in found} & {guard.domain.uid for guard in kept}
    for need in found:
        assert visits([need.domain], built.loop, kept)[None] == 0, (str(need.domain), need.reason)


def test_settled_bounds_have_reasons() -> None:
    whole, rows = IterDomain(24, name="i"), partition(IterDomain(9, name="p"), [0, 4, 9])
    outer, inner = split(whole, 8)
    assert {n.domain.name: n.reason for n in settled([outer, inner])}["i"] == "8 divides 24"
    component, ragged = rows
    tiles, within = split(ragged, 2)
    work = combine(component, tiles)
    found = {n.domain.name: n.reason for n in settled([work, within])}
    assert found["p"] == "a position of a row is a position of the whole"
    assert found[tiles.name] == f"implied by the guard of {ragged.name}"
    assert found[component.name] == f"every position of {work.name} belongs to a row"


def step(kind: str, pick: int, size: int = 1) -> Step:
    return Step(kind, pick, size)


@pytest.mark.parametrize(
    "chain",
    [
        # An outer part of one position, split again by an outer factor: its inner part is in bounds by the first guard.
        Chain("rows", (step("outer split", 0, 2), step("split", 1, 3), step("outer split", 0, 2), step("split", 3, 6))),
        # A merge whose outer part is bounded by the split it came from.
        Chain("two", (step("split", 0, 4), step("merge", 0), step("split", 1, 4))),
        # Tiles of rows, combined and spread over workers.
        Chain("one", (step("partition", 0), step("split", 1, 3), step("combine", 0), step("split", 1, 4))),
        # A row in parts that differ from row to row, and those again.
        Chain("rows", (step("outer split", 1, 4), step("outer split", 1, 4))),
        # An outer part in bounds by the guard of the whole.
        Chain("rows", (step("outer split", 1, 6), step("split", 1, 6), step("split", 2, 5))),
        # A group of parts that is itself an outer part: its offsets are read before the whole is bounded.
        Chain("one", (step("split", 0, 4), step("partition under", 0), step("split", 0, 3))),
        # The parts of a row, and the parts of those.
        Chain("one", (step("partition", 0), step("partition", 1), step("partition", 2), step("split", 3, 2))),
    ],
)
@pytest.mark.parametrize("seed", [1, 5, 9, 16])
def test_chains_that_were_wrong_once(chain: Chain, seed: int) -> None:
    check(chain, seed)


def test_loops_over_spread_rows_skip_gaps() -> None:
    component, ragged = partition(IterDomain(5), [0, 3, 3, 5])
    whole = spread(component, ragged, Array("starts", (1, 5, 7)), const(12))
    found = visits([component, ragged], [whole], guards([component, ragged], [whole]))
    assert found == Counter({(0, 0): 1, (0, 1): 1, (0, 2): 1, (2, 0): 1, (2, 1): 1})
    kept = guards([component, ragged], [whole])
    for k in range(len(kept)):
        fewer = visits([component, ragged], [whole], [*kept[:k], *kept[k + 1 :]])
        assert fewer != found, f"{kept[k].condition} is not needed"
