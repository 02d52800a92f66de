"""Cells of the CPU table: one work, one dtype, one distribution of lengths; checked, then timed.

Comes in: a task. Goes out: a `Cell` with the times of the limit, of hand-written C++, of serrate and of every peer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks import handwritten, limits, ours, peers, ways
from benchmarks.measure import Timing, measure, timing
from benchmarks.tasks import DTYPES, WORKS, Sizes, Task, again, expected, is_right, task, traffic
from benchmarks.ways import Call, Way

# a median this many times the least is the neighbours' doing, not the code's
UNSTEADY = 1.25
# beaten by more than noise, the limit is not one: the copy met slower memory than the work did
BEATEN = 1.1
# what a peer is to be behind by, wherever the limit leaves that room
AHEAD = 1.15
# sixteen-bit types are to reach this part of what float32 is to reach, of their own limit
NARROW = 0.8
# one giant row is to be this near to rows alike
GIANT = 0.9
# seconds: what takes longer is timed by one call, and what took this long for the first time by that one
ONCE = 1.5
PATIENCE = 10.0


@dataclass(frozen=True)
class Cell:
    """One work on one distribution; times are medians in milliseconds. `fault`: why there is no time of ours."""

    work: str
    dtype: str
    lengths: str
    limit: float
    hand: float | None
    ours: float | None
    fault: str
    peers: Mapping[str, float]
    skipped: Mapping[str, str]
    timings: Mapping[str, Timing] = field(repr=False)

    @property
    def unsteady(self) -> bool:
        """Whether the cell supports no claim: the same loops took different times, or something beat what is called the limit."""
        steady = [each for name, each in self.timings.items() if name == "hand C++" or name.startswith("limit")]
        fastest = min((each for each in (self.hand, self.ours, *self.peers.values()) if each is not None), default=self.limit)
        beaten = fastest * BEATEN < self.limit and not self._may_be_beaten
        return beaten or any(each.median > UNSTEADY * each.least for each in steady)

    @property
    def _may_be_beaten(self) -> bool:
        """Whether the limit is one of other work: a copy, where most is filled; a product of float32, where it is of less."""
        return self.work == "to_padded" or (self.work == "grouped matmul" and self.dtype != "float32")

    @property
    def percent(self) -> float | None:
        """Of the limit."""
        return None if self.ours is None else 100 * self.limit / self.ours

    @property
    def goal(self) -> float:
        """The percent of the limit that this work is to reach; of a giant row, what rows alike reach decides."""
        goal = WORKS[self.work].goal
        return goal if self.dtype == "float32" or self.work == "grouped matmul" else NARROW * goal

    @property
    def best_peer(self) -> tuple[str, float] | None:
        return min(self.peers.items(), key=lambda named: named[1], default=None)

    @property
    def ahead(self) -> float | None:
        """How many times the best peer's time is ours."""
        return None if self.ours is None or self.best_peer is None else self.best_peer[1] / self.ours

    @property
    def behind_a_peer(self) -> bool:
        """Whether the best peer is nearer than it is to be, where the limit leaves room, or one is ahead that never should."""
        if self.ours is None or self.best_peer is None:
            return self.ours is None
        if self.ours > self.peers.get(WORKS[self.work].never_behind, self.ours):
            return True
        room = self.best_peer[1] / self.limit
        return room >= AHEAD and self.best_peer[1] / self.ours < AHEAD


def run(
    work: str,
    distribution: str,
    dtype: str,
    sizes: Sizes,
    rounds: int,
    *,
    compiled: bool,
    patience: float,
    tell: Callable[[str], None] = lambda _: None,
) -> Cell:
    """Check every result against plain torch, row by row, then time all ways in turn. `tell` hears what is being done."""
    torch.manual_seed(0)
    it, *more = again(task(work, distribution, DTYPES[dtype], sizes))
    wanted = expected(it)
    limit = _limit(it)
    calls: dict[str, Call] = dict(limit.calls)
    skipped: dict[str, str] = {}
    timed: dict[str, Timing] = {}
    for way, *ways_ in zip(*(_ways(each, compiled) for each in (it, *more)), strict=True):
        tell(f"checking {way.name}")
        call, seconds, reason = _tried(way, it, wanted, patience)
        if call is None:
            skipped[way.name] = reason
        elif seconds > ONCE:
            timed[way.name] = timing([seconds])
        else:
            calls[way.name] = _all(call, *(each.prepare() for each in ways_))
    if "hand C++" in skipped:
        raise AssertionError(f"hand-written {work} on {distribution} lengths: {skipped['hand C++']}")
    del wanted
    tell("timing")
    # A small work is timed many calls at once: the first of them meets the caches as other ways have left them.
    found = measure(calls, rounds, before=limit.before)
    timed |= {name: each if name in limit.calls else _of_one(each, 1 + len(more)) for name, each in found.items()}
    times = {name: each.median for name, each in timed.items()}
    named = {each.name: times[each.name] for each in peers.ways(it, compiled) if each.name in times}
    fault = skipped.pop("serrate", "")
    own = (limit.milliseconds(timed), times.get("hand C++"), times.get("serrate"))
    return Cell(work, dtype, distribution, *own, fault, named, skipped, timed)


def _ways(it: Task, compiled: bool) -> list[Way]:
    hand = handwritten.way(it)
    return [*([hand] if hand is not None else []), ours.way(it), *peers.ways(it, compiled)]


def _all(*calls: Call) -> Call:
    """One call after the other, each on data of its own."""
    if len(calls) == 1:
        return calls[0]

    def each_in_turn() -> None:
        for call in calls:
            call()

    return each_in_turn


def _of_one(all_of_them: Timing, calls: int) -> Timing:
    """The time of one of several calls that were timed together."""
    return Timing(all_of_them.median / calls, all_of_them.least / calls, all_of_them.rounds)


def _limit(it: Task) -> limits.Limit:
    if it.work == "grouped matmul":
        return limits.of_product(it.data.values, it.operands[0][0])
    return limits.of_traffic(traffic(it), it.data.values, it.data.offsets)


def _tried(way: Way, it: Task, wanted: torch.Tensor, patience: float) -> tuple[Call | None, float, str]:
    """The call if it does the work rightly, and how long a call of it took; or why it is left out."""
    if way.reason:
        return None, 0.0, way.reason
    try:
        call, result, seconds = _first_call(way, patience)
        if not is_right(it, way.values(result), wanted):
            return None, 0.0, "wrong result"
        del result
        # The first call may build code, which is no part of the work; one that took this long is not asked again.
        if seconds < PATIENCE:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        return call, seconds, ""
    except Exception as error:
        # any fault of a peer is its own, and is shown; so is ours
        return None, 0.0, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}" if str(error) else repr(error)


def _first_call(way: Way, patience: float) -> tuple[Call, object, float]:
    with ways.budget(patience) if way.compiles else contextlib.nullcontext():
        call = way.prepare()
        start = time.perf_counter()
        return call, call(), time.perf_counter() - start
