"""Search: which candidates are built and timed, in which order, and when to stop.

In: a space of candidates, a measurer that builds and runs them, a deadline. Out: the times of the candidates, or why they have
none. Two searchers: `Halving` drops slow candidates early and tries variants of the fast ones; `Exhaustive` times everything.
Both interleave candidates, so that a slow phase of the machine affects all of them. Both start from the heuristic's choice,
which stays unless another candidate is faster by more than the noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serrate.errors import SerrateError
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tuner.candidates import Candidate, Space

SAMPLE = 2e-3
"""Seconds that one sample takes at least: shorter programs run several times for it."""
FEWEST, MOST = 3, 32
"""Runs of one sample; a program that takes long runs once."""
LONG = 0.1
"""Seconds of a run that is long."""
WAVE = 4
"""How many candidates are built together; the deadline is checked in between."""
TIE = 0.02
"""A candidate replaces the usual one if it is faster by more than this share."""
SPENT = "not tried: the time budget was spent"


class Unfit(Exception):
    """Raised by a candidate's first run, with the reason why it must not be chosen."""


def reason_of(error: Exception) -> str:
    """The reason why a candidate cannot run: the whole message of a `SerrateError`, the first line of any other error."""
    return str(error) if isinstance(error, SerrateError) else f"{type(error).__name__}: {error}".splitlines()[0]


class Measurer(Protocol):
    """Builds and runs candidates."""

    def now(self) -> float:
        """Seconds on the clock that deadlines are given on."""

    def is_built(self, candidate: Candidate) -> bool:
        """Whether a candidate was built for an earlier call, or is a library call, for which nothing is built."""

    def build(self, candidates: Sequence[Candidate], seconds: float) -> dict[Candidate, str]:
        """Builds candidates, several at once; returns why some of them cannot run. Waits for at most `seconds`."""

    def run(self, candidate: Candidate, repeats: int) -> float:
        """Runs a candidate that was built, several times; returns the seconds of the fastest run. The first may raise `Unfit`."""


@dataclass(frozen=True)
class Tried:
    """The result for one candidate."""

    candidate: Candidate
    seconds: float | None
    """The time of one run; None if it was not timed."""
    samples: int = 0
    reason: str = ""
    """The reason why it was not timed, or was dropped."""


@dataclass
class Race:
    """Candidates in the order in which they were considered, with their samples."""

    measurer: Measurer
    deadline: float
    report: Callable[[str], None] = lambda text: None
    samples: dict[Candidate, list[float]] = field(default_factory=dict)
    reasons: dict[Candidate, str] = field(default_factory=dict)
    first: dict[Candidate, float] = field(default_factory=dict)
    """Seconds of the first run of each, with a cold cache."""
    per_build: float = 0.3
    """Seconds that a build takes, about."""

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.measurer.now()

    def seconds(self, candidate: Candidate) -> float:
        """The estimate for a candidate: its fastest sample, because other load only adds time."""
        return min(self.samples[candidate])

    def settled(self, candidate: Candidate, last: int) -> float:
        """How much the estimate has fallen during the `last` samples, as a share of it: how much further samples may still
        change."""
        before = self.samples[candidate][:-last]
        return min(before) / self.seconds(candidate) - 1 if before else float("inf")

    def best(self) -> Candidate:
        """The fastest so far; the earlier of two that are equally fast."""
        return min(self.running(), key=self.seconds)

    def running(self) -> list[Candidate]:
        """Those that were timed and not dropped."""
        return [c for c, found in self.samples.items() if found and c not in self.reasons]

    def timed(self) -> list[Candidate]:
        return [c for c, found in self.samples.items() if found]

    def sample(self, candidate: Candidate) -> None:
        """Takes one more sample."""
        found = self.samples[candidate]
        self.report(f"timing {candidate}")
        last = min((self.first[candidate], *found))
        repeats = 1 if last > LONG else min(max(FEWEST, math.ceil(SAMPLE / max(last, 1e-9))), MOST)
        found.append(self.measurer.run(candidate, repeats))

    def enter(self, candidates: Iterable[Candidate], share: float = 1.0) -> list[Candidate]:
        """Builds candidates that are new, as many as there is time for, and takes one sample of each; returns those. Builds may
        take a `share` of the time that is left."""
        new = [c for c in dict.fromkeys(candidates) if c not in self.samples]
        end = self.measurer.now() + share * self.left()
        built = [c for c in new if self.measurer.is_built(c)]
        missing = [c for c in new if c not in built]
        waves = [built, *(missing[k : k + WAVE] for k in range(0, len(missing), WAVE))]
        for wave in filter(None, waves):
            room = len(wave) if wave is built or not self.samples else int((end - self.measurer.now()) / self.per_build)
            for late in wave[max(room, 0) :] if self.left() > 0 else wave:
                self.samples[late], self.reasons[late] = [], SPENT
            self._enter([c for c in wave if c not in self.samples], is_new=wave is not built)
        return [c for c in new if c not in self.reasons]

    def _enter(self, wave: Sequence[Candidate], is_new: bool) -> None:
        if not wave:
            return
        self.report(f"building {', '.join(map(str, wave))}")
        start = self.measurer.now()
        # The first candidate is built without a deadline: the call runs it if nothing faster is found.
        failed = self.measurer.build(wave, max(self.left(), 0.0) if self.timed() else float("inf"))
        if is_new:
            # Averaged with the earlier estimate, because some of these builds may have been found on disk.
            self.per_build = (self.per_build + (self.measurer.now() - start) / len(wave)) / 2
        for candidate in wave:
            self.samples[candidate] = []
            if candidate in failed:
                self.reasons[candidate] = failed[candidate]
            elif self.timed() and self.left() < 3 * self.seconds(min(self.timed(), key=self.seconds)):
                self.reasons[candidate] = SPENT
            else:
                self._start(candidate)

    def _start(self, candidate: Candidate) -> None:
        """A first run, which warms up caches, pools and code, and one sample."""
        try:
            self.first[candidate] = self.measurer.run(candidate, 1)
        except Unfit as error:
            self.reasons[candidate] = str(error)
            return
        self.sample(candidate)

    def drop(self, candidate: Candidate, best: Candidate) -> None:
        ratio = self.seconds(candidate) / self.seconds(best)
        self.reasons[candidate] = f"dropped after {len(self.samples[candidate])} samples: {ratio:.2f} times the best"

    def winner(self, usual: Candidate) -> Candidate:
        """The fastest; the usual choice if that is as fast within the noise."""
        best = self.best()
        if self.samples.get(usual) and usual not in self.reasons and self.seconds(usual) <= self.seconds(best) * (1 + TIE):
            return usual
        return best

    def tried(self) -> list[Tried]:
        return [
            Tried(c, self.seconds(c) if found else None, len(found), self.reasons.get(c, "")) for c, found in self.samples.items()
        ]


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    chosen: Candidate
    tried: tuple[Tried, ...]


