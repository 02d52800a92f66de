"""Losses of rows of logits against rows of classes.

In: logits, `[..., rows, classes]`, and target classes. Out: one loss for all elements, or one per element.
"""

from __future__ import annotations

from serrate.errors import CallError, ShapeError
from serrate.frontend.ops.common import floating
from serrate.frontend.ops.elementwise import cast, div, ge, logical_and, logical_or, lt, mul, ne, sub, typed, where
from serrate.frontend.ops.movement import gather, index
from serrate.frontend.ops.normalise import logsumexp
from serrate.frontend.ops.reductions import sum
from serrate.frontend.ops.structure import squeeze, unsqueeze
from serrate.frontend.shapes import both, equal_now, shown
from serrate.ir.values import carried_dtype
from serrate.ir.view import TensorView


def cross_entropy(
    x: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> TensorView:
    """`torch.nn.functional.cross_entropy` of rows: the last dim of `x` holds the classes, and `target` has the dims before it.

    `mean` averages over all elements whose class is not `ignore_index`, weighted by `weight` if given. A class out of range gives
    NaN.

    >>> import torch
    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, classes, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
    ...     f.output(cross_entropy(ops.as_nested(x, offsets), ops.as_nested(classes, offsets)))
    >>> f.evaluate(torch.zeros(5, 4), torch.tensor([0, 3, -100, 1, 2]), torch.tensor([0, 2, 5]))
    tensor(1.3863)
    """
    if reduction not in ("mean", "sum", "none"):
        raise CallError(f"cross_entropy: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    dtype = floating("cross_entropy", x)
    if x.ndim != target.ndim + 1 or x.domains[-1].is_ragged:
        raise ShapeError(
            f"cross_entropy of {both(x, target)}: the last dim of the logits holds the classes, and the target must have the "
            "dims before it: (B, r0, C) and (B, r0)"
        )
    classes = x.size_of(-1)
    if weight is not None and (weight.ndim != 1 or not equal_now(x.fusion, weight.domains[0], x.domains[-1])):
        raise ShapeError(f"cross_entropy: weight must have one value for each of {classes} classes, got {shown(weight)}")
    logits = typed(x, carried_dtype(dtype))
    counted = ne(target, ignore_index)
    picked = squeeze(gather(logits, -1, unsqueeze(target, -1)), -1)
    cost = sub(logsumexp(logits, -1), picked)
    cost = where(logical_and(counted, logical_or(lt(target, 0), ge(target, classes))), float("nan"), cost)
    if weight is not None:
        share = where(counted, cast(index(weight, target), logits.dtype), 0.0)
        cost = mul(cost, share)
    cost = where(counted, cost, 0.0)
    if reduction == "none":
        return typed(cost, dtype)
    total = sum(cost)
    if reduction == "mean":
        total = div(total, cast(sum(counted), logits.dtype) if weight is None else sum(share))
    return typed(total, dtype)
