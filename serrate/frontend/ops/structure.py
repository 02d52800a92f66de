"""Operations that change the view of a tensor without moving data: nesting, flattening, permuting, unit dims.

In: a `TensorView`. Out: a view of the same memory under other logical domains (`set` copies).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile
from math import prod

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import index_into, match
from serrate.frontend.ops.common import counted, dim_of
from serrate.frontend.shapes import shown, size_shown
from serrate.ir.domains import COORDINATE, IterDomain, identity_of
from serrate.ir.expr import Array, Expr, const
from serrate.ir.fusion import AtLeastLongest, Equal, Offsets, Products, RowsInside, RowsOfOffsets
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import combine, cover, product, spread
from serrate.ir.recipes import RunningSum
from serrate.ir.tile import Store
from serrate.ir.transforms import merge, split
from serrate.ir.values import Tensor
from serrate.ir.view import Size, TensorView


def as_nested(
    x: TensorView,
    offsets: TensorView | None = None,
    *,
    lengths: TensorView | None = None,
    starts: TensorView | None = None,
    ragged_dim: int = 0,
) -> TensorView:
    """Views dim `ragged_dim` as (component, ragged) by K+1 offsets, by K lengths, or by K starts and lengths; no data moves.

    Applied to the component dim of a nested tensor, it nests again: documents > sentences > words. Multi-dimensional offsets
    `[G, K+1]` have one row per position of the dims before `ragged_dim`, or per row if that dim is ragged; every component then
    has K parts. With `starts`, there may be gaps between rows: padded storage and aligned blocks are read in place.

    >>> from serrate import ir
    >>> with ir.Fusion() as f:
    ...     x, off = f.input((None, 4), torch.float32), f.input((4,), torch.int64)
    ...     print(as_nested(x, off).shape)
    (3, 'r0', 4)
    """
    given = {"offsets": offsets, "lengths": lengths, "starts": starts}
    named = {name: view for name, view in given.items() if view is not None}
    if tuple(named) not in (("offsets",), ("lengths",), ("lengths", "starts")):
        raise ShapeError(f"as_nested: pass offsets, or lengths, or starts and lengths; got {', '.join(named) or 'none of them'}")
    for name, view in named.items():
        if view.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"as_nested: {name} must be int32 or int64, got {view.dtype}")
        if view.ndim != 1 and (name != "offsets" or view.ndim == 0):
            raise ShapeError(f"as_nested: {name} must have one dim, got {shown(view)}")
    if offsets is not None:
        count = offsets.domains[-1].extent_expr - 1
        return nested_by(x, _array(offsets), count, ragged_dim, offsets.domains[:-1])
    assert lengths is not None
    count, array = lengths.domains[0].extent_expr, _array(lengths)
    if starts is None:
        summed = Array(f"sum({array.name}[c])", recipe=RunningSum(array[COORDINATE], COORDINATE, count))
        return nested_by(x, summed, count, ragged_dim)
    _require(x, starts.domains[0], count, "as_nested: the numbers of starts and of lengths")
    dim = dim_of("as_nested", x, ragged_dim)
    names = (x.fusion.fresh("c"), x.fusion.fresh("r"))
    pair = partition(x.domains[dim], _array(starts), count, lengths=array, names=names, program=x.fusion.identity)
    x.fusion.checks.append(RowsInside(_array(starts), array, x.domains[dim].extent_expr))
    return viewed(x, (*x.domains[:dim], *pair, *x.domains[dim + 1 :]))


def as_product(
    x: TensorView,
    rows: TensorView,
    columns: TensorView,
    *,
    starts: TensorView | None = None,
    ragged_dim: int = 0,
    packed: bool = True,
) -> TensorView:
    """Views a dim as a product of two ragged dims, (component, rows, columns), by K+1 offsets of each; no data moves.

    Component c has `rows[c+1] - rows[c]` rows of `columns[c+1] - columns[c]` elements each (queries by keys of one sequence).
    They are packed in dim `ragged_dim`; if not `packed`, that dim holds the rows, and the next dim their columns, padded. With K
    `starts`, there may be gaps between components.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, q, k = f.input((None,), torch.float32), f.input((3,), torch.int64), f.input((3,), torch.int64)
    ...     f.output(ops.sum(ops.as_product(x, q, k), 2))
    >>> f.evaluate(torch.arange(8.0), torch.tensor([0, 2, 3]), torch.tensor([0, 3, 5])).unbind()
    (tensor([ 3., 12.]), tensor([13.]))
    """
    given = (("rows", rows), ("columns", columns), *((("starts", starts),) if starts is not None else ()))
    for name, view in given:
        if view.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"as_product: {name} must be int32 or int64 offsets, got {view.dtype}")
        if view.ndim != 1:
            raise ShapeError(f"as_product: {name} must be offsets of one dim, got {shown(view)}")
    dim, fusion = dim_of("as_product", x, ragged_dim), x.fusion
    if not packed and dim + 1 >= x.ndim:
        raise ShapeError(f"as_product: unpacked columns are in the dim after dim {dim}, but {shown(x)} has no such dim")
    count, widths = rows.domains[0].extent_expr - 1, _array(columns)
    _require(x, columns.domains[0], count + 1, "as_product: the numbers of offsets of rows and of columns")
    extent = x.domains[dim].extent_expr
    if starts is not None:
        _require(x, starts.domains[0], count, "as_product: the numbers of starts and of rows")
    if packed or starts is not None:
        component = IterDomain(count, name=fusion.fresh("c"), pairing=identity_of(_array(rows), fusion.identity))
        first = rows_under(component, _array(rows), fusion.fresh("r"))
    else:
        names = (fusion.fresh("c"), fusion.fresh("r"))
        component, first = partition(x.domains[dim], _array(rows), count, names=names, program=fusion.identity)
    second = rows_under(component, widths, fusion.fresh("r"))
    stored: tuple[IterDomain, ...]
    if starts is not None:
        area = product(first, second, bound=extent) if packed else first
        stored, after_dim = (spread(component, area, _array(starts), extent),), dim + 1
        fusion.checks.append(Products(_array(rows), widths, extent, _array(starts), packed))
    elif packed:
        stored, after_dim = (combine(component, product(first, second, total=extent)),), dim + 1
        fusion.checks.append(Products(_array(rows), widths, extent))
    else:
        stored, after_dim = x.tensor.storage[dim : dim + 1], dim + 1
        fusion.checks.append(Products(_array(rows), widths, extent, packed=False))
    if not packed:
        width = x.domains[dim + 1].extent_expr
        stored, after_dim = (*stored, cover(second, width)), dim + 2
        fusion.checks.append(AtLeastLongest(width, second, f"as_product: dim {dim + 1}, which holds the columns,"))
    if [d.uid for d in x.tensor.storage[:after_dim]] != [d.uid for d in x.domains[:after_dim]]:
        raise ShapeError(
            f"as_product: dims up to dim {dim} of {shown(x)} are not contiguous in memory; copy it first with ops.set"
        )
    storage = (*x.tensor.storage[:dim], *stored, *x.tensor.storage[after_dim:])
    logical = (*x.domains[:dim], component, first, second, *x.domains[after_dim:])
    return fusion.view(Tensor(fusion.fresh("T"), x.dtype, logical, storage, x.tensor.role, base=x.tensor.memory))


def rows_under(
    component: IterDomain, offsets: Array, name: str, bound: Expr | None = None, pairing: Hashable = None
) -> RaggedIterDomain:
    """Further rows of a component, by offsets; they get the component's identity unless another is given."""
    return RaggedIterDomain(
        offsets[component.extent_expr],
        name=name,
        pairing=component.pairing if pairing is None else pairing,
        component=component,
        length=offsets[COORDINATE + 1] - offsets[COORDINATE],
        row_start=offsets[COORDINATE],
        bound=bound,
    )


