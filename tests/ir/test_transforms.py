"""Transforms: the numbers they make, what they refuse and how they say it, and which pairs belong together.

In: domains of known and unknown extents. Out: failures of extents, identities, messages.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from serrate import ir
from serrate.errors import DomainError, StructureMismatch
from serrate.ir import (
    IterDomain,
    IterType,
    ParallelType,
    RaggedIterDomain,
    combine,
    cover,
    merge,
    partition,
    product,
    regroup,
    resize,
    restrict,
    split,
    swizzle,
)
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, symbol

OFFSETS = [0, 127, 127, 325]
PARTS = [[0, 50, 127], [0, 0, 0], [0, 100, 198]]
GROUPED = [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]]
ROW, COLUMN = IterDomain(8), IterDomain(4)


def experts() -> tuple[IterDomain, IterDomain, RaggedIterDomain]:
    d = IterDomain(325)
    return d, *partition(d, OFFSETS)


def rows(*lengths: int) -> RaggedIterDomain:
    offsets = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    return partition(IterDomain(offsets[-1]), offsets)[1]


class TestSplit:
    @pytest.mark.parametrize(
        ("extent", "factor", "inner", "extents"),
        [(6, 4, True, [2, 4]), (6, 4, False, [4, 2]), (8, 1, True, [8, 1]), (0, 4, True, [0, 4]), (3, 8, False, [8, 1])],
    )
    def test_extents(self, extent: int, factor: int, inner: bool, extents: list[int]) -> None:
        assert [d.extent for d in split(IterDomain(extent), factor, inner=inner)] == extents

    def test_of_unknown_extent(self) -> None:
        outer, inner = split(IterDomain(symbol("n")), 4)
        assert str(outer.extent) == "(n + 3) // 4"
        assert inner.extent == 4

    def test_of_rows(self) -> None:
        outer, inner = split(rows(3, 5, 2), 2)
        assert isinstance(outer, RaggedIterDomain)
        assert (outer.extents, outer.extent, inner.extent) == ((2, 3, 1), 6, 2)

    def test_of_rows_by_an_outer_factor(self) -> None:
        outer, inner = split(rows(3, 5, 2), 2, inner=False)
        assert isinstance(inner, RaggedIterDomain)
        assert (outer.extent, inner.extents, inner.extent) == (2, (2, 3, 1), 6)
        assert str(inner.host_bound) == "8"

    @pytest.mark.parametrize("factor", [0, -3])
    def test_factors_are_at_least_one(self, factor: int) -> None:
        with pytest.raises(DomainError, match=f"split: a factor must be at least 1, got {factor}"):
            split(IterDomain(6), factor)

    @pytest.mark.parametrize("factor", [2.5, None])
    def test_factors_are_integers(self, factor: Any) -> None:
        with pytest.raises(DomainError, match="split: a factor must be an integer or an expression, got"):
            split(IterDomain(6), factor)

    def test_keeps_the_iter_type(self) -> None:
        assert {d.iter_type for d in split(IterDomain(6, IterType.REDUCTION), 4)} == {IterType.REDUCTION}

    def test_whether_it_divides(self) -> None:
        n = symbol("n")
        assert split(IterDomain(8), 4)[0].definition.divides  # type: ignore[union-attr]
        assert not split(IterDomain(6), 4)[0].definition.divides  # type: ignore[union-attr]
        assert split(IterDomain(n * 4), 2)[0].definition.divides  # type: ignore[union-attr]
        assert not split(IterDomain(n), 2)[0].definition.divides  # type: ignore[union-attr]
        assert split(rows(3, 5, 2), 1)[0].definition.divides  # type: ignore[union-attr]
        assert split(merge(rows(3, 5, 2), IterDomain(4)), 4)[0].definition.divides  # type: ignore[union-attr]
        assert not split(rows(3, 5, 2), 2)[0].definition.divides  # type: ignore[union-attr]

    def test_tiles_of_rows_have_a_bound_without_lengths(self) -> None:
        r = partition(IterDomain(symbol("n")), Array("off"), symbol("k"))[1]
        assert str(split(r, 64)[0].host_bound) == "k + n // 64"


class TestMerge:
    def test_extents(self) -> None:
        assert merge(IterDomain(3), IterDomain(5)).extent == 15
        assert str(merge(IterDomain(symbol("n")), IterDomain(4)).extent) == "n*4"

    def test_rows_with_a_regular_domain(self) -> None:
        merged = merge(rows(3, 5, 2), IterDomain(4))
        assert isinstance(merged, RaggedIterDomain)
        assert (merged.extents, merged.extent, merged.offsets) == ((12, 20, 8), 40, (0, 12, 32, 40))

    def test_a_component_with_its_rows_is_refused(self) -> None:
        _, c, r = experts()
        with pytest.raises(DomainError, match="have no common width; use combine"):
            merge(c, r)

    def test_rows_that_the_outer_domain_does_not_own_are_refused(self) -> None:
        with pytest.raises(DomainError, match="the outer domain does not own the ragged one"):
            merge(IterDomain(3), rows(3, 5, 2))

    @pytest.mark.parametrize("pick", [lambda c: c, lambda c: split(c, 2)[1], lambda c: merge(c, IterDomain(2))])
    def test_rows_with_what_picks_them_are_refused(self, pick: Callable[[IterDomain], IterDomain]) -> None:
        _, c, r = experts()
        with pytest.raises(DomainError, match="the inner domain selects the row of the outer one"):
            merge(r, pick(c))

    def test_parts_of_rows_with_the_part_are_refused(self) -> None:
        part, inner = partition(experts()[2], PARTS)
        with pytest.raises(DomainError, match="the inner domain selects the row"):
            merge(inner, part)

    def test_different_iter_types_are_refused(self) -> None:
        with pytest.raises(DomainError, match="cannot be both iteration and reduction"):
            merge(IterDomain(3), IterDomain(4, IterType.REDUCTION))
        assert merge(IterDomain(3, IterType.REDUCTION), IterDomain(4, IterType.REDUCTION)).iter_type is IterType.REDUCTION

    def test_keeps_a_bound_that_needs_no_lengths(self) -> None:
        c, r = partition(IterDomain(symbol("n")), Array("off"), symbol("k"))
        tiles = combine(c, split(r, 64)[0])
        assert str(tiles.host_bound) == "k + n // 64"
        assert merge(tiles, IterDomain(4)).host_bound is tiles.host_bound * 4
        assert merge(IterDomain(3), IterDomain(4)).bound is None


class TestPartition:
    def test_numbers(self) -> None:
        d, c, r = experts()
        assert (c.extent, r.extents, r.extent, r.offsets) == (3, (127, 0, 198), 325, (0, 127, 127, 325))
        assert c.definition is r.definition
        assert c.definition is not None
        assert c.definition.inputs == (d,)
        assert c.definition.outputs == (c, r)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_by_a_tensor(self, dtype: torch.dtype) -> None:
        assert partition(IterDomain(325), torch.tensor(OFFSETS, dtype=dtype))[1].extents == (127, 0, 198)

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            (None, "offsets must be integers, got None"),
            ([0.0, 325.0], r"offsets must be integers, got \[0.0, 325.0\]"),
            ([0, None, 325], "offsets must be integers"),
            (torch.tensor([0.0, 325.0]), "offsets must be integers, .* got torch.float32"),
            (torch.tensor(3), "got torch.int64 of 0 dims"),
            ([1, 325], r"offsets must start at 0, got \[1\]"),
            ([], r"offsets must start at 0, got \[\]"),
            ([0, 200, 100, 325], r"must not decrease: offsets\[2\] = 100 < offsets\[1\] = 200"),
            ([0, 127, 300], "offsets must end at the extent 325, got 300"),
            ([0], "offsets must end at the extent 325, got 0"),
            ([[0, 100], [0, 225]], "have 1 leading dims, but 0 precede it; say which with under="),
        ],
    )
    def test_bad_offsets_are_refused(self, offsets: Any, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            partition(IterDomain(325), offsets)

    @pytest.mark.parametrize("iter_type", [IterType.REDUCTION, IterType.BROADCAST])
    def test_only_iteration_domains_have_parts(self, iter_type: IterType) -> None:
        with pytest.raises(DomainError, match=f"is a {iter_type.name.lower()} domain; only iteration domains can be partitioned"):
            partition(IterDomain(325, iter_type), OFFSETS)

    def test_a_parallelized_domain_is_refused(self) -> None:
        with pytest.raises(DomainError, match="already parallelized; partition it first"):
            partition(IterDomain(325).parallelize(ParallelType.GRID), OFFSETS)

    def test_by_an_array(self) -> None:
        c, r = partition(IterDomain(symbol("n")), Array("off"), 3, names=("c", "r"))
        assert (c.name, r.name, c.extent) == ("c", "r", 3)
        with pytest.raises(DomainError, match="partition by off: the number of components must be given"):
            partition(IterDomain(symbol("n")), Array("off"))

    def test_an_array_is_checked_at_once_where_known(self) -> None:
        with pytest.raises(DomainError, match="must end at the extent 325, got 200"):
            partition(IterDomain(325), Array("off", (0, 100, 200)), 2)

    def test_offsets_of_unknown_extent_are_checked_as_far_as_they_can(self) -> None:
        assert partition(IterDomain(symbol("n")), OFFSETS)[1].extents == (127, 0, 198)
        with pytest.raises(DomainError, match="must not decrease"):
            partition(IterDomain(symbol("n")), [0, 3, 2])


class TestNested:
    def test_numbers(self) -> None:
        _, c, r = experts()
        part, inner = partition(r, PARTS)
        assert (part.extent, inner.extent) == (2, 325)
        assert inner.extents == ((50, 77), (0, 0), (100, 98))
        assert inner.offsets == ((0, 50, 127), (0, 0, 0), (0, 100, 198))
        assert inner.component is merge(c, part)
        assert part.definition is inner.definition

    def test_nests_again(self) -> None:
        inner = partition(experts()[2], PARTS)[1]
        third = partition(inner, [[[0, 20, 50], [0, 7, 77]], [[0, 0, 0], [0, 0, 0]], [[0, 0, 100], [0, 98, 98]]])[1]
        assert third.extents == (((20, 30), (7, 70)), ((0, 0), (0, 0)), ((0, 100), (98, 0)))

    def test_without_parts(self) -> None:
        r = partition(IterDomain(0), [0, 0, 0])[1]
        part, inner = partition(r, [[0], [0]])
        assert (part.extent, inner.extents) == (0, ((), ()))
        none = partition(partition(IterDomain(0), [0])[1], [])
        assert (none[0].extent, none[1].extents) == (0, ())

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            ([[0, 127], [0, 0]], "one row of offsets for each of 3 components, got 2"),
            (OFFSETS, "one row of offsets for each of 3 components, got 1"),
            ([[0, 50, 127], [0, 0], [0, 100, 198]], r"every component must have 2 parts, got the offsets \[0, 0\]"),
            ([[0, 50, 126], [0, 0, 0], [0, 100, 198]], "must end at the extent 127, got 126"),
            ([[0, 50, 127], [0, 0, 0], [0, 200, 198]], "must not decrease"),
            ([[0, 1.5, 127], [0, 0, 0], [0, 100, 198]], "offsets must be integers"),
            (Array("off"), "partition by off: the number of components must be given"),
            ([[[0, 127]], [[0, 0]], [[0, 198]]], "have 2 leading dims, but 1 precede it"),
        ],
    )
    def test_bad_offsets_are_refused(self, offsets: Any, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            partition(experts()[2], offsets)

    def test_a_component_is_partitioned_like_any_domain(self) -> None:
        sentence, word = partition(IterDomain(10), [0, 3, 3, 8, 10])
        document, inner = partition(sentence, [0, 1, 4])
        assert (document.extent, inner.extents, word.component) == (2, (1, 3), sentence)

    def test_sentences_into_documents(self) -> None:
        sentence, word = partition(IterDomain(10), [0, 3, 3, 8, 10])
        document, inner = partition(sentence, [0, 1, 4])
        words = combine(inner, word)
        assert isinstance(words, RaggedIterDomain)
        assert (words.extents, words.extent, words.offsets) == ((3, 7), 10, (0, 3, 10))
        assert words.component is document
        assert words == partition(IterDomain(10), [0, 3, 10])[1]
        assert combine(document, words).extent == 10
        assert combine(document, inner) is sentence

    def test_tiles_of_words_into_documents(self) -> None:
        sentence, word = partition(IterDomain(10), [0, 3, 3, 8, 10])
        inner = partition(sentence, [0, 1, 4])[1]
        tiles = combine(inner, split(word, 2)[0])
        assert isinstance(tiles, RaggedIterDomain)
        assert (tiles.extents, tiles.extent) == ((2, 4), 6)


class TestCombine:
    def test_gives_back_what_was_partitioned(self) -> None:
        d, c, r = experts()
        assert combine(c, r) is d
        part, inner = partition(r, PARTS)
        assert combine(part, inner) is r
        assert combine(merge(c, part), inner).extent == 325

    def test_tiles(self) -> None:
        _, c, r = experts()
        tiles = combine(c, split(r, 64)[0])
        assert tiles.extent == 6
        assert not tiles.is_ragged

    def test_rows_in_blocks(self) -> None:
        c, r = partition(IterDomain(512), [0, 100, 250, 512])
        blocks = combine(c, split(r, 128)[0])
        assert [128 * first for first in blocks.definition.offsets.data] == [0, 128, 384, 768]  # type: ignore[union-attr]

    def test_no_rows(self) -> None:
        c, r = partition(IterDomain(0), [0])
        assert combine(c, split(r, 4)[0]).extent == 0

    def test_of_rows_known_only_when_run(self) -> None:
        off = Array("off")
        c, r = partition(IterDomain(symbol("n")), off, symbol("k"))
        tiles = combine(c, split(r, 64)[0])
        assert str(tiles.extent) == "sum((off[c + 1] - off[c] + 63) // 64)[k]"
        assert str(tiles.host_bound) == "k + n // 64"

    def test_a_parallelized_pair_still_pairs(self) -> None:
        _, c, r = experts()
        assert combine(c.parallelize(ParallelType.GRID), r).extent == 325

    def test_pairs_by_value(self) -> None:
        assert combine(experts()[1], experts()[2]).extent == 325

    @pytest.mark.parametrize(
        "component",
        [
            lambda: partition(IterDomain(325), [0, 100, 200, 325])[0],
            lambda: IterDomain(3),
            lambda: experts()[2],
            lambda: partition(IterDomain(325), [0, 100, 200, 325])[1],
        ],
        ids=["of another partition", "of none", "a ragged domain of an equal one", "a ragged domain"],
    )
    def test_another_component_is_refused_by_name(self, component: Callable[[], IterDomain]) -> None:
        _, _, r = experts()
        other = component()
        with pytest.raises(StructureMismatch) as raised:
            combine(other, r)
        assert str(other) in str(raised.value)
        assert str(r) in str(raised.value)
        assert str(OFFSETS) in str(raised.value)

    def test_after_a_transform_of_one_side_another_component_is_still_refused(self) -> None:
        outer = split(experts()[2], 64)[0]
        with pytest.raises(StructureMismatch):
            combine(partition(IterDomain(325), [0, 100, 200, 325])[0], outer)

    def test_parts_of_a_row_with_their_tiles_are_all_tiles_of_the_row(self) -> None:
        _, component, rows = experts()
        part, inner = partition(rows, PARTS)
        tiles = split(inner, 4)[0]
        combined = combine(part, tiles)
        assert isinstance(combined, RaggedIterDomain) and combined.component is component
        assert combined.extents == tuple(sum(-(-(b - a) // 4) for a, b in pairwise(row)) for row in PARTS)
        assert combine(component, combined).extent == combine(merge(component, part), tiles).extent

    def test_regular_domains_are_refused(self) -> None:
        with pytest.raises(DomainError, match=r"the second domain must be ragged, got .*; use merge for regular ones"):
            combine(IterDomain(3), IterDomain(4))

    @pytest.mark.parametrize("arguments", [(None, None), (None, 3)])
    def test_nothing_is_refused(self, arguments: Any) -> None:
        with pytest.raises(DomainError, match="combine: expected an IterDomain, got NoneType"):
            combine(*arguments)


class TestPairing:
    def test_survives_transforms_of_the_rows(self) -> None:
        _, c, r = experts()
        for made in (split(r, 4)[0], split(r, 4, inner=False)[1], merge(r, IterDomain(4)), resize(r, 1, 1), restrict(r, 1, 5)):
            assert made.pairing == c.pairing
            assert combine(experts()[1], made).extent == combine(c, made).extent
        with pytest.raises(StructureMismatch):
            combine(partition(IterDomain(325), [0, 100, 200, 325])[0], split(r, 4)[0])

    def test_a_domain_without_identity_is_trusted_with_rows_that_have_none(self) -> None:
        c = IterDomain(3)
        r = RaggedIterDomain(10, component=c, length=Array("n", (3, 5, 2))[COORDINATE])
        assert combine(IterDomain(3), r).extent == 10
        with pytest.raises(StructureMismatch, match="is the component of no partition"):
            combine(IterDomain(4), r)


class TestUnder:
    """Offsets of their own for each position of what precedes."""

    def test_numbers(self) -> None:
        g, i = IterDomain(2), IterDomain(100)
        c, r = partition(i, GROUPED, under=[g])
        assert (c.extent, r.extents, r.extent) == (4, ((30, 0, 40, 30), (25, 35, 25, 15)), 200)
        assert r.component is merge(g, c)
        assert r.offsets == tuple(map(tuple, GROUPED))
        assert combine(c, r) is i

    def test_by_a_tensor(self) -> None:
        made = partition(IterDomain(100), torch.tensor(GROUPED), under=[IterDomain(2)])[1]
        assert made.extents == ((30, 0, 40, 30), (25, 35, 25, 15))

    def test_by_an_array_known_when_run(self) -> None:
        off, g, n = Array("off"), IterDomain(symbol("g")), IterDomain(symbol("n"))
        c, r = partition(n, off, 4, under=[g], names=("c", "r"))
        assert (c.extent, str(r.extent)) == (4, "g*n")
        assert str(r) == "ragged.r{off[c + c // 4 + 1] - off[c + c // 4]}"
        assert combine(c, r) is n

    def test_under_two(self) -> None:
        a, b = IterDomain(2), IterDomain(3)
        rows_ = [[[0, k, 6] for k in (1, 2, 3)], [[0, k, 6] for k in (4, 5, 6)]]
        c, r = partition(IterDomain(6), rows_, under=[a, b])
        assert r.component is merge(merge(a, b), c)
        assert r.extents == (((1, 5), (2, 4), (3, 3)), ((4, 2), (5, 1), (6, 0)))

    def test_rows_known_when_run(self) -> None:
        c, r = partition(IterDomain(symbol("n")), Array("off"), symbol("k"))
        part, inner = partition(r, Array("ranks"), 2, names=("p", "q"))
        assert (part.extent, inner.component) == (2, merge(c, part))
        assert str(inner) == "ragged.q{ranks[c + c // 2 + 1] - ranks[c + c // 2]}"
        assert combine(part, inner) is r

    def test_no_parts(self) -> None:
        c, r = partition(IterDomain(0), [[0], [0]], under=[IterDomain(2)])
        assert (c.extent, r.extents) == (0, ((), ()))

    @pytest.mark.parametrize(
        ("offsets", "under", "message"),
        [
            (GROUPED, 0, "have 1 leading dims, but 0 precede it; say which with under="),
            ([GROUPED], 1, "have 2 leading dims, but 1 precede it"),
            (GROUPED[:1], 1, "one row of offsets for each of 2 components, got 1"),
            ([[0, 100], [0, 50, 100]], 1, r"every component must have 1 parts, got the offsets \[0, 50, 100\]"),
            ([[0, 100], [0, 99]], 1, "must end at the extent 100, got 99"),
            (Array("off", (0, 100, 0, 99)), 1, "must end at the extent 100, got 99"),
        ],
    )
    def test_refused(self, offsets: Any, under: int, message: str) -> None:
        count = 1 if isinstance(offsets, Array) else None
        with pytest.raises(DomainError, match=message):
            partition(IterDomain(100), offsets, count, under=[IterDomain(2)] * under)

    def test_ragged_domains_do_not_precede(self) -> None:
        with pytest.raises(DomainError, match="under must name regular domains"):
            partition(IterDomain(100), GROUPED, under=[rows(1, 1)])


class TestRowsWithGaps:
    def test_numbers(self) -> None:
        d = IterDomain(768)
        c, r = partition(d, [0, 128, 384], lengths=[100, 150, 262])
        assert (c.extent, r.extents, r.extent, r.start_of(2).value) == (3, (100, 150, 262), 512, 384)
        assert str(r.host_bound) == "768"

    def test_rows_may_touch(self) -> None:
        _, r = partition(IterDomain(8), [0, 3, 5], lengths=[3, 2, 3])
        assert (r.extents, r.start_of(1).value) == ((3, 2, 3), 3)

    def test_combine_lays_them_back_to_back(self) -> None:
        d = IterDomain(768)
        c, r = partition(d, [0, 128, 384], lengths=[100, 150, 262])
        packed = combine(c, r)
        assert packed is not d
        assert (packed.extent, packed.definition.offsets.data) == (512, (0, 100, 250, 512))  # type: ignore[union-attr]

    def test_known_when_run(self) -> None:
        c, r = partition(IterDomain(symbol("n")), Array("first"), symbol("k"), lengths=Array("many"))
        assert (str(r.length_of(2)), str(r.start_of(2))) == ("many[2]", "first[2]")
        assert str(combine(c, r).extent) == "sum(many[c])[k]"
        assert str(combine(c, r).host_bound) == "n"

    @pytest.mark.parametrize(
        ("starts", "lengths", "message"),
        [
            ([0, 4], [3], "as many lengths as starts are needed, got 1 and 2"),
            ([0, 4], [5, 1], "rows must be in order and not overlap, but row 0 ends at 5 and row 1 starts at 4"),
            ([4, 0], [1, 1], "rows must be in order and not overlap"),
            ([0, 4], [3, 9], "row 1 ends at 13, past the extent 12"),
            ([0, 4], [3, -1], "must not be negative, but row 1 has 4 and -1"),
            ([0, 4], [3, 1.5], "lengths must be integers"),
            ([[0], [4]], [3, 1], "starts must have one dim"),
            (Array("a"), Array("b"), "partition by a, b: the number of components must be given"),
        ],
    )
    def test_refused(self, starts: Any, lengths: Any, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            partition(IterDomain(12), starts, lengths=lengths)

    def test_of_rows_and_under_other_domains(self) -> None:
        r = rows(3, 4)
        c, inner = partition(r, [[0, 2], [1, 3]], lengths=[[2, 1], [1, 1]])
        assert (c.extent, inner.extents, inner.extent) == (2, ((2, 1), (1, 1)), 5)
        assert [inner.start_of(k).value for k in range(4)] == [0, 2, 1, 3]
        assert combine(c, inner).extents == (3, 2)  # type: ignore[attr-defined]
        c, inner = partition(IterDomain(9), [[0, 4], [5, 6]], lengths=[[3, 5], [0, 2]], under=[IterDomain(2)])
        assert (c.extent, inner.extents) == (2, ((3, 5), (0, 2)))

    @pytest.mark.parametrize(
        ("starts", "lengths", "message"),
        [
            ([0], [3], "expected one row of starts for each of 2 components, got 1"),
            ([[0], [0]], [[3], [1], [1]], "expected one row of lengths for each of 2 components, got 3"),
            ([[0], [0, 1]], [[3], [1, 1]], "every component must have the same number of starts"),
            ([[0], [1]], [[3], [4]], "row 0 ends at 5, past the extent 4"),
            ([[0], [1]], [[3, 0], [1, 1]], r"as many lengths as starts are needed, got \[2, 2\] and \[1, 1\]"),
        ],
    )
    def test_of_rows_refused(self, starts: Any, lengths: Any, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            partition(rows(3, 4), starts, lengths=lengths)


class TestProduct:
    def test_extents(self) -> None:
        r = rows(3, 5, 2)
        assert product(r, split(r, 2)[0]).extents == (6, 15, 2)
        assert product(r, split(r, 2)[0]).component is r.component

    def test_a_bound_that_needs_no_lengths(self) -> None:
        r = partition(IterDomain(symbol("n")), Array("off"), symbol("k"))[1]
        assert product(r, split(r, 1)[0]).host_bound is symbol("n") * (symbol("n") + symbol("k"))

    def test_refused(self) -> None:
        with pytest.raises(DomainError, match=r"product: both domains must be ragged, got .*; use merge for regular ones"):
            product(rows(3, 5), IterDomain(4))
        with pytest.raises(DomainError, match=r"have different components, .*; use two ragged domains of one component"):
            product(rows(3, 5), rows(3, 5))
        r = rows(3, 5)
        with pytest.raises(DomainError, match=r"both are ragged; use product"):
            merge(r, split(r, 2)[0])


class TestRegroup:
    def test_extents(self) -> None:
        g = IterDomain(2)
        c, r = partition(IterDomain(100), GROUPED, under=[g])
        same, moved = regroup(g, c, r)
        assert same is c
        assert (moved.extents, moved.extent, moved.component) == ((55, 35, 65, 45), 200, c)
        assert combine(c, moved).extent == 200
        assert moved.pairing == c.pairing

    def test_from_ranks_to_experts(self) -> None:
        # What two ranks send to three experts, rank by rank; experts want what is theirs, from all ranks.
        rank, token = IterDomain(2), IterDomain(325)
        expert, sent = partition(token, [[0, 127, 127, 325], [0, 98, 143, 325]], under=[rank])
        assert sent.extents == ((127, 0, 198), (98, 45, 182))
        assert regroup(rank, expert, sent)[1].extents == (225, 45, 380)

    def test_parts_of_rows(self) -> None:
        _, c, r = experts()
        part, inner = partition(r, PARTS)
        assert regroup(c, part, inner)[1].extents == (150, 175)

    def test_known_when_run(self) -> None:
        g = IterDomain(symbol("g", 1))
        c, r = partition(IterDomain(symbol("n")), Array("off"), 4, under=[g])
        moved = regroup(g, c, r)[1]
        assert (str(moved.extent), str(moved.host_bound)) == ("g*n", "g*n")

    def test_refused(self) -> None:
        g = IterDomain(2)
        c, r = partition(IterDomain(100), GROUPED, under=[g])
        with pytest.raises(DomainError, match=r"is owned by merge\(.*\), not by merge\("):
            regroup(c, g, r)
        with pytest.raises(DomainError, match="the third domain must be ragged"):
            regroup(g, c, c)
        with pytest.raises(DomainError, match="not by merge"):
            regroup(g, experts()[1], experts()[2])


class TestResize:
    def test_extents(self) -> None:
        assert [resize(IterDomain(6), *sizes).extent for sizes in ((1, 2), (0, 0), (-2, 0), (-2, -4))] == [9, 6, 4, 0]
        made = resize(rows(3, 0, 5), -1, -1)
        assert isinstance(made, RaggedIterDomain)
        assert (made.extents, made.extent) == ((1, 0, 3), 4)
        assert resize(rows(3, 0, 5), 1, 1).extents == (5, 2, 7)  # type: ignore[attr-defined]
        assert str(resize(IterDomain(symbol("n")), 1, 1).extent) == "n + 2"

    def test_refused(self) -> None:
        with pytest.raises(DomainError, match="cannot remove 7 positions"):
            resize(IterDomain(6), -3, -4)
        with pytest.raises(DomainError, match="resize: the left size must be an integer"):
            resize(IterDomain(6), 1.5, 0)  # type: ignore[arg-type]


class TestSwizzle:
    def test_extents(self) -> None:
        a, b = IterDomain(4), IterDomain(8)
        kept, made = swizzle(a, b)
        assert kept is a
        assert made.extent == 8

    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            (IterDomain(3), IterDomain(8), r"must be known powers of two, got i\..*\{3\}"),
            (IterDomain(4), IterDomain(6), r"must be known powers of two, got i\..*\{6\}"),
            (IterDomain(4), IterDomain(0), "must be known powers of two"),
            (IterDomain(4), IterDomain(symbol("n")), "must be known powers of two"),
            (IterDomain(4), rows(4, 4), "is ragged; only regular domains"),
        ],
    )
    def test_refused(self, a: IterDomain, b: IterDomain, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            swizzle(a, b)

    def test_not_by_itself(self) -> None:
        with pytest.raises(DomainError, match="cannot be swizzled by itself"):
            swizzle(COLUMN, COLUMN)


class TestCover:
    def test_to_the_longest_row(self) -> None:
        x = cover(experts()[2], 198)
        assert x.extent == 198
        assert not x.is_ragged

    def test_of_groups(self) -> None:
        _, c, r = experts()
        groups, _ = split(c, 2)
        x = cover(r, Array("longest", (127, 198))[COORDINATE], groups)
        assert isinstance(x, RaggedIterDomain)
        assert (x.extents, x.extent, x.component) == ((127, 198), 325, groups)

    def test_a_bound_below_the_longest_row_is_refused(self) -> None:
        with pytest.raises(DomainError, match="has a row of 198, which is longer than the bound 100"):
            cover(experts()[2], 100)

    def test_a_regular_domain_is_refused(self) -> None:
        with pytest.raises(DomainError, match=r"expected a ragged domain, got .*; a regular domain covers itself"):
            cover(IterDomain(4), 4)


class TestRestrict:
    def test_extents(self) -> None:
        end = symbol("end", 3)
        assert restrict(IterDomain(10), 2, 7).extent == 5
        assert restrict(IterDomain(10), 7, 2).extent == 0
        assert str(restrict(IterDomain(10), 2, end).extent) == "end - 2"

    def test_rows_end_with_the_sub_range_or_before(self) -> None:
        made = restrict(rows(3, 5, 2), 1, 4)
        assert isinstance(made, RaggedIterDomain)
        assert (made.extents, made.extent) == ((2, 3, 1), 6)
        assert restrict(rows(3, 5, 2), COORDINATE, COORDINATE + 2).extents == (2, 2, 0)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("low", [-1, symbol("low", None)])
    def test_a_lower_bound_below_zero_is_refused(self, low: Any) -> None:
        with pytest.raises(DomainError, match=f"the lower bound must not be negative, got {low}"):
            restrict(IterDomain(10), low, 7)


@pytest.mark.parametrize(
    "transform",
    [
        lambda d, r: split(d, 4),
        lambda d, r: split(d, 4, inner=False),
        lambda d, r: split(r, 4),
        lambda d, r: (merge(d, r.component),),
        lambda d, r: partition(d, [0, 100, 325]),
        lambda d, r: partition(r, PARTS),
        lambda d, r: (combine(r.component, split(r, 4)[0]),),
        lambda d, r: (cover(r, 200),),
        lambda d, r: (restrict(d, 1, 4),),
        lambda d, r: split(r, 4, inner=False),
        lambda d, r: (resize(d, 1, 4),),
        lambda d, r: (resize(r, 1, 4),),
        lambda d, r: (product(r, split(r, 4)[0]),),
        lambda d, r: partition(IterDomain(9), [0, 4], lengths=[3, 2])[:0],
        lambda d, r: (swizzle(COLUMN, ROW)[1],),
        lambda d, r: (regroup(r.component, *partition(r, PARTS))[1],),
    ],
)
def test_the_same_transform_gives_the_same_domains(
    transform: Callable[[IterDomain, RaggedIterDomain], tuple[IterDomain, ...]],
) -> None:
    d, _, r = experts()
    first, second = transform(d, r), transform(d, r)
    assert all(a is b for a, b in zip(first, second, strict=True))
    for made in first:
        assert made.definition is not None
        assert [d.uid for d in made.definition.outputs] == [d.uid for d in first]


def test_other_arguments_give_other_domains() -> None:
    d = IterDomain(325)
    assert split(d, 4)[0] is not split(d, 8)[0]
    assert split(d, 4)[0] is not split(d, 4, inner=False)[0]
    assert partition(d, [0, 100, 325])[0] is not partition(d, [0, 101, 325])[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: split(x, 4),
        lambda x: merge(x, x),
        lambda x: partition(x, [0]),
        lambda x: partition(IterDomain(4), [0, 4], under=[x]),
        lambda x: cover(x, 4),
        lambda x: resize(x, 1, 1),
        lambda x: restrict(x, 1, 1),
        lambda x: swizzle(x, x),
        lambda x: product(x, x),
        lambda x: regroup(x, x, x),
    ],
)
def test_what_is_not_a_domain_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(DomainError, match="expected an IterDomain, got int"):
        function(7)


def test_a_domain_that_starts_elsewhere_has_no_transforms() -> None:
    with pytest.raises(DomainError, match="starts at 2; only domains that start at 0 can be transformed"):
        split(IterDomain(6, start=2), 4)


def test_transforms_print() -> None:
    d, g = IterDomain(8, name="d"), IterDomain(2, name="g")
    c, r = partition(IterDomain(8, name="i"), [0, 3, 8], names=("c", "r"))
    part = partition(d, [[0, 3, 8], [0, 4, 8]], under=[g], names=("p", "q"))
    texts = [
        (split(d, 4)[0], "split 4: i.d{8} -> i.do{2}, i.di{4}"),
        (split(r, 2, inner=False)[1], "outer split 2: ragged.r{[3, 5]} beside i.c{2} -> i.ro{2}, ragged.ri{[2, 3]}"),
        (merge(d, g), "merge: i.d{8}, i.g{2} -> i.dg{16}"),
        (c, "partition offsets[0, 3, 8]: i.i{8} -> i.c{2}, ragged.r{[3, 5]}"),
        (combine(c, split(r, 2)[0]), "combine: i.c{2}, ragged.ro{[2, 3]} -> i.cro{5}"),
        (cover(r, 5), "cover: ragged.r{[3, 5]} -> i.rx{5}"),
        (resize(d, 1, -2), "resize 1, -2: i.d{8} -> i.dz{7}"),
        (restrict(d, 1, 5), "restrict 1, 5: i.d{8} -> i.ds{4}"),
        (swizzle(g, d)[1], "swizzle: i.d{8} beside i.g{2} -> i.dx{8}"),
        (product(r, split(r, 2)[0]), "product: ragged.r{[3, 5]}, ragged.ro{[2, 3]} beside i.c{2} -> ragged.rro{[6, 15]}"),
        (regroup(g, *part)[1], "regroup: i.g{2}, ragged.q{[[3, 5], [4, 4]]} beside i.p{2} -> ragged.qg{[7, 9]}"),
    ]
    for made, text in texts:
        assert str(made.definition) == text


@pytest.mark.parametrize("kind", ["grid", "lanes"])
def test_transforms_that_would_lose_a_mark_are_refused(kind: str) -> None:
    marked, other = ir.IterDomain(8).parallelize(kind), ir.IterDomain(4)
    for name, transform in {
        "split": lambda: ir.split(marked, 4),
        "merge": lambda: ir.merge(other, marked),
        "resize": lambda: ir.resize(marked, 1, 1),
        "swizzle": lambda: ir.swizzle(other, marked),
    }.items():
        with pytest.raises(
            DomainError, match=f"^{name}: .* is already parallelized; {name} it first, then parallelize the parts"
        ):
            transform()
