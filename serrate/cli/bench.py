"""`serrate bench`: benchmarks by name, each measured in one run with the hardware limit and the peers.

In: names and filters. Out: tables with ratios, JSON and plots. The benchmarks are in the source tree, not in the installed
package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serrate import settings

BENCHMARKS = {
    "cpu": "every task on the CPU: % of the hardware limit, and the lead over every peer",
    "spine": "five of these tasks in float32, also against hand-written C++",
    "memory": "peak memory on top of inputs and outputs; results in fresh against reused memory",
    "kernels": "every example kernel against hand-written C++ or torch's matrix products; first and warm calls",
    "tuner": "the tuner on every example kernel: time of each strategy, regret against timing everything, what tuning costs",
    "calls": "call overhead: warm, and with new lengths",
    "construction": "the cost of building a ragged tensor from existing tensors",
    "steps": "a loop of training-like steps with new lengths in every step: host time of a step, memory that it keeps",
    "distributed": "conversions between layouts over gloo processes, against the collective with one local copy",
    "scaling": "a model of expert parallelism on 8 to 4,096 ranks, from constants measured here",
    "host": "host time of calls on a GPU up to the launches of kernels; needs none",
    "gpu": "tasks on a GPU whose lengths the host does not know: % of the hardware limit, host time per call",
}


@dataclass(frozen=True)
class Peer:
    """A peer: its package, and how to install it."""

    name: str
    package: str
    module: str
    install: str


PEERS = (
    Peer("NestedTensor (also compiled), padded + mask (also compiled)", "torch", "torch", "pip install torch"),
    Peer("segment_reduce, embedding_bag, index_add_", "torch", "torch", "pip install torch"),
    Peer("torch.mm per group, F.grouped_mm, padded bmm", "torch", "torch", "pip install torch"),
    Peer("fbgemm", "fbgemm-gpu-cpu", "fbgemm_gpu", "pip install 'serrate[peers]'"),
    Peer("awkward", "awkward", "awkward", "pip install 'serrate[peers]'"),
    Peer("np.add.reduceat", "numpy", "numpy", "pip install 'serrate[bench]'"),
    Peer("(not a peer: draws the plots)", "matplotlib", "matplotlib", "pip install 'serrate[bench]'"),
)


def bench(
    names: Annotated[list[str] | None, typer.Argument(help=f"any of {', '.join(BENCHMARKS)}; without a name, lists them")] = None,
    rounds: Annotated[int, typer.Option(help="timed rounds per cell", min=1)] = 15,
    only: Annotated[list[str] | None, typer.Option(help="a task to measure, such as softmax; repeatable")] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(help="uniform, exponential, bimodal or giant (gpu: zipf, not bimodal); repeatable")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16; repeatable")] = None,
    compiled: Annotated[bool, typer.Option(help="also run peers under torch.compile, which compiles slowly")] = True,
    patience: Annotated[float, typer.Option(help="time limit in seconds for torch.compile per peer", min=1)] = 60.0,
    jobs: Annotated[int, typer.Option(help="gpu: processes that compile everything before the first cell is timed", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="little data and few rounds, to check that everything runs")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="list which peers are installed; measures and installs nothing")] = False,
    out: Annotated[Path, typer.Option(help="directory for JSON and plots")] = Path("build/benchmarks"),
) -> None:
    """Run benchmarks by name: serrate, the peers and the hardware limit, interleaved in one run."""
    console = Console()
    if peers:
        _list_peers(console)
        return
    if not names:
        for name, what in BENCHMARKS.items():
            console.print(f"[bold]{name:<13}[/]{what}", highlight=False)
        return
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise typer.BadParameter(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    # Benchmarks measure the plans that are chosen without measuring, unless they, or the environment, say otherwise.
    os.environ.setdefault("SERRATE_TUNE", "never")
    settings.reload()
    kept = (tuple(only or ()), tuple(lengths or ()), tuple(dtype or ()))
    options = _load("options")
    given = options.Options(rounds, quick, *kept, compiled, patience, out, jobs)
    try:
        # Every benchmark runs, even if an earlier one failed.
        right = [_load(name).main(given) for name in names]
    except options.UnknownName as error:
        raise typer.BadParameter(str(error)) from error
    if not all(right):
        raise typer.Exit(1)


def _load(name: str) -> Any:
    root = str(Path.cwd())
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("benchmarks"):
            raise typer.BadParameter("benchmarks are in the source tree; run this in a checkout of serrate") from error
        raise


def _list_peers(console: Console) -> None:
    """Lists each peer with its version, or how to install it. Installs nothing."""
    table = Table("peer", "package", "found", "to get it")
    for peer in PEERS:
        version = found(peer)
        # Text, not markup: install commands contain brackets.
        state = Text(version or "missing", style="green" if version else "red")
        table.add_row(peer.name, peer.package, state, Text("" if version else peer.install))
    console.print(table)


def found(peer: Peer) -> str | None:
    """The installed version, or None.

    >>> found(PEERS[0]) is not None
    True
    """
    if importlib.util.find_spec(peer.module) is None:
        return None
    try:
        return importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"
