"""The CPU table: every task x dtype x lengths, against the limit, hand-written C++ and the peers, all in one run.

In: `serrate bench cpu [--only TASK] [--lengths KIND] [--dtype TYPE] [--rounds N]`. Out: tables, on the terminal and as cpu.md;
cpu.json; cpu-float32.png and so on. An interrupted run shows and keeps the cells it has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import cells, limits, methods, report
from benchmarks.data import DISTRIBUTIONS
from benchmarks.options import Options, chosen
from benchmarks.tasks import DTYPES, QUICK, TASKS, Sizes


def grid(only: Sequence[str], lengths: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str, str]]:
    """The selected cells as (task, dtype, lengths); all of them by default.

    >>> grid(["grouped matmul"], ["uniform", "giant"], ["float32"])
    [('grouped matmul', 'float32', 'uniform')]
    """
    tasks, kinds = chosen("--only", only, TASKS), chosen("--lengths", lengths, DISTRIBUTIONS)
    types = chosen("--dtype", dtypes, DTYPES)
    return [(task, dtype, kind) for dtype in types for task in tasks for kind in kinds if kind in TASKS[task].lengths]


def main(options: Options, name: str = "cpu") -> bool:
    """Measures, prints and writes; returns whether serrate ran and was correct everywhere."""
    console, machine = Console(), limits.machine()
    wanted = grid(options.only, options.lengths, options.dtypes)
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[cells.Cell] = []
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(wanted))
        try:
            for cell in _measured(wanted, options, lambda doing: progress.update(bar, description=doing)):
                found.append(cell)
                # after every cell, so that an interrupted run keeps its results
                report.write_json(options.out / f"{name}.json", machine, found)
                progress.advance(bar)
        except KeyboardInterrupt:
            console.print(f"stopped after {len(found)} of {len(wanted)} cells")
    if not found:
        return False
    report.print_machine(machine, console)
    report.print_tables(found, console)
    _finish(console, options.out, name, machine, found)
    return all(cell.ours is not None for cell in found)


def _measured(wanted: Sequence[tuple[str, str, str]], options: Options, tell: Callable[[str], None]) -> Iterator[cells.Cell]:
    """Yields the cells in order; `tell` receives progress messages."""
    sizes, rounds = (QUICK, min(options.rounds, 5)) if options.quick else (Sizes(), options.rounds)
    previous = None
    for task, dtype, lengths in wanted:
        if (task, dtype) != previous:
            methods.forget_compiled()
            previous = (task, dtype)
        saying = partial(_say, tell, f"{task}, {dtype}, {lengths}")
        yield cells.run(task, lengths, dtype, sizes, rounds, compiled=options.compiled, patience=options.patience, tell=saying)


def _say(tell: Callable[[str], None], title: str, doing: str) -> None:
    tell(f"{title}: {doing}")


def _finish(console: Console, out: Path, name: str, machine: limits.Machine, found: list[cells.Cell]) -> None:
    pictures = report.plot(out, name, machine, found)
    report.write_markdown(out / f"{name}.md", machine, found)
    wrote = [str(path) for path in (out / f"{name}.json", out / f"{name}.md", *pictures)]
    console.print(
        f"wrote {', '.join(wrote)}" + ("" if pictures else f"; no plot: {report.INSTALL}"), markup=False, highlight=False
    )
