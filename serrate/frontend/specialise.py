"""Specialisation: which sizes are compiled in, and which are symbolic.

In: the sizes of a call's tensors. Out: the program compiled for them, or the sizes to compile one for. Initially, every size is
compiled in. When one changes, later programs accept any size in its place, so a function is recompiled at most once per varying
size, however many values it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from serrate.frontend.leaves import Leaves
from serrate.frontend.trace import FusionInputs, Pattern
from serrate.tensor import JaggedTensor

P = TypeVar("P")

WIDTHS = 8
"""How many widths an eager operator is compiled for before the width becomes symbolic: fixed-width code is faster."""
PROGRAMS = 32
"""How many programs are kept per signature; the least recently used is evicted first."""


class Specialised(Generic[P]):
    """The programs for calls that differ only in sizes.

    Sizes 0 and 1 are always compiled in, because dims of size 1 broadcast and dims of size 0 have no maximum. Only row lengths
    and the number of rows (`ragged`) are symbolic from the start, whatever their value. A size whose value the traced function
    needs is compiled in too (see `fix`).

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
        self._programs: dict[Pattern, tuple[P, list[int], list[int], list[int]]] = {}
        """With each program: the places of the sizes that are compiled in, these sizes, and the places of sizes above 1."""
        self._used: dict[Pattern, int] = {}
        self._calls = 0

    def find(self, sizes: Sequence[int]) -> P | None:
        """The program for these sizes: the earliest that fits, which has the most sizes compiled in."""
        for pattern, (program, places, compiled_in, varying) in list(self._programs.items()):
            if [sizes[k] for k in places] == compiled_in and (not varying or min([sizes[k] for k in varying]) > 1):
                self._calls += 1
                self._used[pattern] = self._calls
                return program
        return None

    @property
    def fixes_rows(self) -> bool:
        """Whether programs are compiled for sizes of rows."""
        return not self._fixed.isdisjoint(self._ragged)

    def _varies(self, place: int, size: int) -> bool:
        return size > 1 or place in self._ragged

    def wanted(self, sizes: Sequence[int]) -> Pattern:
        """The sizes to compile a program for; None for symbolic ones."""
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
        """Declares that the values of sizes are needed: each value gets its own program."""
        self._fixed.update(places)

    def add(self, pattern: Pattern, program: P) -> None:
        """Stores a program."""
        while len(self._programs) >= PROGRAMS:
            oldest = min(self._used, key=self._used.__getitem__)
            del self._programs[oldest], self._used[oldest]
        places = [k for k, own in enumerate(pattern) if own is not None]
        varying = [k for k, own in enumerate(pattern) if own is None and k not in self._ragged]
        self._programs[pattern] = (program, places, [own for own in pattern if own is not None], varying)
        self._calls += 1
        self._used[pattern] = self._calls


def changing(inputs: FusionInputs, tensors: Sequence[Tensor], arguments: Leaves) -> tuple[list[int], list[int], list[int]]:
    """Which sizes of a fusion's inputs belong to rows, which others are symbolic from the start, and which are widths.

    The first dim of a dense argument is symbolic from the start if it equals the number of rows: a table with one entry per row.
    """
    rows = {len(leaf) for leaf in arguments if isinstance(leaf, JaggedTensor)}
    ragged: list[int] = []
    counting: list[int] = []
    widths: list[int] = []
    place = 0
    for tensor, leaf, own in zip(tensors, inputs.leaves, inputs.ragged_dims, strict=True):
        for dim, size in enumerate(tensor.shape):
            if dim in own:
                ragged.append(place)
            elif dim == 0 and tensor.ndim > 1 and leaf is not None and leaf < len(arguments) and size in rows:
                counting.append(place)
            elif dim and dim == tensor.ndim - 1:
                widths.append(place)
            place += 1
    return ragged, counting, widths
