"""Attention of sequences of different lengths, each to itself or to another: nothing is padded, and no scores are kept.

In: queries, keys and values, `[..., rows, features]`. Out: one row of features for each query. The definition sums values
weighted by the exponentials of scores, then scales the sums; schedules turn it into one pass over blocks of keys
(`schedule/strategies/contractions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Literal

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import match, under
from serrate.frontend.ops.common import Number, Operand, floating, require_equal
from serrate.frontend.ops.elementwise import add, div, mul, tanh, typed, where
from serrate.frontend.ops.movement import pulled, rows_of
from serrate.frontend.ops.normalise import softmax_terms
from serrate.frontend.ops.products import operand
from serrate.frontend.ops.random import attention_dropout
from serrate.frontend.ops.structure import unsqueeze
from serrate.frontend.shapes import equal_now, shown, size_shown
from serrate.ir.domains import IterDomain, shape_text
from serrate.ir.fusion import Fusion
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import SUM
from serrate.ir.tile import Accumulate
from serrate.ir.values import Place, Value, call, carried_dtype, constant, extent, index_of, position
from serrate.ir.view import TensorView

Corner = Literal["upper_left", "lower_right"]
ScoreMod = Callable[[TensorView, TensorView, TensorView, TensorView, TensorView], TensorView]


def attention(
    query: TensorView,
    key: TensorView,
    value: TensorView,
    *,
    mask: TensorView | None = None,
    is_causal: bool | Corner = False,
    window: int | None = None,
    scale: Number | None = None,
    soft_cap: Number | None = None,
    score_mod: ScoreMod | None = None,
    enable_gqa: bool = False,
    dropout_p: Operand = 0.0,
    seed: TensorView | None = None,
) -> TensorView:
    """`softmax(query @ keyᵀ * scale) @ value` within each sequence; `scale` defaults to `1 / sqrt(features)`.

    The ragged dim is the second to last; the dims before it, heads and sequences, are the same in all three. Queries and keys may
    have different lengths; either may be dense, with the same length in every sequence. Scores are transformed in this order:

    - `soft_cap`: `soft_cap * tanh(scores / soft_cap)`
    - `score_mod(score, sequence, head, query, key)`: any function of a score and its indices
    - `mask`: added, or, if it is bool, where a query sees a key. `[queries, keys]` for all sequences, or with dims before them
    - `is_causal`: query number `i` sees the keys up to number `i`; with "lower_right", the last query sees the last key
    - `window`: and of those only the last `window`

    With `enable_gqa`, several heads of queries share a head of keys and values. A query that sees no key gets zeros. With
    `dropout_p`, each weight is 0 with that probability, and the others are scaled up accordingly; `seed` as in `ops.dropout`.

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
    features = query.domains[-1]
    _check_both(query, key, value)
    match(fusion, f"attention: keys {shown(key)} and values {shown(value)}", key.domains[-2], value.domains[-2], "attention")
    require_equal(fusion, "attention: the features of queries and keys", features, key.domains[-1])
    leading, queries, keys = _rows(query, key)
    shared = [_heads(fusion, leading, other, queries.component, enable_gqa=enable_gqa) for other in (key, value)]
    if scale is None:
        scale = 1.0 / sqrt(fusion.fixed(features.extent_expr))
    fusion.fixed(value.domains[-1].extent_expr)
    rows = (*leading, queries, keys)
    product = call("mul", operand(query, (*leading, queries, features)), operand(key, (*shared[0], keys, features)), dtype=state)
    targets = (fusion.tensor(state, rows),)
    scores = fusion.define(targets, (*rows, features), Accumulate(targets, rows, SUM, (product,), (features,)))[0]
    scores = mul(scores, scale)
    if soft_cap is not None:
        scores = mul(tanh(div(scores, soft_cap)), soft_cap)
    if score_mod is not None:
        scores = _modified(scores, score_mod, queries.component)
    if mask is not None:
        scores = _masked(scores, mask)
    seen = _seen(queries, keys, is_causal, window)
    if seen is not None:
        masked = call("where", seen, scores.at(rows), constant(float("-inf"), state), dtype=state)
        scores = pulled(fusion, state, rows, masked)
    weights, factor = softmax_terms(scores, -1)
    if isinstance(dropout_p, TensorView) or dropout_p > 0:
        weights = attention_dropout(weights, dropout_p, seed=seed)
    width = value.domains[-1]
    if width.uid in {d.uid for d in rows}:
        raise ShapeError(f"attention: the features of values {shown(value)} are a dim of the scores")
    kept: tuple[IterDomain, ...] = (*leading, queries, width)
    term = call("mul", operand(weights, rows, dtype), operand(value, (*shared[1], keys, width)), dtype=state)
    targets = (fusion.tensor(state, kept),)
    found = fusion.define(targets, (*kept, keys), Accumulate(targets, kept, SUM, (term,), (keys,)))[0]
    # Sums are scaled, not weights: the gradient of a query's scale then needs its sums, and not all of its weights.
    found = mul(found, factor)
    if query.domains[-2].is_ragged:
        return typed(found, dtype)
    dense = query.domains[-2]
    found = pulled(fusion, state, (*leading, dense, width), found.at((*leading, Place(index_of(dense), (dense,)), width)))
    return typed(found, dtype)


