"""How lengths are spread: how many rows are about how long, and which of the words of `with_hint` says it best.

In: the lengths of rows, sorted, on the CPU. Out: bins of a histogram; a word and the reason for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serrate.tensor.hints import Distribution

_BINS = 10
_SKEWED = 16
"""From how many times the median on the longest row needs bins that double."""
_CLOSE = 0.25
"""Up to which part of the mean the deviation makes rows about equally long."""
_GIANT_SHARE, _GIANT_TIMES = 0.25, 6
"""What a giant row holds of all positions at least, and how many times as long as the mean of the others it is."""
_TWO_KINDS, _FEWEST = 0.85, 0.05
"""Which part of the variance two kinds of rows must explain (an even spread reaches 3/4), and how many rows each has."""

_ENOUGH = 8
"""From how many rows on they may look like two kinds or like a distribution."""


@dataclass(frozen=True, slots=True)
class Bin:
    """How many rows have a length from `low` to `high`, both included."""

    low: int
    high: int
    rows: int


def bins(ordered: Tensor) -> tuple[Bin, ...]:
    """A histogram of sorted lengths: at most a dozen bins of one width, or bins that grow if few rows dwarf the others.

    >>> bins(torch.tensor([0, 2, 2, 3]))
    (Bin(low=0, high=0, rows=1), Bin(low=1, high=1, rows=0), Bin(low=2, high=2, rows=2), Bin(low=3, high=3, rows=1))
    >>> [(each.low, each.high, each.rows) for each in bins(torch.tensor([0, 1, 2, 3, 3, 90]))]
    [(0, 0, 1), (1, 1, 1), (2, 3, 3), (4, 7, 0), (8, 15, 0), (16, 31, 0), (32, 63, 0), (64, 90, 1)]
    """
    if not len(ordered):
        return ()
    least, most = int(ordered[0]), int(ordered[-1])
    filled = ordered[int((ordered == 0).sum()) :]
    skewed = len(filled) > 0 and most >= _SKEWED * int(filled[len(filled) // 2])
    lows = _growing(least, int(filled[0]), most) if skewed else range(least, most + 1, -(-(most - least + 1) // _BINS))
    highs = [*(low - 1 for low in lows[1:]), most]
    upto = torch.searchsorted(ordered, torch.tensor(highs, dtype=ordered.dtype, device=ordered.device), right=True).tolist()
    return tuple(Bin(low, high, n - before) for low, high, n, before in zip(lows, highs, upto, [0, *upto], strict=False))


def fitting(ordered: Tensor) -> tuple[Distribution | None, str]:
    """The word of `with_hint` that fits sorted lengths best, and why; no word where there are too few rows to tell.

    >>> fitting(torch.tensor([3, 3, 4, 5, 300]))
    ('giant', 'the longest row holds 95% of all')
    """
    if not len(ordered):
        return None, "there are no rows"
    lengths = ordered.double()
    rows, total, most = len(lengths), float(lengths.sum()), float(lengths[-1])
    if lengths[0] == lengths[-1]:
        return "uniform", f"every row has length {int(most)}"
    mean, deviation = total / rows, float(lengths.std(correction=0))
    if deviation <= _CLOSE * mean:
        return "uniform", f"rows are about equally long: they deviate from the mean by {deviation / mean:.0%} of it"
    if most >= _GIANT_SHARE * total and most * (rows - 1) >= _GIANT_TIMES * (total - most) and rows > 2:
        return "giant", f"the longest row holds {most / total:.0%} of all"
    if rows < _ENOUGH:
        return None, "of no kind that so few rows could tell"
    short, explained = _two_kinds(lengths)
    if explained >= _TWO_KINDS and _FEWEST * rows <= short <= (1 - _FEWEST) * rows:
        low, high = float(lengths[:short].mean()), float(lengths[short:].mean())
        return "bimodal", f"{short / rows:.0%} of the rows are about {low:.0f} long, the others about {high:.0f}"
    even, falling = _distances(lengths)
    if falling < even:
        return "exponential", f"many short rows and few long ones (distance {falling:.2f}, of an even spread {even:.2f})"
    return "uniform", f"short and long rows alike (distance {even:.2f}, of an exponential {falling:.2f})"


def _growing(least: int, shortest: int, most: int) -> list[int]:
    factor = 2
    while True:
        lows = [1]
        while lows[-1] * factor <= most:
            lows.append(lows[-1] * factor)
        below = sum(low <= shortest for low in lows) - 1
        if len(lows) - below <= _BINS + 1:
            return [0, *lows[below:]] if least == 0 else [least, *lows[below + 1 :]]
        factor *= 2


def _two_kinds(lengths: Tensor) -> tuple[int, float]:
    """How many short rows there are if sorted lengths are cut in two where it explains most of the variance, and how much."""
    rows = len(lengths)
    below = torch.arange(1, rows, dtype=torch.float64, device=lengths.device)
    sums = lengths.cumsum(0)
    apart = (sums[-1] - sums[:-1]) / (rows - below) - sums[:-1] / below
    between = below * (rows - below) / rows**2 * apart**2
    best = int(between.argmax())
    return best + 1, float(between[best] / lengths.var(correction=0))


def _distances(lengths: Tensor) -> tuple[float, float]:
    """The largest difference (Kolmogorov's) of the share of rows up to a length from an even spread, and an exponential one."""
    least, most, mean = lengths[0], lengths[-1], lengths.mean()
    # Equal lengths are one step of the distribution: it is looked at before and after the step, not inside.
    values, counts = torch.unique(lengths, return_counts=True)
    after = counts.cumsum(0) / len(lengths)
    before = after - counts / len(lengths)
    # A length stands for the half-open range of real numbers that is rounded to it.
    span = most - least + 1
    found = []
    for share in (lambda x: (x - least) / span, lambda x: 1 - torch.exp(-x / (mean + 0.5))):
        found.append(float(torch.maximum((share(values) - before).abs(), (share(values + 1) - after).abs()).max()))
    return found[0], found[1]
