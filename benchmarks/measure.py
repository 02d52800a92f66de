"""Interleaved timing, and what is made of it.

Comes in: callables by name. Goes out: frozen timings, and from a list of cells a table, a JSON file and a bar plot.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.limits import Machine

# a median this many times the least is the neighbours' doing, not the code's
UNSTEADY = 1.25
# beaten by more than noise, the limit is not one: the copy met slower memory than the work did
BEATEN = 1.1


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one callable; `rounds` is less than asked for where it was too slow to go on."""

    median: float
    least: float
    rounds: int


@dataclass(frozen=True)
class Cell:
    """One work on one distribution; times are medians in milliseconds."""

    work: str
    distribution: str
    limit: float
    hand: float
    ours: float | None
    peers: Mapping[str, float]
    skipped: Mapping[str, str]
    timings: Mapping[str, Timing] = field(repr=False)

    @property
    def unsteady(self) -> bool:
        """Whether the cell supports no claim: the same loops took different times, or something beat what is called the limit."""
        steady = [timing for name, timing in self.timings.items() if name == "hand" or name.startswith("limit")]
        beaten = min(self.hand, self.ours or self.hand) * BEATEN < self.limit
        return beaten or any(timing.median > UNSTEADY * timing.least for timing in steady)

    @property
    def percent_of_limit(self) -> float | None:
        return None if self.ours is None else 100 * self.limit / self.ours

    @property
    def ours_over_hand(self) -> float | None:
        return None if self.ours is None else self.ours / self.hand

    @property
    def best_peer(self) -> tuple[str, float] | None:
        return min(self.peers.items(), key=lambda named: named[1], default=None)


def measure(callables: Mapping[str, Callable[[], object]], rounds: int, title: str, patience: float = 4.0) -> dict[str, Timing]:
    """Time the callables in turn, `rounds` times, so that a change of the machine's speed meets all of them alike.

    A callable that has used `patience` seconds and been timed once sits the other rounds out.
    """
    seconds: dict[str, list[float]] = {name: [] for name in callables}
    spent = dict.fromkeys(callables, 0.0)
    with Progress(transient=True) as progress:
        task = progress.add_task(title, total=rounds + 1)
        for turn in range(rounds + 1):
            for name, call in callables.items():
                if turn > 1 and spent[name] > patience:
                    continue
                start = time.perf_counter()
                call()
                elapsed = time.perf_counter() - start
                spent[name] += elapsed
                # the first turn warms caches, pools and code up
                if turn > 0:
                    seconds[name].append(elapsed)
            progress.advance(task)
    return {name: Timing(1e3 * statistics.median(each), 1e3 * min(each), len(each)) for name, each in seconds.items()}


def write_json(path: Path, machine: Machine, cells: Sequence[Cell]) -> None:
    record = {"machine": dataclasses.asdict(machine), "unit": "ms, medians of interleaved rounds"}
    rows = [{**dataclasses.asdict(cell), "percent_of_limit": cell.percent_of_limit, "unsteady": cell.unsteady} for cell in cells]
    path.write_text(json.dumps({**record, "cells": rows}, indent=1) + "\n")


def print_table(machine: Machine, cells: Sequence[Cell], console: Console) -> None:
    console.print(f"{machine.processor}, {machine.threads} threads, {machine.date}", highlight=False)
    console.print(f"torch {machine.torch}, Python {machine.python}, {machine.compiler}", highlight=False)
    console.print(f"{machine.command}", highlight=False)
    table = Table(
        caption=f"ms, medians of interleaved rounds; % of the limit; * no claim: median over {UNSTEADY} x least, or limit beaten"
    )
    for heading in ("work", "lengths"):
        table.add_column(heading, no_wrap=True)
    for heading in ("limit", "hand C++", "%", "ours", "%", "ours / hand"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peers, best first")
    previous = ""
    for cell in cells:
        if previous not in ("", cell.work):
            table.add_section()
        previous = cell.work
        table.add_row(
            cell.work,
            cell.distribution + (" *" if cell.unsteady else ""),
            _number(cell.limit),
            _number(cell.hand),
            f"{100 * cell.limit / cell.hand:.0f}",
            _number(cell.ours),
            _number(cell.percent_of_limit, 0),
            _number(cell.ours_over_hand, 2),
            _peers(cell),
        )
    console.print(table)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _peers(cell: Cell) -> str:
    timed = [f"{name} {value:.1f}" for name, value in sorted(cell.peers.items(), key=lambda named: named[1])]
    return ", ".join([*timed, *(f"{name}: {reason}" for name, reason in cell.skipped.items())])


def plot(path: Path, machine: Machine, cells: Sequence[Cell]) -> bool:
    """Bars in multiples of the limit, logarithmic; False, and no file, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series: list[tuple[str, list[float | None]]] = [
        ("hand C++", [cell.hand for cell in cells]),
        ("ours", [cell.ours for cell in cells]),
        ("best peer", [cell.best_peer[1] if cell.best_peer else None for cell in cells]),
        ("NestedTensor", [cell.peers.get("NestedTensor") for cell in cells]),
    ]
    series = [(name, times) for name, times in series if any(time is not None for time in times)]
    figure, axes = pyplot.subplots(figsize=(14, 5))
    width = 0.8 / len(series)
    for position, (name, times) in enumerate(series):
        drawn = [(index, each / cells[index].limit) for index, each in enumerate(times) if each is not None]
        axes.bar([index + position * width for index, _ in drawn], [ratio for _, ratio in drawn], width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("time / limit")
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(cells))])
    axes.set_xticklabels([f"{cell.work}\n{cell.distribution}" for cell in cells], rotation=60, ha="right", fontsize=8)
    axes.set_title(f"{machine.processor}, {machine.threads} threads, torch {machine.torch}, {machine.date}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
