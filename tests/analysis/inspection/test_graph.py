"""The three maps of the domain graph: worked programs, and random chains done twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serrate import ir, ops
from serrate.analysis import DomainGraph
from serrate.errors import DomainError
from serrate.ir import IterDomain, IterType, RaggedIterDomain, combine, cover, merge, partition, restrict, split
from serrate.ir.expr import symbol
from serrate.ir.fusion import Equal
from serrate.lower.stages import stages
from tests.analysis.chains import Chain, build, chains, lengths


def test_membership_goes_by_index_and_not_by_extent() -> None:
    a, b = IterDomain(64), IterDomain(64)
    graph = DomainGraph([a, b])
    assert a == b and not graph.same(a, b)
    assert a in graph.exact(a) and b not in graph.exact(a)


def test_equal_transforms_of_exact_inputs() -> None:
    a, b = IterDomain(12), IterDomain(12)
    made = [split(a, 4), split(b, 4), split(b, 3), split(b, 3, inner=False), split(b, 4, inner=False)]
    graph = DomainGraph([d for pair in made for d in pair], same=[(a, b)])
    for k in (0, 1):
        assert graph.same(made[0][k], made[1][k])
        assert not graph.same(made[0][k], made[2][k])
    assert graph.same(made[2][0], made[4][0]), "3 inside is 4 outside"
    assert not graph.same(made[3][0], made[2][1]), "which is not 3 outside"


def test_outputs_tell_of_inputs() -> None:
    a, b, other = IterDomain(12), IterDomain(12), IterDomain(11)
    (ao, ai), (bo, bi), (oo, oi) = split(a, 4), split(b, 4), split(other, 4)
    assert DomainGraph([ao, bo], same=[(ao, bo), (ai, bi)]).same(a, b)
    assert not DomainGraph([ao, oo], same=[(ao, oo), (ai, oi)]).same(a, other), "11 and 12 split alike"


def test_extents_that_differ_are_not_exact() -> None:
    a, b = IterDomain(symbol("n")), IterDomain(symbol("m"))
    assert not DomainGraph([a, b], same=[(a, b)]).same(a, b)
    checked = DomainGraph([a, b], same=[(a, b)], checks=[Equal(symbol("n"), symbol("m"), "extents of a and b")])
    assert checked.same(a, b)
    assert "assumed: n = m  (extents of a and b)" in str(checked)


def test_structures_equal_by_value_map_exactly() -> None:
    d, e = IterDomain(10), IterDomain(10)
    (c1, r1), (c2, r2) = partition(d, [0, 3, 8, 10]), partition(e, [0, 3, 8, 10])
    (c3, r3) = partition(e, [0, 4, 8, 10])
    graph = DomainGraph([r1, r2, r3], same=[(c1, c2), (r1, r2), (c1, c3), (r1, r3)])
    assert graph.same(c1, c2) and graph.same(r1, r2) and graph.same(d, e)
    assert graph.same(c1, c3) and not graph.same(r1, r3)
    assert graph.same(r1, r3, "loop")
    apart = DomainGraph([r1, r2], same=[(r1, r2)])
    assert not apart.same(r1, r2), "rows of components that nothing ties together"


def test_rows_that_begin_elsewhere_come_from_other_domains() -> None:
    d, e = IterDomain(12), IterDomain(12)
    (c1, r1), (c2, r2) = (partition(x, starts, lengths=[3, 5, 2]) for x, starts in ((d, [0, 3, 8]), (e, [0, 4, 9])))
    graph = DomainGraph([r1, r2], same=[(c1, c2), (r1, r2)])
    assert graph.same(r1, r2) and not graph.same(d, e)


def test_a_component_taken_for_another_is_the_same_index() -> None:
    (c1, r1), (c2, _) = (partition(IterDomain(10), [0, 3, 8, 10]) for _ in range(2))
    assert DomainGraph([combine(c2, r1)]).same(c1, c2)


def test_what_does_nothing_is_permissive() -> None:
    d, one = IterDomain(12), IterDomain(1)
    whole, inner = split(d, 1)
    _, all_of_it = split(d, 12)
    too_wide = split(d, 16)[1]
    everything = restrict(d, 0, 12)
    part = restrict(d, 0, 11)
    made = [whole, inner, all_of_it, too_wide, everything, part, merge(d, one), merge(one, d)]
    graph = DomainGraph(made)
    for domain in (whole, all_of_it, everything, merge(d, one), merge(one, d)):
        assert graph.same(d, domain, "permissive") and not graph.same(d, domain)
    for domain in (inner, too_wide, part, one):
        assert not graph.same(d, domain, "permissive")


def test_one_component_is_the_whole() -> None:
    d = IterDomain(7)
    c, r = partition(d, [0, 7])
    graph = DomainGraph([c, r])
    assert graph.same(d, r, "permissive") and not graph.same(d, c, "permissive")


def test_what_follows_from_nothing_done_is_permissive_too() -> None:
    d = IterDomain(12)
    first, again = split(d, 4), split(split(d, 1)[0], 4)
    graph = DomainGraph([*first, *again])
    assert all(graph.same(a, b, "permissive") and not graph.same(a, b) for a, b in zip(first, again, strict=True))


def test_a_fusion() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        y, others = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        bias = f.input((4,), torch.float32)
        a, b = ops.as_nested(x, offsets), ops.as_nested(y, others)
        largest = ops.amax(a + b, 1, keepdim=True)
        f.output((a - largest) * bias)
    graph = DomainGraph(f)
    (c, r, d), (c2, r2, d2) = a.domains, b.domains
    assert graph.same(c, c2) and graph.same(r, r2) and graph.same(d, d2) and graph.same(d, bias.domains[0])
    assert graph.same(x.domains[0], y.domains[0]), "the flat dims, because their partitions are equal"
    one = largest.domains[1]
    assert graph.same(one, r, "permissive") and not graph.same(one, r)
    assert graph.promoted(one) is r
    assert {str(check.left) for check in graph.assumptions} == {"n1 - 1", "T1"}
    assert f"  {{{r.name}, {r2.name}, {one.name}}} over {r}" in str(graph)


def test_a_tile_program_needs_the_checks_of_its_fusion() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        y, others = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        a, b = ops.as_nested(x, offsets), ops.as_nested(y, others)
        f.output(a + b)
    program = stages(f)[0]
    pair = a.domains[1], b.domains[1]
    assert not DomainGraph(program, loops=pair).same(*pair)
    assert DomainGraph(program, loops=pair, checks=DomainGraph(f).assumptions).same(*pair)


def test_a_transposed_read_makes_no_index_of_two() -> None:
    a, b = IterDomain(5), IterDomain(5)
    with ir.Fusion() as f:
        x = f.input((5, 5), torch.float32)
        out = f.tensor(torch.float32, (a, b))
        f.define([out], (a, b), ir.tile.Store(out, (a, b), x.at((b, a))))
    graph = DomainGraph(f)
    i, j = x.domains
    assert graph.same(i, b) and graph.same(j, a) and not graph.same(a, b, "loop")
    with ir.Fusion() as f:
        x = f.input((5, 5), torch.float32)
        i, j = x.domains
        out = f.tensor(torch.float32, (i, j))
        both = ir.values.call("add", x.at((i, j)), x.at((j, i)), dtype=torch.float32)
        f.define([out], (i, j), ir.tile.Store(out, (i, j), both))
    assert not DomainGraph(f).same(i, j, "loop")


def test_promotion() -> None:
    stretched, full = IterDomain(1, IterType.BROADCAST), IterDomain(9)
    assert DomainGraph([stretched], same=[(stretched, full)]).promoted(stretched) is full
    c, r = partition(IterDomain(10), [0, 3, 8, 10])
    dense, longest = IterDomain(6), cover(r, 5)
    graph = DomainGraph([c, longest, *split(r, 2), *split(longest, 2)], same=[(dense, r)])
    assert graph.promoted(r) is longest and graph.promoted(dense) is longest
    assert DomainGraph([c, r], same=[(dense, r)]).promoted(dense) is r
    assert graph.promoted(split(r, 2)[0]) is split(longest, 2)[0]
    assert graph.same(split(r, 2)[1], split(longest, 2)[1], "loop")


def test_strangers_are_refused() -> None:
    with pytest.raises(DomainError, match="is not a domain of this program"):
        DomainGraph([IterDomain(3)]).exact(IterDomain(3))
    d = IterDomain(3)
    with pytest.raises(DomainError, match="unknown map 'close'"):
        DomainGraph([d]).same(d, d, "close")  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(chains, st.integers(0, 200), st.integers(0, 200))
def test_the_same_chain_twice(chain: Chain, seed: int, other: int) -> None:
    first, again, different = build(chain, seed), build(chain, seed), build(chain, other)
    assume(first is not None and again is not None and different is not None)
    assert first is not None and again is not None and different is not None

    def tied(left: object, right: object) -> DomainGraph:
        assert isinstance(left, type(first)) and isinstance(right, type(first))
        same = list(zip(left.logical, right.logical, strict=True))
        return DomainGraph([*left.loop, *right.loop], same=same)

    graph = tied(first, again)
    for a, b in zip(first.loop, again.loop, strict=True):
        assert graph.same(a, b)
    for group in tied(first, different).groups("exact"):
        shapes = {tuple(lengths(d)) if isinstance(d, RaggedIterDomain) else d.extent for d in group}
        assert len(shapes) == 1, "one index has one range"


@settings(max_examples=60, deadline=None)
@given(chains, st.integers(0, 200))
def test_each_map_is_coarser_than_the_one_before(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    assume(built is not None)
    assert built is not None
    graph = DomainGraph(built.loop)
    for finer, coarser in (("exact", "permissive"), ("permissive", "loop")):
        for group in graph.groups(finer):  # type: ignore[arg-type]
            assert all(graph.same(group.domains[0], d, coarser) for d in group)  # type: ignore[arg-type]
    for domain in built.loop:
        assert graph.promoted(domain) in graph.loop(domain)
