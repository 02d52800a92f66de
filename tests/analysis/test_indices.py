"""Indices there and back: from loops to logical positions, and from logical positions to loops, by brute force.

In: random chains on random extents. Out: failures where a position does not come back as itself.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serrate.analysis import Indices, guards, visits
from serrate.analysis.guards import loop_symbols
from serrate.analysis.indices import ancestry
from serrate.errors import DomainError
from serrate.ir import IterDomain, RaggedIterDomain, combine, merge, partition, product, regroup, split
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, Environment, Symbol, const, symbol
from tests.analysis.chains import Built, Chain, build, chains, moving_chains


def positions(built: Built) -> list[dict[Symbol, int]]:
    """The loop positions that belong to an element."""
    symbols = loop_symbols(built.loop)
    indices = Indices(zip(built.loop, symbols, strict=True))
    conditions = [g.condition for g in guards(built.logical, built.loop)]
    found: list[dict[Symbol, int]] = [{}]
    for own, domain in zip(symbols, built.loop, strict=True):
        end = domain.length_of(indices.of(domain.component)) if isinstance(domain, RaggedIterDomain) else domain.extent_expr
        # A row that a guard excludes may lie behind the last one: it has no length, and no position.
        found = [
            {**done, own: k} for done in found if safe(conditions, done) for k in range(int(end.evaluate(Environment(done))))
        ]
    return [done for done in found if safe(conditions, done)]


def safe(conditions: list, done: dict[Symbol, int]) -> bool:  # type: ignore[type-arg]
    return all(c.evaluate(Environment(done)) for c in conditions if c.symbols <= done.keys())


@given(st.one_of(chains, moving_chains), st.integers(0, 10_000))
def test_there_and_back(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    if built is None or built.size > 500:
        return
    symbols = loop_symbols(built.loop)
    there = Indices(zip(built.loop, symbols, strict=True))
    logical = [symbol(f"x{k}") for k in range(len(built.logical))]
    back = Indices(zip(built.logical, logical, strict=True))
    seen = set()
    for done in positions(built):
        element = [int(there.of(d).evaluate(Environment(done))) for d in built.logical]
        seen.add(tuple(element))
        environment = Environment(dict(zip(logical, element, strict=True)))
        assert [int(back.of(d).evaluate(environment)) for d in built.loop] == [done[s] for s in symbols]
    assert built.cropped or len(seen) == len(built.elements)


def at(indices: Indices, domain: IterDomain, **values: int) -> int:
    return int(indices.of(domain).evaluate(Environment({symbol(name): value for name, value in values.items()})))


def test_a_position_finds_its_component_past_empty_ones() -> None:
    d = IterDomain(325)
    c, r = partition(d, [0, 127, 127, 325])
    forward = Indices([(d, symbol("i"))])
    assert [(at(forward, c, i=i), at(forward, r, i=i)) for i in (0, 126, 127, 324)] == [(0, 0), (0, 126), (2, 0), (2, 197)]
    backward = Indices([(c, symbol("c")), (r, symbol("r"))])
    assert at(backward, d, c=2, r=0) == 127


def test_the_walk_of_a_list_of_tiles() -> None:
    d = IterDomain(325)
    c, r = partition(d, [0, 127, 127, 325])
    o, n = split(r, 64)
    t = combine(c, o)
    assert t.extent == 6
    indices = Indices([(t, symbol("t")), (n, symbol("n"))])
    assert [(at(indices, c, t=k), at(indices, o, t=k)) for k in range(6)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert at(indices, d, t=3, n=5) == 127 + 64 + 5
    back = Indices([(d, symbol("i"))])
    assert [at(back, x, i=127 + 64 + 5) for x in (t, n)] == [3, 5]


def test_parts_of_rows() -> None:
    d = IterDomain(325)
    c, r = partition(d, [0, 127, 127, 325])
    part, inner = partition(r, [[0, 50, 127], [0, 0, 0], [0, 100, 198]])
    backward = Indices([(c, symbol("c")), (part, symbol("p")), (inner, symbol("q"))])
    assert (at(backward, r, c=2, p=1, q=7), at(backward, d, c=2, p=1, q=7)) == (107, 127 + 107)
    forward = Indices([(d, symbol("i"))])
    assert [at(forward, x, i=50) for x in (c, part, inner)] == [0, 1, 0]
    assert [at(forward, x, i=127) for x in (c, part, inner)] == [2, 0, 0]


def test_sentences_into_documents() -> None:
    d = IterDomain(10)
    sentence, word = partition(d, [0, 3, 3, 8, 10])
    document, inner = partition(sentence, [0, 1, 4])
    words = combine(inner, word)
    indices = Indices([(document, symbol("g")), (words, symbol("w"))])
    assert [at(indices, x, g=1, w=5) for x in (inner, word, sentence, d)] == [2, 0, 3, 8]
    back = Indices([(d, symbol("i"))])
    assert [at(back, x, i=8) for x in (document, words)] == [1, 5]


def test_parts_under_a_group() -> None:
    g, d = IterDomain(2), IterDomain(100)
    c, r = partition(d, [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[g])
    backward = Indices([(g, symbol("g")), (c, symbol("c")), (r, symbol("r"))])
    assert [at(backward, d, g=0, c=2, r=5), at(backward, d, g=1, c=2, r=5)] == [35, 65]
    forward = Indices([(g, symbol("g")), (d, symbol("i"))])
    assert [at(forward, x, g=0, i=30) for x in (c, r)] == [2, 0]
    assert [at(forward, x, g=1, i=30) for x in (c, r)] == [1, 5]


def test_regrouped_parts() -> None:
    g, d = IterDomain(2), IterDomain(100)
    c, r = partition(d, [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[g])
    moved = regroup(g, c, r)[1]
    there = Indices([(c, symbol("c")), (moved, symbol("m"))])
    assert [at(there, x, c=0, m=29) for x in (g, r, d)] == [0, 29, 29]
    assert [at(there, x, c=0, m=30) for x in (g, r, d)] == [1, 0, 0]
    assert [at(there, x, c=1, m=0) for x in (g, r, d)] == [1, 0, 25]
    back = Indices([(g, symbol("g")), (c, symbol("c")), (r, symbol("r"))])
    assert [at(back, moved, g=0, c=3, r=7), at(back, moved, g=1, c=3, r=7)] == [7, 37]


def test_rows_with_gaps_are_packed() -> None:
    d = IterDomain(768)
    c, r = partition(d, [0, 128, 384], lengths=[100, 150, 262])
    packed = combine(c, r)
    there = Indices([(packed, symbol("p"))])
    assert [at(there, d, p=p) for p in (0, 99, 100, 249, 250, 511)] == [0, 99, 128, 277, 384, 645]
    assert at(Indices([(d, symbol("i"))]), packed, i=384) == 250


def test_pairs_by_value_have_one_index() -> None:
    # Two domains cut by equal offsets: the rows of one, combined with the components of the other, are found in both.
    d, e = IterDomain(10), IterDomain(10)
    c, r = partition(d, [0, 3, 3, 10])
    k, s = partition(e, [0, 3, 3, 10])
    o, n = split(s, 2)
    t = combine(c, o)
    there = Indices([(t, symbol("t")), (n, symbol("n"))])
    assert [at(there, e, t=k, n=0) for k in range(6)] == [0, 2, 3, 5, 7, 9]
    assert [at(there, x, t=3, n=0) for x in (c, k)] == [2, 2]
    back = Indices([(e, symbol("i"))])
    assert [at(back, t, i=i) for i in (0, 2, 3, 9)] == [0, 1, 2, 5]
    assert not there.knows(r)
    found = guards([e], [*split(t, 4), n])
    assert [g.domain.uid for g in found] == [t.uid, s.uid]
    assert visits([e], [*split(t, 4), n], found) == Counter(range(10))


def test_two_domains_of_one_extent_are_two_indices() -> None:
    d = IterDomain(16)
    o, n = split(d, 4)
    assert o == n
    assert str(Indices([(o, symbol("o")), (n, symbol("n"))]).of(d)) == "n + o*4"


def test_an_empty_row_divides_nothing() -> None:
    # Lanes where nothing exists are computed too.
    c, r = partition(IterDomain(5), [0, 2, 5])
    s = r.with_rows(Array("other", (3, 0))[COORDINATE], name="s")
    there = Indices([(c, symbol("c")), (product(r, s), symbol("m"))])
    assert [(at(there, r, c=0, m=m), at(there, s, c=0, m=m)) for m in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert [at(there, x, c=1, m=2) for x in (r, s)] == [2, 0]
    parts = Indices([(c, symbol("c")), (s, symbol("s"))])
    assert [at(parts, x, c=1, s=4) for x in split(s, 3, inner=False)] == [4, 0]


def test_an_empty_inner_part_divides_nothing() -> None:
    a, b = IterDomain(3), IterDomain(0)
    indices = Indices([(merge(a, b), const(0))])
    assert (indices.of(a).value, indices.of(b).value) == (0, 0)


def test_what_does_not_follow() -> None:
    d = IterDomain(10)
    o, n = split(d, 4)
    indices = Indices([(o, symbol("o"))])
    assert indices.knows(o)
    assert not indices.knows(d)
    assert not indices.knows(n)
    assert not indices.knows(IterDomain(10))
    with pytest.raises(DomainError, match="does not follow from the loops"):
        indices.of(d)


def test_ancestry_is_nearest_first_and_each_once() -> None:
    d = IterDomain(100)
    o, n = split(d, 8)
    m = merge(o, n)
    a, b = split(m, 7)
    assert ancestry([a, b]) == [a.definition, m.definition, o.definition]
