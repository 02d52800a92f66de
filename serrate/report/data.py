"""The report on a call, as data and as text.

In: what `collect` found. Out: records, which print as text; `as_dict` gives plain lists and numbers, `save` writes a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serrate.analysis.inspection.lanes import LaneCount
from serrate.schedule.plan import TileSize
from serrate.tensor.display.describe import RaggedDim, dim_text, percent


@dataclass(frozen=True)
class RowSet:
    """The rows of an argument."""

    name: str
    """The argument, and others with the same rows."""
    dims: tuple[RaggedDim, ...]
    """Statistics of each ragged dim."""


@dataclass(frozen=True)
class Bound:
    """A bound that is checked, or that needs no check."""

    what: str
    """The condition, or the index that stays in bounds."""
    reason: str

    def __str__(self) -> str:
        return f"{self.what}  ({self.reason})"


@dataclass(frozen=True)
class Trial:
    """One candidate for running a program."""

    name: str
    """The strategy, with options that differ from the usual ones."""
    strategy: str
    chosen: bool
    seconds: float | None
    """The time of one run; None if it was not timed."""
    reason: str
    """The reason why it cannot run, was not timed, or was dropped."""
    lanes: LaneCount | None
    """None if it cannot run, or if it differs from another trial only in options."""


@dataclass(frozen=True)
class StageReport:
    """One program of a call: a stage of a fusion, or a device loop of a kernel."""

    name: str
    backend: str
    strategy: str
    plan: tuple[str, ...]
    """The loops, one line each."""
    why: str
    """The reason for the strategy."""
    reasons: tuple[str, ...]
    """Reasons for the plan, and facts about the program."""
    tiles: tuple[TileSize, ...]
    kept: tuple[Bound, ...]
    """Guards: conditions that are checked when the program runs, or end its loops."""
    proven: tuple[Bound, ...]
    """Bounds that need no check."""
    trials: tuple[Trial, ...]
    source: str
    drawing: str
    """The domains of the widest loops, as SVG."""

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"{self.name}: {self.strategy} on {self.backend}"
        yield f"  because {self.why}"
        yield from _section("plan", self.plan)
        yield from _section("reasons", self.reasons)
        yield from _section("tiles", map(str, self.tiles))
        yield from _section("guards kept", map(str, self.kept))
        yield from _section("guards proven away", map(str, self.proven))
        yield from _section("candidates", _trial_lines(self.trials))
        yield from _section("source", self.source.splitlines())


@dataclass(frozen=True, repr=False)
class Report:
    """What runs for some arguments, and why. Prints as text.

    >>> import torch
    >>> from serrate import JaggedTensor, jit
    >>> report = jit(lambda jt: jt.sum(dim=1)).explain(JaggedTensor.from_lengths(torch.ones(8, 4), [3, 0, 5]))
    >>> report.rows[0].dims[0].max_length, report.stages[0].strategy
    (5, 'maskless')
    """

    name: str
    device: str
    rows: tuple[RowSet, ...]
    stages: tuple[StageReport, ...]
    ignored: tuple[str, ...] = ()
    """Settings without effect."""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        yield f"{self.name} on {self.device}"
        for each in self.rows:
            yield from _section(f"rows of {each.name}", (line for dim in each.dims for line in dim_text(dim)), "")
        for stage in self.stages:
            yield ""
            yield from stage.lines()
        yield from (f"without effect: {setting}" for setting in self.ignored)

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, for JSON."""
        return asdict(self)

    def save(self, path: str | Path) -> Path:
        """Writes the report as one HTML page without external resources."""
        from serrate.report.page import page  # most reports are only printed

        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path


def seconds_text(seconds: float) -> str:
    """A time with three digits.

    >>> seconds_text(0.00123), seconds_text(4.2e-6)
    ('1.23 ms', '4.2 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def lanes_text(lanes: LaneCount) -> str:
    """The share of lanes that are holes, as text."""
    about = "" if lanes.exact else "about "
    return f"{percent(lanes.waste)} of {about}{lanes.visited:,} lanes are holes"


def _trial_lines(trials: Sequence[Trial]) -> Iterator[str]:
    width = max((len(t.name) for t in trials), default=0)
    for trial in trials:
        time = "" if trial.seconds is None else f"{seconds_text(trial.seconds):>9}"
        facts = [time, trial.reason, "" if trial.lanes is None else lanes_text(trial.lanes)]
        yield f"{'*' if trial.chosen else ' '} {trial.name:<{width}}  {'; '.join(filter(None, facts))}".rstrip()


def _section(title: str, lines: Iterator[str] | Sequence[str], indent: str = "  ") -> Iterator[str]:
    found = list(lines)
    if found:
        yield f"{indent}{title}"
        yield from (f"{indent}  {line}".rstrip() for line in found)
