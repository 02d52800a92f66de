"""`serrate demo`: two jobs on ragged data, ours beside what people do today.

In: nothing. Out: tables. Tokens are routed to experts of very different popularity and multiplied by their expert's weight;
sequences of very different lengths are normalised and softmaxed. Each way is checked against plain torch, row by row.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from serrate import JaggedTensor, jit, ops

Run = Callable[[], Any]


@jit
def experts(tokens: Any, weights: Any) -> Any:
    """Every token times the weight of its expert, then relu."""
    return torch.relu(tokens @ weights)


@jit
def normalise(sequences: Any) -> Any:
    """Zero mean and unit variance over a whole sequence, then softmax along it."""
    return ops.softmax(ops.layer_norm(sequences, (1, 2)), dim=1)


@dataclass(frozen=True)
class Way:
    """One way to do a job: how to run it, how to get its rows, and how many bytes it works on."""

    name: str
    run: Run
    rows: Callable[[Any], list[torch.Tensor]]
    touched: int
    note: str = ""


@dataclass(frozen=True)
class Job:
    """A job, the ways to do it, and what every row must come out as."""

    title: str
    lengths: torch.Tensor
    ways: list[Way]
    want: list[torch.Tensor]


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="small data: a few seconds")] = False,
    source: Annotated[bool, typer.Option("--source", help="also print the code that was generated")] = False,
) -> None:
    """Routes tokens to experts and normalises ragged sequences: ours, padded, and torch's NestedTensor, side by side."""
    console = Console()
    # torch says something about tracing when NestedTensor is first used; it is not about us.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    torch.manual_seed(0)
    scale = 8 if quick else 1
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; times are medians, and include fresh results\n")
    for make in (_expert_job, _sequence_job):
        job = make(scale)
        _picture(console, job)
        timed = _measure(console, job, 3 if quick else 5)
        _table(console, job, timed)
    if source:
        tiny = JaggedTensor.from_list([torch.randn(n, 64) for n in (3, 0, 5)])
        console.print(normalise.source(tiny), highlight=False)


def _rows_of(values: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(values, lengths.tolist()))


