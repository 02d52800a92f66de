"""A layer of hierarchical sequential transduction units (HSTU). In: `[B, r0, embed_dim]`. Out: the same shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from serrate.api.jit import jit
from serrate.frontend import ops
from serrate.nn.checks import Ragged, require_rows


@jit
def _attended(
    projected: Ragged, widths: tuple[int, int, int, int], heads: int, max_length: int, eps: float, is_causal: bool
) -> Ragged:
    """`u * norm(silu(q @ kᵀ) / max_length @ v)`, of all four side by side."""
    active: Ragged = F.silu(projected)
    gate, *parts = active.split(widths, dim=2)
    value, query, key = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in parts)  # heads before rows
    scores = F.silu(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5) * (1 / max_length)
    found = ((torch.tril(scores) if is_causal else scores) @ value).transpose(1, 2).flatten(2)
    return ops.layer_norm(found, -1, eps=eps) * gate


class HSTU(nn.Module):
    """Attention with SiLU in place of a softmax, gated, with a residual: the layer of generative recommenders.

    `x + output(u * norm(silu(q kᵀ / sqrt(qk_dim)) / max_length · v))`, where `u, v, q, k` are `silu(uvqk(norm(x)))`. Each
    position sees itself and those before it, unless `is_causal` is False. `max_length` only scales the scores; rows may be
    longer. Heads have `v_dim` and `qk_dim` features each, by default `embed_dim // num_heads`.

    >>> from serrate import JaggedTensor
    >>> clicks = JaggedTensor.from_lengths(torch.randn(5, 16), [3, 0, 2])
    >>> HSTU(16, num_heads=2, max_length=50)(clicks).shape
    (3, r0, 16)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        *,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        is_causal: bool = True,
        dropout: float = 0.0,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        usual = max(1, embed_dim // num_heads)
        qk, v = num_heads * (qk_dim or usual), num_heads * (v_dim or usual)
        self.embed_dim, self.num_heads, self.max_length, self.is_causal, self.eps = (
            embed_dim,
            num_heads,
            max_length,
            is_causal,
            eps,
        )
        self.widths = (v, v, qk, qk)
        self.norm = nn.LayerNorm(embed_dim, eps=eps, device=device, dtype=dtype)
        self.uvqk = nn.Linear(embed_dim, sum(self.widths), bias=False, device=device, dtype=dtype)
        self.output = nn.Linear(v, embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Ragged) -> Ragged:
        require_rows("HSTU", input, self.embed_dim)
        projected = self.uvqk(self.norm(input))
        mixed = _attended(projected, self.widths, self.num_heads, self.max_length, self.eps, self.is_causal)
        return input + self.output(self.dropout(mixed))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, max_length={self.max_length}, is_causal={self.is_causal}"
