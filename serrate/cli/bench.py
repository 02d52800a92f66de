"""`serrate bench`: named benchmarks, each with the machine's limit and the peers in the same run.

In: names and what to keep of them. Out: tables with ratios, JSON and plots. The benchmarks live in the source tree, not in the
installed package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

BENCHMARKS = {
    "cpu": "every work on the CPU: % of the machine's limit, and how far ahead of every peer",
    "spine": "five of them, in float32, beside hand-written C++ too",
    "memory": "peak memory beside inputs and outputs; results in fresh memory against reused",
    "kernels": "every example kernel beside hand-written C++ or torch's products per group; its first and its later calls",
    "calls": "what a call costs beyond its kernel: warm, and with lengths never seen before",
    "construction": "what it costs to make a ragged tensor of tensors that are ready",
    "gpu": "the GPU table",
}


@dataclass(frozen=True)
class Peer:
    """Something to compare with: the package it comes in, and how to get that."""

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
    Peer("(no peer: draws the plots)", "matplotlib", "matplotlib", "pip install 'serrate[bench]'"),
)


def bench(
    names: Annotated[list[str] | None, typer.Argument(help=f"which: {', '.join(BENCHMARKS)}; none: say what there is")] = None,
    rounds: Annotated[int, typer.Option(help="timed rounds of each cell", min=1)] = 15,
    only: Annotated[list[str] | None, typer.Option(help="a work to measure, such as softmax; may be given again")] = None,
    lengths: Annotated[list[str] | None, typer.Option(help="uniform, exponential, bimodal or giant; may be given again")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16; may be given again")] = None,
    compiled: Annotated[bool, typer.Option(help="also peers by torch.compile, which takes long to build")] = True,
    patience: Annotated[float, typer.Option(help="seconds that torch.compile may take for one peer", min=1)] = 60.0,
    quick: Annotated[bool, typer.Option("--quick", help="little data, few rounds: to see that everything works")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="say which peers are installed; measure and install nothing")] = False,
    out: Annotated[Path, typer.Option(help="where JSON and plots go")] = Path("build/benchmarks"),
) -> None:
    """Runs named benchmarks: ours, the peers and the machine's limit interleaved in one run."""
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
        raise typer.BadParameter(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    kept = (tuple(only or ()), tuple(lengths or ()), tuple(dtype or ()))
    options = _load("options")
    given = options.Options(rounds, quick, *kept, compiled, patience, out)
    try:
        # Every benchmark runs, whatever the one before it came to.
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
            raise typer.BadParameter("benchmarks live in the source tree; run this in a checkout of serrate") from error
        raise


def _list_peers(console: Console) -> None:
    """Each peer with its version, or what to install. Nothing is installed here."""
    table = Table("peer", "package", "found", "to get it")
    for peer in PEERS:
        version = found(peer)
        # Text, not markup: what to install has brackets in it.
        state = Text(version or "missing", style="green" if version else "red")
        table.add_row(peer.name, peer.package, state, Text("" if version else peer.install))
    console.print(table)


def found(peer: Peer) -> str | None:
    """The version that is installed, or None.

    >>> found(PEERS[0]) is not None
    True
    """
    if importlib.util.find_spec(peer.module) is None:
        return None
    try:
        return importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"
