"""Operations that move elements: gathers, selections, slices, padding, joining.

In: `TensorView`s. Out: new ones, each element read at a computed place of its source. Rows whose lengths change get a
structure of their own, derived from the old one. A place outside the source gives 0 and touches no memory.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import match
from serrate.frontend.ops.common import Number, counts_rows, dim_of, require_equal
from serrate.frontend.ops.elementwise import cast
from serrate.frontend.ops.structure import as_flattened, nested_by, unsqueeze
from serrate.frontend.shapes import both, shown
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, Expr, const, maximum, minimum, symbol
from serrate.ir.fusion import Fusion, PositionInside
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.recipes import Joined, RunningSum
from serrate.ir.tile import Store
from serrate.ir.values import Place, Places, Value, call, computed, constant, index_of, index_read, position
from serrate.ir.view import TensorView


def pulled(fusion: Fusion, dtype: torch.dtype, domains: Sequence[IterDomain], value: Value) -> TensorView:
    """A new tensor over `domains` that holds `value`."""
    out = fusion.tensor(dtype, domains)
    return fusion.define([out], domains, Store(out, tuple(domains), value))[0]


def _integers(name: str, indices: TensorView) -> TensorView:
    if indices.dtype == torch.bool or indices.dtype.is_floating_point:
        raise DtypeError(f"{name}: indices must be integers, got {indices.dtype}; convert them first, with .long()")
    return indices if indices.dtype in (torch.int32, torch.int64) else cast(indices, torch.int64)


def _at(indices: TensorView, index: Places | None = None) -> Place:
    """The place that an element of `indices` names."""
    return Place(index_read(0), (), (indices.at(indices.domains if index is None else index),))


def _same_position(domain: IterDomain) -> Place:
    """The position of a row of another structure that has the same number: lengths, not identities, say that it is there."""
    return Place(index_of(domain), (domain,))


def rows_of(fusion: Fusion, length: Expr, count: Expr, bound: Expr | None) -> tuple[IterDomain, RaggedIterDomain]:
    """New rows: `count` of them, `length` (an expression in COORDINATE) positions each, `bound` positions at most in all."""
    name = f"sum({length.substitute({COORDINATE: symbol('c')})})"
    array = Array(name, recipe=RunningSum(length, COORDINATE, count))
    flat = IterDomain(array[count], name=fusion.fresh("d"), bound=bound)
    return partition(flat, array, count, names=(fusion.fresh("c"), fusion.fresh("r")))


def _own_component(name: str, x: TensorView, dim: int) -> IterDomain:
    """The component domain of ragged dim `dim`, which must stand just before it as dim 0: one level of rows."""
    domain = x.domains[dim]
    assert isinstance(domain, RaggedIterDomain)
    if dim != 1 or x.domains[0].uid != domain.component.uid:
        raise ShapeError(f"{name}: dim {dim} of {shown(x)} is ragged inside other rows; flatten the outer level first")
    return x.domains[0]


# --- gathers -----------------------------------------------------------------------------------------------------------


def index(x: TensorView, indices: TensorView, dim: int = 0, *, name: str = "index") -> TensorView:
    """`x` at `indices` along `dim`: that dim is replaced by the dims of `indices`, which may be ragged.

    Indices of the component dim pick whole rows; the result has their lengths. An index outside gives 0; of
    the component dim, an empty row.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     table, tokens = f.input((100, 8), torch.float32), f.input((None,), torch.int64)
    ...     offsets = f.input((None,), torch.int64)
    ...     f.output(index(table, ops.as_nested(tokens, offsets)))
    >>> f.evaluate(torch.ones(100, 8), torch.tensor([3, 1, 2]), torch.tensor([0, 2, 3])).unbind()[0].shape
    torch.Size([2, 8])
    """
    dim = dim_of("index", x, dim)
    indices = _integers(name, indices)
    if isinstance(x.domains[dim], RaggedIterDomain):
        raise ShapeError(f"index: dim {dim} of {shown(x)} is ragged; gather(x, {dim}, indices) picks positions of each row")
    if counts_rows(x, x.domains[dim]):
        return _index_rows(x, indices, dim)
    domains = (*x.domains[:dim], *indices.domains, *x.domains[dim + 1 :])
    places: Places = (*x.domains[:dim], _at(indices), *x.domains[dim + 1 :])
    return pulled(x.fusion, x.dtype, domains, x.at(places))


def _index_rows(x: TensorView, indices: TensorView, dim: int) -> TensorView:
    """Whole rows: their lengths follow the indices."""
    ragged = x.domains[1] if x.ndim > 1 else None
    if dim != 0 or indices.ndim != 1 or not isinstance(ragged, RaggedIterDomain) or levels_of(x) != 1:
        raise ShapeError(
            f"index: rows are picked by a 1-D tensor along dim 0 of one level of rows, got {shown(indices)} into {shown(x)}"
        )
    picked = Array(indices.tensor.memory.name, signed=True)[COORDINATE]
    rows_there = ragged.component.extent_expr
    inside = maximum(minimum(picked, rows_there - 1), 0)
    # A row that is not there is empty: its length is that of some row, times 0.
    exists = minimum(maximum(picked + 1, 0), 1) * minimum(maximum(rows_there - picked, 0), 1)
    count = indices.domains[0].extent_expr
    component, rows = rows_of(x.fusion, ragged.length_of(inside) * exists, count, None)
    places: Places = (_at(indices, (component,)), _same_position(rows), *x.domains[2:])
    return pulled(x.fusion, x.dtype, (component, rows, *x.domains[2:]), x.at(places))


def levels_of(x: TensorView) -> int:
    """How many ragged dims a tensor has."""
    return len([d for d in x.domains if d.is_ragged])


def embedding(indices: TensorView, weight: TensorView) -> TensorView:
    """`torch.nn.functional.embedding` with indices of any structure; an index outside the table gives zeros."""
    if weight.ndim != 2:
        raise ShapeError(f"embedding: expected a table [entries, features], got {shown(weight)}")
    return index(weight, indices, 0, name="embedding")


def gather(x: TensorView, dim: int, indices: TensorView) -> TensorView:
    """`torch.gather`: `out[i, j, k] = x[i, indices[i, j, k], k]` for `dim` 1; in a ragged dim, positions of the same row."""
    dim = dim_of("gather", x, dim)
    indices = _integers("gather", indices)
    if x.ndim != indices.ndim:
        raise ShapeError(f"gather of {both(x, indices)}: tensor and indices must have as many dims")
    for k, (own, other) in enumerate(zip(x.domains, indices.domains, strict=True)):
        if k != dim:
            later = f"gather of {both(x, indices, later=True)}, dim {k}"
            match(x.fusion, f"gather of {both(x, indices)}, dim {k}", own, other, later)
    if x.domains[dim].is_ragged and counts_rows(x, x.domains[dim]):
        raise ShapeError(f"gather: dim {dim} of {shown(x)} counts rows inside other rows; flatten the outer level first")
    # Where rows are picked, positions must lie in the row that the index names.
    picks = [isinstance(d, RaggedIterDomain) and d.component.uid == x.domains[dim].uid for d in x.domains]
    places: Places = tuple(
        _at(indices) if k == dim else _same_position(d) if picks[k] else d for k, d in enumerate(indices.domains)
    )
    return pulled(x.fusion, x.dtype, indices.domains, x.at(places))


def select(x: TensorView, dim: int, index: int) -> TensorView:
    """`x` at one position of `dim`. Of the component dim: that row, its ragged dim now a regular one of its length.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None, 4), torch.float32), f.input((4,), torch.int64)
    ...     f.output(select(ops.as_nested(x, offsets), 0, 1))
    >>> f.evaluate(torch.ones(10, 4), torch.tensor([0, 3, 8, 10])).shape
    torch.Size([5, 4])
    """
    dim = dim_of("select", x, dim)
    domain = x.domains[dim]
    place = _position(domain, index, f"select: {shown(x)} has no position {index} in dim {dim}")
    if not domain.is_ragged and domain.extent_expr.value is None:
        x.fusion.checks.append(PositionInside(index, domain.extent_expr, f"select: dim {dim} has no position"))
    domains: list[IterDomain] = []
    places: list[IterDomain | Place | None] = []
    for k, own in enumerate(x.domains):
        if k == dim:
            places.append(place)
            continue
        if isinstance(own, RaggedIterDomain) and own.component.uid == domain.uid:
            own = IterDomain(own.length_of(place.expr), name=x.fusion.fresh("d"), bound=own.host_bound)
            domains.append(own)
            places.append(_same_position(own))
            continue
        domains.append(own)
        places.append(own)
    return pulled(x.fusion, x.dtype, domains, x.at(tuple(places)))


def _position(domain: IterDomain, index: int, message: str) -> Place:
    """A position counted from the start, or from the end where negative; in a ragged dim from the end of each row."""
    extent = domain.extent_expr.value
    if not domain.is_ragged and extent is not None and not -extent <= index < extent:
        raise ShapeError(message)
    if index >= 0:
        return Place(const(index))
    if isinstance(domain, RaggedIterDomain):
        return Place(domain.length_of(index_of(domain.component)) + index, (domain.component,))
    return Place(domain.extent_expr + index)


# --- ranges ------------------------------------------------------------------------------------------------------------


def slice(x: TensorView, dim: int, start: int | None = None, stop: int | None = None) -> TensorView:
    """`x[..., start:stop]` along `dim`, as Python slices. In a ragged dim of every row, which then has a new length.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(slice(ops.as_nested(x, offsets), 1, -2))
    >>> [r.tolist() for r in f.evaluate(torch.arange(6.0), torch.tensor([0, 4, 4, 6])).unbind()]
    [[2.0, 3.0], [], [4.0, 5.0]]
    """
    dim = dim_of("slice", x, dim)
    domain = x.domains[dim]
    length = domain.row_length
    low = const(0) if start is None else _bound(start, length)
    high = length if stop is None else _bound(stop, length)
    extent = maximum(high - low, 0)
    if isinstance(domain, RaggedIterDomain):
        component = _own_component("slice", x, dim)
        count = component.extent_expr
        new_component, rows = rows_of(x.fusion, extent, count, domain.host_bound)
        shifted = Place(index_of(rows) + low.substitute({COORDINATE: index_of(new_component)}), (rows, new_component))
        places: Places = (new_component, shifted, *x.domains[2:])
        return pulled(x.fusion, x.dtype, (new_component, rows, *x.domains[2:]), x.at(places))
    if counts_rows(x, domain):
        return _slice_rows(x, dim, low, extent)
    new = IterDomain(extent, name=x.fusion.fresh("d"))
    domains = (*x.domains[:dim], new, *x.domains[dim + 1 :])
    places = (*x.domains[:dim], Place(index_of(new) + low, (new,)), *x.domains[dim + 1 :])
    return pulled(x.fusion, x.dtype, domains, x.at(places))


def _bound(position: int, length: Expr) -> Expr:
    return minimum(const(position), length) if position >= 0 else maximum(length + position, 0)


def _slice_rows(x: TensorView, dim: int, low: Expr, count: Expr) -> TensorView:
    ragged = x.domains[1] if x.ndim > 1 else None
    if dim != 0 or not isinstance(ragged, RaggedIterDomain) or levels_of(x) != 1:
        raise ShapeError(f"slice: rows of {shown(x)} lie inside other rows; flatten the outer level first")
    component, rows = rows_of(x.fusion, ragged.length_of(COORDINATE + low), count, ragged.host_bound)
    places: Places = (Place(index_of(component) + low, (component,)), _same_position(rows), *x.domains[2:])
    return pulled(x.fusion, x.dtype, (component, rows, *x.domains[2:]), x.at(places))


def pad(x: TensorView, dim: int, before: int, after: int, value: Number = 0) -> TensorView:
    """`before` and `after` more positions of `value` along `dim`; in a ragged dim, in every row.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(pad(ops.as_nested(x, offsets), 1, 1, 0, 9.0))
    >>> [r.tolist() for r in f.evaluate(torch.arange(3.0), torch.tensor([0, 2, 2, 3])).unbind()]
    [[9.0, 0.0, 1.0], [9.0], [9.0, 2.0]]
    """
    dim = dim_of("pad", x, dim)
    if before < 0 or after < 0:
        raise ShapeError(f"pad: takes positions to add, got {before} and {after}; use slice to take some away")
    domain = x.domains[dim]
    domains = list(x.domains)
    places: list[IterDomain | Place | None] = list(x.domains)
    length: Expr = domain.extent_expr
    owners: tuple[IterDomain, ...] = ()
    if isinstance(domain, RaggedIterDomain):
        old = _own_component("pad", x, dim)
        more = old.extent_expr * (before + after)
        domains[0], domains[1] = rows_of(x.fusion, domain.length + (before + after), old.extent_expr, domain.host_bound + more)
        places[0], owners = domains[0], (domains[0],)
        length = domain.length_of(index_of(domains[0]))
    elif counts_rows(x, domain):
        raise ShapeError(f"pad: dim {dim} of {shown(x)} counts rows; cat with rows to add some")
    else:
        domains[dim] = IterDomain(length + (before + after), name=x.fusion.fresh("d"))
    new = domains[dim]
    places[dim] = Place(index_of(new) - before, (new,))
    inside = call(
        "logical_and",
        call("ge", position(new), constant(before, torch.int64), dtype=torch.bool),
        call("lt", position(new), computed(Place(length + before, owners)), dtype=torch.bool),
        dtype=torch.bool,
    )
    chosen = call("where", inside, x.at(tuple(places)), constant(value, x.dtype), dtype=x.dtype)
    return pulled(x.fusion, x.dtype, domains, chosen)


def flip(x: TensorView, dim: int) -> TensorView:
    """The positions of `dim` in the opposite order; in a ragged dim, within each row."""
    dim = dim_of("flip", x, dim)
    domain = x.domains[dim]
    if counts_rows(x, domain):
        raise ShapeError(f"flip: dim {dim} of {shown(x)} counts rows; index(x, rows) puts rows in another order")
    if isinstance(domain, RaggedIterDomain):
        length = domain.length_of(index_of(domain.component))
        back = Place(length - 1 - index_of(domain), (domain, domain.component))
    else:
        back = Place(domain.extent_expr - 1 - index_of(domain), (domain,))
    return pulled(x.fusion, x.dtype, x.domains, x.at(tuple(back if k == dim else d for k, d in enumerate(x.domains))))


# --- joining -----------------------------------------------------------------------------------------------------------


def cat(views: Sequence[TensorView], dim: int = 0) -> TensorView:
    """Joins tensors along a regular dim, along the ragged dim (row by row), or along the component dim (rows behind rows).

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     y = ops.as_nested(x, offsets)
    ...     f.output(cat([y, y], 0), cat([y, y], 1))
    >>> rows, wider = f.evaluate(torch.arange(3.0), torch.tensor([0, 2, 3]))
    >>> [r.tolist() for r in rows.unbind()], [r.tolist() for r in wider.unbind()]
    ([[0.0, 1.0], [2.0], [0.0, 1.0], [2.0]], [[0.0, 1.0, 0.0, 1.0], [2.0, 2.0]])
    """
    if not views:
        raise ShapeError("cat: needs at least one tensor")
    first = views[0]
    dim = dim_of("cat", first, dim)
    dtype = first.dtype
    for other in views[1:]:
        if other.ndim != first.ndim or [d.is_ragged for d in other.domains] != [d.is_ragged for d in first.domains]:
            raise ShapeError(f"cat of {both(first, other)}: tensors must have as many dims, ragged ones in the same places")
        dtype = torch.promote_types(dtype, other.dtype)
    views = [cast(v, dtype) for v in views]
    if isinstance(first.domains[dim], RaggedIterDomain):
        return _cat_ragged(views, dim)
    if counts_rows(first, first.domains[dim]):
        return _cat_rows(views, dim)
    for other in views[1:]:
        for k, (a, b) in enumerate(zip(first.domains, other.domains, strict=True)):
            if k != dim:
                _alike(first, other, k, a, b)
    new = IterDomain(_total([v.domains[dim].extent_expr for v in views]), name=first.fusion.fresh("d"))
    domains = (*first.domains[:dim], new, *first.domains[dim + 1 :])
    return _joined(views, dim, domains, [v.domains[dim].extent_expr for v in views], ())


def _alike(first: TensorView, other: TensorView, dim: int, a: IterDomain, b: IterDomain) -> None:
    """Dims that stay as they are when tensors are joined: of one structure, or of one extent; nothing is stretched."""
    now, later = (f"cat of {both(first, other, later=later)}, dim {dim}, which is not joined" for later in (False, True))
    if a.is_ragged:
        match(first.fusion, now, a, b, later)
    else:
        require_equal(first.fusion, f"{now}: the sizes", a, b, f"{later}: the sizes")


def _total(sizes: Sequence[Expr]) -> Expr:
    return builtins.sum(sizes, const(0))


def _joined(
    views: Sequence[TensorView], dim: int, domains: Sequence[IterDomain], sizes: Sequence[Expr], owners: tuple[IterDomain, ...]
) -> TensorView:
    """The element of whichever tensor a position of `domains[dim]` falls into; sizes may depend on the indices of `owners`."""
    fusion, dtype, new = views[0].fusion, views[0].dtype, domains[dim]
    ends = [_total(sizes[: k + 1]) for k in range(len(sizes))]
    value: Value | None = None
    for view, size, end in reversed(list(zip(views, sizes, ends, strict=True))):
        shifted = Place(index_of(new) - (end - size), (new, *owners))
        own = view.at(tuple(shifted if k == dim else d for k, d in enumerate(domains)))
        if value is not None:
            before = call("lt", position(new), computed(Place(end, owners)), dtype=torch.bool)
            own = call("where", before, own, value, dtype=dtype)
        value = own
    assert value is not None
    return pulled(fusion, dtype, domains, value)


def _cat_ragged(views: Sequence[TensorView], dim: int) -> TensorView:
    fusion, first = views[0].fusion, views[0]
    count = _own_component("cat", first, dim).extent_expr
    for other in views[1:]:
        require_equal(fusion, "cat: the numbers of rows", first.domains[0], _own_component("cat", other, dim))
        for k, (a, b) in enumerate(zip(first.domains[2:], other.domains[2:], strict=True), 2):
            _alike(first, other, k, a, b)
    ragged = [v.domains[1] for v in views]
    assert all(isinstance(d, RaggedIterDomain) for d in ragged)
    lengths = [d.row_length for d in ragged]
    bound = _total([d.host_bound for d in ragged])
    component, rows = rows_of(fusion, _total(lengths), count, bound)
    own = [length.substitute({COORDINATE: index_of(component)}) for length in lengths]
    return _joined(views, 1, (component, rows, *first.domains[2:]), own, (component,))


def _cat_rows(views: Sequence[TensorView], dim: int) -> TensorView:
    """Rows behind rows: the values of all tensors one behind the other, cut by offsets that continue."""
    first = views[0]
    if dim != 0 or levels_of(first) != 1 or not first.domains[1].is_ragged:
        raise ShapeError(f"cat: rows of {shown(first)} lie inside other rows; flatten the outer level first")
    ragged = [v.domains[1] for v in views]
    counts = tuple(d.component.extent_expr for d in ragged if isinstance(d, RaggedIterDomain))
    lengths = tuple(d.row_length for d in ragged)
    names = ", ".join(str(length.substitute({COORDINATE: symbol("c")})) for length in lengths)
    offsets = Array(f"joined({names})", recipe=Joined(lengths, COORDINATE, counts))
    flat = cat([as_flattened(v) for v in views], 0)
    return nested_by(flat, offsets, _total(counts), 0)


def stack(views: Sequence[TensorView], dim: int = 0) -> TensorView:
    """Joins tensors of one structure along a new dim behind their rows."""
    if not views:
        raise ShapeError("stack: needs at least one tensor")
    return cat([unsqueeze(v, dim) for v in views], dim)
