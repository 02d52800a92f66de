"""The GPU table: ragged programs on one CUDA device, called as a user would, against its copy rate and its dense matrix rate.

In: a CUDA device. Out: a table, gpu.json and plots with, for every task, dtype and distribution of lengths, the percent of the
limit that serrate and its peers reach in the same run, and the host time of a call. Some rows of each result are compared with
torch first. Lengths are unknown to the host, unless a column says that they are known; `replayed` is a CUDA graph, which derives
arrays from the offsets every time. Tasks with a backward pass compute the result and then its gradients. A method that fails is
shown with its error. Run as `serrate bench gpu`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from benchmarks.gpu_peers import Prepare, family_of, peers
from benchmarks.gpu_tasks import DTYPES, LENGTHS, GpuTask, Work, data_of
from benchmarks.gpu_tasks import TASKS as FORWARD
from benchmarks.gpu_timing import CALLS, Run, captured, copy_runs, dense_run, device_times, host_time
from benchmarks.gpu_training import TASKS as BOTH_PASSES
from benchmarks.gpu_training import Training, training_peers
from benchmarks.options import Options, chosen
from serrate import JaggedTensor
from serrate.api.jit import Jitted
from serrate.compiled import Compiled

TASKS: dict[str, GpuTask] = {**FORWARD, **BOTH_PASSES}
DEVICE = "cuda"
PRODUCTS, RESIDENT = ("grouped matmul", "experts", "mixture of experts"), (1, 2)
"""Tasks that are also timed with resident programs, and the numbers of these on each multiprocessor."""
HOST = ("warm", "new offsets", "construction")
SMALL = 64
"""Rows of the data on which host time is measured, so that the device is done before the host is."""


@dataclass(frozen=True)
class Cell:
    """One task on one distribution of lengths: the limit in milliseconds, the percent of it that each method reaches, the errors
    of methods that fail, and microseconds of the host for a call of serrate's: warm, with new offsets (their construction
    included), and the construction alone."""

    task: str
    dtype: str
    lengths: str
    limit_ms: float = 0.0
    percent: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)


def measured(name: str, dtype: str, distribution: str, options: Options) -> Cell:
    """One cell; whatever fails is in it."""
    cell = Cell(name, dtype, distribution)
    try:
        task = TASKS[name]
        work = task.make(data_of(task, distribution, dtype, DEVICE, rows=_rows(task, options.quick)))
        runs, errors = _methods(name, work, options)
        limit, percent = _percents(work, runs, options.rounds)
        cell = replace(cell, limit_ms=limit, percent=percent, errors=errors)
        del work, runs
        host, error = host_times(name, dtype)
        return replace(cell, host_us=host, errors={**errors, **({"host time": error} if error else {})})
    except Exception as error:
        return replace(cell, errors={**cell.errors, "cell": _said(error)})
    finally:
        _free()


def _methods(name: str, work: Work, options: Options) -> tuple[dict[str, Run], dict[str, str]]:
    """Everything that is timed, each called once; errors by method."""
    prepared: dict[str, Prepare] = {"serrate": partial(_ours, work, False)}
    if work.ragged:
        prepared["lengths known"] = partial(_ours, work, True)
    if isinstance(work, Training):
        prepared |= training_peers(name, work, compiled=options.compiled)
    else:
        prepared["replayed"] = lambda: captured(_ours(work, False))
        if family_of(name) in PRODUCTS and isinstance(work.call, Jitted | Compiled):
            prepared |= {f"{n} resident": partial(_resident, work, n) for n in RESIDENT}
        prepared |= peers(name, work, compiled=options.compiled)
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    for method, prepare in prepared.items():
        try:
            run = prepare()
            run()
            torch.cuda.synchronize()
        except Exception as error:
            errors[method] = _said(error)
            _free()
        else:
            runs[method] = run
    return runs, errors


def compile_ahead(cells: Sequence[tuple[str, str, str]], options: Options) -> None:
    """Calls serrate in every cell once, in several processes, so that the kernels are in the caches when they are timed. Each
    process holds the data of one cell."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        done = pool.map(_called, cells, itertools.repeat(options.quick))
        for _ in track(done, "compiling", len(cells), transient=True):
            pass


