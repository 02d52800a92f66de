"""A mixture of experts. In: tokens, `[B, r0, D]` or `[tokens, D]`. Out: the same shape, with losses and loads of the router.

One program routes, groups the tokens by expert, multiplies each group by its expert's weights, and sums the results by token. The
groups exist only inside it: nothing is padded, no token is dropped, and no counts are copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serrate.api.jit import jit
from serrate.errors import CallError, ShapeError
from serrate.frontend import ops

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"swiglu": F.silu, "geglu": F.gelu, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
GATED = ("swiglu", "geglu")


class MoEOutput(NamedTuple):
    """The result of `MoE`."""

    output: Any
    """`[B, r0, D]` or `[tokens, D]`, as the input."""
    load_balancing_loss: Tensor
    """`experts * sum(share of choices * mean probability)` over the experts: 1 if all are equal."""
    z_loss: Tensor
    """The mean of `logsumexp(logits) ** 2`."""
    load: Tensor
    """The number of tokens of each expert, int64 `[experts]`."""


class Routed(NamedTuple):
    """The choices of a router, in a traced function: which experts each token goes to, and how to get there and back."""

    logits: Any
    chances: Any
    weights: Any
    """`[tokens, top_k]`, the weight of each choice."""
    offsets: Any
    """`[experts + 1]`: where the choices of each expert begin."""
    order: Any
    """The choices, `token * top_k + k`, by expert."""


def route(tokens: Any, router: Any, experts: int, top_k: int, normalise: bool) -> Routed:
    """Picks `top_k` experts for each token and groups the choices by expert; for traced functions."""
    logits: Any = F.linear(tokens, router)
    chances: Any = torch.softmax(logits, -1)
    weights, chosen = torch.topk(chances, top_k)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    flat: Any = chosen.flatten()
    return Routed(logits, chances, weights, *ops.group_by(flat, experts))


def apply_experts(rows: Any, gate: Any, up: Any, down: Any, activation: str) -> Any:
    """Each expert's layers on its own tokens, `[experts, tokens of each, D]`; for traced functions."""
    active = ACTIVATIONS[activation]
    hidden = active(rows @ up) if gate is None else active(rows @ gate) * (rows @ up)
    # Rounded, as torch's product is: what is summed by token is then half as many bytes.
    return (hidden @ down).to(rows.dtype)


def combine(worked: Any, order: Any, weights: Any, top_k: int) -> Any:
    """The weighted sum of each token's results, which are in the order of `Routed.order`; for traced functions."""
    back = ops.unflatten(ops.index(worked, ops.invert(order)), 0, (-1, top_k))  # choices by token
    return (back * weights.unsqueeze(2)).sum(1)


@jit
def _mixed(
    x: Any, router: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, top_k: int, activation: str, normalise: bool
) -> MoEOutput:
    ragged = any(d.is_ragged for d in x.domains)
    tokens, experts = x.values if ragged else x, up.shape[0]
    to = route(tokens, router, experts, top_k, normalise)
    rows = ops.as_nested(ops.index(tokens, to.order // top_k), to.offsets)  # [experts, tokens of each, D]
    output = combine(ops.as_flattened(apply_experts(rows, gate, up, down, activation)), to.order, to.weights, top_k)

    load = to.offsets[1:] - to.offsets[:-1]
    choices = to.offsets[-1].clamp(min=1)  # without tokens, both losses are 0
    count = choices / top_k
    balance = (to.chances.sum(0) * load).sum() * experts / (count * choices)
    z_loss = torch.logsumexp(to.logits, -1).square().sum() / count
    return MoEOutput(x.with_values(output) if ragged else output, balance, z_loss, load)


class MoE(nn.Module):
    """A router picks `top_k` experts for each token; the output is the sum of their results, weighted by their probabilities.

    Experts are two linear maps with an activation between ("relu", "gelu", "silu"), or gated ones ("swiglu", "geglu"):
    `(act(x gate) * (x up)) down`. `normalise` makes the weights of a token's experts sum to 1. `shared` is applied to
    every token, and its result added. Add the two losses, scaled, to your own to keep experts evenly loaded and logits small.

    >>> from serrate import JaggedTensor
    >>> x = JaggedTensor.from_lengths(torch.randn(5, 16), [3, 0, 2])
    >>> mixed = MoE(16, 32, num_experts=4, top_k=2)(x)
    >>> mixed.output.shape, int(mixed.load.sum())
    ((3, r0, 16), 10)
    >>> loss = mixed.output.sum() + 0.01 * mixed.load_balancing_loss + 0.001 * mixed.z_loss
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 2,
        activation: str = "swiglu",
        normalise: bool = True,
        shared: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise CallError(f"MoE: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if not 1 <= top_k <= num_experts:
            raise CallError(f"MoE: top_k must be between 1 and num_experts={num_experts}, got {top_k}")
        self.embed_dim, self.hidden_dim, self.num_experts, self.top_k = embed_dim, hidden_dim, num_experts, top_k
        self.activation, self.normalise, self.shared = activation, normalise, shared

        def weight(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, rows, columns, device=device, dtype=dtype))

        self.router = nn.Linear(embed_dim, num_experts, bias=False, device=device, dtype=dtype)
        self.gate: nn.Parameter | None
        self.register_parameter("gate", weight(embed_dim, hidden_dim) if activation in GATED else None)
        self.up, self.down = weight(embed_dim, hidden_dim), weight(hidden_dim, embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every expert as torch's `Linear`: uniform, within `1 / sqrt(in_features)`."""
        self.router.reset_parameters()
        for parameter in self.parameters(recurse=False):
            bound = 1 / math.sqrt(parameter.shape[1])
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Any) -> MoEOutput:
        dims = len(input.shape)
        if dims < 2 or input.shape[-1] != self.embed_dim or (dims > 2 and isinstance(input, torch.Tensor)):
            raise ShapeError(
                f"MoE: input must have the shape (B, r0, {self.embed_dim}) or (tokens, {self.embed_dim}), "
                f"got {tuple(input.shape)}"
            )
        mixed = self.mixed(input)
        return mixed if self.shared is None else mixed._replace(output=mixed.output + self.shared(input))

    def mixed(self, input: Any) -> MoEOutput:
        """The output without the shared experts; `serrate.distributed.ExpertParallel` replaces it."""
        mixed: MoEOutput = _mixed(
            input, self.router.weight, self.gate, self.up, self.down, self.top_k, self.activation, self.normalise
        )
        return mixed

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, {self.hidden_dim}, num_experts={self.num_experts}, top_k={self.top_k}"
        return f"{sizes}, activation={self.activation}"
