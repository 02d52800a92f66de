"""Axes, conditions and tiles: what a dim of a value runs over, and where its lanes exist.

In: bounds and block sizes. Out: `Tile`, which a loop yields to the user, and the parts of values.

The conditions of a value are kept separate, each with the dims it mentions, because a reduction drops those that mention its axis
and keeps the rest. A condition has as many dims as its value, of size 1 where it does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


class ConcreteAxis:
    """The range of a dim, compared by identity: the tiles of one loop, or a fixed number of anonymous lanes."""

    __slots__ = ("lanes", "named", "tile", "what")

    def __init__(self, what: str, *, named: bool = True, lanes: int | None = None) -> None:
        self.what = what
        self.named = named
        self.lanes = lanes
        """The block size fixed by the user, if any; a value over tiles of one lane is a scalar."""
        self.tile: Any = None
        """The current tile of the loop, if it is one."""

    @property
    def open(self) -> bool:
        """Whether the block size is open, so that nothing may depend on it."""
        return self.named and self.lanes is None

    def __repr__(self) -> str:
        return self.what


@dataclass(frozen=True, eq=False)
class LaneMask:
    """Lanes exist where `mask` is true."""

    mask: Tensor
    dims: frozenset[int]
    key: tuple[Any, ...]
    """Identifies the condition: two with the same key and dims are equal."""
    born: int
    """When the newest tile it depends on was created: a condition newer than an iteration varies with the loop."""
    row: bool
    """Whether it bounds a row, rather than a plain range."""
    keep: tuple[Any, ...] = field(default=(), repr=False)
    """Objects that the key refers to by identity."""

    def moved(self, dims: Sequence[int], ndim: int) -> LaneMask:
        """The same condition for a value of `ndim` dims, whose dim `dims[k]` is this one's dim k."""
        if list(dims) == list(range(ndim)):
            return self
        return replace(self, mask=spread(self.mask, dims, ndim), dims=frozenset(dims[k] for k in self.dims))


@dataclass(frozen=True, eq=False)
class Pending:
    """The condition of an `hl.jagged_tile` on a value that does not have all its axes yet."""

    mask: Tensor
    axes: tuple[ConcreteAxis, ...]
    key: tuple[Any, ...]
    born: int
    keep: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, eq=False)
class FedLanes:
    """A reduction that feeds a value: when it ran, and for which lanes of the value it had an existing lane."""

    mask: Tensor
    time: int

    def moved(self, dims: Sequence[int], ndim: int) -> FedLanes:
        """The same for a value of `ndim` dims, whose dim `dims[k]` is this one's dim k."""
        if list(dims) == list(range(ndim)):
            return self
        return replace(self, mask=spread(self.mask, dims, ndim))


def spread(tensor: Tensor, dims: Sequence[int], ndim: int) -> Tensor:
    """A tensor with its dim k at `dims[k]`, and size 1 elsewhere.

    >>> import torch
    >>> spread(torch.zeros(2, 3), [3, 1], 4).shape
    torch.Size([1, 3, 1, 2])
    """
    order = sorted(range(tensor.dim()), key=lambda k: dims[k])
    shape = [1] * ndim
    for k in order:
        shape[dims[k]] = tensor.shape[k]
    return tensor.permute(order).reshape(shape)


def fixed(size: int) -> ConcreteAxis | None:
    """The axis of a dim that is not a tile's: None for size 1, which broadcasts as in torch."""
    return None if size == 1 else ConcreteAxis("no tile", named=False)


def meet(one: ConcreteAxis | None, other: ConcreteAxis | None) -> bool:
    """Whether two dims may be aligned: they belong to the same tile, or at least one has a fixed number of lanes.

    >>> one, other = ConcreteAxis("a"), ConcreteAxis("b")
    >>> meet(one, other), meet(one, fixed(4)), meet(ConcreteAxis("a", lanes=4), fixed(4))
    (False, False, True)
    """
    if one is other or one is None or other is None:
        return True
    return not (one.named and other.named) and not one.open and not other.open


def joined(conditions: Sequence[LaneMask]) -> tuple[LaneMask, ...]:
    """Conditions without duplicates."""
    return tuple({(c.key, c.dims): c for c in conditions}.values())
