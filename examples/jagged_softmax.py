"""Softmax over ragged rows in two passes: online statistics, then normalisation.

Run as `python examples/jagged_softmax.py`. A finished row keeps its carried values, so `exp(-inf - -inf)` needs no guard.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(jt: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for tile_b, tile_m in hl.tile([jt.num_rows, jt.size(2)]):
        top = hl.full([tile_b, tile_m], float("-inf"))
        total = hl.zeros([tile_b, tile_m])
        for tile_k in hl.tile(jt.max_length):
            x = jt[tile_b, tile_k, tile_m]
            new_top = torch.maximum(top, x.amax(1))
            total = total * torch.exp(top - new_top) + torch.exp(x - new_top[:, None, :]).sum(1)
            top = new_top
        for tile_k in hl.tile(jt.max_length):
            out[tile_b, tile_k, tile_m] = torch.exp(jt[tile_b, tile_k, tile_m] - top[:, None, :]) / total[:, None, :]
    return out


@serrate.kernel
def manual(x_data: torch.Tensor, x_offsets: torch.Tensor) -> torch.Tensor:
    N = int(x_offsets[-1].item())
    num_rows, M = x_offsets.size(0) - 1, x_data.size(1)
    out = torch.zeros(N * M, dtype=x_data.dtype, device=x_data.device)
    x_flat = x_data.view(-1)
    for tile_b in hl.tile(num_rows):
        starts = x_offsets[tile_b]
        ends = x_offsets[tile_b.index + 1]
        seqlens = ends - starts
        max_seqlen = seqlens.amax()
        for tile_m in hl.tile(M):
            block_max = hl.full([tile_b, tile_m], 0.0, dtype=x_data.dtype)
            block_new_max = hl.full([tile_b, tile_m], 0.0, dtype=x_data.dtype)
            block_L = hl.full([tile_b, tile_m], 0.0, dtype=x_data.dtype)
            for tile_k in hl.tile(max_seqlen):
                base_indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = base_indices[:, :, None] * M + tile_m.index[None, None, :]
                row_mask = tile_k.index[None, :] < seqlens[:, None]
                combined_mask = row_mask[:, :, None] & (tile_m.index < M)[None, None, :]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=combined_mask)
                slice_max = torch.where(combined_mask, x_slice, float("-inf")).amax(dim=1)
                block_new_max = torch.maximum(block_max, slice_max)
                block_L *= torch.exp(block_max - block_new_max)
                block_L += torch.exp(torch.where(combined_mask, x_slice - block_new_max[:, None, :], float("-inf"))).sum(dim=1)
                block_max = block_new_max
            for tile_k in hl.tile(max_seqlen):
                base_indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = base_indices[:, :, None] * M + tile_m.index[None, None, :]
                row_mask = tile_k.index[None, :] < seqlens[:, None]
                combined_mask = row_mask[:, :, None] & (tile_m.index < M)[None, None, :]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=combined_mask)
                block_out = torch.exp(x_slice - block_max[:, None, :]) / block_L[:, None, :]
                hl.store(out, [flat_indices], block_out, extra_mask=combined_mask)
    return out.reshape([N, M])


def check(lengths: list[int], run=lambda k: k) -> None:
    jt = JaggedTensor.from_lengths(torch.randn(sum(lengths), 3), lengths)
    wanted = torch.cat([torch.softmax(row, 0) for row in jt.unbind()]) if lengths else torch.empty(0, 3)
    torch.testing.assert_close(run(jagged)(jt).values, wanted)
    torch.testing.assert_close(run(manual)(jt.values, jt.offsets), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_softmax: jagged and manual agree with torch")
