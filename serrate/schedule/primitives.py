"""Schedule primitives: each rewrites a tile program into one that means the same.

In: a program and the names of phases and domains. Out: a new program. Every primitive has three parts in this order:
check the arguments, prove the rewrite legal (or raise `ScheduleError` saying why it is not), rewrite. A phase of a fusion is
a perfect nest until `fuse` joins it to another; a phase of block statements is a tree, whose loops are identified by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from serrate.analysis.indices import Indices
from serrate.analysis.library_calls import library_calls
from serrate.errors import ScheduleError
from serrate.ir import ragged_transforms, transforms
from serrate.ir.domains import COORDINATE, IterDomain, ParallelType
from serrate.ir.expr import Array, Expr, minimum, symbol
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.recipes import GroupMaximum, Order
from serrate.ir.rewrites import map_values, with_tensor
from serrate.ir.storage import row_dims, storage_of
from serrate.ir.tile import (
    GRID,
    LANES,
    SERIAL,
    Accumulate,
    Leaf,
    Loop,
    Phase,
    Scan,
    Statement,
    Store,
    TileProgram,
    chain,
    map_leaves,
    nest,
    walk,
    written_at,
)
from serrate.ir.values import Call, Index, Place, Places, Read, Role, Tensor, Value, moved_to, read, reindex, rounding_of
from serrate.schedule import block_loops, cutting, partitions, pivots, short_rows, statistics, weighted_sums
from serrate.schedule.block_loops import find, loop_named, loop_replaced, swap
from serrate.schedule.hand import check_no_rows, check_order, check_partition, check_resize, check_swizzle
from serrate.schedule.one_pass import one_pass
from serrate.schedule.sharing import shared

Loops = tuple[tuple[IterDomain, ParallelType], ...]


def _loops(program: TileProgram, name: str) -> tuple[Loops, Leaf]:
    found = chain(find(program, name))
    if found is None:
        raise ScheduleError(f"phase {name} is not a perfect nest any more; change its loops before fusing it")
    return tuple((loop.domain, loop.kind) for loop in found[0]), found[1]


def _relooped(program: TileProgram, name: str, change: Callable[[Loops], Loops]) -> TileProgram:
    loops, leaf = _loops(program, name)
    return swap(program, name, Phase(name, nest(change(loops), leaf)))


def _position(loops: Loops, phase: str, domain: str) -> int:
    for k, (d, _) in enumerate(loops):
        if d.name == domain:
            return k
    raise ScheduleError(f"phase {phase} has no loop over {domain!r}; it loops over {', '.join(d.name for d, _ in loops)}")


def split(program: TileProgram, phase: str, domain: str, factor: int, inner: int = 1) -> TileProgram:
    """for r: s   ->   for ro: for ri in factor: s   (without `inner`, the factor is the outer extent)

    In block statements a tile is the unit of work: if the user fixed its size, the factor must be a multiple of it.
    """
    if find(program, phase).is_blocks:
        return block_loops.split(program, phase, domain, factor)

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, domain)
        outer, rest = transforms.split(loops[k][0], factor, inner=bool(inner))
        return (*loops[:k], (outer, loops[k][1]), (rest, loops[k][1]), *loops[k + 1 :])

    return _relooped(program, phase, change)


def merge(program: TileProgram, phase: str, outer: str, inner: str) -> TileProgram:
    """for a: for b: s   ->   for ab: s   (a and b are recovered by division)"""
    loops, leaf = _loops(program, phase)
    k = _neighbours(loops, phase, "merge", outer, inner)
    _check_alike(loops[k : k + 2], phase, leaf)
    made = transforms.merge(loops[k][0], loops[k + 1][0])
    return _relooped(program, phase, lambda old: (*old[:k], (made, old[k][1]), *old[k + 2 :]))


def _neighbours(loops: Loops, phase: str, function: str, outer: str, inner: str) -> int:
    k = _position(loops, phase, outer)
    if k + 1 >= len(loops) or loops[k + 1][0].name != inner:
        raise ScheduleError(f"phase {phase}: {function} takes a loop and the one inside it; {inner} is not right inside {outer}")
    return k


def _check_alike(loops: Loops, phase: str, leaf: Leaf) -> None:
    """Raises if loops to be merged are partly reduced and partly kept: the loops must determine the position in the result."""
    known = _known(leaf.index)
    kept = [d.name for d, _ in loops if known.knows(d)]
    if kept and len(kept) < len(loops):
        reduced = next(d.name for d, _ in loops if not known.knows(d))
        raise ScheduleError(f"phase {phase} keeps {kept[0]} and reduces {reduced}; one loop cannot do both")


def partition(program: TileProgram, phase: str, domain: str, *offsets: str | int) -> TileProgram:
    """for i: s   ->   for c: for r[c]: s.  By numbers, or by an input that already partitions an equal domain.

    Runtime offsets are checked against the domains that the program itself partitions by them, so no other domain is accepted.
    """
    loops, leaf = _loops(program, phase)
    k, domains = _position(loops, phase, domain), [d for d, _ in loops]
    given = next((t for t in program.inputs if (t.name,) == offsets), None)
    if given is not None:
        component, ragged = partitions.by_offsets(phase, domains, k, Array(given.name), _partitions(program))
    elif all(isinstance(b, int) or b == partitions.UNDER for b in offsets):
        component, ragged = partitions.from_step(phase, domains, k, offsets)
    else:
        raise ScheduleError(
            f"phase {phase}: {offsets[0]} is not an input of the program; partition {domain} by an input or numbers"
        )
    known = _known(leaf.index)
    check_partition(f"phase {phase}", domains[k], (component, ragged), lambda d: not known.knows(d))
    return _relooped(program, phase, lambda old: (*old[:k], (component, old[k][1]), (ragged, old[k][1]), *old[k + 1 :]))


def _partitions(program: TileProgram) -> list[Partition]:
    """Every partition of a domain that the program makes, in the order of its phases."""
    tensors = {t: None for p in program.phases for t in sorted(p.writes | p.reads, key=lambda t: t.name)}
    loops = [loop.domain for p in program.phases for loop, _ in walk(p.body) if isinstance(loop, Loop)]
    every = (*loops, *(d for t in tensors for d in t.logical))
    return [d.definition for d in every if isinstance(d.definition, Partition)]


def combine(program: TileProgram, phase: str, component: str, ragged: str) -> TileProgram:
    """for c: for r[c]: s   ->   for i: s   (where c and r are needed, a search recovers them from i)"""

    if find(program, phase).is_blocks:
        return block_loops.combine(program, phase, component, ragged)

    def change(loops: Loops) -> Loops:
        k = _neighbours(loops, phase, "combine", component, ragged)
        leaf = _loops(program, phase)[1]
        if isinstance(leaf, Scan) and any(d.uid == loops[k + 1][0].uid for d in leaf.over):
            raise ScheduleError(f"phase {phase}: `{leaf}` restarts in every row, so rows cannot become one loop")
        return (*loops[:k], (ragged_transforms.combine(loops[k][0], loops[k + 1][0]), loops[k][1]), *loops[k + 2 :])

    return _relooped(program, phase, change)


def long_only(program: TileProgram, phase: str, pieces: str, most: int) -> TileProgram:
    """for c: for o[c]: s   ->   for c: for o'[c]: s   where o' are the pieces of rows that have more than `most` positions.

    Shorter rows are left to another plan (`short_rows.py`).
    """

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, pieces)
        return (*loops[:k], (short_rows.several(loops[k][0], most), loops[k][1]), *loops[k + 1 :])

    return _relooped(program, phase, change)


def short_only(program: TileProgram, phase: str, row: str, most: int) -> TileProgram:
    """for c: for r[c]: s   ->   for c: for r'[c]: s   where rows r' of more than `most` positions are empty.

    Those are left to another plan (`short_rows.py`).
    """

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, row)
        domain = loops[k][0]
        if not isinstance(domain, RaggedIterDomain):
            raise ScheduleError(f"phase {phase}: {row} is not ragged")
        return (*loops[:k], (short_rows.short_part(domain, most), loops[k][1]), *loops[k + 1 :])

    return _relooped(program, phase, change)


def order(program: TileProgram, phase: str, component: str, row: str, size: int) -> TileProgram:
    """for c: s   ->   for p: s at c = order[p]   where each run of `size` components is ordered by the lengths of their rows."""
    _, leaf = _loops(program, phase)

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, component)
        domains = (loop.domain for p in program.phases for loop, _ in walk(p.body) if isinstance(loop, Loop))
        rows = (d for domain in domains for d in (domain, *short_rows.above(domain)) if d.name == row)
        found = next((d for d in rows if isinstance(d, RaggedIterDomain)), None)
        if found is None or found.component.uid != loops[k][0].uid:
            raise ScheduleError(f"order: no phase loops over rows {row} of {component}")
        if not _known(leaf.index).knows(loops[k][0]):
            raise ScheduleError(f"order: phase {phase} reduces {component}, so its order must not change")
        if found.component.uid != loops[k][0].uid:
            raise ScheduleError(f"phase {phase}: {component} does not count the rows {row}")
        return (*loops[:k], (ragged_transforms.ordered(loops[k][0], found, size), loops[k][1]), *loops[k + 1 :])

    return _relooped(program, phase, change)


def ragged(program: TileProgram, phase: str, loop: str) -> TileProgram:
    """for k < n: s where k < length[c]   ->   for r[c]: s   (if no statement of the loop takes effect past the row)"""
    found = find(program, phase)
    return loop_replaced(program, phase, loop, lambda node: (cutting.ragged(program, found, node),))


def fork(program: TileProgram, phase: str, loop: str, size: int) -> TileProgram:
    """for c: for r[c]: s   ->   for c: if length[c] <= size: for r'[c]: s  else: for r[c]: s"""
    found = find(program, phase)
    return cutting.forked(program, found, loop_named(found, loop), size)


