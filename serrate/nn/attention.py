"""Multi-head attention within rows. In: queries, keys and values `[B, r0, embed_dim]`. Out: `[B, r0, embed_dim]`.

The projections are ordinary linear maps. Everything between them, from splitting the heads to the weighted values, is one
program that stores no scores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serrate.api.jit import jit
from serrate.errors import CallError
from serrate.frontend import ops
from serrate.nn.checks import Ragged, require_divisible, require_rows
from serrate.nn.rotary import RotaryEmbedding, rotated

Angles = tuple[Tensor, Tensor]


def _attended(
    query: Ragged,
    key: Ragged,
    value: Ragged,
    head_dim: int,
    angles: Angles | None,
    mask: Any,
    is_causal: bool,
    window: int | None,
    dropout: float,
) -> Ragged:
    query, key, value = (x.unflatten(2, (-1, head_dim)) for x in (query, key, value))
    if angles is not None:
        query, key = rotated(query, *angles), rotated(key, *angles)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # heads before rows
    found = ops.attention(query, key, value, mask=mask, is_causal=is_causal, window=window, enable_gqa=True, dropout_p=dropout)
    return found.transpose(1, 2).flatten(2)


_attention = jit(_attended)


@jit
def _self_attention(
    projected: Ragged,
    widths: tuple[int, int, int],
    head_dim: int,
    angles: Angles | None,
    mask: Any,
    is_causal: bool,
    window: int | None,
    dropout: float,
) -> Ragged:
    """Attention of queries, keys and values that are concatenated, as one projection returns them."""
    query, key, value = projected.split(widths, dim=2)
    return _attended(query, key, value, head_dim, angles, mask, is_causal, window, dropout)


class MultiheadAttention(nn.Module):
    """Every row attends to itself, or to the row of another ragged tensor; no positions are padded, no scores are stored.

    With the defaults, it has the parameters of `torch.nn.MultiheadAttention` under the same names, so either loads the other's
    `state_dict`. It returns only the output, without weights.

    - `num_kv_heads`: fewer heads of keys and values than of queries, each shared by a group of queries' heads
    - `is_causal`: a position sees none after it; `window`: it sees only the nearest `window`, itself included
    - `rotary`: a `RotaryEmbedding(embed_dim // num_heads)`, which turns queries and keys; layers may share one
    - `dropout`: of weights, while training

    >>> from serrate import JaggedTensor
    >>> x = JaggedTensor.from_lengths(torch.randn(5, 16), [3, 0, 2])
    >>> attention = MultiheadAttention(16, num_heads=4, num_kv_heads=2, is_causal=True, rotary=RotaryEmbedding(4))
    >>> attention(x).shape
    (3, r0, 16)
    >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    >>> ours = MultiheadAttention(16, 4)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> torch.allclose(ours(x)[2], theirs(x[2], x[2], x[2])[0], atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        is_causal: bool = False,
        window: int | None = None,
        rotary: RotaryEmbedding | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = require_divisible("MultiheadAttention", "embed_dim", embed_dim, "num_heads", num_heads)
        require_divisible("MultiheadAttention", "num_heads", num_heads, "num_kv_heads", kv_heads)
        if rotary is not None and rotary.head_dim != self.head_dim:
            raise CallError(f"MultiheadAttention: rotary has head_dim={rotary.head_dim}, the heads have {self.head_dim}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.dropout, self.is_causal, self.window, self.rotary = dropout, is_causal, window, rotary
        self.widths = (embed_dim, kv_heads * self.head_dim, kv_heads * self.head_dim)
        self.in_proj_weight = nn.Parameter(torch.empty(sum(self.widths), embed_dim, device=device, dtype=dtype))
        self.in_proj_bias: nn.Parameter | None
        own = nn.Parameter(torch.empty(sum(self.widths), device=device, dtype=dtype)) if bias else None
        self.register_parameter("in_proj_bias", own)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's `MultiheadAttention`."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Ragged,
        key: Ragged | None = None,
        value: Ragged | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Ragged:
        """Attention of `query` to itself, or to `key` and `value` (by default `key`).

        `attn_mask` is `[longest, longest]` or `[B, heads, longest, longest]`: added to the scores or, if bool, true where a query
        sees a key.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x is not None:
                require_rows("MultiheadAttention", x, self.embed_dim, name)
        if key is None and value is not None:
            raise CallError("MultiheadAttention: value is given without key: pass both, or neither for self-attention")
        causal = self.is_causal if is_causal is None else is_causal
        dropout = self.dropout if self.training else 0.0
        angles = None if self.rotary is None else (self.rotary.cos, self.rotary.sin)
        options = (self.head_dim, angles, attn_mask, causal, self.window, dropout)
        if key is None:
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return self.out_proj(_self_attention(projected, self.widths, *options))
        value = key if value is None else value
        weights = self.in_proj_weight.split_with_sizes(self.widths)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split_with_sizes(self.widths)
        parts = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
        return self.out_proj(_attention(*parts, *options))

    def extra_repr(self) -> str:
        facts = [f"{self.embed_dim}, {self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            facts.append(f"num_kv_heads={self.num_kv_heads}")
        facts += [f"{name}={value}" for name in ("dropout", "is_causal", "window") if (value := getattr(self, name))]
        return ", ".join(facts)
