"""Worked examples of guards, holes and places, each with its numbers and listings.

In: splits, merges, resizes, swizzles and rows of known extents. Out: failures where a listing, a guard, a number of places or a
theorem is not what it should be. More such numbers, and random chains, are in `test_guards`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from serrate import ops
from serrate.analysis import (
    CorrectnessKind,
    Guard,
    Indices,
    allocation,
    check_vectorized,
    contiguous,
    correctness,
    guards,
    same_iteration,
    split_commutes,
    visits,
    wide_access,
)
from serrate.analysis.guards import condition, loop_symbols
from serrate.errors import DomainError, SerrateError
from serrate.ir import Fusion, IterDomain, ParallelType, combine, cover, merge, partition, resize, split, swizzle
from serrate.ir.expr import Environment, Expr, Less, const, symbol
from serrate.ir.reductions import reduction
from serrate.ir.tile import SERIAL, Accumulate, Phase, TileProgram, nest
from serrate.ir.values import Tensor, read

Domains = Sequence[IterDomain]


def listing(logical: Domains, loop: Domains, kept: Sequence[Less] = ()) -> list[Any]:
    """What the loops print, in order: the index of each logical domain wherever all conditions hold."""
    symbols = loop_symbols(loop)
    indices = Indices(zip(loop, symbols, strict=True))
    printed = []
    for position in itertools.product(*(range(int(str(d.extent))) for d in loop)):
        environment = Environment(dict(zip(symbols, position, strict=True)))
        if all(c.evaluate(environment) for c in kept):
            found = tuple(int(indices.of(d).evaluate(environment)) for d in logical)
            printed.append(found[0] if len(found) == 1 else found)
    return printed


def bound(domain: IterDomain, loop: Domains) -> Less:
    return condition(domain, Indices(zip(loop, loop_symbols(loop), strict=True)))


def conditions(found: Sequence[Guard]) -> list[Less]:
    return [g.condition for g in found]


def beyond(logical: Domains, loop: Domains) -> list[str]:
    """The guards that are not bounds of logical indices."""
    own = {d.uid for d in logical}
    return [str(g.condition) for g in guards(logical, loop) if g.domain.uid not in own]


def again(logical: Domains, loop: Domains) -> int:
    """Repeat visits when only logical indices are bounded."""
    kept = [Guard(d, bound(d, loop), "given") for d in logical]
    counted = visits(logical, loop, kept)
    assert counted[None] == 0
    return sum(counted.values()) - len(+counted)


def once(logical: Domains, loop: Domains) -> bool:
    """Under the computed guards, every element once and no hole."""
    everything = itertools.product(*(range(int(str(d.extent))) for d in logical))
    wanted = Counter(p[0] if len(logical) == 1 else p for p in everything)
    return visits(logical, loop, guards(logical, loop)) == wanted


class TestSix:
    def test_in_twos(self) -> None:
        d = IterDomain(6)
        loop = split(d, 2)
        assert [x.extent for x in loop] == [3, 2]
        assert guards([d], loop) == ()
        assert listing([d], loop) == [0, 1, 2, 3, 4, 5]

    def test_in_fours(self) -> None:
        d = IterDomain(6)
        loop = split(d, 4)
        assert [x.extent for x in loop] == [2, 4]
        assert listing([d], loop) == [0, 1, 2, 3, 4, 5, 6, 7]
        assert [str(g.condition) for g in guards([d], loop)] == ["i0*4 + i1 < 6"]
        assert listing([d], loop, conditions(guards([d], loop))) == [0, 1, 2, 3, 4, 5]
        assert beyond([d], loop) == [] and again([d], loop) == 0

    def test_in_fours_is_two_more_and_a_split_that_divides(self) -> None:
        d, e = IterDomain(6), IterDomain(6)
        direct, padded = split(d, 4), resize(e, 0, 2)
        steps = split(padded, 4)
        assert (padded.extent, [x.extent for x in steps]) == (8, [2, 4])
        assert steps[0].definition.divides and not direct[0].definition.divides  # type: ignore[union-attr]
        assert [str(g.condition) for g in guards([e], steps)] == [str(g.condition) for g in guards([d], direct)]
        assert listing([e], steps, conditions(guards([e], steps))) == listing([d], direct, conditions(guards([d], direct)))
        assert allocation(direct).elements == allocation([padded]).elements == 8

    def test_two_more(self) -> None:
        d = IterDomain(6)
        loop = [resize(d, 0, 2)]
        assert listing([d], loop) == list(range(8))
        assert [str(g.condition) for g in guards([d], loop)] == ["i0 < 6"]
        assert listing([d], loop, conditions(guards([d], loop))) == list(range(6))

    def test_in_memory(self) -> None:
        found = allocation(split(IterDomain(6), 4))
        assert (found.extents, found.elements, found.holes, list(found.where())) == ((2, 4), 8, 2, [(1, 2), (1, 3)])

    @pytest.mark.parametrize(("how", "fill"), [("sum", 0.0), ("prod", 1.0)])
    def test_what_its_holes_hold(self, how: str, fill: float) -> None:
        """Nothing that matters where nobody reads them; the identity of a reduction that does."""
        d = IterDomain(6, name="d")
        x = Tensor("x", torch.float32, (d,), split(d, 4))

        def program(loops: Domains) -> TileProgram:
            leaf = Accumulate((Tensor("y", torch.float32, (), ()),), (), reduction(how), (read(x, (d,)),), (d,))
            return TileProgram("p", (), (), (Phase("y", nest(tuple((k, SERIAL) for k in loops), leaf)),))

        weak, strong = correctness(program((d,)), x), correctness(program(split(d, 4)), x)
        assert (weak.kind, weak.fill) == (CorrectnessKind.WEAK, None)
        assert (strong.kind, strong.fill) == (CorrectnessKind.STRONG, fill)


class TestFifteen:
    """Split by 6, the outer 3 by 2 and the inner 6 by 4."""

    def made(self) -> tuple[IterDomain, IterDomain, IterDomain, list[IterDomain]]:
        i0 = IterDomain(15)
        i1, i2 = split(i0, 6)
        assert [i1.extent, i2.extent] == [3, 6]
        loop = [*split(i1, 2), *split(i2, 4)]
        assert [d.extent for d in loop] == [2, 2, 2, 4]
        return i0, i1, i2, loop

    def test_all_three_bounds(self) -> None:
        i0, i1, i2, loop = self.made()
        three = [bound(d, loop) for d in (i1, i2, i0)]
        assert [str(c) for c in three] == ["i0*2 + i1 < 3", "i2*4 + i3 < 6", "i0*12 + i1*6 + i2*4 + i3 < 15"]
        assert listing([i0], loop, three) == list(range(15))

    def test_only_that_of_the_whole(self) -> None:
        i0, _, _, loop = self.made()
        printed = listing([i0], loop, [bound(i0, loop)])
        assert printed == [0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 11, 12, 13, 12, 13, 14]
        assert (len(printed), again([i0], loop)) == (19, 4)

    def test_two_are_enough(self) -> None:
        i0, _, i2, loop = self.made()
        assert [g.domain.uid for g in guards([i0], loop)] == [i2.uid, i0.uid]
        assert beyond([i0], loop) == ["i2*4 + i3 < 6"]
        assert listing([i0], loop, conditions(guards([i0], loop))) == list(range(15))

    def test_duplicates_may_be_asked_for(self) -> None:
        i0, _, _, loop = self.made()
        few = guards([i0], loop, idempotent=True)
        assert [g.domain.uid for g in few] == [i0.uid]
        assert sum(visits([i0], loop, few).values()) == 19


@pytest.mark.parametrize(
    ("extent", "first", "second", "extents", "more", "repeated"),
    [
        (24, 5, 3, [5, 2, 3], ["i1*3 + i2 < 5"], 4),
        (999, 5, 3, [200, 2, 3], ["i1*3 + i2 < 5"], 199),
        (24, 4, 2, [6, 2, 2], [], 0),
        (8, 1, 4, [8, 1, 4], ["i1*4 + i2 < 1"], 18),
    ],
)
def test_an_inner_part_split_again(
    extent: int, first: int, second: int, extents: list[int], more: list[str], repeated: int
) -> None:
    d = IterDomain(extent)
    outer, inner = split(d, first)
    loop = [outer, *split(inner, second)]
    assert [x.extent for x in loop] == extents
    assert (beyond([d], loop), again([d], loop), once([d], loop)) == (more, repeated, True)


def test_an_inner_part_merged_and_split() -> None:
    d, e = IterDomain(24), IterDomain(2)
    outer, inner = split(d, 5)
    merged = merge(inner, e)
    loop = [outer, *split(merged, 3)]
    assert (merged.extent, [x.extent for x in loop]) == (10, [5, 4, 3])
    assert (beyond([d, e], loop), again([d, e], loop), once([d, e], loop)) == (["i1*3 + i2 < 10"], 8, True)


def test_a_split_that_divides_and_two_merges() -> None:
    d, e = IterDomain(10), IterDomain(20)
    loop = [merge(merge(*split(d, 5)), e)]
    assert [x.extent for x in loop] == [200]
    assert guards([d, e], loop) == ()
    assert again([d, e], loop) == 0 and once([d, e], loop)


# --- theorems ------------------------------------------------------------------------------------------------------------

extents = st.integers(1, 30)


class TestTheorems:
    @given(extents, st.integers(1, 9), st.integers(0, 100), st.integers(0, 100))
    def test_split(self, extent: int, factor: int, outer: int, inner: int) -> None:
        """The whole in bounds implies the outer part in bounds; both parts imply the whole where the split divides."""
        d = IterDomain(extent)
        o, n = split(d, factor)
        whole = self.at(o, {o.uid: outer, n.uid: inner}) < extent
        assert not whole or outer < int(str(o.extent))
        if extent % factor == 0 and outer < int(str(o.extent)) and inner < factor:
            assert whole

    def at(self, made: IterDomain, known: dict[int, int]) -> int:
        values = made.definition.to_inputs({uid: const(k) for uid, k in known.items()})  # type: ignore[union-attr]
        found = values[0].value
        assert found is not None
        return found

    @given(extents, extents, st.integers(0, 1000))
    def test_merge(self, outer: int, inner: int, index: int) -> None:
        """The outer part is in bounds exactly where the merged one is: i // N < P iff i < N*P."""
        a, b = IterDomain(outer), IterDomain(inner)
        m = merge(a, b)
        assert (self.at(m, {m.uid: index}) < outer) == (index < int(str(m.extent)))

    def test_the_rule_of_merge_is_one_of_the_simplifier(self) -> None:
        i, n, p = symbol("i"), symbol("n", 1), symbol("p")
        assert Less(i // n, p).simplified == Less(i, p * n)

    @given(extents, st.integers(0, 5), st.integers(0, 5), st.integers(0, 60))
    def test_resize(self, extent: int, left: int, right: int, index: int) -> None:
        """Where both sizes add, what was there before in bounds implies the rest in bounds."""
        d = IterDomain(extent)
        r = resize(d, left, right)
        if 0 <= self.at(r, {r.uid: index}) < extent:
            assert index < int(str(r.extent))

    @given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
    def test_swizzle(self, first: int, second: int) -> None:
        """The axis keeps its index, and the other is a permutation of its positions for each of them."""
        a, b = IterDomain(first), IterDomain(second)
        loop = swizzle(a, b)
        assert loop[0] is a and loop[1].extent == second
        assert guards([a, b], loop) == ()
        printed = listing([a, b], loop)
        assert [x for x, _ in printed] == [x for x in range(first) for _ in range(second)]
        assert Counter(printed) == Counter(itertools.product(range(first), range(second)))

    @given(extents, st.integers(1, 9))
    def test_an_outer_part_of_one_position(self, extent: int, factor: int) -> None:
        """Where the outer part has one position and is in bounds, whole and inner part are one index."""
        assume(factor >= extent)
        d = IterDomain(extent)
        o, n = split(d, factor)
        assert o.extent == 1
        loop = [o, *split(n, 3)]
        assert len(guards([d], loop)) <= 1
        assert once([d], loop)


# --- case study ----------------------------------------------------------------------------------------------------------


def both(a: IterDomain, b: IterDomain, factor: int = 4) -> tuple[list[IterDomain], list[IterDomain]]:
    """Split then merge, merge then split."""
    outer, inner = split(b, factor)
    return [merge(a, outer), inner], list(split(merge(a, b), factor))


class TestTwoSchedules:
    def test_two_by_five(self) -> None:
        a, b = IterDomain(2), IterDomain(5)
        first, second = both(a, b)
        assert [d.extent for d in first] == [4, 4] and [d.extent for d in second] == [3, 4]
        assert listing([a, b], first) == [(i, j) for i in range(2) for j in range(8)]
        assert listing([a, b], second) == [
            *((0, 0), (0, 1), (0, 2), (0, 3)),
            *((0, 4), (1, 0), (1, 1), (1, 2)),
            *((1, 3), (1, 4), (2, 0), (2, 1)),
        ]
        assert same_iteration(first, second) is False
        assert once([a, b], first) and once([a, b], second)

    @pytest.mark.parametrize("extent", [8, 4, 12])
    def test_a_factor_that_divides(self, extent: int) -> None:
        a, b = IterDomain(2), IterDomain(extent)
        first, second = both(a, b)
        assert listing([a, b], first) == listing([a, b], second)
        assert same_iteration(first, second) is True and split_commutes(b, 4) is True

    def test_dividing_the_whole_is_not_enough(self) -> None:
        a, b = IterDomain(2), IterDomain(6)
        first, second = both(a, b)
        assert ([d.extent for d in first], [d.extent for d in second]) == ([4, 4], [3, 4])
        assert same_iteration(first, second) is False and split_commutes(b, 4) is False

    @pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
    @pytest.mark.parametrize("extent", [5, 6, 8])
    def test_both_run(self, extent: int, backend: str) -> None:
        x = torch.arange(2.0 * extent).reshape(2, extent)
        for schedule in (lambda y: y.split(1, 4).merge(0), lambda y: y.merge(0).split(0, 4)):
            with Fusion() as f:
                y = ops.mul(f.input((2, extent), torch.float32), 3.0)
                f.output(y)
            schedule(y).parallelize(0, "grid").parallelize(1, "lanes")
            assert torch.equal(f.compile(backend)(x), x * 3)


class TestDiscontiguous:
    """Two dims with a gap between them, merged; then a vector or a box of 4 is split off."""

    @pytest.mark.parametrize(("inner", "legal"), [(4, True), (5, False), (6, False), (8, True), (12, True)])
    @pytest.mark.parametrize("kind", ["vector", "box"])
    def test_legal_exactly_if_the_size_divides_the_inner_extent(self, inner: int, legal: bool, kind: Any) -> None:
        dims, strides = [IterDomain(4), IterDomain(inner)], [inner + 4, 1]
        assert contiguous(dims, strides=strides) == (False,)
        if kind == "vector" and inner % 4:
            strides = [inner + 8 - inner % 4, 1]
        assert bool(wide_access(dims, 4, along=2, strides=strides, kind=kind)) is legal

    def test_contiguous_dims_merge_freely(self) -> None:
        dims = [IterDomain(4), IterDomain(5)]
        assert contiguous(dims) == (True,)
        assert wide_access(dims, 4, along=2)


class TestVectors:
    def vectorized(self, extent: int) -> tuple[IterDomain, list[IterDomain]]:
        d = IterDomain(extent)
        outer, inner = split(d, 8, inner=False)
        middle, vector = split(inner, 4)
        return d, [outer, middle, vector.parallelize(ParallelType.VECTORIZE)]

    def test_thirty_two(self) -> None:
        d, loop = self.vectorized(32)
        assert [x.extent for x in loop] == [8, 1, 4]
        check_vectorized([d], loop)
        assert guards([d], loop) == () and once([d], loop)

    def test_eight(self) -> None:
        d, loop = self.vectorized(8)
        with pytest.raises(DomainError, match=r"check_vectorized: .*: 4 does not divide 1"):
            check_vectorized([d], loop)

    def scheduled(self) -> Fusion:
        with Fusion() as f:
            y = ops.exp(f.input((None,), torch.float32))
            f.output(y)
        y.split(0, 8, inner=False).split(1, 4).parallelize(0, "grid").parallelize(2, "vectorize")
        return f

    @pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
    def test_thirty_two_runs(self, backend: str) -> None:
        x = torch.arange(32.0) / 8
        torch.testing.assert_close(self.scheduled().compile(backend)(x), x.exp())

    def test_eight_is_refused_when_run(self) -> None:
        with pytest.raises(SerrateError, match="4 does not divide 1"):
            self.scheduled().compile("reference")(torch.ones(8))


# --- rows ----------------------------------------------------------------------------------------------------------------


class TestRowsInTiles:
    """[127, 0, 198] in tiles of 64."""

    def made(self) -> tuple[IterDomain, IterDomain, Any]:
        d = IterDomain(325)
        c, r = partition(d, [0, 127, 127, 325])
        return d, c, r

    def counted(self, d: IterDomain, loop: Domains, by: IterDomain) -> int:
        """Visits of elements when only one domain is bounded."""
        counted = visits([d], loop, [Guard(by, bound(by, loop), "given")])
        return sum(counted.values()) - counted[None]

    def test_every_row_to_the_longest(self) -> None:
        d, c, r = self.made()
        loop = [c, *split(cover(r, 198), 64)]
        assert [str(x.extent) for x in loop] == ["3", "4", "64"]
        assert self.counted(d, loop, d) == 652
        assert self.counted(d, loop, r) == 325
        assert once([d], loop)

    def test_each_row_to_its_own_number_of_tiles(self) -> None:
        d, c, r = self.made()
        loop = [c, *split(r, 64)]
        assert loop[1].extents == (2, 0, 4)  # type: ignore[attr-defined]
        assert self.counted(d, loop, d) == 326
        assert again([d], loop) == 1
        assert self.counted(d, loop, r) == 325
        assert once([d], loop)

    def test_padded_to_tiles(self) -> None:
        _, c, r = self.made()
        assert allocation([c, *split(r, 64)]).elements == 384

    def test_one_list_of_tiles_strided_by_workers(self) -> None:
        """t = k*W + w below the number of tiles, then the row by search, then r below its length."""
        d, c, r = self.made()
        outer, lane = split(r, 64)
        t = combine(c, outer)
        assert t.extent == 6
        loop = [*split(t, 4), lane]
        found = guards([d], loop)
        assert [g.domain.uid for g in found] == [t.uid, r.uid]
        assert str(found[0].condition) == "i0*4 + i1 < 6"
        assert once([d], loop)

    def test_rows_in_blocks_of_128(self) -> None:
        c, r = partition(IterDomain(512), [0, 100, 250, 512])
        assert r.extents == (100, 150, 262)
        found = allocation([c, *split(r, 128)])
        assert (found.starts, found.elements) == ((0, 128, 384), 768)

    def test_a_position_past_an_empty_component(self) -> None:
        d, c, r = self.made()
        i = symbol("i")
        indices = Indices([(d, i)])

        def at(wanted: Expr, position: int) -> int:
            return int(wanted.evaluate(Environment({i: position})))

        assert [at(indices.of(c), k) for k in (0, 126, 127, 128, 324)] == [0, 0, 2, 2, 2]
        assert [at(indices.of(r), k) for k in (0, 126, 127, 128, 324)] == [0, 126, 0, 1, 197]


def test_an_extent_of_one_does_not_free_its_index() -> None:
    d = IterDomain(8)
    outer, inner = split(d, 10)
    loop = [*split(outer, 4), inner]
    assert (outer.extent, [x.extent for x in loop]) == (1, [1, 4, 10])
    indices = Indices(zip(loop, loop_symbols(loop), strict=True))
    # i0 has one position and is 0, so that what is left of the index is i1*10 + i2.
    place = indices.of(d).substitute({loop_symbols(loop)[0]: const(0)})
    assert str(place) == "i1*10 + i2"
    assert [str(g.condition) for g in guards([d], loop)] == ["i0*40 + i1*10 + i2 < 8"]
    assert once([d], loop)
