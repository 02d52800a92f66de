"""The tables of the tuner: what it chooses for every example kernel, how good that is, and what it costs.

In: `serrate bench tuner [--only EXAMPLE] [--lengths KIND] [--rounds N]`. Out: two tables and tuner.json. For every example and
distribution of lengths, the tuner runs with an empty cache and its quick budget. Then every candidate is built and timed, and the
fastest of them, the tuner's choice and the choice without measuring are timed again, interleaved: the regret is the time of the
tuner's choice over that of the fastest. Choosing the fastest of many noisy times and reporting these would favour luck.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks import limits, report
from benchmarks.data import DISTRIBUTIONS
from benchmarks.examples import EXAMPLES, QUICK, Case, Sizes, case
from benchmarks.options import Options, chosen
from serrate import Kernel, kernel, settings
from serrate.schedule.strategies import STRATEGIES
from serrate.tuner import record
from serrate.tuner.candidates import Candidate
from serrate.tuner.search import Unfit

MEAN, WORST = 0.05, 0.15
"""Goals for the regret: the geometric mean over all cells, and the worst."""
WINS = 1.2
"""The factor by which at least two strategies each are to win somewhere."""
EVERY = 5
"""Rounds in which every candidate is timed, before the best are timed again."""
HOPELESS = 4
"""What takes so many times as long as the fastest is not timed any more."""
RUNS = 3
"""Runs of a candidate in one round."""


@dataclass(frozen=True)
class Choice:
    """One example on one distribution; milliseconds."""

    example: str
    lengths: str
    chosen: str
    usual: str
    fastest: str
    chosen_ms: float
    usual_ms: float
    fastest_ms: float
    tuning_s: float
    tried: int
    candidates: int
    strategies: Mapping[str, float]
    """The fastest candidate of each strategy, in the rounds in which everything is timed."""
    failed: Mapping[str, str]

    @property
    def regret(self) -> float:
        """How much longer the tuner's choice takes than the fastest candidate; 0 if it is at least as fast."""
        return max(0.0, self.chosen_ms / self.fastest_ms - 1)

    @property
    def gain(self) -> float:
        """The time of the choice without measuring over that of the tuner's."""
        return self.usual_ms / self.chosen_ms

    @property
    def pays_after(self) -> float | None:
        """The number of calls after which tuning has paid off; None if nothing was gained."""
        saved = (self.usual_ms - self.chosen_ms) / 1e3
        return self.tuning_s / saved if self.chosen != self.usual and saved > 0 else None

    @property
    def won_by(self) -> float:
        """The time of the second best strategy over that of the best."""
        times = sorted(self.strategies.values())
        return times[1] / times[0] if len(times) > 1 else 1.0


def main(options: Options) -> bool:
    """Measures, prints and writes; returns whether every goal is met."""
    console, machine = Console(), limits.machine()
    names, kinds = chosen("--only", options.only, EXAMPLES), chosen("--lengths", options.lengths, DISTRIBUTIONS)
    path, found = options.out / "tuner.json", list[Choice]()
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(names) * len(kinds))
        for name in names:
            for kind in kinds:
                progress.update(bar, description=f"{name}, {kind}")
                found.append(choice(name, kind, case(name, kind, QUICK if options.quick else Sizes()), rounds))
                # after every cell, so that an interrupted run keeps its results
                report.write_lines(path, machine, "milliseconds; tuning_s in seconds", found)
                progress.advance(bar)
    report.print_machine(machine, console)
    console.print(_strategy_table(found))
    console.print(_cost_table(found))
    goals = _goals(found)
    for text, met in goals:
        console.print(Text(f"{text}: {'met' if met else 'missed'}", style="green" if met else "red"))
    console.print(f"wrote {path}", highlight=False)
    return options.quick or all(met for _, met in goals)


@contextlib.contextmanager
def _as_a_new_user() -> Iterator[None]:
    """An empty cache folder, and tuning as it is by default."""
    names = ("SERRATE_CACHE_DIR", "SERRATE_TUNE", "SERRATE_EFFORT")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SERRATE_CACHE_DIR": folder, "SERRATE_TUNE": "first_call", "SERRATE_EFFORT": "quick"}
        settings.reload()
        record.forget()
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ |= {} if value is None else {name: value}
            settings.reload()
            record.forget()