def _unpadded(padded: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    return [padded[k, :n] for k, n in enumerate(lengths.tolist())]


def _expert_job(scale: int) -> Job:
    count, tokens, width = 64, 8192 // scale, 256
    # Popularity as in real routers: a few experts get most tokens, some get none.
    popularity = torch.distributions.Dirichlet(torch.full((count,), 0.3)).sample()
    choice = torch.multinomial(popularity, tokens, replacement=True)
    lengths = torch.bincount(choice, minlength=count)
    values = torch.randn(tokens, width)
    weights = torch.randn(count, width, width) / width**0.5
    ours = JaggedTensor.from_lengths(values, lengths)
    want = [torch.relu(r @ w) for r, w in zip(_rows_of(values, lengths), weights, strict=True)]
    padded_bytes = count * int(lengths.max()) * width * values.element_size()

    def padded() -> torch.Tensor:
        return torch.relu(torch.bmm(ours.to_padded(), weights))

    def loop() -> list[torch.Tensor]:
        return [torch.relu(r @ w) for r, w in zip(_rows_of(values, lengths), weights, strict=True)]

    return Job(
        f"{tokens} tokens to {count} experts, {width} x {width} weights",
        lengths,
        [
            Way("serrate", lambda: experts(ours, weights), lambda r: list(r.unbind()), values.nbytes),
            Way("torch.mm for each expert", loop, list, values.nbytes),
            Way("padded bmm", padded, lambda r: _unpadded(r, lengths), padded_bytes),
            Way("NestedTensor", lambda: None, lambda r: [], 0, "cannot: no weight of its own for each row"),
        ],
        want,
    )


def _sequence_job(scale: int) -> Job:
    count, mean, width = 2048 // scale, 96, 64
    lengths = torch.empty(count).exponential_(1 / mean).long()
    values = torch.randn(int(lengths.sum()), width)
    ours = JaggedTensor.from_lengths(values, lengths)
    want = [_normalised(row) for row in _rows_of(values, lengths)]
    longest = int(lengths.max())
    mask = torch.arange(longest)[None, :] < lengths[:, None]

    def padded() -> torch.Tensor:
        x, m = ours.to_padded(), mask[:, :, None]
        n = (lengths * width).clamp(min=1)[:, None, None]
        centered = torch.where(m, x - x.sum((1, 2), keepdim=True) / n, 0.0)
        normal = centered * torch.rsqrt(centered.square().sum((1, 2), keepdim=True) / n + 1e-5)
        return torch.softmax(normal.masked_fill(~m, float("-inf")), dim=1)

    nested = torch.nested.nested_tensor_from_jagged(values, ours.offsets, max_seqlen=longest)

    def in_nested() -> torch.Tensor:
        return torch.softmax(nested, dim=1)

    padded_bytes = count * longest * width * values.element_size()
    return Job(
        f"{count} sequences, lengths 0 to {longest}, {width} features: layer norm, then softmax",
        lengths,
        [
            Way("serrate", lambda: normalise(ours), lambda r: list(r.unbind()), values.nbytes),
            Way("padded and masked", padded, lambda r: _unpadded(r, lengths), padded_bytes),
            Way("NestedTensor", in_nested, lambda r: [], padded_bytes, "softmax alone"),
        ],
        want,
    )


def _normalised(row: torch.Tensor) -> torch.Tensor:
    if not len(row):
        return row
    return torch.softmax(torch.nn.functional.layer_norm(row, list(row.shape)), dim=0)


def _picture(console: Console, job: Job) -> None:
    """The lengths as bars: what padding would fill is the empty part."""
    console.rule(f"[bold]{job.title}")
    longest = max(int(job.lengths.max()), 1)
    shown = sorted(job.lengths.tolist(), reverse=True)
    for k in range(0, len(shown), max(len(shown) // 6, 1)):
        bar = "█" * max(round(40 * shown[k] / longest), int(shown[k] > 0))
        console.print(f"  row by length #{k:<5} {shown[k]:>6}  [cyan]{bar}[/][dim]{'·' * (40 - len(bar))}[/]", highlight=False)
    console.print(f"  padding would be {100 * (1 - float(job.lengths.float().mean()) / longest):.0f}% of the work\n")


def _measure(console: Console, job: Job, rounds: int) -> dict[str, float]:
    """Median seconds of each way, run round robin; the first run of each is not counted."""
    able = [way for way in job.ways if not way.note.startswith("cannot")]
    times: dict[str, list[float]] = {way.name: [] for way in able}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=(rounds + 1) * len(able))
        for k in range(rounds + 1):
            for way in able:
                progress.update(task, description=f"measuring {way.name}")
                # A slow way is not made to wait for: two seconds of it are enough.
                if k < 2 or sum(times[way.name]) < 2.0:
                    begin = time.perf_counter()
                    way.run()
                    if k:
                        times[way.name].append(time.perf_counter() - begin)
                progress.advance(task)
    return {name: statistics.median(t) for name, t in times.items()}


def _table(console: Console, job: Job, timed: dict[str, float]) -> None:
    table = Table()
    for name in ("", "time", "against serrate", "memory worked on", "largest error", ""):
        table.add_column(name, justify="left" if not name else "right")
    for way in job.ways:
        if way.name not in timed:
            table.add_row(way.name, "-", "-", "-", "-", way.note)
            continue
        rows = way.rows(way.run())
        error = max((float((a - b).abs().max()) for a, b in zip(rows, job.want, strict=False) if a.numel()), default=0.0)
        table.add_row(
            way.name,
            f"{1e3 * timed[way.name]:.1f} ms",
            f"{timed[way.name] / timed['serrate']:.1f} x",
            f"{way.touched / 1e6:.0f} MB",
            f"{error:.1e}" if rows else "-",
            way.note,
        )
    console.print(table)
    console.print()
