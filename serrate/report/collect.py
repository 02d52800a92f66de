"""Fills reports: reads the programs that are built for a call, and considers the alternatives.

In: stages with the calls they are bound to. Out: a `Report`. To count the lanes of other strategies, their plans are made and
lowered, but not built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serrate.analysis.guards import Need, condition, needed, settled
from serrate.analysis.indices import Indices
from serrate.analysis.inspection.lanes import LaneCount, count_lanes
from serrate.draw import draw_domains, draw_loops
from serrate.errors import SerrateError
from serrate.ir.expr import Array, Element, Less, Symbol, symbol
from serrate.ir.loops import Block, If, LoopProgram, Node, bodies
from serrate.ir.tile import Leaf, Loop, TileProgram, walk
from serrate.lower.blocks import loop_symbol
from serrate.lower.pipeline import lower
from serrate.lower.statements import BlockStatements
from serrate.report.data import Bound, Report, RowSet, StageReport, Trial
from serrate.runtime.dispatch import Prepared
from serrate.runtime.memory import InMemory, whole
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import STRATEGIES
from serrate.schedule.strategies.library import LIBRARY, functions
from serrate.schedule.target import Target
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.display.describe import ragged_dims
from serrate.tuner.candidates import Candidate
from serrate.tuner.record import Tuning
from serrate.tuner.search import Tried

_WHY = "explain"


def rows_of_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[RowSet, ...]:
    """The rows of all ragged arguments of a call; those that share rows are one set."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        named: Iterable[tuple[str, Any]] = bound.arguments.items()
    except (TypeError, ValueError):
        named = [(f"argument {k}", arg) for k, arg in enumerate((*args, *kwargs.values()))]
    found: dict[int, tuple[list[str], JaggedTensor]] = {}
    for name, value in named:
        for path, leaf in _ragged(name, value):
            found.setdefault(id(leaf.structure), ([], leaf))[0].append(path)
    return tuple(RowSet(", ".join(names), ragged_dims(jt.structure, jt.values.dim(), _WHY)) for names, jt in found.values())


