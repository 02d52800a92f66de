"""Rows with one position in all, and one row in all: neither is a dim of size 1 that broadcasts. Compared with plain torch."""

from __future__ import annotations

import pytest
import torch

from serrate import JaggedTensor, ir, jit, nn, ops


def by_expert(tokens: torch.Tensor, expert: list[int], weights: torch.Tensor) -> torch.Tensor:
    return torch.stack([token @ weights[e] for token, e in zip(tokens, expert, strict=True)])


@jit
def route(tokens, expert, weights):  # type: ignore[no-untyped-def]
    offsets, order = ops.group_by(expert, weights.shape[0])
    rows = ops.as_nested(ops.index(tokens, order), offsets)
    return ops.index(ops.as_flattened(rows @ weights), ops.invert(order))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize(("experts", "chosen"), [(3, [2]), (3, [0]), (1, [0]), (1, [0, 0, 0]), (3, [1, 2, 1])])
def test_routing_few_tokens_to_few_experts(backend: str, experts: int, chosen: list[int]) -> None:
    tokens = torch.randn(len(chosen), 4, requires_grad=True)
    weights = torch.randn(experts, 4, 5, requires_grad=True)
    scale = torch.randn(len(chosen), 5)
    found = (jit(route.fn, backend=backend)(tokens, torch.tensor(chosen), weights) * scale).sum()
    wanted = (by_expert(tokens, chosen, weights) * scale).sum()
    torch.testing.assert_close(found, wanted)
    inputs = (tokens, weights)
    torch.testing.assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("offsets", [[0, 0, 1, 1], [0, 1], [0, 1, 1], [0, 0, 1]])
def test_one_position_of_a_compiled_in_size(backend: str, offsets: list[int]) -> None:
    count = len(offsets) - 1
    with ir.Fusion() as f:
        x, at = f.input((1, 4), torch.float32), f.input((count + 1,), torch.int64)
        w = f.input((count, 4), torch.float32)
        rows = ops.as_nested(x, at)
        f.output(ops.as_flattened(ops.mul(rows, ops.unsqueeze(w, 1))))
        f.output(ops.sum(ops.mul(rows, rows), 1))
    values, weight = torch.randn(1, 4, requires_grad=True), torch.randn(count, 4, requires_grad=True)
    owner = next(k for k in range(count) if offsets[k + 1] > offsets[k])
    scaled, squares = f.compile(backend)(values, torch.tensor(offsets), weight)
    torch.testing.assert_close(scaled, values * weight[owner])
    wanted_squares = torch.zeros(count, 4).index_add(0, torch.tensor([owner]), values * values)
    torch.testing.assert_close(squares, wanted_squares)
    found = torch.autograd.grad((scaled * 3).sum() + squares.sum(), (values, weight))
    wanted = torch.autograd.grad((values * weight[owner] * 3).sum() + wanted_squares.sum(), (values, weight))
    torch.testing.assert_close(found, wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("count", [1, 5])
def test_mixtures_of_one_token_and_of_one_expert(experts: int, top_k: int, count: int) -> None:
    module = nn.MoE(6, 10, num_experts=experts, top_k=top_k)
    tokens = torch.randn(count, 6)
    mixed = module(JaggedTensor.from_lengths(tokens, [count]))
    chances, chosen = torch.softmax(module.router(tokens), -1).topk(top_k)
    weights = chances / chances.sum(-1, keepdim=True)

    def expert(x: torch.Tensor, e: int) -> torch.Tensor:
        assert module.gate is not None
        return (torch.nn.functional.silu(x @ module.gate[e]) * (x @ module.up[e])) @ module.down[e]

    each = [sum(weights[t, k] * expert(tokens[t], int(chosen[t, k])) for k in range(top_k)) for t in range(count)]
    wanted = torch.stack([torch.as_tensor(one) for one in each])
    torch.testing.assert_close(mixed.output.values, wanted)
    parameters = [module.gate, module.up, module.down]
    found = torch.autograd.grad(mixed.output.values.square().sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), parameters), rtol=1e-4, atol=1e-5)
