"""Rows of a table, pooled: `embedding_bag`.

In: indices in bags, ragged or dense, and a table. Out: one row of features for each bag. The rows that are looked up are reduced
as they are read, and are never stored.
"""

from __future__ import annotations

from serrate.errors import CallError, DtypeError, ShapeError
from serrate.frontend.ops.common import floating
from serrate.frontend.ops.elementwise import cast, div, eq, maximum, mul, ne, typed, where
from serrate.frontend.ops.movement import index
from serrate.frontend.ops.reducing import count
from serrate.frontend.ops.reductions import amax, sum
from serrate.frontend.ops.structure import unsqueeze
from serrate.frontend.shapes import both, shown
from serrate.ir.values import carried_dtype
from serrate.ir.view import TensorView


def embedding_bag(
    indices: TensorView,
    weight: TensorView,
    *,
    mode: str = "mean",
    per_sample_weights: TensorView | None = None,
    padding_idx: int | None = None,
) -> TensorView:
    """`torch.nn.functional.embedding_bag`: the last dim of `indices` is a bag; the result has the other dims, and features.

    Indices equal to `padding_idx` are ignored. An empty bag gives 0 in every mode. An index outside the table
    is read as zeros.

    >>> import torch
    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     ids, offsets, table = f.input((None,), torch.int64), f.input((None,), torch.int64), f.input((4, 2), torch.float32)
    ...     f.output(embedding_bag(ops.as_nested(ids, offsets), table, mode="sum"))
    >>> f.evaluate(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 2, 3]), torch.arange(8.0).view(4, 2)).tolist()
    [[2.0, 4.0], [0.0, 0.0], [6.0, 7.0]]
    """
    if mode not in ("sum", "mean", "max"):
        raise CallError(f"embedding_bag: mode must be 'sum', 'mean' or 'max', got {mode!r}")
    dtype, bag = floating("embedding_bag", weight), indices.ndim - 1
    if weight.ndim != 2 or bag < 1:
        raise ShapeError(f"embedding_bag of {both(indices, weight)}: expected bags (B, r0) and a table (entries, features)")
    rows = typed(index(weight, indices, 0, name="embedding_bag"), carried_dtype(dtype))
    if per_sample_weights is not None:
        if mode != "sum":
            raise CallError(f"embedding_bag: per_sample_weights work with mode='sum', got mode={mode!r}")
        if per_sample_weights.dtype != dtype:
            raise DtypeError(f"embedding_bag: weights and table must have one dtype, got {per_sample_weights.dtype} and {dtype}")
        if per_sample_weights.ndim != indices.ndim:
            raise ShapeError(f"embedding_bag: expected one weight for each of {shown(indices)}, got {shown(per_sample_weights)}")
        rows = mul(rows, unsqueeze(per_sample_weights, -1))
    kept = None
    if padding_idx is not None:
        counted = padding_idx if padding_idx >= 0 else weight.size_of(0) + padding_idx
        kept = ne(indices, counted)
        rows = where(unsqueeze(kept, -1), rows, float("-inf") if mode == "max" else 0.0)
    if mode == "sum":
        return typed(sum(rows, bag), dtype)
    found = amax(rows, bag) if mode == "max" else sum(rows, bag)
    size = count(rows, (bag,), found, found.dtype) if kept is None else unsqueeze(cast(sum(kept, bag), found.dtype), -1)
    if mode == "max":
        return typed(where(eq(size, 0.0), 0.0, found), dtype)
    return typed(div(found, maximum(size, 1.0)), dtype)
