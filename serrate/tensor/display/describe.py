"""`jt.describe()`: statistics of the lengths, the cost of padding, and the distribution the lengths resemble.

In: a ragged tensor's shape, values and structure. Out: a `Description` with the numbers as fields, which prints as text, and in
colour if rich prints it. Reads the lengths on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serrate.tensor.hints import Distribution
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure

if TYPE_CHECKING:
    from rich.text import Text

_WHY = "describe"
_BAR = 32
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class RaggedDim:
    """Statistics of one ragged dim's lengths."""

    name: str
    """As in the shape: `r0`."""
    dim: int
    """Its number among the tensor's dims."""
    holds: str
    """What a length counts: `positions`, `parts` of an outer level, or `columns`."""
    rows: int
    total: int
    min_length: int
    mean_length: float
    median_length: float
    p95_length: int
    """The length that 95% of the rows do not exceed."""
    max_length: int
    empty_rows: int
    sparsity: float
    """Mean length divided by the longest; padded to the longest, a fraction of `1 - sparsity` would be holes."""
    variance: float
    deviation: float
    """The square root of the variance."""
    histogram: tuple[Bin, ...]
    distribution: Distribution | None
    """The `distribution` hint that fits best."""
    reason: str
    """The reason for that hint."""


@dataclass(frozen=True, repr=False)
class Description:
    """The result of `jt.describe()`; prints as text."""

    shape: str
    dtype: torch.dtype
    device: torch.device
    format: str
    total_elements: int
    """The number of positions that exist."""
    holes: float
    """The fraction of the padded tensor that would be holes."""
    stored_holes: float
    """The fraction of the values that is holes: 0 unless rows are stored padded or with gaps."""
    value_bytes: int
    """The size of the values, holes included."""
    structure_bytes: int
    """The size of offsets and starts."""
    padded_bytes: int
    """The size of the padded tensor."""
    dims: tuple[RaggedDim, ...]
    """One for each ragged dim, in their order."""

    @property
    def saved_bytes(self) -> int:
        """How much larger the padded tensor is than values and structure; negative if it is smaller."""
        return self.padded_bytes - self.value_bytes - self.structure_bytes

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in _lines(self))

    __repr__ = __str__

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text("\n").join(Text.assemble(*line) for line in _lines(self))


def describe(shape: tuple[object, ...], values: Tensor, structure: Structure) -> Description:
    """Measures a ragged tensor, for `jt.describe()`.

    >>> from serrate import JaggedTensor
    >>> found = JaggedTensor.from_lengths(torch.zeros(8, 4), [3, 0, 5]).describe()
    >>> found.saved_bytes, found.dims[0].median_length
    (80, 3.0)
    """
    dims = structure.dims_of(values.dim())
    regular = math.prod(values.shape[dim.values_dim] for dim in dims if dim.axis is None)
    item = values.element_size()
    exist, stored = structure.total_elements(why=_WHY) * regular * item, values.numel() * item
    padded = padded_positions(structure, _WHY) * regular * item
    return Description(
        shape=f"({', '.join(map(str, shape))})",
        dtype=values.dtype,
        device=values.device,
        format=structure.format,
        total_elements=structure.total_elements(why=_WHY),
        holes=1 - exist / padded if padded else 0.0,
        stored_holes=1 - exist / stored if stored else 0.0,
        value_bytes=stored,
        structure_bytes=sum(_bytes_of(rows) for rows in structure.rows),
        padded_bytes=padded,
        dims=ragged_dims(structure, values.dim()),
    )


def ragged_dims(structure: Structure, ndim: int, why: str = _WHY) -> tuple[RaggedDim, ...]:
    """Statistics of every ragged dim of a tensor whose values have `ndim` dims."""
    return tuple(
        _measure(f"r{dim.ragged}", k, structure.rows[dim.axis], dim.level, why)
        for k, dim in enumerate(structure.dims_of(ndim))
        if dim.axis is not None and dim.level is not None
    )


