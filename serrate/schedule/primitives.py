"""Schedule primitives: each rewrites a tile program into one that means the same.

In: a program and the names of phases and domains. Out: a new program. Every primitive has three parts in this order:
check the arguments, prove the rewrite legal (or raise `ScheduleError` saying why it is not), rewrite. Primitives that
change loops work on phases that are still perfect nests; `fuse` comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from serrate.analysis.indices import Indices
from serrate.errors import ScheduleError
from serrate.ir import ragged_transforms, transforms
from serrate.ir.domains import COORDINATE, IterDomain, ParallelType
from serrate.ir.expr import Array, GroupMaximum, symbol
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import reduction
from serrate.ir.storage import storage_of
from serrate.ir.tile import (
    LANES,
    SERIAL,
    Accumulate,
    Leaf,
    Loop,
    Phase,
    Statement,
    Store,
    TileProgram,
    chain,
    map_leaves,
    nest,
    walk,
)
from serrate.ir.values import Read, Role, Tensor, Value, call, read, reindex, rewrite

Loops = tuple[tuple[IterDomain, ParallelType], ...]


def find(program: TileProgram, name: str) -> Phase:
    """The phase of that name."""
    for phase in program.phases:
        if phase.name == name:
            return phase
    raise ScheduleError(f"no phase is called {name!r}; there are {', '.join(p.name for p in program.phases)}")


def _swap(program: TileProgram, name: str, *new: Phase) -> TileProgram:
    phases: list[Phase] = []
    for phase in program.phases:
        phases.extend(new if phase.name == name else (phase,))
    return program.with_phases(tuple(phases))


def _loops(program: TileProgram, name: str) -> tuple[Loops, Leaf]:
    found = chain(find(program, name))
    if found is None:
        raise ScheduleError(f"phase {name} is not a perfect nest any more; change its loops before fusing it")
    return tuple((loop.domain, loop.kind) for loop in found[0]), found[1]


def _relooped(program: TileProgram, name: str, change: Callable[[Loops], Loops]) -> TileProgram:
    loops, leaf = _loops(program, name)
    return _swap(program, name, Phase(name, nest(change(loops), leaf)))


def _position(loops: Loops, phase: str, domain: str) -> int:
    for k, (d, _) in enumerate(loops):
        if d.name == domain:
            return k
    raise ScheduleError(f"phase {phase} has no loop over {domain!r}; it loops over {', '.join(d.name for d, _ in loops)}")


def split(program: TileProgram, phase: str, domain: str, factor: int) -> TileProgram:
    """for r: s   ->   for ro: for ri in factor: s"""

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, domain)
        outer, inner = transforms.split(loops[k][0], factor)
        return (*loops[:k], (outer, loops[k][1]), (inner, loops[k][1]), *loops[k + 1 :])

    return _relooped(program, phase, change)


def combine(program: TileProgram, phase: str, component: str, ragged: str) -> TileProgram:
    """for c: for r[c]: s   ->   for i: s   (c and r are found again from i, by search where they are needed)"""

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, component)
        if k + 1 >= len(loops) or loops[k + 1][0].name != ragged:
            raise ScheduleError(f"phase {phase}: {component} and {ragged} must be neighbours to be combined")
        return (*loops[:k], (ragged_transforms.combine(loops[k][0], loops[k + 1][0]), loops[k][1]), *loops[k + 2 :])

    return _relooped(program, phase, change)


def cover(program: TileProgram, phase: str, ragged: str, group: str, size: int) -> TileProgram:
    """for co: for ci in size: for r[c]: s   ->   for co: for ci: for x in longest row of the group: s   (holes guarded)"""

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, ragged)
        row = loops[k][0]
        if not isinstance(row, RaggedIterDomain):
            raise ScheduleError(f"phase {phase}: {ragged} is not ragged; nothing to cover")
        outer = loops[_position(loops, phase, group)][0]
        longest = Array(
            f"longest{size}({row.length.substitute({COORDINATE: symbol('c')})})",
            recipe=GroupMaximum(row.length, COORDINATE, row.component.extent_expr, size),
        )
        return (*loops[:k], (ragged_transforms.cover(row, longest[COORDINATE], outer), loops[k][1]), *loops[k + 1 :])

    return _relooped(program, phase, change)


def reorder(program: TileProgram, phase: str, *order: str) -> TileProgram:
    """for a: for b: s   ->   for b: for a: s.  Names all loops, outermost first."""

    def change(loops: Loops) -> Loops:
        if sorted(order) != sorted(d.name for d, _ in loops):
            raise ScheduleError(f"phase {phase}: reorder must name {', '.join(d.name for d, _ in loops)}, got {', '.join(order)}")
        new = tuple(loops[_position(loops, phase, name)] for name in order)
        for k, (domain, _) in enumerate(new):
            for later, _ in new[k + 1 :]:
                if isinstance(domain, RaggedIterDomain) and _determines(later, domain.component):
                    raise ScheduleError(
                        f"phase {phase}: the length of {domain.name} depends on {later.name}, which must stay outside it"
                    )
        return new

    return _relooped(program, phase, change)


def _determines(loop: IterDomain, component: IterDomain) -> bool:
    """Whether `loop` is the component itself or a part of it."""
    pending = [loop]
    while pending:
        domain = pending.pop()
        if domain.uid == component.uid:
            return True
        if domain.definition is not None and not isinstance(domain.definition, Partition):
            pending.extend(domain.definition.inputs)
    return False


def mark(program: TileProgram, phase: str, domain: str, kind: str) -> TileProgram:
    """Says how a loop runs: `grid`, `serial` or `lanes`. Lanes need an extent known when the program is compiled."""
    wanted = ParallelType(kind)

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, domain)
        if wanted is LANES and (loops[k][0].is_ragged or loops[k][0].extent_expr.value is None):
            raise ScheduleError(f"phase {phase}: {loops[k][0]} cannot be lanes: its extent is not known; split it first")
        return (*loops[:k], (loops[k][0], wanted), *loops[k + 1 :])

    return _relooped(program, phase, change)


def inline(program: TileProgram, tensor: str) -> TileProgram:
    """t[i] = f(x[i]); ... g(t[j])   ->   ... g(f(x[j]))"""
    _, leaf = _loops(program, tensor)
    if not isinstance(leaf, Store):
        raise ScheduleError(f"{tensor} is a reduction; only elementwise results can be computed where they are read")
    if leaf.tensor.role is not Role.SCRATCH:
        raise ScheduleError(f"{tensor} is an output; it must be stored")
    target, definition = leaf.tensor, leaf

    def replaced(value: Value) -> Value | None:
        if isinstance(value, Read) and value.tensor.memory is target:
            if value.tensor is not target:
                raise ScheduleError(f"{tensor} is read through a view whose place in it is not known; it must be stored")
            moved = {d.uid: at for d, at in zip(definition.index, value.index, strict=True) if d is not None}
            return reindex(definition.value, moved)
        return None

    def change(leaf: Leaf) -> Leaf:
        values = tuple(rewrite(v, replaced) for v in leaf.values)
        if values == leaf.values:
            return leaf
        return Store(leaf.tensor, leaf.index, values[0]) if isinstance(leaf, Store) else replace(leaf, values=values)

    phases = [replace(p, body=map_leaves(p.body, change)) for p in program.phases if p.name != tensor]
    return program.with_phases(tuple(phases))


def rfactor(program: TileProgram, phase: str, *kept: str) -> TileProgram:
    """t[c] += x over (o, n)   ->   p[c, o] += x over n;  t[c] += p[c, o] over o   (`kept` is o)"""
    loops, leaf = _loops(program, phase)
    if not isinstance(leaf, Accumulate) or leaf.merge:
        raise ScheduleError(f"phase {phase} is not a reduction of values; there is nothing to factor")
    chosen = tuple(loops[_position(loops, phase, name)][0] for name in kept)
    known = _known(leaf.index)
    if any(known.knows(d) for d in chosen):
        raise ScheduleError(f"phase {phase}: {', '.join(kept)} is not reduced there")
    picked = {d.uid for d in chosen}
    logical = tuple(d for d, _ in loops if d.uid in picked or known.knows(d))
    suffix = "_".join(kept)
    partial = tuple(Tensor(f"{t.name}_{suffix}", t.dtype, logical, storage_of(logical)) for t in leaf.targets)
    left = tuple(d for d, _ in loops if all(d is not other for other in logical))
    first = Accumulate(partial, logical, leaf.reduction, leaf.values, left)
    values = tuple(read(p, logical) for p in partial)
    second = Accumulate(leaf.targets, leaf.index, leaf.reduction, values, chosen, merge=True)
    finish: Loops = tuple((d, SERIAL) for d in logical)
    return _swap(program, phase, Phase(partial[0].name, nest(loops, first)), Phase(phase, nest(finish, second)))


def two_pass(program: TileProgram, phase: str) -> TileProgram:
    """(m, t) softmax= x; ... e^(x - m)   ->   m max= x; e = e^(x - m); t sum= e; ... e

    e is a row long and private to a worker. Refused where nobody needs the exponentials again.
    """
    loops, leaf = _loops(program, phase)
    if not isinstance(leaf, Accumulate) or leaf.reduction.name != "softmax" or leaf.merge:
        raise ScheduleError(f"phase {phase} does not compute softmax statistics")
    x, (largest, total) = leaf.values[0], leaf.targets
    domains = tuple(d for d, _ in loops)
    power = call("exp_diff", x, read(largest, leaf.index), dtype=largest.dtype)
    if not any(power in set(v.walk()) for p in program.phases for each in p.leaves for v in each.values):
        raise ScheduleError(f"phase {phase}: nothing needs the exponentials again")
    kept = Tensor(f"{total.name}_e", largest.dtype, domains, storage_of(domains), Role.PRIVATE)

    def use(value: Value) -> Value | None:
        return read(kept, domains) if value is power else None

    def change(leaf: Leaf) -> Leaf:
        values = tuple(rewrite(v, use) for v in leaf.values)
        return Store(leaf.tensor, leaf.index, values[0]) if isinstance(leaf, Store) else replace(leaf, values=values)

    # The maximum starts as softmax statistics do, so that a row of only -inf comes out the same in both forms.
    maximum = replace(leaf, targets=(largest,), reduction=reduction("softmax_max"))
    summed = replace(leaf, targets=(total,), reduction=reduction("sum"), values=(power,))
    replaced = (
        Phase(largest.name, nest(loops, maximum)),
        Phase(kept.name, nest(loops, Store(kept, domains, power))),
        Phase(total.name, nest(loops, summed)),
    )
    place = next(k for k, p in enumerate(program.phases) if p.name == phase)
    later = (replace(p, body=map_leaves(p.body, change)) for p in program.phases[place + 1 :])
    return program.with_phases((*program.phases[:place], *replaced, *later))


def fuse(program: TileProgram, first: str, second: str, depth: int) -> TileProgram:
    """for c: a;  for c: b   ->   for c: (a; b)   for the outermost `depth` loops, which must be the same"""
    a, b = find(program, first), find(program, second)
    k = program.phases.index(a)
    if program.phases.index(b) != k + 1:
        raise ScheduleError(f"fuse: {first} and {second} are not neighbours")
    shared = _prefix(a.body, b.body, depth)
    if shared is None:
        raise ScheduleError(f"fuse: {first} and {second} do not share their outermost {depth} loops")
    for tensor in a.writes & b.reads:
        _check_private(tensor, a, b, shared)
    phases = list(program.phases)
    phases[k : k + 2] = [Phase(second, _merged(a.body, b.body, depth))]
    return program.with_phases(tuple(phases))


def _prefix(a: tuple[Statement, ...], b: tuple[Statement, ...], depth: int) -> list[Loop] | None:
    """The last loops of the first phase that are the first loops of the second, as they stand in the first."""
    shared: list[Loop] = []
    for _ in range(depth):
        left, right = a[-1] if a else None, b[0] if b else None
        if not isinstance(left, Loop) or not isinstance(right, Loop):
            return None
        if left.domain.uid != right.domain.uid or left.kind is not right.kind:
            return None
        shared.append(left)
        a, b = left.body, right.body
    return shared


def _merged(a: tuple[Statement, ...], b: tuple[Statement, ...], depth: int) -> tuple[Statement, ...]:
    if depth == 0:
        return a + b
    left, right = a[-1], b[0]
    assert isinstance(left, Loop) and isinstance(right, Loop)
    return (*a[:-1], replace(left, body=_merged(left.body, right.body, depth - 1)), *b[1:])


def _check_private(tensor: Tensor, a: Phase, b: Phase, loops: list[Loop]) -> None:
    """Each position of the shared loops must read only what the same position wrote, and all of it in one block."""
    writers = [(leaf.index, around) for leaf, around in walk(a.body) if not isinstance(leaf, Loop) and tensor in leaf.targets]
    readers = [
        (element.index, around)
        for leaf, around in walk(b.body)
        if not isinstance(leaf, Loop)
        for value in leaf.values
        for element in value.reads
        if element.tensor is tensor
    ]
    if any(r.memory is tensor and r is not tensor for r in b.reads):
        raise ScheduleError(f"fuse: {tensor.name} is read through a view; it must be complete first")
    for index, around in writers:
        known = _known(index)
        inside = [loop for loop in loops if any(loop is other for other in around)]
        shared = {loop.domain.uid for loop in inside}
        for loop in inside:
            if not known.knows(loop.domain):
                name = loop.domain.name
                raise ScheduleError(
                    f"fuse: {tensor.name} is complete only after all of {name}, so its reader cannot share that loop"
                )
        for other, reading in readers:
            if _places(other) != _places(index):
                raise ScheduleError(f"fuse: {tensor.name} is read at another place than it is written at")
            if tensor.role is not Role.PRIVATE and _apart(index, around, shared) != _apart(index, reading, shared):
                raise ScheduleError(f"fuse: {tensor.name} is written and read by loops of their own; it must be complete first")


def _known(index: tuple[IterDomain | None, ...]) -> Indices:
    return Indices([(d, symbol(f"@{d.uid}")) for d in index if d is not None])


def _apart(index: tuple[IterDomain | None, ...], loops: tuple[Loop, ...], shared: set[int]) -> tuple[object, ...]:
    """What an access runs over beyond the shared loops: lanes by domain; any other loop makes it one of its own."""
    known = _known(index)
    own = [loop for loop in loops if loop.domain.uid not in shared and known.knows(loop.domain)]
    return tuple(loop.domain.uid if loop.kind is LANES else object() for loop in own)


def _places(index: tuple[IterDomain | None, ...]) -> tuple[int | None, ...]:
    return tuple(None if d is None else d.uid for d in index)


PRIMITIVES: dict[str, Callable[..., TileProgram]] = {
    f.__name__: f for f in (split, combine, cover, reorder, mark, inline, rfactor, two_pass, fuse)
}
