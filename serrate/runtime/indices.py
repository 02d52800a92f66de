"""Errors for indices out of range, which a program's own checks detect.

In: a fusion, its arguments, and the results of its `index_checks`. Out: nothing, or an `IndexOutOfRange` that names the
position; on a GPU the error surfaces at a later call, because nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from serrate.errors import IndexOutOfRange
from serrate.ir.fusion import NOTHING, Fusion, IndicesInside
from serrate.runtime.bind import Binder
from serrate.tensor import JaggedTensor
from serrate.tensor.checks.deferred import defer, poll
from serrate.tensor.sync import on_host


def require_inside(fusion: Fusion, args: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    """Raises if a check has found something: immediately on a CPU, at a later call on a GPU."""
    for check, one in zip(fusion.index_checks, found, strict=True):
        if not on_host(one):
            # Calls like this one may be the only ones for a while.
            poll()
            forms = [(arg.shape, arg.dtype) for arg in args]
            defer([one], functools.partial(_require_nothing, fusion, check, forms))
        elif one.item() != NOTHING:
            raise _outside(fusion, check, args)


def _require_nothing(
    fusion: Fusion, check: IndicesInside, forms: Sequence[tuple[torch.Size, torch.dtype]], numbers: list[int]
) -> None:
    """Raises the deferred error. It names the index and the limit; only the shapes of the arguments are still known."""
    if numbers[0] == NOTHING:
        return
    shapes = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in forms]
    raise IndexOutOfRange(f"{check.what}: index {numbers[0]} is out of range{_limit(check, _size(fusion, check, shapes))}")


def _size(fusion: Fusion, check: IndicesInside, args: Sequence[torch.Tensor]) -> int | None:
    """The size of the indexed dim; None if it is a row's length, or if offsets would have to be read from a device."""
    if check.extent is None or (check.extent.arrays and any(arg.is_meta for arg in args)):
        return None
    binder = Binder(fusion)
    return binder.extent(binder.bind(args), check.extent)


def _limit(check: IndicesInside, size: int | None) -> str:
    if check.extent is None:
        return ": the row is not that long"
    return "" if size is None else f": there are {size} positions"


def _outside(fusion: Fusion, check: IndicesInside, args: Sequence[torch.Tensor]) -> IndexOutOfRange:
    """The error that names the first index out of range, found by evaluating the checked indices again."""
    again = fusion.clone()
    copy = again.index_checks[fusion.index_checks.index(check)]
    again.outputs, again.index_checks = [], []
    again.output(again.view(copy.indices), again.view(copy.outside))
    indices, outside = again.evaluate(*args)
    place = _first(outside)
    value = functools.reduce(lambda x, k: x[k], place, indices)
    size = _size(fusion, check, args)
    at = "".join(f"[{k}]" for k in place)
    return IndexOutOfRange(f"{check.what}: index{at} = {int(value)} is out of range{_limit(check, size)}")


def _first(outside: torch.Tensor | JaggedTensor) -> tuple[int, ...]:
    """The indices of the first element that is True."""
    if isinstance(outside, torch.Tensor):
        return tuple(outside.nonzero()[0].tolist())
    rows = enumerate(outside.unbind())
    k, row = next((k, row) for k, row in rows if (row.values if isinstance(row, JaggedTensor) else row).any())
    return (k, *_first(row))