def _array(view: TensorView) -> Array:
    return Array(view.tensor.memory.name)


def nested_by(x: TensorView, offsets: Array, count: Expr, ragged_dim: int, leading: Sequence[IterDomain] = ()) -> TensorView:
    """Views a dim as (component, ragged) by an array of `count` + 1 offsets, or by one such row per position of `leading`."""
    dim = dim_of("nested_by", x, ragged_dim)
    domain = x.domains[dim]
    names = (x.fusion.fresh("c"), x.fusion.fresh("r"))
    under: tuple[IterDomain, ...] = ()
    if isinstance(domain, RaggedIterDomain):
        if len(leading) != 1:
            raise ShapeError(
                f"as_nested: dim {dim} of {shown(x)} is ragged, so offsets need a row for each of its components, [components, "
                f"K+1]; got {len(leading) + 1} dims. To nest the component dim, pass 1-D offsets for that dim"
            )
        _require(x, leading[0], domain.component.extent_expr, "as_nested: the number of rows of offsets and of components")
    elif leading:
        if len(leading) > dim:
            raise ShapeError(f"as_nested: offsets have {len(leading)} leading dims, but {dim} precede dim {dim} of {shown(x)}")
        under = x.domains[dim - len(leading) : dim]
        for own, other in zip(under, leading, strict=True):
            _require(x, other, own.extent_expr, "as_nested: the number of rows of offsets and of positions before the dim")
    component, ragged = partition(domain, offsets, count, under=under, names=names, program=x.fusion.identity)
    # Checked here, not where rows are read: a program may read only part of its input.
    x.fusion.checks.append(RowsOfOffsets(offsets, count, domain) if leading else Offsets(offsets, domain.extent_expr))
    return viewed(x, (*x.domains[:dim], component, ragged, *x.domains[dim + 1 :]))


