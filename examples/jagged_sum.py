"""Sums over ragged rows.

Run as `python examples/jagged_sum.py`. `jagged` is the kernel; `manual` handles offsets and masks itself.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(jt: JaggedTensor) -> torch.Tensor:
    out = torch.empty([jt.num_rows, jt.size(2)], dtype=jt.dtype, device=jt.device)
    for tile_b, tile_m in hl.tile([jt.num_rows, jt.size(2)]):
        sums = hl.zeros([tile_b, tile_m], dtype=jt.dtype)
        for tile_k in hl.tile(jt.max_length):
            sums = sums + jt[tile_b, tile_k, tile_m].sum(dim=1)
        out[tile_b, tile_m] = sums
    return out


@serrate.kernel
def manual(x_data: torch.Tensor, x_offsets: torch.Tensor) -> torch.Tensor:
    M = x_data.shape[1]
    num_rows = x_offsets.size(0) - 1
    out = torch.zeros([num_rows, M], dtype=x_data.dtype, device=x_data.device)
    x_flat = x_data.view(-1)
    for tile_b in hl.tile(num_rows):
        starts = x_offsets[tile_b]
        ends = x_offsets[tile_b.index + 1]
        nnz = ends - starts
        max_nnz = nnz.amax()
        for tile_m in hl.tile(M):
            row_sums = hl.zeros([tile_b, tile_m], dtype=x_data.dtype)
            for tile_k in hl.tile(0, max_nnz):
                base_indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = base_indices[:, :, None] * M + tile_m.index[None, None, :]
                row_mask = tile_k.index[None, :] < nnz[:, None]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=row_mask[:, :, None])
                row_sums = row_sums + x_slice.sum(dim=1)
            out[tile_b, tile_m] = row_sums
    return out


def check(lengths: list[int], run=lambda k: k) -> None:
    jt = JaggedTensor.from_lengths(torch.randn(sum(lengths), 5), lengths)
    wanted = torch.stack([row.sum(0) for row in jt.unbind()]) if lengths else torch.empty(0, 5)
    torch.testing.assert_close(run(jagged)(jt), wanted)
    torch.testing.assert_close(run(manual)(jt.values, jt.offsets), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_sum: jagged and manual agree with torch")
