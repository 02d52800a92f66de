"""Sizes that are compiled in, and sizes that are symbols.

In: the sizes of a call's tensors. Out: the program that was made for them, or what to make one for. A size is compiled in at
first. When another one is seen in its place, what is made from then on takes any size there; so a function is built at most
once more for every size that changes, however many different ones come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from serrate.frontend.leaves import Leaves
from serrate.frontend.trace import Pattern, TracedInput
from serrate.tensor import JaggedTensor

P = TypeVar("P")

WIDTHS = 8
"""How many widths an operation that a whole process shares is built for before they are symbols: code for one width is faster."""
PROGRAMS = 32
"""How many programs are kept for calls of one kind; the one that was not used for longest goes first."""


class Specialised(Generic[P]):
    """The programs for calls that differ in sizes alone.

    Sizes 0 and 1 are always compiled in, because dims of size 1 broadcast and dims of size 0 have no largest element; only
    sizes of rows and their number (`ragged`) are symbols from the start, whatever they are. A size that the traced function
    needs as a number is compiled in, too (see `fix`).

    >>> programs = Specialised([12, 8], ragged=())
    >>> programs.wanted([12, 8])
    (12, 8)
    >>> programs.add((12, 8), "compiled for 12 x 8")
    >>> programs.wanted([13, 8])
    (None, 8)
    >>> programs.add((None, 8), "compiled for any x 8")
    >>> programs.find([12, 8]), programs.find([14, 8]), programs.find([1, 8])
    ('compiled for 12 x 8', 'compiled for any x 8', None)
    """

    def __init__(
        self, sizes: Sequence[int], ragged: Collection[int], symbols: Collection[int] = (), widths: Collection[int] = ()
    ) -> None:
        self._first = list(sizes)
        self._widths: dict[int, set[int]] = {k: set() for k in widths}
        self._ragged = frozenset(ragged)
        self._symbols = {*ragged, *symbols}
        self._fixed: set[int] = set()
        self._programs: dict[Pattern, P] = {}
        self._used: dict[Pattern, int] = {}
        self._calls = 0

    def find(self, sizes: Sequence[int]) -> P | None:
        """The program for these sizes: the first that was made, which has most of them compiled in."""
        for pattern, program in list(self._programs.items()):
            if all(
                own == size or (own is None and self._varies(k, size))
                for k, (own, size) in enumerate(zip(pattern, sizes, strict=True))
            ):
                self._calls += 1
                self._used[pattern] = self._calls
                return program
        return None

    def _varies(self, place: int, size: int) -> bool:
        return size > 1 or place in self._ragged

    def wanted(self, sizes: Sequence[int]) -> Pattern:
        """What to make a program for: these sizes, None for those that are symbols."""
        for k, (first, size) in enumerate(zip(self._first, sizes, strict=True)):
            if size > 1 and first != size:
                seen = self._widths.get(k)
                if seen is not None and len(seen | {size}) < WIDTHS:
                    seen.add(size)
                elif first > 1:
                    self._symbols.add(k)
                else:
                    self._first[k] = size
        symbols = self._symbols - self._fixed
        return tuple(None if k in symbols and self._varies(k, size) else size for k, size in enumerate(sizes))

    def fix(self, places: Collection[int]) -> None:
        """Says that sizes are needed as numbers: every number has a program of its own."""
        self._fixed.update(places)

    def add(self, pattern: Pattern, program: P) -> None:
        """Keeps a program."""
        while len(self._programs) >= PROGRAMS:
            oldest = min(self._used, key=self._used.__getitem__)
            del self._programs[oldest], self._used[oldest]
        self._programs[pattern] = program
        self._calls += 1
        self._used[pattern] = self._calls


def changing(given: Sequence[TracedInput], arguments: Leaves) -> tuple[list[int], list[int], list[int]]:
    """Which sizes of the inputs are those of rows, which others are symbols from the start, and which are widths.

    Symbols are first dims of dense arguments that have as many positions as there are rows: tables with a line for each.
    """
    rows = {len(leaf) for leaf in arguments if isinstance(leaf, JaggedTensor)}
    ragged: list[int] = []
    counting: list[int] = []
    widths: list[int] = []
    place = 0
    for each in given:
        for dim, size in enumerate(each.tensor.shape):
            if dim in each.ragged:
                ragged.append(place)
            elif dim == 0 and each.tensor.ndim > 1 and each.leaf is not None and each.leaf < len(arguments) and size in rows:
                counting.append(place)
            elif dim and dim == each.tensor.ndim - 1:
                widths.append(place)
            place += 1
    return ragged, counting, widths
