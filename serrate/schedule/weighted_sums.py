"""The primitive `online`: a reduction that weighs its elements, and a sum of values with these weights, in one pass.

In: a program that stores weights, such as those of a softmax, and sums values times weights. Out: the weighted sum as another
state of the reduction, so that neither scores nor weights are ever materialised:

    m, t softmax= s[q, k] over k                        m, t, u softmax= s[q, k], 1, v[k, d] over k
    w[q, k] = exp_diff(s[q, k], m[q]) * f[q]      ->    o[q, d] = u[q, d] * f[q]
    o[q, d] sum= w[q, k] * v[k, d] over k

Legal because the sum over k is linear and f does not vary with k. If there is no k, the sum is 0 whatever f is, although the
reciprocal of an empty total is infinite. A factor that varies with k, such as a dropout mask, stays in the sum: the reduction
takes it as a scale of the last weights. Other readers of m and t run after the pass. `Reduction.weighing` says which reductions
support this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from serrate.errors import ScheduleError
from serrate.ir.domains import IterDomain
from serrate.ir.reductions import Weighing
from serrate.ir.storage import storage_of
from serrate.ir.tile import Accumulate, Phase, Store, TileProgram, chain, nest
from serrate.ir.values import (
    Call,
    Constant,
    Read,
    Role,
    Tensor,
    Value,
    call,
    carried_dtype,
    constant,
    domains_in,
    extent,
    moved_to,
    read,
    reindex,
)


@dataclass(frozen=True)
class _WeightedSum:
    """A recognised weighted sum and its operands."""

    statistics: Phase
    """The phase of the reduction that weighs."""
    weights: Phase
    total: Accumulate
    """That reduction, at the domains of the sum."""
    weighing: Weighing
    value: Value
    factors: tuple[Value, ...]
    """Factors that do not vary along the row."""
    scale: Value | None
    """The product of the factors that do."""


def online(program: TileProgram, phase: Phase) -> TileProgram:
    """Makes the weighted sum of `phase` a state of the reduction whose weights it uses."""
    found = chain(phase)
    leaf = found[1] if found is not None else None
    if found is None or not isinstance(leaf, Accumulate) or leaf.reduction.operator != "sum" or leaf.merge or len(leaf.over) != 1:
        raise ScheduleError(f"phase {phase.name} is not a sum of values along one dim")
    parts = _recognised(program, phase, leaf)
    target = leaf.targets[0]
    kept = tuple(d for d in leaf.index if d is not None)
    direct = not parts.factors and target.dtype == carried_dtype(target.dtype)
    sums = target if direct else Tensor(f"{target.name}_sums", carried_dtype(target.dtype), kept, storage_of(kept))
    at = parts.total.index
    states = Accumulate(
        (*parts.total.targets, sums),
        leaf.index,
        parts.weighing.with_totals(2, parts.scale is not None, _only_divides(program, parts)),
        (parts.total.values[0], constant(1.0, sums.dtype), parts.value, *(() if parts.scale is None else (parts.scale,))),
        leaf.over,
        places=(at, at, leaf.index),
    )
    result: Value = read(sums, leaf.index)
    for factor in parts.factors:
        result = call("mul", result, factor, dtype=target.dtype)
    if leaf.over[0].extent_expr.value is None:
        exists = call("gt", extent(leaf.over[0]), constant(0, torch.int64), dtype=torch.bool)
        result = call("where", exists, result, constant(0.0, target.dtype), dtype=target.dtype)
    loops = tuple((loop.domain, loop.kind) for loop in found[0])
    outer = tuple((d, kind) for d, kind in loops if d.uid != leaf.over[0].uid)
    new = [Phase(sums.name, nest(loops, states))]
    if not direct:
        new.append(Phase(phase.name, nest(outer, Store(target, leaf.index, result))))
    return program.with_phases(_placed(program, phase, parts, new))


def _recognised(program: TileProgram, phase: Phase, leaf: Accumulate) -> _WeightedSum:
    """The weighted sum that a phase computes; raises if it computes something else."""
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
            weighing = total.reduction.weighing if isinstance(total, Accumulate) else None
            if not isinstance(total, Accumulate) or weighing is None or len(total.over) != 1 or total.merge:
                continue
            moved = _moved(weights, stored)
            factored = None if moved is None else _split(moved, total, weighing, along)
            if factored is not None:
                return _WeightedSum(statistics, weights, factored[0], weighing, other, *factored[1:])
    raise ScheduleError(f"phase {phase.name} is not a sum of values times the weights of a reduction")


def _only_divides(program: TileProgram, parts: _WeightedSum) -> bool:
    """Whether the reduction's own total goes only into what its weights are divided by."""
    total = parts.total.targets[1]
    readers = [p for p in program.phases if total in {t.memory for t in p.reads} and p not in (parts.statistics, parts.weights)]
    made = {tensor for phase in readers for tensor in phase.writes}
    others = (p for p in program.phases if p is not parts.weights and made & {t.memory for t in p.reads})
    return all(t.role is Role.SCRATCH for t in (total, *made)) and not any(others)


