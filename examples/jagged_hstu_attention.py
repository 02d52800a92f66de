"""Causal attention with SiLU instead of softmax, over ragged sequences: two ragged axes, including the diagonal.

Run as `python examples/jagged_hstu_attention.py`. `jagged` is the kernel; `manual` handles offsets and masks itself.
Published versions store to `out[tile_q.index + starts]` without a mask, past the end of a sequence and into the next one; these
do not.
"""

import torch
import torch.nn.functional as F

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, alpha: float, scale: float) -> JaggedTensor:
    out = torch.empty_like(v)
    heads, dim_v = v.size(2), v.size(3)
    for b, h in hl.grid([q.num_rows, heads]):
        for tile_q in hl.tile(q.max_length):
            acc = hl.zeros([tile_q, dim_v])
            for tile_k in hl.tile(0, tile_q.end):
                scores = F.silu(q[b, tile_q, h] @ k[b, tile_k, h].T * alpha) * scale
                acc = acc + torch.where(tile_q.index[:, None] >= tile_k.index[None, :], scores, 0.0) @ v[b, tile_k, h]
            out[b, tile_q, h] = acc.to(out.dtype)
    return out


@serrate.kernel
def manual(
    max_seq_len: int, alpha: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_offsets: torch.Tensor
) -> torch.Tensor:
    scale = 1.0 / max(max_seq_len, 1)
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
            q_blk = q[torch.where(mask_q, tile_q.index + starts, 0), tile_h.begin, :]
            acc = hl.zeros([tile_q, dimV], dtype=torch.float32)
            for tile_kv in hl.tile(0, tile_q.end, block_size=None):
                mask_kv = tile_kv.index < seq_len
                kv_index = torch.where(mask_kv, tile_kv.index + starts, 0)
                k_blk = k[kv_index, tile_h.begin, :]
                v_blk = v[kv_index, tile_h.begin, :]
                scores = F.silu(torch.matmul(q_blk, k_blk.T) * alpha) * scale
                scores = torch.where(
                    (tile_q.index.unsqueeze(1) >= tile_kv.index.unsqueeze(0)) & mask_q[:, None] & mask_kv[None, :], scores, 0.0
                )
                acc += torch.matmul(scores.to(v.dtype), v_blk)
            hl.store(out, [tile_q.index + starts, tile_h.begin, slice(None)], acc.to(out.dtype), extra_mask=mask_q[:, None])
    return out


def check(lengths: list[int], run=lambda k: k) -> None:
    heads, dim = 2, 4
    q, k, v = (JaggedTensor.from_lengths(torch.randn(sum(lengths), heads, dim), lengths) for _ in range(3))
    scale = 1.0 / max(1, q.max_length)
    rows = []
    for own_q, own_k, own_v in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        scores = F.silu(torch.einsum("qhd,khd->hqk", own_q, own_k) * 0.5) * scale
        rows.append(torch.einsum("hqk,khd->qhd", scores.tril(), own_v))
    wanted = torch.cat(rows) if rows else torch.empty(0, heads, dim)
    torch.testing.assert_close(run(jagged)(q, k, v, 0.5, scale).values, wanted)
    torch.testing.assert_close(run(manual)(q.max_length, 0.5, q.values, k.values, v.values, q.offsets), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_hstu_attention: jagged and manual agree with torch")
