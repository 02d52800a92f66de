"""The GPU table: ragged programs on one CUDA device, against its copy rate and its dense matrix rate.

In: a CUDA device. Out: a table and gpu.json with, for every task and distribution of lengths, each strategy's percent of the
limit measured in the same run; some rows of each result are checked against torch first. Run as `serrate bench gpu`.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
from collections.abc import Callable
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
from benchmarks.data import DISTRIBUTIONS, lengths, offsets
from benchmarks.options import Options
from serrate import JaggedTensor, ops

STRATEGIES = ("maskless", "masked", "persistent_dynamic")
Run = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """One task on one distribution of lengths: the limit, and the percent of it that each method reaches."""

    task: str
    lengths: str
    limit_ms: float
    percent: dict[str, float]


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


def memory_work(rows: int, mean: int, inner: int, rounds: int, console: Console) -> list[Cell]:
    """Memory-bound tasks: percent of the bandwidth of a copy."""
    tasks: dict[str, tuple[Callable[[Any], Any], int, Callable[[Tensor], Tensor]]] = {
        "sum": (lambda x: x.sum(1), 1, lambda row: row.sum(0)),
        "pointwise": (lambda x: torch.relu(x * 2.0 + 1.0), 2, lambda row: torch.relu(row * 2 + 1)),
        "softmax": (lambda x: torch.softmax(x, 1), 2, lambda row: torch.softmax(row, 0)),
        "layer norm": (lambda x: ops.layer_norm(x, (1, 2)), 2, lambda row: functional.layer_norm(row, list(row.shape))),
    }
    table: list[Cell] = []
    for distribution in DISTRIBUTIONS:
        jt = _rows(distribution, rows, mean, inner, torch.float32)
        target = torch.empty_like(jt.values)
        for name, (body, passes, row) in tasks.items():
            # The faster of two copies is the limit: in a graph a kernel can beat the copy engine.
            runs: dict[str, Run] = {
                "copy": partial(target.copy_, jt.values),
                "copy by kernel": partial(torch.add, jt.values, 0.0, out=target),
            }
            for strategy in (*STRATEGIES, None):
                want = partial(_of_row, row)
                runs |= _checked(body, strategy, (jt,), want, (1e-3, 1e-3), console)
            times = medians(runs, rounds)
            limit = min(times["copy"], times["copy by kernel"]) * passes / 2
            percent = {k: 100 * limit / v for k, v in times.items() if not k.startswith("copy")}
            table.append(Cell(name, distribution, limit, percent))
    return table


def grouped_work(groups: int, tokens: int, k: int, n: int, rounds: int, console: Console) -> list[Cell]:
    """Grouped matrix products in bfloat16: percent of one dense product with the same FLOPs."""
    table: list[Cell] = []
    for distribution in DISTRIBUTIONS[:3]:
        jt = _rows(distribution, groups, tokens // groups, k, torch.bfloat16)
        weights = torch.randn(groups, k, n, device="cuda", dtype=torch.bfloat16)
        runs: dict[str, Run] = {
            "dense": partial(torch.mm, jt.values, weights[0].contiguous()),
            "grouped_mm": partial(functional.grouped_mm, jt.values, weights, offs=jt.offsets[1:].int()),
        }
        for strategy in ("maskless", "persistent_dynamic", None):
            runs |= _checked(lambda x, w: x @ w, strategy, (jt, weights), partial(_product, weights), (2e-2, 2e-1), console)
        times = medians(runs, rounds)
        percent = {name: 100 * times["dense"] / time for name, time in times.items() if name != "dense"}
        table.append(Cell("grouped matmul bf16", distribution, times["dense"], percent))
    return table


def _of_row(function: Callable[[Tensor], Tensor], number: int, row: Tensor) -> Tensor:
    return function(row.double()).float()


def _product(weights: Tensor, group: int, rows: Tensor) -> Tensor:
    return rows @ weights[group]


def _rows(distribution: str, rows: int, mean: float, inner: int, dtype: torch.dtype) -> JaggedTensor:
    """Random rows on the device, with the longest and shortest length supplied, as by a caller who knows them."""
    counts = lengths(distribution, rows, mean)
    values = torch.randn(int(counts.sum()), inner, device="cuda", dtype=dtype)
    known = (int(counts.max()), int(counts.min()))
    return JaggedTensor.from_csr(values, offsets(counts).cuda(), max_length=known[0], min_length=known[1])


def _checked(
    body: Callable[..., Any],
    strategy: str | None,
    arguments: tuple[Any, ...],
    want: Callable[[int, Tensor], Tensor],
    tolerance: tuple[float, float],
    console: Console,
) -> dict[str, Run]:
    """The program under its strategy's name, if a sample of its rows is correct; an error is shown, and the others continue."""
    run = partial(serrate.jit(body, backend="triton", strategy=strategy), *arguments)
    jt = arguments[0]
    bounds = jt.offsets.tolist()
    try:
        got = run()
        for k in (0, 1, len(jt) // 2, len(jt) - 1, int(jt.lengths.argmax())):
            mine = got[k] if isinstance(got, Tensor) else got.values[bounds[k] : bounds[k + 1]]
            torch.testing.assert_close(mine, want(k, jt.values[bounds[k] : bounds[k + 1]]), rtol=tolerance[0], atol=tolerance[1])
    except Exception as error:
        console.print(Text(f"{strategy or 'chosen'}: {type(error).__name__}: {str(error)[:1500]}", style="red"))
        return {}
    return {strategy or "chosen": run}


def main(options: Options, rows: int = 4096, mean: int = 256, inner: int = 128) -> bool:
    """Measures everything, prints the table, writes gpu.json; returns whether there is a device."""
    console = Console(width=160)
    if not torch.cuda.is_available():
        console.print("no CUDA device found; the GPU table needs one")
        return False
    torch.manual_seed(0)
    cells = memory_work(rows, mean, inner, options.rounds, console)
    cells += grouped_work(64, 65536, 4096, 2048, options.rounds, console)
    triton = importlib.metadata.version("triton")
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}, {date.today()}"
    table = Table(title=f"percent of the limit ({machine})")
    columns = list(dict.fromkeys(k for cell in cells for k in cell.percent))
    for name in ("task", "lengths", "limit ms", *columns):
        table.add_column(name, justify="left" if name in ("task", "lengths") else "right")
    for cell in cells:
        percents = [f"{cell.percent[c]:.0f}" if c in cell.percent else "-" for c in columns]
        table.add_row(cell.task, cell.lengths, f"{cell.limit_ms:.2f}", *percents)
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps({"machine": machine, "cells": [asdict(c) for c in cells]}, indent=1))
    return True
