"""Reports: tables, a JSON file and plots.

In: cells and the machine. Out: a table per dtype that names every missed goal, JSON, and bars in multiples of the limit.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.cells import AHEAD, GIANT, UNSTEADY, Cell
from benchmarks.limits import Machine

INSTALL = "matplotlib is not installed (pip install 'serrate[bench]')"
SHOWN = 4
"""The number of peers named in a table; the JSON has all."""


def goal(cell: Cell, cells: Sequence[Cell]) -> float:
    """The goal in percent of the limit: for a giant row, a tenth below what uniform lengths reach in the same run."""
    if cell.lengths != "giant":
        return cell.goal
    alike = [c.percent for c in cells if (c.task, c.dtype, c.lengths) == (cell.task, cell.dtype, "uniform") and c.percent]
    return GIANT * (alike[0] if alike else cell.goal)


def misses(cell: Cell, cells: Sequence[Cell]) -> list[str]:
    """The missed goals: the percentage of the `limit`, the lead over the best `peer`, or everything."""
    if cell.percent is None:
        return ["all"]
    return [*(["limit"] if cell.percent < goal(cell, cells) else []), *(["peer"] if cell.behind_a_peer else [])]


def print_machine(machine: Machine, console: Console) -> None:
    """Prints where, when and with what command the table was measured."""
    console.print(f"{machine.processor}, {machine.threads} threads, {machine.date}", highlight=False)
    console.print(f"torch {machine.torch}, Python {machine.python}, {machine.compiler}", highlight=False)
    console.print(machine.command, highlight=False)


def print_tables(cells: Sequence[Cell], console: Console) -> None:
    """Prints a table per dtype, the errors, and a legend."""
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        console.print(_table([cell for cell in cells if cell.dtype == dtype], cells, dtype, console.width))
    for cell in cells:
        if cell.fault:
            console.print(Text(f"serrate, {cell.task}, {cell.dtype}, {cell.lengths}: {cell.fault}", style="red"))
    console.print(
        "ms, medians of interleaved rounds. %: of the limit in the same run; goal: what it is to be. "
        f"ahead: the best peer's time over ours, to be {AHEAD} where the limit leaves that room. "
        f"*: supports no claim (a median over {UNSTEADY} x the least, or the limit beaten).",
        highlight=False,
        style="dim",
    )


def _table(cells: Sequence[Cell], every: Sequence[Cell], dtype: str, width: int) -> Table:
    """As many columns as fit the terminal; the JSON has everything."""
    table = Table(title=dtype, box=SIMPLE_HEAD, pad_edge=False)
    with_times, with_others = width >= 110, width >= 150
    for heading in ("task", "lengths"):
        table.add_column(heading, no_wrap=True)
    for heading in (*(("limit", "hand C++") if with_times else ()), "serrate", "%", "goal", "ahead"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("misses", no_wrap=True)
    for heading in (*(("best peer",) if with_times else ()), *(("others",) if with_others else ())):
        table.add_column(heading)
    for at, cell in enumerate(cells):
        if at and cells[at - 1].task != cell.task:
            table.add_row()
        times = (number(cell.limit), number(cell.hand))
        ratios = (number(cell.ours), number(cell.percent, 0), number(goal(cell, every), 0), number(cell.ahead))
        missed = misses(cell, every)
        star = " *" if cell.unsteady else ""
        judged = Text((", ".join(missed) or "-") + star, style="red" if missed else "green")
        best, others = _peers(cell)
        shown = (*((Text(best),) if with_times else ()), *((Text(others),) if with_others else ()))
        table.add_row(cell.task, cell.lengths, *(times if with_times else ()), *ratios, judged, *shown)
    return table


def number(value: float | None, digits: int | None = None) -> str:
    """A figure with its significant digits.

    >>> number(0.123), number(12.34), number(1234.5), number(None)
    ('0.12', '12.3', '1234', '-')
    """
    if value is None:
        return "-"
    return f"{value:.{digits if digits is not None else 2 if value < 1 else 1 if value < 100 else 0}f}"


def _peers(cell: Cell) -> tuple[str, str]:
    """The best peer with its time; the next best, the number of others, and those that could not be measured, with the reason."""
    best = [f"{name} {number(value)}" for name, value in sorted(cell.peers.items(), key=lambda named: named[1])]
    others = [", ".join(best[1:SHOWN])] if best[1:] else []
    others += [f"{len(best) - SHOWN} slower"] if len(best) > SHOWN else []
    reasons: dict[str, list[str]] = {}
    for name, reason in cell.skipped.items():
        reasons.setdefault(reason, []).append(name)
    others += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return best[0] if best else "-", "; ".join(others)


def write_json(path: Path, machine: Machine, cells: Sequence[Cell]) -> None:
    """Everything that was measured."""
    rows = [
        {
            **dataclasses.asdict(cell),
            "percent": cell.percent,
            "goal": goal(cell, cells),
            "ahead": cell.ahead,
            "misses": misses(cell, cells),
            "unsteady": cell.unsteady,
        }
        for cell in cells
    ]
    _write(path, {"machine": dataclasses.asdict(machine), "unit": "ms, medians of interleaved rounds", "cells": rows})


def write_markdown(path: Path, machine: Machine, cells: Sequence[Cell]) -> None:
    """The tables as Markdown: one per dtype, with every peer that was timed."""
    compiler = machine.compiler.partition(" (")[0] + " " + machine.compiler.rpartition(" ")[2]
    text = [f"{machine.processor}, {machine.threads} threads, {machine.date}, torch {machine.torch}, {compiler}."]
    text += [f"Command: `{machine.command}`. Milliseconds; a star marks a cell that supports no claim.", ""]
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        mine = [cell for cell in cells if cell.dtype == dtype]
        text += [f"### {dtype}", ""]
        text += [
            "| task | lengths | limit | hand C++ | serrate | % of limit | goal | ahead | misses | peers |",
            "| --- " * 10 + "|",
        ]
        for cell in mine:
            best, others = _peers(cell)
            star = " *" if cell.unsteady else ""
            figures = (cell.limit, cell.hand, cell.ours)
            shares = (number(cell.percent, 0), number(goal(cell, cells), 0), number(cell.ahead))
            peers = "; ".join(each for each in (best, others) if each).replace("|", "/")
            missed = ", ".join(misses(cell, cells))
            row = (cell.task, cell.lengths + star, *map(number, figures), *shares, missed, peers)
            text.append(f"| {' | '.join(row)} |")
        text.append("")
    path.write_text("\n".join(text))


def write_lines(path: Path, machine: Machine, unit: str, lines: Sequence[Any]) -> None:
    """Writes the lines of a smaller table, each a dataclass."""
    rows = [dataclasses.asdict(line) for line in lines]
    _write(path, {"machine": dataclasses.asdict(machine), "unit": unit, "lines": rows})


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def plot(folder: Path, name: str, machine: Machine, cells: Sequence[Cell]) -> list[Path]:
    """One plot per dtype with a panel per task: bars in multiples of the limit. None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        mine = [cell for cell in cells if cell.dtype == dtype]
        tasks = list(dict.fromkeys(cell.task for cell in mine))
        across = min(len(tasks), 4)
        down = -(-len(tasks) // across)
        figure, axes = pyplot.subplots(down, across, figsize=(4 * across, 2.8 * down), squeeze=False)
        for panel, task in zip(axes.flat, tasks, strict=False):
            _panel(panel, task, [cell for cell in mine if cell.task == task])
        for panel in axes.flat[len(tasks) :]:
            panel.set_axis_off()
        axes[0][0].legend(fontsize=7)
        figure.suptitle(
            f"time / limit, {dtype}: {machine.processor}, {machine.threads} threads, torch {machine.torch}, {machine.date}"
        )
        figure.tight_layout()
        paths.append(folder / f"{name}-{dtype}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def _panel(axes: Any, task: str, cells: Sequence[Cell]) -> None:
    series: list[tuple[str, str, list[float | None]]] = [
        ("hand C++", "tab:gray", [cell.hand for cell in cells]),
        ("serrate", "tab:green", [cell.ours for cell in cells]),
        ("best peer", "tab:blue", [cell.best_peer[1] if cell.best_peer else None for cell in cells]),
        ("NestedTensor", "tab:orange", [cell.peers.get("NestedTensor") for cell in cells]),
    ]
    width = 0.8 / len(series)
    for position, (name, colour, times) in enumerate(series):
        drawn = [(index, each / cells[index].limit) for index, each in enumerate(times) if each is not None]
        axes.bar([i + position * width for i, _ in drawn], [ratio for _, ratio in drawn], width, label=name, color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_title(task, fontsize=9)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(cells))])
    axes.set_xticklabels([cell.lengths for cell in cells], fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
