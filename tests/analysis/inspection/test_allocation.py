"""Places and holes: worked cases, and random chains against a count of the loops' positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from serrate import ir, ops
from serrate.analysis import allocation, visits
from serrate.errors import DomainError
from serrate.ir import IterDomain, combine, cover, merge, partition, restrict, split
from serrate.ir.domains import COORDINATE
from tests.analysis.chains import Chain, build, chains


def test_six_as_two_by_four_takes_eight_slots() -> None:
    found = allocation(split(IterDomain(6), 4))
    assert (found.extents, found.elements, found.holes) == ((2, 4), 8, 2)
    assert list(found.where()) == [(1, 2), (1, 3)]


def test_a_split_that_divides_makes_no_holes() -> None:
    found = allocation(split(IterDomain(8), 4))
    assert (found.elements, found.holes, list(found.where())) == (8, 0, [])
    assert found.explain() == "[2, 4]: 8 slots, no holes"


def test_rows_in_blocks_back_to_back_and_padded() -> None:
    whole = IterDomain(512)
    c, r = partition(whole, [0, 100, 250, 512])
    blocks = allocation([c, *split(r, 128)])
    assert (blocks.extents, blocks.starts, blocks.elements, blocks.holes) == ((3, (1, 2, 3), 128), (0, 128, 384), 768, 256)
    assert len(list(blocks.where())) == 256
    back_to_back = allocation([c, r])
    assert (back_to_back.starts, back_to_back.elements, back_to_back.holes) == ((0, 100, 250), 512, 0)
    padded = allocation([c, cover(r, 262)])
    assert (padded.starts, padded.elements, padded.holes) == ((0, 262, 524), 786, 274)
    assert allocation([whole]).elements == 512
    listed = allocation([combine(c, split(r, 128)[0]), split(r, 128)[1]])
    assert (listed.elements, listed.holes) == (768, 256)


def test_padding_to_tiles_of_64() -> None:
    c, r = partition(IterDomain(325), [0, 127, 127, 325])
    assert allocation([c, *split(r, 64)]).elements == 384


def test_regular_dims_inside_count_for_each_place() -> None:
    c, r = partition(IterDomain(10), [0, 3, 8, 10])
    found = allocation([c, *split(r, 4), IterDomain(5)])
    assert (found.starts, found.elements, found.holes) == ((0, 20, 60), 80, 30)


def test_nested_rows_with_as_many_parts() -> None:
    c, r = partition(IterDomain(325), [0, 127, 127, 325])
    part, inner = partition(r, [[0, 50, 127], [0, 0, 0], [0, 100, 198]])
    found = allocation([c, part, *split(inner, 64)])
    assert (found.elements, found.holes) == (448, 123)


def test_nested_rows_with_a_varying_number_of_parts() -> None:
    sentence, word = partition(IterDomain(10), [0, 1, 4, 4, 10])
    document, of_document = partition(sentence, [0, 3, 4])
    found = allocation([document, of_document, *split(word, 4)])
    assert (found.extents, found.elements, found.holes) == ((2, (3, 1), (1, 1, 0, 2), 4), 16, 6)
    blocked = allocation([document, *split(of_document, 2), word])
    assert (blocked.elements, blocked.holes) == (10, 0)


def test_a_component_that_does_not_exist_has_no_slots() -> None:
    c, r = partition(IterDomain(10), [0, 3, 8, 10])
    found = allocation([*split(c, 2), *split(r, 4)])
    assert (found.elements, found.holes) == (16, 6)
    assert len(list(found.where())) == 6


def test_two_ragged_dims_of_one_component() -> None:
    c, queries = partition(IterDomain(5), [0, 2, 5])
    keys = ir.RaggedIterDomain(7, component=c, length=queries.length + 1)
    assert allocation([c, queries, keys], [c, queries, keys]).elements == 2 * 3 + 3 * 4


def test_independent_pairs_multiply() -> None:
    c1, r1 = partition(IterDomain(5), [0, 2, 5])
    c2, r2 = partition(IterDomain(7), [0, 3, 7])
    assert allocation([c1, r1, c2, *split(r2, 4)]).elements == 5 * 8


def test_lengths_known_only_when_run() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        c, r, d = ops.as_nested(x, offsets).domains
    found = allocation([c, *split(r, 128), d])
    assert str(found.elements) == "sum((T1[c + 1] - T1[c] + 127) // 128)[n1 - 1]*512"
    assert str(found.starts) == f"sum((T1[c + 1] - T1[c] + 127) // 128*512)[{COORDINATE}]"
    with pytest.raises(DomainError, match="only if extents and lengths are known"):
        list(found.where())


def test_a_sub_range_is_what_is_stored() -> None:
    found = allocation(split(restrict(IterDomain(10), 2, 8), 4))
    assert (found.elements, found.holes) == (8, 2)


def test_rows_without_their_component_are_refused() -> None:
    _, r = partition(IterDomain(10), [0, 3, 8, 10])
    with pytest.raises(DomainError, match="rows need the dims that select them"):
        _ = allocation([r], [r]).elements
    with pytest.raises(DomainError, match="so there are no rows"):
        _ = allocation(split(IterDomain(6), 4)).starts


def test_a_component_inside_a_merge() -> None:
    c, r = partition(IterDomain(10), [0, 3, 8, 10])
    o, n = split(r, 2)
    inside = merge(n, c)
    whole = allocation([*split(inside, 3), o])
    assert (whole.elements, whole.holes) == (12, 2), "two lanes of 2 + 3 + 1 tiles"
    # Where 4 leaves holes the component is found all the same, with lanes that no tile has: those are not summed.
    with pytest.raises(DomainError, match="rows need the dims that select them"):
        _ = allocation([*split(inside, 4), o]).elements


@settings(max_examples=150, deadline=None)
@given(chains, st.integers(0, 1000))
def test_slots_are_the_positions_of_the_loops(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    assume(built is not None and built.size < 3000)
    assert built is not None
    found = allocation(built.loop, built.logical)
    try:
        _ = found.elements
    except DomainError:
        reject()  # a component inside a tile of other things, whose rows can be visited but not summed
    holes = list(found.where())
    filled = visits(built.loop, built.loop, found.guards)
    assert found.elements == len(holes) + len(filled)
    assert found.holes == len(holes)
