"""The tensor interface of tiles and their values: operators, methods and indexing.

In: operations that the user writes. Out: calls of the current machine, which gives them meaning.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from serrate.frontend.kernel.machine import current, refuse
from serrate.tensor.indexing.keys import LaneKey


def _binary(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda self, other: called(function, self, other), lambda self, other: called(function, other, self)


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A torch function on tiles."""
    return current(getattr(function, "__name__", "a function of tiles")).call(function, args, kwargs)


class Lanes(LaneKey):
    """Operators, methods and indexing, for tiles and for values."""

    def __index__(self) -> int:
        refuse("a tile is not a scalar: use tile.begin, tile.index or tile.id")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return called(function, *args, **(kwargs or {}))

    __add__, __radd__ = _binary(torch.add)
    __sub__, __rsub__ = _binary(torch.sub)
    __mul__, __rmul__ = _binary(torch.mul)
    __truediv__, __rtruediv__ = _binary(torch.true_divide)
    __floordiv__, __rfloordiv__ = _binary(torch.floor_divide)
    __mod__, __rmod__ = _binary(torch.remainder)
    __pow__, __rpow__ = _binary(torch.pow)
    __and__, __rand__ = _binary(torch.bitwise_and)
    __or__, __ror__ = _binary(torch.bitwise_or)
    __xor__, __rxor__ = _binary(torch.bitwise_xor)
    __lshift__, __rlshift__ = _binary(torch.bitwise_left_shift)
    __rshift__, __rrshift__ = _binary(torch.bitwise_right_shift)
    __matmul__, __rmatmul__ = _binary(torch.matmul)
    __lt__, _ = _binary(torch.lt)
    __le__, _ = _binary(torch.le)
    __gt__, _ = _binary(torch.gt)
    __ge__, _ = _binary(torch.ge)
    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return called(torch.neg, self)

    def __abs__(self) -> Any:
        return called(torch.abs, self)

    def __invert__(self) -> Any:
        return called(torch.bitwise_not, self)

    def read_rows(self, jt: Any, key: Any) -> Any:
        return current("an index by tiles").load(jt, key)

    def write_rows(self, jt: Any, key: Any, x: Any) -> None:
        current("a store by tiles").store(jt, key, x)


class TorchLike(Lanes):
    """The tensor interface of values and tensors, besides operators."""

    __slots__ = ()
    KIND: ClassVar[str] = "a tile value"
    """What messages call it."""
    shape: Any
    ndim: Any

    def dim(self) -> int:
        """The number of dims."""
        return self.ndim  # type: ignore[no-any-return]

    def size(self, dim: int | None = None) -> Any:
        """The number of lanes in a dim, or in all dims."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def T(self) -> Any:
        """The two dims exchanged."""
        return called(torch.t, self)

    @property
    def mT(self) -> Any:
        """The last two dims exchanged."""
        return called(torch.transpose, self, -2, -1)

    def __eq__(self, other: object) -> Any:
        return called(torch.eq, self, other)

    def __ne__(self, other: object) -> Any:
        return called(torch.ne, self, other)

    __hash__ = object.__hash__

    def __getitem__(self, key: Any) -> Any:
        return called(torch.Tensor.__getitem__, self, key)

    def __setitem__(self, key: Any, x: Any) -> None:
        refuse("items of a tile value cannot be assigned: use torch.where, or store to a tensor made outside the loops")

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("__"):
            near = difflib.get_close_matches(name, {n for n in (*dir(self), *dir(torch.Tensor)) if not n.startswith("_")}, 1)
            raise AttributeError(f"{self.KIND} has no attribute {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        return lambda *args, **kwargs: called(method, self, *args, **kwargs)

    def __iter__(self) -> Any:
        refuse("lanes of a tile cannot be iterated over: loop over hl.tile(..., block_size=1) or hl.grid")


class Tile(Lanes):
    """One block of positions of a loop: `begin` up to `end`, in `block_size` lanes."""

    __slots__ = ()


class TileValue(TorchLike):
    """A value of a device loop. Users get them from loads, and from torch's functions on them."""

    __slots__ = ()