class Searcher(ABC):
    """Looks for the fastest candidate of a space."""

    @abstractmethod
    def race(self, space: Space, race: Race, hints: Hints) -> None:
        """Fills the race."""

    def search(
        self,
        space: Space,
        measurer: Measurer,
        deadline: float,
        hints: Hints = NO_HINTS,
        first: Candidate | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> Found:
        """The fastest candidate found before the deadline, and all candidates that were tried. `first`, a candidate that is good
        for similar calls, is entered right after the usual choice. `report` is called with progress messages."""
        race = Race(measurer, deadline, report)
        race.enter([space.usual])
        race.enter([first] if first else [])
        self.race(space, race, hints)
        return Found(race.winner(space.usual) if race.running() else space.usual, tuple(race.tried()))


@dataclass(frozen=True)
class Halving(Searcher):
    """Successive halving: every strategy once, then variants of the best, then more and more samples of fewer and fewer."""

    near: float = 1.5
    """Variants are tried only of openings that take at most this many times as long as the best."""
    hopeless: float = 2.0
    """A candidate is dropped if its first samples take this many times as long as the best."""
    rounds: int = 40
    """The most samples of a finalist; sampling stops earlier once estimates no longer change."""
    steps: int = 2
    """How many times variants of the best are tried."""

    def race(self, space: Space, race: Race, hints: Hints) -> None:
        race.enter(space.openings(hints))
        if not race.running():
            return
        self._drop_hopeless(race)
        limit = self.near * race.seconds(race.best())
        leading = sorted((c for c in race.running() if race.seconds(c) <= limit), key=race.seconds)
        for _ in range(self.steps):
            if not race.enter((variant for c in leading for variant in space.variants(c)), share=0.5):
                break
            self._drop_hopeless(race)
            leading = [race.best()]
        race.enter(space.sharings(race.best(), hints))
        self._finish(race)

    def _drop_hopeless(self, race: Race) -> None:
        """One slow sample may be an accident, and so may two; a third decides."""
        for candidate in race.running():
            while (
                len(race.samples[candidate]) < 3
                and race.seconds(candidate) > self.hopeless * race.seconds(race.best())
                and race.left() > 5 * race.seconds(candidate)
            ):
                race.sample(candidate)
            best = race.best()
            if candidate != best and race.seconds(candidate) > self.hopeless * race.seconds(best):
                race.drop(candidate, best)

    def _finish(self, race: Race) -> None:
        for turn in range(1, self.rounds + 1):
            running = race.running()
            if len(running) < 2 or race.left() < sum(FEWEST * race.seconds(c) for c in running):
                return
            # In alternating order, so that no candidate always follows the same other.
            for candidate in running if turn % 2 else reversed(running):
                race.sample(candidate)
            if turn < 3:
                continue
            best = race.best()
            noise = max(race.settled(c, last=2) for c in running)
            for candidate in sorted(running, key=race.seconds)[-(len(running) // 2) :]:
                if race.seconds(candidate) > race.seconds(best) * (1 + max(noise, TIE)):
                    race.drop(candidate, best)
            if turn >= 6 and max(race.settled(c, last=4) for c in race.running()) < TIE / 2:
                return


@dataclass(frozen=True)
class Exhaustive(Searcher):
    """Builds everything, and times all of it equally often."""

    rounds: int = 10

    def race(self, space: Space, race: Race, hints: Hints) -> None:
        every = space.everything(hints)
        race.enter(every)
        for turn in range(self.rounds):
            running = race.running()
            for candidate in running if turn % 2 else reversed(running):
                if race.left() > race.seconds(candidate):
                    race.sample(candidate)


@dataclass(frozen=True)
class Effort:
    """How much time a search may take, and how it searches."""

    name: str
    on_cpu: float
    on_gpu: float
    searcher: Searcher

    def budget(self, device: str) -> float:
        """Seconds for one program, builds included."""
        return self.on_cpu if device == "cpu" else self.on_gpu


EFFORTS = {
    "quick": Effort("quick", 3.0, 5.0, Halving()),
    "full": Effort("full", 120.0, 120.0, Exhaustive()),
}
"""Without effort, "none", nothing is measured."""