def cut(program: TileProgram, phase: str, loop: str, size: int, at_once: int = 1) -> TileProgram:
    """for c: for r[c]: t += x   ->   for (c, o): p[c, o] += x over pieces of `size`;  for c: for o[c]: t += p[c, o]

    Partial results are combined one by one, or in blocks of `at_once`.
    """
    found = find(program, phase)
    return cutting.Cut(program, found, loop_named(found, loop), size, at_once).rewritten()


def resize(program: TileProgram, phase: str, domain: str, left: int, right: int) -> TileProgram:
    """for i in n: s   ->   for i' in left+n+right: s at i' - left   (positions outside are guarded)"""
    loops, _ = _loops(program, phase)
    k = _position(loops, phase, domain)
    check_resize(f"phase {phase}", loops[k][0], left, right)
    check_no_rows("resize", f"phase {phase}", [d for d, _ in loops], loops[k][0])
    made = transforms.resize(loops[k][0], left, right)
    return _relooped(program, phase, lambda old: (*old[:k], (made, old[k][1]), *old[k + 1 :]))


def swizzle(program: TileProgram, phase: str, domain: str, by: str) -> TileProgram:
    """for a: for b: s   ->   for a: for b': s at b' xor a   (`domain` is b, `by` is a; each b is visited once for every a)"""
    loops, leaf = _loops(program, phase)
    k, axis = _position(loops, phase, domain), loops[_position(loops, phase, by)][0]
    known = _known(leaf.index)
    reduced = (not known.knows(axis), not known.knows(loops[k][0]))
    check_swizzle(f"phase {phase}", axis, loops[k][0], by_is_reduced=reduced[0], is_reduced=reduced[1])
    check_no_rows("swizzle", f"phase {phase}", [d for d, _ in loops], loops[k][0])
    if goes_in_order(leaf) and reduced[1]:
        raise ScheduleError(f"phase {phase}: `{leaf}` depends on the order of elements, so {domain} cannot be permuted")
    made = transforms.swizzle(axis, loops[k][0])[1]
    return _relooped(program, phase, lambda old: (*old[:k], (made, old[k][1]), *old[k + 1 :]))


