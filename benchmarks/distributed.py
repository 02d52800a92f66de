"""Conversions between layouts against the collective alone, on gloo processes of this machine.

In: `serrate bench distributed [--rounds N] [--quick] [--out DIR]`. Out: a printed table and distributed.json. In each round every
method runs after a barrier (small cases several times); the time of a method is that of its slowest rank, and medians over rounds
are shown.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn as _spawn

from benchmarks import limits, report
from benchmarks.options import Options
from serrate.distributed import convert, layout

BARE = "all_to_all_single + copy"
TWICE = "the same after one of counts"
INDEXED = "all_to_all_single + repeat_interleave + index"
COUNTED = "to aligned, counts exchanged"
METHODS = ("to aligned", COUNTED, "to unaligned", BARE, TWICE, INDEXED)
GOAL = 1.3


@dataclass(frozen=True)
class Case:
    """Tokens of each rank, features of a token, partitions, ranks."""

    tokens: int
    width: int
    partitions: int
    ranks: int


CASES = tuple(
    Case(tokens, width, partitions, ranks)
    for ranks in (2, 4)
    for tokens, width, partitions in ((256, 256, 8), (2048, 1024, 8), (8192, 1024, 8), (8192, 1024, 64))
)
QUICK = (Case(64, 16, 8, 2),)


@dataclass(frozen=True)
class Line:
    """Median milliseconds of every method, and ratios to the bare collective: of COUNTED to TWICE, of all others to BARE."""

    case: Case
    megabytes: float
    milliseconds: dict[str, float]
    ratios: dict[str, float]


def counts_of(case: Case) -> Tensor:
    """Uneven counts with the given total on every rank: partitions of random popularity."""
    generator = torch.Generator().manual_seed(case.partitions)
    shares = torch.rand(case.ranks, case.partitions, generator=generator) ** 2
    bounds = (shares.cumsum(1) / shares.sum(1, keepdim=True) * case.tokens).round().long()
    bounds[:, -1] = case.tokens
    return torch.diff(bounds, dim=1, prepend=torch.zeros(case.ranks, 1, dtype=torch.long))


def methods(case: Case, rank: int, group: dist.ProcessGroup) -> dict[str, Callable[[], Tensor]]:
    """Everything that is timed. Ours and the index permutation give the same rows, or those they came from; the bare collectives
    copy them without reordering."""
    counts, owned = counts_of(case), layout.owned_partitions(case.partitions, case.ranks)
    exchange = layout.exchange_of(counts, owned, rank)
    mine = torch.randn(case.tokens, case.width, generator=torch.Generator().manual_seed(rank))
    ours = convert.unaligned_to_aligned(mine, exchange, group)
    send, receive = list(exchange.send), list(exchange.receive)

    # The collective alone gets its memory beforehand: page faults of fresh memory are not what is compared.
    received, copied = torch.zeros(exchange.aligned_size, case.width), torch.zeros(exchange.aligned_size, case.width)

    def bare() -> Tensor:
        dist.all_to_all_single(received, mine, receive, send, group=group)
        return copied.copy_(received)

    theirs = torch.zeros_like(counts[rank])

    def twice() -> Tensor:
        dist.all_to_all_single(theirs, counts[rank], group=group)
        theirs.tolist()
        return bare()

    def indexed() -> Tensor:
        lengths = exchange.blocks.flatten()
        starts = (lengths.cumsum(0) - lengths).view_as(exchange.blocks).T.flatten()
        turned = exchange.blocks.T.flatten()
        first = turned.cumsum(0) - turned
        index = torch.repeat_interleave(starts - first, turned) + torch.arange(exchange.aligned_size)
        got = mine.new_empty(exchange.aligned_size, case.width)
        dist.all_to_all_single(got, mine, receive, send, group=group)
        return got[index]

    def counted() -> Tensor:
        plan = convert.plan_exchange(mine, counts[rank], owned, group)
        return convert.unaligned_to_aligned(mine, plan, group)

    return {
        "to aligned": lambda: convert.unaligned_to_aligned(mine, exchange, group),
        COUNTED: counted,
        "to unaligned": lambda: convert.aligned_to_unaligned(ours, exchange, group),
        BARE: bare,
        TWICE: twice,
        INDEXED: indexed,
    }


def run(case: Case, rounds: int) -> Line:
    """Starts the ranks of a case and collects their times."""
    with tempfile.TemporaryDirectory() as folder:
        spawn: Callable[..., object] = _spawn
        spawn(_rank, args=(case, rounds, folder), nprocs=case.ranks)
        times: dict[str, list[float]] = torch.load(Path(folder) / "times.pt")
    medians = {name: 1e3 * statistics.median(times[name]) for name in METHODS}
    ratios = {name: medians[name] / medians[TWICE if name == COUNTED else BARE] for name in METHODS if name not in (BARE, TWICE)}
    return Line(case, case.tokens * case.width * 4 / 1e6, medians, ratios)


def _rank(rank: int, case: Case, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case.ranks)
    group = dist.group.WORLD
    assert group is not None
    found = methods(case, rank, group)
    reference = found[INDEXED]()
    right = torch.equal(found["to aligned"](), reference) and torch.equal(found[COUNTED](), reference)
    repeats = max(1, (1 << 22) // (case.tokens * case.width * 4))
    times = torch.zeros(rounds, len(METHODS), dtype=torch.float64)
    for k in range(-2, rounds):
        for m, name in enumerate(METHODS):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                found[name]()
            times[max(k, 0), m] = (time.perf_counter() - began) / repeats
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if not right:
        raise AssertionError("a conversion and its index permutation differ")
    if rank == 0:
        torch.save({name: times[:, m].tolist() for m, name in enumerate(METHODS)}, Path(folder) / "times.pt")
    dist.destroy_process_group()


def main(options: Options) -> bool:
    """Prints the table and writes it as JSON; returns whether all results were right."""
    console, machine = Console(), limits.machine()
    cases, rounds = (QUICK, min(options.rounds, 3)) if options.quick else (CASES, max(options.rounds, 2))
    lines = [run(case, rounds) for case in cases]
    report.print_machine(machine, console)
    table = Table(
        caption=f"milliseconds of the slowest rank, medians of {rounds} interleaved rounds; in brackets the ratio to the "
        f"collective with one local copy (goal {GOAL} on 2 ranks), where counts are exchanged to two collectives and a copy"
    )
    for title in ("ranks", "MB a rank", "partitions", *METHODS):
        table.add_column(title, justify="right")
    for previous, line in pairwise([None, *lines]):
        assert line is not None
        if previous is not None and previous.case.ranks != line.case.ranks:
            table.add_section()
        shown = (
            f"{line.milliseconds[name]:.2f}" + (f" ({line.ratios[name]:.2f})" if name in line.ratios else "") for name in METHODS
        )
        table.add_row(str(line.case.ranks), f"{line.megabytes:.1f}", str(line.case.partitions), *shown)
    console.print(table)
    report.write_lines(options.out / "distributed.json", machine, "milliseconds of the slowest rank, medians of rounds", lines)
    console.print(f"wrote {options.out / 'distributed.json'}", highlight=False)
    return True
