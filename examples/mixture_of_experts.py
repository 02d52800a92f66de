"""Mixture of experts: route tokens to experts, multiply by the expert's weights, and restore the token order.

Run as `python examples/mixture_of_experts.py`.
"""

import torch

import serrate
from serrate import JaggedTensor


@serrate.jit
def expert_layer(tokens, up, down):
    """Two matrix products with a relu in between, using each expert's own weights; one launch each, no padding."""
    return torch.relu(tokens @ up) @ down


def main() -> None:
    torch.manual_seed(0)
    experts, width, hidden, count = 8, 32, 64, 1000
    tokens = torch.randn(count, width)
    router = torch.randn(width, experts)
    choice = (tokens @ router).argmax(1)

    order = choice.argsort(stable=True)
    routed = JaggedTensor.from_lengths(tokens[order], torch.bincount(choice, minlength=experts))
    up, down = torch.randn(experts, width, hidden) / 8, torch.randn(experts, hidden, width) / 8
    mixed = torch.empty_like(tokens)
    mixed[order] = expert_layer(routed, up, down).values

    wanted = torch.stack([torch.relu(t @ up[e]) @ down[e] for t, e in zip(tokens, choice, strict=True)])
    torch.testing.assert_close(mixed, wanted, rtol=1e-3, atol=1e-4)
    print(routed)
    print(f"{count} tokens through {experts} experts, the busiest with {routed.max_length}; plan:")
    print(expert_layer.plan(routed, up, down))


if __name__ == "__main__":
    main()
