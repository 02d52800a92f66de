"""Operations that move elements: gathers, selections, slices, padding, concatenation.

In: `TensorView`s. Out: new ones, whose elements are read at computed places of their source. If row lengths change, a new
structure is derived from the old one. A place out of bounds gives 0 and touches no memory.
"""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Sequence

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import apart, broadcast, index_into, match
from serrate.frontend.ops.common import Number, counted, counting, dim_of, require_equal, row_of
from serrate.frontend.ops.elementwise import cast, typed
from serrate.frontend.ops.levels import Part, inside, rebuilt
from serrate.frontend.ops.reductions import amin
from serrate.frontend.ops.structure import as_flattened, flatten, nested_by, unsqueeze
from serrate.frontend.shapes import both, shown
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, Expr, ceildiv, const, maximum, minimum, symbol
from serrate.ir.fusion import NOTHING, AtLeastLongest, Fusion, IndicesInside, PositionInside
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.recipes import Joined, RunningSum
from serrate.ir.tile import Store
from serrate.ir.values import Place, Places, Value, call, computed, constant, index_of, index_read, position
from serrate.ir.view import Size, TensorView


def pulled(fusion: Fusion, dtype: torch.dtype, domains: Sequence[IterDomain], value: Value) -> TensorView:
    """A new tensor over `domains` that holds `value`."""
    out = fusion.tensor(dtype, domains)
    return fusion.define([out], domains, Store(out, tuple(domains), value))[0]


def _integers(name: str, indices: TensorView) -> TensorView:
    if indices.dtype == torch.bool or indices.dtype.is_floating_point:
        raise DtypeError(f"{name}: indices must be integers, got {indices.dtype}; convert them first, with .long()")
    return indices if indices.dtype in (torch.int32, torch.int64) else cast(indices, torch.int64)


def _at(indices: TensorView, index: Places | None = None, from_end: Place | None = None) -> Place:
    """The place that an element of `indices` refers to; negative indices count from `from_end`, if given."""
    expr: Expr = index_read(0)
    domains: tuple[IterDomain, ...] = ()
    if from_end is not None:
        expr, domains = _counted_from(expr, from_end.expr), from_end.domains
    return Place(expr, domains, (indices.at(indices.domains if index is None else index),))


def _counted_from(position: Expr, end: Expr) -> Expr:
    """A position; a negative one is counted from the end."""
    return position + minimum(maximum(position * -1, 0), 1) * end


def _same_position(domain: IterDomain) -> Place:
    """The same position in a row of another structure; bounded by lengths, since the identities differ."""
    return Place(index_of(domain), (domain,))


def rows_of(fusion: Fusion, length: Expr, count: Expr, bound: Expr | None) -> tuple[IterDomain, RaggedIterDomain]:
    """`count` new rows of `length` positions each (an expression in COORDINATE), at most `bound` positions in total."""
    name = f"sum({length.substitute({COORDINATE: symbol('c')})})"
    array = Array(name, recipe=RunningSum(length, COORDINATE, count))
    total = array[count] if COORDINATE in length.symbols or length.arrays else length * count
    flat = IterDomain(total, name=fusion.fresh("d"), bound=bound)
    return partition(flat, array, count, names=(fusion.fresh("c"), fusion.fresh("r")), program=fusion.identity)


def _row(name: str, x: TensorView, dim: int) -> Place:
    """The row of ragged dim `dim` that an element of `x` lies in."""
    row = row_of(x, dim)
    if row is None:
        raise ShapeError(f"{name}: no dims of {shown(x)} own the rows of dim {dim}; they must be dims of the tensor")
    return row


def _in_row(expr: Expr, row: Place) -> Expr:
    """An expression in COORDINATE, evaluated in the current row."""
    return expr.substitute({COORDINATE: row.expr})


def _resized(name: str, x: TensorView, dim: int, length: Expr, bound: Expr) -> tuple[list[IterDomain], Place]:
    """The dims of `x` with new row lengths in `dim`, at most `bound` positions in total; and the current row.

    `length` is an expression in COORDINATE. Rows indexed by a single dim get a new structure; others stay in the structure they
    are part of.
    """
    rows, owners = x.domains[dim], counting(x, dim)
    assert isinstance(rows, RaggedIterDomain)
    domains = list(x.domains)
    row = _row(name, x, dim)
    if len(owners) > 1 or counted(x, owners[0]) != [dim]:
        domains[dim] = rows.with_rows(length, name=x.fusion.fresh("r"), bound=bound)
        return domains, row
    domains[owners[0]], domains[dim] = rows_of(x.fusion, length, rows.component.extent_expr, bound)
    return domains, row.moved({rows.component.uid: domains[owners[0]]})


