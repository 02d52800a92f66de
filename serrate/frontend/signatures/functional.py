"""`torch.nn.functional` under torch's signatures: products, norms, tables, similarity, attention.

In: traced tensors and options as torch's functions take them. Out: traced tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from serrate.errors import CallError, ShapeError
from serrate.frontend import ops
from serrate.frontend.ops.attention import Corner
from serrate.frontend.ops.common import Number, Operand
from serrate.frontend.ops.movement import require_inside
from serrate.frontend.ops.random import require_probability
from serrate.frontend.shapes import shown
from serrate.frontend.signatures.reducing import vector_norm
from serrate.ir.view import TensorView


def linear(input: TensorView, weight: TensorView, bias: TensorView | None = None) -> TensorView:
    return ops.linear(input, weight, bias)


def einsum(equation: str, *operands: TensorView) -> TensorView:
    return ops.einsum(equation, *operands)


def bmm(input: TensorView, mat2: TensorView) -> TensorView:
    return _of_dims("bmm", 3, input, mat2)


def mm(input: TensorView, mat2: TensorView) -> TensorView:
    return _of_dims("mm", 2, input, mat2)


def mv(input: TensorView, vec: TensorView) -> TensorView:
    return ops.matmul(input, vec)


def _of_dims(name: str, dims: int, a: TensorView, b: TensorView) -> TensorView:
    if a.ndim != dims or b.ndim != dims:
        raise ShapeError(f"{name} of {shown(a)} and {shown(b)}: both must have {dims} dims; use matmul")
    return ops.matmul(a, b)


def grouped_mm(
    mat_a: TensorView,
    mat_b: TensorView,
    *,
    offs: TensorView | None = None,
    bias: TensorView | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorView:
    """A product for each group. Without `offs` the groups are dim 0 of both, whose rows may be ragged; `offs` are the ends of
    groups in the flat dim: the rows of `mat_a`, the columns of `mat_b`, or the dim that both contract."""
    if bias is not None:
        raise CallError("grouped_mm: bias is not supported, in torch neither; add it to the result")
    if offs is None:
        found = _of_dims("grouped_mm", 3, mat_a, mat_b)
        return found if out_dtype is None else ops.cast(found, out_dtype)
    offsets = ops.pad(offs, 0, 1, 0)
    if (mat_a.ndim, mat_b.ndim) == (2, 3):
        rows = ops.as_nested(mat_a, offsets)
        found = ops.as_flattened(ops.matmul(rows, mat_b))
    elif (mat_a.ndim, mat_b.ndim) == (3, 2):
        columns = ops.as_nested(mat_b, offsets, ragged_dim=1)
        found = ops.as_flattened(ops.einsum("gmk,kgn->mgn", mat_a, columns), component_dim=1, ragged_dim=2)
    elif (mat_a.ndim, mat_b.ndim) == (2, 2):
        a, b = ops.as_nested(mat_a, offsets, ragged_dim=1), ops.as_nested(mat_b, offsets)
        found = ops.einsum("mgk,gkn->gmn", a, b)
    else:
        raise ShapeError(f"grouped_mm of {shown(mat_a)} and {shown(mat_b)}: offs divide a dim of a tensor of two dims")
    return found if out_dtype is None else ops.cast(found, out_dtype)


def layer_norm(
    input: TensorView,
    normalized_shape: Sequence[int],
    weight: TensorView | None = None,
    bias: TensorView | None = None,
    eps: float = 1e-5,
) -> TensorView:
    return ops.layer_norm(input, _trailing("layer_norm", input, normalized_shape), weight, bias, eps)


def rms_norm(
    input: TensorView, normalized_shape: Sequence[int], weight: TensorView | None = None, eps: float | None = None
) -> TensorView:
    return ops.rms_norm(input, _trailing("rms_norm", input, normalized_shape), weight, eps)


def _trailing(name: str, x: TensorView, shape: Sequence[int]) -> tuple[int, ...]:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    found = tuple(x.shape[d] for d in dims)
    if found != tuple(shape):
        raise ShapeError(
            f"{name}: normalized_shape {tuple(shape)} is not the shape of the last dims, {found}; "
            f"use ops.{name}(x, dim) to normalise over any dims, including ragged ones"
        )
    return dims


def normalize(input: TensorView, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> TensorView:
    return ops.div(input, ops.maximum(vector_norm(input, p, dim, keepdim=True), eps))


def embedding(
    input: TensorView,
    weight: TensorView,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorView:
    if scale_grad_by_freq:
        raise CallError(
            "embedding: scale_grad_by_freq is not supported; divide the gradient of the table by the counts of its rows"
        )
    if max_norm is not None:
        raise CallError("embedding: max_norm changes the table while it is read; scale the table before the call")
    found = ops.embedding(input, weight)
    require_inside("embedding", weight, 0, input)
    if padding_idx is None:
        return found
    own = padding_idx if padding_idx >= 0 else weight.size_of(0) + padding_idx
    return ops.where(ops.unsqueeze(ops.eq(input, own), input.ndim), ops.detach(found), found)


def embedding_bag(
    input: TensorView,
    weight: TensorView,
    offsets: TensorView | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: TensorView | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> TensorView:
    """Bags are the rows of a ragged `input`, those of a dense one of two dims, or parts of a flat one, by `offsets`."""
    if max_norm is not None:
        raise CallError("embedding_bag: max_norm changes the table while it is read; scale the table before the call")
    if scale_grad_by_freq:
        raise CallError(
            "embedding_bag: scale_grad_by_freq is not supported; divide the gradient of the table by the counts of its rows"
        )
    if (offsets is not None) != (input.ndim == 1):
        raise CallError(f"embedding_bag: offsets divide a tensor of one dim into bags, and only that; got {shown(input)}")
    if offsets is not None:
        if not include_last_offset:
            # The total after them: added to a 0, and 0 to the others.
            last = ops.pad(ops.mul(offsets, 0), 0, 0, 1, 1)
            offsets = ops.add(ops.pad(offsets, 0, 0, 1), ops.mul(last, input.size_of(0)))
        input, flat = ops.as_nested(input, offsets), per_sample_weights
        per_sample_weights = None if flat is None else ops.as_nested(flat, offsets)
    found = ops.embedding_bag(input, weight, mode=mode, per_sample_weights=per_sample_weights, padding_idx=padding_idx)
    require_inside("embedding_bag", weight, 0, input)
    return found


def cosine_similarity(x1: TensorView, x2: TensorView, dim: int = 1, eps: float = 1e-8) -> TensorView:
    sizes = [ops.maximum(vector_norm(x, 2.0, dim, keepdim=True), eps) for x in (x1, x2)]
    return ops.sum(ops.mul(ops.div(x1, sizes[0]), ops.div(x2, sizes[1])), dim)


def scaled_dot_product_attention(
    query: TensorView,
    key: TensorView,
    value: TensorView,
    attn_mask: Any = None,
    dropout_p: Operand = 0.0,
    is_causal: bool = False,
    scale: Number | None = None,
    enable_gqa: bool = False,
) -> TensorView:
    if not isinstance(dropout_p, TensorView):
        require_probability("scaled_dot_product_attention", dropout_p)
    corner: bool | Corner = is_causal
    if isinstance(attn_mask, str):
        # torch.nn.attention.bias.causal_lower_right or causal_upper_left
        corner, attn_mask = "lower_right" if attn_mask == "lower_right" else "upper_left", None
    if attn_mask is not None and is_causal:
        raise CallError("scaled_dot_product_attention: attn_mask and is_causal=True exclude each other, as in torch")
    return ops.attention(
        query, key, value, mask=attn_mask, is_causal=corner, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p
    )
