"""Whether two sets of rows are the same, asked by operations that take both: at once where numbers are here, later elsewhere.

In: rows or offsets. Out: True or False; and from a device that found other numbers, a StructureMismatch later.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from serrate.errors import StructureMismatch
from serrate.tensor.checks.deferred import arrives, later
from serrate.tensor.rows import Rows
from serrate.tensor.sync import on_host


def rows_agree(mine: Rows, theirs: Rows, what: str) -> bool:
    """Whether both have the same rows, wherever these are stored; numbers on a device are compared there, and told later.

    >>> one, other = Rows((torch.tensor([0, 3]),)), Rows((torch.tensor([0, 3]),))
    >>> rows_agree(one, other, "the operands of add")
    True
    """
    if mine.known_same_rows(theirs):
        return True
    if not mine.same_form(theirs):
        return False
    if mine.readable() and theirs.readable():
        return mine.same_rows(theirs, what)
    if _is_first_time(mine, theirs):
        for own, other in zip(mine.offsets, theirs.offsets, strict=True):
            if own is not other:
                _same_later(own, other, what)
    return True


def require_same_offsets(left: Tensor, right: Tensor, what: str) -> None:
    """Raises StructureMismatch unless both offsets are the same: at once by their shape, and on a CPU by their numbers.

    >>> require_same_offsets(torch.tensor([0, 3, 5]), torch.tensor([0, 2, 5]), "the structures of a and b")
    Traceback (most recent call last):
    serrate.errors.StructureMismatch: the structures of a and b differ: lengths [3, 2] and [2, 3]
    """
    if left is right:
        return
    if left.shape != right.shape or left.device != right.device:
        raise _mismatch(left, right, what)
    if not (on_host(left) and on_host(right)):
        _same_later(left, right, what)
    elif not torch.equal(*((left, right) if left.dtype is right.dtype else (left.long(), right.long()))):
        raise _mismatch(left, right, what)


def _same_later(left: Tensor, right: Tensor, what: str) -> None:
    def judge(same: list[int]) -> None:
        if not same[0]:
            raise _mismatch(left, right, what)

    if arrives(left):
        later([(left == right).all()], judge)


def _is_first_time(mine: Rows, theirs: Rows) -> bool:
    """Whether these two have not been compared on their device before; neither is kept alive to know it."""
    compared: dict[int, weakref.ref[Rows]] = mine.derived("compared on the device", dict)
    place = id(theirs)
    if place in compared and compared[place]() is theirs:
        return False
    compared[place] = weakref.ref(theirs, lambda _: compared.pop(place, None))
    return True


def _mismatch(left: Tensor, right: Tensor, what: str) -> StructureMismatch:
    return StructureMismatch(f"{what} differ: lengths {_lengths(left)} and {_lengths(right)}")


def _lengths(offsets: Tensor) -> str:
    # Only the words of an error are read here, so this is no host copy that a working program makes.
    if offsets.is_meta:
        return f"of {offsets.shape[0] - 1} rows"
    lengths = offsets[:9].diff().tolist()
    return f"[{', '.join(map(str, lengths))}{', ...' if offsets.shape[0] > 9 else ''}]"