def dim_text(dim: RaggedDim) -> list[str]:
    """The statistics of a ragged dim as lines of text."""
    return ["".join(text for text, _ in line).rstrip() for line in _dim_lines(dim)]


def padded_positions(structure: Structure, why: str) -> int:
    """The number of positions if every row were padded to the longest, and every component to the largest.

    >>> padded_positions(Structure.from_lengths(torch.tensor([3, 0, 5])), "describe")
    15
    """
    longest = (rows.max_length(level, why) for rows in structure.rows for level in range(rows.levels))
    return math.prod(rows.num_rows(0) for rows in structure.rows) * math.prod(longest)


def _measure(name: str, dim: int, rows: Rows, level: int, why: str) -> RaggedDim:
    ordered = rows.host_lengths(level, why).long().sort().values
    count, total = len(ordered), int(ordered.sum())
    most, variance = rows.max_length(level, why), rows.variance(level, why)
    word, reason = fitting(ordered)
    return RaggedDim(
        name=name,
        dim=dim,
        holds="parts" if level < rows.depth - 1 else "positions" if level < rows.depth else "columns",
        rows=count,
        total=total,
        min_length=rows.min_length(level, why),
        mean_length=total / count if count else 0.0,
        median_length=float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2 if count else 0.0,
        p95_length=int(ordered[math.ceil(0.95 * count) - 1]) if count else 0,
        max_length=most,
        empty_rows=int((ordered == 0).sum()),
        sparsity=total / (count * most) if count * most else 1.0,
        variance=variance,
        deviation=math.sqrt(variance),
        histogram=bins(ordered),
        distribution=word,
        reason=reason,
    )


def _bytes_of(rows: Rows) -> int:
    held = rows.offsets if rows.starts is None else (*rows.offsets, rows.starts)
    return sum(each.numel() * each.element_size() for each in held)


# --- text ---

_Line = list[tuple[str, str]]
"""The spans of a line, each with its rich style."""


def _lines(found: Description) -> Iterator[_Line]:
    yield [("JaggedTensor ", "bold"), (found.shape, "bold cyan"), (f"  {found.dtype}, {found.device}, {found.format}", "")]
    values, structure, padded = map(_size, (found.value_bytes, found.structure_bytes, found.padded_bytes))
    already = f", {percent(found.stored_holes)} of it holes," if found.stored_holes else ""
    yield _fact("values", f"{values}{already} for {_counted(found.total_elements, 'positions')}, and {structure} of structure")
    saved = found.saved_bytes
    verdict = f"{_size(saved)} saved" if saved >= 0 else f"{_size(-saved)} less than here"
    yield [*_fact("padded", f"{padded}, {percent(found.holes)} of it holes: "), (verdict, "bold green" if saved > 0 else "")]
    for dim in found.dims:
        yield [("", "")]
        yield from _dim_lines(dim)


def _dim_lines(dim: RaggedDim) -> Iterator[_Line]:
    counted = f"dim {dim.dim}: {_counted(dim.rows, 'rows')}, {_counted(dim.total, dim.holds)}"
    yield [(dim.name, "bold cyan"), (f"  {counted}", "")]
    if not dim.rows:
        return
    spots = {"median": dim.median_length, "mean": dim.mean_length, "p95": dim.p95_length, "max": dim.max_length}
    between = ", ".join(f"{name} {number_text(length)}" for name, length in spots.items())
    yield _fact("lengths", f"min {number_text(dim.min_length)}, {between}; {_counted(dim.empty_rows, 'rows')} empty")
    yield _fact("variance", f"{number_text(dim.variance)}, a deviation of {number_text(dim.deviation)}")
    yield _fact("sparsity", f"{dim.sparsity:.3g}: padded to the longest, {percent(1 - dim.sparsity)} would be holes")
    yield [*_fact("looks", ""), (f"{dim.distribution}: " if dim.distribution else "", "bold"), (dim.reason, "")]
    labels = [str(each.low) if each.low == each.high else f"{each.low}-{each.high}" for each in dim.histogram]
    width, most = max(map(len, labels)), max(each.rows for each in dim.histogram)
    for label, each in zip(labels, dim.histogram, strict=True):
        bar = _bar(each.rows / most)
        yield [(f"  {label:>{max(width, 8)}}  ", "dim"), (bar, "cyan"), (f"{' ' if bar else ''}{each.rows:,}", "")]


