"""`ConcreteValue`: a value inside a device loop.

In: lanes, the axis of each dim, the conditions under which lanes exist, and the reductions that feed it. Out: new values, from
torch's functions, methods and operators, which all go through `functions.call`.

The model: `data` has a number in every lane, including holes (where it is computed from zeros), and `exists()` says which lanes
count. A value of a 16-bit dtype holds float32: it is rounded where it is stored or cast, and nowhere in between (rule 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.frontend.kernel import values
from serrate.frontend.kernel.machine import BlockSize, current, refuse
from serrate.frontend.kernel.values import Lanes, called
from serrate.interpret.axes import ConcreteAxis, FedLanes, LaneMask, Pending, fixed, joined, spread

SIXTEEN = (torch.float16, torch.bfloat16)


def held_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which lanes are computed.

    >>> held_in(torch.bfloat16), held_in(torch.int32)
    (torch.float32, torch.int32)
    """
    return torch.float32 if dtype in SIXTEEN else dtype


class Unusable(Lanes):
    """The value of a name after an iteration that does not carry it: using it raises with the reason.

    A name that every iteration sets before reading is not carried, although an `if` may hide that.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        refuse(self.reason)

    def _refused(self, *_: Any) -> Any:
        refuse(self.reason)

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = __setitem__ = _refused
    __eq__ = __ne__ = _refused
    __hash__ = object.__hash__


class ConcreteValue(values.TileValue):
    """A value of a device loop, with a number in every lane."""

    __slots__ = ("_dtype", "axes", "conditions", "data", "fed", "pending")

    def __init__(
        self,
        data: Tensor,
        axes: Sequence[ConcreteAxis | None],
        conditions: Sequence[LaneMask] = (),
        fed: Sequence[FedLanes] = (),
        pending: Sequence[Pending] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype or data.dtype
        self.data = data if data.dtype is (kind := held_in(self._dtype)) else data.to(kind)
        self.axes = tuple(axes)
        waiting = []
        found = list(conditions)
        for each in {p.key: p for p in pending}.values():
            dims = [self._only(axis) for axis in each.axes]
            here = [dim for dim in dims if dim is not None]
            if len(here) < len(dims):
                waiting.append(each)
                continue
            mask = spread(each.mask, here, data.dim())
            found.append(LaneMask(mask, frozenset(here), each.key, each.born, True, each.keep))
        self.conditions = joined(found)
        self.pending = tuple(waiting)
        self.fed = tuple(fed)

    def _only(self, axis: ConcreteAxis) -> int | None:
        dims = [dim for dim, own in enumerate(self.axes) if own is axis]
        if len(dims) > 1:
            refuse(f"the jagged tile of {axis} is used with two dims of that tile, so its rows are ambiguous")
        return dims[0] if dims else None

    def exists(self) -> Tensor:
        """The lanes that exist, as a mask that broadcasts to the lanes."""
        mask = torch.ones([1] * self.data.dim(), dtype=torch.bool, device=self.data.device)
        for condition in self.conditions:
            mask = mask & condition.mask
        return mask

    def arranged(self, data: Tensor, dims: Sequence[int], axes: Sequence[ConcreteAxis | None]) -> ConcreteValue:
        """The same lanes with permuted dims: dim k becomes `dims[k]`."""
        ndim = len(axes)
        conditions = [c.moved(dims, ndim) for c in self.conditions]
        return ConcreteValue(data, axes, conditions, [f.moved(dims, ndim) for f in self.fed], self.pending, self.dtype)

    # --- the interface of torch tensors ---

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the lanes."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of the lanes."""
        return self.data.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of lanes of each dim; the block size for a tile's dim."""
        return tuple(
            BlockSize(size, axis) if axis is not None and axis.named else size
            for size, axis in zip(self.data.shape, self.axes, strict=True)
        )

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.data.dim()

    # --- numbers ---

    def _number(self, what: str) -> Any:
        tiles = [axis for axis in self.axes if axis is not None and axis.lanes != 1]
        if tiles or self.data.numel() != 1:
            refuse(
                f"{what} a scalar, but this value has the lanes of {', '.join(map(str, tiles)) or self.data.numel()}: "
                "reduce it first (x.amax(), x.any()), or use torch.where"
            )
        return self.data.reshape(()).item()

    def __bool__(self) -> bool:
        return bool(self._number("`if`, `while`, `and`, `or` and `not` need"))

    def __int__(self) -> int:
        return int(self._number("int() needs"))

    def __float__(self) -> float:
        return float(self._number("float() needs"))

    def __index__(self) -> int:
        return int(self._number("an index or bound needs"))

    def item(self) -> Any:
        """Its value as a Python number."""
        return self._number("item() needs")

    def __repr__(self) -> str:
        return f"TileValue({self.data!r}, over {list(self.axes)}, where {self.exists().tolist()})"


class ConcreteTile(values.Tile):
    """One block of positions of a loop, as concrete numbers."""

    __slots__ = ("_count", "_pending", "axis", "begin", "block_size", "born", "end", "id")

    def __init__(
        self,
        axis: ConcreteAxis,
        number: int,
        bounds: tuple[int, int],
        block: int,
        count: int,
        pending: tuple[Pending, ...] = (),
    ) -> None:
        self.axis = axis
        axis.tile = self
        self.born = current("a tile").clock
        self.id = number
        self.begin = bounds[0] + number * block
        self.end = min(self.begin + block, bounds[1])
        self.block_size = BlockSize(block, axis, self)
        self._count = count
        self._pending = pending

    @property
    def count(self) -> int:
        """How many tiles the loop has."""
        return self._count

    @property
    def index(self) -> ConcreteValue:
        """The positions, one per lane; lanes past `end` do not exist."""
        return self.lanes(torch.arange(self.begin, self.begin + self.block_size, device="cpu"))

    def lanes(self, data: Tensor) -> ConcreteValue:
        """A 1-D value over this tile."""
        conditions = []
        if self.end - self.begin < self.block_size:
            mask = torch.arange(int(self.block_size), device="cpu") < self.end - self.begin
            conditions.append(LaneMask(mask, frozenset([0]), ("end", id(self)), self.born, False, (self,)))
        return ConcreteValue(data, [self.axis], conditions, (), self._pending)

    def __eq__(self, other: object) -> Any:
        return self is other if isinstance(other, ConcreteTile) else called(torch.eq, self, other)

    __hash__ = object.__hash__

    def __getitem__(self, key: Any) -> Any:
        return self.index[key]

    def __repr__(self) -> str:
        return f"Tile({self.begin}:{self.end} of {self.axis})"


def value_of(x: Any) -> Any:
    """A tile as its positions; a tensor or number as a value without conditions; anything else unchanged.

    >>> value_of(torch.zeros(3)).axes
    (no tile,)
    """
    if isinstance(x, Unusable):
        refuse(x.reason)
    if isinstance(x, ConcreteTile):
        return x.index
    if isinstance(x, Tensor):
        return ConcreteValue(x, [fixed(size) for size in x.shape])
    if isinstance(x, (bool, int, float)):
        return ConcreteValue(torch.tensor(x, device="cpu"), ())
    return x
