"""Vectorized loops: which are whole wherever they are entered.

In: splits and merges of all kinds. Out: failures where a vector that a guard would cut is allowed, or a whole one refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from serrate.analysis import check_vectorized
from serrate.analysis.vectors import vector_access
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
    a, b = IterDomain(2), IterDomain(6)
    # Vectors of four run on from one row of six into the next, which follows in memory.
    check_vectorized([a, b], vectorized(merge(a, b), 4))
    with pytest.raises(DomainError, match="8 does not divide 12"):
        check_vectorized([a, b], vectorized(merge(a, b), 8))
    with pytest.raises(DomainError, match="are apart in memory"):
        check_vectorized([a, b], vectorized(merge(a, b), 4), [b, a])
    with pytest.raises(DomainError, match=r"4 does not divide the extent of .*, 6"):
        check_vectorized([a, b], vectorized(merge(a, b), 4), [a, *split(b, 4)])


def test_rows() -> None:
    d = IterDomain(20)
    c, r = partition(d, [0, 8, 20])
    check_vectorized([d], [c, *vectorized(r, 4)])
    c, r = partition(d, [0, 7, 20])
    with pytest.raises(DomainError, match=r"4 does not divide \[7, 13\], the lengths of"):
        check_vectorized([d], [c, *vectorized(r, 4)])
    c, r = partition(IterDomain(symbol("n")), Array("off"), 3)
    with pytest.raises(DomainError, match=r"4 does not divide .*, the lengths of"):
        check_vectorized([c, r], [c, *vectorized(r, 4)])


def test_what_cannot_be_a_vector() -> None:
    d = IterDomain(32)
    outer, inner = split(d, 8)
    with pytest.raises(DomainError, match=r"positions of .* are not adjacent, because .* comes from `split 8`"):
        check_vectorized([d], [outer.parallelize(ParallelType.VECTORIZE), inner])
    with pytest.raises(DomainError, match="comes from `resize 1, 0`"):
        check_vectorized([d], vectorized(resize(d, 1, 0), 3))
    with pytest.raises(DomainError, match="must be known when the program is compiled"):
        check_vectorized([d], [IterDomain(symbol("n"), parallel=ParallelType.VECTORIZE)])


def test_loops_without_vectors_are_not_looked_at() -> None:
    d = IterDomain(7)
    check_vectorized([d], split(d, 4))


# --- every small layout, address by address ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Loops and memory in plain numbers: dims from `first` on become one loop, which is split by `tile` and then by `size`."""

    extents: tuple[int, ...]
    first: int
    tile: int | None
    size: int
    has: tuple[bool, ...]
    """Which dims the tensor has; it is the same along the others."""
    block: tuple[int, int] | None
    """A dim of the tensor that is stored in blocks, and their size."""
    order: tuple[int, ...]
    """The dims of its memory, outermost first."""

    def storage(self) -> list[int]:
        """The extents of the memory's dims, before they are put in order."""
        own = [n for n, there in zip(self.extents, self.has, strict=True) if there]
        if self.block is not None:
            dim, size = self.block
            own[dim : dim + 1] = [-(-own[dim] // size), size]
        return own

    def address(self, index: Sequence[int]) -> int:
        own = [i for i, there in zip(index, self.has, strict=True) if there]
        if self.block is not None:
            dim, size = self.block
            own[dim : dim + 1] = [own[dim] // size, own[dim] % size]
        found = 0
        for k in self.order:
            found = found * self.storage()[k] + own[k]
        return found

    def vectors(self) -> Iterator[list[int | None]]:
        """The addresses of every vector; None for a lane that a guard keeps from running."""
        outer, merged = self.extents[: self.first], self.extents[self.first :]
        whole = math.prod(merged)
        tile = whole if self.tile is None else self.tile
        for before in itertools.product(*map(range, outer)):
            for o, i in itertools.product(range(-(-whole // tile)), range(-(-tile // self.size))):
                lanes: list[int | None] = []
                for v in range(self.size):
                    within = i * self.size + v
                    at = o * tile + within
                    if within >= tile or at >= whole:
                        lanes.append(None)
                        continue
                    index: list[int] = []
                    for extent in reversed(merged):
                        at, rest = divmod(at, extent)
                        index.insert(0, rest)
                    lanes.append(self.address((*before, *index)))
                yield lanes

    def is_legal(self) -> bool:
        """Whether all vectors are neighbours from a multiple of the size on, or one element each; none runs in part."""
        if not any(self.has[self.first :]):
            return True  # no lane is anywhere else, whichever of them run
        running = [lanes for lanes in self.vectors() if lanes.count(None) < self.size]
        if any(None in lanes for lanes in running):
            return False
        if all(len(set(lanes)) == 1 for lanes in running):
            return True
        starts = [lanes[0] or 0 for lanes in running]
        return all(
            start % self.size == 0 and lanes == [start + v for v in range(self.size)]
            for start, lanes in zip(starts, running, strict=True)
        )

    def as_analysed(self) -> bool:
        dims = [IterDomain(n) for n in self.extents]
        domain = dims[self.first]
        for inner in dims[self.first + 1 :]:
            domain = merge(domain, inner)
        tiles = [] if self.tile is None else [split(domain, self.tile)]
        outer, vector = split(tiles[0][1] if tiles else domain, self.size)
        loops = [*dims[: self.first], *(t[0] for t in tiles), outer, vector]
        own = [d for d, there in zip(dims, self.has, strict=True) if there]
        memory = list(own)
        if self.block is not None:
            dim, size = self.block
            memory[dim : dim + 1] = split(own[dim], size)
        found = vector_access(vector, loops, tuple(own), own, [memory[k] for k in self.order])
        assert found.legal is not None, "all extents are known"
        return found.legal


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    extents = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    has = tuple(draw(st.lists(st.booleans(), min_size=len(extents), max_size=len(extents)).filter(any)))
    count = sum(has)
    blocked = draw(st.none() | st.tuples(st.integers(0, count - 1), st.sampled_from([2, 3, 4])))
    order = draw(st.permutations(range(count + (blocked is not None))))
    first = draw(st.integers(0, len(extents) - 1))
    tile, size = draw(st.none() | st.sampled_from([2, 4, 6, 8])), draw(st.sampled_from([2, 3, 4]))
    return Layout(extents, first, tile, size, has, blocked, tuple(order))


@given(layouts())
@example(Layout((2, 2), 0, None, 4, (True, True), (1, 4), (1, 0, 2)))  # blocks of four that hold two elements each
def test_what_is_legal_touches_neighbours(layout: Layout) -> None:
    assert layout.is_legal() or not layout.as_analysed()


@given(layouts())
def test_what_is_refused_touches_places_apart(layout: Layout) -> None:
    # A tile that is larger than everything may cut vectors where nothing is.
    assume(layout.tile is None or layout.tile < math.prod(layout.extents[layout.first :]))
    if layout.block is not None:
        dim, _ = layout.block
        # One block alone, or blocks whose elements are outermost, may happen to be neighbours.
        assume(layout.storage()[dim] > 1 and layout.order.index(dim) < layout.order.index(dim + 1))
    assert layout.as_analysed() or not layout.is_legal()
