"""A mixture-of-experts layer as one fusion: top-k routing, grouping, each expert's matrix products, and the weighted sum.

The program computes the routing itself, so the experts' rows exist only inside it. Nothing is padded, no token is dropped, and no
lengths are copied to the host. Run as `python examples/routing.py`.
"""

import torch
from torch import Tensor

from serrate import ir, ops

EXPERTS, CHOICES, WIDTH, HIDDEN = 8, 2, 32, 64


def layer() -> ir.Fusion:
    with ir.Fusion("experts") as f:
        tokens, router = f.input((None, WIDTH), torch.float32), f.input((WIDTH, EXPERTS), torch.float32)
        up, down = f.input((EXPERTS, WIDTH, HIDDEN), torch.float32), f.input((EXPERTS, HIDDEN, WIDTH), torch.float32)
        score, expert = ops.topk(ops.matmul(tokens, router), CHOICES)  # [tokens, choices]
        gate = ops.softmax(score, 1)

        offsets, order = ops.group_by(ops.flatten(expert), EXPERTS)  # group the choices by expert
        rows = ops.as_nested(ops.index(tokens, order // CHOICES), offsets)  # [experts, tokens of each, width]
        worked = ops.matmul(ops.relu(ops.matmul(rows, up)), down)

        back = ops.index(ops.as_flattened(worked), ops.invert(order))  # restore the order of the choices
        weighted = ops.unflatten(back, 0, (-1, CHOICES)) * ops.unsqueeze(gate, 2)
        f.output(ops.sum(weighted, 1), offsets, order)
    return f


def plain(tokens: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same, token by token."""
    score, expert = torch.topk(tokens @ router, CHOICES)
    mixed = torch.zeros_like(tokens)
    for n, (gates, chosen) in enumerate(zip(torch.softmax(score, 1), expert.tolist(), strict=True)):
        for gate, e in zip(gates, chosen, strict=True):
            mixed[n] += gate * (torch.relu(tokens[n] @ up[e]) @ down[e])
    return mixed


def main() -> None:
    torch.manual_seed(0)
    count = 1000
    tokens, router = torch.randn(count, WIDTH), torch.randn(WIDTH, EXPERTS)
    up, down = torch.randn(EXPERTS, WIDTH, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, WIDTH) / 8
    program = layer().compile()
    mixed, offsets, order = program(tokens, router, up, down)

    torch.testing.assert_close(mixed, plain(tokens, router, up, down), rtol=1e-3, atol=1e-4)
    assert torch.equal(order.sort().values, torch.arange(count * CHOICES)), "every token, exactly once for each of its choices"
    assert offsets[-1] == count * CHOICES
    print(f"{count} tokens, {CHOICES} of {EXPERTS} experts each, in {len(program.stages)} stages; tokens of each expert:")
    print(offsets.diff().tolist())


if __name__ == "__main__":
    main()