def _uncast(value: Value) -> Value:
    """A value without rounding casts."""
    while (
        isinstance(value, Call)
        and value.function == "cast"
        and value.dtype.is_floating_point
        and value.args[0].dtype.is_floating_point
    ):
        value = value.args[0]
    return value


def _stored(program: TileProgram, element: Read) -> Phase | None:
    """The phase that stores the element, if it does nothing else and the element has no other reader."""
    readers = [p for p in program.phases if element.tensor in {t.memory for t in p.reads}]
    for phase in program.phases:
        found = chain(phase)
        if found is not None and isinstance(found[1], Store) and found[1].tensor is element.tensor:
            return phase if element.tensor.role is Role.SCRATCH and len(readers) == 1 else None
    return None


def _moved(weights: Phase, element: Read) -> Value | None:
    """The stored value, at the domains at which it is read, if these give its place."""
    found = chain(weights)
    assert found is not None and isinstance(found[1], Store)
    return moved_to(found[1].value, found[1].index, element.index)


def _split(
    weight: Value, total: Accumulate, weighing: Weighing, along: IterDomain
) -> tuple[Accumulate, tuple[Value, ...], Value | None] | None:
    """Splits a value into a weight of `total`, factors that do not vary along the row, and the product of those that do; None if
    it is not of that form."""
    factors = list(_factors(weight))
    own = [v for v in factors if isinstance(v, Call) and v.function == weighing.function]
    others = tuple(v for v in factors if v not in own and all(d.uid != along.uid for d in domains_in(v)))
    scale: Value | None = None
    for factor in (v for v in factors if v not in own and v not in others):
        if set(total.targets) & {r.tensor for r in factor.reads}:
            return None
        scale = factor if scale is None else call("mul", scale, factor, dtype=factor.dtype)
    if len(own) != 1:
        return None
    score, first = own[0].args
    if not isinstance(first, Read) or first.tensor is not total.targets[0]:
        return None
    swap: dict[int, IterDomain | None] = {total.over[0].uid: along}
    for domain, at in zip(total.index, first.index, strict=True):
        if domain is None or not isinstance(at, IterDomain):
            return None
        swap[domain.uid] = at
    if reindex(total.values[0], swap) is not score:
        return None
    index = tuple(at for at in first.index if isinstance(at, IterDomain))
    return replace(total, index=index, values=(score,)), others, scale


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


def _placed(program: TileProgram, phase: Phase, parts: _WeightedSum, new: Sequence[Phase]) -> tuple[Phase, ...]:
    """All phases in order: readers of the statistics run after the weighted sum, which now computes them."""
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
        raise ScheduleError(f"phase {phase.name}: the weighted values depend on the reduction that weighs them")
    after = [p for p in program.phases[place + 1 :] if p not in gone]
    return (*before, new[0], *moved, *new[1:], *after)
