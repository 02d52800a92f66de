"""Sorting along a dim, within each row if it is ragged.

In: a `TensorView` and a dim. Out: the sorted values and their original positions, with the structure of the operand. A fusion is
cut into stages here (see `serrate.lower.stages`); nothing is copied to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.blocks import permute, transpose
from serrate.frontend.ops.common import counted, counting, dim_of
from serrate.frontend.ops.levels import chain
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.structure import set
from serrate.frontend.shapes import shown
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, minimum
from serrate.ir.fusion import PositionInside
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.storage import collapse, storage_of
from serrate.ir.tile import Library
from serrate.ir.transforms import Merge
from serrate.ir.values import Place, Tensor, call, extent, index_of, position
from serrate.ir.view import Size, TensorView


class ValuesIndices(NamedTuple):
    """Like torch's named tuple: elements, and their positions along the dim."""

    values: TensorView
    indices: TensorView


def library(function: str, targets: list[Tensor], given: list[TensorView], *options: int | Expr) -> tuple[TensorView, ...]:
    """Records a library call. It reads whole tensors, so a view whose elements are in another order in memory is copied."""
    own = [x if is_in_memory_order(x) else set(x) for x in given]
    statement = Library(function, tuple(targets), tuple(x.at(x.domains) for x in own), options)
    domains = {d.uid: d for x in own for d in x.domains}
    return own[0].fusion.define(targets, tuple(domains.values()), statement)


def is_in_memory_order(x: TensorView) -> bool:
    """Whether the elements of a tensor are in memory in the order of its dims. This includes views that only merge dims of their
    base, or make rows of them."""
    stored = x.tensor.memory.storage
    if x.tensor.base is None or any(d.extent_expr.arrays for d in stored):
        return x.tensor.base is None
    return _unmerged(storage_of(x.domains)) == _unmerged(stored)


def _unmerged(domains: Sequence[IterDomain]) -> list[int]:
    """The uids of the domains that these were merged from, in order."""
    found: list[int] = []
    for domain in domains:
        made = domain.definition
        found += _unmerged(made.inputs) if isinstance(made, Merge) else [domain.uid]
    return found


def sort(x: TensorView, dim: int = -1, descending: bool = False) -> ValuesIndices:
    """`torch.sort`, always stable: the sorted elements along `dim`, and their original positions; NaN is the largest.

    In a ragged dim every row is sorted separately. Along a dim that counts rows, elements of different rows are sorted, at each
    position separately: rows that end before it are skipped, and keep their lengths.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(*sort(ops.as_nested(x, offsets), 1))
    >>> values, places = f.evaluate(torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]), torch.tensor([0, 3, 3, 5]))
    >>> [r.tolist() for r in values.unbind()], [r.tolist() for r in places.unbind()]
    ([[1.0, 2.0, 3.0], [], [4.0, 5.0]], [[1, 2, 0], [], [1, 0]])
    """
    dim = dim_of("sort", x, dim)
    fusion, domain = x.fusion, x.domains[dim]
    order = _rows_first(x, dim)
    if order != list(range(x.ndim)):
        # Dims between rows and those that count them keep their elements apart in memory.
        turned = sort(permute(x, *order), order.index(dim), descending)
        return ValuesIndices(*(permute(each, *(order.index(k) for k in range(x.ndim))) for each in turned))
    found = [fusion.tensor(x.dtype, x.domains), fusion.tensor(torch.int64, x.domains)]
    if counted(x, dim):
        first, *_, last = chain(x, dim)
        axis = x.domains[first : last + 1]
        _check_stored(axis, f"sort: dim {dim} of {shown(x)} counts rows that do not come after it; permute the dims")
        along, *others = (pulled(fusion, torch.int64, axis, position(d)) for d in (domain, *(d for d in axis if d is not domain)))
        before = len(storage_of(x.domains[:first]))
        return ValuesIndices(*library("sort_lines", found, [x, along, positions_of(x, axis), *others], before, int(descending)))
    if not isinstance(domain, RaggedIterDomain):
        # In memory order: dims that index the same rows are one there.
        place = len(storage_of(x.domains[:dim]))
        return ValuesIndices(*library("sort", found, [x], place, int(descending)))
    if _is_outer_side(x, dim):
        # Positions along the outer dim of a product are not adjacent in memory; after a transpose they are.
        turned = sort(transpose(x, dim, dim + 1), dim + 1, descending)
        return ValuesIndices(*(transpose(each, dim, dim + 1) for each in turned))
    first = _axis(x, dim)
    before = len(storage_of(x.domains[:first]))
    axis = x.domains[first : dim + 1]
    within = pulled(fusion, torch.int64, axis, position(domain))
    return ValuesIndices(*library("sort_rows", found, [x, within, positions_of(x, axis)], before, int(descending)))


