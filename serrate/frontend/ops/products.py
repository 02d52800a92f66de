"""Matrix products: rows by a weight, shared or one per component.

In: `TensorView`s. Out: a `TensorView`, accumulated in float32 (float64 for float64, int64 for integers) and rounded once.
"""

from __future__ import annotations

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import apart, match, under
from serrate.frontend.ops.common import InvalidOperand, require_equal
from serrate.frontend.ops.elementwise import add, as_dtype, typed
from serrate.frontend.ops.structure import squeeze, unsqueeze
from serrate.frontend.shapes import both, shown
from serrate.ir.domains import IterDomain
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import SUM
from serrate.ir.tile import Accumulate
from serrate.ir.values import Index, Places, Role, Value, call, carried_dtype
from serrate.ir.view import TensorView


def matmul(x: TensorView, w: TensorView) -> TensorView:
    """Rows of `x` times `w`: [k, j] shared by all rows, or [component, k, j], one per component. A leading dim of `w` with size 1
    is shared by all positions of that dim.

    Any of the dims may be ragged: `matmul(q, transpose(k, 1, 2))` is rows by rows of one component, a product structure;
    `matmul(transpose(x, 1, 2), y)` contracts the rows of each component.

    >>> import torch
    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, off, w = f.input((None, 8), torch.float32), f.input((4,), torch.int64), f.input((3, 8, 5), torch.float32)
    ...     y = ops.as_nested(x, off)
    ...     print(ops.matmul(y, w).shape, ops.matmul(ops.transpose(y, 1, 2), y).shape)
    (3, 'r0', 5) (3, 8, 8)
    """
    for side in (x, w):
        if not isinstance(side, TensorView):
            raise InvalidOperand(f"both operands must be tensors, got {side!r} of type {type(side).__name__}")
    if w.ndim == 1 and x.ndim > 1:
        return squeeze(matmul(x, unsqueeze(w, 1)), -1)
    if x.ndim == 1 and w.ndim > 1:
        return squeeze(matmul(unsqueeze(x, 0), w), -2)
    if w.ndim == 3 and x.ndim > 2 and w.domains[0].is_single and not w.domains[-1].is_ragged:
        return matmul(x, squeeze(w, 0))
    fusion = x.fusion
    what = f"matmul of {both(x, w)}"
    if x.ndim < 2 or w.ndim < 2 or (w.ndim > 3 and w.ndim != x.ndim):
        raise ShapeError(
            f"{what}: expected rows [..., k] and a weight [k, j] or [B, k, j], or operands with the same number of dims"
        )
    if x.dtype != w.dtype:
        raise DtypeError(f"{what}: dtypes must be equal, got {x.dtype} and {w.dtype}; convert one of them")
    dtype, carried = product_dtypes("matmul", x)
    k, j = x.domains[-1], w.domains[-1]
    if k.is_ragged != w.domains[-2].is_ragged:
        raise ShapeError(
            f"{what}: only one of the contracted dims, the last of the first operand and the second to last of the second, is "
            "ragged; transpose(-1, -2) swaps the last two dims"
        )
    if k.is_ragged:
        match(fusion, f"{what}, contracted dims", k, w.domains[-2], "matmul, contracted dims")
    else:
        require_equal(
            fusion, f"{what}: the sizes of the contracted dims", k, w.domains[-2], "matmul: the sizes of contracted dims"
        )
    # Rows by the same rows, one weight used twice: two indices over one extent.
    (j,) = apart(fusion, [j], x.domains)
    index: Index = (k, j)
    if w.ndim > 3:
        j = _beside(x, w, j)
        index = (*(_shared(d, own) for d, own in zip(x.domains[:-2], w.domains[:-2], strict=True)), k, j)
    elif w.ndim == 3:
        component = _component(x)
        if not w.domains[0].is_single:
            require_equal(fusion, "matmul: the numbers of rows and of weights", component, w.domains[0])
        if isinstance(j, RaggedIterDomain) and j.component.uid != component.uid:
            j = under(component, j, fusion.fresh("r"))
        index = (_shared(component, w.domains[0]), k, j)
    kept = (*x.domains[:-1], j)
    state = fusion.tensor(carried, kept)
    product = call("mul", as_dtype(operand(x, x.domains), carried), as_dtype(operand(w, index), carried), dtype=carried)
    out = fusion.define([state], (*kept, k), Accumulate((state,), kept, SUM, (product,), (k,)))[0]
    return typed(out, dtype)


