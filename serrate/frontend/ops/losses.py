"""Losses of rows of logits against rows of classes.

In: logits, `[..., rows, classes]`, and target classes. Out: one loss for all elements, or one per element.
"""

from __future__ import annotations

from serrate.errors import CallError, ShapeError
from serrate.frontend.ops.common import floating
from serrate.frontend.ops.elementwise import add, cast, div, ge, logical_and, logical_or, lt, mul, ne, neg, sub, typed, where
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
    if not 0.0 <= label_smoothing <= 1.0:
        raise CallError(f"cross_entropy: label_smoothing must be between 0 and 1, got {label_smoothing}")
    dtype = floating("cross_entropy", x)
    probabilities = target.dtype.is_floating_point
    _check("cross_entropy", x, target, weight, reduction, x.ndim - (not probabilities))
    logits = typed(x, carried_dtype(dtype))
    whole = logsumexp(logits, -1)
    classes = count(x, (x.ndim - 1,), whole, whole.dtype)
    if probabilities:
        return typed(_of_probabilities(logits, whole, target, weight, reduction, label_smoothing, classes), dtype)
    picked = squeeze(gather(logits, -1, unsqueeze(target, -1), name="cross_entropy"), -1)
    spread = None if not label_smoothing else div(_cost_of_all(logits, whole, weight, classes), classes)
    return typed(
        _of_classes(sub(whole, picked), target, weight, ignore_index, reduction, classes, spread, label_smoothing), dtype
    )


def nll_loss(
    x: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> TensorView:
    """`torch.nn.functional.nll_loss` of rows: as `cross_entropy`, of log-probabilities."""
    _check("nll_loss", x, target, weight, reduction, x.ndim - 1)
    dtype = floating("nll_loss", x)
    picked = typed(squeeze(gather(x, -1, unsqueeze(target, -1), name="nll_loss"), -1), carried_dtype(dtype))
    classes = count(x, (x.ndim - 1,), picked, picked.dtype)
    return typed(_of_classes(neg(picked), target, weight, ignore_index, reduction, classes), dtype)


def _check(name: str, x: TensorView, target: TensorView, weight: TensorView | None, reduction: str, dims: int) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise CallError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if target.ndim != dims:
        raise ShapeError(
            f"{name} of {both(x, target)}: the last dim of the logits holds the classes, and the target must have the "
            "dims before it, (B, r0, C) and (B, r0)"
            + (", or the same dims if it holds probabilities" * (name == "cross_entropy"))
        )
    if weight is not None and (
        weight.ndim != 1 or x.domains[-1].is_ragged or not equal_now(x.fusion, weight.domains[0], x.domains[-1])
    ):
        raise ShapeError(f"{name} of {shown(x)}: weight must have one value for each class, got {shown(weight)}")


def _of_classes(
    cost: TensorView,
    target: TensorView,
    weight: TensorView | None,
    ignore_index: int,
    reduction: str,
    classes: TensorView,
    spread: TensorView | None = None,
    smoothing: float = 0.0,
) -> TensorView:
    """The cost of the target classes: weighted, smoothed towards `spread`, and averaged over those that are not ignored."""
    counted = ne(target, ignore_index)
    outside = logical_or(lt(target, 0), ge(cast(target, cost.dtype), classes))
    cost = where(logical_and(counted, outside), float("nan"), cost)
    if weight is not None:
        share = where(counted, cast(index(weight, target), cost.dtype), 0.0)
        cost = mul(cost, share)
    if spread is not None:
        cost = add(mul(cost, 1.0 - smoothing), mul(spread, smoothing))
    cost = where(counted, cost, 0.0)
    if reduction == "none":
        return cost
    total = sum(cost)
    if reduction == "mean":
        total = div(total, cast(sum(counted), cost.dtype) if weight is None else sum(share))
    return total


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
