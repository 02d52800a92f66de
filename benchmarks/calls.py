"""The table of call overheads, on data so small that the kernel takes no time.

In: `serrate bench calls [--rounds N]`. Out: a table and calls.json. The kernel is hand-written C++ on the same rows, with its
arguments prepared; one thread, as serrate itself uses for so little data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import handwritten, limits, ours, report
from benchmarks.measure import measure, repeated
from benchmarks.options import Options, chosen
from benchmarks.peers.padding import nested
from benchmarks.tasks import DTYPES, Sizes, Task, make_task
from serrate import JaggedTensor

REPEATS = 20
"""Calls timed together: about a millisecond, short enough to escape interruption on a busy machine."""
TINY = Sizes(rows=32, mean=8, features=16)
GOALS = {"jit": 30.0, "eager": 20.0}
"""The goal for the overhead of a warm call, in microseconds."""

Call = Callable[[], object]
EAGER: dict[str, Callable[..., Any]] = {
    "sum": lambda x: x.sum(dim=1),
    "softmax": lambda x: torch.softmax(x, dim=1),
    "pointwise": lambda x, scale, bias: x * scale + bias,
}
"""One operator at a time on tensors as they are; the pointwise chain without its relu, that is two calls of ours."""


@dataclass(frozen=True)
class Line:
    """One way to call a task: microseconds per call, and the overhead in it."""

    task: str
    method: str
    microseconds: float | None
    beyond: float | None
    goal: float | None
    reason: str = ""


def methods(it: Task) -> dict[str, Call]:
    """Everything that is timed for one task; the kernel first."""
    values, offsets = it.data.values, it.data.offsets
    jitted, eager = ours.JITTED[it.kind], EAGER[it.kind]
    jt, in_nested = JaggedTensor.from_csr(values, offsets), nested(it.data)
    # More structures than the caches hold: every one is new when it comes up again.
    unseen = itertools.cycle([offsets.clone() for _ in range(4 * REPEATS)])
    hand = handwritten.method(it)
    assert hand is not None
    return {
        "the kernel": hand.prepare(),
        "jit": lambda: jitted(jt, *it.operands),
        "eager": lambda: eager(jt, *it.operands),
        "new lengths: the tensor alone": lambda: JaggedTensor.from_csr(values, next(unseen)),
        "new lengths: jit": lambda: jitted(JaggedTensor.from_csr(values, next(unseen)), *it.operands),
        "new lengths: eager": lambda: eager(JaggedTensor.from_csr(values, next(unseen)), *it.operands),
        "NestedTensor": lambda: eager(in_nested, *it.operands),
        "new lengths: NestedTensor": lambda: eager(nested(it.data), *it.operands),
        "torch on the flat values": lambda: _flat(it)(values),
    }


def _flat(it: Task) -> Callable[[torch.Tensor], object]:
    if it.kind == "pointwise":
        scale, bias = it.operands
        return lambda values: values * scale + bias
    return (lambda values: values.sum(dim=0)) if it.kind == "sum" else (lambda values: torch.softmax(values, dim=0))


def run(task: str, rounds: int) -> list[Line]:
    """Times the methods in turn, many calls at a time."""
    it = make_task(task, "uniform", DTYPES["float32"], TINY)
    calls, refused = {}, {}
    for name, call in methods(it).items():
        try:
            call()
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            calls[name] = repeated(call, REPEATS)
    times = {name: 1e3 * each.median / REPEATS for name, each in measure(calls, rounds).items()}
    kernel = times["the kernel"]
    lines = []
    for name in methods(it):
        goal = GOALS.get(name)
        if name in refused:
            lines.append(Line(task, name, None, None, goal, refused[name]))
        else:
            # Two operators of ours in one chain are two calls.
            operators = 2 if name == "eager" and task == "pointwise" else 1
            goal = None if goal is None else goal * operators
            lines.append(Line(task, name, times[name], times[name] - kernel if name != "the kernel" else None, goal))
    return lines


def main(options: Options) -> bool:
    """Prints and writes the table; returns whether jit could be called."""
    console, machine = Console(), limits.machine()
    tasks = chosen("--only", options.only, EAGER)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = [line for task in tasks for line in run(task, min(options.rounds, 5) if options.quick else options.rounds)]
    finally:
        torch.set_num_threads(threads)
    report.print_machine(machine, console)
    console.print(_table(lines))
    report.write_lines(options.out / "calls.json", machine, "microseconds, medians of interleaved rounds", lines)
    console.print(f"wrote {options.out / 'calls.json'}", highlight=False)
    return all(line.microseconds is not None for line in lines if line.method == "jit")


def _table(lines: list[Line]) -> Table:
    table = Table(caption=f"microseconds a call, one thread; {TINY.rows} rows of about {TINY.mean} x {TINY.features}")
    for heading in ("task", "call"):
        table.add_column(heading, no_wrap=True)
    for heading in ("µs", "beyond the kernel", "goal"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for at, line in enumerate(lines):
        first = at == 0 or lines[at - 1].task != line.task
        if at and first:
            table.add_section()
        numbers = (report.number(line.microseconds), report.number(line.beyond), report.number(line.goal, 0))
        table.add_row(line.task if first else "", line.method, *numbers, _judged(line))
    return table


def _judged(line: Line) -> Text:
    if line.goal is None or line.microseconds is None:
        return Text(line.reason, style="red")
    fits = line.beyond is not None and line.beyond <= line.goal
    return Text("ok" if fits else "misses", style="green" if fits else "red")
