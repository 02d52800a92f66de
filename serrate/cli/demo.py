"""`serrate demo`: two jobs on ragged data, serrate against the usual alternatives.

In: nothing. Out: tables that fit a narrow terminal. The jobs are a mixture-of-experts feed-forward with very unequal experts, and
a softmax over sequences of very different lengths. Each method is checked against torch, row by row.
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
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from serrate import JaggedTensor, jit
from serrate.cli.peak import peak_of

Rows = list[torch.Tensor]


@jit
def experts(tokens: Any, up: Any, down: Any) -> Any:
    """Every token through the two weights of its expert."""
    return torch.relu(tokens @ up) @ down


@jit
def attention_weights(scores: Any, scale: float) -> Any:
    """Softmax along each sequence."""
    return torch.softmax(scores * scale, dim=1)


@dataclass(frozen=True)
class Method:
    """One method: how to run it, and how to get its rows. `cannot` says why it does not apply."""

    name: str
    run: Callable[[], Any]
    rows: Callable[[Any], Rows]
    cannot: str = ""


@dataclass(frozen=True)
class Job:
    """A job, its methods, the expected rows, and the size of its results in bytes."""

    title: str
    lengths: torch.Tensor
    methods: list[Method]
    want: Rows

    @property
    def results(self) -> int:
        return sum(row.nbytes for row in self.want)


@dataclass(frozen=True)
class Measured:
    """Median seconds, peak bytes on top of the inputs (None if unknown), and the largest error."""

    seconds: float
    peak: int | None
    error: float


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="small data; takes a few seconds")] = False,
    source: Annotated[bool, typer.Option("--source", help="also print the generated code")] = False,
) -> None:
    """Compare serrate with padding and torch's NestedTensor on expert routing and a ragged softmax."""
    console = Console()
    # torch warns about tracing when NestedTensor is first used, which is irrelevant here.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    torch.manual_seed(0)
    scale = 8 if quick else 1
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; median times, including allocation of the result\n"
    )
    for make in (_expert_job, _sequence_job):
        job = make(scale)
        _picture(console, job)
        _table(console, job, _measured(console, job, 3 if quick else 5))
    if source:
        tiny = JaggedTensor.from_list([torch.randn(n, 64) for n in (3, 0, 5)])
        console.print(attention_weights.source(tiny, 0.5), highlight=False)


def _rows_of(values: torch.Tensor, lengths: torch.Tensor) -> Rows:
    return list(torch.split(values, lengths.tolist()))


def _unpadded(padded: torch.Tensor, lengths: torch.Tensor) -> Rows:
    return [padded[k, :n] for k, n in enumerate(lengths.tolist())]


def _expert_job(scale: int) -> Job:
    count, tokens, width, hidden = 64, 8192 // scale, 256, 512
    # Popularity as in real routers: a few experts get most tokens, some get none.
    popularity = torch.distributions.Dirichlet(torch.full((count,), 0.3)).sample()
    lengths = torch.bincount(torch.multinomial(popularity, tokens, replacement=True), minlength=count)
    values = torch.randn(tokens, width)
    up, down = torch.randn(count, width, hidden) / width**0.5, torch.randn(count, hidden, width) / hidden**0.5
    routed = JaggedTensor.from_lengths(values, lengths)

    def loop() -> Rows:
        return [torch.relu(row @ up[k]) @ down[k] for k, row in enumerate(_rows_of(values, lengths))]

    def padded() -> torch.Tensor:
        return torch.bmm(torch.relu(torch.bmm(routed.to_padded(), up)), down)

    return Job(
        f"MoE feed-forward: {tokens} tokens, {count} experts, {width} to {hidden} to {width}",
        lengths,
        [
            Method("serrate", lambda: experts(routed, up, down), lambda r: list(r.unbind())),
            Method("torch.mm per expert", loop, list),
            Method("padded bmm", padded, lambda r: _unpadded(r, lengths)),
            Method("NestedTensor", lambda: None, list, "does not support a separate weight for each row"),
        ],
        loop(),
    )


