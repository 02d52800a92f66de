"""Interleaved timing.

Comes in: callables by name. Goes out: frozen timings, in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one callable; `rounds` is less than asked for where it was too slow to go on."""

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
    """Time the callables in turn, `rounds` times, so that a change of the machine's speed meets all of them alike.

    A callable that has used `patience` seconds and been timed once sits the other rounds out. What is in `before` under a
    callable's name runs before each of its calls, untimed; `tick` after every turn.

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
            # the first turn warms caches, pools and code up
            if turn > 0:
                seconds[name].append(elapsed)
        tick()
    return {name: timing(each) for name, each in seconds.items()}


def timing(seconds: list[float]) -> Timing:
    """What is kept of the seconds that calls took."""
    return Timing(1e3 * statistics.median(seconds), 1e3 * min(seconds), len(seconds))


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Many calls as one, for what is too short to be timed alone."""

    def many() -> None:
        for _ in range(times):
            call()

    return many
