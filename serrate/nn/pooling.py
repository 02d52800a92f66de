"""One vector for each row. In: `[B, r0, D]`. Out: a Tensor `[B, D]`; an empty row gives zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from serrate.api.jit import jit
from serrate.nn.checks import Ragged, require_rows


@jit
def _mean(x: Ragged) -> Any:
    return x.sum(1) / x.lengths.clamp(min=1)[:, None]


@jit
def _max(x: Ragged) -> Any:
    return torch.where(x.lengths[:, None] > 0, x.amax(1), 0.0)


@jit
def _attended(x: Ragged, query: Tensor) -> Any:
    weights = torch.softmax(x @ query, 1)
    return (x * weights.unsqueeze(2)).sum(1)


class SumPool(nn.Module):
    """The sum of each row.

    >>> from serrate import JaggedTensor
    >>> SumPool()(JaggedTensor.from_lengths(torch.ones(5, 2), [3, 0, 2]))
    tensor([[3., 3.],
            [0., 0.],
            [2., 2.]])
    """

    def forward(self, input: Ragged) -> Any:
        return input.sum(1)


class MeanPool(nn.Module):
    """The mean of each row; 0 for an empty one, where `x.mean(1)` is NaN.

    >>> from serrate import JaggedTensor
    >>> MeanPool()(JaggedTensor.from_lengths(torch.arange(10.0).view(5, 2), [3, 0, 2]))
    tensor([[2., 3.],
            [0., 0.],
            [7., 8.]])
    """

    def forward(self, input: Ragged) -> Any:
        return _mean(input)


class MaxPool(nn.Module):
    """The largest value of each feature in each row; 0 for an empty row. Equal values share the gradient, as in `torch.amax`.

    >>> from serrate import JaggedTensor
    >>> MaxPool()(JaggedTensor.from_lengths(torch.arange(10.0).view(5, 2), [3, 0, 2]))
    tensor([[4., 5.],
            [0., 0.],
            [8., 9.]])
    """

    def forward(self, input: Ragged) -> Any:
        return _max(input)


class AttentionPool(nn.Module):
    """A weighted mean of each row: the weights are a softmax of the products with a learned query.

    >>> from serrate import JaggedTensor
    >>> AttentionPool(4)(JaggedTensor.from_lengths(torch.randn(5, 4), [3, 0, 2])).shape
    torch.Size([3, 4])
    """

    def __init__(self, embed_dim: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.query = nn.Parameter(torch.empty(embed_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, with the standard deviation `1 / sqrt(embed_dim)`."""
        nn.init.normal_(self.query, std=self.embed_dim**-0.5)

    def forward(self, input: Ragged) -> Any:
        require_rows("AttentionPool", input, self.embed_dim)
        return _attended(input, self.query)

    def extra_repr(self) -> str:
        return str(self.embed_dim)
