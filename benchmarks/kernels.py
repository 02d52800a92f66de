"""The tables of tile kernels: every example against hand-written C++ or torch's matrix products, and its call overhead.

In: `serrate bench kernels [--only EXAMPLE] [--lengths KIND] [--rounds N]`. Out: two tables and kernels.json. A first call runs in
a new process with an empty cache; warm calls are timed on almost no data, against their generated code alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks import limits, methods, report
from benchmarks.calls import REPEATS
from benchmarks.cells import ONCE, UNSTEADY
from benchmarks.data import DISTRIBUTIONS
from benchmarks.examples import EXAMPLES, QUICK, TINY, Case, Sizes, case
from benchmarks.measure import Timing, measure, repeated, timing
from benchmarks.methods import Call
from benchmarks.options import Options, chosen
from serrate import Kernel
from serrate.cli.peak import settle
from serrate.runtime import cache_folder

FIRST, LATER = 1.5, 15.0
"""Goals: seconds for a first call, and microseconds of overhead for a warm one."""
PROCESSES = 3
SLOW = 1e-3
"""Seconds: slower calls need not be timed in batches."""
OURS, BAR, FRESH, PROGRAM = "ours", "bar", "fresh", "program of"


@dataclass(frozen=True)
class Speed:
    """One example on one distribution; median milliseconds. `fault`: why serrate has no time."""

    example: str
    lengths: str
    against: str
    bar: float
    ours: float | None
    ratio: float | None
    goal: float
    fault: str
    limit: float | None
    others: Mapping[str, float]
    timings: Mapping[str, Timing] = field(repr=False)

    @property
    def unsteady(self) -> bool:
        """Whether it supports no claim: its times were unsteady."""
        return self.timings[BAR].median > UNSTEADY * self.timings[BAR].least


@dataclass(frozen=True)
class Start:
    """The cost of calling one example: seconds for the first call, microseconds for a warm one and for its generated code
    alone."""

    example: str
    first: float | None
    later: float | None
    program: float | None
    fault: str = ""

    @property
    def beyond(self) -> float | None:
        """The overhead of a warm call."""
        return None if self.later is None or self.program is None else self.later - self.program


def main(options: Options) -> bool:
    """Measures, prints and writes; returns whether serrate ran and was correct everywhere."""
    console, machine = Console(), limits.machine()
    names, kinds = chosen("--only", options.only, EXAMPLES), chosen("--lengths", options.lengths, DISTRIBUTIONS)
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    path, speeds, starts = options.out / "kernels.json", list[Speed](), list[Start]()

    def write() -> None:
        report.write_lines(path, machine, "speeds in ms, first calls in s, later ones in microseconds", [*speeds, *starts])

    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(names) * (len(kinds) + 1))
        try:
            for name in names:
                for kind in kinds:
                    progress.update(bar, description=f"{name}, {kind}")
                    it = case(name, kind, QUICK if options.quick else Sizes())
                    speeds.append(speed(name, kind, it, rounds, options.patience))
                    # after every cell, so that an interrupted run keeps its results
                    write()
                    progress.advance(bar)
            for start in _starts(names, 1 if options.quick else PROCESSES, rounds):
                starts.append(start)
                progress.update(bar, description=f"calls of {start.example}", advance=1)
        except KeyboardInterrupt:
            console.print(f"stopped after {len(speeds)} of {len(names) * len(kinds)} cells")
    write()
    report.print_machine(machine, console)
    console.print(_speed_table(speeds, console.width))
    console.print(_start_table(starts))
    faults = [(f"{each.example}, {each.lengths}", each.fault) for each in speeds if each.fault]
    faults += [(f"calls of {each.example}", each.fault) for each in starts if each.fault]
    for where, fault in faults:
        console.print(Text(f"{where}: {fault}", style="red"))
    console.print(f"wrote {path}", highlight=False)
    return not faults


# --- speed ---------------------------------------------------------------------------------------------------------------


def speed(name: str, lengths: str, it: Case, rounds: int, patience: float) -> Speed:
    """Checks baseline and kernel against plain torch, then times both in turn, with the limit and any other methods."""
    wanted = it.wanted()
    if not it.is_right(it.bar(), wanted):
        raise AssertionError(f"{it.against} for {name} on {lengths} lengths: wrong result")
    calls: dict[str, Call] = {BAR: it.bar}
    once: dict[str, Timing] = {}
    fault, seconds = tried(it, wanted, patience)
    if not fault and seconds > ONCE:
        once[OURS] = timing([seconds])
    elif not fault:
        calls[OURS] = it.call
    del wanted
    limit = it.limit or limits.Limit({}, lambda _: 0.0, {})
    with keeping_memory():
        timed = measure({**calls, **it.others, **limit.calls}, rounds, before=limit.before) | once
    # separate from the others, which would find no reusable memory after these
    fresh = {f"{FRESH} {each}": call for each, call in calls.items()} if it.limit else {}
    timed |= measure(fresh, min(rounds, 5), before=dict.fromkeys(fresh, settle))
    bar, ours = timed[BAR].median, timed[OURS].median if OURS in timed else None
    others = {other: timed[other].median for other in (*it.others, *fresh)}
    return Speed(
        name,
        lengths,
        it.against,
        bar,
        ours,
        None if ours is None else ours / bar,
        it.goal,
        fault,
        limit.milliseconds(timed) if it.limit else None,
        others,
        timed,
    )


@contextlib.contextmanager
def keeping_memory() -> Iterator[None]:
    """Makes the C library keep freed memory for the next result instead of returning it, where that is configurable.

    Clearing fresh pages for a large result takes several times as long as the loops that fill it, which would make all loops look
    alike.
    """
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    if tell is None:
        yield
        return
    trim_threshold, most_mapped = -1, -4
    tell(trim_threshold, -1)
    tell(most_mapped, 0)
    try:
        yield
    finally:
        tell(trim_threshold, 128 << 10)
        tell(most_mapped, 65536)
        settle()


def tried(it: Case, wanted: torch.Tensor, patience: float) -> tuple[str, float]:
    """Why serrate is not timed, or an empty string; and the time of a call that compiled nothing."""
    try:
        with methods.budget(patience):
            result = it.call()
            if not it.is_right(result, wanted):
                return "wrong result", 0.0
            del result
            start = time.perf_counter()
            it.call()
            return "", time.perf_counter() - start
    except methods.OutOfTime:
        return f"two calls not done after {patience:.0f} s", 0.0
    except Exception as error:
        # any error is shown, and the other cells are measured
        return f"{type(error).__name__}: {error}".splitlines()[0][:120], 0.0


def _speed_table(speeds: Sequence[Speed], width: int) -> Table:
    """As many columns as there is room for: the JSON has everything."""
    with_limits = width >= 110
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption="ms, medians of interleaved rounds; every call makes its result, in memory used before unless it says fresh. "
        "bar: hand-written C++ (goal 1.1) or torch (goal 1); ratio: ours over it. "
        "limit: the bytes that must move, at the rate of a copy or a read. "
        f"*: supports no claim (a median over {UNSTEADY} x the least).",
        caption_justify="left",
    )
    for heading in ("example", "lengths", *(("bar",) if with_limits else ())):
        table.add_column(heading, no_wrap=True)
    for heading in ("bar ms", "ours ms", "ratio", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    if with_limits:
        table.add_column("limit", justify="right", no_wrap=True)
        table.add_column("others")
    for at, each in enumerate(speeds):
        if at and speeds[at - 1].example != each.example:
            table.add_row()
        ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
        star = " *" if each.unsteady else ""
        numbers = (report.number(each.bar), report.number(each.ours), ratio, f"{each.goal:.2f}")
        others = ", ".join(f"{name} {report.number(value)}" for name, value in each.others.items())
        judged = _judged(each.ratio, each.goal).append(star)
        wide = (report.number(each.limit), others) if with_limits else ()
        table.add_row(each.example, each.lengths, *((each.against,) if with_limits else ()), *numbers, judged, *wide)
    return table


# --- calls ---------------------------------------------------------------------------------------------------------------


def _starts(names: Sequence[str], processes: int, rounds: int) -> Iterator[Start]:
    firsts = {name: _first(name, processes) for name in names}
    later, faults = _later(names, rounds)
    for name in names:
        first, fault = firsts[name]
        yield Start(name, first, later.get(name), later.get(f"{PROGRAM} {name}"), fault or faults.get(name, ""))


def _first(name: str, processes: int) -> tuple[float | None, str]:
    """Seconds for a first call, the median of several processes; or the reason why it failed."""
    found = []
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.kernels", name],
                env={**os.environ, "SERRATE_CACHE_DIR": cache},
                cwd=Path(__file__).resolve().parents[1],
                capture_output=True,
                text=True,
            )
        if done.returncode:
            return None, (done.stderr.strip().splitlines() or ["the process of its first call failed"])[-1][:120]
        seconds, before, after = json.loads(done.stdout.splitlines()[-1])
        if before or not after:
            return None, f"a first call found {before} programs and left {after}: it did not build"
        found.append(float(seconds))
    return statistics.median(found), ""


def _child(name: str) -> None:
    """In a new process: seconds for the first call, and the number of cached programs before and after it, as JSON."""
    it = case(name, "uniform", TINY)
    before = _built()
    start = time.perf_counter()
    it.call()
    print(json.dumps((time.perf_counter() - start, before, _built())))


def _built() -> int:
    return sum(1 for place in cache_folder.places() for entry in place.iterdir() if entry.is_dir())


def _later(names: Sequence[str], rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds for warm calls on almost no data and for their generated code alone, on one thread; and errors."""
    calls: dict[str, Callable[[], object]] = {}
    each_time: dict[str, int] = {}
    faults: dict[str, str] = {}
    with _one_thread():
        for name in names:
            it = case(name, "uniform", TINY)
            fault, seconds = tried(it, it.wanted(), 60.0)
            if fault:
                faults[name] = fault
                continue
            alone = f"{PROGRAM} {name}"
            each_time[name] = each_time[alone] = REPEATS if seconds < SLOW else 1
            calls[name], calls[alone] = (repeated(call, each_time[name]) for call in (it.call, _programs(it)))
        timed = measure(calls, rounds)
    return {name: 1e3 * each.median / each_time[name] for name, each in timed.items()}, faults