def viewed(x: TensorView, logical: Sequence[IterDomain]) -> TensorView:
    """The memory of `x` under other logical domains."""
    fusion = x.fusion
    return fusion.view(Tensor(fusion.fresh("T"), x.dtype, tuple(logical), x.tensor.storage, x.tensor.role, base=x.tensor.memory))


def as_flattened(x: TensorView, *, component_dim: int = 0, ragged_dim: int = 1) -> TensorView:
    """Views a (component, ragged) pair as the dim that was partitioned; the inverse of `as_nested`."""
    c, r = dim_of("as_flattened", x, component_dim), dim_of("as_flattened", x, ragged_dim)
    if not x.domains[r].is_ragged:
        raise ShapeError(f"as_flattened: dim {r} of {shown(x)} is not ragged; flatten makes one dim of regular ones")
    flat = combine(x.domains[c], x.domains[r])
    logical = [d for k, d in enumerate(x.domains) if k != r]
    logical[c if c < r else c - 1] = flat
    return viewed(x, logical)


def flatten(x: TensorView, start: int = 0, end: int = -1) -> TensorView:
    """Merges regular dims `start` to `end`; no data moves. Use `as_flattened` for a component and its rows."""
    first, last = dim_of("flatten", x, start), dim_of("flatten", x, end)
    if first > last:
        raise ShapeError(f"flatten: start_dim {start} comes after end_dim {end}")
    merged = x.domains[first]
    for dim, domain in enumerate(x.domains[first + 1 : last + 1], first + 1):
        _check_merged(x, dim - 1, dim)
        merged = merge(merged, domain)
    return viewed(x, (*x.domains[:first], merged, *x.domains[last + 1 :]))


def _check_merged(x: TensorView, outer: int, inner: int) -> None:
    """Raises if a component would be merged with anything but its rows, or rows with a dim before them."""
    a, b = x.domains[outer], x.domains[inner]
    if isinstance(b, RaggedIterDomain):
        if b.component.uid == a.uid:
            raise ShapeError(f"flatten: dims {outer} and {inner} of {shown(x)} are a component and its rows; use as_flattened")
        raise ShapeError(f"flatten: dim {inner} of {shown(x)} is ragged; only dims after it can be merged with it")
    for dim in (outer, inner):
        if counted(x, dim):
            raise ShapeError(f"flatten: dim {dim} of {shown(x)} counts rows and cannot be merged")


def unflatten(x: TensorView, dim: int, sizes: Sequence[int | Size]) -> TensorView:
    """Splits a regular dim into several, row-major; one of the sizes may be -1. No data moves.

    >>> from serrate import ir
    >>> with ir.Fusion() as f:
    ...     print(unflatten(f.input((None, 12), torch.float32), 1, (3, -1)).shape)
    (n0, 3, 4)
    """
    dim = dim_of("unflatten", x, dim)
    domain = x.domains[dim]
    if domain.is_ragged or domain.pairing is not None:
        raise ShapeError(f"unflatten: dim {dim} of {shown(x)} belongs to rows, which have no common length")
    symbol = next((k for k, size in enumerate(sizes) if isinstance(size, Size)), None)
    numbers = [-1 if k == symbol else int(size) for k, size in enumerate(sizes)]
    if symbol is not None:
        others, size = [n for k, n in enumerate(numbers) if k != symbol], sizes[symbol]
        if isinstance(size, Size) and min(others, default=1) > 0:
            # It follows from the others.
            what = f"unflatten of dim {dim}: its extent and the product of the sizes"
            _require(x, domain, size.expr * prod(others), what)
        else:
            numbers[symbol] = int(size)
    unknown = [k for k, size in enumerate(numbers) if size == -1]
    least_first = 1 if unknown else 0  # with a first size of 0, -1 could be any size
    if len(unknown) > 1 or any(size < (1 if k else least_first) for k, size in enumerate(numbers) if k not in unknown):
        raise ShapeError(
            f"unflatten: sizes must be positive, and at most one may be -1; the first may be 0 if none is -1; got {tuple(sizes)}"
        )
    known = prod(size for size in numbers if size != -1)
    whole = const(known) if not unknown else domain.extent_expr // known * known
    _require(x, domain, whole, f"unflatten: {tuple(sizes)} does not divide dim {dim}: its extent and the sizes")
    parts: list[IterDomain] = []
    # Sizes after the unknown one are split off from the inside, those before it from the outside.
    for size in reversed(numbers[unknown[0] + 1 if unknown else 1 :]):
        domain, inner = split(domain, size)
        parts.insert(0, inner)
    outer: list[IterDomain] = []
    for size in numbers[: unknown[0]] if unknown else ():
        first, domain = split(domain, size, inner=False)
        outer.append(first)
    return viewed(x, (*x.domains[:dim], *outer, domain, *parts, *x.domains[dim + 1 :]))


