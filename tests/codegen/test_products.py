"""Products of blocks in C++: rows, columns and depths that do not fill a block."""

from __future__ import annotations

import pytest
import torch

import serrate
from serrate import JaggedTensor


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (64, 16), (129, 17), (200, 33), (130, 63)])
@pytest.mark.parametrize("across", [False, True])
def test_blocks_that_are_not_full(dtype: torch.dtype, depth: int, columns: int, across: bool) -> None:
    """Whole numbers are summed exactly, so that a product too many or too few shows."""
    lengths = [0, 1, 7, 8, 23, 67]
    x = JaggedTensor.from_lengths(torch.randint(-8, 8, (sum(lengths), depth)).to(dtype), lengths)
    weights = torch.randint(-8, 8, (len(lengths), columns, depth) if across else (len(lengths), depth, columns)).to(dtype)
    got = serrate.jit(lambda x, w: x @ (w.transpose(1, 2) if across else w))(x, weights)
    for row, weight, found in zip(x.unbind(), weights, got.unbind(), strict=True):
        assert torch.equal(found, row @ (weight.t() if across else weight))
