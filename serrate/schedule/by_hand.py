"""Schedules by hand: the steps that `TensorView`s recorded, completed to a plan.

In: a naive tile program and a `HandSchedule`. Out: a plan called `by_hand`, made of the primitives that strategies use. Anything
the schedule leaves open is decided here, in this order, and recorded in the plan:

    1. elementwise results without a schedule are inlined into their readers, if that is legal
    2. the recorded steps run, in order
    3. a tensor computed inside another's loops takes over the parallel types of those loops
    4. loops are put in the order that backends require: grid, serial, lanes; kept before reduced
    5. tensors move into the loops of their consumers, the last ones first; rows that other loops read there are held in private
       memory, one at a time
"""

from __future__ import annotations

from collections.abc import Mapping

from serrate.analysis.guards import guards, loop_symbols
from serrate.analysis.vectors import MustDivide, vector_access
from serrate.errors import ScheduleError
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.expr import Expr, const
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.solve import end_of
from serrate.ir.tile import GRID, LANES, SERIAL, Leaf, Phase, Store, TileProgram, chain
from serrate.ir.transforms import picks
from serrate.ir.values import Extent, Places, Read, Role, Tensor
from serrate.schedule.hand import HandSchedule, LoopState
from serrate.schedule.plan import Plan, Recorder
from serrate.schedule.prepare import reduced_loops
from serrate.schedule.target import Target, power_of_two_at_least

Kinds = Mapping[str, ParallelType]
"""How the loops of a phase run, by name."""


def by_hand(program: TileProgram, hand: HandSchedule, target: Target) -> Plan:
    """The plan of a schedule by hand."""
    recorder = _replayed(program, hand)
    _vector_accesses(recorder.program, hand)
    kinds: dict[str, Kinds] = {}
    for phase in reversed(recorder.program.phases):
        kinds[phase.name] = _kinds(phase, hand.states, kinds)
    for phase in recorder.program.phases:
        _arrange(recorder, phase, kinds[phase.name], hand.states.get(phase.name), target)
    for phase in recorder.program.phases:
        _check_rows_end(phase)
    _move_inside(recorder, hand, target)
    return recorder.plan("by_hand", target.warps)


def vector_checks(program: TileProgram, hand: HandSchedule) -> tuple[MustDivide, ...]:
    """The divisibility checks that a call must pass before loops vectorized by hand may run."""
    return _vector_accesses(_replayed(program, hand).program, hand)


def _replayed(program: TileProgram, hand: HandSchedule) -> Recorder:
    """The program after the recorded steps."""
    recorder = Recorder(program)
    live = {phase.name for phase in program.phases}
    _inline_unscheduled(recorder, hand)
    for name, args in hand.steps:
        if (hand.states[str(args[0])].origin or args[0]) in live:
            recorder.do(name, *args)
    return recorder


def _vector_accesses(program: TileProgram, hand: HandSchedule) -> tuple[MustDivide, ...]:
    """Checks that every access in a vectorized loop is contiguous or uniform; raises if one is not, and returns the checks that
    depend on the sizes of a call."""
    found: dict[MustDivide, None] = {}
    for phase in program.phases:
        state, nest = hand.states.get(phase.name), chain(phase)
        if state is None or nest is None:
            continue
        vectors = {d.name for d in state.loop if state.kind(d) is ParallelType.VECTORIZE}
        loops, leaf = [loop.domain for loop in nest[0]], nest[1]
        accesses: list[tuple[Tensor, Places]] = [(t, leaf.index) for t in leaf.targets]
        accesses += [(r.tensor, r.index) for value in leaf.values for r in value.reads]
        for vector in (d for d in loops if d.name in vectors):
            for tensor, index in accesses:
                access = vector_access(vector, loops, index, tensor.logical, tensor.storage)
                if access.legal is False:
                    raise ScheduleError(
                        f"{vector.name} of {phase.name} cannot be vectorized, because of {tensor.name}: {access.why}"
                    )
                found.update(dict.fromkeys(access.checks))
    return tuple(found)


def tile_kind(kind: ParallelType) -> ParallelType:
    """The kind of tile-program loop that a parallel type becomes: grid, serial or lanes.

    >>> tile_kind(ParallelType.BLOCK_X), tile_kind(ParallelType.VECTORIZE)
    (<ParallelType.GRID: 'grid'>, <ParallelType.LANES: 'lanes'>)
    """
    if kind is ParallelType.MESH:
        raise ScheduleError("a loop is spread over a mesh of processes, and this program is compiled for one process")
    if kind is SERIAL or kind is GRID or kind.value.startswith("block_"):
        return SERIAL if kind is SERIAL else GRID
    return LANES


def _loops(phase: Phase) -> tuple[IterDomain, ...]:
    found = chain(phase)
    assert found is not None, f"phase {phase.name} is not a perfect nest"
    return tuple(loop.domain for loop in found[0])


def _inline_unscheduled(recorder: Recorder, hand: HandSchedule) -> None:
    for phase in recorder.program.phases:
        leaf = phase.leaves[0]
        if phase.name not in hand.states and isinstance(leaf, Store) and leaf.tensor.role is Role.SCRATCH:
            recorder.attempt("inline", phase.name)


def _kinds(phase: Phase, states: Mapping[str, LoopState], known: Mapping[str, Kinds]) -> Kinds:
    """The kinds of a phase's loops: from the tensor's own schedule, else, for shared loops, from its consumer's."""
    state = states.get(phase.name)
    if state is None:
        return {}
    own = {d.name: tile_kind(state.kind(d)) for d in state.loop if d.uid in state.parallel}
    if state.inlined is None:
        return own
    consumer, depth = state.inlined
    shared = {d.name for d in states[consumer].loop[:depth]}
    return {**{name: kind for name, kind in known.get(consumer, {}).items() if name in shared}, **own}