def _called(cell: tuple[str, str, str], quick: bool) -> None:
    """Calls serrate in a cell, with and without known lengths. Whatever fails is reported by the cell."""
    name, dtype, distribution = cell
    with contextlib.suppress(Exception):
        task = TASKS[name]
        work = task.make(data_of(task, distribution, dtype, DEVICE, rows=_rows(task, quick)))
        for told in (False, True) if work.ragged else (False,):
            _ours(work, told)
    _free()


def _rows(task: GpuTask, quick: bool) -> int:
    return max(task.rows // 16, 16) if quick else task.rows


def _free() -> None:
    gc.collect()
    # A device in error raises here too; the cells say what happened to it.
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def _ours(work: Work, told: bool) -> Run:
    """A call of serrate's, whose result is right."""
    arguments = work.arguments(work.data.tensor(told=told))
    work.check(work.call(*arguments))
    return partial(work.call, *arguments)


def _resident(work: Work, programs: int) -> Run:
    """The call under a plan that is used only where it was measured to be faster: so many programs stay on each multiprocessor,
    and compute one block of a product after another."""
    arguments = work.arguments(work.data.tensor())
    call, tensors = work.call.compiled(*arguments) if isinstance(work.call, Jitted) else (work.call, list(arguments))
    assert isinstance(call, Compiled)
    planned = call.fusion.compile("triton", strategy="persistent_dynamic", resident=programs)
    expected, found = work.call(*arguments), planned(*tensors)
    assert torch.equal(*(x.values if isinstance(x, JaggedTensor) else x for x in (expected, found))), "results differ"
    return partial(planned, *tensors)


def _percents(work: Work, runs: dict[str, Run], rounds: int) -> tuple[float, dict[str, float]]:
    """The limit, and the percent of it that each run reaches, measured in turn with what sets the limit."""
    if work.flops:
        dense, flops = dense_run()
        bars, scale = {"bar": dense}, work.flops / flops
    else:
        bars, scale = copy_runs(work.moved)
    times = device_times({**bars, **runs}, rounds)
    limit = scale * min(times[name] for name in bars)
    return limit, {name: 100 * limit / times[name] for name in runs}


@functools.cache
def host_times(name: str, dtype: str) -> tuple[dict[str, float], str]:
    """The host's time for calls on little data, which is the same for all lengths; or the error that prevented it."""
    task = TASKS[name]
    try:
        small = replace(task, mean=min(task.mean, 64))
        work = task.make(data_of(small, "exponential", dtype, DEVICE, rows=min(task.rows, SMALL)))
        arguments = work.arguments(work.data.tensor())
        found = {"warm": host_time(partial(work.call, *arguments))}
        if work.ragged:
            # More than the caches hold: every one is new when it comes up again.
            unseen = itertools.cycle([work.data.offsets.clone() for _ in range(4 * CALLS)])

            def constructed() -> tuple[Any, ...]:
                return work.arguments(replace(work.data, offsets=next(unseen)).tensor())

            found["construction"] = host_time(constructed)
            found["new offsets"] = host_time(lambda: work.call(*constructed()))
        return found, ""
    except Exception as error:
        return {}, _said(error)


def _said(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# --- output --------------------------------------------------------------------------------------------------------------


def table_of(cells: Sequence[Cell], title: str) -> Table:
    """Percents of the limit; a method that failed is `x`, one that there is not `-`."""
    columns = list(dict.fromkeys(name for cell in cells for name in (*cell.percent, *cell.errors) if name not in APART))
    table = Table(title=title, caption="percent of the limit; host time in microseconds")
    for heading in ("task", "dtype", "lengths"):
        table.add_column(heading)
    for heading in ("limit ms", *columns, *(f"host, {name}" for name in HOST)):
        table.add_column(heading, justify="right")
    for cell in cells:
        shown = [f"{cell.percent[c]:.0f}" if c in cell.percent else "x" if c in cell.errors else "-" for c in columns]
        host = [f"{cell.host_us[c]:.0f}" if c in cell.host_us else "-" for c in HOST]
        table.add_row(cell.task, cell.dtype, cell.lengths, f"{cell.limit_ms:.3f}", *shown, *host)
    return table


APART = ("cell", "host time")
"""Errors that are not those of a method."""


def plot(folder: Path, title: str, cells: Sequence[Cell]) -> list[Path]:
    """One plot per dtype with a panel per task: bars in percent of the limit. None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        mine = [cell for cell in cells if cell.dtype == dtype and cell.percent]
        tasks = list(dict.fromkeys(cell.task for cell in mine))
        if not tasks:
            continue
        across = min(len(tasks), 4)
        figure, axes = pyplot.subplots(-(-len(tasks) // across), across, figsize=(4.5 * across, 3 * -(-len(tasks) // across)))
        panels = list(axes.flat) if hasattr(axes, "flat") else [axes]
        for panel, task in zip(panels, tasks, strict=False):
            own = [cell for cell in mine if cell.task == task]
            names = list(dict.fromkeys(name for cell in own for name in cell.percent))
            for k, name in enumerate(names):
                at = [place + 0.8 * k / len(names) for place in range(len(own))]
                panel.bar(at, [cell.percent.get(name, 0) for cell in own], 0.8 / len(names), label=name, align="edge")
            panel.set_xticks([place + 0.4 for place in range(len(own))], [cell.lengths for cell in own])
            panel.set_title(task)
            panel.legend(fontsize=6)
        for panel in panels[len(tasks) :]:
            panel.set_axis_off()
        figure.suptitle(f"percent of the limit, {dtype}: {title}")
        figure.tight_layout()
        paths.append(folder / f"gpu-{dtype}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def selected(options: Options) -> list[tuple[str, str, str]]:
    """The cells that were asked for: task, dtype and lengths."""
    dtypes, kinds = chosen("--dtype", options.dtypes, DTYPES), chosen("--lengths", options.lengths, LENGTHS)

    def fits(task: GpuTask, dtype: str, kind: str) -> bool:
        return dtype in task.dtypes and kind in task.lengths

    names = chosen("--only", options.only, TASKS)
    return [cell for cell in itertools.product(names, dtypes, kinds) if fits(TASKS[cell[0]], *cell[1:])]


def main(options: Options) -> bool:
    """Measures everything, prints the table, writes gpu.json and plots; returns whether there is a device and all of serrate's
    own calls ran and were right."""
    console = Console(width=240)
    wanted = selected(options)
    if not torch.cuda.is_available():
        console.print("serrate bench gpu needs a CUDA device, and none was found")
        return False
    triton = importlib.metadata.version("triton")
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}, {date.today()}"
    cells: list[Cell] = []
    options.out.mkdir(parents=True, exist_ok=True)
    if options.jobs > 1:
        compile_ahead(wanted, options)
    for each in wanted:
        cell = measured(*each, options)
        cells.append(cell)
        numbers = ", ".join(f"{method} {percent:.0f}" for method, percent in cell.percent.items())
        host = ", ".join(f"{name} {us:.0f}" for name, us in cell.host_us.items())
        console.print(f"{cell.task}, {cell.dtype}, {cell.lengths}: {numbers}; host us: {host}", style="dim", highlight=False)
        for method, error in cell.errors.items():
            console.print(Text(f"  {method}: {error}", style="red"))
        # After every cell: a run that is stopped has written what it had.
        (options.out / "gpu.json").write_text(json.dumps({"machine": machine, "cells": [asdict(c) for c in cells]}, indent=1))
    console.print(table_of(cells, machine))
    paths = plot(options.out, machine, cells)
    console.print(f"wrote {', '.join(map(str, [options.out / 'gpu.json', *paths]))}", highlight=False)
    return not any({"serrate", "cell"} & cell.errors.keys() for cell in cells)