def choice(name: str, lengths: str, it: Case, rounds: int) -> Choice:
    """What the tuner chooses, and how long everything else takes."""
    assert isinstance(it.kernel, Kernel)
    # A new kernel: nothing is built for it yet in this process.
    fresh = kernel(it.kernel.fn, config=it.kernel.config)
    with _as_a_new_user():
        result = fresh(*it.arguments)
        if not it.is_right(result, it.wanted()):
            raise AssertionError(f"{name} on {lengths} lengths: wrong result")
        del result
        (tuning,) = fresh.tunings(*it.arguments)
        ((space, measurer),) = fresh.on("cpp").measurers(*it.arguments)
        every = list(dict.fromkeys((*space.everything(), tuning.chosen)))
        failed = measurer.build(every)
        for candidate in every:
            if candidate not in failed:
                try:
                    measurer.run(candidate, 1)
                except Unfit as error:
                    failed[candidate] = str(error)
        able = [c for c in every if c not in failed]

        def times(candidates: Sequence[Candidate], turns: int) -> dict[Candidate, float]:
            """Milliseconds: the least of interleaved runs, because whatever else the machine does only ever adds time."""
            least = {c: measurer.run(c, 1) for c in candidates}
            for _ in range(turns):
                for c in candidates:
                    if least[c] <= HOPELESS * min(least.values()):
                        least[c] = min(least[c], measurer.run(c, RUNS))
            return {c: 1e3 * seconds for c, seconds in least.items()}

        all_of_them = times(able, min(EVERY, rounds))
        best = min(able, key=all_of_them.__getitem__)
        # The same plan may stand among them under another name.
        mine = tuning.chosen if tuning.chosen in able else _alike(tuning.chosen, failed, able)
        final = times(list(dict.fromkeys((best, mine, space.usual))), rounds)
        # By the plan: a candidate that cuts rows only if that is possible may leave them whole.
        by_plan = [(measurer.plan(c).strategy, t) for c, t in all_of_them.items()]
    strategies = {s: min(found) for s in STRATEGIES if (found := [t for own, t in by_plan if own == s])}
    return Choice(
        name,
        lengths,
        str(mine),
        str(space.usual),
        str(best),
        final[mine],
        final[space.usual],
        final[best],
        tuning.spent,
        sum(each.seconds is not None for each in tuning.tried),
        len(able),
        strategies,
        {str(c): why for c, why in failed.items()},
    )


def _alike(candidate: Candidate, failed: Mapping[Candidate, str], able: Sequence[Candidate]) -> Candidate:
    """The candidate that has the same plan."""
    named = failed[candidate].removeprefix("the same plan as ")
    return next(c for c in able if str(c) == named)


def _mean(found: Sequence[Choice]) -> float:
    return exp(sum(log(1 + each.regret) for each in found) / max(len(found), 1)) - 1


def _goals(found: Sequence[Choice]) -> list[tuple[str, bool]]:
    mean, worst = _mean(found), max((each.regret for each in found), default=0.0)
    winners = {min(each.strategies, key=each.strategies.__getitem__) for each in found if each.won_by >= WINS}
    return [
        (f"regret, geometric mean {mean:.1%} (goal {MEAN:.0%})", mean <= MEAN),
        (f"regret, worst {worst:.1%} (goal {WORST:.0%})", worst <= WORST),
        (f"strategies that win somewhere by {WINS}x: {', '.join(sorted(winners)) or 'none'} (goal: two)", len(winners) >= 2),
    ]


def _table(found: Sequence[Choice], caption: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for k, heading in enumerate(("example", "lengths", *headings)):
        table.add_column(heading, no_wrap=True, justify="left" if k < 2 or "choice" in heading else "right")
    return table


def _strategy_table(found: Sequence[Choice]) -> Table:
    caption = (
        "ms, least of interleaved rounds: the fastest candidate of each strategy; then the tuner's choice and the fastest of "
        "all, timed again. regret: the choice over the fastest."
    )
    table = _table(found, caption, *STRATEGIES, "tuner's choice", "ms", "fastest", "regret")
    for each in found:
        times = (report.number(each.strategies.get(s)) for s in STRATEGIES)
        regret = Text(f"{each.regret:.1%}", style="red" if each.regret > WORST else "")
        numbers = (report.number(each.chosen_ms), report.number(each.fastest_ms))
        table.add_row(each.example, each.lengths, *times, each.chosen, *numbers, regret)
    return table


def _cost_table(found: Sequence[Choice]) -> Table:
    caption = (
        "tuning: seconds of the first call that go into it, with an empty cache, builds included. without: the plan that is "
        "chosen without measuring. pays after: calls."
    )
    table = _table(found, caption, "tuning, s", "timed", "of", "without, ms", "tuned, ms", "gain", "pays after")
    for each in found:
        pays = "-" if each.pays_after is None else f"{each.pays_after:.0f}"
        counts = (f"{each.tuning_s:.2f}", str(each.tried), str(each.candidates))
        times = (report.number(each.usual_ms), report.number(each.chosen_ms), f"{each.gain:.2f}")
        table.add_row(each.example, each.lengths, *counts, *times, pays)
    return table
