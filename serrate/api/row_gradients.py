"""Gradients of tables by row: `F.embedding` and `F.embedding_bag` with `sparse=True`, and updates fused into the backward pass.

In: the indices of a lookup, and the gradient of its result. Out: the rows that were looked up, each once and in order, with the
sums of their gradients. The gradient of a row is the sum of the gradients of the bags that contain it. That is another
`embedding_bag`, by the inverted index: its bags are the rows of the table, and its indices are bags. Nothing of the table's size
is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError
from serrate.tensor import JaggedTensor

Pool = Callable[..., Any]
Apply = Callable[[Tensor, Tensor], Tensor | None]
"""Takes rows and their gradients, and returns the gradient of the table; None if it has applied them."""


class Lookup:
    """The rows of a table that a call read, and how it pooled them. `pool` is the eager `embedding_bag`."""

    def __init__(
        self,
        pool: Pool,
        indices: JaggedTensor,
        table: Tensor,
        mode: str | None,
        weights: JaggedTensor | None,
        padding_idx: int | None,
    ) -> None:
        if mode == "max":
            raise CallError("embedding_bag: the gradient of mode='max' is not kept by row, in torch neither: use sparse=False")
        packed = indices.contiguous()
        self._pool, self._mode, self._positions = pool, mode, packed.values.reshape(-1)
        self._lengths = packed.lengths if mode is not None else None
        self._weights = None if weights is None else weights.contiguous().values.detach()
        self._padding = padding_idx if padding_idx is None or padding_idx >= 0 else table.shape[0] + padding_idx

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, and their gradients; `grad` is that of the result's values, `[bags, features]`."""
        order = torch.argsort(self._positions, stable=True)
        rows, counts = torch.unique_consecutive(self._positions[order], return_counts=True)
        bags, weights = order, None
        if self._lengths is not None:
            numbers = torch.arange(self._lengths.shape[0], device=grad.device)
            bags = numbers.repeat_interleave(self._lengths, output_size=order.shape[0])
            if self._mode == "mean":
                grad = grad / self._sizes(bags).clamp(min=1)[:, None]
            bags = bags[order]
        grouped = JaggedTensor.from_lengths(bags, counts)
        if self._weights is not None:
            weights = grouped.with_values(self._weights[order])
        found = self._pool(grouped, grad.reshape(-1, grad.shape[-1]).contiguous(), mode="sum", per_sample_weights=weights)
        if self._padding is not None:
            kept = rows != self._padding
            rows, found = rows[kept], found[kept]
        return rows, found

    def _sizes(self, bags: Tensor) -> Tensor:
        """The number of indices of each bag that count."""
        assert self._lengths is not None
        if self._padding is None:
            return self._lengths
        return torch.zeros_like(self._lengths).index_add_(0, bags, (self._positions != self._padding).to(self._lengths.dtype))


class _RowGradients(torch.autograd.Function):
    """The identity, which records a gradient of the table that its argument was read from."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, table: Tensor, lookup: Lookup, apply: Apply) -> Tensor:
        ctx.lookup, ctx.used = lookup, apply
        return values.view_as(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        return grad, ctx.used(*ctx.lookup.gradients(grad)), None, None


_record: Callable[..., Tensor] = _RowGradients.apply


def recorded(found: Any, table: Tensor, lookup: Lookup, apply: Apply) -> Any:
    """`found`, the result of a lookup in a detached table, with row-wise gradients of the table recorded."""
    values = found.values if isinstance(found, JaggedTensor) else found
    out = _record(values, table, lookup, apply)
    return found.with_values(out) if isinstance(found, JaggedTensor) else out


def sparse_gradient(table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Gradients as a sparse tensor, as torch's `sparse=True` leaves them, but with every row once."""
    shape, dtype = table.shape, table.dtype

    def made(rows: Tensor, gradients: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(rows[None], gradients.to(dtype), shape, is_coalesced=True, check_invariants=False)

    return made


def tables(embedding: Callable[..., Any], embedding_bag: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`F.embedding` and `F.embedding_bag` of ragged indices, by programs of these, with row-wise gradients if `sparse`."""

    def wanted(table: Any, sparse: bool) -> bool:
        return sparse and isinstance(table, Tensor) and table.requires_grad and torch.is_grad_enabled()

    def look_up(
        input: Any,
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        if not wanted(weight, sparse):
            return embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
        found = embedding(input, weight.detach(), padding_idx, max_norm, norm_type, scale_grad_by_freq)
        lookup = Lookup(embedding_bag, input, weight, None, None, padding_idx)
        return recorded(found, weight, lookup, sparse_gradient(weight))

    def pool(
        input: Any,
        weight: Any,
        offsets: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Any:
        options = (
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            False,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
        if not wanted(weight, sparse):
            return embedding_bag(input, weight, *options)
        lookup = Lookup(embedding_bag, input, weight, mode, per_sample_weights, padding_idx)
        return recorded(embedding_bag(input, weight.detach(), *options), weight, lookup, sparse_gradient(weight))

    return look_up, pool
