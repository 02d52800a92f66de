"""Trains a classifier of ragged rows whose layers are mixtures of experts, beside the padded torch model of the same weights.

The data is synthetic: the class of a row is the kind of its most frequent tokens. One row in ten is long. Run as
`python examples/train_moe.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _training import bimodal, report
from torch import Tensor, nn

from serrate import JaggedTensor
from serrate import nn as ragged

TOKENS, CLASSES = 80, 8


class Sizes(NamedTuple):
    rows: int = 32
    short: tuple[int, int] = (8, 24)
    long: tuple[int, int] = (200, 256)
    width: int = 64
    hidden: int = 128
    experts: int = 8
    layers: int = 2


class Batch(NamedTuple):
    tokens: JaggedTensor  # [rows, tokens]
    classes: Tensor  # [rows]


class Ragged(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, sizes.width)
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(sizes.layers))
        self.layers = nn.ModuleList(ragged.MoE(sizes.width, sizes.hidden, sizes.experts) for _ in range(sizes.layers))
        self.pool = ragged.AttentionPool(sizes.width)
        self.logits = nn.Linear(sizes.width, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        x, further = self.tokens(batch.tokens), torch.zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            mixed = layer(norm(x))
            x = x + mixed.output
            further = further + 0.01 * mixed.load_balancing_loss + 0.001 * mixed.z_loss
        return F.cross_entropy(self.logits(self.pool(x)), batch.classes) + further


class PaddedMoE(nn.Module):
    """`serrate.nn.MoE` in plain torch, expert by expert. Padding passes through it like any token; the losses leave it out."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        tokens, experts = x.flatten(0, 1), self.router.out_features
        logits = self.router(tokens)
        chances = logits.softmax(-1)
        weights, chosen = chances.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for e in range(experts):
            own, choice = torch.where(chosen == e)
            rows = tokens[own]
            worked = (F.silu(rows @ self.gate[e]) * (rows @ self.up[e])) @ self.down[e]
            mixed = mixed.index_add(0, own, worked * weights[own, choice, None])
        real = there.flatten()
        load = torch.bincount(chosen[real].flatten(), minlength=experts)
        balance = (chances[real].mean(0) * load).sum() * experts / load.sum()
        return mixed.view_as(x), 0.01 * balance + 0.001 * logits[real].logsumexp(-1).square().mean()


class Padded(nn.Module):
    """The same model in plain torch: rows are padded to the longest, and padding is masked."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, sizes.width)
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(sizes.layers))
        self.layers = nn.ModuleList(PaddedMoE(sizes.width, sizes.hidden, sizes.experts) for _ in range(sizes.layers))
        self.pool = nn.ParameterDict({"query": torch.empty(sizes.width)})
        self.logits = nn.Linear(sizes.width, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        padded = batch.tokens.to_padded(fill=-1)
        there = padded >= 0
        x, further = self.tokens(padded.clamp(min=0)), torch.zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            mixed, losses = layer(norm(x), there)
            x, further = x + mixed, further + losses
        scores = (x @ self.pool["query"]).masked_fill(~there, float("-inf"))
        pooled = (x * scores.softmax(1)[..., None]).sum(1)
        return F.cross_entropy(self.logits(pooled), batch.classes) + further


def batches(steps: int, sizes: Sizes, seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lengths = bimodal(sizes.rows, sizes.short, sizes.long, generator)
        classes = torch.randint(0, CLASSES, (sizes.rows,), generator=generator)
        tokens = torch.randint(0, TOKENS, (int(lengths.sum()),), generator=generator)
        own = tokens // CLASSES * CLASSES + classes.repeat_interleave(lengths)
        kept = torch.rand(len(tokens), generator=generator) < 0.5
        yield Batch(JaggedTensor.from_lengths(torch.where(kept, own, tokens), lengths), classes)


def main() -> None:
    torch.manual_seed(0)
    sizes = Sizes()
    report("mixture of experts", (Ragged(sizes), Padded(sizes)), lambda count: batches(count, sizes), lr=3e-3)


if __name__ == "__main__":
    main()
