"""Trains a sequential recommender, embedding bags and HSTU layers under a sampled softmax, beside the padded torch model.

A user is a ragged row of items, and an item has a ragged bag of tags: `[users, items, tags]`. The data is synthetic: every user
cycles through some items. One user in ten has a long history. Run as `python examples/train_recommender.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _training import bimodal, report
from torch import Tensor, nn

import serrate
from serrate import JaggedTensor, Structure
from serrate import nn as ragged

TAGS, NEGATIVES = 50, 64


class Sizes(NamedTuple):
    users: int = 48
    items: int = 400
    short: tuple[int, int] = (8, 24)
    long: tuple[int, int] = (200, 256)
    width: int = 64
    heads: int = 2
    layers: int = 2


class Batch(NamedTuple):
    items: JaggedTensor  # [users, items]
    tags: JaggedTensor  # [users, items, tags]
    negatives: Tensor  # [NEGATIVES], shared by the batch


@serrate.jit
def sampled_softmax(found: JaggedTensor, wanted: JaggedTensor, negatives: Tensor) -> Tensor:
    """The mean cost of the next item among it and the negatives; one program, no logits are stored."""
    right = (found * wanted).sum(2)
    wrong = torch.logsumexp(found @ negatives.T, 2)
    return F.softplus(wrong - right).mean()


class Ragged(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.items = nn.Embedding(sizes.items, sizes.width)
        self.tags = ragged.EmbeddingBag(TAGS, sizes.width, mode="mean")
        self.layers = nn.ModuleList(ragged.HSTU(sizes.width, sizes.heads, sizes.long[1]) for _ in range(sizes.layers))
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, batch: Batch) -> Tensor:
        x = self.items(batch.items[:, :-1]) + self.tags(batch.tags[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return sampled_softmax(x, self.items(batch.items[:, 1:]), self.items(batch.negatives))


class PaddedHSTU(nn.Module):
    """`serrate.nn.HSTU` in plain torch, on padded histories."""

    def __init__(self, width: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.heads, self.max_length = heads, max_length
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.uvqk = nn.Linear(width, 4 * width, bias=False)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        u, *rest = F.silu(self.uvqk(self.norm(x))).chunk(4, -1)
        v, q, k = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in rest)
        scores = F.silu(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5) / self.max_length
        mixed = ((scores.tril() * there[:, None, None]) @ v).transpose(1, 2).flatten(2)
        return x + self.output(F.layer_norm(mixed, mixed.shape[-1:], eps=1e-6) * u)


class Padded(nn.Module):
    """The same model in plain torch: histories are padded to the longest, bags to the largest, and padding is masked."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.items = nn.Embedding(sizes.items, sizes.width)
        self.tags = nn.EmbeddingBag(TAGS, sizes.width, mode="mean")
        self.layers = nn.ModuleList(PaddedHSTU(sizes.width, sizes.heads, sizes.long[1]) for _ in range(sizes.layers))

    def forward(self, batch: Batch) -> Tensor:
        items, tags = batch.items.to_padded(fill=-1), batch.tags.to_padded(fill=-1)[:, :-1]
        given, wanted = items[:, :-1], items[:, 1:]
        there = wanted >= 0
        marked = (tags >= 0).unsqueeze(3)
        bags = (F.embedding(tags.clamp(min=0), self.tags.weight) * marked).sum(2) / marked.sum(2).clamp(min=1)
        x = self.items(given.clamp(min=0)) + bags
        for layer in self.layers:
            x = layer(x, there)
        right = (x * self.items(wanted.clamp(min=0))).sum(2)
        cost = F.softplus(torch.logsumexp(x @ self.items(batch.negatives).T, 2) - right)
        return (cost * there).sum() / there.sum()


def batches(steps: int, sizes: Sizes, seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lengths = bimodal(sizes.users, sizes.short, sizes.long, generator)
        first = torch.randint(0, sizes.items, (sizes.users,), generator=generator)
        place = torch.cat([torch.arange(n) for n in lengths.tolist()])
        items = (first.repeat_interleave(lengths) + 7 * (place % 8)) % sizes.items
        bags = 1 + items % 3
        tags = torch.cat([torch.arange(n) + k for k, n in zip(items.tolist(), bags.tolist(), strict=True)]) % TAGS
        negatives = torch.randint(0, sizes.items, (NEGATIVES,), generator=generator)
        nested = JaggedTensor(tags, Structure.from_lengths(lengths, bags))
        yield Batch(JaggedTensor.from_lengths(items, lengths), nested, negatives)


def main() -> None:
    torch.manual_seed(0)
    sizes = Sizes()
    report("recommender", (Ragged(sizes), Padded(sizes)), lambda count: batches(count, sizes), lr=3e-3)


if __name__ == "__main__":
    main()
