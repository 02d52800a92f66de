"""The bookkeeping table: what it costs to make a ragged tensor of tensors that are ready, beside torch's NestedTensor.

Comes in: `python -m benchmarks.construction [--rounds N] [--out DIR]`. Goes out: a printed table and construction.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import limits, measure
from serrate import JaggedTensor, Structure

ROWS = (16, 300, 10_000)
LENGTH = 10
REPEATS = 200


@dataclass(frozen=True)
class Line:
    """One operation; microseconds of one call, medians, by number of rows."""

    operation: str
    microseconds: dict[int, float]


def operations(rows: int) -> dict[str, Callable[[], object]]:
    """Everything that is timed, on tensors made before."""
    offsets = torch.arange(0, LENGTH * rows + 1, LENGTH)
    lengths, values = offsets.diff(), torch.zeros(LENGTH * rows, 8)
    known = {"max_length": LENGTH, "min_length": LENGTH}
    one, other = (JaggedTensor.from_csr(values, offsets.clone()) for _ in range(2))
    fresh = [offsets.clone() for _ in range(2)]

    def compare_first() -> bool:
        a, b = (Structure.from_offsets(each, total=LENGTH * rows, validate=False) for each in fresh)
        return a == b

    return {
        "from_csr": lambda: JaggedTensor.from_csr(values, offsets),
        "from_csr, metadata supplied": lambda: JaggedTensor.from_csr(values, offsets, **known),  # type: ignore[arg-type]
        "from_csr, validate=False": lambda: JaggedTensor.from_csr(values, offsets, validate=False),
        "from_csr, metadata supplied, validate=False": lambda: JaggedTensor.from_csr(
            values,
            offsets,
            validate=False,
            **known,  # type: ignore[arg-type]
        ),
        "from_lengths": lambda: JaggedTensor.from_lengths(values, lengths),
        "Structure.from_lengths": lambda: Structure.from_lengths(lengths),
        "with_values": lambda: one.with_values(values),
        "two structures made unvalidated, and compared": compare_first,
        "two structures compared again": lambda: one.structure == other.structure,
        "torch.nested.nested_tensor_from_jagged": lambda: torch.nested.nested_tensor_from_jagged(values, offsets),
        "torch.nested.nested_tensor_from_jagged, metadata supplied": lambda: torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=LENGTH, max_seqlen=LENGTH
        ),
    }


def run(rounds: int) -> list[Line]:
    """Times every operation in turn, many calls at a time."""
    found: dict[str, dict[int, float]] = {}
    for rows in ROWS:
        timed = {name: _repeated(call) for name, call in operations(rows).items()}
        for name, timing in measure.measure(timed, rounds, f"{rows} rows").items():
            found.setdefault(name, {})[rows] = 1e3 * timing.median / REPEATS
    return [Line(name, by_rows) for name, by_rows in found.items()]


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(REPEATS):
            call()

    return repeated


def main(
    rounds: Annotated[int, typer.Option(help="timed rounds of each operation", min=1)] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="five rounds")] = False,
    out: Annotated[Path, typer.Option(help="where construction.json goes")] = Path("build/benchmarks"),
) -> None:
    """Print the bookkeeping table and write it as JSON."""
    console = Console()
    machine, lines = limits.machine(), run(5 if quick else rounds)
    console.print(f"{machine.processor}, {machine.threads} threads, {machine.date}", highlight=False)
    console.print(f"torch {machine.torch}, Python {machine.python}", highlight=False)
    table = Table(caption="microseconds a call, medians of interleaved rounds")
    table.add_column("operation")
    for rows in ROWS:
        table.add_column(f"{rows:,} rows", justify="right")
    for line in lines:
        table.add_row(line.operation, *(f"{line.microseconds[rows]:.1f}" for rows in ROWS))
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    record = {"machine": dataclasses.asdict(machine), "unit": "microseconds, medians of interleaved rounds"}
    text = json.dumps({**record, "lines": [dataclasses.asdict(line) for line in lines]}, indent=1)
    (out / "construction.json").write_text(text + "\n")
    console.print(f"wrote {out / 'construction.json'}")


if __name__ == "__main__":
    typer.run(main)
