"""Storage: which domains a tensor over rows is laid out by, and that every element has a place of its own.

In: logical domains of all compositions. Out: failures of extents, and of places by brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from serrate.analysis import Indices
from serrate.errors import ShapeError
from serrate.ir import IterDomain, RaggedIterDomain, merge, partition, product, split
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, as_expr, symbol
from serrate.ir.storage import collapse, storage_of
from tests.analysis.chains import all_positions

GROUPED = [[0, 3, 3, 7, 10], [0, 2, 6, 8, 10]]


def beside(ragged: RaggedIterDomain, *lengths: int) -> IterDomain:
    """Other rows of the same components."""
    return ragged.with_rows(Array(f"other{list(lengths)}", lengths)[COORDINATE], name="other")


def rows() -> list[IterDomain]:
    return [*partition(IterDomain(10), [0, 3, 3, 10]), IterDomain(4)]


def under() -> list[IterDomain]:
    g = IterDomain(2)
    return [g, *partition(IterDomain(10), GROUPED, under=[g]), IterDomain(3)]


def tiles_under() -> list[IterDomain]:
    g = IterDomain(2)
    c, r = partition(IterDomain(10), GROUPED, under=[g])
    return [g, c, split(r, 2)[0]]


def under_two() -> list[IterDomain]:
    a, b = IterDomain(2), IterDomain(2)
    c, r = partition(IterDomain(3), [[[0, 1, 3], [0, 0, 3]], [[0, 2, 3], [0, 3, 3]]], under=[a, b])
    return [a, b, c, split(r, 2)[0]]


def pairs() -> list[IterDomain]:
    c, r = partition(IterDomain(10), [0, 3, 3, 10])
    return [c, r, beside(r, 2, 5, 1)]


def three_of_one_component() -> list[IterDomain]:
    c, r = partition(IterDomain(6), [0, 2, 2, 6])
    return [c, r, beside(r, 2, 5, 1), beside(r, 1, 0, 2)]


def parts() -> list[IterDomain]:
    c, r = partition(IterDomain(10), [0, 3, 3, 10])
    return [c, *partition(r, [[0, 1, 3], [0, 0, 0], [0, 7, 7]])]


def parts_in_pairs() -> list[IterDomain]:
    c, r = partition(IterDomain(10), [0, 3, 3, 10])
    p, q = partition(r, [[0, 1, 3], [0, 0, 0], [0, 7, 7]])
    return [c, p, q, beside(q, 1, 2, 0, 1, 2, 3)]


def documents() -> list[IterDomain]:
    sentence, word = partition(IterDomain(10), [0, 3, 3, 8, 10])
    return [*partition(sentence, [0, 1, 4]), word]


def documents_in_pairs() -> list[IterDomain]:
    sentence, word = partition(IterDomain(10), [0, 3, 3, 8, 10])
    return [*partition(sentence, [0, 1, 4]), word, beside(word, 1, 2, 0, 2)]


def independent() -> list[IterDomain]:
    return [*partition(IterDomain(10), [0, 3, 3, 10]), *partition(IterDomain(5), [0, 4, 5])]


def with_gaps() -> list[IterDomain]:
    return [*partition(IterDomain(12), [1, 6], lengths=[3, 4])]


@pytest.mark.parametrize(
    ("make", "extents"),
    [
        (rows, [10, 4]),
        (under, [2, 10, 3]),
        (tiles_under, [11]),
        (under_two, [8]),
        (pairs, [13]),
        (three_of_one_component, [12]),
        (parts, [10]),
        (parts_in_pairs, [19]),
        (documents, [10]),
        (documents_in_pairs, [7]),
        (independent, [10, 5]),
        (with_gaps, [7]),
    ],
)
def test_every_element_has_a_place_of_its_own(make: Callable[[], list[IterDomain]], extents: list[int]) -> None:
    logical = make()
    storage = storage_of(logical)
    assert [d.extent for d in storage] == extents
    places = [place(logical, position, storage) for position in all_positions(logical)]
    assert len(set(places)) == len(places)
    total = 1
    for size in extents:
        total *= size
    assert len(places) == total


def place(logical: Sequence[IterDomain], position: tuple[int, ...], storage: Sequence[IterDomain]) -> tuple[int, ...]:
    indices = Indices([(d, as_expr(at)) for d, at in zip(logical, position, strict=True)])
    found = tuple(indices.of(d).value for d in storage)
    assert all(at is not None and 0 <= at < d.extent for at, d in zip(found, storage, strict=True))  # type: ignore[operator]
    return found  # type: ignore[return-value]


def test_the_domain_that_was_partitioned_is_given_back() -> None:
    d, g = IterDomain(10), IterDomain(2)
    assert storage_of(partition(d, [0, 3, 10])) == (d,)
    assert storage_of([g, *partition(d, GROUPED, under=[g])])[1] is d


def test_sizes_are_known_on_the_host() -> None:
    n, k = symbol("n"), symbol("k")
    c, r = partition(IterDomain(n), Array("off"), k)
    packed = storage_of([c, product(r, split(r, 4)[0])])[0]
    assert str(packed.host_bound) == "(k + n // 4)*n"
    g = IterDomain(symbol("g"))
    part, inner = partition(IterDomain(n), Array("off"), 4, under=[g])
    tiles = storage_of([g, part, split(inner, 8)[0]])[0]
    assert str(tiles.host_bound) == "g*4 + g*n // 8"
    assert not tiles.host_bound.arrays
    assert not merge(tiles, IterDomain(4)).host_bound.arrays


def test_rows_without_their_component_have_no_storage() -> None:
    _, r = partition(IterDomain(10), [0, 3, 10])
    with pytest.raises(ShapeError, match="a ragged dim needs the dims that count its rows"):
        storage_of([r, IterDomain(4)])
    g = IterDomain(2)
    c, q = partition(IterDomain(10), GROUPED, under=[g])
    with pytest.raises(ShapeError, match="cannot be stored"):
        storage_of([c, split(q, 2)[0]])


def test_what_stands_alone_stays() -> None:
    a, b = IterDomain(3), IterDomain(4)
    assert collapse([a, b]) == (a, b)
    _, r = partition(IterDomain(10), [0, 3, 10])
    assert collapse([r]) == (r,)
