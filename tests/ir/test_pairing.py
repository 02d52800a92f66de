"""Pairing: a component belongs to its own rows, whatever was done to either, and to no others.

In: random chains of partitions, transforms, clones, pickles and stages. Out: the pair that combines and should not, or does not
and should. What belongs together is written down beside each pair when it is made; nothing asks the domains.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate import ops
from serrate.errors import DomainError, StructureMismatch
from serrate.ir import IterDomain, RaggedIterDomain, combine, merge, partition, resize, split, uids
from serrate.ir.clone import Cloner
from serrate.ir.domains import ParallelType
from serrate.ir.expr import Array, maximum, minimum, symbol
from serrate.ir.fusion import Fusion
from serrate.lower.stages import stages

# --- pairs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A component, rows that are its own, and what they are told from others by."""

    component: IterDomain
    rows: RaggedIterDomain
    truth: Hashable
    lengths: tuple[int, ...] | None
    """Of the rows, where they are known."""


KNOWN = ((0, 3, 3, 8), (0, 2, 4, 8), (0, 3, 8), (0, 1, 2, 4, 8), (0, 3, 3, 8))


def known(which: int) -> Pair:
    offsets = KNOWN[which]
    lengths = tuple(b - a for a, b in itertools.pairwise(offsets))
    return Pair(*partition(IterDomain(8), list(offsets)), offsets, lengths)


def nested(number: int, *, lengths: bool = False, staged: bool = False) -> Pair:
    """Rows that arrive from outside, under the names that every fusion gives its first inputs."""
    with Fusion() as f:
        x, described = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        y = ops.relu(ops.as_nested(x, lengths=described) if lengths else ops.as_nested(x, described))
        f.output(y)
    logical = y.domains
    if staged:
        (program,) = stages(f)
        logical = program.outputs[0].logical  # type: ignore[union-attr]
    return Pair(logical[0], logical[1], ("fusion", number), None)  # type: ignore[arg-type]


def elsewhere(node: Any, process: str) -> Any:
    """What another process would get: numbers of domains mean nothing there."""
    sent, own = pickle.dumps(node), uids._process
    uids._process = process
    try:
        return pickle.loads(sent)
    finally:
        uids._process = own


