"""The CPU table: work x lengths, each against the limit, hand-written C++ and the peers.

Comes in: `python -m benchmarks.spine [--quick] [--rounds N] [--out DIR]`. Goes out: a printed table, spine.json and spine.png.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as functional
import typer
from rich.console import Console
from torch import Tensor

from benchmarks import handwritten, limits, measure, ours, peers
from benchmarks.data import DISTRIBUTIONS, Ragged, ragged
from benchmarks.measure import Cell, Timing
from benchmarks.peers import Peer

EPSILON = 1e-5
SCALE = 1.5


@dataclass(frozen=True)
class Sizes:
    rows: int = 4096
    mean: int = 128
    features: int = 64
    groups: int = 64
    tokens: int = 8192
    width: int = 512


@dataclass(frozen=True)
class Entry:
    """All that is compared in one cell; `reference` maps one row and its number to what that row must give."""

    work: str
    data: Ragged
    limit: Mapping[str, Callable[[], object]]
    milliseconds: Callable[[Mapping[str, Timing]], float]
    reference: Callable[[Tensor, int], Tensor]
    hand: Callable[[], Tensor]
    ours: Callable[[], Tensor] | None
    peers: Sequence[Peer]


def entry(work: str, distribution: str, sizes: Sizes) -> Entry:
    """Build the data of one cell and everything that works on it."""
    if work == "grouped matmul":
        return _grouped_matmul(distribution, sizes)
    data = ragged(distribution, sizes.rows, sizes.mean, sizes.features)
    values, offsets = data.values, data.offsets
    copy = limits.copies(values)
    read = {"limit: read": limits.read(values)}
    if work == "sum":
        hand, mine = handwritten.sum_ragged(data), ours.sum_ragged(values, offsets)
        others = peers.sum_ragged(data)
        return Entry(work, data, read, _read, lambda row, _: row.sum(0, keepdim=True), hand, mine, others)
    if work == "pointwise":
        bias = torch.linspace(-1, 1, sizes.features)
        hand, mine = handwritten.pointwise(data, SCALE, bias), ours.pointwise(values, offsets, SCALE, bias)
        others = peers.pointwise(data, SCALE, bias)
        return Entry(work, data, copy, _copy, lambda row, _: torch.relu(row * SCALE + bias), hand, mine, others)

    # a row larger than the last cache must come from memory twice: once for its statistics, once to be written
    row_bytes = data.lengths * sizes.features * values.element_size()
    again = float(row_bytes[row_bytes > limits.last_level_cache()].sum() / row_bytes.sum())

    def milliseconds(timings: Mapping[str, Timing]) -> float:
        return _copy(timings) + again * _read(timings)

    if work == "softmax":
        hand, mine, others = handwritten.softmax(data), ours.softmax(values, offsets), peers.softmax(data)
        return Entry(work, data, copy | read, milliseconds, lambda row, _: row.softmax(0), hand, mine, others)
    if work == "layer norm":
        hand, mine = handwritten.layer_norm(data, EPSILON), ours.layer_norm(values, offsets, EPSILON)
        others = peers.layer_norm(data, EPSILON)
        return Entry(work, data, copy | read, milliseconds, _layer_norm_row, hand, mine, others)
    raise ValueError(f"work {work!r} is not one of {', '.join(WORKS)}")


def _grouped_matmul(distribution: str, sizes: Sizes) -> Entry:
    data = ragged(distribution, sizes.groups, sizes.tokens / sizes.groups, sizes.width)
    weights = torch.randn(sizes.groups, sizes.width, sizes.width, generator=torch.Generator().manual_seed(2)) / sizes.width**0.5
    return Entry(
        "grouped matmul",
        data,
        {"limit: dense mm": limits.dense_mm(data.values, weights[0].contiguous())},
        lambda timings: timings["limit: dense mm"].median,
        lambda row, group: row @ weights[group],
        handwritten.grouped_matmul(data, weights),
        ours.grouped_matmul(data.values, data.offsets, weights),
        peers.grouped_matmul(data, weights),
    )


def _copy(timings: Mapping[str, Timing]) -> float:
    return min(timing.median for name, timing in timings.items() if name.startswith("limit: copy"))


def _read(timings: Mapping[str, Timing]) -> float:
    return timings["limit: read"].median


def _layer_norm_row(row: Tensor, _: int) -> Tensor:
    return functional.layer_norm(row, list(row.shape), eps=EPSILON)


# Absolute, beside one part in a thousand. A softmax has no zero to come near and a giant row's elements are tiny, so it gets
# none; a sum of a hundred thousand normal values in another order moves by hundredths.
TOLERANCE = {"sum": 5e-2, "pointwise": 1e-5, "softmax": 0.0, "layer norm": 1e-4, "grouped matmul": 1e-4}


def is_right(work: str, result: Tensor, expected: Tensor) -> bool:
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-3, atol=TOLERANCE[work])


def run_cell(it: Entry, rounds: int) -> Cell:
    """Check every result against plain torch, row by row, then time them all in turn."""
    rows = torch.split(it.data.values, it.data.lengths.tolist())
    expected = torch.cat([it.reference(row, number) for number, row in enumerate(rows)])
    callables = dict(it.limit)
    skipped = {peer.name: peer.reason for peer in it.peers if peer.call is None}
    if not is_right(it.work, it.hand(), expected):
        raise AssertionError(f"hand-written {it.work} is wrong on {it.data.distribution} lengths")
    callables["hand"] = it.hand
    if it.ours is not None:
        if not is_right(it.work, it.ours(), expected):
            raise AssertionError(f"our {it.work} is wrong on {it.data.distribution} lengths")
        callables["ours"] = it.ours
    for peer in it.peers:
        if peer.call is None:
            continue
        try:
            right = is_right(it.work, peer.values(peer.call()), expected)
        except (RuntimeError, NotImplementedError) as error:
            skipped[peer.name] = str(error).splitlines()[0]
            continue
        if right:
            callables[peer.name] = peer.call
        else:
            skipped[peer.name] = "wrong result"
    del expected
    timings = measure.measure(callables, rounds, f"{it.work}, {it.data.distribution}")
    named = {peer.name: timings[peer.name].median for peer in it.peers if peer.name in timings}
    mine = timings["ours"].median if "ours" in timings else None
    limit = it.milliseconds(timings)
    return Cell(it.work, it.data.distribution, limit, timings["hand"].median, mine, named, skipped, timings)


WORKS = ("sum", "pointwise", "softmax", "layer norm", "grouped matmul")


def grid() -> list[tuple[str, str]]:
    """Every work with every distribution; one group of half the tokens is left out, for it is a dense matmul."""
    return [(work, each) for work in WORKS for each in DISTRIBUTIONS if (work, each) != ("grouped matmul", "giant")]


def run(rounds: int = 15, quick: bool = False) -> list[Cell]:
    """Measure the whole grid; `quick` halves the data and keeps five rounds, to see that everything works."""
    sizes = Sizes(rows=2048, tokens=4096) if quick else Sizes()
    return [run_cell(entry(work, distribution, sizes), 5 if quick else rounds) for work, distribution in grid()]


def main(
    rounds: Annotated[int, typer.Option(help="timed rounds of each cell", min=1)] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="half the data, five rounds")] = False,
    out: Annotated[Path, typer.Option(help="where spine.json and spine.png go")] = Path("build/benchmarks"),
) -> None:
    """Print the CPU table and write it as JSON and as a plot."""
    console = Console()
    machine, cells = limits.machine(), run(rounds, quick)
    out.mkdir(parents=True, exist_ok=True)
    measure.print_table(machine, cells, console)
    measure.write_json(out / "spine.json", machine, cells)
    drawn = measure.plot(out / "spine.png", machine, cells)
    console.print(
        f"wrote {out / 'spine.json'}" + (f" and {out / 'spine.png'}" if drawn else "; no plot: matplotlib is not installed")
    )


if __name__ == "__main__":
    typer.run(main)