def cover(program: TileProgram, phase: str, ragged: str, group: str, size: int) -> TileProgram:
    """for co: for ci in size: for r[c]: s   ->   for co: for ci: for x in longest row of the group: s   (holes guarded)"""

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, ragged)
        row = loops[k][0]
        if not isinstance(row, RaggedIterDomain):
            raise ScheduleError(f"phase {phase}: {ragged} is not ragged; there is nothing to cover")
        outer = loops[_position(loops, phase, group)][0]
        made = (d.definition for d in (outer, *short_rows.above(outer)))
        order = next((t.order for t in made if isinstance(t, ragged_transforms.Ordered)), None)
        bound, most = _longest_of_groups(row, size) if order is None else _last_of_groups(row, size, order), row.length.bounds[1]
        bound = bound if most is None else minimum(bound, most)
        return (*loops[:k], (ragged_transforms.cover(row, bound, outer), loops[k][1]), *loops[k + 1 :])

    return _relooped(program, phase, change)


def _longest_of_groups(row: RaggedIterDomain, size: int) -> Expr:
    """The longest row of each group of `size` components, as a function of the group."""
    name = f"longest{size}({row.length.substitute({COORDINATE: symbol('c')})})"
    return Array(name, recipe=GroupMaximum(row.length, COORDINATE, row.component.extent_expr, size))[COORDINATE]


def _last_of_groups(row: RaggedIterDomain, size: int, order: Array) -> Expr:
    """The same of components that are ordered by length: the last of a group has the longest row."""
    assert isinstance(order.recipe, Order)
    if order.recipe.term is not row.length or order.recipe.size % size:
        raise ScheduleError(f"cover: groups of {size} are not ordered by the lengths of {row.name}")
    last = minimum(COORDINATE * size + size, row.component.extent_expr) - 1
    return row.length.substitute({COORDINATE: order[last]})


def reorder(program: TileProgram, phase: str, *order: str) -> TileProgram:
    """for a: for b: s   ->   for b: for a: s.  Names all loops, outermost first."""
    leaf = _loops(program, phase)[1]

    def change(loops: Loops) -> Loops:
        if sorted(order) != sorted(d.name for d, _ in loops):
            raise ScheduleError(f"phase {phase}: reorder must name {', '.join(d.name for d, _ in loops)}, got {', '.join(order)}")
        new = tuple(loops[_position(loops, phase, name)] for name in order)
        check_order("reorder", f"phase {phase}", [d for d, _ in new])
        if goes_in_order(leaf) and _reduced(new, leaf) != _reduced(loops, leaf):
            raise ScheduleError(
                f"phase {phase}: `{leaf}` depends on the order of elements, so its loops cannot run as {', '.join(order)}"
            )
        return new

    return _relooped(program, phase, change)


