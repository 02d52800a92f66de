"""The cost of building a ragged tensor from existing tensors, compared with torch's NestedTensor.

In: `serrate bench construction [--rounds N] [--out DIR]`. Out: a printed table and construction.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import limits, report
from benchmarks.measure import measure, repeated
from benchmarks.options import Options
from serrate import JaggedTensor, Structure

ROWS = (16, 300, 10_000)
LENGTH = 10
REPEATS = 200


@dataclass(frozen=True)
class Line:
    """One operation; median microseconds per call, by number of rows."""

    operation: str
    microseconds: dict[int, float]


def operations(rows: int) -> dict[str, Callable[[], object]]:
    """Everything that is timed, on tensors created beforehand."""
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
            **known,
        ),
        "from_lengths": lambda: JaggedTensor.from_lengths(values, lengths),
        "Structure.from_lengths": lambda: Structure.from_lengths(lengths),
        "with_values": lambda: one.with_values(values),
        "two structures built unvalidated, then compared": compare_first,
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
        timed = {name: repeated(call, REPEATS) for name, call in operations(rows).items()}
        for name, timing in measure(timed, rounds).items():
            found.setdefault(name, {})[rows] = 1e3 * timing.median / REPEATS
    return [Line(name, by_rows) for name, by_rows in found.items()]


def main(options: Options) -> bool:
    """Prints the table and writes it as JSON."""
    console = Console()
    machine, lines = limits.machine(), run(min(options.rounds, 5) if options.quick else options.rounds)
    report.print_machine(machine, console)
    table = Table(caption="microseconds a call, medians of interleaved rounds")
    table.add_column("operation")
    for rows in ROWS:
        table.add_column(f"{rows:,} rows", justify="right")
    for line in lines:
        table.add_row(line.operation, *(f"{line.microseconds[rows]:.1f}" for rows in ROWS))
    console.print(table)
    report.write_lines(options.out / "construction.json", machine, "microseconds, medians of interleaved rounds", lines)
    console.print(f"wrote {options.out / 'construction.json'}", highlight=False)
    return True
