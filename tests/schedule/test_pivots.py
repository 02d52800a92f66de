"""Moments of short rows on a GPU are sums relative to the mean of the row's beginning: as accurate as torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from serrate import ir, ops


def _rows(kind: str, lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(n, 8, generator=generator) for n in lengths]
    for row in rows:
        if kind == "far from zero":
            row.mul_(0.01).add_(1000.0)
        elif kind == "first element is an outlier":
            row[:1] = 1e4
        elif kind == "mean drifts":
            row.add_(torch.arange(len(row))[:, None] * 10.0)
        elif kind == "all equal":
            row.fill_(3.7)
    return rows


@pytest.mark.parametrize("kind", ["plain", "far from zero", "first element is an outlier", "mean drifts", "all equal"])
def test_layer_norm_of_whole_rows_is_as_accurate_as_torch(kind: str) -> None:
    rows = _rows(kind, [0, 1, 5, 700, 31, 513, 0, 2500])
    with ir.Fusion() as f:
        x, offsets = f.input((None, 8), torch.float32), f.input((None,), torch.int64)
        f.output(ops.layer_norm(ops.as_nested(x, offsets), (1, 2)))
    program = f.compile("triton", "persistent_dynamic")
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    values, offsets_of_rows = torch.cat(rows), lengths.cumsum(0)
    assert "about_pivot" in "\n".join(program.plan(values, offsets_of_rows).lines)
    for row, got in zip(rows, program(values, offsets_of_rows).unbind(), strict=True):
        if len(row):
            exact = functional.layer_norm(row.double(), list(row.shape))
            error = (functional.layer_norm(row, list(row.shape)) - exact).abs().max()
            assert (got - exact).abs().max() <= 8 * error + 1e-5
