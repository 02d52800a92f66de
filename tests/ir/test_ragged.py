"""Ragged domains: how they are made, what is refused, extents nested to any depth, what a walk reaches.

In: component domains, extents, offsets. Out: failures of numbers, identities and messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.errors import DomainError
from serrate.ir import IterDomain, IterType, ParallelType, RaggedIterDomain, combine, merge, partition, regroup, split, traverse
from serrate.ir.domains import COORDINATE, NestedInts
from serrate.ir.expr import Array, symbol
from serrate.ir.ragged import offsets_array, running_sum
from serrate.ir.recipes import RunningSum

nested = st.recursive(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple),
    max_leaves=9,
)


def even(extents: Any) -> bool:
    """Whether all rows lie equally deep."""
    depths = {even_depth(inner) for inner in extents} if isinstance(extents, tuple) else set()
    return None not in depths and len(depths) <= 1


def even_depth(extents: Any) -> int | None:
    if isinstance(extents, int):
        return 0
    depths = {even_depth(inner) for inner in extents} or {0}
    return None if None in depths or len(depths) > 1 else 1 + depths.pop()


def total(extents: NestedInts) -> int:
    return extents if isinstance(extents, int) else sum(map(total, extents))


class TestOfComponents:
    def test_numbers(self) -> None:
        components = [IterDomain(3), IterDomain(5), IterDomain(2)]
        r = RaggedIterDomain.of(components, name="r")
        assert (r.extent, r.extents, r.offsets, r.component.extent) == (10, (3, 5, 2), (0, 3, 8, 10), 3)
        assert all(a is b for a, b in zip(r.nested_domains, components, strict=True))
        assert str(r) == "ragged.r{[3, 5, 2]}"
        assert combine(r.component, r).extent == 10

    def test_none_at_all(self) -> None:
        r = RaggedIterDomain.of([])
        assert (r.extent, r.extents, r.offsets, r.nested_domains, r.component.extent) == (0, (), (0,), (), 0)

    def test_components_that_are_ragged_themselves(self) -> None:
        even_parts = RaggedIterDomain.of([RaggedIterDomain.from_extents([3, 5]), RaggedIterDomain.from_extents([2, 0])])
        assert (even_parts.extent, even_parts.extents, even_parts.component.extent) == (10, ((3, 5), (2, 0)), 4)
        varying = RaggedIterDomain.of([RaggedIterDomain.from_extents([3, 5]), RaggedIterDomain.from_extents([2])])
        assert (varying.extent, varying.extents, varying.component.extent) == (10, ((3, 5), (2,)), 3)
        assert varying.offsets == ((0, 3, 8), (0, 2))
        assert [d.extents for d in varying.nested_domains] == [(3, 5), (2,)]  # type: ignore[attr-defined]
        third = RaggedIterDomain.of([varying, RaggedIterDomain.from_extents([[1], []])])
        assert third.extents == (((3, 5), (2,)), ((1,), ()))

    def test_properties_are_those_of_the_components(self) -> None:
        made = [IterDomain(n, IterType.REDUCTION, ParallelType.UNROLL, is_rfactor=True) for n in (3, 5)]
        r = RaggedIterDomain.of(made)
        assert (r.iter_type, r.parallel, r.is_rfactor, r.start) == (IterType.REDUCTION, ParallelType.UNROLL, True, 0)

    @pytest.mark.parametrize(
        ("components", "message"),
        [
            (
                [IterDomain(3), IterDomain(5, parallel=ParallelType.THREAD_X)],
                "one parallel type, .* 0 has serial .* 1 has thread_x",
            ),
            ([IterDomain(3), IterDomain(5, IterType.REDUCTION)], "one iter type, .* 0 has iteration .* 1 has reduction"),
            ([IterDomain(3), IterDomain(5, start=2)], "every component must start at 0, but component 1 starts at 2"),
            ([IterDomain(3), IterDomain(5, is_rfactor=True)], "one rfactor mark, .* 0 has False .* 1 has True"),
            ([IterDomain(3), RaggedIterDomain.from_extents([2])], "either all components are ragged or none is"),
            ([IterDomain(3), None], "component 1 must be an IterDomain, got None"),
            ([IterDomain(3), IterDomain(symbol("n"))], "component 1 has the extent n, known only when the program runs"),
            (IterDomain(3), "expected a sequence of domains"),
            (None, "expected a sequence of domains, got None"),
        ],
    )
    def test_refused(self, components: Any, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            RaggedIterDomain.of(components)


class TestFromExtents:
    @given(nested.filter(even))
    def test_nested_to_any_depth(self, extents: tuple[NestedInts, ...]) -> None:
        r = RaggedIterDomain.from_extents(extents)
        assert (r.extents, r.extent) == (extents, total(extents))
        assert RaggedIterDomain.from_offsets(r.offsets).extents == extents  # type: ignore[arg-type]
        assert r == RaggedIterDomain.from_extents(extents)
        assert len(r.nested_domains) == len(extents)
        assert RaggedIterDomain.of(r.nested_domains).extents == extents
        combined = combine(r.component, r)
        assert (combined.extent, combined.is_ragged) == (total(extents), False)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
    def test_by_a_tensor(self, dtype: torch.dtype) -> None:
        assert RaggedIterDomain.from_extents(torch.tensor([3, 5, 2], dtype=dtype)).extents == (3, 5, 2)
        assert RaggedIterDomain.from_extents(torch.tensor([[3, 5], [2, 0]], dtype=dtype)).extents == ((3, 5), (2, 0))

    def test_by_an_array_that_the_program_computes(self) -> None:
        counts = Array("counts")
        r = RaggedIterDomain.from_extents(counts, symbol("k"))
        assert (r.length_of(2), r.component.extent) == (counts[2], symbol("k"))
        assert str(r.extent) == "sum(counts[c])[k]"
        assert str(r.start_of(2)) == "sum(counts[c])[2]"
        assert r == RaggedIterDomain.from_extents(counts, symbol("k"))
        assert r != RaggedIterDomain.from_extents(Array("others"), symbol("k"))
        assert str(r).endswith("{counts[c]}")
        assert combine(r.component, r).extent is r.extent
        assert [d.extent for d in RaggedIterDomain.from_extents(counts, 2).nested_domains] == [counts[0], counts[1]]
        with pytest.raises(DomainError, match=r"nested_domains .* the number of components is known only when the program runs"):
            _ = r.nested_domains

    @pytest.mark.parametrize(
        ("extents", "message"),
        [
            (None, "extents must be integers, got None"),
            ([3, None], "extents must be integers"),
            ([3, 2.5], r"extents must be integers, got \[3, 2.5\]"),
            ([3, True], "extents must be integers"),
            ("35", "extents must be integers, got '35'"),
            ([3, -1], "extents must not be negative, got -1"),
            ([[3], [-2]], "extents must not be negative, got -2"),
            ([3, [5]], "extents must be nested evenly"),
            (torch.tensor([1.0]), "must be integers, one row or more, got torch.float32"),
            (torch.tensor([True]), "must be integers, one row or more, got torch.bool"),
            (torch.tensor(3), "of 0 dims"),
            (Array("n"), "extents are the array n: the number of components must be given"),
        ],
    )
    def test_refused(self, extents: Any, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            RaggedIterDomain.from_extents(extents)


class TestFromOffsets:
    def test_numbers(self) -> None:
        r = RaggedIterDomain.from_offsets([0, 127, 127, 325])
        assert (r.extents, r.extent) == ((127, 0, 198), 325)
        assert r == partition(IterDomain(325), [0, 127, 127, 325])[1]
        off = Array("off")
        assert RaggedIterDomain.from_offsets(off, 3).length_of(1) is off[2] - off[1]

    def test_pairs_with_a_partition_by_equal_offsets(self) -> None:
        r = RaggedIterDomain.from_offsets([0, 127, 127, 325])
        c, other = partition(IterDomain(325), [0, 127, 127, 325])
        assert combine(c, r).extent == combine(r.component, other).extent == 325

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            ([1, 2], r"offsets must start at 0, got \[1\]"),
            ([0, 3, 2], r"must not decrease: offsets\[2\] = 2 < offsets\[1\] = 3"),
            ([[0, 3], [2, 3]], "must start at 0"),
            (Array("off"), "offsets are the array off: the number of components must be given"),
        ],
    )
    def test_refused(self, offsets: Any, message: str) -> None:
        with pytest.raises(DomainError, match=message):
            RaggedIterDomain.from_offsets(offsets)


def test_parallelize_reaches_every_component() -> None:
    r = RaggedIterDomain.of([IterDomain(3), IterDomain(5)])
    spread = r.parallelize(ParallelType.THREAD_X)
    assert [d.parallel for d in spread.nested_domains] == [ParallelType.THREAD_X] * 2
    assert [d.parallel for d in r.nested_domains] == [ParallelType.SERIAL] * 2
    made = partition(IterDomain(8), [0, 3, 8])[1]
    assert [d.parallel for d in made.parallelize(ParallelType.BLOCK_X).nested_domains] == [ParallelType.BLOCK_X] * 2
    assert [d.extent for d in made.nested_domains] == [3, 5]
    assert made.nested_domains is made.nested_domains


def test_parts_of_parts_have_ragged_components() -> None:
    inner = partition(partition(IterDomain(10), [0, 3, 10])[1], [[0, 1, 3], [0, 7, 7]])[1]
    assert [d.extents for d in inner.nested_domains] == [(1, 2), (7, 0)]  # type: ignore[attr-defined]


def test_every_parallel_type_prints() -> None:
    names = "serial grid lanes vectorize unroll block_x block_y block_z thread_x thread_y thread_z mesh"
    assert " ".join(p.value for p in ParallelType) == names
    r = RaggedIterDomain.from_extents([3, 5], name="r")
    assert str(r.parallelize(ParallelType.MESH)) == "ragged.r{[3, 5]}.mesh"


class TestExtentsUnder:
    def test_a_split_component(self) -> None:
        g = IterDomain(2)
        c, r = partition(IterDomain(100), [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[g])
        moved = regroup(g, c, r)[1]
        assert moved.extents_under(c) == moved.extents == (55, 35, 65, 45)
        assert moved.extents_under(*split(c, 2)) == ((55, 35), (65, 45))
        assert r.extents_under(g, *split(c, 2)) == (((30, 0), (40, 30)), ((25, 35), (25, 15)))

    def test_a_partitioned_component(self) -> None:
        # Two devices with five and three experts, and the tokens of each.
        tokens = RaggedIterDomain.from_extents([127, 0, 198, 64, 89, 103, 45, 201])
        device, expert = partition(tokens.component, [0, 5, 8])
        assert (device.extent, expert.extents) == (2, (5, 3))
        assert tokens.extents_under(device, expert) == ((127, 0, 198, 64, 89), (103, 45, 201))

    def test_what_an_indivisible_split_adds_is_absent(self) -> None:
        r = RaggedIterDomain.from_extents([1, 2, 3, 4, 5])
        o, n = split(r.component, 3)
        assert r.extents_under(o, n) == ((1, 2, 3), (4, 5))
        assert r.extents_under(o, *split(n, 2)) == (((1, 2), (3,)), ((4, 5), ()))
        assert r.extents_under(*split(r.component, 4, inner=False)) == ((1, 2), (3, 4), (5,), ())

    def test_in_another_order(self) -> None:
        r = RaggedIterDomain.from_extents([1, 2, 3, 4])
        o, n = split(r.component, 2)
        assert r.extents_under(n, o) == ((1, 3), (2, 4))

    def test_refused(self) -> None:
        r = RaggedIterDomain.from_extents([1, 2, 3, 4])
        with pytest.raises(DomainError, match=r"the index of .* does not follow from"):
            r.extents_under(split(r.component, 2)[0])
        unknown = RaggedIterDomain.from_extents(Array("n"), 4)
        with pytest.raises(DomainError, match="known only when the program runs"):
            unknown.extents_under(unknown.component)


class TestTraverse:
    def test_reaches_the_array_that_extents_come_from(self) -> None:
        off = Array("off")
        d = IterDomain(symbol("n"))
        c, r = partition(d, off, 3)
        outer = split(r, 64)[0]
        found = traverse(combine(c, outer))
        for node in (off, c, r, outer, d, c.definition, outer.definition):
            assert any(node is x or node == x for x in found)
        assert sum(1 for x in found if x == off) == 1

    def test_reaches_component_domains(self) -> None:
        components = [IterDomain(3), IterDomain(5)]
        r = RaggedIterDomain.of(components)
        found = [x.uid for x in traverse(r) if isinstance(x, IterDomain)]
        assert {r.uid, r.component.uid, *(d.uid for d in components)} <= set(found)
        assert len(found) == len(set(found))

    def test_reaches_what_an_array_is_derived_from(self) -> None:
        counts = Array("counts")
        r = RaggedIterDomain.from_extents(counts, symbol("k"))
        found = traverse(r)
        assert counts in found
        assert any(isinstance(x, Array) and isinstance(x.recipe, RunningSum) for x in found)


def test_where_rows_begin() -> None:
    r = RaggedIterDomain.from_extents([3, 0, 2])
    assert running_sum(r.component, r.length).data == offsets_array(r).data == (0, 3, 3, 5)
    assert offsets_array(merge(r, IterDomain(4))).data == (0, 12, 12, 20)  # type: ignore[arg-type]
    off = Array("off")
    unknown = partition(IterDomain(symbol("n")), off, symbol("k"))[1]
    assert offsets_array(unknown) == off
    assert isinstance(running_sum(unknown.component, unknown.length).recipe, RunningSum)


@pytest.mark.parametrize(
    "make",
    [
        lambda: partition(partition(IterDomain(10), [0, 3, 10])[1], [[0, 1, 3], [0, 7, 7]])[1],
        lambda: partition(IterDomain(12), [1, 5], lengths=[2, 4])[1],
        lambda: split(RaggedIterDomain.from_extents([3, 0, 5]), 2)[0],
    ],
    ids=["parts of rows", "rows with gaps", "tiles"],
)
def test_offsets_for_components_are_of_rows_back_to_back(make: Callable[[], RaggedIterDomain]) -> None:
    r = make()
    count = r.component.extent
    assert isinstance(count, int)
    lengths = [r.extent_for_component(k) for k in range(count)]
    assert [r.offset_for_component(k) for k in range(count)] == [0, *itertools.accumulate(lengths)][:-1]  # type: ignore[arg-type]


def test_a_length_is_a_function_of_the_coordinate() -> None:
    r = RaggedIterDomain.from_extents([3, 5, 2])
    assert r.length.symbols == {COORDINATE}
    assert r.row_length is r.length
    assert IterDomain(7).row_length.value == 7