def _sequence_job(scale: int) -> Job:
    count, mean, width, factor = 2048 // scale, 96, 64, 0.5
    lengths = torch.empty(count).exponential_(1 / mean).long().clamp(min=1)
    values = torch.randn(int(lengths.sum()), width)
    scores, longest = JaggedTensor.from_lengths(values, lengths), int(lengths.max())
    holes = (torch.arange(longest)[None, :] >= lengths[:, None])[:, :, None]
    nested = torch.nested.nested_tensor_from_jagged(values, scores.offsets, min_seqlen=1, max_seqlen=longest)

    def padded() -> torch.Tensor:
        return torch.softmax((scores.to_padded() * factor).masked_fill(holes, float("-inf")), dim=1)

    return Job(
        f"sequence softmax: {count} sequences of 1 to {longest}, {width} features",
        lengths,
        [
            Method("serrate", lambda: attention_weights(scores, factor), lambda r: list(r.unbind())),
            Method("padded + mask", padded, lambda r: _unpadded(r, lengths)),
            Method("NestedTensor", lambda: torch.softmax(nested * factor, dim=1), lambda r: _rows_of(r.values(), lengths)),
        ],
        [torch.softmax(row * factor, dim=0) for row in _rows_of(values, lengths)],
    )


def _picture(console: Console, job: Job) -> None:
    """The lengths as bars; the empty part is what padding would fill."""
    console.print(Text(job.title, style="bold"))
    longest = max(int(job.lengths.max()), 1)
    shown = sorted(job.lengths.tolist(), reverse=True)
    for k in range(0, len(shown), max(len(shown) // 6, 1)):
        bar = "█" * max(round(40 * shown[k] / longest), int(shown[k] > 0))
        console.print(f"  row by length #{k:<5} {shown[k]:>6}  [cyan]{bar}[/][dim]{'·' * (40 - len(bar))}[/]", highlight=False)
    console.print(f"  padding would be {100 * (1 - float(job.lengths.float().mean()) / longest):.0f}% of the work")


def _measured(console: Console, job: Job, rounds: int) -> dict[str, Measured]:
    """Peak memory, error and median time of each method, timed round robin after one warm-up run each."""
    able = [method for method in job.methods if not method.cannot]
    times: dict[str, list[float]] = {method.name: [] for method in able}
    checked: dict[str, tuple[int | None, float]] = {}
    columns = (TextColumn("  {task.description:<32}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=(rounds + 1) * len(able))
        for turn in range(rounds + 1):
            for method in able:
                progress.update(task, description=f"{'measuring' if turn else 'checking'} {method.name}")
                if not turn:
                    checked[method.name] = _checked(method, job)
                # Two seconds are enough for a slow method.
                elif sum(times[method.name]) < 2.0:
                    begin = time.perf_counter()
                    method.run()
                    times[method.name].append(time.perf_counter() - begin)
                progress.advance(task)
    return {name: Measured(statistics.median(each), *checked[name]) for name, each in times.items()}


def _checked(method: Method, job: Job) -> tuple[int | None, float]:
    method.run()  # compilation and one-time setup are not counted
    peak, result = peak_of(method.run)
    rows = method.rows(result)
    return peak, max((float((a - b).abs().max()) for a, b in zip(rows, job.want, strict=True) if a.numel()), default=0.0)


def _table(console: Console, job: Job, measured: dict[str, Measured]) -> None:
    table = Table(caption=f"memory: peak, on top of the inputs; the result itself takes {job.results / 1e6:.0f} MB")
    table.add_column("method", no_wrap=True)
    for heading in ("time", "serrate is", "memory", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    ours = measured["serrate"]
    for method in job.methods:
        it = measured.get(method.name)
        if it is None:
            continue
        memory = "-" if it.peak is None else f"{it.peak / 1e6:.0f} MB"
        error = f"{it.error:.0e}" if it.error else "none"
        compared = "" if method.name == "serrate" else _compared(it.seconds / ours.seconds)
        table.add_row(method.name, f"{1e3 * it.seconds:.1f} ms", compared, memory, error)
    console.print(table)
    for method in job.methods:
        if method.cannot:
            console.print(f"  {method.name}: {method.cannot}", highlight=False)
    console.print()


def _compared(times: float) -> str:
    """serrate compared with a method that takes `times` as long.

    >>> _compared(4.0), _compared(0.5)
    ('4.0 x faster', '2.0 x slower')
    """
    return f"{times:.1f} x faster" if times >= 1 else f"{1 / times:.1f} x slower"
