"""Random bits as a function: Philox4x32-10, the counter-based generator of torch and Triton, on torch tensors.

In: a seed, a word index, and positions. Out: 32 bits per position. This defines `random_bits` for every program: the reference
backend and the kernel interpreter run it, C++ and Triton have their own implementations.

    key      = low and high half of the seed
    counter  = low and high half of position // 4, word, 0
    bits     = entry position % 4 of the four words after ten rounds

Four neighbours share one counter. An operation that needs more than 32 bits per element uses several words.
"""

from __future__ import annotations

import torch

LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Ten rounds on a counter of four words with a key of two, all int64 tensors that hold 32 bits.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox((zero,) * 4, (zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    (a, b, c, d), (x, y) = counter, key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (_product(word, by) for word, by in zip((a, c), MULTIPLIERS, strict=True))
        a, b, c, d = high1 ^ b ^ x, low1, high0 ^ d ^ y, low0
        x, y = (x + STEPS[0]) & LOW, (y + STEPS[1]) & LOW
    return a, b, c, d


def _product(word: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and low half of a product, computed in two parts because 64 bits do not fit a signed int64."""
    part = word * (by & 0xFFFF)
    return (word * (by >> 16) + (part >> 16)) >> 16, (word * by) & LOW


def random_bits(seed: torch.Tensor, word: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """32 bits per position, as int32."""
    seed, word, position = (x.to(torch.int64) for x in (seed, word, position))
    block, zero = position >> 2, torch.zeros_like(position)
    counter = (block & LOW, (block >> 32) & LOW, zero + (word & LOW), zero)
    four = torch.stack(philox(counter, (seed & LOW, (seed >> 32) & LOW)))
    picked = (position & 3).expand(four.shape[1:]).unsqueeze(0)
    bits = four.gather(0, picked).squeeze(0)
    return torch.where(bits > LOW >> 1, bits - (LOW + 1), bits).to(torch.int32)