# --- gathers -----------------------------------------------------------------------------------------------------------


def index(x: TensorView, indices: TensorView, dim: int = 0, *, name: str = "index", from_end: bool = False) -> TensorView:
    """`x` at `indices` along `dim`: that dim is replaced by the dims of `indices`, which may be ragged.

    Indices of a ragged dim select the same positions of every row. Along a dim that counts rows, whole rows are selected, with
    their lengths. An index out of range gives 0, or an empty row. With `from_end`, negative indices count from the end.

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
    if counted(x, dim):
        return _index_rows(x, indices, dim, from_end)
    own = apart(x.fusion, indices.domains, [d for k, d in enumerate(x.domains) if k != dim])
    domains = (*x.domains[:dim], *own, *x.domains[dim + 1 :])
    place = _at(indices, own, _length(name, x, dim) if from_end else None)
    places: Places = (*x.domains[:dim], place, *x.domains[dim + 1 :])
    return pulled(x.fusion, x.dtype, domains, x.at(places))


def index_together(x: TensorView, indices: Sequence[TensorView], dim: int) -> TensorView:
    """`x` indexed by several tensors, for consecutive dims from `dim` on. The index tensors are broadcast together; their dims
    replace the indexed ones. Negative indices count from the end."""
    indexed = range(dim, dim + len(indices))
    for k in indexed:
        if counted(x, k) or x.domains[k].is_ragged:
            raise ShapeError(
                f"several index tensors in one key select along dense dims only; dim {k} of {shown(x)} is ragged or counts rows"
            )
    integers = [_integers("index", each) for each in indices]
    shared, _ = broadcast(x.fusion, "index by tensors", integers)
    index_dims = apart(x.fusion, shared, [d for k, d in enumerate(x.domains) if k not in indexed])
    found: Places = tuple(
        _at(each, index_into(each, index_dims), _length("index", x, k)) for k, each in zip(indexed, integers, strict=True)
    )
    domains = (*x.domains[:dim], *index_dims, *x.domains[indexed.stop :])
    places: Places = (*x.domains[:dim], *found, *x.domains[indexed.stop :])
    return pulled(x.fusion, x.dtype, domains, x.at(places))


def _index_rows(x: TensorView, indices: TensorView, dim: int, from_end: bool) -> TensorView:
    """Selects whole rows; their lengths follow the indices."""
    if indices.ndim != 1:
        raise ShapeError(f"index: rows are selected by a 1-D tensor, got {shown(indices)} for dim {dim} of {shown(x)}")
    domain = x.domains[dim]

    def picked(at: Expr, row: Expr) -> Expr:
        found = Array(indices.tensor.memory.name, signed=True)[at]
        return _counted_from(found, _size(domain, row)) if from_end else found

    part = Part(
        x,
        lambda at, row: _clamped(picked(at, row), _size(domain, row)),
        lambda at, row: inside(picked(at, row), _size(domain, row)),
        lambda _: indices.domains[0].extent_expr,
        (lambda at: _at(indices, (at,), _length("index", x, dim) if from_end else None)) if not domain.is_ragged else None,
    )
    return rebuilt("index", [part], dim, repeats=True, regular=True)


def _length(name: str, x: TensorView, dim: int) -> Place:
    """The size of a dim; in a ragged dim, that of the current row."""
    domain = x.domains[dim]
    if not isinstance(domain, RaggedIterDomain):
        return Place(domain.extent_expr)
    row = _row(name, x, dim)
    return Place(_in_row(domain.length, row), row.domains)


def embedding(indices: TensorView, weight: TensorView) -> TensorView:
    """`torch.nn.functional.embedding` with indices of any structure; an index out of range gives zeros."""
    if weight.ndim != 2:
        raise ShapeError(f"embedding: expected a table [entries, features], got {shown(weight)}")
    return index(weight, indices, 0, name="embedding")


def gather(x: TensorView, dim: int, indices: TensorView, *, name: str = "gather") -> TensorView:
    """`torch.gather`: `out[i, j, k] = x[i, indices[i, j, k], k]` for `dim` 1; in a ragged dim, positions of the same row."""
    dim = dim_of(name, x, dim)
    indices = _integers(name, indices)
    if x.ndim != indices.ndim:
        raise ShapeError(f"{name} of {both(x, indices)}: tensor and indices must have the same number of dims")
    # If rows are selected, positions must lie in the selected row.
    inside = counted(x, dim)
    for k, (own, other) in enumerate(zip(x.domains, indices.domains, strict=True)):
        if own.is_ragged and not other.is_ragged and k != dim and k not in inside:
            raise ShapeError(
                f"{name} of {both(x, indices)}: dim {k} is ragged in the first and dense in the second: use "
                "JaggedTensor.from_padded(y, jt.lengths) for the second"
            )
        if k != dim and own.is_single != other.is_single and (own.is_single or k in inside):
            raise ShapeError(f"{name} of {both(x, indices)}: dim {k} has size 1 in only one of them, and dims do not broadcast")
        if k != dim:
            later = f"{name} of {both(x, indices, later=True)}, dim {k}"
            match(x.fusion, f"{name} of {both(x, indices)}, dim {k}", own, other, later)
    domains = _gathered(x, dim, indices)
    places: list[IterDomain | Place | None] = []
    for k, (own, d) in enumerate(zip(x.domains, domains, strict=True)):
        first = Place(const(0)) if d.is_single and not own.is_single else d
        places.append(_at(indices, domains) if k == dim else _same_position(d) if k in inside else first)
    return pulled(x.fusion, x.dtype, domains, x.at(tuple(places)))


def _gathered(x: TensorView, dim: int, indices: TensorView) -> tuple[IterDomain, ...]:
    """The dims of the result: those of `indices`, except that dims of `x` that count rows replace dense dims of the indices."""

    def is_of_indices(k: int, own: IterDomain, other: IterDomain) -> bool:
        return k == dim or own.is_ragged or bool(counted(indices, k)) or other.is_single

    pairs = enumerate(zip(x.domains, indices.domains, strict=True))
    return tuple(other if is_of_indices(k, own, other) else own for k, (own, other) in pairs)


def select(x: TensorView, dim: int, index: int) -> TensorView:
    """`x` at one position of `dim`. On the component dim: one row, whose ragged dim becomes a regular one of its length.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None, 4), torch.float32), f.input((4,), torch.int64)
    ...     f.output(select(ops.as_nested(x, offsets), 0, 1))
    >>> f.evaluate(torch.ones(10, 4), torch.tensor([0, 3, 8, 10])).shape
    torch.Size([5, 4])
    """
    dim = dim_of("select", x, dim)
    domain = x.domains[dim]
    place = _position(x, dim, index)
    rows = counted(x, dim)
    if not domain.is_ragged and domain.extent_expr.value is None:
        x.fusion.checks.append(PositionInside(index, domain.extent_expr, f"select: dim {dim} has no position"))
    if any(counting(x, k) != [dim] for k in rows):
        return _select_rows(x, dim, index)
    domains: list[IterDomain] = []
    places: list[IterDomain | Place | None] = []
    for k, own in enumerate(x.domains):
        if k == dim:
            places.append(place)
            continue
        if isinstance(own, RaggedIterDomain) and k in rows:
            own = IterDomain(own.length_of(place.expr), name=x.fusion.fresh("d"), bound=own.host_bound)
            domains.append(own)
            places.append(_same_position(own))
            continue
        domains.append(own)
        places.append(own)
    return pulled(x.fusion, x.dtype, domains, x.at(tuple(places)))


def _select_rows(x: TensorView, dim: int, index: int) -> TensorView:
    """One position of a dim that counts rows on several levels; a row without that position becomes empty."""
    domain = x.domains[dim]

    def place(_: Expr, row: Expr) -> Expr:
        return const(index) if index >= 0 else _size(domain, row) + index

    part = Part(x, place, lambda at, row: inside(place(at, row), _size(domain, row)))
    return rebuilt("select", [part], dim, chosen=const(0))


def _size(domain: IterDomain, row: Expr) -> Expr:
    """The size of a dim, of one of its rows if it is ragged."""
    return domain.length_of(row) if isinstance(domain, RaggedIterDomain) else domain.extent_expr


def _position(x: TensorView, dim: int, index: int) -> Place:
    """A position counted from the start, or from the end if negative; in a ragged dim, from the end of each row."""
    domain = x.domains[dim]
    extent = domain.extent_expr.value
    if not domain.is_ragged and extent is not None and not -extent <= index < extent:
        raise ShapeError(f"select: {shown(x)} has no position {index} in dim {dim}")
    if index >= 0:
        return Place(const(index))
    if isinstance(domain, RaggedIterDomain):
        row = _row("select", x, dim)
        return Place(_in_row(domain.length, row) + index, row.domains)
    return Place(domain.extent_expr + index)


def require_inside(
    name: str,
    x: TensorView,
    dim: int,
    indices: TensorView,
    *,
    ignored: int | None = None,
    low: int = 0,
    in_every_row: bool = False,
) -> None:
    """Makes the program raise for indices out of range in dim `dim` of `x`; without this, it reads 0 there.

    `ignored` is an index that is skipped. With `low` -1, negative indices count from the end. If `dim` is ragged, `indices` has
    the dims of `x`, one index for each element; with `in_every_row`, an index is a position of every row.
    """
    dim, domain = dim_of(name, x, dim), x.domains[dim % x.ndim]
    indices = _integers(name, indices)
    domains, by_row = indices.domains, domain.is_ragged and not in_every_row
    size: Value
    if by_row:
        domains, length = _gathered(x, dim, indices), _length(name, x, dim)
        size = computed(length.moved(dict(zip((d.uid for d in x.domains), domains, strict=True))))
    elif domain.is_ragged:
        length = _length(name, x, dim)
        size = amin(pulled(x.fusion, torch.int64, length.domains, computed(length))).at(())
    else:
        size = computed(Place(domain.extent_expr))

    at = cast(indices, torch.int64).at(domains)

    def truth(function: str, a: Value, b: Value) -> Value:
        return call(function, a, b, dtype=torch.bool)

    least = call("mul", size, constant(low, torch.int64), dtype=torch.int64) if low else constant(0, torch.int64)
    outside = truth("logical_or", truth("lt", at, least), truth("ge", at, size))
    if ignored is not None:
        outside = truth("logical_and", outside, truth("ne", at, constant(ignored, torch.int64)))
    where = pulled(x.fusion, torch.bool, domains, outside)
    shown_ = call("where", where.at(where.domains), at, constant(NOTHING, torch.int64), dtype=torch.int64)
    found = pulled(x.fusion, torch.int64, domains, shown_)
    if by_row:
        # Row by row first: the bound depends on the row, which a flat loop over all elements would have to search for.
        found = amin(found, [k for k in range(x.ndim) if k not in counting(x, dim)])
    found = amin(found)
    extent = None if domain.is_ragged else domain.extent_expr
    x.fusion.index_checks.append(IndicesInside(found.tensor, indices.tensor, where.tensor, extent, name))


# --- ranges ------------------------------------------------------------------------------------------------------------


def slice(x: TensorView, dim: int, start: int | None = None, stop: int | None = None, step: int = 1) -> TensorView:
    """`x[..., start:stop:step]` along `dim`, as in Python. A ragged dim is sliced row by row, which changes the lengths.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(slice(ops.as_nested(x, offsets), 1, -2))
    >>> [r.tolist() for r in f.evaluate(torch.arange(6.0), torch.tensor([0, 4, 4, 6])).unbind()]
    [[2.0, 3.0], [], [4.0, 5.0]]
    """
    if step < 1:
        raise ShapeError(f"slice: the step must be positive, got {step}; use flip for the opposite order")
    dim = dim_of("slice", x, dim)
    length = x.domains[dim].row_length
    low = const(0) if start is None else _bound(start, length)
    high = length if stop is None else _bound(stop, length)
    return _ranged("slice", x, dim, low, maximum(high - low + (step - 1), 0) // step, step)


def _ranged(name: str, x: TensorView, dim: int, low: Expr, extent: Expr, step: int = 1) -> TensorView:
    """`extent` positions of `dim` from `low` on, `step` apart; both may depend on the row of a ragged dim, through COORDINATE."""
    domain = x.domains[dim]
    if counted(x, dim):
        part = Part(
            x,
            lambda at, row: at * step + low.substitute({COORDINATE: row}),
            size=lambda row: extent.substitute({COORDINATE: row}),
        )
        return rebuilt(name, [part], dim)
    if isinstance(domain, RaggedIterDomain):
        domains, row = _resized(name, x, dim, extent, domain.host_bound)
        rows = domains[dim]
        places = list[IterDomain | Place | None](domains)
        places[dim] = Place(index_of(rows) * step + _in_row(low, row), (rows, *row.domains))
        return pulled(x.fusion, x.dtype, domains, x.at(tuple(places)))
    new = IterDomain(extent, name=x.fusion.fresh("d"))
    shifted = Place(index_of(new) * step + low, (new,))
    at = tuple(shifted if k == dim else d for k, d in enumerate(x.domains))
    return pulled(x.fusion, x.dtype, (*x.domains[:dim], new, *x.domains[dim + 1 :]), x.at(at))


def split(x: TensorView, sizes: int | Sequence[int], dim: int = 0) -> tuple[TensorView, ...]:
    """`torch.split`. Along a ragged dim every row is split, so parts may be shorter in some rows, or empty; sizes must then be a
    list that covers the longest row.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(*split(ops.as_nested(x, offsets), [2, 3], 1))
    >>> [[r.tolist() for r in piece.unbind()] for piece in f.evaluate(torch.arange(5.0), torch.tensor([0, 4, 5]))]
    [[[0.0, 1.0], [4.0]], [[2.0, 3.0], []]]
    """
    dim = dim_of("split", x, dim)
    domain = x.domains[dim]
    sizes = int(sizes) if isinstance(sizes, Size) else sizes
    if isinstance(domain, RaggedIterDomain):
        if isinstance(sizes, int):
            raise ShapeError(
                f"split: the number of parts of dim {dim} of {shown(x)} is not known while tracing; pass a list of sizes, or use "
                "chunk with a number of parts"
            )
        whole = const(builtins.sum(sizes))
        later = f"split of {shown(x, later=True)}, dim {dim}: the sum of the sizes"
        x.fusion.checks.append(AtLeastLongest(whole, domain, later))
    else:
        extent = x.fusion.fixed(domain.extent_expr)
        if isinstance(sizes, int):
            if sizes < 1:
                raise ShapeError(f"split: the size must be positive, got {sizes}")
            sizes = [builtins.min(sizes, extent - at) for at in range(0, extent, sizes)] or [0]
        if builtins.sum(sizes) != extent:
            raise ShapeError(f"split: the sizes {list(sizes)} do not sum to {extent}, the size of dim {dim} of {shown(x)}")
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(slice(x, dim, a, b) for a, b in itertools.pairwise(ends))


def chunk(x: TensorView, chunks: int, dim: int = 0) -> tuple[TensorView, ...]:
    """`torch.chunk`. Along a ragged dim every row is split into `chunks` parts; the last ones may be empty."""
    dim = dim_of("chunk", x, dim)
    if chunks < 1:
        raise ShapeError(f"chunk: the number of chunks must be positive, got {chunks}")
    domain = x.domains[dim]
    if not isinstance(domain, RaggedIterDomain):
        extent = x.fusion.fixed(domain.extent_expr)
        return split(x, builtins.max(-(-extent // chunks), 1), dim)
    size = ceildiv(domain.length, chunks)
    return tuple(_ranged("chunk", x, dim, size * k, maximum(minimum(size, domain.length - size * k), 0)) for k in range(chunks))


def _bound(position: int, length: Expr) -> Expr:
    return minimum(const(position), length) if position >= 0 else maximum(length + position, 0)


def pad(x: TensorView, dim: int, before: int, after: int, value: Number = 0) -> TensorView:
    """Adds `before` and `after` positions of `value` along `dim`; in a ragged dim, to every row. Along a dim that counts rows,
    the new rows are empty.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(pad(ops.as_nested(x, offsets), 1, 1, 0, 9.0))
    >>> [r.tolist() for r in f.evaluate(torch.arange(3.0), torch.tensor([0, 2, 2, 3])).unbind()]
    [[9.0, 0.0, 1.0], [9.0], [9.0, 2.0]]
    """
    dim = dim_of("pad", x, dim)
    if before < 0 or after < 0:
        raise ShapeError(f"pad: sizes must not be negative, got {before} and {after}; use slice to remove positions")
    domain = x.domains[dim]
    if counted(x, dim):
        return _pad_rows(x, dim, before, after)
    length: Expr = domain.extent_expr
    row = Place(const(0))
    if isinstance(domain, RaggedIterDomain):
        bound = domain.host_bound + domain.component.host_bound * (before + after)
        domains, row = _resized("pad", x, dim, domain.length + (before + after), bound)
        length = _in_row(domain.length, row)
    else:
        domains = list(x.domains)
        domains[dim] = IterDomain(length + (before + after), name=x.fusion.fresh("d"))
    places = list[IterDomain | Place | None](domains)
    new = domains[dim]
    places[dim] = Place(index_of(new) - before, (new,))
    inside = call(
        "logical_and",
        call("ge", position(new), constant(before, torch.int64), dtype=torch.bool),
        call("lt", position(new), computed(Place(length + before, row.domains)), dtype=torch.bool),
        dtype=torch.bool,
    )
    chosen = call("where", inside, x.at(tuple(places)), constant(value, x.dtype), dtype=x.dtype)
    return pulled(x.fusion, x.dtype, domains, chosen)


def _pad_rows(x: TensorView, dim: int, before: int, after: int) -> TensorView:
    """Empty rows before and after those of a dim that counts them."""
    domain = x.domains[dim]
    part = Part(
        x,
        lambda at, row: _clamped(at - before, _size(domain, row)),
        lambda at, row: inside(at - before, _size(domain, row)),
        lambda row: _size(domain, row) + (before + after),
    )
    return rebuilt("pad", [part], dim)


def _clamped(position: Expr, size: Expr) -> Expr:
    """The nearest position that exists; for empty rows, whose length is computed as that of another row, times 0."""
    return maximum(minimum(position, size - 1), 0)


def flip(x: TensorView, dim: int) -> TensorView:
    """Reverses `dim`; a ragged dim within each row, a dim that counts rows as whole rows."""
    dim = dim_of("flip", x, dim)
    domain = x.domains[dim]
    if counted(x, dim):
        part = Part(x, lambda at, row: _size(domain, row) - 1 - at, size=lambda row: _size(domain, row))
        return rebuilt("flip", [part], dim)
    if isinstance(domain, RaggedIterDomain):
        row = _row("flip", x, dim)
        back = Place(_in_row(domain.length, row) - 1 - index_of(domain), (domain, *row.domains))
    else:
        back = Place(domain.extent_expr - 1 - index_of(domain), (domain,))
    return pulled(x.fusion, x.dtype, x.domains, x.at(tuple(back if k == dim else d for k, d in enumerate(x.domains))))


# --- concatenation -----------------------------------------------------------------------------------------------------------


def cat(views: Sequence[TensorView], dim: int = 0) -> TensorView:
    """Concatenates along a regular dim, along a ragged dim (row by row), or along a dim that counts rows (rows after rows).

    In the last two cases, a dense tensor `[B, k, *inner]` counts as B rows of length k.

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
    first = next((v for v in views if any(d.is_ragged for d in v.domains)), views[0])
    dim = dim_of("cat", first, dim)
    dtype = first.dtype
    along = isinstance(first.domains[dim], RaggedIterDomain)
    if counted(first, dim) == [dim + 1]:
        views = [_as_rows(v, dim) if _is_dense_like(first, v) else v for v in views]
    for other in views:
        alike = other.ndim == first.ndim and [d.is_ragged for d in other.domains] == [d.is_ragged for d in first.domains]
        if not alike and not (along and _is_dense_like(first, other)):
            raise ShapeError(
                f"cat of {both(first, other)}: tensors must have the same number of dims, and the same dims must be ragged"
            )
        dtype = torch.promote_types(dtype, other.dtype)
    views = [typed(v, dtype) for v in views]
    if counted(first, dim):
        return _cat_rows(views, dim)
    if along:
        return _cat_ragged(views, dim)
    for other in views[1:]:
        for k, (a, b) in enumerate(zip(first.domains, other.domains, strict=True)):
            if k != dim:
                _alike(first, other, k, a, b)
    new = IterDomain(_total([v.domains[dim].extent_expr for v in views]), name=first.fusion.fresh("d"))
    domains = (*first.domains[:dim], new, *first.domains[dim + 1 :])
    return _joined(views, dim, domains, [v.domains[dim].extent_expr for v in views], ())


