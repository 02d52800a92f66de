"""Self- and cross-attention over sequences of different lengths, without padding.

In: queries, keys and values, `[..., rows, features]`. Out: one row of features per query.
"""

from __future__ import annotations

from math import sqrt

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import match, under
from serrate.frontend.ops.common import Number, floating, require_equal
from serrate.frontend.ops.elementwise import mul, typed
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.normalise import softmax_or_zero
from serrate.frontend.ops.products import operand
from serrate.frontend.shapes import shown
from serrate.ir.domains import IterDomain
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import SUM
from serrate.ir.tile import Accumulate
from serrate.ir.values import call, carried_dtype, constant, position
from serrate.ir.view import TensorView


def attention(
    query: TensorView, key: TensorView, value: TensorView, *, is_causal: bool = False, scale: Number | None = None
) -> TensorView:
    """`softmax(query @ keyᵀ * scale) @ value` within each sequence; `scale` defaults to `1 / sqrt(features)`.

    The ragged dim is the second to last; the dims before it, heads and sequences, are the same in all three. Queries and keys may
    have different lengths. With `is_causal`, query `i` sees keys `0` to `i`.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
    ...     rows = ops.as_nested(x, offsets)
    ...     f.output(attention(rows, rows, rows, is_causal=True))
    >>> f.evaluate(torch.ones(5, 2), torch.tensor([0, 3, 3, 5])).values[0]
    tensor([1., 1.])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check(name, x)
    if not query.dtype == key.dtype == value.dtype:
        raise DtypeError(f"attention: dtypes must be equal, got {query.dtype}, {key.dtype} and {value.dtype}")
    if not query.ndim == key.ndim == value.ndim:
        raise ShapeError(f"attention: numbers of dims must be equal, got {query.ndim}, {key.ndim} and {value.ndim}")
    fusion, dtype = query.fusion, floating("attention", query)
    state = carried_dtype(dtype)
    *leading, queries, features = query.domains
    for other in (key, value):
        for own, beside in zip(leading, other.domains[:-2], strict=True):
            require_equal(fusion, "attention: the numbers of heads or sequences", own, beside)
    match(fusion, f"attention: keys {shown(key)} and values {shown(value)}", key.domains[-2], value.domains[-2], "attention")
    require_equal(fusion, "attention: the features of queries and keys", features, key.domains[-1])
    assert isinstance(queries, RaggedIterDomain) and isinstance(key.domains[-2], RaggedIterDomain)
    keys = under(queries.component, key.domains[-2], fusion.fresh("r"))
    if scale is None:
        scale = 1.0 / sqrt(fusion.fixed(features.extent_expr))
    rows = (*leading, queries, keys)
    product = call("mul", operand(query, query.domains), operand(key, (*leading, keys, features)), dtype=state)
    targets = (fusion.tensor(state, rows),)
    scores = fusion.define(targets, (*rows, features), Accumulate(targets, rows, SUM, (product,), (features,)))[0]
    scores = mul(scores, scale)
    if is_causal:
        seen = call("le", position(keys), position(queries), dtype=torch.bool)
        masked = call("where", seen, scores.at(rows), constant(float("-inf"), state), dtype=state)
        scores = pulled(fusion, state, rows, masked)
    weights = softmax_or_zero(scores, -1)
    width_of_values = value.domains[-1]
    kept: tuple[IterDomain, ...] = (*leading, queries, width_of_values)
    term = call("mul", operand(weights, rows, dtype), operand(value, (*leading, keys, width_of_values)), dtype=state)
    targets = (fusion.tensor(state, kept),)
    found = fusion.define(targets, (*kept, keys), Accumulate(targets, kept, SUM, (term,), (keys,)))[0]
    return typed(found, dtype)


def _check(name: str, x: TensorView) -> None:
    """Raises unless the ragged dim is the second to last; the message says how to permute the dims."""
    ragged = [k for k, d in enumerate(x.domains) if d.is_ragged]
    if ragged == [x.ndim - 2]:
        return
    if len(ragged) != 1:
        raise ShapeError(
            f"attention: {name} must have one ragged dim, the sequence, got {shown(x)}; flatten the outer level first"
        )
    others = [k for k in range(x.ndim) if k != ragged[0]]
    component = next((k for k in others if x.domains[k].pairing is not None), others[0])
    heads = [k for k in others[:-1] if k != component]
    # A dim between sequences and their rows cannot be stored in values, so heads come first.
    order = (*heads, component, ragged[0], others[-1])
    raise ShapeError(
        f"attention: dim {ragged[0]} of {name} is ragged and must be the second to last: use "
        f"{name}.permute{order}, which is [{', '.join(str(x.shape[k]) for k in order)}], and permute the result back"
    )
