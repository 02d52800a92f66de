"""The GPU table: ragged programs on one CUDA device, against its copy rate and its dense matrix rate.

In: a CUDA device. Out: a table and gpu.json with, for every work and distribution of lengths, each strategy's
percent of the limit measured in the same run; results are checked against torch first. Run as `serrate bench gpu`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date

import torch
from rich.console import Console
from rich.table import Table

try:
    import triton
except ImportError:
    triton = None

import serrate  # noqa: F401  installs Fusion.compile
from benchmarks.data import DISTRIBUTIONS, lengths
from benchmarks.options import Options
from serrate import ir
from serrate.frontend import ops
from serrate.runtime.arrays import remembered
from serrate.tensor import Structure

STRATEGIES = ("maskless", "masked", "persistent_dynamic")
Run = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """One work on one distribution of lengths: the limit, and what part of it everyone reaches."""

    work: str
    lengths: str
    limit_ms: float
    percent: dict[str, float]


def captured(run: Run) -> Run:
    """The run as a CUDA graph: what the device does, without the host's time between launches."""
    stream = torch.cuda.Stream()
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
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def program(body: Callable[..., ir.TensorView], inner: int, dtype: torch.dtype, *extra: tuple[int, ...]) -> ir.Fusion:
    """A fusion of one ragged input, its offsets and dense operands."""
    with ir.Fusion() as f:
        x, offsets = f.input((None, inner), dtype), f.input((None,), torch.int64)
        f.output(body(ops.as_nested(x, offsets), *(f.input(shape, dtype) for shape in extra)))
    return f


def memory_work(rows: int, mean: int, inner: int, rounds: int, console: Console) -> list[Cell]:
    """Works that move bytes: percent of what a copy moves."""
    works: dict[str, tuple[Callable[..., ir.TensorView], int, Callable[[torch.Tensor], torch.Tensor] | None]] = {
        "sum": (lambda x: ops.sum(x, 1), 1, lambda r: r.sum(0)),
        "pointwise": (lambda x: ops.relu(ops.add(ops.mul(x, 2.0), 1.0)), 2, lambda r: torch.relu(r * 2 + 1)),
        "softmax": (lambda x: ops.softmax(x, 1), 2, lambda r: torch.softmax(r, 0)),
        "layer norm": (lambda x: ops.layer_norm(x, (1, 2)), 2, lambda r: torch.nn.functional.layer_norm(r, r.shape)),
    }
    table: list[Cell] = []
    for distribution in DISTRIBUTIONS:
        n = torch.as_tensor(lengths(distribution, rows, mean)).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), n.cumsum(0)]).cuda()
        x = torch.randn(int(n.sum()), inner, device="cuda")
        y = torch.empty_like(x)
        bounds = [int(v) for v in offsets.cpu()]
        for name, (body, passes, row) in works.items():
            # The best of two ways to copy is the limit: in a graph a kernel can beat the copy engine.
            runs: dict[str, Run] = {
                "copy": lambda x=x, y=y: y.copy_(x),
                "copy by kernel": lambda x=x, y=y: torch.add(x, 0.0, out=y),
            }
            fusion = program(body, inner, torch.float32)
            # What serrate chooses by itself, told the longest row as a caller who knows it would.
            remembered((offsets,), ("structure", len(x)), lambda o=offsets, n=n: Structure((o,), max_length=int(n.max())))
            for strategy in (*STRATEGIES, None):
                try:
                    compiled = fusion.compile("triton", strategy)
                    got = compiled(x, offsets)
                    values = got if isinstance(got, torch.Tensor) else got.values
                    for k in [0, 1, rows // 2, rows - 1, int(n.argmax())]:
                        a, b = bounds[k], bounds[k + 1]
                        if b > a:
                            want = row(x[a:b].double()).float()
                            mine = values[k] if isinstance(got, torch.Tensor) else values[a:b]
                            torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-3)
                    runs[strategy or "chosen"] = lambda c=compiled, x=x, o=offsets: c(x, o)
                except Exception as error:
                    console.print(f"[red]{name} {distribution} {strategy}: {type(error).__name__}: {str(error)[:1500]}")
            times = medians(runs, rounds)
            limit = min(times["copy"], times["copy by kernel"]) * passes / 2
            percent = {k: 100 * limit / v for k, v in times.items() if not k.startswith("copy")}
            table.append(Cell(name, distribution, limit, percent))
    return table


def grouped_work(groups: int, tokens: int, k: int, n: int, rounds: int, console: Console) -> list[Cell]:
    """Grouped matrix products in bfloat16: percent of one dense product of equal work."""
    table: list[Cell] = []
    for distribution in DISTRIBUTIONS[:3]:
        sizes = torch.as_tensor(lengths(distribution, groups, tokens // groups)).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]).cuda()
        total = int(sizes.sum())
        x = torch.randn(total, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(groups, k, n, device="cuda", dtype=torch.bfloat16)
        dense = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        ends = offsets[1:].int()
        runs: dict[str, Run] = {
            "dense": lambda x=x, dense=dense: x @ dense,
            "grouped_mm": lambda x=x, w=w, ends=ends: torch._grouped_mm(x, w, offs=ends),
        }
        fusion = program(lambda t, w: ops.matmul(t, w), k, torch.bfloat16, (groups, k, n))
        bounds = [int(v) for v in offsets.cpu()]
        for strategy in ("maskless", "persistent_dynamic", None):
            try:
                compiled = fusion.compile("triton", strategy)
                got = compiled(x, offsets, w).values
                for g in (0, groups // 2, groups - 1):
                    a, b = bounds[g], bounds[g + 1]
                    torch.testing.assert_close(got[a:b], x[a:b] @ w[g], rtol=2e-2, atol=2e-1)
                runs[strategy or "chosen"] = lambda c=compiled, x=x, o=offsets, w=w: c(x, o, w)
            except Exception as error:
                console.print(f"[red]grouped {distribution} {strategy}: {type(error).__name__}: {str(error)[:1500]}")
        times = medians(runs, rounds)
        percent = {name: 100 * times["dense"] / v for name, v in times.items() if name != "dense"}
        table.append(Cell("grouped matmul bf16", distribution, times["dense"], percent))
    return table


def main(options: Options, rows: int = 4096, mean: int = 256, inner: int = 128) -> bool:
    """Measures everything, prints the table, writes gpu.json; whether there is a device to measure on."""
    console = Console(width=160)
    if not torch.cuda.is_available():
        console.print("no CUDA device is here; the GPU table needs one")
        return False
    torch.manual_seed(0)
    cells = memory_work(rows, mean, inner, options.rounds, console)
    cells += grouped_work(64, 65536, 4096, 2048, options.rounds, console)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {date.today()}"
    table = Table(title=f"percent of the limit ({machine})")
    columns = list(dict.fromkeys(k for cell in cells for k in cell.percent))
    for name in ("work", "lengths", "limit ms", *columns):
        table.add_column(name, justify="left" if name in ("work", "lengths") else "right")
    for cell in cells:
        percents = [f"{cell.percent[c]:.0f}" if c in cell.percent else "-" for c in columns]
        table.add_row(cell.work, cell.lengths, f"{cell.limit_ms:.2f}", *percents)
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps({"machine": machine, "cells": [asdict(c) for c in cells]}, indent=1))
    return True
