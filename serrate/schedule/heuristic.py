"""The choice of a strategy without measuring: from the density, the longest length and the number of rows.

In: facts about the rows of a call. Out: a strategy's name and its options. Decides speed, never meaning. The number of threads is
not an input: on a CPU the same rows get the same plan, and so the same bits, for any number of threads.

| rows                                                   | strategy           | because                                       |
| one is long, and a large share of all                  | persistent_dynamic | all other workers would wait for it           |
| dense (0.7 or more), shorter than a block              | masked             | one row at a time would leave lanes idle      |
| anything else                                          | maskless           | no idle lanes, and no partial results         |
On a GPU, rows are also cut if their lengths are unknown (short rows still stay whole), if there are few rows, and for matrix
products, to occupy all multiprocessors. If the lengths are known, whole rows get the plan that short rows have if they are not.
Low density alone decides nothing: exponential and bimodal lengths have a density of 0.1, and run as fast whole as in pieces, as
long as no row is a large share of the total.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from serrate.errors import InvarianceError
from serrate.schedule.target import Target, power_of_two_at_least


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the rows of a call; `longest` is None if it is unknown. A component of a product counts as one row."""

    count: int
    total: int
    longest: int | None
    position_bytes: int
    """Bytes of one position of a row."""

    @property
    def density(self) -> float | None:
        """The share of positions that hold elements if all rows are padded to the longest; None if that is unknown.

        >>> RowStatistics(4, 20, 10, 4).density
        0.5
        """
        return None if self.longest is None else self.total / max(self.count * self.longest, 1)

    @property
    def mean(self) -> int:
        """The mean length, rounded down."""
        return self.total // max(self.count, 1)


def similar_mean(mean: int, earlier: list[int]) -> int:
    """The first of the `earlier` means within a factor of two of `mean`; if there is none, `mean` itself, which is appended.

    Compiled-in sizes are chosen for this mean, so that batches with slightly different means share a program, wherever the
    threshold between two sizes is.

    >>> earlier = [24]
    >>> [similar_mean(mean, earlier) for mean in (31, 33, 13, 100, 60)], earlier
    ([24, 24, 24, 100, 100], [24, 100])
    """
    own = max(mean, 1)
    for each in earlier:
        if each <= 2 * own and own <= 2 * each:
            return each
    earlier.append(own)
    return own


DENSE = 0.7
KEPT_BYTES = 512 << 10
"""The most bytes of a row that is kept private: it must fit the second-level cache together with its input."""
LONG_BYTES = 512 << 10
"""The fewest bytes of a row that is worth cutting: a shorter one is finished before another worker could help."""
NUMBER_BYTES = 16
"""A position of at most this many bytes counts as a plain number."""
SHORT = 4096
"""The largest mean length of rows that a GPU treats as short: a worker with few warps finishes such a row quickly."""
PIVOT_BYTES = 1 << 20
"""The most bytes of a row whose moments a GPU sums about a pivot: each lane sums few elements then."""
LEAST_TILE, SHORT_TILE = 8, 64
"""Positions of a block of rows of features: at least so many, and as usual if rows are longer than that on average."""
FEW = 64
"""The most positions of a row of numbers, on average, for which a GPU processes many rows together."""
FULL_ROWS = 64
"""Rows of a block of a matrix product that keep as many warps busy as a larger one would."""
SHARES = 64
"""A row with more than 1/64 of all positions is a large share: with 64 workers, or even 16, the others wait for it."""


Carried = Literal["nothing", "sums", "statistics"]
"""What a worker carries from one block of a row to the next: simple reductions, for which each lane keeps a partial result, or
statistics such as those of a softmax, which all lanes combine in every block."""


class NumberBlocks(NamedTuple):
    """How a GPU processes rows of numbers: positions of a block, warps, and how many short rows are processed together."""

    tile: int
    warps: int
    rows: int


