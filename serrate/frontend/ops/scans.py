"""Scans: running sums, products and extrema along a dim.

In: a `TensorView` and a dim. Out: a `TensorView` of the same structure; a scan along a ragged dim restarts in every row.
"""

from __future__ import annotations

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.common import counted, dim_of
from serrate.frontend.ops.elementwise import eq, isnan, logical_or, typed
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.sorting import ValuesIndices
from serrate.frontend.shapes import shown
from serrate.ir.reductions import reduction
from serrate.ir.tile import Scan
from serrate.ir.values import call, carried_dtype, constant, position
from serrate.ir.view import TensorView


def cumsum(x: TensorView, dim: int) -> TensorView:
    """`torch.cumsum`; in a ragged dim, within each row. Integers and bools sum to int64.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.int64), f.input((None,), torch.int64)
    ...     f.output(cumsum(ops.as_nested(x, offsets), 1))
    >>> [r.tolist() for r in f.evaluate(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 3, 4])).unbind()]
    [[1, 3, 6], [], [4]]
    """
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return running("sum", x, dim, dtype)


def cumprod(x: TensorView, dim: int) -> TensorView:
    """`torch.cumprod`; in a ragged dim, within each row. Integers and bools multiply to int64."""
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return running("prod", x, dim, dtype)


def cummax(x: TensorView, dim: int) -> ValuesIndices:
    """`torch.cummax`: the largest element so far and its last position; NaN is the largest.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(*cummax(ops.as_nested(x, offsets), 1))
    >>> values, places = f.evaluate(torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0]), torch.tensor([0, 4, 5]))
    >>> [r.tolist() for r in values.unbind()], [r.tolist() for r in places.unbind()]
    ([[1.0, 3.0, 3.0, 3.0], [0.0]], [[0, 1, 1, 3], [0]])
    """
    return _extreme("max", x, dim)


def cummin(x: TensorView, dim: int) -> ValuesIndices:
    """`torch.cummin`: the smallest element so far and its last position; NaN is the smallest."""
    return _extreme("min", x, dim)


def _extreme(name: str, x: TensorView, dim: int) -> ValuesIndices:
    values = running(name, x, dim, x.dtype)
    over = x.domains[dim_of(f"cum{name}", x, dim)]
    # The last position of the running extremum is the last element equal to it.
    own = logical_or(isnan(x), eq(x, values)) if x.dtype.is_floating_point else eq(x, values)
    place = call("where", own.at(own.domains), position(over), constant(-1, torch.int64), dtype=torch.int64)
    return ValuesIndices(values, running("max", pulled(x.fusion, torch.int64, x.domains, place), dim, torch.int64))


def running(name: str, x: TensorView, dim: int, dtype: torch.dtype) -> TensorView:
    """A running reduction along a dim, within each row if it is ragged."""
    which = dim_of(f"cum{name}", x, dim)
    over, state = x.domains[which], carried_dtype(dtype)
    if counted(x, which):
        raise ShapeError(
            f"cum{name}: dim {which} of {shown(x)} counts rows of different lengths; a running {name} goes along a row"
        )
    value = x.at(x.domains)
    lifted = value if carried_dtype(value.dtype) == state else call("cast", value, dtype=state)
    out = x.fusion.tensor(state, x.domains)
    kept = tuple(d for k, d in enumerate(x.domains) if k != which)
    statement = Scan((out,), kept, x.domains, reduction(name), (lifted,), (over,))
    return typed(x.fusion.define([out], x.domains, statement)[0], dtype)
