"""Contractions of ragged products: sums along one side of a product of two ragged dims, computed a block at a time.

In: a recorder, after `prepare`. Out: recorded steps. Attention is the example: scores are queries x keys of a sequence, and a
function of them is summed along the keys. The grid is one work list of the query blocks of all sequences. A worker runs through
the keys of its sequence in blocks, computes a block of scores by a matrix product, and adds to the sums that it carries:

    for c: for q[c]: for k[c]: for d: s[q, k] += x[q, d]*y[k, d]            grid (c, qo):
    for c: for q[c]: for k[c]: for v: o[q, v] += f(s[q, k])*z[k, v]    ->     serial ko:  lanes qi, ki, d: s += x*y
    for c: for q[c]: for v: r[q, v] = g(o[q, v])                                          lanes qi, v, ki: o += f(s)*z
                                                                              lanes qi, v: r = g(o)

All strategies schedule contractions alike, because query blocks balance the load well enough. If sequences have few queries, as
in decoding, a GPU cuts the keys instead (split-K). Each piece leaves partial sums, which are combined in order:

    grid (c, kp):  serial ko:  lanes qi, ki, d: s += x*y;  lanes qi, v, ki: p[kp] += f(s)*z
    grid c:  serial q:  lanes kp, v: o += p[kp];  lanes v: r = g(o)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serrate.ir.domains import IterDomain
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.tile import Accumulate, Store, TileProgram
from serrate.schedule.plan import Recorder, Sized
from serrate.schedule.prepare import WIDEST, Shape, columns_of, contracted, contraction_groups
from serrate.schedule.target import Target, power_of_two_at_least

LEAST = 16
"""The fewest queries or keys of a block: a GPU multiplies no smaller ones."""

PIECE = 1024
"""Keys of a piece, where few queries share many keys."""
FINISHED = 16
"""Partial results of a query that are combined in one block."""
WHY = "keys are cut into pieces: there are too few queries to occupy all workers"


@dataclass(frozen=True)
class Contraction:
    """Sums along one side of a ragged product, with the phases that compute its elements and those that finish its results."""

    roots: tuple[Shape, ...]
    makers: tuple[Shape, ...]
    finishers: tuple[Shape, ...]
    kept: RaggedIterDomain
    """The side that is kept: queries."""
    along: RaggedIterDomain
    """The side that is summed: keys."""
    columns: tuple[IterDomain, ...]

    @property
    def phases(self) -> tuple[Shape, ...]:
        return (*self.makers, *self.roots, *self.finishers)

    @property
    def outer(self) -> tuple[IterDomain, ...]:
        """The dims outside the contraction, such as heads."""
        inner = {d.uid for d in (self.kept.component, self.kept, self.along, *self.columns)}
        return tuple(d for d in self.roots[0].domains if d.uid not in inner)

    @property
    def beside(self) -> frozenset[int]:
        """The outer dims that are stored after the rows, such as heads of `[B, r, H, D]`: processed in sequence, they share
        pages."""
        outer = {d.uid for d in self.outer}
        leaf = self.roots[0].leaf
        named = {d.uid: at.uid for d, at in zip(leaf.targets[-1].logical, leaf.index, strict=True) if at is not None}
        stored = [named.get(d.uid, d.uid) for d in leaf.targets[-1].storage]
        rows = next(k for k, uid in enumerate(stored) if uid not in outer)
        return frozenset(outer & set(stored[rows:]))


def contractions(program: TileProgram, shapes: Sequence[Shape]) -> list[Contraction]:
    """The contractions of a program whose ragged products are computed there, or feed a softmax."""
    found: list[Contraction] = []
    taken: set[str] = set()
    by_name = {s.phase: s for s in shapes}
    for group in contraction_groups(program):
        roots = tuple(by_name[p.name] for p in group)
        sides = contracted(roots[0].leaf)
        assert sides is not None
        read = {r.tensor.memory for root in roots for v in root.leaf.values for r in v.reads}
        both = {d.uid for d in sides}
        makers = tuple(s for s in shapes if s.is_product and s.leaf.targets[0] in read and both <= _index(s))
        makers = tuple(s for s in makers if s.phase not in taken)
        if not makers and not any(isinstance(root.leaf, Accumulate) and root.leaf.places for root in roots):
            continue
        later = shapes[max(map(shapes.index, roots)) + 1 :]
        finishers = tuple(s for s in _finishers(roots, later, sides[0]) if s.phase not in taken)
        columns = {d.uid: d for r in roots if isinstance(r.leaf, Accumulate) for d in columns_of(r.leaf, *sides)}
        taken.update(s.phase for s in (*roots, *makers, *finishers))
        found.append(Contraction(roots, makers, finishers, *sides, tuple(columns.values())))
    return found


def _index(shape: Shape) -> set[int]:
    return {d.uid for d in shape.leaf.index if d is not None}


def _finishers(roots: Sequence[Shape], later: Sequence[Shape], kept: RaggedIterDomain) -> tuple[Shape, ...]:
    """The elementwise phases that store a contraction's results."""
    made, found = {t for root in roots for t in root.leaf.targets}, []
    needed = {kept.uid, kept.component.uid}
    most = {uid for root in roots for uid in _index(root)}
    for shape in later:
        own = {d.uid for d in shape.domains}
        if isinstance(shape.leaf, Store) and needed <= own <= most and made & {r.tensor for r in shape.leaf.value.reads}:
            made |= set(shape.leaf.targets)
            found.append(shape)
    return tuple(found)


