"""A transformer layer over rows. In: `[B, r0, d_model]`. Out: the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serrate.errors import CallError
from serrate.nn.attention import MultiheadAttention
from serrate.nn.checks import Ragged
from serrate.nn.rotary import RotaryEmbedding

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class TransformerEncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual and a norm, as `torch.nn.TransformerEncoderLayer`.

    Either loads the other's `state_dict`. `activation` is "relu", "gelu", "silu" or a function; `num_kv_heads`, `is_causal`,
    `window` and `rotary` are those of `MultiheadAttention`.

    >>> from serrate import JaggedTensor
    >>> x = JaggedTensor.from_lengths(torch.randn(5, 16), [3, 0, 2])
    >>> layer = TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, norm_first=True, is_causal=True)
    >>> layer(x).shape
    (3, r0, 16)
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Any], Any] = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
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
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise CallError(
                f"TransformerEncoderLayer: activation must be one of {', '.join(ACTIVATIONS)} or a function, got {activation!r}"
            )
        self.self_attn = MultiheadAttention(
            d_model,
            nhead,
            dropout,
            bias,
            device,
            dtype,
            num_kv_heads=num_kv_heads,
            is_causal=is_causal,
            window=window,
            rotary=rotary,
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.norm_first = norm_first
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def forward(self, src: Ragged, *, attn_mask: Tensor | None = None, is_causal: bool | None = None) -> Ragged:
        def attended(x: Ragged) -> Ragged:
            return self.dropout1(self.self_attn(x, attn_mask=attn_mask, is_causal=is_causal))

        def fed(x: Ragged) -> Ragged:
            return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

        if self.norm_first:
            src = src + attended(self.norm1(src))
            return src + fed(self.norm2(src))
        src = self.norm1(src + attended(src))
        return self.norm2(src + fed(src))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}, activation={getattr(self.activation, '__name__', self.activation)}"
