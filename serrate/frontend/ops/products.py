"""Matrix products: rows by a weight, shared or one for each component.

In: `TensorView`s. Out: a `TensorView`; products are summed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.ops.common import floating, require_equal
from serrate.frontend.ops.elementwise import add, cast
from serrate.ir.domains import IterDomain
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import reduction
from serrate.ir.tile import Accumulate
from serrate.ir.values import call, carried_dtype
from serrate.ir.view import TensorView


def matmul(x: TensorView, w: TensorView) -> TensorView:
    """Rows of `x` times a weight: [k, j] shared by all rows, or [component, k, j], one for each component.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, off, w = f.input((None, 8), torch.float32), f.input((4,), torch.int64), f.input((3, 8, 5), torch.float32)
    ...     print(ops.matmul(ops.as_nested(x, off), w).shape)
    (3, 'r0', 5)
    """
    fusion = x.fusion
    if x.ndim < 2 or w.ndim not in (2, 3):
        raise ShapeError(f"matmul: expected rows [..., k] and a weight [k, j] or [component, k, j], got {x} and {w}")
    if x.dtype != w.dtype:
        raise DtypeError(f"matmul: both must have one dtype, got {x.dtype} and {w.dtype}")
    k, j = x.domains[-1], w.domains[-1]
    require_equal(fusion, "matmul: the contracted extents", k, w.domains[-2])
    index: tuple[IterDomain, ...] = (k, j)
    if w.ndim == 3:
        component = x.ragged.component if isinstance(x.domains[-2], RaggedIterDomain) else x.domains[-3]
        require_equal(fusion, "matmul: the number of components and of weights", component, w.domains[0])
        index = (component, k, j)
    kept = (*x.domains[:-1], j)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    if not x.dtype.is_floating_point:
        raise DtypeError(f"matmul: takes floating point, got {x.dtype}")
    state = fusion.tensor(carried_dtype(dtype), kept)
    product = call("mul", x.at(x.domains), w.at(index), dtype=carried_dtype(dtype))
    out = fusion.define([state], (*kept, k), Accumulate((state,), kept, reduction("sum"), (product,), (k,)))[0]
    return cast(out, dtype)


def linear(x: TensorView, weight: TensorView, bias: TensorView | None = None) -> TensorView:
    """`torch.nn.functional.linear`: weight is [j, k]."""
    fusion = x.fusion
    if weight.ndim != 2:
        raise ShapeError(f"linear: expected a weight [j, k], got {weight}")
    if x.dtype != weight.dtype:
        raise DtypeError(f"linear: both must have one dtype, got {x.dtype} and {weight.dtype}")
    k, j = x.domains[-1], weight.domains[0]
    require_equal(fusion, "linear: the contracted extents", k, weight.domains[1])
    kept = (*x.domains[:-1], j)
    state = fusion.tensor(carried_dtype(floating("linear", x)), kept)
    product = call("mul", x.at(x.domains), weight.at((j, k)), dtype=state.dtype)
    out = fusion.define([state], (*kept, k), Accumulate((state,), kept, reduction("sum"), (product,), (k,)))[0]
    return cast(out if bias is None else add(out, bias), x.dtype)
