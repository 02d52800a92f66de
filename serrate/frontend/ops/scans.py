"""Scans: running sums and products along a dim.

In: a `TensorView` and a dim. Out: a `TensorView` of the same structure; every row of a ragged dim begins anew.
"""

from __future__ import annotations

import torch

from serrate.errors import ShapeError
from serrate.frontend.ops.common import counts_rows, dim_of
from serrate.frontend.ops.elementwise import cast
from serrate.frontend.shapes import shown
from serrate.ir.reductions import reduction
from serrate.ir.tile import Scan
from serrate.ir.values import call, carried_dtype
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
    return _scan("sum", x, dim, dtype)


def cumprod(x: TensorView, dim: int) -> TensorView:
    """`torch.cumprod`; in a ragged dim, within each row. Integers and bools multiply to int64."""
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return _scan("prod", x, dim, dtype)


def _scan(name: str, x: TensorView, dim: int, dtype: torch.dtype) -> TensorView:
    which = dim_of(f"cum{name}", x, dim)
    over, state = x.domains[which], carried_dtype(dtype)
    if counts_rows(x, over):
        raise ShapeError(
            f"cum{name}: dim {which} of {shown(x)} counts rows of different lengths; a running {name} goes along a row"
        )
    value = x.at(x.domains)
    lifted = value if carried_dtype(value.dtype) == state else call("cast", value, dtype=state)
    out = x.fusion.tensor(state, x.domains)
    kept = tuple(d for k, d in enumerate(x.domains) if k != which)
    statement = Scan((out,), kept, x.domains, reduction(name), (lifted,), (over,))
    return cast(x.fusion.define([out], x.domains, statement)[0], dtype)