NUMBERS: dict[Carried, NumberBlocks] = {
    "nothing": NumberBlocks(1024, 4, 64),
    # Four numbers per thread: 32 registers suffice, so a multiprocessor runs all its warps and hides memory latency. A group of
    # rows takes one register for each row of a thread.
    "sums": NumberBlocks(512, 4, 128),
    # Lanes are combined in every block: few warps, with many numbers in each thread. A group of rows takes the registers of
    # several states for each row of a thread.
    "statistics": NumberBlocks(1024, 2, 32),
}
"""Measured on an H200, in percent of the speed of a copy. Rows of 2048 numbers, uniform and exponential: sums 95 and 89 (1024
positions in 2 warps: 91 and 86; in 4 warps: 85 and 79), softmax 82 and 67 (in 4 warps: 77 and 66). Rows of 32 numbers, uniform,
exponential and Zipf: sums 59, 52 and 46 (64 rows: 56, 54 and 40), softmax 45, 43 and 24 (64 rows: 41, 28 and 28)."""


class Choice(NamedTuple):
    """The choice that is made without measuring."""

    strategy: str
    options: dict[str, int]
    why: str


def choose(
    rows: RowStatistics | None,
    target: Target,
    workers: int = 1,
    *,
    product: bool = False,
    carried: Carried = "nothing",
    over_features: bool = False,
    distribution: str | None = None,
    mean: int | None = None,
) -> Choice:
    """A strategy, its options and the reason. `workers` is the number of workers of a GPU, `carried` the kind of value that each
    carries along its row, `over_features` whether these are statistics over all features. The user's `distribution` overrides the
    lengths of this call, because it also describes later calls.
    Sizes are chosen for rows of length `mean`, by default the mean of `rows`.

    >>> from serrate.schedule.target import CPU
    >>> choose(RowStatistics(1000, 128_000, 130, 256), CPU)[:2]
    ('maskless', {'keep_rows': True})
    >>> choose(RowStatistics(1000, 128_000, 64_000, 256), CPU).why
    'the longest row is a large share of the work: other workers would wait for it'
    >>> choose(RowStatistics(100_000, 300_000, 4, 4), CPU)[:2]
    ('masked', {})
    >>> choose(RowStatistics(1000, 128_000, 130, 256), CPU, distribution="giant")[:2]
    ('persistent_dynamic', {})
    """
    if rows is None:
        return Choice("maskless", {}, "it has no rows of different lengths")
    mean = rows.mean if mean is None else mean
    if distribution == "giant":
        options = _sizes(rows, target, product, carried, mean) if target.many_workers else {}
        return Choice("persistent_dynamic", options, "a hint says that one row may be very long")
    if distribution == "uniform":
        rows = replace(rows, longest=-(-rows.total // max(rows.count, 1)))
    if target.many_workers and (why := _why_in_pieces(rows, target, workers, product, over_features and mean <= SHORT)):
        return Choice("persistent_dynamic", _sizes(rows, target, product, carried, mean), why)
    if target.many_workers and "rows" in (sizes := _of_numbers(rows, carried, mean)):
        return Choice("persistent_dynamic", sizes, "most rows are a few numbers: many are processed together")
    if rows.longest is None:
        return Choice("maskless", {"keep_rows": False}, "the host does not know the longest row")
    if waits(rows, target, workers):
        return Choice("persistent_dynamic", {}, "the longest row is a large share of the work: other workers would wait for it")
    row_bytes = _longest_bytes(rows)
    if not product and rows.density is not None and rows.density >= DENSE and row_bytes <= target.short_bytes:
        return Choice("masked", {}, "rows are short and about equally long: one at a time would leave most lanes idle")
    if rows.longest * SHARES > rows.total:
        why = "even the longest row is short: a worker has finished it before another could help"
    else:
        why = "no row is a large share of all, and rows fill their lanes: one worker per row leaves no lanes idle"
    if target.keeps_rows:
        return Choice("maskless", {"keep_rows": row_bytes <= KEPT_BYTES}, why)
    plain = _of_numbers(rows, carried, mean)
    sizes = {name.removeprefix("short_"): n for name, n in plain.items() if name not in ("chunk", "uncut")}
    if mean <= SHORT:
        # As if lengths were unknown: most rows are short, even if the longest is not.
        sizes |= {"short": True, "pivots": row_bytes <= PIVOT_BYTES}
    return Choice("maskless", sizes, why)


def _longest_bytes(rows: RowStatistics) -> int:
    """The bytes of the longest row; 0 if it is unknown."""
    return (rows.longest or 0) * rows.position_bytes


WHY_PRODUCTS = "blocks of the matrix products of all rows occupy all workers"
"""The reason for cutting rows for matrix products on a GPU."""


def _why_in_pieces(rows: RowStatistics, target: Target, workers: int, product: bool, about_pivot: bool) -> str:
    """The reason for cutting rows if there are many workers; empty if rows stay whole. `about_pivot`: whether whole rows would be
    summed about a pivot."""
    if product:
        return WHY_PRODUCTS
    if rows.longest is None:
        return "the host does not know the longest row, and cut rows have no worst case"
    if rows.count < 2 * workers:
        return "there are too few rows to occupy all workers"
    if about_pivot and _longest_bytes(rows) > PIVOT_BYTES:
        return "statistics over all features are summed about a pivot, which is accurate only in rows of limited length"
    return "the longest row is a large share of the work: other workers would wait for it" if waits(rows, target, workers) else ""


def _sizes(rows: RowStatistics, target: Target, product: bool, carried: Carried, mean: int) -> dict[str, int]:
    """The sizes for rows on a GPU."""
    return product_sizes(mean, target) if product else _of_numbers(rows, carried, mean)


def product_sizes(mean: int, target: Target) -> dict[str, int]:
    """The sizes for matrix products on a GPU. Blocks have no more rows than rows have positions on average: if each expert has
    few tokens, most of a larger block would be empty.

    >>> from serrate.schedule.target import GPU
    >>> product_sizes(1000, GPU), product_sizes(70, GPU), product_sizes(20, GPU)
    ({}, {}, {'tile': 32, 'warps': 4})
    """
    most = target.matmul[0]
    tile = max(power_of_two_at_least(mean), target.least_matmul)
    if tile >= most:
        return {}
    return {"tile": tile} if tile >= FULL_ROWS else {"tile": tile, "warps": target.warps}


def _of_numbers(rows: RowStatistics, carried: Carried, mean: int) -> dict[str, int]:
    """The sizes for short rows, and for rows of plain numbers, on a GPU: small blocks, because most rows would not fill larger
    ones; groups of rows that do not even fill those."""
    if rows.position_bytes > NUMBER_BYTES:
        return {"short_tile": max(1 << mean.bit_length(), LEAST_TILE)} if mean < SHORT_TILE else {}
    tile, warps, together = NUMBERS[carried]
    if mean <= FEW:
        return {"tile": 1024, "chunk": 8192, "uncut": 256, "warps": 4, "stages": 1, "rows": together}
    return {"tile": tile, "chunk": 8192, "uncut": 16384, "warps": warps, "stages": 1}


ALONE = ("maskless", "persistent_dynamic")
"""Strategies whose workers compute a row, or a piece determined by its length, independently of other rows."""


def invariant(named: str | None, options: dict[str, Any], target: Target, name: str) -> tuple[str, dict[str, Any]]:
    """A strategy under which the bits of a row depend on that row alone: the one named, if it qualifies, or whole rows.

    >>> from serrate.schedule.target import CPU
    >>> invariant(None, {}, CPU, "softmax")
    ('maskless', {'keep_rows': False})
    """
    if named is None:
        # Whether to keep rows would depend on the longest of the batch.
        return "maskless", {"keep_rows": False} if target.keeps_rows else {}
    if named not in ALONE:
        raise InvarianceError(
            f"{name}: {named} may compute several rows together, so the bits of one depend on the others; under "
            f"serrate.batch_invariant() name no strategy, or one of {', '.join(ALONE)}"
        )
    return named, options


def waits(rows: RowStatistics, target: Target, workers: int = 1) -> bool:
    """Whether the longest row is a large share of the work: other workers would wait for it."""
    if rows.longest is None:
        return False
    if target.many_workers:
        # A row must be several shares long to matter.
        return rows.longest * workers > 4 * rows.total
    return rows.longest * rows.position_bytes >= LONG_BYTES and rows.longest * SHARES > rows.total