def _is_dense_like(first: TensorView, x: TensorView) -> bool:
    """Whether a dense tensor has a dim for each dim of rows of one level."""
    dense = not any(d.is_ragged for d in x.domains)
    return dense and x.ndim == first.ndim and sum(d.is_ragged for d in first.domains) == 1


def _as_rows(x: TensorView, dim: int) -> TensorView:
    """A dense tensor as rows of one length: `dim` counts them, the next dim has their positions."""
    count, length = (x.domains[k].extent_expr for k in (dim, dim + 1))
    offsets = Array(f"sum({length})", recipe=RunningSum(length, COORDINATE, count))
    return nested_by(flatten(x, dim, dim + 1), offsets, count, dim)


def _alike(first: TensorView, other: TensorView, dim: int, a: IterDomain, b: IterDomain) -> None:
    """Checks dims that are not concatenated: they must have the same structure or extent; nothing is broadcast."""
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
    """The element of the tensor that a position of `domains[dim]` falls into; sizes may depend on the indices of `owners`."""
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
    """Row by row. All rows of a dense tensor have the same length."""
    first = next(v for v in views if v.domains[dim].is_ragged)
    for other in views:
        for k, (a, b) in enumerate(zip(first.domains, other.domains, strict=True)):
            if k != dim:
                _alike(first, other, k, a, b)
    lengths, bounds = list[Expr](), list[Expr]()
    for view in views:
        domain = view.domains[dim]
        if isinstance(domain, RaggedIterDomain):
            lengths.append(domain.row_length)
            bounds.append(domain.host_bound)
        else:
            lengths.append(domain.extent_expr)
            bounds.append(math.prod((view.domains[k].extent_expr for k in counting(first, dim)), start=domain.extent_expr))
    domains, row = _resized("cat", first, dim, _total(lengths), _total(bounds))
    return _joined(views, dim, domains, [_in_row(length, row) for length in lengths], row.domains)