def changed(draw: st.DrawFn, pair: Pair) -> Pair:
    kind = draw(st.sampled_from(["split", "resize", "widen", "regroup component", "grid", "clone", "pickle", "other process"]))
    side = draw(st.sampled_from(["component", "rows", "both"]))
    if kind == "split":
        factor = draw(st.sampled_from([1, 2, 3]))
        lengths = pair.lengths and tuple(-(-n // factor) for n in pair.lengths)
        return replace(pair, rows=split(pair.rows, factor)[0], lengths=lengths)
    if kind == "resize":
        return replace(pair, rows=resize(pair.rows, 1, 2), lengths=pair.lengths and tuple(n + 3 for n in pair.lengths))
    if kind == "widen":
        return replace(pair, rows=merge(pair.rows, IterDomain(2)), lengths=pair.lengths and tuple(n * 2 for n in pair.lengths))
    if kind == "regroup component":
        # Split and merged again, twice over: still the same index.
        count = pair.component.extent
        factor = draw(st.sampled_from([f for f in (1, 2) if isinstance(count, int) and count % f == 0] or [1]))
        outer, inner = split(pair.component, factor)
        return replace(pair, component=merge(merge(*split(outer, 1)), inner))
    if kind == "grid":
        return replace(pair, component=pair.component.parallelize(ParallelType.GRID))
    move = {"clone": lambda x: Cloner()(x), "pickle": lambda x: pickle.loads(pickle.dumps(x))}.get(
        kind, lambda x: elsewhere(x, "another process")
    )
    if side == "both":
        component, rows = move((pair.component, pair.rows))
        return replace(pair, component=component, rows=rows)
    return replace(pair, **{side: move(getattr(pair, side))})


@st.composite
def chains(draw: st.DrawFn) -> list[Pair]:
    makers = [
        lambda k: known(draw(st.integers(0, len(KNOWN) - 1))),
        lambda k: nested(k),
        lambda k: nested(k, lengths=True),
        lambda k: nested(k, staged=True),
    ]
    pairs = [draw(st.sampled_from(makers))(k) for k in range(draw(st.integers(2, 4)))]
    for k in range(len(pairs)):
        for _ in range(draw(st.integers(0, 4))):
            pairs[k] = changed(draw, pairs[k])
    return pairs


@given(chains())
def test_right_pairs_combine_and_wrong_ones_are_refused(pairs: list[Pair]) -> None:
    for one, other in itertools.product(pairs, repeat=2):
        if one.truth == other.truth:
            whole = combine(one.component, other.rows)
            assert other.lengths is None or whole.extent == sum(other.lengths)
        else:
            with pytest.raises((StructureMismatch, DomainError)):
                combine(one.component, other.rows)


# --- the cases that were wrong -------------------------------------------------------------------------------------------


def test_rows_of_two_programs_never_pair() -> None:
    one, other = nested(0), nested(1)
    with pytest.raises(StructureMismatch, match=r"is the component of T1, but .* belongs to T1 of another program"):
        combine(one.component, other.rows)


def test_a_component_that_is_split_and_merged_again_counts_its_rows() -> None:
    d = IterDomain(8)
    c, r = partition(d, [0, 1, 2, 4, 8])
    for factor in (1, 2, 4):
        assert combine(merge(*split(c, factor)), r).extent == 8
    # Three do not divide four: the merged domain counts components that do not exist.
    for wrong in (merge(*split(c, 3)), merge(*reversed(split(c, 2))), merge(split(c, 2)[0], split(c, 4)[1])):
        with pytest.raises(StructureMismatch):
            combine(wrong, r)


def test_rows_are_not_the_components_of_others() -> None:
    """As many positions as components, and the same identity: still positions."""
    _, rows = partition(IterDomain(3), [0, 1, 2, 3])
    _, others = partition(IterDomain(3), [0, 1, 2, 3])
    with pytest.raises(StructureMismatch):
        combine(rows, others)


def test_the_parts_of_one_row_do_not_count_those_of_all() -> None:
    g = IterDomain(2)
    c, r = partition(IterDomain(9), [[0, 3, 3, 9], [0, 2, 4, 9]], under=[g])
    with pytest.raises(StructureMismatch):
        combine(merge(*split(c, 1)), r)
    assert combine(merge(g, c), r).extent == 18


def test_domains_survive_pickling() -> None:
    g = IterDomain(2)
    for pair in (
        partition(IterDomain(8), [0, 3, 3, 8]),
        partition(IterDomain(100), [[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]], under=[g]),
        partition(IterDomain(12), [0, 4, 8], lengths=[3, 0, 2]),
        partition(partition(IterDomain(8), [0, 3, 3, 8])[1], [[0, 1, 3], [0, 0, 0], [0, 2, 5]]),
    ):
        for copy in (pickle.loads(pickle.dumps(pair)), elsewhere(pair, "another process")):
            assert copy[1].extents == pair[1].extents and str(copy[1]) == str(pair[1]) and copy == pair
            assert copy[1].offsets == pair[1].offsets
            assert combine(*copy) == combine(*pair)


def test_numbers_of_another_process_are_new_and_stay_the_same() -> None:
    d = IterDomain(8)
    outer, _ = split(d, 2)
    first, second = (elsewhere((d, outer), "yet another process") for _ in range(2))
    assert first[0].uid == second[0].uid != d.uid
    assert split(first[0], 2)[0].uid == first[1].uid, "the same transform finds what it made"


def fusions() -> dict[str, tuple[Fusion, tuple[torch.Tensor, ...]]]:
    with Fusion("softmax") as softmax:
        x, offsets = softmax.input((None, 2), torch.float32), softmax.input((None,), torch.int64)
        softmax.output(ops.softmax(ops.as_nested(x, offsets), 1))
    with Fusion("moved") as moved:
        x, words, sentences = moved.input((None,), torch.float32), *(moved.input((None,), torch.int64) for _ in range(2))
        y = ops.as_nested(ops.as_nested(x, words), sentences)
        moved.output(ops.flip(y, 2), ops.slice(y, 2, 1), ops.cumsum(y, 2), ops.sort(y, 2).indices)
    with Fusion("scheduled") as scheduled:
        x = scheduled.input((None, 8), torch.float32)
        y = ops.relu(x)
        scheduled.output(y)
        y.split(0, 4)
        y.parallelize(0, "grid")
    with Fusion("grouped") as grouped:
        keys = grouped.input((None,), torch.int64)
        offsets, order = ops.group_by(keys, 3)
        grouped.output(ops.sum(ops.as_nested(ops.index(ops.cast(keys, torch.float32), order), offsets), 1))
    numbers = torch.arange(6.0)
    return {
        "softmax": (softmax, (numbers.reshape(3, 2), torch.tensor([0, 2, 3]))),
        "moved": (moved, (numbers, torch.tensor([0, 2, 2, 6]), torch.tensor([0, 1, 3]))),
        "scheduled": (scheduled, (torch.randn(6, 8),)),
        "grouped": (grouped, (torch.tensor([2, 0, 2, 1]),)),
    }


def listed(results: Any) -> list[Any]:
    return [r.to_list() if hasattr(r, "to_list") else r for r in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize("name", fusions())
def test_fusions_survive_pickling(name: str) -> None:
    fusion, args = fusions()[name]
    for copy in (pickle.loads(pickle.dumps(fusion)), elsewhere(fusion, "another process")):
        assert copy == fusion and str(copy) == str(fusion) and copy.steps == fusion.steps
        copy.verify()
        for run in (Fusion.evaluate, lambda f, *given: f.compile("cpp")(*given)):
            for got, want in zip(listed(run(copy, *args)), listed(run(fusion, *args)), strict=True):
                torch.testing.assert_close(got, want)
        both = zip(copy.outputs, fusion.outputs, strict=True)
        for one, other in ((a, b) for a, b in both if b.ndim > 1 and b.domains[1].is_ragged and b.ndim == 2):
            combine(one.domains[0], other.domains[1])


def test_a_pickle_is_read_by_another_process() -> None:
    """Domains made there before have the numbers that those in the pickle had here."""
    fusion, args = fusions()["moved"]
    want = [r.to_list() for r in fusion.evaluate(*args)]
    program = (
        "import pickle, sys, torch, serrate\n"
        "from serrate import ir\n"
        "made = [ir.partition(ir.IterDomain(8), [0, 3, 8]) for _ in range(500)]\n"
        "fusion, args = pickle.loads(sys.stdin.buffer.read())\n"
        "sys.stdout.buffer.write(pickle.dumps([r.to_list() for r in fusion.evaluate(*args)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps((fusion, args)), capture_output=True, check=True, env=dict(os.environ)
    )
    torch.testing.assert_close(pickle.loads(done.stdout), want)


def test_expressions_are_found_again() -> None:
    n, array = symbol("n"), Array("offsets")
    for expr in (n * 2 + 1, n * n, (n + 1) // 4, n % 3, minimum(n, 7), maximum(n, array[n + 1] - array[n])):
        assert pickle.loads(pickle.dumps(expr)) is expr
