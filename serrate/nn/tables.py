"""Pooled lookups. In: bags of indices, the rows of a ragged tensor. Out: one vector for each bag.

With a fused optimiser, the backward pass updates the rows that were looked up, in place; there is no gradient to store, and the
work does not depend on the size of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serrate.api.row_gradients import Lookup, recorded, sparse_gradient
from serrate.errors import CallError
from serrate.ir.view import TensorView
from serrate.nn.checks import Ragged
from serrate.tensor import JaggedTensor


class EmbeddingBag(nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` whose bags are the rows of a ragged tensor, `[B, r0]` or `[B, r0, r1]`. An empty bag gives zeros.

    `fused_optimizer` is "sgd" or "rowwise_adagrad" (Adagrad with one sum of squares for each row): `backward()` then updates the
    rows that were looked up, with `lr`, and the table has no `.grad`. Every row is updated once, by the sum of its gradients in a
    fixed order, so the bits of the table are the same in every run. `requires_grad_(False)` freezes the table. Gradients are
    applied as they arrive: loss scaling and clipping do not reach them, and each process updates its own table. With a
    `GradScaler`, with clipping or with several processes, use `sparse=True`.

    >>> bag = EmbeddingBag(10, 2, mode="sum", fused_optimizer="sgd", lr=0.5)
    >>> before = bag.weight.clone()
    >>> bags = JaggedTensor.from_lengths(torch.tensor([3, 4, 3]), [2, 0, 1])
    >>> bag(bags).sum().backward()
    >>> (before - bag.weight).detach()[2:5]
    tensor([[0.0000, 0.0000],
            [1.0000, 1.0000],
            [0.5000, 0.5000]])
    """

    sum_of_squares: Tensor

    def __init__(
        self, *args: Any, fused_optimizer: str | None = None, lr: float = 0.01, eps: float = 1e-10, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if fused_optimizer not in (None, *_UPDATES):
            raise CallError(f"EmbeddingBag: fused_optimizer must be one of {', '.join(_UPDATES)}, got {fused_optimizer!r}")
        self.fused_optimizer, self.lr, self.eps = fused_optimizer, lr, eps
        if fused_optimizer is not None and (self.mode == "max" or self.sparse):
            wrong = "mode='max'" if self.mode == "max" else "sparse=True"
            raise CallError(f"EmbeddingBag: fused_optimizer does not work with {wrong}: use mode='sum' or 'mean', sparse=False")
        if fused_optimizer == "rowwise_adagrad":
            exact = torch.promote_types(self.weight.dtype, torch.float32)
            self.register_buffer("sum_of_squares", torch.zeros(self.num_embeddings, device=self.weight.device, dtype=exact))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingBag:
        """For `to`, `half`, `cuda` ...: does not round sums of squares to 16 bits, in which they would soon stop growing."""
        sums = self._buffers.get("sum_of_squares")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if sums is not None and self.sum_of_squares.dtype.itemsize < torch.float32.itemsize:
            self.sum_of_squares = sums.to(self.sum_of_squares.device)
        return self

    def forward(self, input: Ragged, offsets: Tensor | None = None, per_sample_weights: Ragged | None = None) -> Any:
        if self.fused_optimizer is None or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input, offsets, per_sample_weights)
        self._check(input, per_sample_weights)
        with torch.no_grad():
            found = super().forward(input, offsets, per_sample_weights)
        lookup = Lookup(F.embedding_bag, input, self.weight, self.mode, per_sample_weights, self.padding_idx)
        return recorded(found, self.weight, lookup, self._update)

    def _check(self, input: Any, per_sample_weights: Any) -> None:
        """Raises for calls that a fused optimiser does not work with."""
        if isinstance(input, TensorView):
            raise CallError("EmbeddingBag: a fused optimiser does not work in a traced function: call the module outside of jit")
        if not isinstance(input, JaggedTensor):
            raise CallError(
                f"EmbeddingBag: with a fused optimiser, bags are the rows of a JaggedTensor, got a {type(input).__name__}: use "
                "JaggedTensor.from_lengths(indices, lengths)"
            )
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise CallError(
                "EmbeddingBag: the gradient of per_sample_weights needs the table, which a fused optimiser has already updated; "
                "use sparse=True, or detach per_sample_weights"
            )

    @torch.no_grad()
    def _update(self, rows: Tensor, gradients: Tensor) -> None:
        assert self.fused_optimizer is not None
        _UPDATES[self.fused_optimizer](self, rows, gradients)

    def extra_repr(self) -> str:
        fused = "" if self.fused_optimizer is None else f", fused_optimizer={self.fused_optimizer}, lr={self.lr}"
        return super().extra_repr() + fused


def _sgd(bag: EmbeddingBag, rows: Tensor, gradients: Tensor) -> None:
    # torch adds a sparse tensor whose rows differ in half the time of `index_add_`.
    bag.weight.add_(sparse_gradient(bag.weight)(rows, gradients), alpha=-bag.lr)


def _rowwise_adagrad(bag: EmbeddingBag, rows: Tensor, gradients: Tensor) -> None:
    gradients = gradients.to(bag.sum_of_squares.dtype)
    total = bag.sum_of_squares[rows] + gradients.square().mean(1)
    bag.sum_of_squares[rows] = total
    _sgd(bag, rows, gradients / (total.sqrt() + bag.eps)[:, None])


_UPDATES: dict[str, Callable[[EmbeddingBag, Tensor, Tensor], None]] = {"sgd": _sgd, "rowwise_adagrad": _rowwise_adagrad}
