"""The GPU table: ragged programs on one CUDA device, called as a user would, against its copy rate and its dense matrix rate.

In: a CUDA device. Out: a table and gpu.json with, for every task, dtype and distribution of lengths, the percent of the limit
that serrate and its peers reach in the same run, and the host time of a call; some rows of each result are checked against torch
first. Lengths are unknown to the host, unless a column says that they are known. Run as `serrate bench gpu`.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import serrate
from benchmarks.data import lengths, offsets
from benchmarks.options import Options, chosen
from serrate import JaggedTensor, ops

LENGTHS = ("uniform", "exponential", "zipf", "giant")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARM_UP, CALLS = 20, 200
"""Calls before host time is measured, and calls per measurement."""
Run = Callable[[], object]


@dataclass(frozen=True)
class GpuTask:
    """A memory-bound task on rows; `features` is 0 for rows of plain numbers.

    `moved`: the bytes that must be read and written, relative to the size of the rows, besides `written` by the result.
    `row`: the result for one row, in plain torch; None if only the whole result can be compared.
    """

    body: Callable[[Any], Any]
    moved: float
    row: Callable[[Tensor], Tensor] | None
    rows: int = 4096
    mean: int = 256
    features: int = 128
    padded: bool = False
    """Whether the result is dense, so that its size depends on the longest row."""


def _layer_norm(row: Tensor) -> Tensor:
    return functional.layer_norm(row, list(row.shape))


TASKS: dict[str, GpuTask] = {
    "sum": GpuTask(lambda x: x.sum(1), 1, lambda row: row.sum(0)),
    "mean": GpuTask(lambda x: x.mean(1), 1, lambda row: row.mean(0)),
    "max": GpuTask(lambda x: x.amax(1), 1, lambda row: row.amax(0)),
    "softmax": GpuTask(lambda x: torch.softmax(x, 1), 2, lambda row: torch.softmax(row, 0)),
    "layer norm": GpuTask(lambda x: ops.layer_norm(x, (1, 2)), 2, _layer_norm),
    "layer norm over features": GpuTask(
        lambda x: functional.layer_norm(x, (x.shape[-1],)), 2, lambda row: functional.layer_norm(row, row.shape[-1:])
    ),
    "pointwise": GpuTask(lambda x: torch.relu(x * 2.0 + 1.0), 2, lambda row: torch.relu(row * 2 + 1)),
    "1-D sum": GpuTask(lambda x: x.sum(1), 1, lambda row: row.sum(0), 32768, 2048, 0),
    "1-D softmax": GpuTask(lambda x: torch.softmax(x, 1), 2, lambda row: torch.softmax(row, 0), 32768, 2048, 0),
    "short 1-D sum": GpuTask(lambda x: x.sum(1), 1, lambda row: row.sum(0), 1 << 21, 32, 0),
    "short 1-D softmax": GpuTask(lambda x: torch.softmax(x, 1), 2, lambda row: torch.softmax(row, 0), 1 << 21, 32, 0),
    "to_padded": GpuTask(lambda x: x.to_padded(), 1, None, 2048, 2048, 0, padded=True),
    "jagged + dense": GpuTask(lambda x: x.to_padded() + 1.0, 1, None, 2048, 2048, 0, padded=True),
}


@dataclass(frozen=True)
class Cell:
    """One task on one distribution of lengths: the limit, the percent of it that each method reaches, and the host time of a
    call of serrate's in microseconds."""

    task: str
    dtype: str
    lengths: str
    limit_ms: float
    percent: dict[str, float]
    host_us: float