def goes_in_order(leaf: Leaf) -> bool:
    """Whether a statement depends on the order of the loops that it reduces: scans, and reductions that do not commute."""
    return isinstance(leaf, Scan) or (isinstance(leaf, Accumulate) and not leaf.reduction.commutative)


def _reduced(loops: Loops, leaf: Leaf) -> list[int]:
    """The loops that a statement reduces, outermost first, by uid."""
    known = _known(leaf.index)
    return [d.uid for d, _ in loops if not known.knows(d)]


def mark(program: TileProgram, phase: str, domain: str, kind: str) -> TileProgram:
    """serial r: s   ->   grid r: s  (or lanes).

    Lanes need a compile-time extent. A reduced loop cannot be on the grid, because workers would share a result; `rfactor`
    first gives each its own.
    """
    wanted = ParallelType(kind)
    if find(program, phase).is_blocks:
        return block_loops.mark(program, phase, domain, wanted)
    _, leaf = _loops(program, phase)

    def change(loops: Loops) -> Loops:
        k = _position(loops, phase, domain)
        if wanted is GRID and not _known(leaf.index).knows(loops[k][0]):
            raise ScheduleError(f"phase {phase} reduces {domain}, so it cannot be spread over workers; rfactor it first")
        if wanted is LANES and (loops[k][0].is_ragged or loops[k][0].extent_expr.value is None):
            raise ScheduleError(f"phase {phase}: {loops[k][0]} cannot be lanes: its extent is not known; split it first")
        return (*loops[:k], (loops[k][0], wanted), *loops[k + 1 :])

    return _relooped(program, phase, change)


def call(program: TileProgram, function: str) -> TileProgram:
    """for ...: s;  for ...: t   ->   out = function(...)   for a program that is exactly this call"""
    found = library_calls(program)
    if not found:
        raise ScheduleError(
            f"{program.name} is not exactly one library call: a product of rows and weights, or attention within rows"
        )
    if function not in found:
        raise ScheduleError(f"{program.name} is not {function}; it is {' or '.join(found)}")
    return replace(program, phases=(), call=found[function])


def share(program: TileProgram, phase: str) -> TileProgram:
    """a = f(x);  b = g(f(x))   ->   t = f(x);  a = t;  b = g(t)   for expensive f, and f that many lanes would repeat"""
    found = find(program, phase)
    return swap(program, phase, replace(found, body=shared(program, found.body)))


def inline(program: TileProgram, tensor: str) -> TileProgram:
    """t[i] = f(x[i]); ... g(t[j])   ->   ... g(f(x[j]))"""
    _, leaf = _loops(program, tensor)
    if not isinstance(leaf, Store):
        raise ScheduleError(f"{tensor} is a reduction; only elementwise results can be inlined")
    if leaf.tensor.role is not Role.SCRATCH:
        raise ScheduleError(f"{tensor} is an output; it must be stored")
    target, definition = leaf.tensor, leaf

    def replaced(value: Value) -> Value | None:
        if isinstance(value, Read) and value.tensor.memory is target:
            if value.tensor is not target:
                raise ScheduleError(f"{tensor} is read through a view whose index mapping is unknown; it must be stored")
            if any(isinstance(at, Place) for at in value.index):
                raise ScheduleError(f"{tensor} is read at a computed index, which may be out of bounds; it must be stored")
            found = moved_to(definition.value, definition.index, value.index)
            if found is None:
                raise ScheduleError(f"{tensor} is read at other rows than those that its definition reads; it must be stored")
            return found
        return None

    phases = [
        replace(p, body=map_leaves(p.body, lambda leaf: map_values(leaf, replaced))) for p in program.phases if p.name != tensor
    ]
    return program.with_phases(tuple(phases))