def _cat_rows(views: Sequence[TensorView], dim: int) -> TensorView:
    """Rows after rows: concatenated values, partitioned by concatenated offsets; of ragged or separate dims, row by row."""
    domains = views[0].domains
    if domains[dim].is_ragged or any(counting(v, dim + 1) != [dim] or _is_product(v, dim + 1) for v in views):
        return _cat_levels(views, dim)
    ragged = [v.domains[dim + 1] for v in views]
    counts = tuple(d.component.extent_expr for d in ragged if isinstance(d, RaggedIterDomain))
    lengths = tuple(d.row_length for d in ragged)
    names = ", ".join(str(length.substitute({COORDINATE: symbol("c")})) for length in lengths)
    offsets = Array(f"joined({names})", recipe=Joined(lengths, COORDINATE, counts))
    flat = cat([as_flattened(v, component_dim=dim, ragged_dim=dim + 1) for v in views], dim)
    return nested_by(flat, offsets, _total(counts), dim)


def _is_product(x: TensorView, ragged: int) -> bool:
    return any(k != ragged and counting(x, k) == counting(x, ragged) for k in range(x.ndim))


def _cat_levels(views: Sequence[TensorView], dim: int) -> TensorView:
    """Rows with all that is inside them, one tensor after the other in every row of `dim`."""
    first = views[0]
    for other in views[1:]:
        for k, (a, b) in enumerate(zip(first.domains, other.domains, strict=True)):
            if k != dim and k not in counted(first, dim):
                _alike(first, other, k, a, b)

    def part(k: int) -> Part:
        domain = views[k].domains[dim]

        def start(row: Expr) -> Expr:
            return _total([_size(v.domains[dim], row) for v in views[:k]])

        return Part(
            views[k],
            lambda at, row: at - start(row),
            lambda at, row: inside(at - start(row), _size(domain, row)),
            lambda row: _size(domain, row),
        )

    return rebuilt("cat", [part(k) for k in range(len(views))], dim)


def stack(views: Sequence[TensorView], dim: int = 0) -> TensorView:
    """Stacks tensors of one structure along a new dim after their rows."""
    if not views:
        raise ShapeError("stack: needs at least one tensor")
    return cat([unsqueeze(v, dim) for v in views], dim)