def _rows(query: TensorView, key: TensorView) -> tuple[tuple[IterDomain, ...], RaggedIterDomain, RaggedIterDomain]:
    """The dims before the rows of scores, and both sides of them; a dense side is rows of one length."""
    fusion, (own, other) = query.fusion, (query.domains[-2], key.domains[-2])
    if isinstance(own, RaggedIterDomain):
        component, queries, leading = own.component, own, query.domains[:-2]
    else:
        assert isinstance(other, RaggedIterDomain)
        place = next(k for k, d in enumerate(key.domains) if d.uid == other.component.uid)
        require_equal(fusion, "attention: the numbers of sequences", query.domains[place], key.domains[place])
        count = query.domains[place].extent_expr
        component, queries = rows_of(fusion, own.extent_expr, count, own.extent_expr * count)
        leading = tuple(component if k == place else d for k, d in enumerate(query.domains[:-2]))
    if not isinstance(other, RaggedIterDomain):
        count = component.extent_expr
        _, other = rows_of(fusion, other.extent_expr, count, other.extent_expr * count)
    return leading, queries, under(component, other, fusion.fresh("r"))


def _heads(
    fusion: Fusion, leading: Sequence[IterDomain], other: TensorView, component: IterDomain, *, enable_gqa: bool
) -> tuple[IterDomain | Place, ...]:
    """Where keys or values are read in the dims before their rows: at the same head and sequence, or at the head of a group."""
    found = list[IterDomain | Place]()
    for own, beside in zip(leading, other.domains[:-2], strict=True):
        if own.uid != component.uid and not enable_gqa and not equal_now(fusion, own, beside):
            raise ShapeError(
                f"attention: queries have {size_shown(fusion, own)} heads, keys and values {size_shown(fusion, beside)}: pass "
                "enable_gqa=True if groups of the queries' heads share one"
            )
        if not enable_gqa or own.uid == component.uid:
            require_equal(fusion, "attention: the numbers of heads or sequences", own, beside)
            found.append(own)
            continue
        heads, groups = fusion.fixed(own.extent_expr), fusion.fixed(beside.extent_expr)
        if heads % max(groups, 1):
            raise ShapeError(f"attention: {heads} heads of queries cannot share {groups} heads of keys and values evenly")
        found.append(own if heads == groups else Place(index_of(own) // (heads // groups), (own,)))
    return tuple(found)


def _modified(scores: TensorView, score_mod: ScoreMod, component: IterDomain) -> TensorView:
    """Applies the caller's `score_mod`; without a head dim, the head is 0."""
    fusion, rows = scores.fusion, scores.domains
    heads = [d for d in rows[:-2] if d.uid != component.uid]

    def number(value: Value) -> TensorView:
        return pulled(fusion, torch.int64, rows, value)

    head = position(heads[-1]) if heads else constant(0, torch.int64)
    made = score_mod(scores, number(position(component)), number(head), *(number(position(d)) for d in rows[-2:]))
    if not isinstance(made, TensorView) or [d.uid for d in made.domains] != [d.uid for d in rows]:
        raise ShapeError(f"attention: score_mod must return one score per score, got {made!r}")
    return typed(made, scores.dtype)


def _masked(scores: TensorView, mask: TensorView) -> TensorView:
    if mask.ndim > scores.ndim or mask.ndim < 2:
        raise ShapeError(f"attention: a mask is [queries, keys], or has dims of {shown(scores)} before them; got {shown(mask)}")
    while mask.ndim < scores.ndim and not any(d.is_ragged for d in mask.domains):
        mask = unsqueeze(mask, 0)
    if mask.dtype == torch.bool:
        return where(mask, scores, float("-inf"))
    return typed(add(scores, typed(mask, scores.dtype)), scores.dtype)


def _seen(queries: IterDomain, keys: IterDomain, is_causal: bool | Corner, window: int | None) -> Value | None:
    """The condition under which a query sees a key, by index; None if it sees all."""
    if not is_causal and window is None:
        return None
    place, number = position(queries), position(keys)
    if is_causal == "lower_right":
        later = call("sub", extent(keys), extent(queries), dtype=torch.int64)
        place = call("add", place, later, dtype=torch.int64)
    seen = call("le", number, place, dtype=torch.bool) if is_causal else None
    if window is None:
        return seen
    first = call("sub", place, constant(window, torch.int64), dtype=torch.int64)
    near = call("gt", number, first, dtype=torch.bool)
    if seen is None:
        last = call("add", place, constant(window, torch.int64), dtype=torch.int64)
        seen = call("lt", number, last, dtype=torch.bool)
    return call("logical_and", seen, near, dtype=torch.bool)


def _check_both(query: TensorView, key: TensorView, value: TensorView) -> None:
    """Raises unless queries, or keys with their values, are ragged."""
    ragged = [x.domains[-2].is_ragged for x in (query, key, value)]
    if not any(ragged):
        raise ShapeError(f"attention: one of queries {shown(query)} and keys {shown(key)} must be ragged; call torch's own")
    if ragged[1] != ragged[2]:
        raise ShapeError(
            f"attention: keys {shown(key)} and values {shown(value)} must both be ragged, or both dense: use "
            f"JaggedTensor.from_padded({'key' if ragged[2] else 'value'}, lengths)"
        )


def _check(name: str, x: TensorView) -> None:
    """Raises unless the ragged dim is the second to last; the message says how to permute the dims."""
    ragged = [k for k, d in enumerate(x.domains) if d.is_ragged]
    if ragged == [x.ndim - 2] or (not ragged and x.ndim > 2):
        return
    if not ragged:
        raise ShapeError(f"attention: {name} must have the dims [sequences, ..., positions, features], got {shown(x)}")
    if len(ragged) != 1:
        raise ShapeError(
            f"attention: {name} must have one ragged dim, the sequence, got {shown(x)}; flatten the outer level first"
        )
    others = [k for k in range(x.ndim) if k != ragged[0]]
    component = next((k for k in others if x.domains[k].pairing is not None), others[0])
    heads = [k for k in others[:-1] if k != component]
    order = (component, *heads, ragged[0], others[-1])
    permuted = shape_text([x.domains[k] for k in order], x.fusion.sizes)
    raise ShapeError(
        f"attention: dim {ragged[0]} of {name} is ragged and must be the second to last: use "
        f"{name}.permute{order}, which is {permuted}, and permute the result back"
    )
