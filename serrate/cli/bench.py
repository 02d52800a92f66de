"""`serrate bench`: named benchmarks, each with the machine's limit and the peers in the same run.

In: names. Out: tables with ratios, JSON and a plot. The benchmarks live in the source tree, not in the installed package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

BENCHMARKS = {
    "spine": "the CPU table: sum, pointwise, softmax, layer norm, grouped matmul",
    "construction": "the bookkeeping table: making ragged tensors of tensors that are ready",
    "gpu": "the GPU table",
}


def bench(
    names: Annotated[list[str] | None, typer.Argument(help=f"which: {', '.join(BENCHMARKS)}")] = None,
    rounds: Annotated[int, typer.Option(help="timed rounds of each cell", min=1)] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="half the data, five rounds")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="say which peers are installed; measure nothing")] = False,
    out: Annotated[Path, typer.Option(help="where JSON and plots go")] = Path("build/benchmarks"),
) -> None:
    """Runs named benchmarks: ours, the peers and the machine's limit interleaved in one run."""
    console = Console()
    if peers:
        _list_peers(console)
        return
    if not names:
        for name, what in BENCHMARKS.items():
            console.print(f"[bold]{name}[/]  {what}")
        return
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise typer.BadParameter(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        module = _load(name)
        if name == "gpu":
            module.run_all(rounds=rounds, out=out)
        else:
            module.main(rounds=rounds, quick=quick, out=out)


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
    """Peers by name: installed, or what to install. Nothing is installed here."""
    table = Table("peer", "found", "to get it")
    known = {
        "torch NestedTensor, padded, embedding_bag, segment_reduce, index_add_": ("torch", "always there"),
        "fbgemm": ("fbgemm_gpu", "pip install 'serrate[peers]'"),
        "awkward": ("awkward", "pip install 'serrate[peers]'"),
        "matplotlib (plots)": ("matplotlib", "pip install 'serrate[bench]'"),
    }
    for name, (module, how) in known.items():
        found = importlib.util.find_spec(module) is not None
        table.add_row(name, "yes" if found else "no", "" if found else how)
    console.print(table)