def align(program: TileProgram, phase: str, domain: str, other: str) -> TileProgram:
    """for b: t[b] = f(b);  for a: ... t[a]   ->   for a: t[a] = f(a);  for a: ... t[a]   (a and b have one extent)

    Loops over one domain can be fused; equal extents alone do not allow it.
    """
    loops, leaf = _loops(program, phase)
    old = loops[_position(loops, phase, domain)][0]
    new = next((d for p in program.phases for d in _domains(p) if d.name == other), None)
    if new is None:
        raise ScheduleError(f"align: no phase loops over {other!r}")
    if any(d.is_ragged or d.pairing is not None or d.definition is not None for d in (old, new)):
        raise ScheduleError(f"align: {old} and {new} must be plain dims: not rows, components, or parts of another dim")
    if old.extent_expr is not new.extent_expr or any(d.uid == new.uid for d, _ in loops):
        raise ScheduleError(
            f"align: {new} cannot replace {old} of {phase}: it has another extent, or is a loop of the phase already"
        )
    swap_: dict[int, IterDomain | None] = {old.uid: new}

    def moved(index: Index) -> Index:
        return tuple(new if d is not None and d.uid == old.uid else d for d in index)

    leaf = map_values(leaf, lambda value: reindex(value, swap_))
    if isinstance(leaf, Store):
        leaf = replace(leaf, index=moved(leaf.index))
    elif isinstance(leaf, Accumulate):
        over = tuple(new if d.uid == old.uid else d for d in leaf.over)
        leaf = replace(leaf, index=moved(leaf.index), over=over, places=tuple(map(moved, leaf.places)))
    else:
        raise ScheduleError(f"align: phase {phase} is a scan, whose dims are fixed")
    renamed = tuple((new if d.uid == old.uid else d, kind) for d, kind in loops)
    return swap(program, phase, Phase(phase, nest(renamed, leaf)))


def _domains(phase: Phase) -> tuple[IterDomain, ...]:
    found = chain(phase)
    return () if found is None else tuple(loop.domain for loop in found[0])


def rfactor(program: TileProgram, phase: str, *kept: str) -> TileProgram:
    """t[c] += x over (o, n)   ->   p[c, o] += x over n;  t[c] += p[c, o] over o   (`kept` is o)"""
    loops, leaf = _loops(program, phase)
    if not isinstance(leaf, Accumulate) or leaf.merge:
        raise ScheduleError(f"phase {phase} is not a reduction of values; there is nothing to rfactor")
    if len(leaf.values) > len(leaf.targets):
        raise ScheduleError(f"phase {phase}: the values of {leaf.reduction} are scaled, so its states are not values themselves")
    chosen = tuple(loops[_position(loops, phase, name)][0] for name in kept)
    known = _known(leaf.index)
    if any(known.knows(d) for d in chosen):
        raise ScheduleError(f"phase {phase}: {', '.join(kept)} is not reduced there")
    if goes_in_order(leaf) and _reduced(loops, leaf)[: len(chosen)] != [d.uid for d in chosen]:
        raise ScheduleError(
            f"phase {phase}: `{leaf}` combines in order, and {', '.join(kept)} is not the outermost loop it reduces"
        )
    picked = {d.uid for d in chosen}
    logical = tuple(d for d, _ in loops if d.uid in picked or known.knows(d))
    suffix = "_".join(kept)
    places = tuple(
        tuple(d for d in logical if d.uid in picked or at.knows(d)) for at in (_known(leaf.place(t)) for t in leaf.targets)
    )
    partial = tuple(
        Tensor(f"{t.name}_{suffix}", t.dtype, place, storage_of(place)) for t, place in zip(leaf.targets, places, strict=True)
    )
    left = tuple(d for d, _ in loops if all(d is not other for other in logical))
    first = Accumulate(partial, logical, leaf.reduction, leaf.values, left, places=places if leaf.places else ())
    values = tuple(read(p, place) for p, place in zip(partial, places, strict=True))
    second = replace(leaf, values=values, over=chosen, merge=True)
    finish: Loops = tuple((d, SERIAL) for d in logical)
    return swap(program, phase, Phase(partial[0].name, nest(loops, first)), Phase(phase, nest(finish, second)))


def two_pass(program: TileProgram, phase: str, loop: str = "") -> TileProgram:
    """(m, t) softmax= x   ->   m softmax_max= x;  t sum= e^(x - m)   (in block statements, for the loop named)"""
    if find(program, phase).is_blocks:
        found = statistics.two_pass(program, find(program, phase), loop)
        if found is None:
            raise ScheduleError(f"phase {phase}: the loop over {loop} carries more than softmax statistics")
        return found
    loops, leaf = _loops(program, phase)
    passes = leaf.reduction.two_pass if isinstance(leaf, Accumulate) else None
    if not isinstance(leaf, Accumulate) or passes is None or leaf.merge or leaf.places:
        raise ScheduleError(f"phase {phase} is not a reduction with a two-pass form")
    first, *others = leaf.targets
    lifted = leaf.reduction.lifted(leaf.values)
    terms = passes.terms(lifted, read(first, leaf.index))
    made = [replace(leaf, targets=(first,), reduction=passes.first, values=lifted[:1])]
    made += (replace(leaf, targets=(t,), reduction=passes.second, values=(v,)) for t, v in zip(others, terms, strict=True))
    return swap(program, phase, *(Phase(s.targets[0].name, nest(loops, s)) for s in made))


