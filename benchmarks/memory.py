"""The memory tables: peak memory on top of inputs and outputs, and the cost of a result in fresh memory.

In: `serrate bench memory [--only TASK] [--lengths KIND] [--rounds N]`. Out: two tables and memory.json. Every peak is measured in
its own process, which runs one task with one method.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks import limits, ours, peers, report
from benchmarks.measure import measure
from benchmarks.methods import Method
from benchmarks.options import Options, chosen
from benchmarks.tasks import BACKWARD, DTYPES, QUICK, TASKS, Sizes, Task, make_task
from serrate.cli.peak import held, peak_of, settle

LENGTHS = ("uniform", "exponential", "bimodal")
METHODS = ("serrate", "NestedTensor", "padded + mask", "padded bmm", "segments", "torch.mm per group", "SDPA per sequence")
FRESH = ("pointwise", "softmax", "layer norm")
AT_MOST = 1.4
"""The goal for a result in fresh memory, relative to reused memory."""
EXTRA, WORDS = 0.01, 4
"""The goal for memory on top of inputs and outputs: a fraction of them, plus words per row."""


@dataclass(frozen=True)
class Peak:
    """Megabytes of one task with one method; `extra` is on top of the ragged inputs and outputs, None if not measured."""

    task: str
    lengths: str
    method: str
    inputs: float
    outputs: float
    extra: float | None
    allowed: float
    reason: str = ""


@dataclass(frozen=True)
class Fresh:
    """Milliseconds of one task, with its result in fresh memory and in reused memory."""

    task: str
    lengths: str
    fresh: float
    reused: float


def main(options: Options) -> bool:
    """Measures, prints and writes; returns whether every peak of serrate could be measured."""
    console, machine = Console(), limits.machine()
    alone = [task for task in TASKS if not task.endswith(BACKWARD)]
    tasks, kinds = chosen("--only", options.only, alone), chosen("--lengths", options.lengths, LENGTHS)
    wanted = [(task, kind) for task in tasks for kind in kinds if kind in TASKS[task].lengths]
    found: list[Peak] = []
    speeds: list[Fresh] = []
    with Progress(console=console, transient=True) as progress:
        running = progress.add_task("", total=len(wanted))
        for task, kind in wanted:
            progress.update(running, description=f"{task}, {kind}")
            found += _peaks(task, kind, options.quick)
            if task in FRESH:
                speeds.append(_fresh(task, kind, options))
            progress.advance(running)
    report.print_machine(machine, console)
    console.print(_peak_table(found))
    if speeds:
        console.print(_fresh_table(speeds))
    path = options.out / "memory.json"
    report.write_lines(path, machine, "peaks in MB, times in ms", [*found, *speeds])
    console.print(f"wrote {path}", highlight=False)
    return all(peak.extra is not None for peak in found if peak.method == "serrate")


# --- peaks ---------------------------------------------------------------------------------------------------------------


def _peaks(task: str, kind: str, quick: bool) -> list[Peak]:
    """One process per method, because memory freed by one would be reused by the next."""
    command = [sys.executable, "-m", "benchmarks.memory", task, kind, "quick" if quick else "full"]
    # Only the methods' names are used here; their data is created in their own processes.
    names = [method.name for method in _methods(make_task(task, kind, DTYPES["float32"], QUICK))]
    return [Peak(task, kind, **json.loads(_output([*command, name]))) for name in names]


def _methods(it: Task) -> list[Method]:
    return [method for method in (ours.method(it), *peers.methods(it, compiled=False)) if method.name in METHODS]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.splitlines()[-1]


def _child(task: str, kind: str, size: str, name: str) -> None:
    """In a new process: the peak of one method, as JSON."""
    it = make_task(task, kind, DTYPES["float32"], QUICK if size == "quick" else Sizes())
    method = next(each for each in _methods(it) if each.name == name)
    print(json.dumps(_peak(method, it.inputs, 8 * WORDS * it.data.rows)))


def _peak(method: Method, inputs: int, words: int) -> dict[str, object]:
    sizes = {"method": method.name, "inputs": inputs / 1e6, "outputs": 0.0, "extra": None, "allowed": 0.0}
    if method.reason:
        return {**sizes, "reason": method.reason}
    settle()
    before = held()
    call = method.prepare()
    after = held()
    try:
        call()  # compiles, where there is something to compile
    except Exception as error:
        return {**sizes, "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    peak, result = peak_of(call)
    outputs = method.values(result).nbytes
    if peak is None or before is None or after is None:
        return {**sizes, "reason": "the system does not say how much memory a process holds"}
    # A method's own copy of its inputs (padded) is part of its cost.
    extra = after - before + peak - outputs
    allowed = EXTRA * (inputs + outputs) + words
    return {**sizes, "outputs": outputs / 1e6, "extra": extra / 1e6, "allowed": allowed / 1e6}


def _peak_table(found: list[Peak]) -> Table:
    table = Table(
        title="peak memory, MB",
        caption=f"beside them: ours is to hold at most {EXTRA:.0%} of both and {WORDS} words a row",
    )
    for heading in ("task", "lengths", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("inputs", "outputs", "beside them", "%"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for at, peak in enumerate(found):
        if at and found[at - 1].task != peak.task:
            table.add_section()
        first = at == 0 or (found[at - 1].task, found[at - 1].lengths) != (peak.task, peak.lengths)
        share = None if peak.extra is None else 100 * peak.extra / (peak.inputs + peak.outputs)
        table.add_row(
            peak.task if first else "",
            peak.lengths if first else "",
            peak.method,
            report.number(peak.inputs, 1),
            report.number(peak.outputs, 1),
            report.number(peak.extra, 1),
            report.number(share, 1),
            _judged(peak),
        )
    return table


def _judged(peak: Peak) -> Text:
    if peak.method != "serrate":
        return Text(peak.reason)
    if peak.extra is None:
        return Text(peak.reason, style="red")
    fits = peak.extra <= peak.allowed
    return Text("ok" if fits else f"misses: allowed are {peak.allowed:.1f}", style="green" if fits else "red")


# --- fresh results -------------------------------------------------------------------------------------------------------


def _fresh(task: str, kind: str, options: Options) -> Fresh:
    it = make_task(task, kind, DTYPES["float32"], QUICK if options.quick else Sizes())
    call = ours.method(it).prepare()
    calls: dict[str, Callable[[], object]] = {"fresh": call, "reused": call}
    # Before a fresh result, cached memory is released; before a reused one there must be some.
    timed = measure(calls, options.rounds, before={"fresh": settle, "reused": call})
    return Fresh(task, kind, timed["fresh"].median, timed["reused"].median)


def _fresh_table(speeds: list[Fresh]) -> Table:
    table = Table(title="a large result in fresh memory, ms", caption=f"times reused: to be at most {AT_MOST}")
    for heading in ("task", "lengths"):
        table.add_column(heading, no_wrap=True)
    for heading in ("fresh", "reused", "times reused"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for each in speeds:
        fits = each.fresh <= AT_MOST * each.reused
        verdict = Text("ok" if fits else "misses", style="green" if fits else "red")
        times = (report.number(each.fresh), report.number(each.reused), f"{each.fresh / each.reused:.2f}")
        table.add_row(each.task, each.lengths, *times, verdict)
    return table


if __name__ == "__main__":
    _child(*sys.argv[1:])