def schedule_contraction(recorder: Recorder, found: Contraction, target: Target) -> None:
    """Arranges the loops of all phases of a contraction, so that they can be fused."""
    recorder.attempt("gather", *(shape.phase for shape in (*found.makers, *found.roots)))
    if _is_cut(found, target):
        _cut(recorder, found)
        for shape in (*found.makers, *found.roots):
            _arrange(recorder, found, shape, target, cut=True)
        for shape in (*found.roots, *found.finishers):
            _finish(recorder, found, shape, target)
        return
    for shape in found.phases:
        _arrange(recorder, found, shape, target)


def _is_cut(found: Contraction, target: Target) -> bool:
    """Whether keys are cut: queries are few, and partial results can be combined."""
    few = _longest(found)
    whole = all(isinstance(s.leaf, Accumulate) and len(s.leaf.values) <= len(s.leaf.targets) for s in found.roots)
    return target.many_workers and few is not None and few <= LEAST and whole


def _cut(recorder: Recorder, found: Contraction) -> None:
    """Cuts keys into pieces, with a partial result for each. These are stored by query and piece."""
    component, rows, along = found.kept.component.name, found.kept.name, found.along.name
    for shape in (*found.makers, *found.roots):
        recorder.do("split", shape.phase, along, Sized(PIECE, WHY))
    first = [component, rows, f"{along}o"]
    for shape in found.roots:
        others = [d.name for d in shape.domains if d.name not in (*first, along)]
        recorder.do("reorder", shape.phase, *first, *others, f"{along}i")
        recorder.do("rfactor", shape.phase, f"{along}o")


