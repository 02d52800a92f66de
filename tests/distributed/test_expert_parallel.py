"""`ExpertParallel` against the same MoE in one process: outputs, losses, loads, gradients, and weights after training."""

from __future__ import annotations

import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import serrate
from serrate import JaggedTensor
from serrate.distributed import ExpertParallel, expert_parameters, sum_gradients
from serrate.errors import CallError, ExchangeError, PartitionError
from serrate.nn import MoE
from tests.distributed.ranks import on_processes, on_threads

WIDTH, EXPERTS = 8, 8


class Model(nn.Module):
    """A layer before the experts, so that gradients of tokens matter, and a module around them."""

    def __init__(self, shared: bool = False, activation: str = "swiglu") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        more = nn.Linear(WIDTH, WIDTH) if shared else None
        self.moe = MoE(WIDTH, 16, EXPERTS, top_k=2, activation=activation, shared=more)

    def forward(self, x: Any) -> Any:
        return self.moe(self.first(x))


_seeding = threading.Lock()


def model(**options: Any) -> Model:
    with _seeding:  # ranks that are threads share torch's generator
        torch.manual_seed(0)
        return Model(**options)


def tokens(rank: int, count: int = 12, step: int = 0) -> Tensor:
    """Uneven numbers of tokens; rank 1 has none in the first step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(0 if rank == 1 and step == 0 else count + 5 * rank, WIDTH, generator=generator)


def loss_of(mixed: Any, total: int) -> Tensor:
    """The main loss is a sum over a rank's tokens; the router's losses are those of all ranks, and counted once."""
    loss: Tensor = mixed.output.square().sum() / total
    return loss


def train(net: Model, batches: list[list[Tensor]], mine: slice, mesh: Any) -> list[float]:
    """Trains on some ranks' tokens; returns the losses of these ranks' tokens."""
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimiser.zero_grad()
        mixed = net(torch.cat(batch[mine]))
        main = loss_of(mixed, sum(map(len, batch)))
        (main + 0.1 * mixed.load_balancing_loss + 0.01 * mixed.z_loss).backward()
        if mesh is not None:
            sum_gradients(net, mesh)
        optimiser.step()
        losses.append(main.item())
    return losses


def same_as_one_process(rank: int, ranks: int, owned: tuple[int, ...] | None, options: dict[str, Any], steps: int) -> list[float]:
    shared = options.pop("shared", False)
    alone, spread = model(shared=shared), model(shared=shared)
    mesh = init_device_mesh("cpu", (ranks,))
    parallelize_module(spread, mesh, {"moe": ExpertParallel(owned, **options)})
    batch = [tokens(r) for r in range(ranks)]
    want, got = alone(torch.cat(batch)), spread(batch[rank])
    start = sum(len(x) for x in batch[:rank])
    torch.testing.assert_close(got.output, want.output[start : start + len(batch[rank])], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.load, want.load)
    torch.testing.assert_close(got.load_balancing_loss, want.load_balancing_loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.z_loss, want.z_loss, rtol=1e-4, atol=1e-5)

    batches = [[tokens(r, step=k) for r in range(ranks)] for k in range(steps)]
    one = train(alone, batches, slice(None), None)
    found = torch.tensor(train(spread, batches, slice(rank, rank + 1), mesh))
    torch.distributed.all_reduce(found)
    torch.testing.assert_close(found.tolist(), one, rtol=1e-3, atol=1e-4)
    _same_weights(spread, alone, rank, owned or (EXPERTS // ranks,) * ranks)
    return one


def _same_weights(spread: Model, alone: Model, rank: int, owned: tuple[int, ...]) -> None:
    first = sum(owned[:rank])
    own = {id(p) for p in expert_parameters(spread)}
    for (name, a), b in zip(spread.named_parameters(), alone.parameters(), strict=True):
        want = b[first : first + owned[rank]] if id(a) in own else b
        torch.testing.assert_close(a, want, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
        if steps_have_gradients(b):
            grad = b.grad[first : first + owned[rank]] if id(a) in own else b.grad
            torch.testing.assert_close(a.grad if a.grad is not None else torch.zeros_like(a), grad, rtol=1e-3, atol=1e-4)


def steps_have_gradients(parameter: Tensor) -> bool:
    return parameter.grad is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "owned", "options"),
    [
        (1, None, {}),
        (2, None, {}),
        (2, (5, 3), {"shared": True}),
        (2, (8, 0), {}),
        (2, (5, 3), {"max_tokens": 80}),
        (4, None, {}),
        (3, (1, 0, 7), {"max_tokens": 150}),
    ],
)
def test_training_over_ranks_is_training_in_one_process(ranks: int, owned: Any, options: dict[str, Any]) -> None:
    on_threads(ranks, lambda rank, ranks: same_as_one_process(rank, ranks, owned, dict(options), 3))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_twenty_steps_on_processes(ranks: int) -> None:
    owned = (5, 3) if ranks == 2 else (2, 3, 1, 2)
    results = on_processes(ranks, same_as_one_process, owned, {}, 20)
    assert all(result == results[0] for result in results) and results[0][-1] < results[0][1], results


def test_ragged_inputs() -> None:
    def work(rank: int, ranks: int) -> None:
        alone, spread = model(), model()
        parallelize_module(spread, init_device_mesh("cpu", (ranks,)), {"moe": ExpertParallel()})
        jt = JaggedTensor.from_lengths(tokens(rank + 2), [3, 0, tokens(rank + 2).shape[0] - 3])
        got, want = spread(jt).output, alone(jt).output
        assert got.lengths.tolist() == jt.lengths.tolist()
        torch.testing.assert_close(got.values, want.values, rtol=1e-4, atol=1e-5)

    on_threads(2, work)


def test_with_a_bound_the_host_reads_no_counts() -> None:
    def work(rank: int, ranks: int) -> None:
        spread = model()
        parallelize_module(spread, init_device_mesh("cpu", (ranks,)), {"moe": ExpertParallel(max_tokens=200)})
        x = tokens(rank + 2)
        want = spread(x).output
        with serrate.no_sync():
            torch.testing.assert_close(spread(x).output, want)

    on_threads(2, work)


def test_tokens_over_the_bound_raise() -> None:
    def work(rank: int, ranks: int) -> None:
        spread = model()
        parallelize_module(spread, init_device_mesh("cpu", (ranks,)), {"moe": ExpertParallel(max_tokens=3)})
        with pytest.raises(PartitionError, match="more than max_tokens=3"):
            spread(tokens(rank + 2))

    on_threads(2, work)


def test_what_is_refused() -> None:
    def work(rank: int, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        with pytest.raises(CallError, match=r"takes a serrate\.nn\.MoE .* got Linear"):
            parallelize_module(nn.Linear(2, 2), mesh, ExpertParallel())
        with pytest.raises(PartitionError, match="sum to 8 partitions"):
            parallelize_module(model().moe, mesh, ExpertParallel((4, 5)))
        spread = parallelize_module(model().moe, mesh, ExpertParallel())
        with pytest.raises(CallError, match="not spread over ranks yet"):
            parallelize_module(spread, mesh, ExpertParallel())
        assert "experts (4, 4) over 2 ranks" in repr(spread)

    with pytest.raises(CallError, match="max_tokens must be positive"):
        ExpertParallel(max_tokens=0)
    on_threads(2, work)


def test_ranks_with_other_dtypes_fail_together() -> None:
    def work(rank: int, ranks: int) -> None:
        moe = parallelize_module(modules[rank], init_device_mesh("cpu", (ranks,)), ExpertParallel())
        with pytest.raises(ExchangeError, match="dtype"):
            moe(tokens(rank + 2).to(modules[rank].up.dtype))

    modules = [model().moe, model().moe.double()]
    on_threads(2, work)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_tokens": 9}, "max_tokens: (0|9) here"), ({"partitions_per_rank": (5, 3)}, "digest of partitions_per_rank")],
)
def test_ranks_that_spread_experts_differently_fail_together(options: dict[str, Any], message: str) -> None:
    def work(rank: int, ranks: int) -> None:
        with pytest.raises(ExchangeError, match=f"do not agree about ExpertParallel: .*{message}"):
            parallelize_module(model().moe, init_device_mesh("cpu", (ranks,)), ExpertParallel(**(options if rank else {})))

    on_threads(2, work)


def data_and_experts(rank: int, ranks: int, how: str) -> None:
    """On a mesh of data x expert, each row of the mesh holds all experts, and the rows are one data parallel group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    alone, spread = model(), model()
    parallelize_module(spread, mesh["expert"], {"moe": ExpertParallel((5, 3))})
    batch = [tokens(r + 2) for r in range(ranks)]
    total = sum(map(len, batch))
    loss_of(alone(torch.cat(batch)), total).backward()
    run: nn.Module = spread
    if how == "DDP":
        run = DistributedDataParallel(spread, process_group=mesh.get_group("data"))
    elif how == "fully_shard":
        fully_shard(spread, mesh=mesh["data"])
    # Both average over the rows of the mesh, so the loss is the sum of the ranks' losses times their number.
    (loss_of(run(batch[rank]), total) * (1 if how == "by hand" else 2)).backward()
    sum_gradients(spread, mesh["expert"])
    own, first = {id(p) for p in expert_parameters(spread)}, (0, 5)[mesh.get_local_rank("expert")]
    for a, b in zip(spread.parameters(), alone.parameters(), strict=True):
        grad = a.grad
        assert grad is not None and b.grad is not None
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        if how == "by hand":
            torch.distributed.all_reduce(grad, group=mesh.get_group("data"))
        want = b.grad[first : first + (5, 3)[mesh.get_local_rank("expert")]] if id(a) in own else b.grad
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def test_a_data_dim_and_an_expert_dim() -> None:
    on_threads(4, lambda rank, ranks: data_and_experts(rank, ranks, "by hand"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["DDP", "fully_shard"])
def test_data_parallelism_of_torch_on_the_other_dim(how: str) -> None:
    assert on_processes(4, data_and_experts, how) == [None] * 4


def trained(rank: int, ranks: int) -> list[float]:
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "expert_parallel.py"))
    losses: list[float] = example["train"](torch.device("cpu"))
    return losses


@pytest.mark.slow
def test_the_example_has_the_same_losses_on_any_number_of_processes() -> None:
    (alone,) = on_processes(1, trained)
    for ranks in (2, 4):
        for losses in on_processes(ranks, trained):
            torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)
    assert alone[-1] < alone[0] / 2