def about_pivot(program: TileProgram, phase: str, size: int) -> TileProgram:
    """(n, m, s) welford= x   ->   p = mean of the row's first `size` positions;  a, b sum= x - p, (x - p)^2;  n, m, s = f(a, b)

    The final subtraction loses up to log(length / `size`) digits, so rows must not be long.
    """
    loops, leaf = _loops(program, phase)
    if not isinstance(leaf, Accumulate) or leaf.merge or leaf.places:
        raise ScheduleError(f"phase {phase} is not a reduction of values")
    reduced = [d for d, _ in loops if not _known(leaf.index).knows(d)]
    return swap(program, phase, *pivots.about_pivot(phase, loops, leaf, reduced, size))


def online(program: TileProgram, phase: str) -> TileProgram:
    """(m, t) softmax= s;  w = e^(s - m)*f;  o sum= w*v   ->   (m, t, u) softmax= s, 1, v;  o = u*f   (`phase` is o)"""
    return weighted_sums.online(program, find(program, phase))


def keep(program: TileProgram, phase: str, loop: str = "", most: int = 0) -> TileProgram:
    """t sum= f(x);  ... f(x)   ->   e = f(x);  t sum= f(x);  ... e   (the first two are fused, so f is computed once)

    e is as long as a row and private to a worker. Raises if no later statement needs f(x) again.
    """
    if find(program, phase).is_blocks:
        found = statistics.keep(program, find(program, phase), loop, most)
        if found is None:
            raise ScheduleError(f"phase {phase}: nothing after the loop over {loop} needs the terms it sums")
        return found
    loops, leaf = _loops(program, phase)
    if not isinstance(leaf, Accumulate) or leaf.reduction.operator != "sum" or leaf.merge:
        raise ScheduleError(f"phase {phase} is not a sum of values; it has no terms to keep")
    rows = [d for d, _ in loops if isinstance(d, RaggedIterDomain)]
    if len(rows) != 1:
        raise ScheduleError(f"phase {phase} does not run over one row at a time, so it cannot keep one")
    # A kept row is contiguous, whatever the order of the tensor's dims: component first, then the row, then the regular dims.
    ranks = {rows[0].component.uid: 0, rows[0].uid: 1}
    domains = tuple(sorted((d for d, _ in loops), key=lambda d: ranks.get(d.uid, 2)))
    summed, total = leaf.values[0], leaf.targets[0]
    place = next(k for k, p in enumerate(program.phases) if p.name == phase)
    if not any(summed in set(v.walk()) for p in program.phases[place + 1 :] for each in p.leaves for v in each.values):
        raise ScheduleError(f"phase {phase}: nothing after it needs {summed} again")
    kept = Tensor(f"{total.name}_e", total.dtype, domains, storage_of(domains), Role.PRIVATE)

    def use(value: Value) -> Value | None:
        return read(kept, domains) if value is summed else None

    first = Phase(kept.name, nest(loops, Store(kept, domains, summed)))
    later = (replace(p, body=map_leaves(p.body, lambda leaf: map_values(leaf, use))) for p in program.phases[place + 1 :])
    return program.with_phases((*program.phases[:place], first, program.phases[place], *later))


def hold(program: TileProgram, tensor: str) -> TileProgram:
    """t in memory   ->   t in private memory, one row at a time   (`fuse` then shares the loop that selects the row)"""
    _, leaf = _loops(program, tensor)
    old = leaf.targets[0]
    if not isinstance(leaf, Store | Accumulate) or len(leaf.targets) > 1 or old.role is not Role.SCRATCH:
        raise ScheduleError(f"hold: {tensor} is not an intermediate result with memory of its own")
    if len([d for d in row_dims(old.logical) if d.is_ragged]) != 1 or old.storage != storage_of(old.logical):
        raise ScheduleError(f"hold: the memory of {tensor}, [{', '.join(d.name for d in old.storage)}], does not consist of rows")
    return with_tensor(program, old, replace(old, role=Role.PRIVATE))


def delay(program: TileProgram, first: str, second: str) -> TileProgram:
    """a;  b;  c   ->   b;  a;  c   (`first` is a, `second` is c: a now runs right before it)"""
    a, c = find(program, first), find(program, second)
    place, end = program.phases.index(a), program.phases.index(c)
    if place >= end:
        raise ScheduleError(f"delay: {first} does not run before {second}")
    for between in program.phases[place + 1 : end]:
        met = {t.memory for t in a.writes | a.reads} & between.writes | a.writes & {t.memory for t in between.reads}
        if met:
            raise ScheduleError(f"delay: {between.name}, which runs before {second}, uses {next(iter(met)).name} of {first}")
    phases = [p for p in program.phases if p is not a]
    phases.insert(end - 1, a)
    return program.with_phases(tuple(phases))


