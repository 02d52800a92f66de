"""The checked mode: stores that race, and computed indices outside.

In: kernels as published, with their mistakes. Out: a failure where the checked mode is silent, or says another line.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import serrate
import serrate.language as hl
from serrate import settings
from serrate.errors import KernelIndexError, RaceError


@serrate.kernel
def published_hstu(max_seq_len: int, alpha: float, q: Any, k: Any, v: Any, seq_offsets: torch.Tensor) -> torch.Tensor:
    scale = 1.0 / max_seq_len
    num_heads = hl.specialize(q.size(1))
    num_batches = hl.specialize(seq_offsets.size(0) - 1)
    dimV = hl.specialize(v.size(2))
    out = torch.zeros_like(v)
    for tile_b, tile_h, tile_q in hl.tile([num_batches, num_heads, max_seq_len], block_size=[1, 1, None]):
        starts = seq_offsets[tile_b.begin]
        ends = seq_offsets[tile_b.begin + 1]
        seq_len = ends - starts
        if tile_q.begin < seq_len:
            mask_q = tile_q.index < seq_len
            q_blk = q[tile_q.index + starts, tile_h.begin, :]
            acc = hl.zeros([tile_q, dimV], dtype=torch.float32)
            for tile_kv in hl.tile(0, tile_q.end, block_size=None):
                mask_kv = tile_kv.index < seq_len
                k_blk = k[tile_kv.index + starts, tile_h.begin, :]
                v_blk = v[tile_kv.index + starts, tile_h.begin, :]
                scores = F.silu(torch.matmul(q_blk, k_blk.T) * alpha) * scale
                scores = torch.where(
                    (tile_q.index.unsqueeze(1) > tile_kv.index.unsqueeze(0)) & mask_q[:, None] & mask_kv[None, :], scores, 0.0
                )
                acc += torch.matmul(scores.to(v.dtype), v_blk)
            out[tile_q.index + starts, tile_h.begin, :] = acc.to(out.dtype)  # racing
    return out


def _sequences(lengths: list[int]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return max(lengths), 0.5, *(torch.randn(sum(lengths), 2, 4) for _ in range(3)), offsets


def test_a_published_attention_races() -> None:
    """A tile reaches past its sequence and writes zeros into the next one, whose own program writes there too."""
    with pytest.raises(RaceError, match=r"program 1 writes .* and program 3 writes") as caught:
        published_hstu.interpreted(tile="whole")(*_sequences([3, 5, 4]))
    assert "# racing" in str(caught.value)
    # One sequence after the other, cut at its end: nothing races, and nothing is said.
    published_hstu.interpreted(tile=1)(*_sequences([3, 5]))


def test_a_published_attention_reads_outside() -> None:
    with pytest.raises(KernelIndexError, match=r"index \(4, 0, 0\) is out of bounds for a tensor of shape \(4, 2, 4\)"):
        published_hstu.interpreted(tile="whole")(4, *_sequences([3, 1])[1:])


@serrate.kernel(static_shapes=False)
def published_moe(A: Any, W: Any, counts: Any, offsets: Any, order: Any, most: int) -> torch.Tensor:
    T, K = A.shape
    E, _, N = W.shape
    C = torch.zeros(T, N)
    for e_idx in hl.grid(E):
        start = offsets[e_idx]
        num_tokens = counts[e_idx]
        if num_tokens != 0:
            for tile_t, tile_n in hl.tile([most, N]):
                local = tile_t.index
                valid = local < num_tokens
                index = start + torch.where(valid, local, 0)
                token = order[index.squeeze(0)]
                acc = hl.zeros([tile_t, tile_n], dtype=torch.float32)
                for tile_k in hl.tile(K):
                    acc = torch.addmm(acc, A[token, tile_k], W[e_idx, tile_k, tile_n])
                block_T, block_N = acc.size(0), acc.size(1)
                existing = C[token, tile_n]
                mask_2d = valid.view(block_T, 1).expand(block_T, block_N)
                C[token, tile_n] = torch.where(mask_2d, acc.to(C.dtype), existing)  # racing
    return C


def test_a_published_mixture_of_experts_races() -> None:
    """Lanes past an expert's tokens write back what its first token had before."""
    torch.manual_seed(0)
    counts, order = torch.tensor([1, 3]), torch.tensor([2, 0, 3, 1])
    args = torch.randn(4, 6), torch.randn(2, 6, 5), counts, torch.tensor([0, 1, 4]), order, 3
    with pytest.raises(RaceError, match="two lanes of one store write") as caught:
        published_moe.interpreted(tile="whole")(*args)
    assert "# racing" in str(caught.value)


