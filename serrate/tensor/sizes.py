"""The size of a ragged dim, which is no number.

In: a structure and one of its levels. Out: a symbol that prints as `r0`, compares by structure, and refuses to become an int.
"""

from __future__ import annotations

from typing import NoReturn

from serrate.errors import RaggedSizeError
from serrate.tensor.structure import Structure


class RaggedSize:
    """What `jt.size(dim)` gives for a ragged dim: equal to another one of the same level of an equal structure.

    >>> import torch
    >>> size = RaggedSize(Structure.from_lengths(torch.tensor([3, 1])), 0)
    >>> size
    r0
    >>> int(size)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.RaggedSizeError: r0 is the size of a ragged dim and differs from row to row: use ...
    """

    __slots__ = ("level", "structure")

    structure: Structure
    level: int

    def __init__(self, structure: Structure, level: int) -> None:
        self.structure = structure
        self.level = level

    def __repr__(self) -> str:
        return f"r{self.level}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedSize):
            return NotImplemented
        return self.level == other.level and self.structure == other.structure

    def __hash__(self) -> int:
        return hash((self.level, self.structure))

    def __index__(self) -> NoReturn:
        raise RaggedSizeError(
            f"{self} is the size of a ragged dim and differs from row to row: use jt.lengths for every row's, "
            "or jt.max_length for the longest"
        )

    __int__ = __index__
    __float__ = __index__

    def _no_number(self, other: object) -> NoReturn:
        self.__index__()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_number
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _no_number
    __lt__ = __le__ = __gt__ = __ge__ = _no_number