def gather(program: TileProgram, *phases: str) -> TileProgram:
    """a;  x;  b;  y   ->   x;  a;  b;  y   (`phases` are a and b, in the order in which they run; what they need runs before)"""
    chosen = [find(program, name) for name in phases]
    places = [program.phases.index(p) for p in chosen]
    before, after = list(program.phases[: min(places)]), list(program.phases[max(places) + 1 :])
    made = {t for p in chosen for t in p.writes}
    waiting: list[Phase] = []
    for between in program.phases[min(places) : max(places) + 1]:
        if between in chosen:
            continue
        if made & {t.memory for t in between.reads}:
            made |= between.writes
            waiting.append(between)
        else:
            before.append(between)
    for k, phase in enumerate(chosen):
        late = {t for p in (*chosen[k + 1 :], *waiting) for t in p.writes} & {t.memory for t in phase.reads}
        if late:
            raise ScheduleError(f"gather: {phase.name} needs {next(iter(late)).name}, which would run after it")
    return program.with_phases((*before, *chosen, *waiting, *after))


def repeat(program: TileProgram, tensor: str, *readers: str) -> TileProgram:
    """t = f;  a(t);  b(t)   ->   t = f;  a(t);  t' = f;  b(t')   (`readers` is b: its own copy is computed right before it)"""
    loops, leaf = _loops(program, tensor)
    old = leaf.targets[0]
    if isinstance(leaf, Scan) or len(leaf.targets) > 1 or old.role is not Role.SCRATCH:
        raise ScheduleError(f"repeat: {tensor} is not an intermediate result of its own")
    chosen = [find(program, name) for name in readers]
    if any(t.memory is old and t is not old for p in chosen for t in p.reads):
        raise ScheduleError(f"repeat: {tensor} is read through a view")
    names = {t.name for p in program.phases for t in p.writes}
    new = replace(old, name=next(name for k in range(len(names) + 1) if (name := f"{old.name}_{k + 2}") not in names))
    copy = replace(leaf, tensor=new) if isinstance(leaf, Store) else replace(leaf, targets=(new,))

    def moved(value: Value) -> Value | None:
        return value.of(new, value.index) if isinstance(value, Read) and value.tensor is old else None

    phases = [
        replace(p, body=map_leaves(p.body, lambda leaf: map_values(leaf, moved))) if p in chosen else p for p in program.phases
    ]
    first = min(program.phases.index(p) for p in chosen)
    return program.with_phases((*phases[:first], Phase(new.name, nest(loops, copy)), *phases[first:]))


def store_rounded(program: TileProgram, tensor: str) -> TileProgram:
    """t = f;  g(bf16(t))   ->   t = bf16(f);  g(t)   (t has 16 bits in memory, because all readers round it to them)

    The same bits: a value is rounded to the dtype of its memory, once instead of by each reader.
    """
    _, leaf = _loops(program, tensor)
    old = leaf.targets[0]
    if not isinstance(leaf, Store) or old.role is not Role.SCRATCH:
        raise ScheduleError(f"store_rounded: {tensor} is not an elementwise intermediate result")
    values = [v for p in program.phases for each in p.leaves for value in each.values for v in value.walk()]
    reads = {v for v in values if isinstance(v, Read) and v.tensor.memory is old}
    roundings = {v for v in values if rounding_of(v) in reads}
    plain = {a for v in values if isinstance(v, Call) and v not in roundings for a in v.args}
    plain |= {value for p in program.phases for each in p.leaves for value in each.values}
    dtypes = {v.dtype for v in roundings}
    if len(dtypes) != 1 or reads & plain or {rounding_of(v) for v in roundings} != reads:
        raise ScheduleError(f"store_rounded: not all readers of {tensor} round it to the same 16 bits")
    return with_tensor(program, old, replace(old, dtype=dtypes.pop()))


def allocate(program: TileProgram, tensor: str, how: str, *args: str | int) -> TileProgram:
    """t in memory [6]   ->   t in memory [2, 4]   (`allocate t split d 4`; also `merge a b`, and `reorder` of all dims)

    Each of these is invertible, so every element keeps its own place. An indivisible split leaves unused places; accesses
    are guarded by the dims of the tensor, so nothing reads them. `rows` takes rows apart, so that they can be split into blocks;
    `combine c r` and `product` put them together again.
    """
    old = next((t for p in program.phases for t in p.writes if t.name == tensor), None)
    if old is None or old.role is not Role.SCRATCH:
        what = "is not computed here" if old is None else f"is {old.role.value}, whose memory layout the caller decides"
        raise ScheduleError(f"allocate: {tensor} {what}")
    dims = {d.name: d for d in old.storage}
    named = [a for a in args if isinstance(a, str)]
    if any(name not in dims for name in named):
        raise ScheduleError(f"allocate: the memory of {tensor} is [{', '.join(dims)}], got {', '.join(named)}")
    if how == "rows":
        return with_tensor(program, old, replace(old, storage=old.logical))
    if how == "split":
        factor, inner = (*(a for a in args if isinstance(a, int)), 1)[:2]
        made: tuple[IterDomain, ...] = transforms.split(dims[named[0]], factor, inner=bool(inner))
    elif how in _JOINS:
        made = (_JOINS[how](dims[named[0]], dims[named[1]]),)
    elif how == "reorder" and sorted(named) == sorted(dims):
        made = tuple(dims[name] for name in named)
    else:
        raise ScheduleError(f"allocate: {how} {' '.join(map(str, args))} is not a valid change of [{', '.join(dims)}]")
    names = [d.name for d in old.storage]
    k = 0 if how == "reorder" else names.index(named[0])
    if names[k : k + len(named)] != named and how in _JOINS:
        raise ScheduleError(f"allocate: {named[1]} is not the dim right after {named[0]} in the memory of {tensor}")
    storage = (*old.storage[:k], *made, *old.storage[k + len(named) :])
    return with_tensor(program, old, replace(old, storage=storage))


