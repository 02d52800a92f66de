"""A ragged batch plus a dense one; past a row's end the result is the dense value.

Run as `python examples/jagged_dense_add.py`. `jagged` is the kernel; `manual` handles offsets and masks itself.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(dense)
    for tile_row in hl.tile(jt.num_rows):
        for tile_col in hl.tile(out.size(1)):
            out[tile_row, tile_col] = dense[tile_row, tile_col] + jt[tile_row, tile_col]
    return out


@serrate.kernel
def manual(x_data: torch.Tensor, x_offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    num_rows = y.size(0)
    assert x_offsets.size(0) == num_rows + 1
    out = torch.zeros_like(y)
    for tile0 in hl.tile(num_rows):
        starts = x_offsets[tile0]
        ends = x_offsets[tile0.index + 1]
        nnz = ends - starts
        max_nnz = nnz.amax()
        for tile1 in hl.tile(0, max_nnz):
            x_slice = hl.load(x_data, [starts[:, None] + tile1.index[None, :]], extra_mask=tile1.index[None, :] < nnz[:, None])
            out[tile0, tile1] = y[tile0, tile1] + x_slice
        for tile1 in hl.tile(max_nnz, out.size(1)):
            out[tile0, tile1] = y[tile0, tile1]
    return out


def check(lengths: list[int], run=lambda k: k) -> None:
    jt = JaggedTensor.from_lengths(torch.randn(sum(lengths)), lengths)
    dense = torch.randn(len(lengths), max(lengths, default=0) + 2)
    wanted = dense.clone()
    for row, own in zip(wanted, jt.unbind(), strict=True):
        row[: len(own)] += own
    torch.testing.assert_close(run(jagged)(jt, dense), wanted)
    torch.testing.assert_close(run(manual)(jt.values, jt.offsets, dense), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_dense_add: jagged and manual agree with torch")
