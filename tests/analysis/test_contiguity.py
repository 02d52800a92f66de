"""Contiguous neighbours and wide accesses: worked cases, and every small layout against the places it touches."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serrate import ir, ops
from serrate.analysis import contiguous, merge_groups, wide_access
from serrate.errors import DomainError
from serrate.ir import IterDomain, cover, merge, partition, restrict, split
from serrate.ir.expr import symbol


def test_row_major_dims_merge_freely() -> None:
    dims = [IterDomain(2), IterDomain(5), IterDomain(symbol("n"))]
    assert contiguous(dims) == (True, True)
    assert contiguous(dims, strides=[5 * symbol("n"), symbol("n"), 1]) == (True, True)
    assert contiguous(dims, strides=[7 * symbol("n"), symbol("n"), 1]) == (False, True)


def test_holes_and_sub_ranges_break_contiguity() -> None:
    a, b, c = IterDomain(2), IterDomain(6), IterDomain(3)
    assert contiguous([a, b, c], [a, *split(b, 4), c]) == (False, True)
    assert contiguous([a, b, c], [a, *split(b, 3), c]) == (True, True)
    part = restrict(b, 1, 5)
    assert contiguous([a, part, c], [a, b, c]) == (False, True)
    assert contiguous([a, b], [merge(a, b)]) == (True,)
    assert [len(g) for g in merge_groups([a, b, c], contiguous([a, b, c], [a, *split(b, 4), c]))] == [1, 2]


def test_rows_back_to_back_are_contiguous_and_padded_ones_are_not() -> None:
    d = IterDomain(10)
    c, r = partition(d, [0, 3, 8, 10])
    assert contiguous([c, r], [d]) == (True,)
    assert contiguous([c, r]) == (True,)
    assert contiguous([c, r], [c, cover(r, 5)]) == (False,)
    assert contiguous([c, r], [c, *split(r, 4)]) == (False,)
    inner = IterDomain(4)
    assert contiguous([c, r, inner], [c, merge(r, inner)]) == (True, True)


def test_an_order_that_storage_does_not_have_is_refused() -> None:
    a, b = IterDomain(2), IterDomain(5)
    with pytest.raises(DomainError, match="are not in that order"):
        contiguous([b, a], [a, b])
    with pytest.raises(DomainError, match="one stride for each"):
        contiguous([a, b], strides=[1])
    c, r = partition(IterDomain(10), [0, 3, 8, 10])
    with pytest.raises(DomainError, match="is ragged"):
        contiguous([c, r], strides=[5, 1])


def test_an_extent_known_when_run_may_be_known_to_divide() -> None:
    n = symbol("n")
    for extent, legal in ((n * 8, True), (n * 8 + 2, False), (n * 8 + 4, True), (n * 2, None), (n * 2 * symbol("m") * 2, True)):
        assert wide_access([IterDomain(extent)], 4).legal is legal, str(extent)


def test_across_a_gap_the_size_must_divide_the_inner_extent() -> None:
    a, b = IterDomain(2), IterDomain(6)
    assert wide_access([a, b], 4, along=2)
    found = wide_access([a, b], 4, along=2, strides=[8, 1])
    assert found.legal is False
    assert "4 does not divide" in found.why
    assert wide_access([a, b], 2, along=2, strides=[8, 1])
    assert wide_access([a, b], 4, along=1).legal is False
    assert wide_access([a, IterDomain(8)], 4, along=2, strides=[12, 1])


def test_a_vector_needs_aligned_starts_and_a_box_does_not() -> None:
    dims = [IterDomain(2), IterDomain(8)]
    assert wide_access(dims, 4, along=2, strides=[10, 1]).legal is False
    assert wide_access(dims, 4, along=2, strides=[10, 1], kind="box")
    assert wide_access(dims, 4, strides=[8, 2]).legal is False


def test_extents_known_only_when_run() -> None:
    n = symbol("n")
    found = wide_access([IterDomain(2), IterDomain(n)], 4)
    assert found.legal is None and not found
    assert (4, n) in found.checks
    assert wide_access([IterDomain(2), IterDomain(n * 8)], 4)
    assert wide_access([IterDomain(n), IterDomain(6)], 4, along=1).legal is False


def test_a_vector_may_not_cross_the_end_of_a_row() -> None:
    c, r = partition(IterDomain(20), [0, 4, 12, 20])
    assert wide_access([c, r], 4)
    assert wide_access([c, r], 8).legal is False
    c, r = partition(IterDomain(10), [0, 3, 8, 10])
    assert wide_access([c, r], 2).legal is False
    assert wide_access([c, r], 2, along=2), "rows back to back are one dim of 10"
    assert wide_access([c, r, IterDomain(4)], 4)
    assert wide_access([c, r, IterDomain(4)], 4, along=2)
    assert wide_access([c, r, IterDomain(2)], 4, along=2).legal is False
    empty, rows = partition(IterDomain(0), [0])
    assert wide_access([empty, rows], 4)


def test_rows_with_gaps_need_starts_that_are_multiples() -> None:
    for starts, legal in (([0, 8, 16], True), ([0, 6, 12], False)):
        d = IterDomain(24)
        c, r = partition(d, starts, lengths=[4, 4, 4])
        assert contiguous([c, r], [d]) == (False,)
        assert wide_access([c, r], 4, storage=[d]).legal is legal
        assert wide_access([c, r], 4, storage=[d], kind="box")


def test_lengths_known_only_when_run_leave_a_check() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 8), torch.float32), f.input((None,), torch.int64)
        c, r, d = ops.as_nested(x, offsets).domains
    assert wide_access([c, r, d], 4)
    assert wide_access([c, r, d], 4, along=2)
    found = wide_access([c, r], 4)
    assert found.legal is None
    assert "T1[c + 1] - T1[c]" in found.why


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=3), st.integers(1, 8), st.data())
def test_a_legal_access_touches_neighbouring_places(dims: list[tuple[int, int]], size: int, data: st.DataObject) -> None:
    """Each dim has an extent and some padding behind it; the brute force lists the addresses of merged positions."""
    along = data.draw(st.integers(1, len(dims)))
    strides, step = [], 1
    for extent, padding in reversed(dims):
        strides.insert(0, step)
        step *= extent + padding
    domains = [IterDomain(extent) for extent, _ in dims]
    legal = bool(wide_access(domains, size, along=along, strides=strides, kind="box"))
    inner = itertools.product(*(range(e) for e, _ in dims[len(dims) - along :]))
    places = [sum(i * s for i, s in zip(index, strides[len(dims) - along :], strict=True)) for index in inner]
    pieces = [places[k : k + size] for k in range(0, len(places), size)]
    brute = all(piece == list(range(piece[0], piece[0] + size)) for piece in pieces)
    if legal:
        assert brute
    elif brute:
        # One step of an outer dim of extent 1 is never taken, so its stride does not matter; the rule does not look.
        assert any(e == 1 for e, _ in dims) or size == 1
