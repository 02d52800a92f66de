"""Trains a small causal transformer on ragged text, beside the padded and masked torch model of the same weights.

The text is synthetic: every line counts upwards in steps of its own, so the next character follows from the two before it. One
line in ten is long. Run as `python examples/train_transformer.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _training import bimodal, report
from torch import Tensor, nn

from serrate import JaggedTensor
from serrate import nn as ragged

CHARACTERS = 64


class Sizes(NamedTuple):
    rows: int = 32
    short: tuple[int, int] = (8, 24)
    long: tuple[int, int] = (200, 256)
    width: int = 128
    heads: int = 4
    hidden: int = 512
    layers: int = 2


class Ragged(nn.Module):
    """Embeddings of characters and positions, layers, logits; rows keep their lengths from end to end."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, sizes.width)
        self.positions = nn.Parameter(0.02 * torch.randn(sizes.long[1], sizes.width))
        self.layers = nn.ModuleList(
            ragged.TransformerEncoderLayer(sizes.width, sizes.heads, sizes.hidden, 0.0, norm_first=True, is_causal=True)
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.logits = nn.Linear(sizes.width, CHARACTERS)

    def forward(self, lines: JaggedTensor) -> Tensor:
        x = self.characters(lines[:, :-1]) + self.positions[None]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.logits(self.norm(x)), lines[:, 1:])


class Padded(nn.Module):
    """The same model with torch's layers: lines are padded to the longest, and padding is masked."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.long[1], sizes.width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(sizes.width, sizes.heads, sizes.hidden, 0.0, norm_first=True, batch_first=True)
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.logits = nn.Linear(sizes.width, CHARACTERS)

    def forward(self, lines: JaggedTensor) -> Tensor:
        padded = lines.to_padded(fill=-100)
        given, wanted = padded[:, :-1], padded[:, 1:]
        past = wanted == -100
        x = self.characters(given.clamp(min=0)) + self.positions[: given.shape[1]]
        causal = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=causal, src_key_padding_mask=past)
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), wanted.flatten(), ignore_index=-100)


def batches(steps: int, sizes: Sizes, seed: int = 0) -> Iterator[JaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lengths = bimodal(sizes.rows, sizes.short, sizes.long, generator)
        first, step = torch.randint(1, CHARACTERS, (2, sizes.rows), generator=generator)
        place = torch.cat([torch.arange(n) for n in lengths.tolist()])
        each = torch.arange(sizes.rows).repeat_interleave(lengths)
        yield JaggedTensor.from_lengths((first[each] + place * step[each]) % CHARACTERS, lengths)


def main() -> None:
    torch.manual_seed(0)
    sizes = Sizes()
    report("transformer", (Ragged(sizes), Padded(sizes)), lambda count: batches(count, sizes), lr=1e-3)


if __name__ == "__main__":
    main()
