"""Domains: extents, rows, equality by structure, printing.

In: regular and ragged domains. Out: failures where a number, a refusal or a text is not what it should be.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serrate.errors import DomainError
from serrate.ir import IterDomain, IterType, ParallelType, RaggedIterDomain, merge, partition, split
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, const, symbol


def rows(*lengths: int) -> RaggedIterDomain:
    """A ragged domain with these rows."""
    offsets = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    return partition(IterDomain(offsets[-1]), offsets)[1]


def test_extents_are_ints_where_known() -> None:
    n = symbol("n")
    assert IterDomain(325).extent == 325
    assert IterDomain(const(4)).extent == 4
    assert IterDomain(n).extent is n
    assert IterDomain(0).extent == 0


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        (-1, "must not be negative, got -1"),
        (2.5, "must be an integer or an expression, got 2.5"),
        (None, "must be an integer or an expression, got None"),
        (True, "must be an integer or an expression, got True"),
    ],
)
def test_bad_extents_are_refused(extent: Any, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        IterDomain(extent)


@pytest.mark.parametrize("start", [-1, 2.5, symbol("n")])
def test_bad_starts_are_refused(start: Any) -> None:
    with pytest.raises(DomainError, match="the start must be an integer and not negative, got"):
        IterDomain(4, start=start)


def test_a_ragged_domain_counts_all_its_rows() -> None:
    r = rows(3, 5, 2)
    assert (r.extent, r.extents, r.offsets) == (10, (3, 5, 2), (0, 3, 8, 10))
    assert r.component.extent == 3
    assert r.is_ragged
    assert not r.component.is_ragged
    assert [r.extent_for_component(k) for k in range(3)] == [3, 5, 2]
    assert [r.offset_for_component(k) for k in range(3)] == [0, 3, 8]


def test_no_rows_at_all() -> None:
    c, r = partition(IterDomain(0), [0])
    assert (c.extent, r.extent, r.extents, r.offsets) == (0, 0, (), (0,))


@given(st.lists(st.integers(0, 9), max_size=8))
def test_rows_of_any_lengths(lengths: list[int]) -> None:
    r = rows(*lengths)
    assert (r.extent, r.extents) == (sum(lengths), tuple(lengths))
    outer = split(r, 3)[0]
    assert isinstance(outer, RaggedIterDomain)
    tiles = [-(-length // 3) for length in lengths]
    assert (outer.extent, outer.extents) == (sum(tiles), tuple(tiles))
    # The rows of the outer part have no place in a common domain, and yet a first position.
    assert [outer.offset_for_component(k) for k in range(len(tiles))] == [sum(tiles[:k]) for k in range(len(tiles))]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_component_that_does_not_exist_is_refused(index: int) -> None:
    r = rows(3, 5, 2)
    with pytest.raises(DomainError, match=f"component {index} does not exist; it has 3 components"):
        r.extent_for_component(index)
    with pytest.raises(DomainError, match=f"component {index} does not exist; it has 3 components"):
        r.offset_for_component(index)


def test_rows_need_a_component() -> None:
    with pytest.raises(DomainError, match="needs the domain of its components, got None"):
        RaggedIterDomain(10)


def test_equality_is_by_structure() -> None:
    assert IterDomain(4) == IterDomain(4)
    assert IterDomain(4) != IterDomain(5)
    assert IterDomain(4) != IterDomain(4, IterType.REDUCTION)
    assert IterDomain(4) != IterDomain(4, parallel=ParallelType.LANES)
    assert IterDomain(4) != IterDomain(4, start=1)
    assert IterDomain(4) != IterDomain(4, is_rfactor=True)
    assert IterDomain(4).uid != IterDomain(4).uid
    assert rows(3, 5, 2) == rows(3, 5, 2)
    assert rows(3, 5, 2) != rows(5, 3, 2)
    assert rows(12, 20, 8) == merge(rows(3, 5, 2), IterDomain(4))
    assert rows(3, 5, 2) != "rows"


def test_ragged_is_never_equal_to_regular() -> None:
    assert rows(3, 5, 2) != IterDomain(10)
    assert IterDomain(10) != rows(3, 5, 2)
    assert rows(10) != IterDomain(10)
    assert rows() != IterDomain(0)


def test_equal_domains_have_equal_hashes() -> None:
    assert hash(rows(3, 5, 2)) == hash(rows(3, 5, 2))
    assert hash(rows(12, 20, 8)) == hash(merge(rows(3, 5, 2), IterDomain(4)))
    assert len({IterDomain(4), IterDomain(4), IterDomain(5)}) == 2


def test_rows_known_only_when_run() -> None:
    off = Array("off")
    c, r = partition(IterDomain(symbol("n")), off, symbol("k"))
    other = partition(IterDomain(symbol("n")), off, symbol("k"))[1]
    assert r == other
    assert r.length_of(2) is off[3] - off[2]
    assert r.start_of(2) is off[2]
    assert c.extent is symbol("k")
    with pytest.raises(DomainError, match="known only when the program runs"):
        _ = r.extents


def test_rows_without_a_common_place() -> None:
    outer = split(rows(3, 5, 2), 2)[0]
    assert isinstance(outer, RaggedIterDomain)
    with pytest.raises(DomainError, match=r"do not come from a partitioned domain; combine it with .* first"):
        outer.start_of(1)


def test_parallelize_gives_a_new_domain_of_the_same_index() -> None:
    r = rows(3, 5, 2)
    spread = r.parallelize(ParallelType.GRID)
    assert spread.parallel is ParallelType.GRID
    assert r.parallel is ParallelType.SERIAL
    assert spread.uid == r.uid
    assert isinstance(spread, RaggedIterDomain)
    assert spread.extents == r.extents
    assert spread != r


def test_printing() -> None:
    n = symbol("n")
    assert str(IterDomain(325, name="i")) == "i.i{325}"
    assert str(IterDomain(n, name="i")) == "i.i{n}"
    assert str(IterDomain(8, IterType.REDUCTION, name="k")) == "r.k{8}"
    assert str(IterDomain(8, IterType.BROADCAST, ParallelType.LANES, name="k")) == "b.k{8}.lanes"
    c, r = partition(IterDomain(325, name="i"), [0, 127, 127, 325], names=("c", "r"))
    assert (str(c), str(r)) == ("i.c{3}", "ragged.r{[127, 0, 198]}")
    assert str(r.parallelize(ParallelType.GRID)) == "ragged.r{[127, 0, 198]}.grid"
    unknown = partition(IterDomain(n), Array("off"), 3, names=("c", "r"))[1]
    assert str(unknown) == "ragged.r{off[c + 1] - off[c]}"
    assert str(rows()).endswith("{[]}")


def test_a_name_is_made_where_none_is_given() -> None:
    d = IterDomain(4)
    assert d.name == f"i{d.uid}"


def test_the_array_of_its_lengths_is_reached_from_a_domain() -> None:
    off = Array("off")
    r = partition(IterDomain(symbol("n")), off, 3)[1]
    assert r.length.arrays == {off}
    assert r.length.symbols == {COORDINATE}


def test_a_domain_is_spread_by_a_kind_or_its_name_and_by_nothing_else() -> None:
    assert IterDomain(4).parallelize("grid").parallel is ParallelType.GRID
    with pytest.raises(DomainError, match="'nonsense' is not a parallel type: choose from serial, grid"):
        IterDomain(4).parallelize("nonsense")
    with pytest.raises(DomainError, match="did you mean 'lanes'"):
        IterDomain(4).parallelize("lane")


def test_tuples_of_domains_print_as_domains_do() -> None:
    rows = partition(IterDomain(10, name="d"), [0, 3, 3, 10], names=("c", "r"))
    assert repr(rows) == "(i.c{3}, ragged.r{[3, 0, 7]})" and repr(split(rows[1], 4)[1]) == str(split(rows[1], 4)[1])
