"""Losses under torch's signatures. In: traced predictions and targets with the same rows. Out: one loss, or one per element.

`mean` averages over all elements of all rows. A loss is computed in the dtype that sums have, and is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from serrate.errors import CallError
from serrate.frontend import ops
from serrate.frontend.ops.common import Operand
from serrate.frontend.ops.elementwise import typed
from serrate.frontend.ops.movement import pulled, require_inside
from serrate.ir.values import carried_dtype, position
from serrate.ir.view import TensorView

Distance = Callable[[TensorView, TensorView], TensorView]
Deprecated = bool | None
"""`size_average` and `reduce`, which torch replaced by `reduction`."""


def mse_loss(
    input: TensorView,
    target: TensorView,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
    weight: TensorView | None = None,
) -> TensorView:
    _refuse_deprecated("mse_loss", size_average, reduce)
    return _weighted("mse_loss", input, ops.square(ops.sub(_exact(input), _exact(target))), reduction, weight)


def l1_loss(
    input: TensorView,
    target: TensorView,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
    weight: TensorView | None = None,
) -> TensorView:
    _refuse_deprecated("l1_loss", size_average, reduce)
    return _weighted("l1_loss", input, ops.abs(ops.sub(_exact(input), _exact(target))), reduction, weight)


def huber_loss(
    input: TensorView, target: TensorView, reduction: str = "mean", delta: float = 1.0, weight: TensorView | None = None
) -> TensorView:
    far = ops.abs(ops.sub(_exact(input), _exact(target)))
    cost = ops.where(ops.le(far, delta), ops.mul(ops.square(far), 0.5), ops.mul(ops.sub(far, 0.5 * delta), delta))
    return _reduced("huber_loss", input, cost if weight is None else ops.mul(cost, weight), reduction)


def smooth_l1_loss(
    input: TensorView,
    target: TensorView,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> TensorView:
    _refuse_deprecated("smooth_l1_loss", size_average, reduce)
    far = ops.abs(ops.sub(_exact(input), _exact(target)))
    if beta == 0.0:
        return _reduced("smooth_l1_loss", input, far, reduction)
    cost = ops.where(ops.lt(far, beta), ops.mul(ops.square(far), 0.5 / beta), ops.sub(far, 0.5 * beta))
    return _reduced("smooth_l1_loss", input, cost, reduction)


def binary_cross_entropy(
    input: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    _refuse_deprecated("binary_cross_entropy", size_average, reduce)
    x, t = _exact(input), _exact(target)
    # As in torch, logarithms stop at -100.
    yes, no = ops.clamp(ops.log(x), -100.0), ops.clamp(ops.log1p(ops.neg(x)), -100.0)
    cost = ops.sub(ops.mul(ops.sub(t, 1.0), no), ops.mul(t, yes))
    return _reduced("binary_cross_entropy", input, cost if weight is None else ops.mul(cost, weight), reduction)


def binary_cross_entropy_with_logits(
    input: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
    pos_weight: TensorView | None = None,
) -> TensorView:
    name = "binary_cross_entropy_with_logits"
    _refuse_deprecated(name, size_average, reduce)
    x, t = _exact(input), _exact(target)
    no = ops.neg(ops.log_sigmoid(x))
    if pos_weight is not None:
        no = ops.mul(no, ops.add(ops.mul(ops.sub(pos_weight, 1.0), t), 1.0))
    cost = ops.add(ops.mul(ops.sub(1.0, t), x), no)
    return _reduced(name, input, cost if weight is None else ops.mul(cost, weight), reduction)


def kl_div(
    input: TensorView,
    target: TensorView,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> TensorView:
    _refuse_deprecated("kl_div", size_average, reduce)
    x, t = _exact(input), _exact(target)
    cost = ops.mul(ops.exp(t), ops.sub(t, x)) if log_target else ops.sub(ops.xlogy(t, t), ops.mul(t, x))
    if reduction != "batchmean":
        return _reduced("kl_div", input, cost, reduction)
    return typed(ops.div(ops.sum(cost), input.size_of(0)), input.dtype)


def poisson_nll_loss(
    input: TensorView,
    target: TensorView,
    log_input: bool = True,
    full: bool = False,
    size_average: Deprecated = None,
    eps: float = 1e-8,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    _refuse_deprecated("poisson_nll_loss", size_average, reduce)
    x, t = _exact(input), _exact(target)
    cost = ops.sub(ops.exp(x), ops.mul(t, x)) if log_input else ops.sub(x, ops.mul(t, ops.log(ops.add(x, eps))))
    if full:
        stirling = ops.add(ops.sub(ops.mul(t, ops.log(t)), t), ops.mul(ops.log(ops.mul(t, 2 * math.pi)), 0.5))
        cost = ops.add(cost, ops.where(ops.gt(t, 1.0), stirling, 0.0))
    return _reduced("poisson_nll_loss", input, cost, reduction)


def soft_margin_loss(
    input: TensorView,
    target: TensorView,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    _refuse_deprecated("soft_margin_loss", size_average, reduce)
    cost = ops.log1p(ops.exp(ops.neg(ops.mul(_exact(target), _exact(input)))))
    return _reduced("soft_margin_loss", input, cost, reduction)


def hinge_embedding_loss(
    input: TensorView,
    target: TensorView,
    margin: float = 1.0,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    _refuse_deprecated("hinge_embedding_loss", size_average, reduce)
    x = _exact(input)
    far = ops.where(ops.ne(target, 1), ops.clamp(ops.sub(margin, x), 0.0), 0.0)
    near = ops.where(ops.ne(target, -1), x, 0.0)
    return _reduced("hinge_embedding_loss", input, ops.add(far, near), reduction)


def margin_ranking_loss(
    input1: TensorView,
    input2: TensorView,
    target: TensorView,
    margin: float = 0.0,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    _refuse_deprecated("margin_ranking_loss", size_average, reduce)
    gap = ops.mul(ops.neg(_exact(target)), ops.sub(_exact(input1), _exact(input2)))
    return _reduced("margin_ranking_loss", input1, ops.clamp(ops.add(gap, margin), 0.0), reduction)


def gaussian_nll_loss(
    input: TensorView,
    target: TensorView,
    var: TensorView | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> TensorView:
    """`var` has the shape of `input`, or one value for all features: a last dim of 1, or none. The signs of a tensor are not
    checked."""
    x, t = _exact(input), _exact(target)
    if not isinstance(var, TensorView):
        if var < 0:
            raise CallError(f"gaussian_nll_loss: var must not be negative, got {var}")
        spread: Operand = max(var, eps)
        logarithm: Operand = math.log(max(var, eps))
    else:
        own = ops.unsqueeze(_exact(var), -1) if var.ndim == input.ndim - 1 else _exact(var)
        # As in torch, small variances are raised to `eps`, and their gradient is that of a variance of `eps`.
        spread = ops.add(own, ops.detach(ops.sub(ops.clamp(own, eps), own)))
        logarithm = ops.log(spread)
    cost = ops.mul(ops.add(ops.div(ops.square(ops.sub(x, t)), spread), logarithm), 0.5)
    return _reduced("gaussian_nll_loss", input, ops.add(cost, 0.5 * math.log(2 * math.pi)) if full else cost, reduction)


def cosine_embedding_loss(
    input1: TensorView,
    input2: TensorView,
    target: TensorView,
    margin: float = 0.0,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    """Features are the last dim; `target` has a 1 or -1 for each pair."""
    _refuse_deprecated("cosine_embedding_loss", size_average, reduce)
    x, y = _exact(input1), _exact(input2)
    sizes = (ops.add(ops.sum(ops.square(each), -1), 1e-12) for each in (x, y))
    cosine = ops.div(ops.sum(ops.mul(x, y), -1), ops.sqrt(ops.mul(*sizes)))
    same = ops.where(ops.eq(target, 1), ops.sub(1.0, cosine), 0.0)
    other = ops.where(ops.eq(target, -1), ops.clamp(ops.sub(cosine, margin), 0.0), 0.0)
    return _reduced("cosine_embedding_loss", input1, ops.add(same, other), reduction)


def multi_margin_loss(
    input: TensorView,
    target: TensorView,
    p: int = 1,
    margin: float = 1.0,
    weight: TensorView | None = None,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    """Classes are the last dim."""
    _refuse_deprecated("multi_margin_loss", size_average, reduce)
    if p not in (1, 2):
        raise CallError(f"multi_margin_loss: p must be 1 or 2, got {p}")
    x = _exact(input)
    own = ops.gather(x, -1, ops.unsqueeze(target, -1), name="multi_margin_loss")
    _require_classes("multi_margin_loss", input, target, None)
    gaps = ops.clamp(ops.add(ops.sub(x, own), margin), 0.0)
    # The class itself has the margin as its gap, and does not count.
    cost = ops.sub(ops.sum(gaps if p == 1 else ops.square(gaps), -1), max(margin, 0.0) ** p)
    cost = ops.div(cost, input.size_of(-1))
    if weight is not None:
        cost = ops.mul(cost, ops.index(_exact(weight), target))
    return _reduced("multi_margin_loss", input, cost, reduction)


def multilabel_margin_loss(
    input: TensorView,
    target: TensorView,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    """Classes are the last dim; `target` lists classes up to the first -1."""
    _refuse_deprecated("multilabel_margin_loss", size_average, reduce)
    x, classes = _exact(input), input.domains[-1]
    listed = ops.cumprod(ops.cast(ops.ge(target, 0), x.dtype), -1)
    inside = ops.clamp(target, 0)
    require_inside("multilabel_margin_loss: target", input, -1, inside)
    number = pulled(x.fusion, torch.int64, (classes,), position(classes))
    is_class = ops.cast(ops.eq(ops.unsqueeze(inside, -1), number), x.dtype)
    among = ops.sum(ops.mul(is_class, ops.unsqueeze(listed, -1)), -2)
    gaps = ops.clamp(
        ops.add(ops.sub(ops.unsqueeze(x, -2), ops.unsqueeze(ops.gather(x, -1, inside, name="multilabel_margin_loss"), -1)), 1.0),
        0.0,
    )
    counted = ops.mul(ops.unsqueeze(listed, -1), ops.unsqueeze(ops.cast(ops.eq(among, 0.0), x.dtype), -2))
    cost = ops.div(ops.sum(ops.mul(gaps, counted), (-2, -1)), input.size_of(-1))
    return _reduced("multilabel_margin_loss", input, cost, reduction)


def multilabel_soft_margin_loss(
    input: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    """Classes are the last dim."""
    _refuse_deprecated("multilabel_soft_margin_loss", size_average, reduce)
    x, t = _exact(input), _exact(target)
    yes, no = (ops.neg(ops.softplus(ops.neg(each))) for each in (x, ops.neg(x)))
    cost = ops.neg(ops.add(ops.mul(t, yes), ops.mul(ops.sub(1.0, t), no)))
    cost = ops.mean(cost if weight is None else ops.mul(cost, weight), -1)
    return _reduced("multilabel_soft_margin_loss", input, cost, reduction)


def triplet_margin_loss(
    anchor: TensorView,
    positive: TensorView,
    negative: TensorView,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Deprecated = None,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    """Features are the last dim."""
    _refuse_deprecated("triplet_margin_loss", size_average, reduce)

    if p <= 0:
        raise CallError(f"triplet_margin_loss: p must be positive, got {p}")

    def distance(x: TensorView, y: TensorView) -> TensorView:
        far = ops.abs(ops.add(ops.sub(_exact(x), _exact(y)), eps))
        if p == math.inf:
            return ops.amax(far, -1)
        return ops.sqrt(ops.sum(ops.square(far), -1)) if p == 2 else ops.pow(ops.sum(ops.pow(far, p), -1), 1.0 / p)

    cost = _triplet(distance, anchor, positive, negative, margin, swap)
    return _reduced("triplet_margin_loss", anchor, cost, reduction)


def triplet_margin_with_distance_loss(
    anchor: TensorView,
    positive: TensorView,
    negative: TensorView,
    *,
    distance_function: Distance | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> TensorView:
    """`distance_function` takes and returns traced tensors; the default is that of `triplet_margin_loss`."""
    if distance_function is None:
        return triplet_margin_loss(anchor, positive, negative, margin, swap=swap, reduction=reduction)
    cost = _triplet(distance_function, anchor, positive, negative, margin, swap)
    return _reduced("triplet_margin_with_distance_loss", anchor, cost, reduction)


def _triplet(
    distance: Distance, anchor: TensorView, positive: TensorView, negative: TensorView, margin: float, swap: bool
) -> TensorView:
    if margin <= 0:
        raise CallError(f"the margin of triplets must be positive, got {margin}")
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = ops.minimum(far, distance(positive, negative))
    return ops.clamp(ops.add(ops.sub(near, far), margin), 0.0)


def nll_loss(
    input: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    size_average: Deprecated = None,
    ignore_index: int = -100,
    reduce: Deprecated = None,
    reduction: str = "mean",
) -> TensorView:
    """The last dim of `input` holds the log-probabilities of the classes."""
    _refuse_deprecated("nll_loss", size_average, reduce)
    cost = ops.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    _require_classes("nll_loss", input, target, ignore_index)
    return cost


def cross_entropy(
    input: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    size_average: Deprecated = None,
    ignore_index: int = -100,
    reduce: Deprecated = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorView:
    _refuse_deprecated("cross_entropy", size_average, reduce)
    cost = ops.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if not target.dtype.is_floating_point:
        _require_classes("cross_entropy", input, target, ignore_index)
    return cost


def _require_classes(name: str, input: TensorView, target: TensorView, ignore_index: int | None) -> None:
    """Classes are checked like indices; `ignore_index` is allowed, if there is one."""
    if input.domains[-1].is_ragged:
        inside = target if ignore_index is None else ops.where(ops.eq(target, ignore_index), 0, target)
        require_inside(f"{name}: target", input, -1, ops.unsqueeze(inside, -1))
    else:
        require_inside(f"{name}: target", input, -1, target, ignored=ignore_index)


def _refuse_deprecated(name: str, size_average: Deprecated, reduce: Deprecated) -> None:
    if size_average is not None or reduce is not None:
        raise CallError(f"{name}: size_average and reduce are deprecated; use reduction='mean', 'sum' or 'none'")


def _exact(x: TensorView) -> TensorView:
    """A tensor in the dtype that losses are computed in."""
    return typed(x, carried_dtype(x.dtype)) if x.dtype.is_floating_point else x


def _reduced(name: str, input: TensorView, cost: TensorView, reduction: str) -> TensorView:
    if reduction not in ("mean", "sum", "none"):
        raise CallError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not input.dtype.is_floating_point:
        raise CallError(f"{name}: predictions must be floating point, got {input.dtype}")
    found = cost if reduction == "none" else ops.mean(cost) if reduction == "mean" else ops.sum(cost)
    return typed(found, input.dtype) if carried_dtype(input.dtype) != input.dtype else found


def _weighted(name: str, input: TensorView, cost: TensorView, reduction: str, weight: TensorView | None) -> TensorView:
    """With weights, `mean` divides by their sum, as in torch."""
    if weight is None:
        return _reduced(name, input, cost, reduction)
    total = _reduced(name, input, ops.mul(cost, weight), "none" if reduction == "none" else "sum")
    return total if reduction != "mean" else ops.div(total, ops.sum(weight))