def _fact(name: str, text: str) -> _Line:
    return [(f"  {name:<10}", "dim"), (text, "")]


def _bar(share: float) -> str:
    # A bin that is not empty gets at least one mark.
    eighths = max(round(share * _BAR * 8), 1) if share else 0
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _counted(count: int, things: str) -> str:
    return f"{count:,} {things[:-1] if count == 1 else things}"


def number_text(number: float) -> str:
    """A number with four digits, or whole.

    >>> number_text(12345.6), number_text(0.12345)
    ('12,346', '0.1235')
    """
    return f"{number:,.0f}" if number >= 1000 or number == int(number) else f"{number:.4g}"


def percent(share: float) -> str:
    """A fraction as a percentage with three digits.

    >>> percent(1 / 3)
    '33.3%'
    """
    return f"{100 * share:.3g}%"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count)) // 10, 5)
    return f"{count / 1024**power:.3g} {'KMGTP'[power - 1]}iB"


_BINS = 10
_SKEWED = 16
"""If the longest row exceeds this many medians, bins double in width."""
_CLOSE = 0.25
"""Rows count as about equally long if their deviation is below this fraction of the mean."""
_GIANT_SHARE, _GIANT_TIMES = 0.25, 6
"""A giant row holds at least this fraction of all positions, and is this many times as long as the mean of the others."""
_TWO_KINDS, _FEWEST = 0.85, 0.05
"""Two kinds of rows must explain this fraction of the variance (an even spread reaches 3/4), with this many rows each."""

_ENOUGH = 8
"""The smallest number of rows that can look bimodal or like a distribution."""


@dataclass(frozen=True, slots=True)
class Bin:
    """The number of rows with a length from `low` to `high`, inclusive."""

    low: int
    high: int
    rows: int


def bins(ordered: Tensor) -> tuple[Bin, ...]:
    """A histogram of sorted lengths: at most a dozen bins of equal width, or bins that double if a few rows dwarf the others.

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
    """The `distribution` hint that fits sorted lengths best, and why; None if there are too few rows to tell.

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
        return None, "too few rows to tell"
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
    """The split of sorted lengths in two that explains most of the variance: the number of short rows, and that fraction."""
    rows = len(lengths)
    below = torch.arange(1, rows, dtype=torch.float64, device=lengths.device)
    sums = lengths.cumsum(0)
    apart = (sums[-1] - sums[:-1]) / (rows - below) - sums[:-1] / below
    between = below * (rows - below) / rows**2 * apart**2
    best = int(between.argmax())
    return best + 1, float(between[best] / lengths.var(correction=0))


def _distances(lengths: Tensor) -> tuple[float, float]:
    """Kolmogorov-Smirnov distances of the lengths from a uniform and from an exponential distribution."""
    least, most, mean = lengths[0], lengths[-1], lengths.mean()
    # Equal lengths are one step of the empirical distribution: compare before and after the step, not inside.
    values, counts = torch.unique(lengths, return_counts=True)
    after = counts.cumsum(0) / len(lengths)
    before = after - counts / len(lengths)
    # A length stands for the half-open range of real numbers that round to it.
    span = most - least + 1
    found = []
    for share in (lambda x: (x - least) / span, lambda x: 1 - torch.exp(-x / (mean + 0.5))):
        found.append(float(torch.maximum((share(values) - before).abs(), (share(values + 1) - after).abs()).max()))
    return found[0], found[1]
