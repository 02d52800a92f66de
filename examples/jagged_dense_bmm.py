"""Every ragged row times its own matrix, plus a bias.

Run as `python examples/jagged_dense_bmm.py`. `jagged` is the kernel; `manual` handles offsets and masks itself.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(jt: JaggedTensor, dense: torch.Tensor, bias: torch.Tensor) -> JaggedTensor:
    B, D, K = dense.shape
    out = jt.with_values(torch.empty([jt.total_elements, K], dtype=jt.dtype, device=jt.device))
    for tile_b, tile_l, tile_n in hl.tile([B, jt.max_length, K]):
        acc = hl.zeros([tile_b, tile_l, tile_n])
        for tile_k in hl.tile(D):
            acc = torch.baddbmm(acc, jt[tile_b, tile_l, tile_k], dense[tile_b, tile_k, tile_n])
        out[tile_b, tile_l, tile_n] = acc + bias[tile_b, tile_n].unsqueeze(1)
    return out


@serrate.kernel
def manual(seq_offsets: torch.Tensor, jagged_values: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    L, D = jagged_values.shape
    B, D, K = dense.shape
    jagged_flat = jagged_values.view(-1)
    output = torch.empty((L, K), dtype=jagged_values.dtype, device=jagged_values.device).view(-1)
    for tile_b in hl.tile(B):
        starts = seq_offsets[tile_b]
        ends = seq_offsets[tile_b.index + 1]
        seq_len = ends - starts
        max_seq_len = seq_len.amax()
        for tile_len in hl.tile(0, max_seq_len):
            jagged_indices = starts[:, None] + tile_len.index[None, :]
            row_mask = tile_len.index[None, :] < seq_len[:, None]
            for tile_k in hl.tile(0, K):
                acc = hl.zeros([tile_b, tile_len, tile_k], dtype=torch.float32)
                for tile_d in hl.tile(0, D):
                    flat = jagged_indices[:, :, None] * D + tile_d.index[None, None, :]
                    jagged_data = hl.load(
                        jagged_flat, [flat], extra_mask=row_mask[:, :, None] & (tile_d.index < D)[None, None, :]
                    )
                    acc = acc + torch.matmul(jagged_data, dense[tile_b, tile_d, tile_k])
                acc = acc + bias[tile_b, tile_k].unsqueeze(1)
                output_indices = jagged_indices[:, :, None] * K + tile_k.index[None, None, :]
                hl.store(output, [output_indices], acc, extra_mask=row_mask[:, :, None])
    return output.reshape(L, K)


def check(lengths: list[int], run=lambda k: k) -> None:
    jt = JaggedTensor.from_lengths(torch.randn(sum(lengths), 5), lengths)
    dense, bias = torch.randn(len(lengths), 5, 4), torch.randn(len(lengths), 4)
    rows = [row @ w + b for row, w, b in zip(jt.unbind(), dense, bias, strict=True)]
    wanted = torch.cat(rows) if rows else torch.empty(0, 4)
    torch.testing.assert_close(run(jagged)(jt, dense, bias).values, wanted)
    torch.testing.assert_close(run(manual)(jt.offsets, jt.values, dense, bias), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_dense_bmm: jagged and manual agree with torch")
