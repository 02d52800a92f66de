"""Vectorized loops: which are whole wherever they are entered.

In: splits and merges of all kinds. Out: failures where a vector that a guard would cut is allowed, or a whole one refused.
"""

from __future__ import annotations

import pytest

from serrate.analysis import check_vectorized
from serrate.errors import DomainError
from serrate.ir import IterDomain, ParallelType, merge, partition, resize, split
from serrate.ir.expr import Array, symbol


def vectorized(domain: IterDomain, size: int) -> list[IterDomain]:
    outer, inner = split(domain, size)
    return [outer, inner.parallelize(ParallelType.VECTORIZE)]


def test_thirty_two_in_eight_parts_of_vectors_of_four() -> None:
    d = IterDomain(32)
    outer, inner = split(d, 8, inner=False)
    check_vectorized([d], [outer, *vectorized(inner, 4)])


def test_eight_in_eight_parts_has_no_vectors_of_four() -> None:
    d = IterDomain(8)
    outer, inner = split(d, 8, inner=False)
    with pytest.raises(DomainError, match="4 does not divide 1"):
        check_vectorized([d], [outer, *vectorized(inner, 4)])


@pytest.mark.parametrize(
    ("extent", "tile", "message"),
    [(28, 8, None), (30, 8, "4 does not divide 30"), (30, 6, "4 does not divide 6"), (symbol("n") * 4, 8, None)],
)
def test_tiles_of_vectors(extent: int, tile: int, message: str | None) -> None:
    # A guard on 28 lets a vector of four through as a whole although 8 does not divide 28.
    d = IterDomain(extent)
    outer, inner = split(d, tile)
    loop = [outer, *vectorized(inner, 4)]
    if message is None:
        check_vectorized([d], loop)
    else:
        with pytest.raises(DomainError, match=message):
            check_vectorized([d], loop)


def test_a_merged_domain() -> None:
    a, b = IterDomain(2), IterDomain(8)
    check_vectorized([a, b], vectorized(merge(a, b), 4))
    with pytest.raises(DomainError, match="4 does not divide 6"):
        check_vectorized([a, b], vectorized(merge(a, IterDomain(6)), 4))


def test_rows() -> None:
    d = IterDomain(20)
    c, r = partition(d, [0, 8, 20])
    check_vectorized([d], [c, *vectorized(r, 4)])
    c, r = partition(d, [0, 7, 20])
    with pytest.raises(DomainError, match=r"4 does not divide ragged\..*{\[7, 13\]}"):
        check_vectorized([d], [c, *vectorized(r, 4)])
    c, r = partition(IterDomain(symbol("n")), Array("off"), 3)
    with pytest.raises(DomainError, match="4 does not divide ragged"):
        check_vectorized([c, r], [c, *vectorized(r, 4)])


def test_what_cannot_be_a_vector() -> None:
    d = IterDomain(32)
    outer, inner = split(d, 8)
    with pytest.raises(DomainError, match=r"positions of .* are not neighbours, because .* came of `split 8`"):
        check_vectorized([d], [outer.parallelize(ParallelType.VECTORIZE), inner])
    with pytest.raises(DomainError, match="came of `resize 1, 0`"):
        check_vectorized([d], vectorized(resize(d, 1, 0), 3))
    with pytest.raises(DomainError, match="must be known when the program is compiled"):
        check_vectorized([d], [IterDomain(symbol("n"), parallel=ParallelType.VECTORIZE)])


def test_loops_without_vectors_are_not_looked_at() -> None:
    d = IterDomain(7)
    check_vectorized([d], split(d, 4))
