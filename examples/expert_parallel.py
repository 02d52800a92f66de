"""A mixture of experts trained over processes: each holds some of the experts, and tokens travel to them and back.

Run as `torchrun --nproc-per-node 4 examples/expert_parallel.py`, with any number of processes up to the number of experts, or as
`python examples/expert_parallel.py`: the losses are the same. On GPUs use one process per GPU.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from serrate.distributed import ExpertParallel, sum_gradients
from serrate.nn import MoE

WIDTH, EXPERTS, TOKENS, STEPS = 16, 8, 256, 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(WIDTH, WIDTH), MoE(WIDTH, 32, EXPERTS, top_k=2), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = self.moe(torch.relu(self.first(x)))
        return self.last(mixed.output), mixed.load_balancing_loss, mixed.load


def shares(experts: int, ranks: int) -> tuple[int, ...]:
    """As equal as possible; ranks need not own equally many experts."""
    return tuple(experts // ranks + (r < experts % ranks) for r in range(ranks))


def train(device: torch.device) -> list[float]:
    """The loss of every step, over the tokens of all processes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)  # the same weights everywhere; each process then keeps its own experts
    model = Model().to(device)
    parallelize_module(model, mesh, {"moe": ExpertParallel(shares(EXPERTS, ranks))})
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        x = batch.chunk(ranks)[rank]  # this process's tokens
        optimiser.zero_grad()
        predicted, balance, load = model(x)
        # A sum over own tokens, divided by the number of all tokens: gradients are then summed over processes.
        loss = (predicted - x.sin().sum(1, keepdim=True)).square().sum() / TOKENS
        (loss + 0.01 * balance).backward()
        sum_gradients(model, mesh)
        optimiser.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {losses[-1]:.5f}, tokens of each expert {load.tolist()}")
    return losses


def main() -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    losses = train(device)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: first loss {losses[0]:.5f}, last loss {losses[-1]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
