"""Buckets: which calls share a choice.

In: sizes of a call, statistics of its rows, hints. Out: a frozen `Bucket`, and how far one is from another. Sizes are rounded to
powers of two; density and variation of lengths to a few classes. What the host does not know is None: nothing is copied from a
device to find a bucket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serrate.schedule.heuristic import RowStatistics
from serrate.tensor.hints import NO_HINTS, Hints

DENSITIES = (0.05, 0.15, 0.35, 0.7, 0.95)
"""The bounds of the classes of density: the share of positions that hold elements if all rows are padded to the longest."""
VARIATIONS = (0.1, 0.4, 0.8, 1.6, 4.0)
"""The bounds of the classes of variation: the standard deviation of lengths over their mean."""


@dataclass(frozen=True)
class Bucket:
    """The key that calls share if they share a choice.

    >>> rows = RowStatistics(1000, 128_000, 130, 256)
    >>> bucket_of((1001, 128_000), rows, 0.02)
    Bucket(sizes=(10, 17), density=5, variation=0, hints=Hints())
    """

    sizes: tuple[int, ...]
    """The bit lengths of all sizes that are not compiled in."""
    density: int | None
    variation: int | None
    hints: Hints = NO_HINTS

    def as_dict(self) -> dict[str, Any]:
        """As JSON; `bucket_from` reads it."""
        return {
            "sizes": list(self.sizes),
            "density": self.density,
            "variation": self.variation,
            "hints": self.hints.as_dict(),
        }

    def distance(self, other: Bucket) -> float:
        """How different two buckets of one program are; infinite if they cannot be of one program.

        >>> Bucket((10, 17), 5, 0).distance(Bucket((10, 18), 3, 0))
        3.0
        """
        if len(self.sizes) != len(other.sizes):
            return float("inf")
        apart = float(sum(abs(a - b) for a, b in zip(self.sizes, other.sizes, strict=True)))
        for mine, theirs in ((self.density, other.density), (self.variation, other.variation)):
            if mine is not None and theirs is not None:
                apart += abs(mine - theirs)
            elif mine != theirs:
                apart += 1
        return apart + (self.hints != other.hints)


def bucket_of(
    sizes: Sequence[int], rows: RowStatistics | None, variation: float | None = None, hints: Hints = NO_HINTS
) -> Bucket:
    """The bucket of a call; `variation` is the standard deviation of lengths over their mean, if the host knows it."""
    density = None if rows is None else rows.density
    return Bucket(
        tuple([size.bit_length() for size in sizes]),
        None if density is None else bisect_right(DENSITIES, density),
        None if variation is None else bisect_right(VARIATIONS, variation),
        hints,
    )


def bucket_from(given: Mapping[str, Any]) -> Bucket:
    """A bucket from JSON; raises an error of Python's own if it is not one.

    >>> bucket_from(Bucket((10, 17), 5, None, Hints(reuse="high")).as_dict())
    Bucket(sizes=(10, 17), density=5, variation=None, hints=Hints(reuse='high'))
    """
    classes = [None if given[name] is None else int(given[name]) for name in ("density", "variation")]
    return Bucket(tuple(int(size) for size in given["sizes"]), classes[0], classes[1], Hints(**given["hints"]))
