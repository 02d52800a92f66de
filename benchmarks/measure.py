"""Interleaved timing.

In: callables by name. Out: frozen timings, in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one callable; `rounds` is fewer than requested if it was too slow."""

    median: float
    least: float
    rounds: int


def measure(
    callables: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Mapping[str, Callable[[], object]] | None = None,
    patience: float = 4.0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times the callables in turn, `rounds` times, so that changes in the machine's speed affect all of them alike.

    A callable that has been timed at least once and has used `patience` seconds skips the remaining rounds. `before[name]` runs
    before each call of a callable, untimed; `tick` after every turn.

    >>> measure({"nothing": lambda: None}, rounds=3)["nothing"].rounds
    3
    """
    seconds: dict[str, list[float]] = {name: [] for name in callables}
    spent = dict.fromkeys(callables, 0.0)
    for turn in range(rounds + 1):
        for name, call in callables.items():
            if turn > 1 and spent[name] > patience:
                continue
            if before and name in before:
                before[name]()
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            spent[name] += elapsed
            # the first turn warms up caches, pools and code
            if turn > 0:
                seconds[name].append(elapsed)
        tick()
    return {name: timing(each) for name, each in seconds.items()}


def timing(seconds: list[float]) -> Timing:
    """Summarises the seconds that calls took."""
    return Timing(1e3 * statistics.median(seconds), 1e3 * min(seconds), len(seconds))


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Many calls as one, for callables too short to be timed alone."""

    def many() -> None:
        for _ in range(times):
            call()

    return many
