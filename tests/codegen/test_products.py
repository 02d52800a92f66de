"""Products of blocks in C++: rows, columns and depths that do not fill a block."""

from __future__ import annotations

import pytest
import torch

import serrate
import serrate.language as hl
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


@serrate.kernel
def per_row(x: JaggedTensor, y: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.num_rows, x.size(2), y.size(2))
    for b, m, n in hl.tile([x.num_rows, x.size(2), y.size(2)]):
        total = hl.zeros([b, m, n])
        for k in hl.tile(x.max_length):
            total = total + x[b, k, m].transpose(1, 2) @ y[b, k, n]
        out[b, m, n] = total
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("left", "right"), [(16, 16), (33, 17), (1, 3)])
def test_rows_that_are_read_across(dtype: torch.dtype, left: int, right: int) -> None:
    """The first operand is transposed in registers, whatever its dtype. Whole numbers are summed exactly."""
    lengths = [0, 1, 16, 17, 70]
    x, y = (JaggedTensor.from_lengths(torch.randint(-8, 8, (sum(lengths), n)).to(dtype), lengths) for n in (left, right))
    wanted = [a.double().t() @ b.double() for a, b in zip(x.unbind(), y.unbind(), strict=True)]
    assert torch.equal(per_row(x, y).double(), torch.stack(wanted))


@serrate.kernel(strategy="persistent_dynamic")
def rotated(x: JaggedTensor, keys: JaggedTensor, angle: torch.Tensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for b in hl.grid(x.num_rows):
        for t in hl.tile(x.max_length):
            left, right, turn = x[b, t, 0:4], x[b, t, 4:8], angle[t, :]
            top = hl.full([t], -torch.inf)
            for k in hl.tile(keys.max_length):
                key = keys[b, k, :].T
                scores = (left * turn - right) @ key + (left + right * turn) @ key
                top = torch.maximum(top, scores.amax(1))
            out[b, t, :] = hl.zeros([t, 8]) + top[:, None]
    return out


def test_operands_of_several_slices_of_rows() -> None:
    """As rotary embeddings are computed: g++ 12 read the slices of all rows but the first at wrong places."""
    lengths = [3, 0, 20]
    x, keys = (JaggedTensor.from_lengths(torch.randn(sum(lengths), n), lengths) for n in (8, 4))
    angle, wanted = torch.randn(64, 4), []
    for row, key in zip(x.unbind(), keys.unbind(), strict=True):
        left, right, turn = row[:, :4], row[:, 4:], angle[: len(row)]
        if len(row):
            wanted.append(((left * turn - right + left + right * turn) @ key.T).amax(1))
    torch.testing.assert_close(rotated.on("cpp")(x, keys, angle).values[:, 0], torch.cat(wanted), atol=1e-4, rtol=1e-4)
