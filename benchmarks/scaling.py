"""A model of expert parallelism on many ranks, from constants measured on this machine.

In: `serrate bench scaling [--quick] [--out DIR]`. Out: a printed table and scaling.json. Measured: the latency and bandwidth of
an exchange between gloo processes here, the bandwidth of a local transpose of blocks, and the host time of planning for every
number of ranks. Simulated: how unevenly a skewed router loads ranks. The rest is arithmetic, and no statement about any
network.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn as _spawn

from benchmarks import limits, report
from benchmarks.options import Options
from serrate.distributed import layout
from serrate.distributed.blocks import pack_runs
from serrate.distributed.collectives import swap_room

RANKS = (8, 64, 512, 4096)
TOKENS, CHOICES, WIDTH, ITEM, EXPERTS, NODE = 4096, 8, 4096, 2, 256, 8
"""Of one rank and layer: tokens, experts of a token, features and bytes of one. Then experts in all (at least one for each rank),
and ranks of a node."""


@dataclass(frozen=True)
class Constants:
    """What was measured: seconds for one message, and bytes per second."""

    message: float
    exchange: float
    copy: float


@dataclass(frozen=True)
class Line:
    """One number of ranks. Times are milliseconds of one direction of one layer on the busiest rank."""

    ranks: int
    experts: int
    imbalance: float
    """Rows that the busiest rank receives, over the mean."""
    megabytes: float
    messages: int
    counts_bytes: int
    planning: float
    flat: float
    hierarchical: float


def measured(rounds: int) -> Constants:
    """Times exchanges of little and of much between two processes, and a local transpose."""
    with tempfile.TemporaryDirectory() as folder:
        spawn: Callable[..., object] = _spawn
        spawn(_rank, args=(rounds, folder), nprocs=2)
        little, much, size = torch.load(Path(folder) / "times.pt")
    rows, runs = torch.zeros(8192, 1024), layout.transposed_runs(torch.full((8, 8), 128))
    local = min(_seconds(lambda: pack_runs(rows, runs)) for _ in range(rounds))
    return Constants(little, size / max(much - little, 1e-9), rows.nbytes / local)


def _rank(rank: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    times = []
    for count in (16, 1 << 23):
        x = torch.zeros(count, dtype=torch.uint8)
        y = torch.empty_like(x)

        exchange = partial(dist.all_to_all_single, y, x)
        exchange()
        found = []
        for _ in range(4 * rounds):
            dist.barrier()
            found.append(_seconds(exchange))
        times.append(min(found))
    if rank == 0:
        torch.save((*times, 1 << 22), Path(folder) / "times.pt")
    dist.destroy_process_group()


def simulated(ranks: int, constants: Constants, rounds: int) -> Line:
    """Experts have log-normal popularity, the same on every rank; what each rank gets is drawn, what it costs is computed."""
    experts = max(EXPERTS, ranks)
    generator = torch.Generator().manual_seed(ranks)
    popularity = torch.exp(0.5 * torch.randn(experts, generator=generator))
    # A sum of many independent choices: its mean and variance are those of a multinomial draw.
    mean = popularity / popularity.sum() * TOKENS * CHOICES
    counts = (mean + mean.sqrt() * torch.randn(ranks, experts, generator=generator)).clamp(min=0).round().long()
    owned = layout.owned_partitions(experts, ranks)
    received = counts.sum(0).view(ranks, -1).sum(1)
    busiest, row = int(received.argmax()), counts[int(received.argmax())]
    columns = counts.view(ranks, ranks, -1)[:, busiest].contiguous()
    planning = min(_seconds(lambda: layout.exchange_from(row, columns, owned)) for _ in range(rounds))
    size = float(received.max()) * WIDTH * ITEM
    moved = size / constants.exchange + size / constants.copy
    flat = (ranks - 1) * constants.message + moved
    # First within nodes, to the rank with the same place in its node as the destination; then between nodes: all bytes move
    # twice, in fewer and longer messages.
    nodes = max(ranks // NODE, 1)
    two = (NODE - 1 + nodes - 1) * constants.message + 2 * moved if nodes > 1 else flat
    return Line(
        ranks,
        experts,
        float(received.max() / received.double().mean()),
        size / 1e6,
        ranks - 1,
        ranks * 8 * swap_room(ranks),
        1e3 * planning,
        1e3 * flat,
        1e3 * two,
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(options: Options) -> bool:
    """Prints the table and writes it as JSON."""
    console, machine = Console(), limits.machine()
    rounds = 3 if options.quick else options.rounds
    constants = measured(rounds)
    lines = [simulated(ranks, constants, rounds) for ranks in (RANKS[:2] if options.quick else RANKS)]
    report.print_machine(machine, console)
    console.print(
        f"measured: {1e6 * constants.message:.0f} us for a message, {constants.exchange / 1e9:.2f} GB/s between two gloo "
        f"processes, {constants.copy / 1e9:.1f} GB/s for a transpose of blocks",
        highlight=False,
    )
    table = Table(
        caption="a MODEL: one direction of one layer on the busiest rank; planning is measured, the other times are computed"
    )
    for title in (
        "ranks",
        "experts",
        "busiest / mean",
        "MB",
        "messages",
        "counts, bytes",
        "planning ms",
        "flat ms",
        "two hops ms",
    ):
        table.add_column(title, justify="right")
    for line in lines:
        table.add_row(
            f"{line.ranks:,}",
            str(line.experts),
            f"{line.imbalance:.2f}",
            f"{line.megabytes:.0f}",
            f"{line.messages:,}",
            f"{line.counts_bytes:,}",
            f"{line.planning:.2f}",
            f"{line.flat:.0f}",
            f"{line.hierarchical:.0f}",
        )
    console.print(table)
    report.write_lines(options.out / "scaling.json", machine, "a model; see docs/scaling.md", [constants, *lines])
    return True
