"""Fusions over a mesh: each rank's results, side by side, are those of `evaluate` on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from serrate import ir, ops
from serrate.distributed import MeshProgram
from serrate.errors import GradientError, PartitionError, ScheduleError
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
        with pytest.raises(GradientError, match="no gradients yet"):
            MeshProgram(experts(mesh=True), mesh)(arguments()[0].requires_grad_(), *arguments()[1:])
        with pytest.raises(PartitionError, match="must have size 1, got 2"):
            MeshProgram(experts(mesh=True), mesh)(*arguments())

    on_threads(1, work)
