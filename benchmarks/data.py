"""Length distributions and seeded ragged data.

In: a distribution's name, number of rows, mean length. Out: lengths, or a `Ragged` of values and offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DISTRIBUTIONS = ("uniform", "exponential", "bimodal", "giant")


@dataclass(frozen=True)
class Ragged:
    """Rows back to back: `values[offsets[r]:offsets[r + 1]]` is row r."""

    distribution: str
    values: Tensor
    offsets: Tensor

    @property
    def rows(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    @property
    def row_bytes(self) -> int:
        """Bytes of one position of a row."""
        return self.values[:1].nbytes

    @property
    def padded_bytes(self) -> int:
        """The size in bytes of the same rows, padded to the longest."""
        return self.rows * self.longest * self.row_bytes

    def split(self) -> tuple[Tensor, ...]:
        """The rows, one by one."""
        return torch.split(self.values, self.lengths.tolist())


def lengths(distribution: str, rows: int, mean: float, seed: int = 0) -> Tensor:
    """Random lengths, at least 1 each; the total is close to rows x mean, but not exact.

    >>> lengths("giant", rows=100, mean=10)[50].item()
    500
    """
    generator = torch.Generator().manual_seed(seed)
    if distribution == "uniform":
        drawn = torch.randn(rows, generator=generator) * (mean / 16) + mean
    elif distribution == "exponential":
        drawn = torch.empty(rows).exponential_(1 / mean, generator=generator)
    elif distribution == "bimodal":
        is_short = torch.rand(rows, generator=generator) < 0.9
        drawn = torch.where(is_short, mean / 8, 8.875 * mean)
    elif distribution == "giant":
        drawn = torch.randn(rows, generator=generator) * (mean / 32) + mean / 2
        # in the middle: a schedule that hands out rows in order reaches it late, as it may in real data
        drawn[rows // 2] = rows * mean / 2
    else:
        raise ValueError(f"distribution {distribution!r} is not one of {', '.join(DISTRIBUTIONS)}")
    return drawn.round().clamp(min=1).to(torch.int64)


def offsets(lengths: Tensor) -> Tensor:
    """The offsets for these lengths.

    >>> offsets(torch.tensor([2, 1])).tolist()
    [0, 2, 3]
    """
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ragged(
    distribution: str, rows: int, mean: float, features: int | None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Ragged:
    """Normal values of shape [total, features], or [total] without features."""
    boundaries = offsets(lengths(distribution, rows, mean, seed))
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (int(boundaries[-1]),) if features is None else (int(boundaries[-1]), features)
    return Ragged(distribution, torch.randn(shape, generator=generator).to(dtype), boundaries)


def padded(data: Ragged, filler: float = 0.0) -> Tensor:
    """The rows padded to [rows, longest, ...], with `filler` in the holes, using plain torch.

    >>> padded(Ragged("", torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3])), -1.0)
    tensor([[ 1.,  2.],
            [ 3., -1.]])
    """
    made = data.values.new_full((data.rows, data.longest, *data.values.shape[1:]), filler)
    made[is_element(data)] = data.values
    return made


def is_element(data: Ragged) -> Tensor:
    """[rows, longest]: whether a position of the padded rows is an element."""
    return torch.arange(data.longest) < data.lengths[:, None]
