"""One rank of NCCL on a real GPU: conversions between layouts, their gradients, and experts over a mesh of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from serrate import JaggedTensor
from serrate.distributed import ExpertParallel, PartitionedShard, PartitionedTensor, convert
from serrate.nn import MoE
from tests.conftest import INTERPRETED
from tests.distributed.test_convert import world
from tests.distributed.test_tensor import partitioned

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if INTERPRETED else "cuda"
COUNTS = [3, 0, 5, 1]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield init_device_mesh(DEVICE, (1,))
    finally:
        dist.destroy_process_group()


def local() -> torch.Tensor:
    return torch.randn(sum(COUNTS), 6, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()


def test_conversions_and_their_gradients(mesh: Any) -> None:
    mine, counts = local(), torch.tensor(COUNTS)
    group, owned = world(), (len(COUNTS),)
    plan = convert.plan_exchange(mine, counts, owned, group)
    there = convert.unaligned_to_aligned(mine, plan, group)
    assert torch.equal(there, mine) and torch.equal(convert.aligned_to_unaligned(there, plan, group), mine)
    whole = convert.to_replicate(mine, counts[None], owned, group, aligned=False)
    back = convert.from_replicate(whole, counts[None], owned, group, aligned=False)
    assert torch.equal(whole, mine) and torch.equal(back, mine)
    (there * whole).sum().backward()
    torch.testing.assert_close(mine.grad, 2 * mine.detach())


def test_tensors_over_a_mesh(mesh: Any) -> None:
    mine = local()
    t = PartitionedTensor.from_local(mine, mesh, PartitionedShard(0, len(COUNTS), COUNTS))
    there = partitioned(t.redistribute(PartitionedShard(0, len(COUNTS), aligned=True)))
    assert torch.equal(there.to_local(), mine) and torch.equal(there.full_tensor(), mine)
    rows = there.as_jagged()
    assert isinstance(rows, JaggedTensor)
    (found,) = torch.autograd.grad(rows.sum(rows.ndim - 2).square().sum(), mine)
    leaf = mine.detach().clone().requires_grad_()
    (known,) = torch.autograd.grad(sum(part.sum(0).square().sum() for part in leaf.split(COUNTS)), leaf)
    torch.testing.assert_close(found, known)


@pytest.mark.parametrize("options", [{}, {"max_tokens": 64}], ids=["exact", "bounded"])
def test_experts_over_one_rank_are_the_module_alone(mesh: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    alone, spread = (MoE(8, 16, 4, top_k=2).to(DEVICE) for _ in range(2))
    spread.load_state_dict(alone.state_dict())
    parallelize_module(spread, mesh, ExpertParallel(**options))
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for module in (alone, spread):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        (out.output.square().sum() + out.load_balancing_loss + out.z_loss).backward()
        results.append([out.output, leaf.grad, *(p.grad for p in module.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
