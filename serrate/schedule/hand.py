"""Schedules made by hand: what `TensorView.split` and friends record. Plain data; `by_hand` turns it into a plan.

In: changes to the loops of tensors. Out: for each scheduled tensor, its current loops and how they run; and all changes in order,
as `(primitive, arguments)`. Nothing here touches the math.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serrate.errors import ScheduleError
from serrate.ir.clone import Cloner
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.fusion import Fusion, Step
from serrate.ir.partition import Pair, Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine, CombineInner, RaggedProduct
from serrate.ir.reordered import counted_by
from serrate.ir.storage import collapse
from serrate.ir.tensor_domain import as_reduced, made_from, shown
from serrate.ir.tile import Accumulate, Scan
from serrate.ir.transforms import Merge, Split, picks
from serrate.ir.uids import sent
from serrate.ir.values import Tensor
from serrate.ir.view import TensorView


@dataclass(frozen=True, eq=False)
class Change:
    """One step: `primitive` turned the loops `inputs` of a phase into `outputs`."""

    primitive: str
    phase: str
    inputs: tuple[IterDomain, ...]
    outputs: tuple[IterDomain, ...] = ()
    args: tuple[str | int, ...] = ()

    @property
    def step(self) -> Step:
        return self.primitive, (self.phase, *(d.name for d in self.inputs), *self.args)


@dataclass(frozen=True, eq=False)
class LoopState:
    """The loops of one tensor as its schedule has left them."""

    phase: str
    """The name of the tensor that the loops compute (the first one, of a reduction with several states)."""
    loop: tuple[IterDomain, ...]
    over: tuple[IterDomain, ...]
    """The domains that the tensor reduces; loops made from these are reduced."""
    parallel: Mapping[int, ParallelType] = field(default_factory=dict)
    """How loops run, by uid; loops that are not listed are serial."""
    inlined: tuple[str, int] | None = None
    """The phase in whose outermost loops this tensor is computed, and how many of them."""
    origin: str | None = None
    """For a partial result, the phase that finishes it."""
    allocation: tuple[IterDomain, ...] | None = None
    """The dims of its memory, if the schedule sets them."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "parallel": [(sent(uid), kind) for uid, kind in self.parallel.items()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "parallel": {uid.here: kind for uid, kind in state["parallel"]}})

    def reduces(self, domain: IterDomain) -> bool:
        return made_from(domain, self.over)

    def kind(self, domain: IterDomain) -> ParallelType:
        return self.parallel.get(domain.uid, ParallelType.SERIAL)

    @property
    def shown(self) -> tuple[IterDomain, ...]:
        """The loops, annotated with how they run and whether they are reduced; their indices are unchanged."""
        marked = (d.parallelize(self.kind(d)) if self.kind(d) is not d.parallel else d for d in self.loop)
        return tuple(as_reduced(d) if self.reduces(d) else d for d in marked)

    def __str__(self) -> str:
        return f"{self.phase}[{', '.join(map(shown, self.shown))}]"


@dataclass(frozen=True)
class HandSchedule:
    """A whole schedule. Immutable: a fusion that is scheduled further gets a new one, a compiled program keeps its own."""

    changes: tuple[Change, ...] = ()
    """Every change of loops, in order."""
    states: Mapping[str, LoopState] = field(default_factory=dict)
    """The loops of each tensor that has a schedule, by the name of the tensor."""

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(change.step for change in self.changes)

    def is_partial(self, tensor: Tensor) -> bool:
        return tensor.name in self.states and self.states[tensor.name].origin is not None

    def recorded(self, state: LoopState, changes: Sequence[Change] = ()) -> HandSchedule:
        """The schedule with new loops for one tensor, and the changes that led to them."""
        return HandSchedule((*self.changes, *changes), {**self.states, state.phase: state})

    def cloned(self, cloner: Cloner, kept: Container[str]) -> HandSchedule | None:
        """The same schedule for copied tensors, restricted to the `kept` phases."""
        states = {}
        for name, state in self.states.items():
            if (state.origin or name) in kept:
                copied = cloner(state)
                states[name] = replace(copied, parallel={cloner.uids[uid]: kind for uid, kind in state.parallel.items()})
        changes = tuple(cloner(c) for c in self.changes if c.phase in states or c.phase in kept)
        return HandSchedule(changes, states) if states else None


def schedule_of(fusion: Fusion) -> HandSchedule:
    """The schedule made by hand so far, possibly empty."""
    assert fusion.schedule is None or isinstance(fusion.schedule, HandSchedule)
    return fusion.schedule or HandSchedule()


def loop_state(fusion: Fusion, tensor: Tensor) -> LoopState | None:
    """The loops that compute a tensor (for a view, its base); None for an input."""
    memory, states = tensor.memory, schedule_of(fusion).states
    if fusion.is_partial(memory):
        return states[memory.name]
    definition = fusion.definition_of(memory)
    if definition is None:
        return None
    statement = definition.statement
    name = statement.targets[0].name
    over = statement.over if isinstance(statement, Accumulate | Scan) else ()
    return states.get(name) or LoopState(name, definition.domains, over)


