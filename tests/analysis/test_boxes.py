"""Boxes: where a block of a tensor is in it as a matrix, against addresses that are counted one by one."""

from __future__ import annotations

import itertools
import math

import torch

from serrate.analysis.boxes import box_of
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Environment, Expr, symbol
from serrate.ir.loops import Lane, Load, load
from serrate.ir.values import Tensor

ROW, COLUMN = symbol("i", 0, 7), symbol("j", 0, 7)
LANES = (Lane(ROW, 8), Lane(COLUMN, 8))
N, AT = symbol("n"), symbol("at")


def read(shape: tuple[int | Expr, ...], index: tuple[Expr | int, ...], dtype: torch.dtype = torch.bfloat16) -> Load:
    dims = tuple(IterDomain(size, name=f"d{k}") for k, size in enumerate(shape))
    found = load(Tensor("T", dtype, dims, dims), tuple(e if isinstance(e, Expr) else ROW * 0 + e for e in index))
    assert isinstance(found, Load)
    return found


def test_a_block_lies_where_its_elements_do() -> None:
    shape, index = (5, 40, 3, 16), (AT * 0 + 2, AT + ROW, AT * 0 + 1, COLUMN + 8)
    box = box_of(read(shape, index), LANES)
    assert box is not None and box.sides == LANES
    values = {AT: 7}
    rows, columns, top, left = (e.evaluate(Environment(values)) for e in (box.rows, box.columns, *box.place))
    assert (rows, columns) == (200, 48)
    for i, j in itertools.product(range(8), range(8)):
        at = [e.evaluate(Environment({**values, ROW: i, COLUMN: j})) for e in index]
        flat = sum(a * math.prod(shape[k + 1 :]) for k, a in enumerate(at))
        assert divmod(flat, columns) == (top + i, left + j)


def test_lanes_in_the_other_order() -> None:
    box = box_of(read((N, 64), (ROW + AT, COLUMN)), (LANES[1], LANES[0]))
    assert box is not None and box.sides == LANES


def test_what_is_no_box() -> None:
    assert box_of(read((N, 64), (ROW, COLUMN)), LANES) is not None
    # Rows that do not begin at multiples of 16 bytes, or whose length is known only at a call.
    assert box_of(read((N, 60), (ROW, COLUMN)), LANES) is None
    assert box_of(read((64, N), (ROW, COLUMN)), LANES) is None
    assert box_of(read((64, N * 8), (ROW, COLUMN)), LANES) is not None
    assert box_of(read((N, 60), (ROW, COLUMN), torch.float32), LANES) is not None
    # Positions that are apart in memory, lie in one dim, or depend on both lanes.
    assert box_of(read((N, 64), (ROW, COLUMN * 2)), LANES) is None
    assert box_of(read((N, 64), (ROW * 2, COLUMN)), LANES) is None
    assert box_of(read((N,), (ROW * 8 + COLUMN,)), LANES) is None
    assert box_of(read((N, 64), (ROW + COLUMN, COLUMN)), LANES) is None
    assert box_of(read((64, N, 8), (ROW, COLUMN, 0)), LANES) is None
    # Fewer than 16 bytes side by side, more than 256 positions.
    assert box_of(read((N, 64), (ROW, COLUMN)), (LANES[0], Lane(COLUMN, 4))) is None
    assert box_of(read((N, 512), (ROW, COLUMN)), (LANES[0], Lane(COLUMN, 512))) is None
    assert box_of(read((N, 64), (ROW, COLUMN)), LANES[:1]) is None