def captured(run: Run) -> Run:
    """The run as a CUDA graph, which excludes host time between launches."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Milliseconds of each run on the device, captured as graphs and timed round robin with events."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    graphs = {name: captured(run) for name, run in runs.items()}
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, replay in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def host_time(run: Run) -> float:
    """Microseconds that the host spends on a call, the fastest of some measurements."""
    for _ in range(WARM_UP):
        run()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return min(found)


def lengths_of(distribution: str, rows: int, mean: float) -> Tensor:
    """Lengths by the name of their distribution; `zipf` has a few very long rows and many short ones."""
    if distribution != "zipf":
        return lengths(distribution, rows, mean)
    shares = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.1
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return (shares / shares.sum() * rows * mean).round().clamp(min=1).long()[order]


def memory_cells(options: Options, console: Console) -> Iterator[Cell]:
    """Memory-bound tasks: percent of the bandwidth of a copy."""
    for name in chosen("--only", options.only, TASKS):
        task = TASKS[name]
        for dtype in chosen("--dtype", options.dtypes, DTYPES):
            for distribution in chosen("--lengths", options.lengths, LENGTHS):
                if not (task.features == 0 and dtype != "float32"):
                    yield memory_cell(name, task, dtype, distribution, options, console)


def memory_cell(name: str, task: GpuTask, dtype: str, distribution: str, options: Options, console: Console) -> Cell:
    rows = task.rows // 16 if options.quick else task.rows
    jt, known = (_rows(distribution, rows, task.mean, task.features, DTYPES[dtype], told=told) for told in (False, True))
    moved = task.moved * jt.values.nbytes
    if task.padded:
        moved += rows * int(jt.lengths.max()) * jt.values.itemsize
    # A copy of half as many bytes reads and writes as many as must be moved. The faster of two copies is the limit: in a graph a
    # kernel can beat the copy engine.
    source = torch.empty(int(moved) // 8, device="cuda")
    target = torch.empty_like(source)
    runs: dict[str, Run] = {
        "copy": partial(target.copy_, source),
        "copy by kernel": partial(torch.add, source, 0.0, out=target),
    }
    function = serrate.jit(task.body)
    runs |= _checked("serrate", function, jt, task.row, console)
    runs |= _checked("lengths known", function, known, task.row, console)
    runs |= peers(name, jt)
    times = medians(runs, options.rounds)
    limit = min(times["copy"], times["copy by kernel"])
    percent = {k: 100 * limit / v for k, v in times.items() if not k.startswith("copy")}
    small = JaggedTensor.from_csr(jt.values[: int(jt.offsets[64])], jt.offsets[:65].clone())
    return Cell(name, dtype, distribution, limit, percent, host_time(partial(function, small)))


def peers(name: str, jt: JaggedTensor) -> dict[str, Run]:
    """What torch has for a task: segment_reduce where it has a reduction of that name."""
    kind = name.removeprefix("short ").removeprefix("1-D ")
    if kind not in ("sum", "mean", "max") or jt.values.dtype != torch.float32:
        return {}
    return {"segment_reduce": partial(torch.segment_reduce, jt.values, kind, offsets=jt.offsets, axis=0)}


def grouped_cells(options: Options, console: Console) -> Iterator[Cell]:
    """Grouped matrix products in bfloat16: percent of one dense product with the same FLOPs."""
    groups, tokens, k, n = (16, 4096, 512, 512) if options.quick else (64, 65536, 4096, 2048)
    for distribution in chosen("--lengths", options.lengths, LENGTHS)[:2]:
        jt = _rows(distribution, groups, tokens // groups, k, torch.bfloat16, told=False)
        weights = torch.randn(groups, k, n, device="cuda", dtype=torch.bfloat16)
        runs: dict[str, Run] = {
            "dense": partial(torch.mm, jt.values, weights[0].contiguous()),
            "grouped_mm": partial(functional.grouped_mm, jt.values, weights, offs=jt.offsets[1:].int()),
            "serrate": partial(serrate.jit(lambda x, w: x @ w), jt, weights),
        }
        times = medians(runs, options.rounds)
        percent = {name: 100 * times["dense"] / time for name, time in times.items() if name != "dense"}
        yield Cell("grouped matmul", "bfloat16", distribution, times["dense"], percent, host_time(runs["serrate"]))


def _rows(distribution: str, rows: int, mean: float, features: int, dtype: torch.dtype, *, told: bool) -> JaggedTensor:
    """Random rows on the device; if `told`, with the longest and shortest length, as by a caller who knows them."""
    counts = lengths_of(distribution, rows, mean)
    torch.manual_seed(0)
    values = torch.randn((int(counts.sum()), *([features] if features else [])), device="cuda", dtype=dtype)
    most, least = (int(counts.max()), int(counts.min())) if told else (None, None)
    return JaggedTensor.from_csr(values, offsets(counts).cuda(), max_length=most, min_length=least)


def _checked(
    name: str, function: Callable[[Any], Any], jt: JaggedTensor, row: Callable[[Tensor], Tensor] | None, console: Console
) -> dict[str, Run]:
    """The call under its name, if a sample of its rows is correct; an error is shown, and the others continue."""
    bounds = jt.offsets.tolist()
    narrow = jt.values.dtype != torch.float32
    try:
        got = function(jt)
        for k in (0, 1, len(jt) // 2, len(jt) - 1, int(jt.lengths.argmax())) if row is not None else ():
            assert row is not None
            own = got[k] if isinstance(got, Tensor) else got.values[bounds[k] : bounds[k + 1]]
            want = row(jt.values[bounds[k] : bounds[k + 1]].double()).float()
            torch.testing.assert_close(own.float(), want, rtol=2e-2 if narrow else 1e-3, atol=1e-1 if narrow else 5e-3)
    except Exception as error:
        console.print(Text(f"{name}: {type(error).__name__}: {str(error)[:1500]}", style="red"))
        return {}
    return {name: partial(function, jt)}


def main(options: Options) -> bool:
    """Measures everything, prints the table, writes gpu.json; returns whether there is a device."""
    console = Console(width=160)
    if not torch.cuda.is_available():
        console.print("no CUDA device found; the GPU table needs one")
        return False
    cells: list[Cell] = []
    for cell in itertools.chain(memory_cells(options, console), () if options.only else grouped_cells(options, console)):
        shown = ", ".join(f"{method} {percent:.0f}" for method, percent in cell.percent.items())
        console.print(f"{cell.task}, {cell.dtype}, {cell.lengths}: {shown}; {cell.host_us:.0f} us of host time", style="dim")
        cells.append(cell)
    triton = importlib.metadata.version("triton")
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}, {date.today()}"
    table = Table(title=f"percent of the limit ({machine})")
    columns = list(dict.fromkeys(k for cell in cells for k in cell.percent))
    for name in ("task", "dtype", "lengths", "limit ms", *columns, "host us"):
        table.add_column(name, justify="left" if name in ("task", "dtype", "lengths") else "right")
    for cell in cells:
        percents = [f"{cell.percent[c]:.0f}" if c in cell.percent else "-" for c in columns]
        table.add_row(cell.task, cell.dtype, cell.lengths, f"{cell.limit_ms:.3f}", *percents, f"{cell.host_us:.0f}")
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps({"machine": machine, "cells": [asdict(c) for c in cells]}, indent=1))
    return True
