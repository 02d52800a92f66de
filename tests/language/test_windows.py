"""Loops that begin before the first position: windows, and reads at a distance.

In: kernels whose tiles begin below zero, or that read so many positions back. Out: a failure for a backend that differs from
plain torch, row by row.
"""

from __future__ import annotations

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor

LENGTHS = [3, 70, 0, 100, 27]


@pytest.fixture(params=["reference", "cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ragged(*inner: int) -> JaggedTensor:
    values = torch.randn((sum(LENGTHS), *inner), generator=torch.Generator().manual_seed(0))
    return JaggedTensor.from_lengths(values, LENGTHS)


def test_a_sliding_sum(backend: str) -> None:
    @serrate.kernel
    def k(x: JaggedTensor, w: int) -> JaggedTensor:
        out = torch.zeros_like(x)
        for b in hl.grid(x.num_rows):
            for t in hl.tile(x.lengths[b], block_size=2):
                acc = hl.zeros([t])
                for s in hl.tile(t.begin - w + 1, t.end):
                    back = t.index[:, None] - s.index[None, :]
                    acc = acc + torch.where((back >= 0) & (back < w), x[b, s][None, :], 0.0).sum(1)
                out[b, t] = acc
        return out

    x = ragged()
    wanted = [r[max(0, i - 39) : i + 1].sum() for r in x.unbind() for i in range(len(r))]
    torch.testing.assert_close(k.on(backend)(x, 40).values, torch.stack(wanted))


@pytest.mark.parametrize("block", [None, 5, 64, 256])
def test_a_row_from_before_its_beginning(backend: str, block: int | None) -> None:
    @serrate.kernel
    def k(x: JaggedTensor, w: int) -> tuple[torch.Tensor, torch.Tensor]:
        total, top = torch.zeros(x.num_rows), torch.zeros(x.num_rows)
        for b in hl.grid(x.num_rows):
            acc, most = hl.zeros([]), hl.full([], -torch.inf)
            for s in hl.tile(0 - w, x.lengths[b], block_size=block):
                acc = acc + x[b, s].sum()
                most = torch.maximum(most, x[b, s].amax())
            total[b], top[b] = acc, most
        return total, top

    x = ragged()
    total, top = k.on(backend)(x, 40)
    torch.testing.assert_close(total, torch.stack([r.sum() for r in x.unbind()]))
    torch.testing.assert_close(top, torch.stack([r.amax() if len(r) else torch.tensor(-torch.inf) for r in x.unbind()]))


def test_a_mean_counts_what_is_there(backend: str) -> None:
    @serrate.kernel
    def k(x: JaggedTensor, w: int) -> torch.Tensor:
        out = torch.zeros(x.num_rows)
        for b in hl.grid(x.num_rows):
            for s in hl.tile(0 - w, x.lengths[b], block_size=256):
                out[b] = x[b, s].mean()
        return out

    x = ragged()
    torch.testing.assert_close(k.on(backend)(x, 40), torch.stack([r.mean() for r in x.unbind()]), equal_nan=True)


def test_a_mean_over_rows_and_positions(backend: str) -> None:
    @serrate.kernel
    def k(x: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(3)
        for b in hl.tile(x.num_rows, block_size=2):
            for t in hl.jagged_tile(x.lengths[b], block_size=128):
                out[b.id] = x[b, t].mean()
        return out

    x = ragged()
    rows = x.unbind()
    wanted = torch.stack([torch.cat(rows[k : k + 2]).mean() for k in (0, 2, 4)])
    torch.testing.assert_close(k.on(backend)(x), wanted)


def test_products_over_a_window(backend: str) -> None:
    @serrate.kernel
    def k(x: JaggedTensor, q: torch.Tensor, w: int) -> torch.Tensor:
        out = torch.zeros(x.num_rows, q.size(0), 8)
        for b in hl.grid(x.num_rows):
            for m in hl.tile(q.size(0)):
                acc = hl.zeros([m, 8])
                for s in hl.tile(0 - w, x.lengths[b], block_size=16):
                    acc = acc + (q[m, :] @ x[b, s, :].T) @ x[b, s, :]
                out[b, m, :] = acc
        return out

    x, q = ragged(8), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(k.on(backend)(x, q, 20), torch.stack([(q @ r.T) @ r for r in x.unbind()]), rtol=1e-4, atol=1e-4)


def test_local_attention(backend: str) -> None:
    @serrate.kernel
    def k(q: JaggedTensor, v: JaggedTensor, w: int) -> JaggedTensor:
        out = torch.zeros_like(v)
        for b in hl.grid(q.num_rows):
            for t in hl.tile(q.lengths[b], block_size=8):
                top, total, acc = hl.full([t], -torch.inf), hl.zeros([t]), hl.zeros([t, 4])
                for s in hl.tile(t.begin - w + 1, t.end):
                    back = t.index[:, None] - s.index[None, :]
                    near = (back >= 0) & (back < w) & (s.index[None, :] >= 0)
                    scores = torch.where(near, q[b, t, :] @ q[b, s, :].T, -torch.inf)
                    new = torch.maximum(top, scores.amax(1))
                    shift = torch.where(new == -torch.inf, 0.0, new)
                    p = torch.exp(scores - shift[:, None])
                    scale = torch.exp(top - shift)
                    total, acc, top = total * scale + p.sum(1), acc * scale[:, None] + p @ v[b, s, :], new
                out[b, t, :] = acc / total[:, None]
        return out

    q, v = ragged(3), ragged(4)
    wanted = []
    for a, c in zip(q.unbind(), v.unbind(), strict=True):
        for i in range(len(a)):
            first = max(0, i - 4)
            wanted.append(torch.softmax(a[first : i + 1] @ a[i], 0) @ c[first : i + 1])
    torch.testing.assert_close(k.on(backend)(q, v, 5).values, torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_positions_behind(backend: str) -> None:
    @serrate.kernel
    def k(x: JaggedTensor) -> JaggedTensor:
        out = torch.zeros_like(x)
        for b in hl.grid(x.num_rows):
            for t in hl.tile(x.lengths[b]):
                out[b, t] = x[b, t] - x[b, t.index - 3]
        return out

    x = ragged()
    wanted = [r - torch.cat([torch.zeros(3), r])[: len(r)] for r in x.unbind()]
    torch.testing.assert_close(k.on(backend)(x).values, torch.cat(wanted))


def test_a_store_that_begins_inside_its_tile(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, w: int) -> tuple[torch.Tensor, torch.Tensor]:
        shifted, even = torch.full_like(x, -1), torch.full_like(x, -1)
        for t in hl.tile(x.size(0), block_size=128):
            shifted[t.index - w] = x[t]
            hl.store(even, [t], x[t], extra_mask=t.index % 2 == 0)
        return shifted, even

    x = torch.arange(300.0)
    shifted, even = k.on(backend)(x, 7)
    torch.testing.assert_close(shifted, torch.cat([x[7:], torch.full((7,), -1.0)]))
    torch.testing.assert_close(even, torch.where(x % 2 == 0, x, -1))


def test_a_window_feeds_what_is_carried_around_it(backend: str) -> None:
    @serrate.kernel
    def k(x: JaggedTensor, w: int) -> torch.Tensor:
        out = torch.zeros(x.num_rows)
        for b in hl.grid(x.num_rows):
            last = hl.zeros([])
            for t in hl.tile(x.max_length, block_size=16):
                acc = hl.zeros([])
                for s in hl.tile(t.begin - w, t.end, block_size=16):
                    acc = acc + x[b, s].sum()
                last = acc + 0.5 * last
            out[b] = last
        return out

    def row(r: torch.Tensor) -> float:
        last = 0.0
        for begin in range(0, 100, 16):
            near = r[max(begin - 8, 0) : begin + 16]
            if len(near):
                last = float(near.sum()) + 0.5 * last
        return last

    x = ragged()
    torch.testing.assert_close(k.on(backend)(x, 8), torch.tensor([row(r) for r in x.unbind()]))
