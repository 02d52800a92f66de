"""`python two_processes.py RANK FILE`: one of two processes that train a ragged model, over gloo.

In: its rank, and a file to meet at. Out: nothing, or an error. Every process trains on its half of the rows under DDP, then
under FSDP2, and compares its weights with those of one process that trains on all of them.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from serrate import JaggedTensor
from serrate import nn as ragged

LENGTHS, STEPS = [3, 0, 5, 2, 4, 1], 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.layer = ragged.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True, is_causal=True)
        self.pool = ragged.AttentionPool(8)
        self.output = nn.Linear(8, 3)

    def forward(self, tokens: JaggedTensor) -> Tensor:
        return self.output(self.pool(self.layer(self.tokens(tokens))))


def batch() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.arange(sum(LENGTHS)) * 7 % 11, LENGTHS)


def trained(model: Any, rows: JaggedTensor, clip: float | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def main(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    alone, half = Model(), batch()[3 * rank : 3 * rank + 3]
    replicated = DistributedDataParallel(copy.deepcopy(alone))
    sharded = copy.deepcopy(alone)
    fully_shard(sharded.layer)
    fully_shard(sharded)
    trained(alone, batch(), 0.1)
    wanted = alone.state_dict()
    trained(replicated, half, 0.1)
    trained(sharded, half, 0.1)
    for found in (replicated.module.state_dict(), sharded.state_dict()):
        for name, value in found.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            torch.testing.assert_close(whole, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