def _arrange(recorder: Recorder, phase: Phase, kinds: Kinds, state: LoopState | None, target: Target) -> None:
    """Marks the loops of a phase, and puts them in a legal order."""
    loops = _loops(phase)
    over = reduced_loops(phase.leaves[0], list(loops))

    def rank(domain: IterDomain) -> int:
        kind = kinds.get(domain.name, SERIAL)
        return 0 if kind is GRID else 3 if kind is LANES else 2 if domain.uid in over else 1

    order = [d.name for d in sorted(loops, key=rank)]
    consumer, depth = state.inlined if state is not None and state.inlined is not None else ("", 0)
    shared = [d.name for d in loops[:depth]]
    if order[:depth] != shared:
        raise ScheduleError(
            f"{phase.name} runs as {', '.join(order)} (grid, then serial, then lanes), so it cannot share the loops "
            f"{', '.join(shared)} with {consumer}"
        )
    for domain in loops:
        kind = kinds.get(domain.name, SERIAL)
        extent = domain.extent_expr.value
        if kind is LANES and target.power_of_two_lanes and extent is not None and extent != power_of_two_at_least(extent):
            raise ScheduleError(f"{phase.name}: {domain} cannot be lanes: this target needs a power of two; split it first")
        if kind is not SERIAL:
            recorder.do("mark", phase.name, domain.name, kind.value)
    if order != [d.name for d in loops]:
        recorder.do("reorder", phase.name, *order)


def _mentioned(leaf: Leaf) -> list[IterDomain]:
    """Every domain whose rows an access or an extent of a statement may look up."""
    nodes = [node for value in leaf.values for node in value.walk()]
    tensors = (*leaf.targets, *(node.tensor for node in nodes if isinstance(node, Read)))
    return [*(d for t in tensors for d in t.logical), *(node.domain for node in nodes if isinstance(node, Extent))]


def _check_rows_end(phase: Phase) -> None:
    """No length may be read past the last component, so some loop must end with it.

    A component of K rows found from several loops is in range iff its index is below K. Lowering ends the innermost of those
    loops there, which it can if the index is a whole multiple of that loop's position and something the others determine.
    """
    found = chain(phase)
    assert found is not None
    loops, kinds = [loop.domain for loop in found[0]], [loop.kind for loop in found[0]]
    symbols = loop_symbols(loops)
    # Loops of one position disappear in lowering.
    once: dict[Expr, Expr] = {
        s: const(0) for s, d in zip(symbols, loops, strict=True) if not d.is_ragged and d.extent_expr.value == 1
    }
    ragged = [d for d in (*loops, *_mentioned(found[1])) if isinstance(d, RaggedIterDomain)]
    for guard in guards((), loops):
        rows = next((d for d in ragged if picks(guard.domain, d.component)), None)
        condition = guard.condition.substitute(once)
        last = next((s for s in reversed(symbols) if s in condition.symbols), None)
        # Lanes are masked individually.
        if rows is None or last is None or condition.proven or kinds[symbols.index(last)] is LANES:
            continue
        if end_of(condition, last) is None:
            inner = loops[symbols.index(last)].name
            raise ScheduleError(
                f"{phase.name}: the loop over {inner} cannot end where the components of {rows.name} do ({condition}, with "
                f"i{symbols.index(last)} for {inner}); split by a number, and keep the inner part the innermost"
            )


def _move_inside(recorder: Recorder, hand: HandSchedule, target: Target) -> None:
    holds = {phase.name: phase.name for phase in recorder.program.phases}
    for phase in reversed(recorder.program.phases):
        state = hand.states.get(phase.name)
        if state is None or state.inlined is None:
            continue
        consumer, depth = state.inlined
        if consumer not in holds:
            raise ScheduleError(f"{phase.name} cannot be computed inside {consumer}, which no output depends on")
        goal = holds[consumer]
        if [p.name for p in recorder.program.phases].index(goal) != recorder.program.phases.index(phase) + 1:
            recorder.do("delay", phase.name, goal)
        if _reads_rows_again(recorder, phase.name, goal, depth):
            if not target.keeps_rows:
                raise ScheduleError(
                    f"{phase.name} would be held row by row inside {consumer}, and this target has no memory for rows; share the "
                    "loops over rows too, or make them lanes"
                )
            recorder.do("hold", phase.name)
        recorder.do("fuse", phase.name, goal, depth)
        holds = {name: goal if at == phase.name else at for name, at in holds.items()}
    for tensor in {t for p in recorder.program.phases for t in p.writes if t.role is Role.PRIVATE}:
        readers = [p.name for p in recorder.program.phases if tensor in p.reads and tensor not in p.writes]
        if readers:
            raise ScheduleError(
                f"{tensor.name} is held row by row where it is computed, and {', '.join(readers)} reads it elsewhere; compute it "
                "inside a loop that all its readers share"
            )


def _reads_rows_again(recorder: Recorder, phase: str, goal: str, depth: int) -> bool:
    """Whether a tensor of rows is read by other loops over the rows than those that compute it, within the loops they share."""
    leaf = next(p for p in recorder.program.phases if p.name == phase).leaves[0]
    if not any(d.is_ragged for d in leaf.targets[0].logical):
        return False
    trial = Recorder(recorder.program)
    if trial.attempt("fuse", phase, goal, depth):
        return False
    return trial.attempt("hold", phase) and trial.attempt("fuse", phase, goal, depth)
