"""Rotary position embeddings. In: queries or keys, `[B, r0, heads, head_dim]`. Out: the same, turned by their positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serrate.api.jit import jit
from serrate.errors import ShapeError
from serrate.frontend import ops
from serrate.nn.checks import Ragged


def rotated(x: Ragged, cos: Tensor, sin: Tensor) -> Ragged:
    """`x` with each pair of features, one from each half, turned by the angle of its position. For traced functions."""
    return _by_angles(x, cos[None, :, None], sin[None, :, None])


def rotated_from(x: Ragged, start: Tensor, cos: Tensor, sin: Tensor) -> Ragged:
    """As `rotated`, with the position of each row's first element. For traced functions."""
    places: Ragged = ops.position(x[..., 0, 0], 1)
    at = places + start[:, None]
    return _by_angles(x, F.embedding(at, cos)[:, :, None], F.embedding(at, sin)[:, :, None])


def _by_angles(x: Ragged, cos: Ragged, sin: Ragged) -> Ragged:
    first, second = x.chunk(2, -1)
    turned: Ragged = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)  # under autocast, the angles have more precision than the features


def _may_be_equal(a: Any, b: Any) -> bool:
    """Whether two sizes may be equal. In a traced function, a size that is not 1 may be a symbol; then the program checks it."""
    numbers = [size for size in (a, b) if isinstance(size, int)]
    return a == b if len(numbers) == 2 else 1 not in numbers


_rotated, _rotated_from = jit(rotated), jit(rotated_from)


class RotaryEmbedding(nn.Module):
    """Turns features `d` and `d + head_dim / 2` of position `p` by the angle `p / base ** (2 d / head_dim)`.

    Positions count from 0 in each row, or from `start`, one integer for each row: to decode, turn new queries and keys with the
    lengths of the rows that are cached. Angles are kept for `max_length` positions; a row that needs more raises.

    >>> from serrate import JaggedTensor
    >>> queries = JaggedTensor.from_lengths(torch.randn(5, 2, 8), [3, 0, 2])
    >>> turned = RotaryEmbedding(8)(queries)
    >>> torch.equal(turned[2][0], queries[2][0])  # position 0 stays
    True
    >>> last = RotaryEmbedding(8)(queries[:, -1:], start=torch.tensor([2, 0, 1]))
    >>> torch.allclose(last[0][0], turned[0][2])
    True
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_length: int = 4096,
        base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim <= 0 or head_dim % 2:
            raise ShapeError(f"RotaryEmbedding: head_dim must be even and positive, got {head_dim}")
        self.head_dim, self.max_length, self.base = head_dim, max_length, base
        place = torch.arange(max_length, device=device, dtype=torch.float64)
        speed = base ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
        angles = place[:, None] * speed
        dtype = torch.get_default_dtype() if dtype is None else dtype
        # Derived from the arguments: not part of the state.
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, input: Ragged, start: Tensor | None = None) -> Ragged:
        if len(input.shape) != 4 or input.shape[3] != self.head_dim:
            raise ShapeError(
                f"RotaryEmbedding: input must have the shape (B, r0, heads, {self.head_dim}), got {tuple(input.shape)}"
            )
        if start is None:
            return _rotated(input, self.cos, self.sin)
        rows = input.shape[0]
        if start.dtype not in (torch.int32, torch.int64) or start.ndim != 1 or not _may_be_equal(start.shape[0], rows):
            raise ShapeError(
                f"RotaryEmbedding: start must have one int32 or int64 position for each of the {rows} rows, "
                f"got {start.dtype} of shape {tuple(start.shape)}"
            )
        return _rotated_from(input, start, self.cos, self.sin)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, max_length={self.max_length}, base={self.base:g}"
