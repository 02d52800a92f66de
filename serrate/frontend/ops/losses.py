"""Losses of rows of logits against rows of classes.

In: logits, `[..., rows, classes]`, and target classes. Out: one loss for all elements, or one per element.
"""

from __future__ import annotations

from serrate.errors import CallError, ShapeError
from serrate.frontend.ops.common import floating
from serrate.frontend.ops.elementwise import add, cast, div, ge, logical_and, logical_or, lt, mul, ne, sub, typed, where
from serrate.frontend.ops.movement import gather, index
from serrate.frontend.ops.normalise import logsumexp
from serrate.frontend.ops.reducing import count
from serrate.frontend.ops.reductions import mean, sum
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
    label_smoothing: float = 0.0,
) -> TensorView:
    """`torch.nn.functional.cross_entropy` of rows: the last dim of `x` holds the classes, and `target` has the dims before it, or
    all of them if it holds probabilities.

    The last dim may be ragged: each row then has its own classes (candidates to choose from). `mean` averages over all elements
    whose class is not `ignore_index`, weighted by `weight` if given. A class out of range gives NaN.

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
    if not 0.0 <= label_smoothing <= 1.0:
        raise CallError(f"cross_entropy: label_smoothing must be between 0 and 1, got {label_smoothing}")
    dtype = floating("cross_entropy", x)
    probabilities = target.dtype.is_floating_point
    if x.ndim != target.ndim + (not probabilities):
        raise ShapeError(
            f"cross_entropy of {both(x, target)}: the last dim of the logits holds the classes, and the target must have the "
            "dims before it, (B, r0, C) and (B, r0), or the same dims if it holds probabilities"
        )
    if weight is not None and (
        weight.ndim != 1 or x.domains[-1].is_ragged or not equal_now(x.fusion, weight.domains[0], x.domains[-1])
    ):
        raise ShapeError(f"cross_entropy of {shown(x)}: weight must have one value for each class, got {shown(weight)}")
    logits = typed(x, carried_dtype(dtype))
    whole = logsumexp(logits, -1)
    classes = count(x, (x.ndim - 1,), whole, whole.dtype)
    if probabilities:
        return typed(_of_probabilities(logits, whole, target, weight, reduction, label_smoothing, classes), dtype)
    counted = ne(target, ignore_index)
    picked = squeeze(gather(logits, -1, unsqueeze(target, -1)), -1)
    cost = sub(whole, picked)
    outside = logical_or(lt(target, 0), ge(cast(target, whole.dtype), classes))
    cost = where(logical_and(counted, outside), float("nan"), cost)
    if weight is not None:
        share = where(counted, cast(index(weight, target), logits.dtype), 0.0)
        cost = mul(cost, share)
    if label_smoothing:
        spread = _cost_of_all(logits, whole, weight, classes)
        cost = add(mul(cost, 1.0 - label_smoothing), mul(div(spread, classes), label_smoothing))
    cost = where(counted, cost, 0.0)
    if reduction == "none":
        return typed(cost, dtype)
    total = sum(cost)
    if reduction == "mean":
        total = div(total, cast(sum(counted), logits.dtype) if weight is None else sum(share))
    return typed(total, dtype)


def _cost_of_all(logits: TensorView, whole: TensorView, weight: TensorView | None, classes: TensorView) -> TensorView:
    """The costs of all classes, weighted, summed: of `whole - logit` for each."""
    if weight is None:
        return sub(mul(whole, classes), sum(logits, -1))
    return sum(mul(sub(unsqueeze(whole, -1), logits), weight), -1)


def _of_probabilities(
    logits: TensorView,
    whole: TensorView,
    target: TensorView,
    weight: TensorView | None,
    reduction: str,
    label_smoothing: float,
    classes: TensorView,
) -> TensorView:
    """The cost against probabilities of classes; `mean` is over elements, whatever the weights."""
    share = typed(target, logits.dtype)
    if label_smoothing:
        share = add(mul(share, 1.0 - label_smoothing), unsqueeze(div(label_smoothing, classes), -1))
    if weight is not None:
        share = mul(share, weight)
    cost = sum(mul(sub(unsqueeze(whole, -1), logits), share), -1)
    return cost if reduction == "none" else mean(cost) if reduction == "mean" else sum(cost)