def _programs(it: Case) -> Callable[[], None]:
    """The programs of a call with all their arguments."""
    kernel = it.kernel
    assert isinstance(kernel, Kernel)
    ready = kernel.on("cpp").ready(*it.arguments)
    if len(ready) == 1:
        return ready[0]

    def together() -> None:
        for program in ready:
            program()

    return together


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _start_table(starts: Sequence[Start]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption="first call: in a process of its own, nothing cached. "
        "later calls: all of a warm call, four rows of length 3, one thread; program: its generated code alone; "
        "goal: for what is beyond it.",
        caption_justify="left",
    )
    table.add_column("example", no_wrap=True)
    for heading in ("first call, s", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met")
    for heading in ("later calls, µs", "program", "beyond", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met")
    for each in starts:
        first = (report.number(each.first), f"{FIRST:.1f}", _judged(each.first, FIRST))
        later = [report.number(number) for number in (each.later, each.program, each.beyond)]
        table.add_row(each.example, *first, *later, f"{LATER:.0f}", _judged(each.beyond, LATER))
    return table


def _judged(value: float | None, goal: float) -> Text:
    if value is None:
        return Text("failed", style="red")
    return Text("yes", style="green") if value <= goal else Text("no", style="red")


if __name__ == "__main__":
    _child(*sys.argv[1:])
