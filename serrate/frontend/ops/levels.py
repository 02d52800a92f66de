"""Selecting, slicing, padding, reversing, indexing and joining along a dim that counts rows on one or several levels.

In: tensors with the same levels, and the source of each position of the changed dim. Out: one tensor with new offsets on every
level. A level is a ragged dim, or a regular one whose positions are parts of every position outside it. The two ragged dims of a
product are levels too, side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.common import counted, counting, row_of
from serrate.frontend.ops.structure import rows_under
from serrate.frontend.shapes import shown
from serrate.ir.domains import COORDINATE, IterDomain, identity_of
from serrate.ir.expr import Array, Expr, const, maximum, minimum, search, symbol
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import combine
from serrate.ir.recipes import RunningSum
from serrate.ir.tile import Store
from serrate.ir.transforms import divisor, merge
from serrate.ir.values import Place, Value, call, computed, index_of
from serrate.ir.values import position as position_of
from serrate.ir.view import TensorView


@dataclass(frozen=True)
class Part:
    """The positions of the changed dim that come from one tensor, as functions of a position and, if the dim is ragged, of its
    row (otherwise 0)."""

    view: TensorView
    source: Callable[[Expr, Expr], Expr]
    """The position in this tensor."""
    exists: Callable[[Expr, Expr], Expr] = lambda position, row: const(1)
    """1 if this tensor has the position, else 0."""
    size: Callable[[Expr], Expr] = lambda row: const(0)
    """The number of positions of the result that come from this tensor."""
    read: Callable[[IterDomain], Place] | None = None
    """The position at which elements are read, if it is read from an index tensor and not an expression."""


def inside(position: Expr, size: Expr) -> Expr:
    """1 if a position is inside a dim of that size, else 0."""
    return minimum(maximum(position + 1, 0), 1) * minimum(maximum(size - position, 0), 1)


def chain(x: TensorView, dim: int) -> list[int]:
    """The dims of `x` that count the same rows as `dim`, or whose rows it counts, and those rows; outermost first."""
    found = {dim}
    while True:
        rows = {k for each in found for k in (each, *counted(x, each))}
        more = rows | {k for row in rows for k in counting(x, row)}
        if more == found:
            return sorted(found)
        found = more


def rebuilt(
    name: str,
    parts: Sequence[Part],
    dim: int,
    *,
    chosen: Expr | None = None,
    repeats: bool = False,
    regular: bool | None = None,
) -> TensorView:
    """Concatenates the parts along `dim`, with new offsets; with `chosen`, selects that position of `dim` and removes the dim.

    With `repeats`, a position of a part may occur more than once, so the size of the result has no upper bound. `regular` says
    that the new dim has the same size in every row, whatever it was before.
    """
    first = parts[0].view
    dims = chain(first, dim)
    if any(chain(part.view, dim) != dims for part in parts[1:]):
        raise ShapeError(f"{name}: {' and '.join(shown(part.view) for part in parts)} must have rows in the same dims")
    levels = _Levels(parts, dim, dims, chosen, not first.domains[dim].is_ragged if regular is None else regular)
    new = levels.domains(name, repeats)
    domains = [new.get(k, d) for k, d in enumerate(first.domains) if k != dim or chosen is None]
    value: Value | None = None
    known = {k: index_of(d) for k, d in new.items()}
    ends = const(0)
    for part in parts:
        ends = ends + part.size(levels.row(part, known))
    for part in reversed(parts):
        at = levels.sources(part, known)
        places = [_place(at[k], new.values()) if k in at else d for k, d in enumerate(part.view.domains)]
        if part.read is not None:
            places[dim] = part.read(new[dim])
        own = part.view.at(tuple(places))
        if value is not None:
            before = call("lt", position_of(new[dim]), computed(_place(ends, new.values())), dtype=torch.bool)
            own = call("where", before, own, value, dtype=first.dtype)
        value = own
        ends = ends - part.size(levels.row(part, known))
    assert value is not None
    out = first.fusion.tensor(first.dtype, domains)
    return first.fusion.define([out], domains, Store(out, tuple(domains), value))[0]


def _place(expr: Expr, domains: Iterable[IterDomain]) -> Place:
    return Place(expr, tuple(d for d in domains if index_of(d) in expr.symbols))


@dataclass(frozen=True)
class _Level:
    """One level of the result, inside the levels before it."""

    dim: int
    size: Expr
    """The number of its positions per position of the enclosing level, if it is constant."""
    offsets: Array | None
    """Otherwise their starts, per position of the enclosing level."""
    total: Expr
    """Its total number of positions."""


class _Levels:
    """The new levels: their lengths as functions of positions in the levels outside them."""

    def __init__(self, parts: Sequence[Part], dim: int, dims: Sequence[int], chosen: Expr | None, regular: bool) -> None:
        self.parts, self.dim, self.dims, self.chosen, self.regular = parts, dim, dims, chosen, regular
        self.kept = [k for k in dims if chosen is None or k != dim]

    def row(self, part: Part, known: Mapping[int, Expr]) -> Expr:
        """The row of the changed dim, from positions of the dims outside it."""
        place = row_of(part.view, self.dim)
        if place is None:
            return const(0)
        return place.expr.substitute(
            {index_of(part.view.domains[k]): known[k] for k in self.dims if k in known and k != self.dim}
        )

    def sources(self, part: Part, known: Mapping[int, Expr]) -> dict[int, Expr]:
        """The positions in a part, from positions in the new dims."""
        found = dict(known)
        position = self.chosen if self.chosen is not None else known.get(self.dim)
        if position is not None:
            found[self.dim] = part.source(position, self.row(part, known))
        return found

    def length(self, k: int, known: Mapping[int, Expr]) -> Expr:
        """The length of dim `k`, at positions of the dims outside it."""
        if k == self.dim:
            return _total(part.size(self.row(part, known)) for part in self.parts)
        found = []
        for part in self.parts:
            domain, place = part.view.domains[k], row_of(part.view, k)
            if place is None:
                return domain.extent_expr
            assert isinstance(domain, RaggedIterDomain)
            at = self.sources(part, known)
            row = place.expr.substitute({index_of(part.view.domains[j]): expr for j, expr in at.items()})
            own = domain.length_of(row)
            if self.dim in at and self.dim in counting(part.view, k):
                position = self.chosen if self.chosen is not None else known[self.dim]
                own = own * part.exists(position, self.row(part, known))
            found.append(own)
        return found[0] if self.dim not in counting(self.parts[0].view, k) else _total(found)

    def domains(self, name: str, repeats: bool) -> dict[int, IterDomain]:
        """The new dims, by the dims they come from."""
        x = self.parts[0].view
        levels, beside = list[_Level](), list[int]()
        for k in self.kept:
            outside = {level.dim for level in levels}
            if x.domains[k].is_ragged and not outside <= set(counting(x, k)):
                beside.append(k)
            else:
                levels.append(self._level(k, levels))
        found, _ = self._nested(levels, self._bound(levels[-1].dim, repeats))
        for k in beside:
            twin = next((j for j, d in found.items() if d.is_ragged and counting(x, j) == counting(x, k)), None)
            if twin is None:
                raise ShapeError(
                    f"{name}: dim {k} of {shown(x)} has rows beside the rows of other dims; {name} the JaggedTensor before the "
                    "program"
                )
            rows = found[twin]
            assert isinstance(rows, RaggedIterDomain)
            outside_ = levels[: next(at for at, level in enumerate(levels) if level.dim == twin)]
            array = _sums(self.length(k, _positions(outside_)), rows.component.extent_expr)
            found[k] = rows_under(rows.component, array, x.fusion.fresh("r"), self._bound(k, repeats))
        return {k: found[k] for k in self.kept}

    def _level(self, k: int, outside: Sequence[_Level]) -> _Level:
        """The level of dim `k`, inside those `outside`."""
        size = self.length(k, _positions(outside))
        count = outside[-1].total if outside else const(1)
        if not outside or (self.regular if k == self.dim else not self.parts[0].view.domains[k].is_ragged):
            return _Level(k, size, None, count * size)
        offsets = _sums(size, count)
        return _Level(k, size, offsets, offsets[count])

    def _bound(self, k: int, repeats: bool) -> Expr | None:
        return None if repeats else _total(part.view.domains[k].host_bound for part in self.parts)

    def _nested(self, levels: Sequence[_Level], bound: Expr | None = None) -> tuple[dict[int, IterDomain], IterDomain]:
        """The domains of nested levels, by dim; and a domain over all positions of the innermost one, at most `bound` of them."""
        fusion = self.parts[0].view.fusion
        found: dict[int, IterDomain] = {}
        regular = max((k for k, level in enumerate(levels) if k and level.offsets is None), default=None)
        if regular is None:
            # Rows of rows: each level partitions the positions of the level inside it.
            every = flat = IterDomain(levels[-1].total, name=fusion.fresh("d"), bound=bound)
            for outside, level in reversed(list(itertools.pairwise(levels))):
                assert level.offsets is not None
                names = (fusion.fresh("c"), fusion.fresh("r"))
                flat, found[level.dim] = partition(flat, level.offsets, outside.total, names=names, program=fusion.identity)
            return {levels[0].dim: flat, **found}, every
        # Levels with equally many parts own the inner rows together with the enclosing levels.
        inside = levels[regular + 1 :]
        identity = identity_of(inside[0].offsets, fusion.identity) if inside and inside[0].offsets is not None else None
        found, every = self._nested(levels[:regular])
        found[levels[regular].dim] = part = IterDomain(levels[regular].size, name=fusion.fresh("d"), pairing=identity)
        every = merge(every, part)
        for level in inside:
            assert level.offsets is not None
            most, identity = bound if level is levels[-1] else None, identity_of(level.offsets, fusion.identity)
            rows = rows_under(every, level.offsets, fusion.fresh("r"), most, identity)
            found[level.dim], every = rows, combine(every, rows)
        return found, every


def _positions(levels: Sequence[_Level]) -> dict[int, Expr]:
    """The position in each level of position COORDINATE among all those of the innermost, by dim."""
    found = dict[int, Expr]()
    flat: Expr = COORDINATE
    for k, level in reversed(list(enumerate(levels))):
        if k == 0:
            found[level.dim] = flat
        elif level.offsets is None:
            size = divisor(level.size)
            flat, found[level.dim] = flat // size, flat % size
        else:
            owner = search(level.offsets, levels[k - 1].total, flat)
            flat, found[level.dim] = owner, flat - level.offsets[owner]
    return found


def _sums(length: Expr, count: Expr) -> Array:
    """Offsets of rows whose lengths are an expression in COORDINATE."""
    name = f"sum({length.substitute({COORDINATE: symbol('c')})})"
    return Array(name, recipe=RunningSum(length, COORDINATE, count))


def _total(sizes: Iterable[Expr]) -> Expr:
    return sum(sizes, const(0))