_JOINS: dict[str, Callable[[IterDomain, IterDomain], IterDomain]] = {
    "merge": transforms.merge,
    "combine": ragged_transforms.combine,
    "product": ragged_transforms.product,
}
"""How two dims of memory become one."""


def fuse(program: TileProgram, first: str, second: str, depth: int) -> TileProgram:
    """for c: a;  for c: b   ->   for c: (a; b)   for the outermost `depth` loops, which must be the same"""
    a, b = find(program, first), find(program, second)
    k = program.phases.index(a)
    if program.phases.index(b) != k + 1:
        raise ScheduleError(f"fuse: {first} and {second} are not neighbours")
    shared = _prefix(a.body, b.body, depth)
    if shared is None:
        raise ScheduleError(f"fuse: {first} and {second} do not share their outermost {depth} loops")
    for tensor in a.writes & {t.memory for t in b.reads}:
        _check_private(tensor, a, b, shared)
    phases = list(program.phases)
    phases[k : k + 2] = [Phase(second, _merged(a.body, b.body, depth))]
    return program.with_phases(tuple(phases))


def _prefix(a: tuple[Statement, ...], b: tuple[Statement, ...], depth: int) -> list[Loop] | None:
    """The outermost `depth` loops that the end of one phase and the start of the next have in common, as in the first."""
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
    """Raises unless each position of the shared loops reads only what it wrote itself, as one block."""
    writers = [
        (written_at(leaf, tensor), around) for leaf, around in walk(a.body) if isinstance(leaf, Leaf) and tensor in leaf.targets
    ]
    readers = [
        (element.index, around)
        for leaf, around in walk(b.body)
        if isinstance(leaf, Leaf)
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
        if tensor.role is Role.PRIVATE:
            row = Indices([(loop.domain, symbol(f"@{loop.domain.uid}")) for loop in inside if loop.kind is not LANES])
            if not all(row.knows(d.component) for d in tensor.logical if isinstance(d, RaggedIterDomain)):
                names = ", ".join(loop.domain.name for loop in loops)
                raise ScheduleError(f"fuse: {tensor.name} is held one row at a time, and {names} do not select a row")
        for other, reading in readers:
            if _places(other) != _places(index):
                raise ScheduleError(f"fuse: {tensor.name} is read at a different index than it is written at")
            if tensor.role is not Role.PRIVATE and _apart(index, around, shared) != _apart(index, reading, shared):
                raise ScheduleError(
                    f"fuse: {tensor.name} is written and read by separate loops; share them too, or make them lanes"
                )


def _known(index: Index) -> Indices:
    return Indices([(d, symbol(f"@{d.uid}")) for d in index if d is not None])


def _apart(index: Index, loops: tuple[Loop, ...], shared: set[int]) -> tuple[object, ...]:
    """The unshared loops of an access, for comparison: lanes compare by domain, any other loop is unlike all others."""
    known = _known(index)
    own = [loop for loop in loops if loop.domain.uid not in shared and known.knows(loop.domain) and not _is_one(loop)]
    return tuple(loop.domain.uid if loop.kind is LANES else object() for loop in own)


def _is_one(loop: Loop) -> bool:
    """Whether a loop has one position: there is nothing to share."""
    return loop.domain.row_length.value == 1


def _places(index: Places) -> tuple[object, ...]:
    return tuple(at.uid if isinstance(at, IterDomain) else at for at in index)


PRIMITIVES: dict[str, Callable[..., TileProgram]] = {
    f.__name__: f
    for f in (
        *(split, merge, partition, combine, long_only, short_only, order, ragged, fork, cut, resize, swizzle, cover, reorder),
        *(
            mark,
            inline,
            align,
            call,
            share,
            rfactor,
            two_pass,
            one_pass,
            about_pivot,
            online,
            keep,
            hold,
            delay,
            gather,
            repeat,
            store_rounded,
            allocate,
            fuse,
        ),
    )
}