def _ragged(name: str, value: Any) -> Iterable[tuple[str, JaggedTensor]]:
    if isinstance(value, JaggedTensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for k, each in enumerate(value):
            yield from _ragged(f"{name}[{k}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _ragged(f"{name}[{key!r}]", each)


def rows_of_structures(structures: Iterable[tuple[str, Structure]]) -> tuple[RowSet, ...]:
    """The rows that a fusion's arguments describe."""
    return tuple(RowSet(name, ragged_dims(structure, 1, _WHY)) for name, structure in structures)


@dataclass(frozen=True)
class StageFacts:
    """A program, with what it runs for a call."""

    program: TileProgram
    """Before it is scheduled."""
    device: torch.device
    backend: str
    target: Target
    ready: Prepared
    usual: str
    """The reason for the heuristic's choice of a strategy."""
    tuning: Tuning | None
    """The tuning record; None if nothing is tuned."""
    planned: Callable[[Candidate], Plan]
    """The plan that a candidate stands for."""
    data: Callable[[LoopProgram], tuple[dict[Array, InMemory], dict[Symbol, int]]]
    """The arrays and numbers that a lowered program would get."""


def report(
    name: str, stages: Sequence[StageFacts], rows: tuple[RowSet, ...], ignored: Sequence[str] = (), html: str | Path | None = None
) -> Report:
    """The report on a call whose programs are these; also as a page in the file `html`."""
    device = str(stages[0].device) if stages else "cpu"
    found = Report(name, device, rows, tuple(map(_stage_report, stages)), tuple(ignored))
    if html is not None:
        found.save(html)
    return found


def _stage_report(asked: StageFacts) -> StageReport:
    plan = asked.ready.plan
    scheduled = plan.apply(asked.program)
    kept, proven = _bounds(scheduled)
    return StageReport(
        name=asked.program.name,
        backend=asked.backend,
        strategy=plan.strategy,
        plan=plan.tree[: len(plan.tree) - len(plan.reasons)],
        why=_why(asked),
        reasons=(*plan.reasons, *asked.program.notes),
        tiles=tuple(dict.fromkeys((*plan.tiles, *(plan.short.tiles if plan.short else ())))),
        kept=kept,
        proven=proven,
        trials=_trials(asked),
        source=asked.ready.executable.source,
        drawing=_drawing(scheduled),
    )


# --- guards ---


def _bounds(program: TileProgram) -> tuple[tuple[Bound, ...], tuple[Bound, ...]]:
    """The guards of all statements, and the bounds that need no guard."""
    kept: dict[tuple[str, str], None] = {}
    proven: dict[str, str] = {}
    for phase in program.phases:
        if program.axes:
            made = BlockStatements(program, phase)
            _note_conditions(made.run(), kept)
            proven |= {str(g): why for g, why in made.dropped.items()}
        else:
            for statement, loops in walk(phase.body):
                if isinstance(statement, Leaf):
                    _note_guards(loops, kept, proven)
    checked = {what for what, _ in kept}
    settled_ = _by_reason({what: why for what, why in proven.items() if what not in checked})
    return tuple(Bound(*each) for each in kept), settled_


def _note_guards(loops: Sequence[Loop], kept: dict[tuple[str, str], None], proven: dict[str, str]) -> None:
    domains = [loop.domain for loop in loops]
    indices = Indices(zip(domains, map(loop_symbol, loops), strict=True))
    for need in needed(domains):
        if condition(need.domain, indices, need.lower).proven:
            proven[_in_names(need)] = "follows from the bounds of its parts"
        else:
            kept[_in_names(need), need.reason] = None
    proven |= {need.domain.name: need.reason for need in settled(domains)}


def _in_names(need: Need) -> str:
    """The condition in terms of the domain and its rows, without the index expressions of the loops."""
    named = [(domain, symbol(domain.name)) for domain in (need.domain, *need.domain.owners)]
    return str(condition(need.domain, Indices(named), need.lower))


def _note_conditions(body: Iterable[Node], kept: dict[tuple[str, str], None]) -> None:
    for node in body:
        if isinstance(node, Block | If):
            kept |= {(str(g), _reason(g)): None for g in node.guard}
        for part in bodies(node):
            _note_conditions(part, kept)


def _reason(guard: Less) -> str:
    """The reason for a condition of a kernel."""
    if any(isinstance(e, Element) for side in (guard.left, guard.right) for e in side.walk()):
        return "rows differ in length, and are not whole tiles"
    return "tiles may reach past the end"


def _by_reason(proven: Mapping[str, str]) -> tuple[Bound, ...]:
    """Bounds with the same reason together."""
    groups: dict[str, list[str]] = {}
    for what, why in proven.items():
        groups.setdefault(why, []).append(what)
    return tuple(Bound(", ".join(names), why) for why, names in groups.items())


# --- candidates ---


def _why(asked: StageFacts) -> str:
    """The reason for the program's strategy."""
    tuning = asked.tuning
    if tuning is None or not tuning.tried:
        return asked.usual
    timed = sum(each.seconds is not None for each in tuning.tried)
    if timed == 1:
        return f"{asked.usual}; nothing else was timed within the budget"
    fastest = f"the fastest of {timed} candidates that were timed"
    gain = "" if tuning.gain is None or tuning.chosen == tuning.tried[0].candidate else f", {tuning.gain:.2f}x the usual one"
    if tuning.source == "nearest":
        return f"it was {fastest}{gain}, for similar rows; these were not measured"
    return f"it is {fastest}{gain}"


def _trials(asked: StageFacts) -> tuple[Trial, ...]:
    """The measured candidates, in order, then the strategies that were not measured."""
    tuning, found = asked.tuning, list[Trial]()
    for each in () if tuning is None else tuning.tried:
        chosen = tuning is not None and each.candidate == tuning.chosen
        found.append(_trial(asked, each.candidate, each, chosen, {t.strategy for t in found if t.lanes is not None}))
    current = asked.ready.plan.strategy
    # A schedule by hand is the only one.
    for strategy in STRATEGIES if current in STRATEGIES else (current,):
        if all(trial.strategy != strategy for trial in found):
            for candidate in _library(asked) if strategy == LIBRARY else [Candidate(strategy)]:
                chosen = strategy == current and not any(trial.chosen for trial in found)
                found.append(_trial(asked, candidate, None, chosen, set()))
    return tuple(found)


def _library(asked: StageFacts) -> list[Candidate]:
    """The library calls that the program is, the one that it runs first."""
    names = [str(step.args[0]) for step in asked.ready.plan.steps if step.primitive == "call"]
    names += functions(asked.program, asked.target)
    return [Candidate(LIBRARY, (("call", name),)) for name in dict.fromkeys(names)]


def _trial(asked: StageFacts, candidate: Candidate, tried: Tried | None, chosen: bool, counted: set[str]) -> Trial:
    """One candidate; its lanes, if those of its strategy are not `counted` yet."""
    seconds, reason, lanes = (None, "", None) if tried is None else (tried.seconds, tried.reason, None)
    if candidate.strategy not in counted and (tried is None or seconds is not None):
        try:
            lanes = _lanes(asked, asked.ready.plan if chosen else asked.planned(candidate))
        except SerrateError as error:
            reason = f"cannot run: {error}"
    return Trial(str(candidate), candidate.strategy, chosen, seconds, reason, lanes)


def _lanes(asked: StageFacts, plan: Plan) -> LaneCount | None:
    """The lanes of a program under a plan, for the rows of a call; a library's are not known."""
    scheduled = plan.apply(asked.program)
    if scheduled.call is not None:
        return None
    program = lower(scheduled, asked.program.name, (), plan.lowered_for(asked.target))
    arrays, numbers = asked.data(program)
    data = {array: whole(found) for array, found in arrays.items()}
    return count_lanes(program, data, numbers, in_order=asked.target.lanes_in_order)


# --- the drawing ---


def _drawing(program: TileProgram) -> str:
    """The domains of the statement with the most loops."""
    nests = [(s, loops) for phase in program.phases for s, loops in walk(phase.body) if isinstance(s, Leaf | Block)]
    if not nests:
        return ""
    statement, loops = max(nests, key=lambda nest: len(nest[1]))
    domains = [loop.domain.parallelize(loop.kind) for loop in loops]
    if not domains:
        return ""
    if not isinstance(statement, Leaf):
        return draw_domains(domains).svg
    return draw_loops([], domains).svg