def reshape(x: TensorView, sizes: Sequence[int | Size]) -> TensorView:
    """A dense tensor with another shape, row-major; one of the sizes may be -1. No data moves.

    For a ragged `x`, use `flatten` and `unflatten` on its regular dims, `as_flattened` on rows.
    """
    if any(d.is_ragged for d in x.domains):
        raise ShapeError(f"reshape: {shown(x)} is ragged; use flatten and unflatten on its regular dims, as_flattened on rows")
    kept = _kept(x, sizes)
    rest = sizes[kept:]
    flat = flatten(x, kept) if x.ndim - kept > 1 else x
    return flat if len(rest) == 0 or (len(rest) == 1 and rest[0] == -1) else unflatten(flat, kept, rest)


def _kept(x: TensorView, sizes: Sequence[int | Size]) -> int:
    """The number of leading dims of unknown size that do not change."""
    pairs = zip(sizes, (d.extent_expr for d in x.domains), strict=False)
    kept = len(list(takewhile(lambda pair: isinstance(pair[0], Size) and pair[0].expr is pair[1], pairs)))
    return kept if kept < x.ndim or kept == len(sizes) else 0


def _require(x: TensorView, domain: IterDomain, size: Expr, what: str) -> None:
    difference = (domain.extent_expr - size).value
    if difference is None:
        x.fusion.checks.append(Equal(domain.extent_expr, size, what))
    elif difference != 0:
        raise ShapeError(f"{what} differ: {size_shown(x.fusion, domain)} and {size}")


def unsqueeze(x: TensorView, dim: int) -> TensorView:
    """Inserts a dim of extent 1 before dim `dim`, but not between a component and its rows."""
    if not -x.ndim - 1 <= dim <= x.ndim:
        raise ShapeError(f"unsqueeze: dim {dim} does not exist: {shown(x)} with a new dim has dims 0 to {x.ndim}")
    place = dim % (x.ndim + 1)
    return viewed(x, (*x.domains[:place], IterDomain(1, name=x.fusion.fresh("o")), *x.domains[place:]))


def squeeze(x: TensorView, dim: int | None = None) -> TensorView:
    """Removes dim `dim` if its extent is 1; by default, all such dims."""
    dims = range(x.ndim) if dim is None else [dim_of("squeeze", x, dim)]
    gone = {k for k in dims if x.domains[k].extent == 1 and not x.domains[k].is_ragged and x.domains[k].pairing is None}
    return viewed(x, [d for k, d in enumerate(x.domains) if k not in gone]) if gone else x


def broadcast_to(x: TensorView, like: TensorView) -> TensorView:
    """`x` broadcast to the dims of `like`, including ragged ones.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     y = ops.as_nested(x, offsets)
    ...     f.output(ops.broadcast_to(ops.sum(y, 1, keepdim=True), y))
    >>> [r.tolist() for r in f.evaluate(torch.arange(3.0), torch.tensor([0, 2, 3])).unbind()]
    [[1.0, 1.0], [2.0]]
    """
    if x.ndim > like.ndim:
        raise ShapeError(f"broadcast_to: {shown(x)} has more dims than {shown(like)}")
    for own, to in zip(x.domains, like.domains[like.ndim - x.ndim :], strict=True):
        match(x.fusion, f"broadcast_to: {shown(x)} to {shown(like)}", to, own, "broadcast_to")
    out = x.fusion.tensor(x.dtype, like.domains)
    value = x.at(index_into(x, like.domains))
    return x.fusion.define([out], like.domains, Store(out, like.domains, value))[0]


def set(x: TensorView) -> TensorView:
    """A copy of `x` with the same structure."""
    out = x.fusion.tensor(x.dtype, x.domains)
    return x.fusion.define([out], x.domains, Store(out, x.domains, x.at(index_into(x, x.domains))))[0]