def positions_of(x: TensorView, axis: Sequence[IterDomain]) -> TensorView:
    """The number of positions of some dims; their buffer may be larger, if only the device knows that number."""
    sizes = [extent(d) for d in storage_of(axis)]
    size = functools.reduce(lambda a, b: call("mul", a, b, dtype=torch.int64), sizes)
    return pulled(x.fusion, torch.int64, [IterDomain(1, name=x.fusion.fresh("o"))], size)


def _axis(x: TensorView, dim: int) -> int:
    """The first of the dims that together span the positions of all rows of ragged dim `dim`: its owners, and the other sides of
    the same products. Elements of a row are adjacent there."""
    _check_stored(x.domains[dim + 1 :], f"sort: dim {dim} of {shown(x)} has nested rows; sort along the innermost ragged dim")
    first = min(counting(x, dim), default=dim)
    apart = f"sort: the rows of dim {dim} of {shown(x)} must come directly after the dims that count them; permute the dims"
    _check_stored(x.domains[first : dim + 1], apart)
    return first


def _rows_first(x: TensorView, dim: int) -> list[int]:
    """The dims, with those between rows and the dims that count them moved after them; of all levels if `dim` counts rows."""
    levels = chain(x, dim) if counted(x, dim) else [*counting(x, dim), dim]
    sides = [k for k in range(dim) if not counted(x, dim) and x.domains[k].is_ragged and counting(x, k) == counting(x, dim)]
    between = [k for k in range(levels[0], levels[-1]) if k not in levels and k not in sides]
    return [*(k for k in range(levels[-1] + 1) if k not in between), *between, *range(levels[-1] + 1, x.ndim)]


def _is_outer_side(x: TensorView, dim: int) -> bool:
    """Whether a dim is the outer of two ragged dims of one component."""
    return dim + 1 < x.ndim and x.domains[dim + 1].is_ragged and counting(x, dim) == counting(x, dim + 1)


def _first(x: TensorView, dim: int, count: int) -> TensorView:
    """The first `count` positions of every row, or the whole row if it is shorter."""
    rows = x.domains[dim]
    assert isinstance(rows, RaggedIterDomain)
    fewer = rows.with_rows(minimum(rows.length, count), name=x.fusion.fresh("r"), bound=rows.host_bound)
    domains = tuple(fewer if k == dim else d for k, d in enumerate(x.domains))
    places = tuple(Place(index_of(fewer), (fewer,)) if k == dim else d for k, d in enumerate(x.domains))
    return pulled(x.fusion, x.dtype, domains, x.at(places))


def _check_stored(domains: Sequence[IterDomain], message: str) -> None:
    """Raises unless the domains can be stored: every ragged one has its component among them."""
    if any(d.is_ragged for d in collapse(domains)):
        raise ShapeError(message)


def argsort(x: TensorView, dim: int = -1, descending: bool = False) -> TensorView:
    """`torch.argsort`, always stable: the positions along `dim` in sorted order."""
    return sort(x, dim, descending).indices


def topk(x: TensorView, k: int, dim: int = -1, largest: bool = True) -> ValuesIndices:
    """`torch.topk`: the `k` largest (or smallest) elements along `dim`, in order, and their positions.

    In a ragged dim, of every row: a row shorter than `k` gives all its elements, so the result is ragged.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(topk(ops.as_nested(x, offsets), 2, 1).values)
    >>> [r.tolist() for r in f.evaluate(torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([0, 3, 4])).unbind()]
    [[3.0, 2.0], [5.0]]
    """
    dim = dim_of("topk", x, dim)
    k = int(k) if isinstance(k, Size) else k
    domain = x.domains[dim]
    if counted(x, dim):
        raise ShapeError(f"topk: dim {dim} of {shown(x)} counts rows of different lengths; use topk along a row")
    if isinstance(domain, RaggedIterDomain):
        if isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise ShapeError(f"topk: k must be a non-negative int, got {k!r}")
        values, indices = sort(x, dim, descending=largest)
        return ValuesIndices(_first(values, dim, k), _first(indices, dim, k))
    extent = domain.extent_expr.value
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (extent is not None and k > extent):
        raise ShapeError(f"topk: k must be between 1 and {domain.extent}, got {k!r}")
    if extent is None:
        x.fusion.checks.append(PositionInside(k - 1, domain.extent_expr, f"topk: k = {k} needs position"))
    fusion = x.fusion
    domains = (*x.domains[:dim], IterDomain(k, name=fusion.fresh("d")), *x.domains[dim + 1 :])
    found = [fusion.tensor(x.dtype, domains), fusion.tensor(torch.int64, domains)]
    return ValuesIndices(*library("topk", found, [x], k, len(storage_of(x.domains[:dim])), int(largest)))
