"""`PartitionedTensor`: layouts, bridges, operations on the local part, gradients; against the full tensor and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from serrate.distributed import PartitionedShard, PartitionedTensor
from serrate.errors import ExchangeError, PartitionError
from tests.distributed.ranks import on_threads
from tests.distributed.test_convert import tensor
from tests.distributed.test_layout import PAPER, aligned, full, layouts, unaligned

COUNTS = PAPER.tolist()


def paper(rank: int, ranks: int, dim: int = 0) -> tuple[PartitionedTensor, Tensor]:
    """The paper's example, unaligned; and the whole tensor. Features are random, so that products mean something."""
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.randn(32, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = [full(COUNTS).index(at) for at in unaligned(COUNTS, rank)]
    made = PartitionedTensor.from_local(whole[positions], mesh, PartitionedShard(0, 4, COUNTS[rank]))
    return made, whole


def partitioned(x: Any) -> PartitionedTensor:
    assert isinstance(x, PartitionedTensor)
    return x


@given(layouts(), st.integers(0, 2))
@settings(max_examples=12, deadline=None)
def test_every_layout_and_back(case: Any, dim: int) -> None:
    counts, owned = case
    whole = tensor(full(counts), dim)

    def work(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        mine, ours = tensor(unaligned(counts, rank), dim), tensor(aligned(counts, owned, rank), dim)
        here = PartitionedShard(dim, sum(owned), counts[rank], partitions_per_rank=tuple(owned))
        there = PartitionedShard(dim, sum(owned), aligned=True)
        t = PartitionedTensor.from_local(mine, mesh, here)
        assert t.shape == whole.shape and t.counts.tolist() == counts
        moved = partitioned(t.redistribute(there))
        assert torch.equal(moved.to_local(), ours)
        assert torch.equal(partitioned(moved.redistribute(here)).to_local(), mine)
        row = [counts[r][p] for p in range(sum(owned[:rank]), sum(owned[: rank + 1])) for r in range(ranks)]
        given = PartitionedShard(dim, sum(owned), row, aligned=True, partitions_per_rank=tuple(owned))
        again = PartitionedTensor.from_local(ours, mesh, given)
        assert again.counts.tolist() == counts
        for source in (t, moved, again):
            assert torch.equal(source.full_tensor(), whole)
            shard = source.redistribute(Shard(dim))
            assert isinstance(shard, DTensor) and torch.equal(shard.full_tensor(), whole)
            chunks = whole.chunk(ranks, dim)
            if rank < len(chunks):
                assert torch.equal(shard.to_local(), chunks[rank])
            splits = PartitionedShard(dim, sum(owned), counts, source._layout.shard.aligned, tuple(owned))
            assert torch.equal(PartitionedTensor.from_dtensor(shard, splits).to_local(), source.to_local())
            replicated = source.redistribute(Replicate())
            assert isinstance(replicated, DTensor) and torch.equal(replicated.to_local(), whole)
            assert torch.equal(PartitionedTensor.from_dtensor(replicated, splits).to_local(), source.to_local())

    on_threads(len(counts), work)


def test_rows_of_the_local_part() -> None:
    def work(rank: int, ranks: int) -> None:
        t, _ = paper(rank, ranks)
        jagged = t.as_jagged()
        assert jagged.lengths.tolist() == COUNTS[rank] and torch.equal(jagged.values, t.to_local())
        there = partitioned(t.redistribute(PartitionedShard(0, 4, aligned=True)))
        rows = there.as_jagged()
        assert [[len(block) for block in part.unbind()] for part in rows.unbind()] == [
            [[4, 2], [6, 4]],
            [[4, 8], [2, 2]],
        ][rank]

    on_threads(2, work)


def test_owners_can_change() -> None:
    def work(rank: int, ranks: int) -> None:
        t, whole = paper(rank, ranks)
        there = partitioned(t.redistribute(PartitionedShard(0, 4, aligned=True)))
        uneven = partitioned(there.redistribute(PartitionedShard(0, 4, aligned=True, partitions_per_rank=(3, 1))))
        assert torch.equal(uneven.to_local(), (whole[:28], whole[28:])[rank])
        assert torch.equal(uneven.full_tensor(), whole)

    on_threads(2, work)


def linear(x: Any, w: Tensor, b: Tensor) -> Any:
    return F.linear(x, w, b)


OPERATIONS: dict[str, Any] = {
    "scalar": lambda x, w, b: x * 2 + 1,
    "unary": lambda x, w, b: torch.tanh(x).exp(),
    "bias": lambda x, w, b: x + torch.ones(3, dtype=x.dtype),
    "itself": lambda x, w, b: x * x - x / 2,
    "where": lambda x, w, b: torch.where(x > 0, x, torch.zeros((), dtype=x.dtype)),
    "relu": lambda x, w, b: torch.relu(x),
    "gelu": lambda x, w, b: F.gelu(x),
    "silu": lambda x, w, b: F.silu(x),
    "matmul": lambda x, w, b: x @ w.T,
    "linear": linear,
    "two layers": lambda x, w, b: torch.relu(linear(x, w, b)) @ w,
    "cast": lambda x, w, b: x.float().double() * x,
    "mean over features": lambda x, w, b: x.mean(1),
    "sum over features, kept": lambda x, w, b: x / x.sum(1, keepdim=True),
    "amax": lambda x, w, b: x.amax(-1),
    "softmax": lambda x, w, b: torch.softmax(x, -1),
    "log_softmax": lambda x, w, b: torch.log_softmax(x, 1),
    "transposed": lambda x, w, b: (w @ x.t()).t(),
    "three dims": lambda x, w, b: linear(x.view(-1, 1, 3).expand(-1, 2, 3).clone(), w, b),
    "logsumexp": lambda x, w, b: torch.logsumexp(x, 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("is_aligned", [False, True])
def test_operations_and_gradients_are_those_of_the_full_tensor(name: str, is_aligned: bool) -> None:
    operation = OPERATIONS[name]
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(4, 3, generator=generator).double(), torch.randn(4, generator=generator).double())

    def work(rank: int, ranks: int) -> None:
        t, whole = paper(rank, ranks)
        t = partitioned(t.redistribute(PartitionedShard(0, 4, aligned=is_aligned)))
        local = t.to_local().detach().requires_grad_()
        leaf = PartitionedTensor.from_local(local, t.device_mesh, t.placements[0], counts=t.counts)
        plain, ours = ([x.clone().requires_grad_() for x in weights] for _ in range(2))
        want_leaf = whole.clone().requires_grad_()
        got, want = operation(leaf, *ours), operation(want_leaf, *plain)
        assert isinstance(got, PartitionedTensor)
        torch.testing.assert_close(got.full_tensor(), want)
        # A loss on the whole tensor, and the same on ranks: the sum over ranks is part of the operation.
        (want.square().sum()).backward()
        (got.square().sum()).backward()
        assert local.grad is not None and want_leaf.grad is not None
        wrapped = PartitionedTensor.from_local(local.grad, t.device_mesh, t.placements[0], counts=t.counts)
        torch.testing.assert_close(wrapped.full_tensor(), want_leaf.grad)
        for a, b in zip(ours, plain, strict=True):
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)

    on_threads(2, work)


def test_gradients_flow_through_every_layout() -> None:
    def work(rank: int, ranks: int) -> None:
        t, _ = paper(rank, ranks)
        local = t.to_local().detach().requires_grad_()
        leaf = PartitionedTensor.from_local(local, t.device_mesh, PartitionedShard(0, 4, COUNTS[rank]))
        moved = partitioned(leaf.redistribute(PartitionedShard(0, 4, aligned=True)))
        back = partitioned((moved * moved).redistribute(PartitionedShard(0, 4)))
        uneven = partitioned(moved.redistribute(PartitionedShard(0, 4, aligned=True, partitions_per_rank=(3, 1))))
        lost = (uneven.to_local().square() / 2).sum()
        (back.to_local().sum() + leaf.full_tensor().sum() + moved.as_jagged().values.sum() + lost).backward()
        torch.testing.assert_close(local.grad, 3 * local.detach() + 2)

    on_threads(2, work)


def test_a_sum_over_the_sharded_dim_is_over_all_ranks() -> None:
    def work(rank: int, ranks: int) -> None:
        t, whole = paper(rank, ranks)
        torch.testing.assert_close(t.sum(0), whole.sum(0))
        torch.testing.assert_close(t.sum(), whole.sum())
        assert type(t.sum(0)) is Tensor
        torch.testing.assert_close(t.t() @ t, whole.T @ whole)

    on_threads(2, work)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda x: x[3], "not defined for a PartitionedTensor; call to_local"),
        (lambda x: torch.cat([x, x]), "not defined"),
        (lambda x: x.sort(0), "not defined"),
        (lambda x: x.tolist(), r"call to_local\(\)"),
        (lambda x: x.numpy(), r"call to_local\(\)"),
        (lambda x: x.amax(0), "over dim 0, which is sharded"),
        (lambda x: x.mean(), "which is sharded"),
        (lambda x: torch.softmax(x, 0), "dim 0 is sharded"),
        (lambda x: x.view(3, 32), "would mix positions"),
        (lambda x: x + torch.zeros(16, 3), "size 1 or 32 in the sharded dim"),
        (lambda x: x @ x.t(), "both sharded"),
        (lambda x: x.redistribute(PartitionedShard(1, 4)), "keeps the dim and the partitions"),
        (lambda x: x.redistribute(PartitionedShard(0, 4, [1, 1, 1, 1])), "differ from those of the tensor"),
    ],
)
def test_what_is_refused_says_what_to_call(operation: Any, message: str) -> None:
    def work(rank: int, ranks: int) -> None:
        with pytest.raises(PartitionError, match=message):
            operation(paper(rank, ranks)[0])

    on_threads(2, work)


