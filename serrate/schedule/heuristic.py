"""The choice of a strategy when nobody measures: from how dense rows are, how long the longest is, and how many there are.

In: facts about the rows of a call. Out: a strategy's name and its options. Decides speed, never meaning. The number of threads
is not one of the facts: on a CPU the same rows have the same plan, and so the same bits, for any number of threads.

| rows                                                   | strategy           | because                                       |
| one is long, and a large share of all                  | persistent_dynamic | the others would wait for it                  |
| dense (0.7 or more), shorter than what is done at once | masked             | lanes would have no work with one row at once |
| anything else                                          | maskless           | no lane without work, and nothing is combined |
On a GPU also few rows, and matrix products, are cut, so that all of it works. Density below 0.3 alone decides nothing: rows of
exponential and bimodal lengths have one of 0.1, and run as fast whole as in parts, as long as none is a share of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serrate.errors import InvarianceError
from serrate.schedule.target import Target


@dataclass(frozen=True)
class RowStatistics:
    """What is known of a call's rows; None where nobody has looked. A rectangle is one row of all its positions."""

    count: int
    total: int
    longest: int | None
    position_bytes: int
    """Bytes of one position of a row."""

    @property
    def density(self) -> float | None:
        """Elements among the positions of a table as wide as the longest row; None where the longest is not known.

        >>> RowStatistics(4, 20, 10, 4).density
        0.5
        """
        return None if self.longest is None else self.total / max(self.count * self.longest, 1)


DENSE = 0.7
KEPT_BYTES = 512 << 10
"""A row that is kept private must fit the second-level cache beside what is read."""
LONG_BYTES = 512 << 10
"""A shorter row is done before it pays to have another worker take a part of it."""
SHARES = 64
"""A row that is one in so many of all is a large share: with that many workers, or a quarter of them, others wait for it."""


def choose(rows: RowStatistics | None, target: Target, workers: int = 1, *, product: bool = False) -> tuple[str, dict[str, bool]]:
    """A strategy and its options; `workers` are those of a GPU.

    >>> from serrate.schedule.target import CPU
    >>> choose(RowStatistics(1000, 128_000, 130, 256), CPU)
    ('maskless', {'keep_rows': True})
    >>> choose(RowStatistics(1000, 128_000, 64_000, 256), CPU)
    ('persistent_dynamic', {})
    >>> choose(RowStatistics(100_000, 300_000, 4, 4), CPU)
    ('masked', {})
    """
    if rows is None:
        return "maskless", {}
    if _waits(rows, target, workers) or (target.many_workers and (product or rows.count < 2 * workers)):
        return "persistent_dynamic", {}
    if rows.longest is None:
        return "maskless", {"keep_rows": False} if target.keeps_rows else {}
    row_bytes = rows.longest * rows.position_bytes
    if not product and rows.density is not None and rows.density >= DENSE and row_bytes <= target.short_bytes:
        return "masked", {}
    return "maskless", {"keep_rows": row_bytes <= KEPT_BYTES} if target.keeps_rows else {}


ALONE = ("maskless", "persistent_dynamic")
"""Strategies whose workers compute a row, or a part of one that its own length tells, without a look at other rows."""


def invariant(named: str | None, options: dict[str, Any], target: Target, name: str) -> tuple[str, dict[str, Any]]:
    """The strategy under which a row's bits follow from that row alone: the one that is named if it is such, else whole rows.

    >>> from serrate.schedule.target import CPU
    >>> invariant(None, {}, CPU, "softmax")
    ('maskless', {'keep_rows': False})
    """
    if named is None:
        # Whether rows are kept would be for the longest of them to say.
        return "maskless", {"keep_rows": False} if target.keeps_rows else {}
    if named not in ALONE:
        raise InvarianceError(
            f"{name}: {named} may compute several rows together, so that the bits of one depend on the others; under "
            f"serrate.batch_invariant() name no strategy, or one of {', '.join(ALONE)}"
        )
    return named, options


def _waits(rows: RowStatistics, target: Target, workers: int) -> bool:
    """Whether a row is so long that all workers but one would wait for it."""
    if rows.longest is None:
        return False
    if target.many_workers:
        # A row must be several shares long to matter.
        return rows.longest * workers > 4 * rows.total
    return rows.longest * rows.position_bytes >= LONG_BYTES and rows.longest * SHARES > rows.total
