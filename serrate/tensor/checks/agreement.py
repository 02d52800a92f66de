"""Checks that rows agree with each other, and with the values they partition: immediately on the host, deferred on a device.

In: two sets of rows, or rows and values. Out: an answer, an error, or a deferred check on the device.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from serrate.errors import ShapeError, StructureMismatch
from serrate.tensor.checks.deferred import can_report, defer
from serrate.tensor.rows import Rows
from serrate.tensor.sync import on_host


def rows_agree(mine: Rows, theirs: Rows, what: str) -> bool:
    """Whether both have the same rows, wherever they are stored. On a device, compares shapes and defers the rest.

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
                _defer_comparison(own, other, what)
    return True


def require_same_offsets(left: Tensor, right: Tensor, what: str) -> None:
    """Raises StructureMismatch unless both offsets are equal: shapes are compared immediately, contents deferred on a device.

    >>> require_same_offsets(torch.tensor([0, 3, 5]), torch.tensor([0, 2, 5]), "the structures of a and b")
    Traceback (most recent call last):
    serrate.errors.StructureMismatch: the structures of a and b differ: lengths [3, 2] and [2, 3]
    """
    if left is right:
        return
    if left.shape != right.shape or left.device != right.device:
        raise _mismatch(left, right, what)
    if not (on_host(left) and on_host(right)):
        _defer_comparison(left, right, what)
    elif not torch.equal(*((left, right) if left.dtype is right.dtype else (left.long(), right.long()))):
        raise _mismatch(left, right, what)


def _defer_comparison(left: Tensor, right: Tensor, what: str) -> None:
    def verify(same: list[int]) -> None:
        if not same[0]:
            raise _mismatch(left, right, what)

    if can_report(left):
        defer([(left == right).all()], verify)


def _is_first_time(mine: Rows, theirs: Rows) -> bool:
    """Whether these two have not yet been compared on their device; keeps neither alive."""
    compared: dict[int, weakref.ref[Rows]] = mine.derived("compared on the device", dict)
    place = id(theirs)
    if place in compared and compared[place]() is theirs:
        return False
    compared[place] = weakref.ref(theirs, lambda _: compared.pop(place, None))
    return True


def _mismatch(left: Tensor, right: Tensor, what: str) -> StructureMismatch:
    return StructureMismatch(f"{what} differ: lengths {_lengths(left)} and {_lengths(right)}")


def _lengths(offsets: Tensor) -> str:
    # This copies to the host, but only to word an error.
    if offsets.is_meta:
        return f"of {offsets.shape[0] - 1} rows"
    lengths = offsets[:9].diff().tolist()
    return f"[{', '.join(map(str, lengths))}{', ...' if offsets.shape[0] > 9 else ''}]"


_WHY = "checking values"


def check_extent(values: Tensor, dim: int, rows: Rows) -> None:
    """Raises unless the rows fit this dim of the values (and the next one, if it holds their columns).

    If the total is known only on the device, the values' size is recorded as the total, and a deferred check verifies it.

    >>> import torch
    >>> check_extent(torch.zeros(5, 8), 0, Rows((torch.tensor([0, 3, 4]),)))
    Traceback (most recent call last):
    serrate.errors.ShapeError: the rows hold 4 positions together, but values of shape (5, 8) have 5
    """
    if rows.starts is None:
        _check_total(values, dim, rows)
    else:
        _check_end(values, dim, rows)
    if rows.storage_dims == 2:
        _check_columns(values, dim, rows)


def _check_total(values: Tensor, dim: int, rows: Rows) -> None:
    # A deferred check may run much later, and must not keep the values alive until then.
    shape = tuple(values.shape)
    count = shape[dim]

    def verify(found: list[int]) -> None:
        if count != found[0]:
            raise ShapeError(f"the rows hold {found[0]} positions together, but {_of(dim, shape)} have {count}")

    if rows.readable() or rows.known(*rows.extent_fact) is not None:
        verify([rows.extent(_WHY)])
    else:
        rows.note(*rows.extent_fact, count)
        if can_report(rows.offsets[0]):
            defer([rows.blocks()[-1]], verify)


def _check_end(values: Tensor, dim: int, rows: Rows) -> None:
    shape = tuple(values.shape)
    count = shape[dim]
    within = rows.known("within", 0)
    if within is not None and within <= count:
        return

    def verify(found: list[int]) -> None:
        if count < found[0]:
            raise ShapeError(f"the rows reach position {found[0]}, but {_of(dim, shape)} have {count}")

    if rows.starts_readable():
        verify([rows.end(_WHY)])
    elif rows.num_rows(rows.depth - 1) and can_report(rows.offsets[0]):
        # Rows are in order, so the last one ends last.
        defer([rows.row_starts()[-1] + rows.sizes()[-1]], verify)
    rows.note("within", 0, count)


def _check_columns(values: Tensor, dim: int, rows: Rows) -> None:
    shape = tuple(values.shape)
    width = shape[dim + 1]
    within = rows.known("columns within", 0)
    if within is not None and within <= width:
        return

    def verify(found: list[int]) -> None:
        if width < found[0]:
            raise ShapeError(f"the rows have up to {found[0]} columns, but {_of(dim + 1, shape)} has {width}")

    if rows.readable() or rows.known("max", rows.depth) is not None:
        verify([rows.max_length(rows.depth, _WHY)])
    elif rows.num_rows(rows.depth - 1) and can_report(rows.offsets[0]):
        defer([rows.counts().amax()], verify)
    rows.note("columns within", 0, width)


def _of(dim: int, shape: tuple[int, ...]) -> str:
    return f"dim {dim} of values of shape {shape}" if dim else f"values of shape {shape}"
