"""One tile, range or slice in two dims of a value: x[:, None] - x[None, :] has a lane for every pair.

In: kernels in which a dim meets itself. Out: a failure for a backend or strategy that differs from plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import KernelError, StrategyError

LENGTHS = [3, 0, 7, 10]


@pytest.fixture(params=["reference", "cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def ragged(*inner: int) -> JaggedTensor:
    return JaggedTensor.from_lengths(normal(sum(LENGTHS), *inner), LENGTHS)


def test_differences_of_a_slice(backend: str) -> None:
    @serrate.kernel
    def k(v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(v.size(0), v.size(1), v.size(1))
        for b in hl.grid(v.size(0)):
            r = v[b, :]
            out[b, :, :] = r[:, None] - r[None, :]
        return out

    v = normal(3, 6)
    torch.testing.assert_close(k.on(backend)(v), v[:, :, None] - v[:, None, :])


def test_products_of_a_slice_beside_a_tile(backend: str) -> None:
    @serrate.kernel
    def k(v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(v.size(0), v.size(1), v.size(1))
        for b in hl.tile(v.size(0)):
            x = v[b, :]
            out[b, :, :] = x[:, :, None] * x[:, None, :]
        return out

    v = normal(3, 6)
    torch.testing.assert_close(k.on(backend)(v), v[:, :, None] * v[:, None, :])


def test_a_mask_of_one_range(backend: str) -> None:
    @serrate.kernel
    def k(v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(v)
        for b in hl.tile(v.size(0)):
            at = hl.arange(6)
            before = at[:, None] >= at[None, :]
            out[b, :] = torch.where(before[None], v[b, :][:, None, :], 0.0).sum(2)
        return out

    v = normal(3, 6)
    torch.testing.assert_close(k.on(backend)(v), v.cumsum(1))


def test_a_range_in_two_keys_of_an_index(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for _ in hl.grid(1):
            r = hl.arange(4)
            out[r, r] = x[r, r] + 2 * x[r[:, None], r[None, :]]
        return out

    x = normal(4, 4)
    torch.testing.assert_close(k.on(backend)(x), 3 * x)
    torch.testing.assert_close(k.interpreted()(x), 3 * x)


def test_a_square_multiplied_by_itself(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 5, 5)
        for b in hl.grid(2):
            v = x[:, :]
            out[b, :, :] = hl.dot(v, v) + v @ v.T - v.T @ v + v.T * v
        return out

    x = normal(5, 5)
    torch.testing.assert_close(k.on(backend)(x)[1], x @ x + x @ x.T - x.T @ x + x.T * x)


def test_attention_inside_a_chunk(backend: str) -> None:
    @serrate.kernel
    def k(q: JaggedTensor, v: JaggedTensor) -> JaggedTensor:
        out = torch.zeros_like(v)
        for b in hl.grid(q.num_rows):
            for t in hl.tile(q.lengths[b], block_size=4):
                scores = q[b, t, :] @ q[b, t, :].T
                scores = torch.where(t.index[:, None] >= t.index[None, :], scores, 0.0)
                out[b, t, :] = scores @ v[b, t, :]
        return out

    q, v = ragged(5), ragged(3)
    wanted = [
        (a @ a.T).tril() @ c
        for rows in zip(q.unbind(), v.unbind(), strict=True)
        for a, c in zip(*(r.split(4) for r in rows), strict=True)
    ]
    torch.testing.assert_close(k.on(backend)(q, v).values, torch.cat(wanted))


@pytest.mark.parametrize("strategy", ["maskless", "masked"])
def test_pairs_inside_a_ragged_tile(backend: str, strategy: str) -> None:
    @serrate.kernel(strategy=strategy)
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length, block_size=4):
                x = jt[b, t]
                acc = acc + (x[:, :, None] - x[:, None, :]).abs().sum((1, 2))
            out[b] = acc
        return out

    jt = ragged()
    wanted = [sum(float((c[:, None] - c[None]).abs().sum()) for c in row.split(4)) for row in jt.unbind()]
    torch.testing.assert_close(k.on(backend)(jt), torch.tensor(wanted))


def test_both_sides_of_pairs_are_reduced(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> JaggedTensor:
        out = torch.zeros_like(jt)
        for b in hl.tile(jt.num_rows, block_size=2):
            for t in hl.jagged_tile(jt.lengths[b], block_size=4):
                x = jt[b, t]
                e = torch.exp(x[:, :, None] - x[:, None, :])
                s = e / (e + 2 * e.transpose(1, 2))
                out[b, t] = s.mean(1) - s.sum(2)
        return out

    def chunk(c: torch.Tensor) -> torch.Tensor:
        e = torch.exp(c[:, None] - c[None])
        s = e / (e + 2 * e.T)
        return s.mean(0) - s.sum(1)

    jt = ragged()
    torch.testing.assert_close(k.on(backend)(jt).values, torch.cat([chunk(c) for row in jt.unbind() for c in row.split(4)]))


def test_pairs_that_are_carried_and_turned(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0), 4, 4)
        for b in hl.grid(x.size(0)):
            r = x[b, :]
            acc = hl.zeros([4, 4])
            for _ in hl.grid(3):
                acc = acc + r[:, None] * r[None, :]
            e = (r[:, None] - r[None, :]).exp()
            p = e / e.sum(1, keepdim=True)
            out[b, :, :] = acc + p.T @ e + (p + 2 * p.T)
        return out

    def row(r: torch.Tensor) -> torch.Tensor:
        e = (r[:, None] - r[None, :]).exp()
        p = e / e.sum(1, keepdim=True)
        return 3 * r[:, None] * r[None, :] + p.T @ e + p + 2 * p.T

    x = normal(3, 4)
    torch.testing.assert_close(k.on(backend)(x), torch.stack([row(r) for r in x]))


def test_a_tile_of_zeros_with_itself(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0))
        for t in hl.tile(x.size(0), block_size=3):
            acc = hl.zeros([t, t])
            for c in hl.tile(x.size(1)):
                acc = acc + x[t, c] @ x[t, c].T
            out[t] = acc.amax(0)
        return out

    x = normal(8, 5)
    wanted = torch.cat([(c @ c.T).amax(0) for c in x.split(3)])
    torch.testing.assert_close(k.on(backend)(x), wanted)


def test_a_value_that_gets_a_dim_in_the_loop(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for b in hl.grid(x.size(0)):
            acc = 0.0
            for _ in hl.grid(3):
                r = x[b, :]
                acc = acc + (r[:, None] * r[None, :]).sum(1)
            out[b, :] = acc
        return out

    x = normal(3, 4)
    torch.testing.assert_close(k.on(backend)(x), 3 * x * x.sum(1, keepdim=True))


def test_a_tile_of_open_size_does_not_meet_itself() -> None:
    @serrate.kernel
    def differences(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = (x[t][:, None] - x[t][None, :]).sum(1)
        return out

    @serrate.kernel
    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0))
        for t in hl.tile(x.size(0)):
            out[t] = (x[t, :] @ x[t, :].T).sum(1)
        return out

    def message(kernel: Any, x: torch.Tensor) -> str:
        with pytest.raises(KernelError) as found:
            kernel(x)
        return str(found.value)

    for kernel, x in ((differences, normal(9)), (product, normal(9, 2))):
        assert "appears in two dims of one value, so the result depends on the block size" in message(kernel, x)
        assert "block_size=" in message(kernel, x)


def test_rows_are_not_cut_where_a_tile_meets_itself() -> None:
    @serrate.kernel(strategy="persistent_dynamic")
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length, block_size=4):
                x = jt[b, t]
                acc = acc + (x[:, :, None] * x[:, None, :]).sum((1, 2))
            out[b] = acc
        return out

    with pytest.raises(StrategyError, match="indexes two dims of one value"):
        k(ragged())


def test_a_jagged_tile_beside_two_dims_of_its_rows() -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 2)
        for b in hl.tile(jt.num_rows, block_size=2):
            pairs = x[b][:, None] * x[b][None, :]
            for t in hl.jagged_tile(jt.lengths[b]):
                out[:, :] = (pairs[:, :, None] + t.index).sum(2)
        return out

    with pytest.raises(KernelError, match="its rows are ambiguous"):
        k(ragged(), normal(4))


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_a_carried_value_takes_the_lanes_it_begins_with(backend: str) -> None:
    """One begins as `hl.zeros` and is then assigned lanes of a range; the other is then assigned the value of the first."""

    @serrate.kernel
    def k(x: torch.Tensor, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        for _ in hl.grid(1):
            i = hl.arange(6)
            a, b = hl.zeros([6]), hl.zeros([6])
            for n in hl.grid(x.size(0)):
                before[n, i] = a - b
                b = a
                a = x[n, i]
            last[i] = a
        return before

    x, last = normal(5, 6), torch.zeros(6)
    shifted = torch.cat([torch.zeros(2, 6), x])
    torch.testing.assert_close(k.on(backend)(x, torch.zeros(5, 6), last), shifted[1:6] - shifted[:5])
    assert torch.equal(last, x[4])
