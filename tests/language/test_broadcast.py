"""Dims of size 1 that a tile reads: one element for all lanes, as in torch.

In: kernels called with tensors that have size 1 in one call and more in the next. Out: a failure where a call differs from torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


def runs(kernel: Any) -> list[Any]:
    return [kernel, kernel.on("reference"), kernel.interpreted(tile=3), kernel.interpreted(tile="whole")]


@pytest.mark.parametrize("sizes", [[(6, 5), (1, 5), (6, 1), (1, 1), (6, 5)], [(1, 1), (6, 5), (6, 1), (7, 5), (1, 5)]])
def test_a_bias_of_any_size(sizes: list[tuple[int, int]]) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for m, n in hl.tile([x.size(0), x.size(1)]):
            out[m, n] = x[m, n] + bias[m, n]
        return out

    for run in runs(k):
        for rows, columns in (*sizes, *sizes):
            x = torch.randn(max(rows, 6), 5)
            bias = torch.randn(rows, columns)
            torch.testing.assert_close(run(x, bias), x + bias)


def test_a_ragged_tensor_with_one_feature() -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, gate: JaggedTensor) -> JaggedTensor:
        out = torch.zeros_like(jt)
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(jt.max_length):
                for d in hl.tile(jt.size(2)):
                    out[b, t, d] = jt[b, t, d] * gate[b, t, d]
        return out

    lengths = [3, 0, 4, 1]
    for run in runs(k):
        for features in (4, 1, 4):
            x = JaggedTensor.from_lengths(torch.randn(8, 4), lengths)
            gate = x.with_values(torch.randn(8, features))
            torch.testing.assert_close(run(x, gate).values, x.values * gate.values)


def test_a_batch_of_one_row_beside_one_length() -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, scale: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc + jt[b, t].sum(1)
            out[b] = acc * scale[b]
        return out

    for run in runs(k):
        for lengths, size in (([3, 2], 2), ([3, 2], 1), ([4], 1), ([1], 1), ([1, 1, 1], 3)):
            jt = JaggedTensor.from_lengths(torch.randn(sum(lengths)), lengths)
            scale = torch.randn(size)
            torch.testing.assert_close(run(jt, scale), torch.stack([r.sum() for r in jt.unbind()]) * scale)


def test_computed_indices_and_stores_do_not_broadcast() -> None:
    @serrate.kernel
    def k(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen = torch.full((5,), -1.0)
        for t in hl.tile(5):
            seen[t] = x[t.index + 0]
            out[t] = t.index.to(torch.float32) + 7
        return seen

    for run in (k, k.on("reference")):
        out = torch.zeros(1)
        assert run(torch.ones(1), out).tolist() == [1, 0, 0, 0, 0]
        assert out.tolist() == [7]


def test_products_with_one_row() -> None:
    @serrate.kernel
    def k(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0), w.size(1))
        for m, n in hl.tile([x.size(0), w.size(1)]):
            acc = hl.zeros([m, n])
            for c in hl.tile(x.size(1)):
                acc = acc + x[m, c] @ w[c, n]
            out[m, n] = acc
        return out

    for run in runs(k):
        for rows in (1, 6):
            x, w = torch.randn(6, 5), torch.randn(5 if rows > 1 else 1, 4)
            torch.testing.assert_close(run(x, w), x @ w.expand(5, 4))


def test_size_1_builds_once_more() -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(8)
        for t in hl.tile(8):
            out[t] = x[t]
        return out

    for size in (1, 3, 4, 1, 5, 8):
        wanted = torch.ones(8) if size == 1 else torch.cat([torch.ones(size), torch.zeros(8 - size)])
        assert torch.equal(k(torch.ones(size)), wanted)
    assert k.source(torch.ones(3)) == k.source(torch.ones(8)) != k.source(torch.ones(1))
