"""Cells of the CPU table: one task, one dtype, one distribution of lengths; checked, then timed.

In: a task. Out: a `Cell` with the times of the limit, of hand-written C++, of serrate and of every peer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks import handwritten, limits, methods, ours, peers, training
from benchmarks.measure import Timing, measure, timing
from benchmarks.methods import Call, Method
from benchmarks.tasks import (
    BACKWARD,
    DTYPES,
    PRODUCTS,
    TASKS,
    Sizes,
    Task,
    again,
    dense_product,
    expected,
    is_right,
    make_task,
    passes,
    traffic,
)

# a median this many times the minimum is due to other load on the machine
UNSTEADY = 1.25
# if the limit is beaten by more than noise, it is invalid: the copy had slower memory than the task
BEATEN = 1.1
# the required lead over every peer, wherever the limit leaves room for it
AHEAD = 1.15
# the goal for 16-bit types, relative to the goal for float32
NARROW = 0.8
# the goal for one giant row, relative to uniform lengths
GIANT = 0.9
# seconds: slower methods are timed by a single call, and if the first call took this long, by that one
ONCE = 1.5
# methods that are not peers
OWN = ("hand C++", "serrate")
PATIENCE = 10.0


@dataclass(frozen=True)
class Cell:
    """One task on one distribution; times are medians in milliseconds. `fault`: why serrate has no time."""

    task: str
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
        """Whether the cell supports no claim: its times were unsteady, or something beat the limit."""
        steady = [each for name, each in self.timings.items() if name == "hand C++" or name.startswith("limit")]
        fastest = min((each for each in (self.hand, self.ours, *self.peers.values()) if each is not None), default=self.limit)
        beaten = fastest * BEATEN < self.limit and not self._may_be_beaten
        return beaten or any(each.median > UNSTEADY * each.least for each in steady)

    @property
    def _may_be_beaten(self) -> bool:
        """Whether the limit may be beaten: a copy for a task that mostly fills, a float32 product for a narrower one."""
        return self.task == "to_padded" or (self.task in PRODUCTS and self.dtype != "float32")

    @property
    def percent(self) -> float | None:
        """Of the limit."""
        return None if self.ours is None else 100 * self.limit / self.ours

    @property
    def goal(self) -> float:
        """The goal in percent of the limit; for a giant row it depends on what uniform lengths reach."""
        goal = TASKS[self.task].goal
        return goal if self.dtype == "float32" or self.task in PRODUCTS else NARROW * goal

    @property
    def best_peer(self) -> tuple[str, float] | None:
        return min(self.peers.items(), key=lambda named: named[1], default=None)

    @property
    def ahead(self) -> float | None:
        """The best peer's time relative to serrate's."""
        return None if self.ours is None or self.best_peer is None else self.best_peer[1] / self.ours

    @property
    def behind_a_peer(self) -> bool:
        """Whether the lead over the best peer is too small although the limit leaves room, or `never_behind` is violated."""
        if self.ours is None or self.best_peer is None:
            return self.ours is None
        if self.ours > self.peers.get(TASKS[self.task].never_behind, self.ours):
            return True
        room = self.best_peer[1] / self.limit
        return room >= AHEAD and self.best_peer[1] / self.ours < AHEAD


def run(
    task: str,
    distribution: str,
    dtype: str,
    sizes: Sizes,
    rounds: int,
    *,
    compiled: bool,
    patience: float,
    tell: Callable[[str], None] = lambda _: None,
) -> Cell:
    """Checks every result against plain torch, row by row, then times all methods in turn. `tell` receives progress messages."""
    torch.manual_seed(0)
    it, *more = again(make_task(task, distribution, DTYPES[dtype], sizes))
    wanted = expected(it)
    limit = _limit(it)
    calls: dict[str, Call] = dict(limit.calls)
    skipped: dict[str, str] = {}
    timed: dict[str, Timing] = {}
    for method, *others in zip(*(_methods(each, compiled) for each in (it, *more)), strict=True):
        tell(f"checking {method.name}")
        call, seconds, reason = _tried(method, it, wanted, patience)
        if call is None:
            skipped[method.name] = reason
        elif seconds > ONCE:
            timed[method.name] = timing([seconds])
        else:
            calls[method.name] = _all(call, *(each.prepare() for each in others))
    if "hand C++" in skipped:
        raise AssertionError(f"hand-written {task} on {distribution} lengths: {skipped['hand C++']}")
    del wanted
    tell("timing")
    # A small task is timed over many calls at once, because the first sees the caches as other methods left them.
    found = measure(calls, rounds, before=limit.before)
    timed |= {name: each if name in limit.calls else _of_one(each, 1 + len(more)) for name, each in found.items()}
    times = {name: each.median for name, each in timed.items()}
    named = {each.name: times[each.name] for each in _methods(it, compiled) if each.name in times and each.name not in OWN}
    fault = skipped.pop("serrate", "")
    own = (limit.milliseconds(timed), times.get("hand C++"), times.get("serrate"))
    return Cell(task, dtype, distribution, *own, fault, named, skipped, timed)


def _methods(it: Task, compiled: bool) -> list[Method]:
    if it.name.endswith(BACKWARD):
        return training.methods(it)
    hand = handwritten.method(it)
    return [*([hand] if hand is not None else []), ours.method(it), *peers.methods(it, compiled)]


def _all(*calls: Call) -> Call:
    """Several calls in sequence, each on its own data."""
    if len(calls) == 1:
        return calls[0]

    def each_in_turn() -> None:
        for call in calls:
            call()

    return each_in_turn


def _of_one(all_of_them: Timing, calls: int) -> Timing:
    """The time per call of several calls timed together."""
    return Timing(all_of_them.median / calls, all_of_them.least / calls, all_of_them.rounds)


def _limit(it: Task) -> limits.Limit:
    if it.name in PRODUCTS:
        return limits.of_product(*dense_product(it), passes(it))
    return limits.of_traffic(traffic(it), it.data.values, it.data.offsets)


def _tried(method: Method, it: Task, wanted: torch.Tensor, patience: float) -> tuple[Call | None, float, str]:
    """The call, if its result is correct, and the time of one call; or the reason why it is left out."""
    if method.reason:
        return None, 0.0, method.reason
    try:
        call, result, seconds = _first_call(method, patience)
        if not is_right(it, method.values(result), wanted):
            return None, 0.0, "wrong result"
        del result
        # The first call may compile, which does not count; a call that took this long is not repeated.
        if seconds < PATIENCE:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        return call, seconds, ""
    except Exception as error:
        # any error, of a peer or of serrate, is shown in the table
        return None, 0.0, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}" if str(error) else repr(error)


def _first_call(method: Method, patience: float) -> tuple[Call, object, float]:
    with methods.budget(patience) if method.compiles else contextlib.nullcontext():
        call = method.prepare()
        start = time.perf_counter()
        return call, call(), time.perf_counter() - start
