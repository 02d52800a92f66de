"""The dims of an indexed result: `x[tile_i, tile_j]`, `x[start + tile.index, :]`, `x[rows[:, None] + cols[None, :]]`.

In: the keys of an index, and the extent that each one indexes. Out: a `ConcreteIndex`: one index tensor per key; all of them
broadcast to the dims of the result.

a tile, or a 1-D value             adds a dim; keys of the same tile share one. A tile that reads a dim of size 1 reads
its one element in every lane, as broadcasting does
a value of two dims or more        broadcast with the other such values, at the position of the first
a slice                            adds a dim
a scalar                           no dim
    None                               a dim of size 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from serrate.frontend.kernel.machine import refuse
from serrate.frontend.kernel.values import Lanes
from serrate.interpret.axes import ConcreteAxis, FedLanes, LaneMask, Pending, fixed, spread
from serrate.interpret.values import ConcreteTile, ConcreteValue, value_of


@dataclass
class ConcreteIndex:
    """The keys of an index, in the dims of its result."""

    axes: list[ConcreteAxis | None] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    indices: list[Tensor] = field(default_factory=list)
    """One for each key except None, with as many dims as the result."""
    dims: list[frozenset[int]] = field(default_factory=list)
    """The dims of the result that each of these depends on."""
    given: list[Any] = field(default_factory=list)
    """Each of these as the user wrote it."""
    conditions: list[LaneMask] = field(default_factory=list)
    fed: list[FedLanes] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)

    def value(self, data: Tensor) -> ConcreteValue:
        """A value over these dims."""
        return ConcreteValue(data, self.axes, self.conditions, self.fed, self.pending)

    def exists(self) -> Tensor:
        """The lanes in which all keys exist."""
        whole = self.value(torch.empty((), device="cpu").expand(self.sizes))
        if whole.pending:
            refuse(
                "an index by a jagged tile also needs its rows: "
                "index them too, as in x[rows, tile] or starts[:, None] + tile.index"
            )
        mask = torch.ones(self.sizes, dtype=torch.bool, device="cpu")
        for condition in whole.conditions:
            mask = mask & condition.mask
        return mask


def place(keys: Sequence[Any], extents: Sequence[int], broadcast: Sequence[bool] = ()) -> ConcreteIndex:
    """The dims of a result, and every key in terms of them. `extents` has one number per key except None; `broadcast` says for
    each of these keys whether its dim has size 1, so that all lanes of a tile read its one element."""
    placed = ConcreteIndex()
    parts: list[tuple[Any, list[int]]] = []
    blocks = [k for k in keys if isinstance(k, ConcreteValue) and k.ndim > 1]
    block_axes, block_sizes = _joint(blocks)
    first: int | None = None
    waiting: list[tuple[int, ConcreteValue, int]] = []
    rest = zip(extents, broadcast or [False] * len(extents), strict=True)
    for k in keys:
        if k is None:
            placed.axes.append(None)
            placed.sizes.append(1)
            continue
        extent, single = next(rest)
        value = _indices(k, extent)
        if single and isinstance(k, ConcreteTile):
            value = ConcreteValue(torch.zeros_like(value.data), value.axes, value.conditions, value.fed, value.pending)
        dims: list[int]
        if value.ndim == 0:
            dims = []
        elif value.ndim > 1:
            if first is None:
                first = len(placed.axes)
                placed.axes += block_axes
                placed.sizes += block_sizes
            dims = list(range(first + len(block_axes) - value.ndim, first + len(block_axes)))
        else:
            axis = value.axes[0]
            if axis is not None and axis.named and axis in placed.axes:
                dims = [placed.axes.index(axis)]
            elif axis is not None and axis.named and axis in block_axes:
                # Its position is known once the block is.
                waiting.append((len(parts), value, block_axes.index(axis)))
                dims = []
            else:
                dims = [len(placed.axes)]
                placed.axes.append(axis)
                placed.sizes.append(value.data.shape[0])
        parts.append((value, dims))
        placed.given.append(k)
    for at, value, dim in waiting:
        assert first is not None
        parts[at] = (value, [first + dim])
    ndim = len(placed.axes)
    for value, dims in parts:
        placed.indices.append(spread(value.data, dims, ndim))
        placed.dims.append(frozenset(dims))
        placed.conditions += (c.moved(dims, ndim) for c in value.conditions)
        placed.fed += (f.moved(dims, ndim) for f in value.fed)
        placed.pending += value.pending
    return placed


def _joint(blocks: Sequence[ConcreteValue]) -> tuple[list[ConcreteAxis | None], list[int]]:
    from serrate.interpret.functions import joint_dims

    return joint_dims([(b.axes, b.data.shape) for b in blocks], "an index")


def _indices(key: Any, extent: int) -> ConcreteValue:
    """One key as a value of int64."""
    if isinstance(key, slice):
        positions = range(extent)[key]
        return ConcreteValue(torch.tensor(list(positions), dtype=torch.int64, device="cpu"), [fixed(len(positions))])
    if isinstance(key, (Lanes, Tensor)) or (isinstance(key, int) and not isinstance(key, bool)):
        value: ConcreteValue = value_of(key)
        if value.dtype.is_floating_point or value.dtype is torch.bool:
            refuse(f"an index must be an integer, not {value.dtype}: convert it, or use torch.where or extra_mask= for a mask")
        if isinstance(key, int) and key < 0:
            value = ConcreteValue(value.data + extent, ())
        return ConcreteValue(value.data.long(), value.axes, value.conditions, value.fed, value.pending)
    refuse(f"an index must be a tile, a value, a number, a slice or None, not {type(key).__name__}")


def computed(key: Any) -> bool:
    """Whether an index was computed by the user, rather than being a tile or range of the language."""
    return isinstance(key, (ConcreteValue, Tensor)) and not isinstance(key, ConcreteTile)
