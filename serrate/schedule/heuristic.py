"""The choice of a strategy when nobody measures: from how many rows there are and how long the longest is.

In: facts about the rows of a call. Out: a strategy's name and its options. Decides speed, never meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from serrate.schedule.target import Target


@dataclass(frozen=True)
class Rows:
    """What is known of a call's rows; None where nobody has looked."""

    count: int
    total: int
    longest: int | None
    position_bytes: int
    """Bytes of one position of a row."""


KEPT_BYTES = 512 << 10
"""A row that is kept private must fit the second-level cache beside what is read."""


def choose(rows: Rows | None, target: Target, workers: int, *, product: bool = False) -> tuple[str, dict[str, bool]]:
    """A strategy and its options.

    A worker's fair share is total/workers. A row longer than a part of that leaves the others idle, so it is cut.
    """
    if rows is None:
        return "maskless", {}
    if target.power_of_two:
        few = rows.count < 2 * workers
        skewed = rows.longest is not None and rows.longest * workers > 4 * rows.total
        return ("persistent_dynamic" if few or skewed or product else "maskless"), {}
    if (
        rows.longest is not None
        and workers > 1
        and rows.longest * workers * 4 > rows.total
        and rows.total * rows.position_bytes > 1 << 20
    ):
        return "persistent_dynamic", {}
    fits = rows.longest is not None and rows.longest * rows.position_bytes <= KEPT_BYTES
    return "maskless", {"keep_rows": fits}
