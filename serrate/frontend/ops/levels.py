"""Selecting, slicing, reversing, indexing and joining along a dim that counts rows on several levels.

In: tensors with the same levels, and the source of each position of the changed dim. Out: one tensor with new offsets on every
level. The two ragged dims of a product are levels too, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.common import counted, counting, row_of
from serrate.frontend.ops.structure import rows_under
from serrate.frontend.shapes import shown
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, Expr, const, maximum, minimum, search, symbol
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.recipes import RunningSum
from serrate.ir.tile import Store
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


def chain(name: str, x: TensorView, dim: int) -> list[int]:
    """The nested dims of `x` that `dim` belongs to: the outermost counts the rows of all others."""
    ragged = [k for k in (dim, *counted(x, dim)) if x.domains[k].is_ragged]
    outer = min((k for row in ragged for k in counting(x, row)), default=dim)
    found = [outer, *counted(x, outer)]
    if any(not set(counting(x, k)) <= set(found) or not x.domains[k].is_ragged for k in found[1:]) or dim not in found:
        raise ShapeError(
            f"{name}: dim {dim} of {shown(x)} counts rows together with another dim; flatten the two first, or {name} the "
            "JaggedTensor before the program"
        )
    return found


def rebuilt(name: str, parts: Sequence[Part], dim: int, *, chosen: Expr | None = None, repeats: bool = False) -> TensorView:
    """Concatenates the parts along `dim`, with new offsets; with `chosen`, selects that position of `dim` and removes the dim.

    With `repeats`, a position of a part may occur more than once, so the size of the result has no upper bound.
    """
    first = parts[0].view
    dims = chain(name, first, dim)
    if any(chain(name, part.view, dim) != dims for part in parts[1:]):
        raise ShapeError(f"{name}: {' and '.join(shown(part.view) for part in parts)} must have rows in the same dims")
    levels = _Levels(parts, dim, dims, chosen)
    new = levels.domains(repeats)
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


class _Levels:
    """The new levels: their lengths as functions of positions in the levels outside them."""

    def __init__(self, parts: Sequence[Part], dim: int, dims: Sequence[int], chosen: Expr | None) -> None:
        self.parts, self.dim, self.dims, self.chosen = parts, dim, dims, chosen
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

    def _bound(self, k: int, repeats: bool) -> Expr | None:
        return None if repeats else _total(part.view.domains[k].host_bound for part in self.parts)

    def domains(self, repeats: bool) -> dict[int, IterDomain]:
        """The new dims, by the dims they come from."""
        fusion, x = self.parts[0].view.fusion, self.parts[0].view
        counts, arrays = [self.length(self.kept[0], {})], list[Array]()
        nested, beside = [self.kept[0]], list[int]()
        for k in self.kept[1:]:
            if set(counting(x, k)) - {self.dim if self.chosen is not None else -1} < set(nested):
                beside.append(k)
                continue
            length = self.length(k, dict(zip(nested, _positions(arrays, counts), strict=True)))
            arrays.append(_sums(length, counts[-1]))
            counts.append(arrays[-1][counts[-1]])
            nested.append(k)
        inner = IterDomain(counts[-1], name=fusion.fresh("d"), bound=self._bound(nested[-1], repeats))
        found: dict[int, IterDomain] = {}
        for k, array, count in reversed(list(zip(nested[1:], arrays, counts, strict=False))):
            inner, found[k] = partition(
                inner, array, count, names=(fusion.fresh("c"), fusion.fresh("r")), program=fusion.identity
            )
        found[nested[0]] = inner
        for k in beside:
            rows = found[next(j for j in nested[1:] if counting(x, j) == counting(x, k))]
            assert isinstance(rows, RaggedIterDomain)
            owners = dict(zip(nested, _positions(arrays[: len(counting(x, k)) - 1], counts), strict=False))
            array = _sums(self.length(k, owners), rows.component.extent_expr)
            found[k] = rows_under(rows.component, array, fusion.fresh("r"), self._bound(k, repeats))
        return {k: found[k] for k in self.kept}


def _positions(arrays: Sequence[Array], counts: Sequence[Expr]) -> list[Expr]:
    """The position in each level of row COORDINATE, counted on the innermost of them."""
    found = list[Expr]()
    flat: Expr = COORDINATE
    for array, count in reversed(list(zip(arrays, counts, strict=False))):
        owner = search(array, count, flat)
        found.insert(0, flat - array[owner])
        flat = owner
    return [flat, *found]


def _sums(length: Expr, count: Expr) -> Array:
    """Offsets of rows whose lengths are an expression in COORDINATE."""
    name = f"sum({length.substitute({COORDINATE: symbol('c')})})"
    return Array(name, recipe=RunningSum(length, COORDINATE, count))


def _total(sizes: Iterable[Expr]) -> Expr:
    return sum(sizes, const(0))