def keep(fusion: Fusion, view: TensorView) -> TensorView:
    """Gives a tensor its own schedule, with its current loops, so that it is not inlined into its readers."""
    state = loop_state(fusion, view.tensor)
    assert state is not None
    fusion.schedule = schedule_of(fusion).recorded(state)
    return view


def feeds(fusion: Fusion, phase: str, other: str) -> bool:
    """Whether the loops named `other` compute something from what those named `phase` compute."""
    states = schedule_of(fusion).states
    first, second = (states[p].origin if p in states else None for p in (phase, other))
    if first is not None and first == other:
        return True
    sources = [t for d in fusion.definitions if d.statement.targets[0].name == (first or phase) for t in d.statement.targets]
    targets = [d.statement.targets[0] for d in fusion.definitions if d.statement.targets[0].name == (second or other)]
    return any(fusion.reaches(s, t) for s in sources for t in targets)


def axis_of(function: str, state: LoopState, axis: int) -> int:
    """A position in the loops, counted from the end if negative."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -len(state.loop) <= axis < len(state.loop):
        raise ScheduleError(f"{function}: axis must be a position in the loops {state}, got {axis!r}")
    return axis % len(state.loop)


def check_serial(function: str, state: LoopState, domains: Sequence[IterDomain]) -> None:
    """Raises if a loop already runs in parallel: it can no longer be changed."""
    for domain in domains:
        kind = state.kind(domain)
        if kind is not ParallelType.SERIAL:
            raise ScheduleError(f"{function}: {domain.name} of {state.phase} is {kind.value} already; parallelize last")


def check_alike(function: str, state: LoopState, domains: Sequence[IterDomain]) -> None:
    """Raises if loops to be merged are partly reduced and partly kept: the loops must determine the position in the result."""
    reduced = [d for d in domains if state.reduces(d)]
    if reduced and len(reduced) < len(domains):
        kept = next(d for d in domains if not state.reduces(d))
        raise ScheduleError(f"{function}: {state.phase} reduces {reduced[0].name} and keeps {kept.name}; one loop cannot do both")


def check_order(function: str, phase: str, loop: Sequence[IterDomain]) -> None:
    """Raises if a loop that selects a row lies inside the loop over that row, whose length would not be known."""
    for k, domain in enumerate(loop):
        if isinstance(domain, RaggedIterDomain):
            for later in loop[k + 1 :]:
                if picks(later, domain.component):
                    raise ScheduleError(
                        f"{function}: the length of {domain.name} depends on {later.name}, which must stay outside it, in {phase}"
                    )


def check_no_rows(function: str, phase: str, loop: Sequence[IterDomain], domain: IterDomain) -> None:
    """Raises if a loop selects rows: its positions cannot change, because lengths exist only for existing rows."""
    for ragged in loop:
        if isinstance(ragged, RaggedIterDomain) and picks(domain, ragged.component):
            raise ScheduleError(
                f"{function}: {domain.name} of {phase} selects the rows of {ragged.name}, whose ends must be kept"
            )


def check_swizzle(phase: str, by: IterDomain, domain: IterDomain, *, by_is_reduced: bool, is_reduced: bool) -> None:
    """Raises if the position in the result would depend on a reduced loop."""
    if by_is_reduced and not is_reduced:
        raise ScheduleError(
            f"swizzle: {phase} keeps {domain.name} and reduces {by.name}; a kept loop cannot depend on a reduced one"
        )


def check_partition(phase: str, domain: IterDomain, made: Pair, reduces: Callable[[IterDomain], bool]) -> None:
    """Raises if the position in the result would depend on a reduced loop: the one that selects the boundaries."""
    owner = made[1].component
    gone = next((d for d in counted_by(made[1])[:-1] if reduces(d)), None) if owner is not made[0] else None
    if gone is not None and not reduces(domain):
        raise ScheduleError(
            f"partition: {phase} keeps {domain.name} and reduces {gone.name}; a kept loop cannot depend on a reduced one"
        )


def check_resize(phase: str, domain: IterDomain, left: int, right: int) -> None:
    """Raises if a resize would remove positions, and so elements. Added positions are guarded."""
    for size in (left, right):
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ScheduleError(f"resize: {domain.name} of {phase} must not lose positions, got {left!r} and {right!r}")


def changed(state: LoopState, place: int, count: int, outputs: Sequence[IterDomain]) -> LoopState:
    """The loops with `count` of them replaced, starting at `place`."""
    return replace(state, loop=(*state.loop[:place], *outputs, *state.loop[place + count :]))


def reordered(state: LoopState, order: Sequence[IterDomain]) -> tuple[LoopState, list[Change]]:
    """The loops in another order, and the step that reorders them, if any."""
    if [d.uid for d in order] == [d.uid for d in state.loop]:
        return state, []
    check_order("reorder", state.phase, order)
    return replace(state, loop=tuple(order)), [Change("reorder", state.phase, tuple(order), tuple(order))]


def followed(state: LoopState, changes: Sequence[Change]) -> tuple[LoopState, list[Change]]:
    """The loops after the changes of another tensor that apply to loops both share."""
    made: list[Change] = []
    for change in changes:
        here = {d.uid: d for d in state.loop}
        if change.primitive in ("reorder", "rfactor") or not all(d.uid in here for d in change.inputs):
            continue
        if change.primitive == "swizzle" and change.args[0] not in {d.name for d in state.loop}:
            continue
        beside = () if not change.outputs or change.outputs[0].definition is None else change.outputs[0].definition.beside
        if change.primitive == "partition" and any(not any(picks(own, d) for own in state.loop) for d in beside):
            continue
        check_alike(f"{change.primitive} as {change.phase} does", state, change.inputs)
        first = min(k for k, d in enumerate(state.loop) if d.uid in {i.uid for i in change.inputs})
        rest = [d for d in state.loop if d.uid not in {i.uid for i in change.inputs}]
        state, moves = reordered(state, (*rest[:first], *change.inputs, *rest[first:]))
        state = changed(state, first, len(change.inputs), change.outputs)
        made += [*moves, replace(change, phase=state.phase)]
    return state, made


def allocation_steps(tensor: Tensor, wanted: Sequence[IterDomain]) -> tuple[tuple[IterDomain, ...], list[Change]]:
    """Memory over `wanted`, in which every ragged dim is combined with the dims that count its rows; and the steps to it from the
    current memory of a tensor: transforms and a reordering of its dims, or of the dims that operations see."""
    goal = collapse(wanted)
    current, changes = tensor.storage, list[Change]()
    waiting = _behind(goal, current)
    if not all(step.how in ("split", "merge") for step in waiting):
        # Rows are taken apart first; in the end they are combined again.
        current, changes = tensor.logical, [Change("allocate", tensor.name, (), tensor.logical, ("rows",))]
        waiting = _behind(goal, current)
    while waiting:
        ready = next((step for step in waiting if all(_has(current, d) for d in step.inputs)), None)
        if ready is None:
            break
        waiting.remove(ready)
        rest = [d for d in current if not _has(ready.inputs, d)]
        place = next(k for k, d in enumerate(current) if _has(ready.inputs, d))
        if ready.how != "split":
            changes += _moved(tensor, current, (*rest[:place], *ready.inputs, *rest[place:]))
        args: tuple[str | int, ...] = (ready.how, *(d.name for d in ready.inputs), *ready.args)
        changes.append(Change("allocate", tensor.name, (), ready.outputs, args))
        current = (*rest[:place], *ready.outputs, *rest[place:])
    if {d.uid for d in current} != {d.uid for d in goal} or len(current) != len(goal) or any(d.is_ragged for d in goal):
        raise ScheduleError(
            f"set_allocation: [{', '.join(map(str, wanted))}] cannot be made from the dims of {tensor.name}, "
            f"[{', '.join(map(str, tensor.logical))}], or of its memory, [{', '.join(map(str, tensor.storage))}], by splits, "
            "merges and combines of all of them"
        )
    return goal, [*changes, *_moved(tensor, current, goal)]


def _moved(tensor: Tensor, current: tuple[IterDomain, ...], order: tuple[IterDomain, ...]) -> list[Change]:
    if [d.uid for d in current] == [d.uid for d in order]:
        return []
    return [Change("allocate", tensor.name, (), order, ("reorder", *(d.name for d in order)))]


@dataclass(frozen=True, eq=False)
class _Remade:
    """One step between two lists of dims: dims `inputs` become `outputs`."""

    how: str
    inputs: tuple[IterDomain, ...]
    outputs: tuple[IterDomain, ...]
    args: tuple[int, ...] = ()


def _behind(domains: Sequence[IterDomain], ends: Sequence[IterDomain]) -> list[_Remade]:
    """The steps between `ends` and `domains`. A partition of `ends` is undone by a combine."""
    found: dict[tuple[int, ...], _Remade] = {}
    undone = {d.definition.inputs[0].uid: d.definition for d in ends if isinstance(d.definition, Partition)}
    pending = [d for d in domains if not _has(ends, d)]
    while pending:
        domain = pending.pop()
        made = undone.get(domain.uid) or domain.definition
        if made is None:
            continue
        if isinstance(made, Partition) and made.lengths is None and made.inputs[0].uid == domain.uid:
            step = _Remade("combine", made.outputs, (domain,))
        elif isinstance(made, Split) and made.factor.value is not None:
            step = _Remade("split", made.inputs, made.outputs, (made.factor.value, int(made.inner)))
        else:
            how = {RaggedProduct: "product", Merge: "merge", Combine: "combine", CombineInner: "combine"}.get(type(made), "")
            step = _Remade(how, made.inputs, made.outputs)
        if tuple(d.uid for d in step.outputs) not in found:
            found[tuple(d.uid for d in step.outputs)] = step
            pending.extend(d for d in step.inputs if not _has(ends, d))
    return [step for step in found.values() if step.how]


def _has(domains: Sequence[IterDomain], domain: IterDomain) -> bool:
    return any(d.uid == domain.uid for d in domains)