def test_layouts_do_not_mix() -> None:
    def work(rank: int, ranks: int) -> None:
        t, _ = paper(rank, ranks)
        with pytest.raises(PartitionError, match=r"two layouts, unaligned.* and aligned"):
            t + t.redistribute(PartitionedShard(0, 4, aligned=True))

    on_threads(2, work)


def test_meshes_of_two_dims() -> None:
    def work(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        data, expert = mesh.get_local_rank("data"), mesh.get_local_rank("expert")
        whole = torch.arange(32 * 6.0).view(32, 6)
        rows = whole[[full(COUNTS).index(at) for at in unaligned(COUNTS, expert)]]
        # Features are sharded over the other dim of the mesh, or replicated there.
        for other, local in ((Shard(1), rows.chunk(2, 1)[data]), (Replicate(), rows)):
            t = PartitionedTensor.from_local(local, mesh, [other, PartitionedShard(0, 4, COUNTS[expert])])
            assert t.shape == whole.shape
            there = partitioned((t * 2).redistribute(PartitionedShard(0, 4, aligned=True)))
            part = (whole[:16], whole[16:])[expert] * 2
            assert torch.equal(there.to_local(), part.chunk(2, 1)[data] if other == Shard(1) else part)
            assert torch.equal(there.full_tensor(), whole * 2)
        with pytest.raises(PartitionError, match=r'mesh\["expert"\]'):
            PartitionedTensor.from_local(rows, mesh, [Shard(0), PartitionedShard(0, 4, COUNTS[expert])])
        # Tensors that differ between the rows of the mesh live on its submesh.
        own = PartitionedTensor.from_local(rows + data, mesh["expert"], PartitionedShard(0, 4, COUNTS[expert]))
        assert torch.equal(own.full_tensor(), whole + data)

    on_threads(4, work)


def test_a_replicated_dtensor_keeps_the_mesh() -> None:
    def work(rank: int, ranks: int) -> None:
        mesh: DeviceMesh = init_device_mesh("cpu", (ranks,))
        whole = torch.arange(32.0)
        t = PartitionedTensor.from_dtensor(distribute_tensor(whole, mesh, [Shard(0)]), PartitionedShard(0, 4, COUNTS))
        assert t.device_mesh == mesh and torch.equal(t.full_tensor(), whole)
        with pytest.raises(PartitionError, match="needs the matrix"):
            PartitionedTensor.from_dtensor(distribute_tensor(whole, mesh, [Shard(0)]), PartitionedShard(0, 4))

    on_threads(2, work)


def test_torch_compile_leaves_its_graph_and_comes_back() -> None:
    @torch.compile(backend="aot_eager")
    def function(x: Any) -> Any:
        moved = torch.relu(x * 2).redistribute(PartitionedShard(0, 2, aligned=True))
        return moved.to_local() + 1, (x * x).sum()

    def work(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        for more in range(2):
            local = torch.arange(4.0 + more).requires_grad_()
            t = PartitionedTensor.from_local(local, mesh, PartitionedShard(0, 2, [1, 3 + more]))
            moved, total = function(t)
            torch.testing.assert_close(moved, local * 2 + 1)
            total.backward()
            torch.testing.assert_close(local.grad, 2 * local)

    on_threads(1, work)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (lambda rank: PartitionedShard(0, 2, None if rank else [2, 2]), "needs splits"),
        (lambda rank: PartitionedShard(0, 2 + rank, [2] * (2 + rank)), "3 partitions cannot be shared out equally to 2 ranks"),
        (lambda rank: PartitionedShard(rank, 2, [2, 2]), "dim 1 cannot be partitioned"),
    ],
)
def test_arguments_that_are_wrong_on_one_rank_fail_on_all(placement: Any, message: str) -> None:
    def work(rank: int, ranks: int) -> None:
        mesh, mine = init_device_mesh("cpu", (ranks,)), torch.zeros(4)
        with pytest.raises(PartitionError if rank else ExchangeError, match=message if rank else "rank 1 of the group failed"):
            PartitionedTensor.from_local(mine, mesh, placement(rank))
        with pytest.raises(PartitionError if rank else ExchangeError, match=message if rank else "rank 1 of the group failed"):
            placement(rank)._unaligned_to_aligned_shard(mine, mesh, 0)

    on_threads(2, work)
