"""Whether values have the positions that rows need: exactly as many, or at least as many where there are gaps.

In: values, a dim of them and the rows it is partitioned into. Out: nothing, or a ShapeError: at once where the rows can be read
or are known, later where only the device can tell.
"""

from __future__ import annotations

from torch import Tensor

from serrate.errors import ShapeError
from serrate.tensor.checks.deferred import arrives, later
from serrate.tensor.rows import Rows

_WHY = "checking values"


def check_extent(values: Tensor, dim: int, rows: Rows) -> None:
    """Raises unless the rows fit this dim of the values (and the next one, if it holds their columns).

    A total that only a host copy could tell is taken from the values and remembered; the device checks it.

    >>> import torch
    >>> check_extent(torch.zeros(5, 8), 0, Rows((torch.tensor([0, 3, 4]),)))
    Traceback (most recent call last):
    serrate.errors.ShapeError: the rows hold 4 positions together, but values of shape (5, 8) have 5
    """
    if rows.starts is None:
        _check_total(values, dim, rows)
    else:
        _check_reach(values, dim, rows)
    if rows.takes == 2:
        _check_columns(values, dim, rows)


def _check_total(values: Tensor, dim: int, rows: Rows) -> None:
    # A judge may wait a while, and must not keep the values until then.
    shape = tuple(values.shape)
    count = shape[dim]

    def judge(found: list[int]) -> None:
        if count != found[0]:
            raise ShapeError(f"the rows hold {found[0]} positions together, but {_of(dim, shape)} have {count}")

    if rows.readable() or rows.known(*rows.extent_fact) is not None:
        judge([rows.extent(_WHY)])
    else:
        rows.note(*rows.extent_fact, count)
        if arrives(rows.offsets[0]):
            later([rows.blocks()[-1]], judge)


def _check_reach(values: Tensor, dim: int, rows: Rows) -> None:
    shape = tuple(values.shape)
    count = shape[dim]
    within = rows.known("within", 0)
    if within is not None and within <= count:
        return

    def judge(found: list[int]) -> None:
        if count < found[0]:
            raise ShapeError(f"the rows reach position {found[0]}, but {_of(dim, shape)} have {count}")

    if rows.places_readable():
        judge([rows.reach(_WHY)])
    elif rows.num_rows(rows.depth - 1) and arrives(rows.offsets[0]):
        # Rows lie in order, so the last one ends last.
        later([rows.where()[-1] + rows.sizes()[-1]], judge)
    rows.note("within", 0, count)


def _check_columns(values: Tensor, dim: int, rows: Rows) -> None:
    shape = tuple(values.shape)
    width = shape[dim + 1]
    within = rows.known("columns within", 0)
    if within is not None and within <= width:
        return

    def judge(found: list[int]) -> None:
        if width < found[0]:
            raise ShapeError(f"the rows have up to {found[0]} columns, but {_of(dim + 1, shape)} has {width}")

    if rows.readable() or rows.known("max", rows.depth) is not None:
        judge([rows.max_length(rows.depth, _WHY)])
    elif rows.num_rows(rows.depth - 1) and arrives(rows.offsets[0]):
        later([rows.counts().amax()], judge)
    rows.note("columns within", 0, width)


def _of(dim: int, shape: tuple[int, ...]) -> str:
    return f"dim {dim} of values of shape {shape}" if dim else f"values of shape {shape}"