def _finish(recorder: Recorder, found: Contraction, shape: Shape, target: Target) -> None:
    """Combines the partial results of a query, in order, or stores its result."""
    phase, component, rows, pieces = shape.phase, found.kept.component.name, found.kept.name, f"{found.along.name}o"
    there = {d.uid for d in shape.domains}
    grid = [component, *(d.name for d in found.outer if d.uid in there)]
    serial, lanes = [rows], list[str]()
    columns = [d for d in found.columns if d.uid in there]
    width = power_of_two_at_least(max((_width(d, target) for d in columns), default=1))
    for domain in columns:
        recorder.do("split", phase, domain.name, Sized(width, "all features of a value"))
        serial, lanes = [*serial, f"{domain.name}o"], [*lanes, f"{domain.name}i"]
    if isinstance(shape.leaf, Accumulate):
        size = max(min(target.finish // width, FINISHED), 1)
        recorder.do("split", phase, pieces, Sized(size, "most sequences have no more pieces"))
        serial, lanes = [*serial, f"{pieces}o"], [f"{pieces}i", *lanes]
    recorder.do("reorder", phase, *grid, *serial, *lanes)
    for name in grid:
        recorder.do("mark", phase, name, "grid")
    for name in lanes:
        recorder.do("mark", phase, name, "lanes")


def _width(domain: IterDomain, target: Target) -> int:
    """Lanes of the features of keys or values: all of them, if they fit."""
    extent = domain.extent_expr.value
    return target.matmul[2] if extent is None or extent > WIDEST else extent


def _blocks(found: Contraction, target: Target) -> tuple[int, int]:
    """Queries and keys of a block: fewer if each of them is wide."""
    wide = [
        d for s in found.phases for d in s.domains if d.uid not in {found.kept.uid, found.along.uid, found.kept.component.uid}
    ]
    inner = [_width(d, target) for d in wide if d.uid not in {o.uid for o in found.outer}]
    room = power_of_two_at_least(target.largest // max(inner, default=1) + 1) // 2
    m, k = target.contraction
    if target.power_of_two_lanes:
        m = min(m, power_of_two_at_least(_longest(found) or m))
    return max(min(m, room), LEAST), max(min(k, room), LEAST)


def _longest(found: Contraction) -> int | None:
    """How many queries a sequence has at most, if that is known: one, in decoding, where they are a dim of a dense tensor."""
    reads = [r for s in found.makers for v in s.leaf.values for r in v.reads]
    places = [(at, dim) for r in reads for at, dim in zip(r.index, r.tensor.logical, strict=True)]
    dims = [dim.extent_expr.value for at, dim in places if isinstance(at, IterDomain) and at.uid == found.kept.uid]
    return min((n for n in dims if n is not None), default=None)


def _arrange(recorder: Recorder, found: Contraction, shape: Shape, target: Target, *, cut: bool = False) -> None:
    """Blocks of queries on the grid, or, if they are cut, pieces of keys."""
    phase, component, rows, keys = shape.phase, found.kept.component.name, found.kept.name, found.along.name
    there = {d.uid for d in shape.domains}
    outer = [d.name for d in found.outer if d.uid in there - found.beside]
    beside = [d.name for d in found.outer if d.uid in there & found.beside]
    inner = [d.name for d in shape.domains if d.name not in (*outer, *beside, component, rows, *([keys] if cut else []))]
    m, k = _blocks(found, target)
    if cut and isinstance(shape.leaf, Accumulate) and shape in found.roots:
        phase = f"{shape.leaf.targets[0].name}_{keys}o"
    why = f"blocks of {m} x {k} positions of the two sides"
    recorder.do("split", phase, rows, Sized(m, why))
    listed = f"{keys}o" if cut else f"{rows}o"
    within = [f"{rows}o", f"{rows}i", f"{keys}i"] if cut else [f"{rows}i"]
    recorder.do("reorder", phase, *outer, component, listed, *beside, *within, *inner)
    recorder.do("combine", phase, component, listed)
    serial = [f"{rows}o"] if cut else []
    lanes = [f"{rows}i"]
    depth = [d for d in shape.domains if d.uid in shape.reduced and d.uid != found.along.uid]
    # If keys are also the values, their features are columns of one phase and depth of another.
    columns = [d for d in found.columns if d.uid in there - shape.reduced]
    along = [found.along] if found.along.uid in there else []
    # The lanes of a matrix product are rows, columns and depth: keys are columns of the scores, and depth of the contraction.
    for domain in (*columns, *along, *depth):
        extent = domain.extent_expr.value
        size = k if domain.uid == found.along.uid else _width(domain, target)
        size = max(power_of_two_at_least(size), LEAST) if target.power_of_two_lanes else size
        if extent == size and not domain.is_ragged:
            lanes.append(domain.name)
            continue
        name = f"{keys}i" if cut and domain.uid == found.along.uid else domain.name
        recorder.do("split", phase, name, Sized(size, why if domain is found.along else "as many features as a block holds"))
        serial.append(f"{name}o")
        lanes.append(f"{name}i")
    grid = [*outer, f"{component}{listed}", *beside]
    recorder.do("reorder", phase, *grid, *serial, *lanes)
    for name in grid:
        recorder.do("mark", phase, name, "grid")
    for name in lanes:
        recorder.do("mark", phase, name, "lanes")
