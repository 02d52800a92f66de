"""A linear map for each group of rows. In: `[groups, r0, in]`. Out: `[groups, r0, out]`, one grouped product, nothing padded."""

from __future__ import annotations

import math

import torch
from torch import nn

from serrate.api.jit import jit
from serrate.nn.checks import Ragged, require_rows


@jit
def _grouped(x: Ragged, weight: torch.Tensor, bias: torch.Tensor | None) -> Ragged:
    product = x @ weight
    return product if bias is None else product + bias.unsqueeze(1)


class GroupedLinear(nn.Module):
    """Row `g` of the input is multiplied by `weight[g]`, `[in, out]`; `bias[g]` is added.

    >>> from serrate import JaggedTensor
    >>> tokens = JaggedTensor.from_lengths(torch.ones(5, 4), [3, 0, 2])  # three groups
    >>> GroupedLinear(3, 4, 8)(tokens).shape
    (3, r0, 8)
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_groups, in_features, out_features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        own = nn.Parameter(torch.empty(num_groups, out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's `Linear`: uniform, within `1 / sqrt(in_features)`."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Ragged) -> Ragged:
        require_rows("GroupedLinear", input, self.in_features)
        return _grouped(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"
