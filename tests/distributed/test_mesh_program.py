"""Fusions over a mesh: each rank's results, side by side, are those of `evaluate` on one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from serrate import ir, ops
from serrate.distributed import MeshProgram
from serrate.errors import PartitionError, ScheduleError
from tests.distributed.ranks import on_processes, on_threads

OFFSETS = torch.tensor([[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]])


def experts(mesh: bool) -> ir.Fusion:
    """Tokens of every GPU by expert; regrouped to experts; each expert's layer, and the sum of its tokens."""
    with ir.Fusion("experts") as f:
        tokens, offsets = f.input((None, None, 3), torch.float32), f.input((None, None), torch.int64)
        weights = f.input((None, 3, 2), torch.float32)
        by_expert = ops.as_nested(ops.relu(tokens), offsets, ragged_dim=1)  # [gpu, expert, tokens, 3]
        merged = ops.regroup(by_expert * 2)  # [expert, tokens of all gpus, 3]
        if mesh:
            merged.parallelize(0, "mesh")
        f.output(ops.matmul(merged, weights), ops.sum(by_expert, 2), ops.sum(merged, 1), merged)
    return f


def arguments() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 100, 3, generator=generator), OFFSETS, torch.randn(4, 3, 2, generator=generator)


def local_results(rank: int, ranks: int, owned: tuple[int, ...] = (2, 2)) -> Any:
    tokens, offsets, weights = arguments()
    program = MeshProgram(experts(mesh=True), init_device_mesh("cpu", (ranks,)), owned)
    first, own = sum(owned[:rank]), owned[rank]
    return program(tokens[rank : rank + 1], offsets[rank : rank + 1], weights[first : first + own])


def check(results: list[Any], lengths: list[list[int]]) -> None:
    layer, seen, total, merged = experts(mesh=False).evaluate(*arguments())
    assert layer.lengths.tolist() == [55, 35, 65, 45]
    assert [each[0].lengths.tolist() for each in results] == lengths == [each[3].lengths.tolist() for each in results]
    torch.testing.assert_close(torch.cat([each[0].values for each in results]), layer.values)
    torch.testing.assert_close(torch.cat([each[1] for each in results]), seen)  # before the exchange: of the rank's own tokens
    torch.testing.assert_close(torch.cat([each[2] for each in results]), total)
    torch.testing.assert_close(torch.cat([each[3].values for each in results]), merged.values)


def test_two_gpus_with_two_experts_each() -> None:
    check(on_threads(2, local_results), [[55, 35], [65, 45]])


def test_uneven_shards() -> None:
    check(on_threads(2, lambda rank, ranks: local_results(rank, ranks, (3, 1))), [[55, 35, 65], [45]])


@pytest.mark.slow
def test_two_processes() -> None:
    check(on_processes(2, local_results), [[55, 35], [65, 45]])


Gradients = tuple[torch.Tensor, ...]


def objective(layer: torch.Tensor, seen: torch.Tensor, total: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
    """A sum over tokens and experts, so that the objectives of all ranks add up to that of all tokens."""
    return layer.square().sum() + seen.sin().sum() + (total / 9).cos().sum() + merged.tanh().sum()


def differentiated(loss: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> Gradients:
    """The gradients of both, and those of the sum of their squares."""
    first = torch.autograd.grad(loss, (tokens, weights), create_graph=True)
    second = torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), (tokens, weights))
    return tuple(g.detach() for g in (*first, *second))


def local_gradients(rank: int, ranks: int, owned: tuple[int, ...] = (2, 2)) -> Gradients:
    tokens, offsets, weights = arguments()
    program = MeshProgram(experts(mesh=True), init_device_mesh("cpu", (ranks,)), owned)
    first, own = sum(owned[:rank]), owned[rank]
    tokens, weights = tokens[rank : rank + 1].requires_grad_(), weights[first : first + own].requires_grad_()
    layer, seen, total, merged = program(tokens, offsets[rank : rank + 1], weights)
    return differentiated(objective(layer.values, seen, total, merged.values), tokens, weights)


def check_gradients(results: list[Gradients]) -> None:
    """Side by side, they are those of plain torch, expert by expert."""
    tokens, offsets, weights = arguments()
    tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
    loss = torch.zeros(())
    for expert in range(4):
        rows = [tokens[gpu, offsets[gpu, expert] : offsets[gpu, expert + 1]].relu() for gpu in range(2)]
        merged = torch.cat(rows) * 2
        loss = loss + objective(merged @ weights[expert], torch.stack([r.sum(0) for r in rows]), merged.sum(0), merged)
    for found, wanted in zip(zip(*results, strict=True), differentiated(loss, tokens, weights), strict=True):
        torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("owned", [(2, 2), (3, 1), (4, 0)])
def test_gradients_travel_back_through_the_exchange(owned: tuple[int, int]) -> None:
    check_gradients(on_threads(2, lambda rank, ranks: local_gradients(rank, ranks, owned)))


@pytest.mark.slow
def test_gradients_of_two_processes() -> None:
    check_gradients(on_processes(2, local_gradients))


def test_gradients_of_the_experts_alone() -> None:
    def work(rank: int, ranks: int) -> Any:
        tokens, offsets, weights = arguments()
        weights.requires_grad_()
        layer, *_ = MeshProgram(experts(mesh=True), init_device_mesh("cpu", (ranks,)))(tokens[:1], offsets[:1], weights)
        return torch.autograd.grad(layer.values.sum(), weights)[0]

    tokens = arguments()[0][0].relu() * 2
    wanted = torch.stack([tokens[a:b].sum(0) for a, b in itertools.pairwise(OFFSETS[0])])
    torch.testing.assert_close(on_threads(1, work)[0], wanted[:, :, None].expand(4, 3, 2))


def test_what_is_refused() -> None:
    with pytest.raises(ScheduleError, match="spread over a mesh of processes"):
        experts(mesh=True).compile()(*arguments())

    def fixed(flat: bool = False) -> ir.Fusion:
        with ir.Fusion() as f:
            tokens, offsets = f.input((None, None), torch.float32), f.input((None, None if flat else 5), torch.int64)
            merged = ops.regroup(ops.as_nested(tokens, offsets, ragged_dim=1))
            merged.parallelize(0, "mesh")
            f.output(ops.as_flattened(merged) + 1 if flat else merged)
        return f

    def work(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        with pytest.raises(PartitionError, match="no loop is spread over a mesh"):
            MeshProgram(experts(mesh=False), mesh)
        with pytest.raises(PartitionError, match="component dim, whose size is fixed at 4; declare it with None"):
            MeshProgram(fixed(), mesh)
        with pytest.raises(PartitionError, match="offsets before the regroup"):
            MeshProgram(fixed(flat=True), mesh)
        with pytest.raises(PartitionError, match="must have size 1, got 2"):
            MeshProgram(experts(mesh=True), mesh)(*arguments())

    on_threads(1, work)
