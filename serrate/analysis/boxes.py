"""Boxes: blocks of a tensor that a copy engine can move as a whole.

In: a block of an operand: a tensor, an index, and the two lanes that the index runs over. Out: a `MatrixBox`, which is the tensor
viewed as a matrix and the position of the block in it; or None.

A copy engine (TMA, on Hopper GPUs) receives a descriptor of the matrix once, then the position of each block. It computes all
addresses itself and fills in zeros where the block reaches past the matrix. It cannot mask positions inside the matrix. It
requires:

  rows        begin at multiples of 16 bytes, so 16 must divide the length of a matrix row in bytes;
  blocks      are contiguous along their columns, at least 16 bytes wide, and at most 256 positions long on each side; their
              first column is at a multiple of 16 bytes.

The tensor's dims up to the one that holds the block's rows become the rows of the matrix, the remaining dims its columns. For
example, keys `[n, 16, 128]`, read 64 positions of one head at a time, are 64 x 128 blocks of an n x 2048 matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serrate.analysis.contiguity import divides
from serrate.ir.expr import Expr, Symbol, const
from serrate.ir.loops import Lane, Load, flat_index
from serrate.ir.solve import factor_of

ALIGNMENT = 16
"""Bytes that divide the address of a matrix, the length of its rows, and the place of a block in them."""
LONGEST = 256
"""The most positions along a side of a block."""


@dataclass(frozen=True)
class MatrixBox:
    """A block of a tensor as a matrix of `rows` x `columns`; its first position is at `place`."""

    rows: Expr
    columns: Expr
    place: tuple[Expr, Expr]
    sides: tuple[Lane, Lane]
    """The lanes along its rows and its columns."""


def box_of(value: Load, lanes: Sequence[Lane]) -> MatrixBox | None:
    """The block that a read covers in two lanes; None if a copy engine cannot move it."""
    extents, size = [d.extent_expr for d in value.tensor.storage], value.dtype.itemsize
    dims = [_dim_along(value.index, lane.symbol) for lane in lanes]
    if len(lanes) != 2 or None in dims or any(lane.size > LONGEST for lane in lanes):
        return None
    (outer, row), (inner, column) = sorted(zip(dims, lanes, strict=True), key=lambda each: each[0] or 0)
    if outer is None or inner != len(extents) - 1 or outer == inner or column.size * size < ALIGNMENT:
        return None
    split = outer + 1
    start = [e.substitute({lane.symbol: const(0) for lane in lanes}) for e in value.index]
    rows, columns = (_product(part) for part in (extents[:split], extents[split:]))
    place = flat_index(start[:split], extents[:split]), flat_index(start[split:], extents[split:])
    if not all(divides(max(ALIGNMENT // size, 1), e) for e in (columns, place[1])) or any(e.arrays for e in (rows, columns)):
        return None
    return MatrixBox(rows, columns, place, (row, column))


def _dim_along(index: Sequence[Expr], lane: Symbol) -> int | None:
    """The only dim whose index has this lane, if it is the lane plus something else."""
    found = [k for k, e in enumerate(index) if lane in e.symbols]
    return found[0] if len(found) == 1 and factor_of(index[found[0]], lane) == 1 else None


def _product(extents: Sequence[Expr]) -> Expr:
    found: Expr = const(1)
    for each in extents:
        found = found * each
    return found
