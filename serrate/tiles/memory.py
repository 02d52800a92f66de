"""Loads and stores of traced loops: of plain tensors, and of ragged ones by component and position.

In: a tensor from outside the loop, the keys of an index, a mask. Out: a value that is 0 in lanes without an element (rule 1), or
a statement that stores in the lanes whose own indices exist and are in bounds (rule 4). An index has the same dims as in
`interpret/placing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from serrate.frontend.kernel.machine import refuse
from serrate.frontend.kernel.values import TorchLike
from serrate.frontend.kernel.vocabulary import expand_keys
from serrate.ir.expr import Array, Expr, Less, const, maximum, minimum
from serrate.ir.loops import Write, load, number
from serrate.ir.tile import Axis
from serrate.ir.values import Tensor, call, constant
from serrate.lower.limits import most_of
from serrate.tensor import JaggedTensor
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Dim
from serrate.tiles.elementwise import broadcast_dims, cast
from serrate.tiles.functions import conditions_of
from serrate.tiles.races import refuse_races
from serrate.tiles.values import (
    Condition,
    Feeder,
    Traced,
    TracedTensor,
    TracedTile,
    as_traced,
    mentions,
    plain,
    shown_axes,
)

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace


class TracedStructure:
    """The metadata of a structure, by level."""

    def __init__(self, rows: TracedRows) -> None:
        self._rows = rows

    def max_length(self, level: int = -1) -> Any:
        """The longest row of a level."""
        return self._rows._number("longest", level)

    def num_rows(self, level: int = -1) -> Any:
        """The number of rows of a level."""
        return self._rows._number("rows_of", level)


class TracedRows(TorchLike):
    """A ragged tensor from outside the loop. The program reads the arrays that describe its rows."""

    __slots__ = ("like", "name", "rows", "trace")
    KIND = "a ragged tensor of a kernel"

    def __init__(self, trace: Trace, name: str, like: JaggedTensor, rows: str | None = None) -> None:
        self.trace, self.name, self.like = trace, name, like
        self.rows = rows or name
        """The name of the ragged tensor whose row arrays this one shares, because its rows are the same."""

    @property
    def values(self) -> TracedTensor:
        """The storage that holds all elements."""
        return self.trace.tensor((self.name, "values"), self.like.values)

    @property
    def lengths(self) -> TracedTensor:
        """The lengths of the innermost rows."""
        return self.trace.tensor((self.name, "lengths"), self.like.lengths, self.trace.size((self.rows, "num_rows")))

    @property
    def offsets(self) -> TracedTensor:
        """The offsets of the innermost rows."""
        return self.trace.tensor((self.name, "offsets"), self.like.offsets, self.trace.size((self.rows, "num_rows")) + 1)

    @property
    def starts(self) -> TracedTensor:
        """The starts of the innermost rows."""
        return self.trace.tensor((self.name, "starts"), self.like.starts, self.trace.size((self.rows, "num_rows")))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.like.device

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.like.ndim

    @property
    def structure(self) -> TracedStructure:
        """Its rows, level by level."""
        return TracedStructure(self)

    def _number(self, what: str, *more: Any) -> Any:
        return plain(Traced(number(self.trace.size((self.rows, what, *more))), ()))

    @property
    def num_rows(self) -> Any:
        """The number of innermost rows."""
        return self._number("num_rows")

    @property
    def num_groups(self) -> Any:
        """The number of outermost components."""
        return self._number(self.groups)

    @property
    def groups(self) -> str:
        """The symbol name of the number of outermost components: for rows of one level, the same as that of the rows."""
        rows = self.like.structure.rows
        return "num_rows" if len(rows) == 1 and rows[0].depth == 1 else "num_groups"

    @property
    def max_length(self) -> Any:
        """The longest innermost row."""
        return self._number("max_length")

    @property
    def total_elements(self) -> Any:
        """The number of positions that exist."""
        return self._number("total_elements")

    def total_tiles(self, block: int) -> Any:
        """The total number of tiles of `block` positions in the innermost rows."""
        return self._number("total_tiles", int(block))

    def tile_list(self, block: int) -> tuple[TracedTensor, TracedTensor]:
        """The row of every tile, and the tile's first position in it."""
        made = self.like.tile_list(int(block))
        return (
            self.trace.tensor((self.name, "tile_list", int(block), 0), made[0]),
            self.trace.tensor((self.name, "tile_list", int(block), 1), made[1]),
        )

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes; those of ragged dims are symbols, not numbers."""
        return tuple(self.size(d) for d in range(self.ndim))

    def size(self, dim: int | None = None) -> Any:
        """The size of a dim, or of all."""
        if dim is None:
            return self.shape
        own = self.like.dims[dim % self.ndim]
        if own.ragged is not None:
            return self.like.size(dim)
        if own.axis is not None:
            return self._number(self.groups)
        return self.values.shape[own.values_dim]

    def __getitem__(self, key: Any) -> Any:
        return self.trace.load(self, key)

    def __setitem__(self, key: Any, x: Any) -> None:
        self.trace.store(self, key, x)

    def __repr__(self) -> str:
        return f"TracedRows({self.name})"


@dataclass
class ResolvedIndex:
    """The keys of an index as index expressions, and the dims of the result."""

    axes: list[Axis | None] = field(default_factory=list)
    indices: list[Expr] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    fed: list[Feeder] = field(default_factory=list)


def resolve_index(trace: Trace, keys: Sequence[Any], extent: Callable[[int], Expr], broadcast: Sequence[bool]) -> ResolvedIndex:
    """Resolves every key to an index expression, and collects their axes in the order of dims. `extent` is asked only for dims
    whose size a key depends on, because the host must then know it; `broadcast` marks dims of size 1, whose one element all lanes
    of a tile read."""
    found = ResolvedIndex()
    rest = enumerate(broadcast)
    values: list[Traced | None] = [None if k is None else _key(trace, k, extent, *next(rest)) for k in keys]
    blocks = [v for v in values if v is not None and v.ndim > 1]
    broadcast_axes, moved = broadcast_dims(trace, blocks, "an index")
    new = dict(zip(map(id, blocks), moved, strict=True))
    first = True
    for value in values:
        others = [*found.axes, *broadcast_axes] if first else found.axes
        if value is None:
            found.axes.append(None)
            continue
        value = new.get(id(value), value)
        if value.ndim > 1:
            if first:
                found.axes += broadcast_axes
                first = False
        elif value.ndim == 1 and (axis := value.axes[0]) is not None:
            shared = _shared_dim(axis, others)
            if shared is None:
                *_, shared = trace.distinct([*others, axis])
                found.axes.append(shared)
            if shared is not None and shared is not axis:
                value = value.renamed({axis: shared})
        elif value.ndim == 1:
            found.axes.append(None)
        expr = value.expr
        assert expr is not None
        found.indices.append(expr)
        found.conditions += value.conditions
        found.fed += value.fed
    for c in found.conditions:
        for axis in trace.axes_open:
            if c.row and axis.block != 1 and axis not in found.axes and mentions(c.holds, axis):
                refuse(
                    "an index by a jagged tile also needs the tile's rows: "
                    "index them too, as in x[rows, tile] or starts[:, None] + tile.index"
                )
    return found


def _shared_dim(axis: Axis, others: Sequence[Axis | None]) -> Axis | None:
    """The dim that a 1-D key shares with other keys: keys over the same tile share one, fixed lanes do not."""
    if not (axis.looped or axis.original.site is not None):
        return None
    return next((a for a in others if a is not None and a.original is axis.original), None)


def _key(trace: Trace, key: Any, extent: Callable[[int], Expr], dim: int, broadcast: bool) -> Traced:
    if broadcast and isinstance(key, TracedTile):
        return Traced(number(const(0)), key.index.axes, key.index.conditions)
    if isinstance(key, slice):
        bounds = [_bound(trace, each) for each in (key.start, key.stop, key.step)]
        positions = range(trace.static(extent(dim), "a slice needs"))[slice(*bounds)]
        axis = trace.fixed_axis(len(positions))
        if axis is None:
            return Traced(number(const(positions.start if len(positions) else 0)), [None])
        return Traced(number(const(positions.start) + axis.position * positions.step), [axis])
    if isinstance(key, bool) or not isinstance(key, (int, Traced, TracedTile, torch.Tensor)):
        refuse(f"an index must be a tile, a value, a number, a slice or None, not {type(key).__name__}")
    if isinstance(key, torch.Tensor):
        refuse("an index must not be a tensor from outside the loop: index it by tiles first, as idx[tile]")
    if isinstance(key, int) and key < 0:
        return Traced(number(extent(dim) + int(key)), ())
    value = as_traced(key)
    if value.dtype.is_floating_point or value.dtype is torch.bool:
        refuse(f"an index must be an integer, not {value.dtype}: convert it, or use torch.where or extra_mask= for a mask")
    value = cast(value, torch.int64)
    if not value.axes and value.expr is not None and trace.is_argument(value.expr):
        # Negative arguments count from the end, as plain numbers do: until an argument varies, it is a plain number.
        value = Traced(
            number(value.expr + minimum(maximum(value.expr * -1, 0), 1) * extent(dim)), (), value.conditions, value.fed
        )
    return Traced(number(trace.index_of(value)), value.axes, value.conditions, value.fed)


def _bound(trace: Trace, bound: Any) -> int | None:
    """A bound of a slice; a size or an argument is compiled in."""
    if bound is None or isinstance(bound, int):
        return bound
    if isinstance(bound, Traced) and bound.expr is not None:
        return trace.static(bound.expr, "a slice needs")
    refuse("the bounds of a slice must be known when the kernel is compiled: use hl.tile, or hl.arange and an offset")


@dataclass
class IndexedElements:
    """The elements that an index selects: their positions in memory, and the conditions under which a lane has one."""

    tensor: Tensor
    place: ResolvedIndex
    where: tuple[Expr, ...]
    guard: list[Less]


def _inside(guard: list[Less], index: Expr, size: Expr) -> None:
    """Adds guards that an index is in bounds, unless its range proves it."""
    if index.bounds[0] is None or index.bounds[0] < 0:
        guard.append(Less(const(-1), index))
    if not Less(index, size).proven:
        guard.append(Less(index, size))


def target_of(trace: Trace, tensor: Any, key: Any, *, reads: bool) -> IndexedElements:
    """The elements that an index of a plain or ragged tensor selects; in reads, dims of size 1 broadcast over a tile."""
    if isinstance(tensor, TracedRows):
        return _rows(trace, tensor, key, reads)
    if not isinstance(tensor, TracedTensor):
        refuse(f"loads and stores need a tensor created before the loop, not a {type(tensor).__name__}")
    broadcast = [reads and size.value == 1 for size in tensor.sizes]
    place = resolve_index(trace, expand_keys(key, tensor.ndim), tensor.sizes.__getitem__, broadcast)
    guard = [c.holds for c in place.conditions]
    for index, size in zip(place.indices, tensor.sizes, strict=True):
        _inside(guard, index, size)
    return IndexedElements(tensor.tensor, place, tuple(place.indices), guard)


def _rows(trace: Trace, jt: TracedRows, key: Any, reads: bool) -> IndexedElements:
    """Component, then a position on each level, then columns: every step looks up the start and end of its row."""
    like, values = jt.like, jt.values
    structure = like.structure
    groups = trace.size((jt.rows, jt.groups))

    def extent(dim: int) -> Expr:
        own = like.dims[dim]
        if own.ragged is not None:
            return trace.size((jt.rows, "longest", own.ragged))
        return values.sizes[own.values_dim] if own.axis is None else groups

    broadcast = [reads and d.axis is None and values.sizes[d.values_dim].value == 1 for d in like.dims]
    place = resolve_index(trace, expand_keys(key, like.ndim), extent, broadcast)
    guard = [c.holds for c in place.conditions]
    where: dict[int, Expr] = {}
    component: Expr = const(0)
    position: Expr = const(0)
    for dim, index in zip(like.dims, place.indices, strict=True):
        if dim.axis is None:
            _inside(guard, index, values.sizes[dim.values_dim])
            where[dim.values_dim] = index
            continue
        rows = structure.rows[dim.axis]
        if dim.level is None:
            component = index
            asked: list[Less] = []
            outermost = trace.array(jt.rows, dim.axis, "offsets0")
            trace.counted[outermost] = groups
            _inside(asked, index, groups)
            guard += asked
            place.conditions += [Condition(g, True) for g in asked if g not in {c.holds for c in place.conditions}]
            continue
        column = dim.level >= rows.depth
        _limit(trace, jt, dim, rows, values.sizes[dim.values_dim])
        if column:
            length: Expr = trace.array(jt.rows, dim.axis, "counts")[component]
        else:
            offsets = trace.array(jt.rows, dim.axis, f"offsets{dim.level}")
            length = offsets[component + 1] - offsets[component]
        asked = [Less(const(-1), index)] if index.bounds[0] is None or index.bounds[0] < 0 else []
        asked.append(Less(index, length))
        guard += asked
        place.conditions += [Condition(g, True) for g in asked]
        if column:
            begin = trace.array(jt.rows, dim.axis, "where")[component]
            where[dim.values_dim] = begin + position * length + index if rows.packed else index
        elif dim.level == rows.depth - 1:
            position = index
            plain_rows = rows.starts is None and not (rows.columns is not None and rows.packed)
            begin = (
                trace.array(jt.rows, dim.axis, f"offsets{dim.level}")[component]
                if plain_rows
                else trace.array(jt.rows, dim.axis, "where")[component]
            )
            where[dim.values_dim] = begin + index
        else:
            component = trace.array(jt.rows, dim.axis, f"offsets{dim.level}")[component] + index
    return IndexedElements(values.tensor, place, tuple(where[d] for d in range(values.ndim)), list(dict.fromkeys(guard)))


def _limit(trace: Trace, jt: TracedRows, dim: Dim, rows: Rows, extent: Expr) -> None:
    """Records upper bounds of the arrays that describe the rows of a dim, whose values have `extent` positions."""
    assert dim.axis is not None and dim.level is not None and dim.ragged is not None
    packed = rows.columns is not None and rows.packed
    if dim.level >= rows.depth:
        _at_most(trace, trace.array(jt.rows, dim.axis, "counts"), extent)
        if not packed:
            return
    else:
        innermost, offsets = dim.level == rows.depth - 1, trace.array(jt.rows, dim.axis, f"offsets{dim.level}")
        if innermost and not packed:
            _at_most(trace, offsets, extent)
        else:
            count = trace.size((jt.rows, "rows_of", dim.ragged if innermost else dim.ragged + 1))
            _at_most(trace, offsets, most_of(offsets, count) if innermost else count)
        if not innermost or (rows.starts is None and not packed):
            return
    _at_most(trace, trace.array(jt.rows, dim.axis, "where"), extent)


def _at_most(trace: Trace, array: Array, extent: Expr) -> None:
    """Records an upper bound of the elements of an array. Several tensors may have values in the rows that it describes."""
    trace.limits[array] = minimum(trace.limits.get(array, extent), extent)


def read(trace: Trace, tensor: Any, key: Any, extra_mask: Any = None) -> Traced:
    """`tensor[key]`: 0 in lanes without an element."""
    target = target_of(trace, tensor, key, reads=True)
    guard = [*_masked(trace, target, extra_mask), *target.guard]
    place = target.place
    if len(target.where) == 1:
        trace.loaded.add((target.tensor.name, target.where[0]))
    value = load(target.tensor, target.where, tuple(dict.fromkeys(guard)))
    return trace.read(target.tensor, Traced(value, place.axes, place.conditions, place.fed))


def _masked(trace: Trace, target: IndexedElements, extra_mask: Any) -> tuple[Less, ...]:
    if extra_mask is None:
        return ()
    mask = as_traced(extra_mask)
    if mask.dtype is not torch.bool:
        refuse(f"extra_mask must be bool, not {mask.dtype}")
    return conditions_of(trace, _fitted(trace, target, mask, "extra_mask"))


def _fitted(trace: Trace, target: IndexedElements, value: Traced, what: str) -> Traced:
    """The value in the axes of an index, which must have all of its dims."""
    index = Traced(constant(0, torch.int64), target.place.axes)
    fits = value.ndim <= len(target.place.axes)
    if fits:
        axes, (kept, _) = broadcast_dims(trace, [index, value], what)
        fits = all(a is None or b is not None for a, b in zip(axes, kept.axes, strict=True))
    if not fits:
        refuse(f"{what} has the dims {shown_axes(value.axes)}, but the index has {shown_axes(target.place.axes)}")
    own = target.place.axes[len(axes) - value.ndim :]
    return value.renamed({a: b for a, b in zip(value.axes, own, strict=True) if a is not None and b is not None and a is not b})


def write(trace: Trace, tensor: Any, key: Any, x: Any, extra_mask: Any = None, *, add: bool = False) -> None:
    """`tensor[key] = x`, in the lanes whose indices exist and are in bounds."""
    if not trace.axes_open:
        refuse("a store by tiles belongs inside a loop over tiles")
    target = target_of(trace, tensor, key, reads=False)
    value = as_traced(x)
    if not isinstance(value, Traced):
        refuse(f"a stored value must be a tile value, a tensor or a number, not {type(x).__name__}")
    guard = tuple(dict.fromkeys((*_masked(trace, target, extra_mask), *target.guard)))
    value = _fitted(trace, target, value, "the stored value")
    kind = target.tensor.dtype
    stored = value.value if value.dtype == kind else call("cast", value.value, dtype=kind)
    if not add:
        refuse_races(trace, target, guard, stored, value, masked=extra_mask is not None)
    lanes = tuple(a.block_lane for a in target.place.axes if a is not None)
    trace.written(target.tensor)
    trace.emit(Write(lanes, guard, target.tensor, target.where, stored, add))


def rows_key(x: JaggedTensor) -> tuple[int, ...]:
    """The rows of a ragged tensor as a key, by identity, not equality; valid while they are alive."""
    return tuple(map(id, x.structure.rows))


def first_of(name: str, env: Mapping[str, Any]) -> str:
    """The first of the ragged tensors whose rows are identical to those of `name`."""
    mine = rows_key(env[name])
    return next(other for other, x in env.items() if isinstance(x, JaggedTensor) and rows_key(x) == mine)


def offsets_array(name: str, axis: int, what: str) -> Array:
    """The symbol of one array that describes a ragged tensor's rows."""
    return Array(f"{name}_{what}" if axis == 0 else f"{name}_{what}_of{axis}")
