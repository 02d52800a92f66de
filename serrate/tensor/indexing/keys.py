"""Normalises an index to one key per dim.

In: an int, a slice, None, `...`, numbers or booleans in a tensor or a list, a ragged mask; or a tuple of these. Out: keys in the
order of dims: ints, slices, None for a new dim, 1-D tensors and ragged masks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, RowError, ShapeError
from serrate.tensor.base import JaggedBase
from serrate.tensor.sync import host_copy

Key = int | slice | None | Tensor | JaggedBase

_TAKES = "takes ints, slices, None, ..., 1-D numbers or booleans, and ragged masks"


def keys_of(key: Any, ndim: int, why: str) -> list[Key]:
    """One key per indexed dim, with `...` expanded; trailing dims may be omitted.

    >>> keys_of((0, ..., slice(2), None), 4, "jt[key]")
    [0, slice(None, None, None), slice(None, None, None), slice(None, 2, None), None]
    """
    given = key if isinstance(key, tuple) else (key,)
    found = [each if isinstance(each, EllipsisType) else _key(each, why) for each in given]
    if sum(isinstance(each, EllipsisType) for each in found) > 1:
        raise CallError(f"{why}: ... may appear only once, got {sum(each is Ellipsis for each in found)}")
    if sum(isinstance(each, Tensor | JaggedBase) for each in found) > 1:
        raise CallError(
            f"{why}: only one tensor of indices, booleans or a mask at a time: index again, as in jt[rows][..., columns]"
        )
    indexed = sum(map(_consumes, found))
    if indexed > ndim:
        raise ShapeError(f"{why}: {indexed} dims are indexed, but the tensor has {ndim}")
    keys: list[Key] = []
    for each in found:
        if isinstance(each, EllipsisType):
            keys += [slice(None)] * (ndim - indexed)
        else:
            keys.append(each)
    return keys


def numbers_of(key: Tensor, size: int, what: str, why: str) -> Tensor:
    """The indices that a key of integers or booleans selects, on the CPU, each in `range(size)`.

    >>> numbers_of(torch.tensor([0, -1]), 3, "row", "jt[rows]")
    tensor([0, 2])
    >>> numbers_of(torch.tensor([True, False, True]), 3, "row", "jt[rows]")
    tensor([0, 2])
    """
    host = host_copy(key, why)
    if host.dtype is torch.bool:
        if host.shape[0] != size:
            advice = "; a mask of positions is ragged: jt.with_values(mask)" if what == "row" else ""
            raise ShapeError(f"{why}: a mask needs one boolean per {what}: it has {host.shape[0]}, but there are {size}{advice}")
        return host.nonzero().reshape(-1)
    host = host.long()
    wrong = (host < -size) | (host >= size)
    if wrong.any():
        raise RowError(f"{why}: {what} {int(host[wrong][0])} does not exist: there are {size}")
    return torch.where(host < 0, host + size, host)


def _key(key: Any, why: str) -> Key:
    if key is None or isinstance(key, slice | JaggedBase):
        return key
    if isinstance(key, bool):
        raise CallError(f"{why}: a single boolean is not an index; it {_TAKES}")
    if not isinstance(key, Tensor) and not hasattr(key, "__array__") and hasattr(key, "__index__"):
        return operator.index(key)
    tensor = _tensor(key, why)
    if tensor.dtype not in _INTEGERS and tensor.dtype is not torch.bool:
        raise CallError(f"{why}: an index must be integers or booleans, got {tensor.dtype}; it {_TAKES}")
    if tensor.dim() == 0 and tensor.dtype is not torch.bool:
        return int(host_copy(tensor, why))
    if tensor.dim() != 1:
        raise CallError(f"{why}: an index must be 1-D, got shape {tuple(tensor.shape)}; it {_TAKES}")
    return tensor


def _tensor(key: Any, why: str) -> Tensor:
    if isinstance(key, Tensor):
        return key
    if not hasattr(key, "__array__") and (isinstance(key, str) or not isinstance(key, Iterable)):
        raise CallError(f"{why}: {type(key).__name__} is not an index; it {_TAKES}")
    try:
        tensor = torch.as_tensor(key if hasattr(key, "__array__") else list(key), device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise CallError(f"{why}: {type(key).__name__} is not an index; it {_TAKES}") from None
    return tensor.long() if tensor.numel() == 0 else tensor


def _consumes(key: Key | EllipsisType) -> int:
    if key is None or isinstance(key, EllipsisType):
        return 0
    return key.ndim if isinstance(key, JaggedBase) else 1


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class LaneKey:
    """A tile, or a value with one index per lane, as an index: it implements reads and writes of ragged rows itself."""

    __slots__ = ()

    def read_rows(self, jt: Any, key: Any) -> Any:
        """The result of `jt[key]`."""
        raise NotImplementedError

    def write_rows(self, jt: Any, key: Any, x: Any) -> None:
        """Does `jt[key] = x`."""
        raise NotImplementedError


def lane_key(key: Any) -> LaneKey | None:
    """The first lane key of an index, or None.

    >>> lane_key((0, slice(None))) is None
    True
    """
    if isinstance(key, LaneKey):
        return key
    if type(key) is tuple:
        for each in key:
            if isinstance(each, LaneKey):
                return each
    return None
