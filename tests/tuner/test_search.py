"""Searchers, on a clock and times of the test's own: nothing is compiled or waited for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from serrate import ir, ops
from serrate.schedule.strategies import STRATEGIES
from serrate.schedule.target import CPU, GPU
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tuner.candidates import OF_KERNELS, VARIED, Candidate, Space, TileGroup, space_of
from serrate.tuner.search import SPENT, Exhaustive, Halving, Searcher, Unfit

SPACE = Space(Candidate("maskless"), CPU)
OF_KERNEL = Space(Candidate("maskless"), CPU, (TileGroup(("k", "k2"), 64, None), TileGroup(("m",), 8, 16)), varied=OF_KERNELS)
SEARCHERS = [Halving(), Exhaustive()]


@dataclass
class FakeMeasurer:
    """Runs take the time that the test says, times noise; builds take `per_build` seconds."""

    seconds: dict[Candidate, float]
    usual: float = 1e-3
    noise: float = 0.0
    per_build: float = 0.1
    failing: dict[Candidate, str] = field(default_factory=dict)
    unfit: dict[Candidate, str] = field(default_factory=dict)
    clock: float = 100.0
    built: list[Candidate] = field(default_factory=list)
    runs: list[Candidate] = field(default_factory=list)
    known: frozenset[Candidate] = frozenset()

    def __post_init__(self) -> None:
        self.random = random.Random(0)

    def now(self) -> float:
        return self.clock

    def is_built(self, candidate: Candidate) -> bool:
        return candidate in self.known

    def build(self, candidates: Sequence[Candidate], seconds: float) -> dict[Candidate, str]:
        late: dict[Candidate, str] = {}
        for candidate in candidates:
            needed = 0.0 if candidate in self.known else self.per_build
            if needed > seconds:
                late[candidate] = SPENT
                needed = seconds
            self.clock += needed
            seconds -= needed
            self.built.append(candidate)
        return late | {c: why for c, why in self.failing.items() if c in candidates}

    def run(self, candidate: Candidate, repeats: int) -> float:
        assert candidate in self.built
        if candidate in self.unfit:
            raise Unfit(self.unfit[candidate])
        self.runs += [candidate] * repeats
        times = [self.seconds.get(candidate, self.usual) * (1 + self.random.random() * self.noise) for _ in range(repeats)]
        self.clock += sum(times)
        return min(times)


def test_the_usual_choice_is_built_and_timed_first() -> None:
    measurer = FakeMeasurer({})
    found = Halving().search(SPACE, measurer, measurer.clock + 3)
    assert measurer.built[0] == measurer.runs[0] == found.tried[0].candidate == SPACE.usual


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_every_strategy_is_timed(searcher: Searcher) -> None:
    # One of them looks hopeless from the start.
    measurer = FakeMeasurer({Candidate("masked"): 0.02})
    found = searcher.search(SPACE, measurer, measurer.clock + 3)
    assert {each.candidate.strategy for each in found.tried if each.seconds is not None} == {
        "maskless",
        "masked",
        "persistent_dynamic",
    }


@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize("space", [SPACE, OF_KERNEL])
def test_without_noise_the_fastest_of_all_near_ones_wins(searcher: Searcher, space: Space) -> None:
    for best in space.everything():
        measurer = FakeMeasurer({best: 0.5e-3}, per_build=0.01)
        assert searcher.search(space, measurer, measurer.clock + 100).chosen == best


@given(st.data())
def test_the_choice_is_never_slower_than_the_usual_one(data: st.DataObject) -> None:
    every = SPACE.everything()
    times = {c: data.draw(st.floats(1e-5, 1e-1)) for c in every}
    noise, per_build = data.draw(st.floats(0, 0.3)), data.draw(st.floats(0, 1))
    measurer = FakeMeasurer(times, noise=noise, per_build=per_build)
    found = data.draw(st.sampled_from(SEARCHERS)).search(SPACE, measurer, measurer.clock + data.draw(st.floats(0.5, 10)))
    usual = times[SPACE.usual]
    assert times.get(found.chosen, measurer.usual) <= usual * (1 + noise)


@pytest.mark.parametrize("per_build", [0.01, 0.2, 0.5])
@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 0.05])
def test_the_budget_is_kept(per_build: float, seconds: float) -> None:
    measurer = FakeMeasurer({}, usual=seconds, per_build=per_build, noise=0.1)
    start = measurer.clock
    Halving().search(OF_KERNEL, measurer, start + 3)
    # The last sample that was begun may end after it.
    assert measurer.clock - start < 3 + 4 * seconds


def test_what_there_is_no_time_for_is_reported() -> None:
    measurer = FakeMeasurer({}, per_build=2.0)
    found = Halving().search(SPACE, measurer, measurer.clock + 3)
    reasons = {each.candidate: each.reason for each in found.tried if each.seconds is None}
    assert reasons and set(reasons.values()) == {SPENT}
    assert found.chosen == SPACE.usual


def test_with_everything_built_no_time_is_set_aside_for_builds() -> None:
    every = [c for opening in SPACE.openings() for c in (opening, *SPACE.variants(opening))]
    measurer = FakeMeasurer({}, per_build=5.0, known=frozenset(every))
    found = Halving().search(SPACE, measurer, measurer.clock + 1)
    assert len([each for each in found.tried if each.seconds is not None]) > 5


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_a_failing_candidate_carries_its_reason_and_is_not_chosen(searcher: Searcher) -> None:
    failing, wrong = Candidate("masked"), Candidate("persistent_dynamic")
    measurer = FakeMeasurer({failing: 1e-6, wrong: 1e-6}, failing={failing: "not legal"}, unfit={wrong: "other results"})
    found = searcher.search(SPACE, measurer, measurer.clock + 3)
    reasons = {each.candidate: (each.seconds, each.reason) for each in found.tried}
    assert reasons[failing] == (None, "not legal") and reasons[wrong] == (None, "other results")
    assert found.chosen not in (failing, wrong)


def test_if_even_the_usual_choice_fails_it_stays() -> None:
    measurer = FakeMeasurer({}, failing=dict.fromkeys(SPACE.everything(), "no compiler"))
    assert Halving().search(SPACE, measurer, measurer.clock + 3).chosen == SPACE.usual


def test_losers_are_dropped_early() -> None:
    slow = Candidate("masked")
    measurer = FakeMeasurer({slow: 10e-3}, noise=0.05)
    found = Halving().search(SPACE, measurer, measurer.clock + 3)
    (dropped,) = (each for each in found.tried if each.candidate == slow)
    assert dropped.samples <= 3 and "times the best" in dropped.reason
    assert measurer.runs.count(slow) < measurer.runs.count(found.chosen) / 2


def test_samples_are_interleaved() -> None:
    """A machine that is slower for a while is slower for all: between two samples of a finalist, others run."""
    measurer = FakeMeasurer({}, usual=5e-3, noise=0.2)
    Halving().search(SPACE, measurer, measurer.clock + 3)
    runs = measurer.runs
    longest = run = 1
    for before, after in itertools.pairwise(runs):
        run = run + 1 if before == after else 1
        longest = max(longest, run)
    # A first run with one sample of three, or two samples where the order of turns is reversed.
    assert longest <= 6


def test_a_tie_goes_to_the_usual_choice() -> None:
    other = Candidate("persistent_dynamic")
    measurer = FakeMeasurer({other: 0.99e-3})
    assert Halving().search(SPACE, measurer, measurer.clock + 3).chosen == SPACE.usual
    measurer = FakeMeasurer({other: 0.9e-3})
    assert Halving().search(SPACE, measurer, measurer.clock + 3).chosen == other


def test_the_search_ends_when_nothing_can_be_told_apart() -> None:
    measurer = FakeMeasurer({}, noise=0.0, per_build=0.0)
    Halving().search(SPACE, measurer, measurer.clock + 1000)
    assert measurer.clock - 100 < 1


def test_a_hint_decides_what_is_tried_first() -> None:
    def order(hints: Hints) -> list[Candidate]:
        measurer = FakeMeasurer({})
        Halving().search(SPACE, measurer, measurer.clock + 3, hints)
        return measurer.built[:3]

    assert order(NO_HINTS)[1].strategy == "masked"
    assert order(Hints(distribution="giant"))[1].strategy == "persistent_dynamic"


def test_what_is_good_for_similar_calls_is_tried_next() -> None:
    near = Candidate("masked", (("rows", 64),))
    measurer = FakeMeasurer({near: 0.5e-3})
    found = Halving().search(SPACE, measurer, measurer.clock + 3, first=near)
    assert measurer.built[:2] == [SPACE.usual, near]
    assert found.chosen == near


def test_tiles_of_one_extent_change_together_and_stay_within_it() -> None:
    changed = {variant.lanes for variant in OF_KERNEL.variants(Candidate("maskless"))}
    assert changed == {(("k", 16), ("k2", 16)), (("k", 256), ("k2", 256)), (("m", 2),), (("m", 16),)}


def test_a_new_strategy_is_tried_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "zigzag", STRATEGIES["maskless"])
    measurer = FakeMeasurer({Candidate("zigzag"): 0.5e-3})
    assert Halving().search(SPACE, measurer, measurer.clock + 3).chosen == Candidate("zigzag")


def test_options_that_do_not_matter_are_not_varied() -> None:
    """Warps that the user has chosen for a kernel, and what only matrix products have."""
    candidate = Candidate("persistent_dynamic")
    warps = [dict(c.options).get("warps") for c in Space(candidate, GPU, varied=VARIED - {"warps"}).variants(candidate)]
    assert warps and set(warps) == {None}
    for multiplies in (False, True):
        with ir.Fusion() as f:
            x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
            rows = ops.as_nested(x, offsets)
            f.output(ops.matmul(rows, f.input((3, 4, 8), torch.float32)) if multiplies else ops.sum(rows, 1))
        space = space_of(f.compile().stages[0].naive, candidate, GPU, 1)
        assert any("resident" in dict(c.options) for c in space.variants(candidate)) == multiplies
