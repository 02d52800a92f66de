"""Triton's interpreter, quicker: what it does for one element after the other is done for all of them side by side.

In: the interpreter, a module. Out: the same, in which `tl.reduce` and `tl.associative_scan` with a function of their own
combine halves of a block, as a device does, and not one number after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Replaces three functions of the interpreter."""
    interpreter._get_np_dtype = functools.partial(_numpy_dtype, interpreter._get_np_dtype, {})
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.ScanOps.generic_scan = _scan


def _numpy_dtype(ask: Callable[[Any], Any], known: dict[str, Any], dtype: Any) -> Any:
    """The interpreter makes a table of all dtypes at every step."""
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    found = known.get(scalar.name)
    if found is None:
        found = known[scalar.name] = ask(scalar)
    return found


def _combined(op: Any, kinds: list[Any], before: list[Any], now: list[Any]) -> list[Any]:
    """The user's function, of two slices of every operand."""
    tensors = (op.to_tensor(x, kind) for x, kind in zip((*before, *now), (*kinds, *kinds), strict=True))
    found = op.combine_fn.fn(*tensors)
    parts = found if isinstance(found, tuple) else (found,)
    arrays = (x.handle.data if isinstance(x, tl.core.tensor) else np.asarray(x) for x in parts)
    return [np.broadcast_to(a, old.shape).astype(old.dtype) for a, old in zip(arrays, now, strict=True)]


def _along(axis: int, *along: int | None) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(*along))


def _reduce(self: Any, input: Any) -> list[Any]:
    """Neighbours are combined, then pairs, and so on: the order stays, the function is associative, blocks are powers of 2."""
    asked, kinds = self.axis, [each.dtype for each in input]
    data = [each.handle.data for each in input]
    rank = data[0].ndim
    data, axis = ([d.reshape(-1) for d in data], 0) if asked is None else (data, asked)
    first, second = _along(axis, 0, None, 2), _along(axis, 1, None, 2)
    while data[0].shape[axis] > 1:
        data = _combined(self, kinds, [d[first] for d in data], [d[second] for d in data])
    if not self.keep_dims:
        data = [d.item() if asked is None else d.squeeze(axis) for d in data]
    elif asked is None:
        data = [d.reshape((1,) * rank) for d in data]
    return [self.to_tensor(d, kind) for d, kind in zip(data, kinds, strict=True)]


def _scan(self: Any, input: Any) -> list[Any]:
    """After a step every element is combined with twice as many before it."""
    kinds, data, shift = [each.dtype for each in input], [each.handle.data for each in input], 1
    while shift < data[0].shape[self.axis]:
        # All of a block, of which the first ones are right already: a part would not be a power of 2.
        further, right = _combined(self, kinds, [np.roll(d, shift, self.axis) for d in data], data), _along(self.axis, shift)
        for new, old in zip(further, data, strict=True):
            new[right] = old[right]
        data, shift = further, 2 * shift
    return [self.to_tensor(d, kind) for d, kind in zip(data, kinds, strict=True)]
