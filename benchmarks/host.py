"""Host time of calls on a GPU, measured without one: everything up to the launch of each kernel, on a device that is not there.

In: a torch built for CPUs. Out: a table and host.json with, for every task, microseconds of the host for a warm call, for
building a ragged tensor, and for a call with new offsets beyond that, on as many positions as before and on others; and how many
kernels each launches. A launch takes no time here; `torch.add` on a CPU is the unit, timed in turn. Run as `serrate bench host`.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import fake_device, limits, report
from benchmarks.gpu_tasks import DTYPES, TASKS, Work, data_of
from benchmarks.options import Options, chosen

NAMES = (
    "sum", "softmax", "layer norm", "pointwise", "gather of rows", "grouped matmul", "attention 64", "decode attention",
    "to_padded", "from_padded", "experts", "sum, kernel", "softmax, kernel", "layer norm, kernel", "grouped matmul, kernel",
    "HSTU 64, kernel",
)  # fmt: skip
ROWS, MEAN = 64, 64
WARM_UP, CALLS = 20, 8
"""Calls before anything is timed, and calls that are timed together: few, to escape interruption on a busy machine."""
UNSEEN = 240
"""How many offsets there are: more than the caches hold, so that every one is new when it comes up again."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Line:
    """One kind of call of a task: the least microseconds, the same in units of `torch.add`, and the kernels that it launches."""

    task: str
    call: str
    microseconds: float
    additions: float
    launches: int


def calls_of(work: Work) -> dict[str, Call]:
    """The calls of a task that are timed."""
    found: dict[str, Call] = {"warm": partial(work.call, *work.arguments(work.data.tensor()))}
    if not work.ragged:
        return found
    data, end = work.data, int(work.data.offsets[-1])
    same = itertools.cycle([replace(data, offsets=data.offsets.clone()) for _ in range(UNSEEN)])
    found["construction"] = lambda: work.arguments(next(same).tensor())
    found["new offsets"] = lambda: work.call(*work.arguments(next(same).tensor()))
    if work.operands:
        return found  # other tensors have as many positions
    totals = [end - k for k in range(UNSEEN)]
    others = itertools.cycle([replace(data, values=data.values[:n], offsets=data.offsets.clamp(max=n)) for n in totals])
    found["other total"] = lambda: work.call(*work.arguments(next(others).tensor()))
    return found


def measured(names: list[str], rounds: int) -> list[Line]:
    """Times all calls in turn, in a process in which the device is installed."""
    fake_device.install()
    # What torch does on the device, a CPU does here: threads would wait for each other longer than that takes.
    torch.set_num_threads(1)
    one = torch.ones(64, device="cpu")
    calls: dict[tuple[str, str], Call] = {("", "torch.add"): lambda: torch.add(one, one)}
    for name in names:
        task = TASKS[name]
        dtype = next(each for each in DTYPES if each in task.dtypes)
        data = data_of(replace(task, mean=min(task.mean, MEAN)), "exponential", dtype, "cuda", rows=min(task.rows, ROWS))
        calls |= {(name, kind): call for kind, call in calls_of(task.make(data)).items()}
    launches = {}
    for key, call in calls.items():
        for _ in range(WARM_UP):
            call()
        fake_device.launches[0] = 0
        call()
        launches[key] = fake_device.launches[0]
    least = dict.fromkeys(calls, float("inf"))
    gc.disable()
    for _ in range(rounds):
        for key, call in calls.items():
            call()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[key] = min(least[key], (time.perf_counter() - begin) / CALLS * 1e6)
        gc.collect()
    add = least["", "torch.add"]
    for name in names:
        built = least.get((name, "construction"), 0.0)
        for kind in ("new offsets", "other total"):
            if (name, kind) in least:
                least[name, kind] -= built
                launches[name, kind] -= launches[name, "construction"]
    return [Line(*key, us, us / add, launches[key]) for key, us in least.items()]


def main(options: Options) -> bool:
    """Measures in a process of its own, prints the table and writes host.json; returns whether all calls ran."""
    console, names = Console(), chosen("--only", options.only, NAMES)
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        console.print("serrate bench host stands in for a GPU where torch has none; here, serrate bench gpu measures host time")
        return False
    machine, rounds = limits.machine(), 3 if options.quick else 4 * options.rounds
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.host", json.dumps([names, rounds])]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "SERRATE_TUNE": "never", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        console.print(done.stderr[-4000:], style="red", markup=False)
        return False
    lines = [Line(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    report.print_machine(machine, console)
    console.print(_table(lines))
    report.write_lines(options.out / "host.json", machine, "microseconds, the least of interleaved rounds", lines)
    console.print(f"wrote {options.out / 'host.json'}", highlight=False)
    return True


def _table(lines: list[Line]) -> Table:
    table = Table(caption="host time up to the launches; calls with new offsets beyond construction")
    for heading in ("task", "call"):
        table.add_column(heading, no_wrap=True)
    for heading in ("µs", "x torch.add", "launches"):
        table.add_column(heading, justify="right")
    for at, line in enumerate(lines):
        first = at == 0 or lines[at - 1].task != line.task
        if at and first:
            table.add_section()
        table.add_row(
            line.task if first else "", line.call, f"{line.microseconds:.1f}", f"{line.additions:.1f}", str(line.launches)
        )
    return table


if __name__ == "__main__":
    given: list[Any] = json.loads(sys.argv[1])
    print(json.dumps([asdict(line) for line in measured(*given)]))
