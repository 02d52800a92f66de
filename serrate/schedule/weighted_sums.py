"""The primitive `online`: a softmax and the sums that it weighs, in one pass over its rows.

In: a program in which the weights of a softmax are stored, and then summed up with values. Out: the same sums as a state of the
softmax itself, so that neither scores nor weights are ever complete:

    m, t softmax= s[q, k] over k                        m, t, u softmax= s[q, k], 1, v[k, d] over k
    w[q, k] = exp_diff(s[q, k], m[q]) * f[q]      ->    o[q, d] = u[q, d] * f[q]
    o[q, d] sum= w[q, k] * v[k, d] over k

Legal because the sum over k is linear: f does not vary with k. What else reads m and t runs after the pass, as it did before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from serrate.errors import ScheduleError
from serrate.ir.domains import IterDomain
from serrate.ir.reductions import SOFTMAX, softmax
from serrate.ir.storage import storage_of
from serrate.ir.tile import Accumulate, Phase, Store, TileProgram, chain, nest
from serrate.ir.values import (
    Call,
    Computed,
    Constant,
    Extent,
    Ordinal,
    Position,
    Read,
    Role,
    Tensor,
    Value,
    call,
    carried_dtype,
    constant,
    domains_of,
    read,
    reindex,
)


@dataclass(frozen=True)
class _Weighed:
    """A weighted sum that was found, with everything that goes into it."""

    statistics: Phase
    """The phase of the softmax."""
    weights: Phase
    total: Accumulate
    """The softmax itself, at the domains of the sum."""
    value: Value
    factors: tuple[Value, ...]
    """What does not vary along the row."""


def online(program: TileProgram, phase: Phase) -> TileProgram:
    """The program with the weighted sum of `phase` as a state of its softmax."""
    found = chain(phase)
    leaf = found[1] if found is not None else None
    if found is None or not isinstance(leaf, Accumulate) or leaf.reduction.operator != "sum" or leaf.merge or len(leaf.over) != 1:
        raise ScheduleError(f"phase {phase.name} is not a sum of values along one dim")
    parts = _weighed(program, phase, leaf)
    target = leaf.targets[0]
    kept = tuple(d for d in leaf.index if d is not None)
    sums = Tensor(f"{target.name}_sums", carried_dtype(target.dtype), kept, storage_of(kept))
    at = parts.total.index
    states = Accumulate(
        (*parts.total.targets, sums),
        leaf.index,
        softmax(2),
        (parts.total.values[0], constant(1.0, sums.dtype), parts.value),
        leaf.over,
        places=(at, at, leaf.index),
    )
    result: Value = read(sums, leaf.index)
    for factor in parts.factors:
        result = call("mul", result, factor, dtype=target.dtype)
    loops = tuple((loop.domain, loop.kind) for loop in found[0])
    outer = tuple((d, kind) for d, kind in loops if d.uid != leaf.over[0].uid)
    new = (Phase(sums.name, nest(loops, states)), Phase(phase.name, nest(outer, Store(target, leaf.index, result))))
    return program.with_phases(_placed(program, phase, parts, new))


def _weighed(program: TileProgram, phase: Phase, leaf: Accumulate) -> _Weighed:
    """The softmax whose weights a phase sums up; raises where it does not."""
    value, along = leaf.values[0], leaf.over[0]
    if not isinstance(value, Call) or value.function != "mul":
        raise ScheduleError(f"phase {phase.name} does not sum products")
    for side, other in (value.args, reversed(value.args)):
        stored = _uncast(side)
        weights = _stored(program, stored) if isinstance(stored, Read) else None
        if weights is None or not isinstance(stored, Read):
            continue
        for statistics in program.phases:
            found = chain(statistics)
            total = found[1] if found is not None else None
            if isinstance(total, Accumulate) and total.reduction is SOFTMAX and len(total.over) == 1 and not total.merge:
                made = _split(_moved(weights, stored), total, along)
                if made is not None:
                    return _Weighed(statistics, weights, made[0], other, made[1])
    raise ScheduleError(f"phase {phase.name} does not sum up what the weights of a softmax weigh")


def _uncast(value: Value) -> Value:
    """A value before it was rounded."""
    while isinstance(value, Call) and value.function == "cast" and value.dtype.is_floating_point:
        value = value.args[0]
    return value


def _stored(program: TileProgram, element: Read) -> Phase | None:
    """The phase that stores what is read, where that is all it does and nobody else reads it."""
    readers = [p for p in program.phases if element.tensor in {t.memory for t in p.reads}]
    for phase in program.phases:
        found = chain(phase)
        if found is not None and isinstance(found[1], Store) and found[1].tensor is element.tensor:
            return phase if element.tensor.role is Role.SCRATCH and len(readers) == 1 else None
    return None


def _moved(weights: Phase, element: Read) -> Value:
    """What is stored, at the domains where it is read."""
    found = chain(weights)
    assert found is not None and isinstance(found[1], Store)
    pairs = zip(found[1].index, element.index, strict=True)
    return reindex(
        found[1].value, {own.uid: at for own, at in pairs if own is not None and (at is None or isinstance(at, IterDomain))}
    )


def _split(weight: Value, total: Accumulate, along: IterDomain) -> tuple[Accumulate, tuple[Value, ...]] | None:
    """A weight as a power relative to the maximum of `total`, times factors that do not vary along the row; None for others."""
    factors = list(_factors(weight))
    powers = [v for v in factors if isinstance(v, Call) and v.function == "exp_diff"]
    others = tuple(v for v in factors if v not in powers)
    if len(powers) != 1 or any(along.uid in _domains(v) for v in others):
        return None
    score, maximum = powers[0].args
    if not isinstance(maximum, Read) or maximum.tensor is not total.targets[0]:
        return None
    swap: dict[int, IterDomain | None] = {total.over[0].uid: along}
    for own, at in zip(total.index, maximum.index, strict=True):
        if own is None or not isinstance(at, IterDomain):
            return None
        swap[own.uid] = at
    if reindex(total.values[0], swap) is not score:
        return None
    index = tuple(at for at in maximum.index if isinstance(at, IterDomain))
    return replace(total, index=index, values=(score,)), others


def _factors(value: Value) -> Iterator[Value]:
    value = _uncast(value)
    if isinstance(value, Call) and value.function == "mul":
        for side in value.args:
            yield from _factors(side)
    elif isinstance(value, Call) and value.function == "div":
        yield from _factors(value.args[0])
        yield call("reciprocal", value.args[1], dtype=value.dtype)
    elif not (isinstance(value, Constant) and value.number == 1):
        yield value


def _domains(value: Value) -> set[int]:
    """The domains that a value varies along."""
    found: set[int] = set()
    for v in value.walk():
        if isinstance(v, Read):
            found.update(d.uid for d in domains_of(v.index))
        elif isinstance(v, Position | Extent):
            found.add(v.domain.uid)
        elif isinstance(v, Computed):
            found.update(d.uid for d in v.place.domains)
        elif isinstance(v, Ordinal):
            found.update(d.uid for d in v.index if d is not None)
    return found


def _placed(program: TileProgram, phase: Phase, parts: _Weighed, new: tuple[Phase, Phase]) -> tuple[Phase, ...]:
    """All phases in order: those that read the statistics now run after the weighted sum, which computes them."""
    gone = {parts.statistics, parts.weights, phase}
    made = set(parts.total.targets)
    before: list[Phase] = []
    moved: list[Phase] = []
    place = program.phases.index(phase)
    for each in program.phases[:place]:
        if each in gone:
            continue
        needs = made & {t.memory for t in each.reads}
        if needs:
            made |= each.writes
        (moved if needs else before).append(each)
    if made & {t.memory for t in new[0].reads}:
        raise ScheduleError(f"phase {phase.name}: what is weighed depends on the softmax that weighs it")
    behind = [p for p in program.phases[place + 1 :] if p not in gone]
    return (*before, new[0], *moved, new[1], *behind)