def test_both_lines_are_named() -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> None:
        for t in hl.tile(x.size(0), block_size=1):
            if t.begin == 0:
                x[0] = x[t].sum()  # first
            else:
                x[0] = x[t].sum() + 1  # second

    with pytest.raises(RaceError) as caught:
        k.interpreted()(torch.zeros(2))
    assert "# first" in str(caught.value) and "# second" in str(caught.value)


def test_what_runs_in_order_may_overwrite() -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2)
        for i in hl.grid(2):
            for t in hl.tile(x.size(0)):
                out[i] = x[t].sum()
        for i in hl.grid(2):
            out[i] = 7.0 + i
        return out

    assert k.interpreted(tile=1)(torch.arange(3.0)).tolist() == [7, 8]


def test_equal_values_do_not_race() -> None:
    @serrate.kernel
    def k(out: torch.Tensor) -> torch.Tensor:
        for t in hl.tile(4):
            out[t.index // 4] = torch.nan
        return out

    assert k.interpreted(tile=2)(torch.zeros(1)).isnan().all()


def test_indices_outside_under_a_mask_are_fine() -> None:
    @serrate.kernel
    def k(x: torch.Tensor, masked: bool) -> torch.Tensor:
        out = torch.empty(x.size(0))
        for t in hl.tile(x.size(0)):
            ahead = t.index + 1
            out[t] = hl.load(x, [ahead], extra_mask=ahead < x.size(0)) if masked else x[ahead]
        return out

    assert k.interpreted(tile=2)(torch.arange(5.0), True).tolist() == [1, 2, 3, 4, 0]
    with pytest.raises(KernelIndexError, match=r"index \(5,\) is out of bounds for a tensor of shape \(5,\), in lane \(0,\)"):
        k.interpreted(tile=2)(torch.arange(5.0), False)


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        for t in hl.tile(3):
            x[t.index * 0] = t.index.to(x.dtype)
        return x

    with monkeypatch.context() as patch:
        patch.setenv("SERRATE_CHECK", "0")
        settings.reload()
        k(torch.zeros(1))
        patch.setenv("SERRATE_CHECK", "1")
        settings.reload()
        with pytest.raises(RaceError):
            k(torch.zeros(1))
    settings.reload()


# --- seen by the compiler ---


def _experts() -> tuple[Any, ...]:
    counts, order = torch.tensor([1, 3]), torch.tensor([2, 0, 3, 1])
    return torch.randn(4, 6), torch.randn(2, 6, 5), counts, torch.tensor([0, 1, 4]), order, 3


def test_published_kernels_do_not_compile() -> None:
    for backend in ("cpp", "reference"):
        with pytest.raises(RaceError, match=r"lanes of the tile of line .* store different values to one element") as caught:
            published_moe.on(backend)(*_experts())
        assert "# racing" in str(caught.value) and "extra_mask=" in str(caught.value)
        with pytest.raises(RaceError, match="past the end of the row and into the next one") as caught:
            published_hstu.on(backend)(*_sequences([3, 5, 4]))
        assert "# racing" in str(caught.value) and "extra_mask=" in str(caught.value)


def _scattered(store: Any) -> Any:
    @serrate.kernel
    def k(x: torch.Tensor, n: int, keep: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        out = torch.full((16,), -1.0)
        for _ in hl.grid(1):
            for t in hl.tile(12):
                store(out, t, x[t], n, keep, order)
        return out

    return k


RACING = {
    "a choice": lambda out, t, x, n, keep, order: hl.store(out, [torch.where(t.index < n, t.index, 0)], x),
    "the other choice": lambda out, t, x, n, keep, order: hl.store(out, [torch.where(t.index >= n, 0, t.index)], x),
    "a mask that was read": lambda out, t, x, n, keep, order: hl.store(out, [torch.where(keep[t], t.index, 0)], x),
    "a smaller number": lambda out, t, x, n, keep, order: hl.store(out, [t.index.clamp(max=n)], x),
    "a larger number": lambda out, t, x, n, keep, order: hl.store(out, [t.index.clamp(min=3)], x),
    "through an order": lambda out, t, x, n, keep, order: hl.store(out, [order[torch.where(t.index < n, t.index, 0)]], x),
    "another mask": lambda out, t, x, n, keep, order: hl.store(
        out, [torch.where(t.index < n, t.index, 0)], x, extra_mask=t.index < n + 1
    ),
}
APART = {
    "a choice": lambda out, t, x, n, keep, order: hl.store(
        out, [torch.where(t.index < n, t.index, 0)], x, extra_mask=t.index < n
    ),
    "the other choice": lambda out, t, x, n, keep, order: hl.store(
        out, [torch.where(t.index >= n, 0, t.index)], x, extra_mask=t.index < n
    ),
    "a narrower mask": lambda out, t, x, n, keep, order: hl.store(
        out, [torch.where(t.index < n, t.index, 0)], x, extra_mask=t.index < n - 1
    ),
    "a mask that was read": lambda out, t, x, n, keep, order: hl.store(
        out, [torch.where(keep[t], t.index, 0)], x, extra_mask=keep[t] & (t.index < n)
    ),
    "a place outside": lambda out, t, x, n, keep, order: hl.store(out, [t.index.clamp(max=11)], x),
    "through an order": lambda out, t, x, n, keep, order: hl.store(
        out, [order[torch.where(t.index < n, t.index, 0)]], x, extra_mask=t.index < n
    ),
    "one value": lambda out, t, x, n, keep, order: hl.store(out, [torch.where(t.index < n, t.index, 0)], 7.0),
}


def _arguments() -> tuple[Any, ...]:
    return torch.arange(12.0), 5, torch.arange(12) % 3 == 0, torch.arange(12).flip(0)


@pytest.mark.parametrize("name", RACING)
def test_lanes_with_one_index(name: str) -> None:
    with pytest.raises(RaceError, match="store different values to one element"):
        _scattered(RACING[name])(*_arguments())


@pytest.mark.parametrize("name", APART)
def test_lanes_that_a_mask_keeps_apart(name: str) -> None:
    kernel = _scattered(APART[name])
    torch.testing.assert_close(kernel(*_arguments()), kernel.interpreted(tile="whole")(*_arguments()))


def test_rows_at_offsets_under_a_mask_or_a_bound() -> None:
    @serrate.kernel
    def masked(x: torch.Tensor, offsets: torch.Tensor, longest: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        for b in hl.grid(offsets.size(0) - 1):
            start, end = offsets[b], offsets[b + 1]
            for t in hl.tile(longest):
                at = start + t.index
                hl.store(out, [at], x[at] * 2, extra_mask=t.index < end - start)
        return out

    @serrate.kernel
    def bounded(x: torch.Tensor, offsets: torch.Tensor, longest: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        for b in hl.grid(offsets.size(0) - 1):
            start, end = offsets[b], offsets[b + 1]
            for t in hl.tile(end - start):
                out[start + t.index] = x[start + t.index] * 2
        return out

    for kernel in (masked, bounded):
        assert torch.equal(kernel(torch.arange(9.0), torch.tensor([0, 4, 4, 9]), 5), torch.arange(9.0) * 2)