def operand(x: TensorView, index: Places, dtype: torch.dtype | None = None) -> Value:
    """An element of one operand of a product: a computed value is rounded to the operands' 16-bit dtype."""
    value, dtype = x.at(index), dtype or x.dtype
    given = x.tensor.memory.role is Role.INPUT and x.dtype == dtype
    return value if given or carried_dtype(dtype) == dtype else call("cast", value, dtype=dtype)


def _beside(x: TensorView, w: TensorView, j: IterDomain) -> IterDomain:
    """The last dim of a batched product, whose operands share the dims before the last two (heads, sequences): a ragged one
    belongs to the sequences of the first operand."""
    leading = x.domains[:-2]
    for dim, (own, other) in enumerate(zip(leading, w.domains[:-2], strict=True)):
        now, later = (f"matmul of {both(x, w, later=later)}, dim {dim}" for later in (False, True))
        if own.is_ragged or other.is_ragged or other.is_single:
            match(x.fusion, now, own, other, later)
        else:
            require_equal(x.fusion, f"{now}: the sizes", own, other, f"{later}: the sizes")
    if not isinstance(j, RaggedIterDomain):
        return j
    place = next((k for k, d in enumerate(w.domains[:-2]) if d.uid == j.component.uid), None)
    rows = next((d for d in x.domains[-2:] if isinstance(d, RaggedIterDomain)), None)
    owner = leading[place] if place is not None else j.component if rows is None else rows.component
    return j if j.component.uid == owner.uid else under(owner, j, x.fusion.fresh("r"))


def _shared(domain: IterDomain, own: IterDomain) -> IterDomain | None:
    """The index of a weight's leading dim: None for a dim of size 1, which all positions of `domain` share."""
    return None if own.is_single and own.uid != domain.uid else domain


def _component(x: TensorView) -> IterDomain:
    """The dim that selects one of several weights: the owner of the rows, or the third to last dim."""
    rows = [d for d in x.domains if isinstance(d, RaggedIterDomain)]
    if not rows and x.ndim < 3:
        raise ShapeError(f"matmul: {shown(x)} has no rows or matrices to pair with a batch of matrices; unsqueeze it first")
    return rows[-1].component if rows and any(d.uid == rows[-1].component.uid for d in x.domains) else x.domains[-3]


def linear(x: TensorView, weight: TensorView, bias: TensorView | None = None) -> TensorView:
    """`torch.nn.functional.linear`: weight is [j, k]."""
    fusion = x.fusion
    if weight.ndim != 2:
        raise ShapeError(f"linear: expected a weight [j, k], got {shown(weight)}")
    if x.dtype != weight.dtype:
        raise DtypeError(f"linear: both must have one dtype, got {x.dtype} and {weight.dtype}; convert one of them")
    k, (j,) = x.domains[-1], apart(fusion, weight.domains[:1], x.domains)
    what = f"linear of {shown(x)} and a weight {shown(weight)}: the features of both"
    require_equal(fusion, what, k, weight.domains[1], "linear: the features of rows and weight")
    kept = (*x.domains[:-1], j)
    dtype, carried = product_dtypes("linear", x)
    state = fusion.tensor(carried, kept)
    sides = operand(x, x.domains), operand(weight, (j, k))
    product = call("mul", *(as_dtype(side, carried) for side in sides), dtype=carried)
    out = fusion.define([state], (*kept, k), Accumulate((state,), kept, SUM, (product,), (k,)))[0]
    return typed(out if bias is None else add(out, bias), dtype)


def product_dtypes(name: str, x: TensorView) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of a product of tensors of one dtype, and the dtype it accumulates in; integers wrap around either way."""
    if x.dtype == torch.bool:
        raise DtypeError(f"{name}: {x.dtype} is not supported; convert it first")
    return x.dtype, carried_dtype(x.dtype) if x.dtype.is_floating_point else torch.int64
