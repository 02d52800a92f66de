"""Layer norm of every ragged row, over positions and features together.

Run as `python examples/jagged_layer_norm.py`. `jagged` is the kernel; `manual` handles offsets and masks itself.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(jt: JaggedTensor, eps: float = 1e-6) -> JaggedTensor:
    out = torch.empty_like(jt)
    M = jt.size(2)
    for tile_b in hl.tile(jt.num_rows):
        count = (jt.lengths[tile_b] * M).to(torch.float32).clamp(min=1)
        total, square = hl.zeros([tile_b]), hl.zeros([tile_b])
        for tile_k, tile_m in hl.tile([jt.max_length, M]):
            total = total + jt[tile_b, tile_k, tile_m].sum([1, 2])
        mean = total / count
        for tile_k, tile_m in hl.tile([jt.max_length, M]):
            square = square + (jt[tile_b, tile_k, tile_m] - mean[:, None, None]).square().sum([1, 2])
        scale = torch.rsqrt(square / count + eps)
        for tile_k, tile_m in hl.tile([jt.max_length, M]):
            out[tile_b, tile_k, tile_m] = (jt[tile_b, tile_k, tile_m] - mean[:, None, None]) * scale[:, None, None]
    return out


@serrate.kernel
def manual(x_values: torch.Tensor, x_offsets: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    total_L, M = x_values.shape
    num_rows = x_offsets.size(0) - 1
    x_flat = x_values.view(-1)
    out = torch.empty_like(x_flat)
    for tile_b in hl.tile(num_rows):
        starts = x_offsets[tile_b]
        ends = x_offsets[tile_b.index + 1]
        seq_lengths = ends - starts
        max_seq_len = seq_lengths.amax()
        mean_acc = hl.zeros([tile_b], dtype=torch.float32)
        var_acc = hl.zeros([tile_b], dtype=torch.float32)
        for tile_m in hl.tile(M):
            row_sums = hl.zeros([tile_b, tile_m], dtype=torch.float32)
            for tile_k in hl.tile(0, max_seq_len):
                indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = indices[:, :, None] * M + tile_m.index[None, None, :]
                row_mask = (tile_k.index[None, :] < seq_lengths[:, None])[:, :, None]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=row_mask)
                row_sums = row_sums + x_slice.sum(dim=1)
            mean_acc = mean_acc + row_sums.sum(dim=1)
        seq_lengths_float = torch.where(seq_lengths > 0, seq_lengths, 1).to(torch.float32)
        mean_acc = mean_acc / (seq_lengths_float * M)
        for tile_m in hl.tile(M):
            var_sums = hl.zeros([tile_b, tile_m], dtype=torch.float32)
            for tile_k in hl.tile(0, max_seq_len):
                indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = indices[:, :, None] * M + tile_m.index[None, None, :]
                row_mask = (tile_k.index[None, :] < seq_lengths[:, None])[:, :, None]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=row_mask)
                centered = torch.where(row_mask, x_slice.to(torch.float32) - mean_acc[:, None, None], 0.0)
                var_sums = var_sums + (centered * centered).sum(dim=1)
            var_acc = var_acc + var_sums.sum(dim=1)
        variance = var_acc / (seq_lengths_float * M)
        rstd = torch.rsqrt(variance + eps)
        for tile_m in hl.tile(M):
            for tile_k in hl.tile(0, max_seq_len):
                indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = indices[:, :, None] * M + tile_m.index[None, None, :]
                row_mask = (tile_k.index[None, :] < seq_lengths[:, None])[:, :, None]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=row_mask)
                normalized = torch.where(row_mask, (x_slice - mean_acc[:, None, None]) * rstd[:, None, None], 0.0)
                hl.store(out, [flat_indices], normalized, extra_mask=row_mask)
    return out.reshape([total_L, M])


def check(lengths: list[int], run=lambda k: k) -> None:
    jt = JaggedTensor.from_lengths(torch.randn(sum(lengths), 4), lengths)
    rows = [torch.nn.functional.layer_norm(row, row.shape, eps=1e-6) for row in jt.unbind() if len(row)]
    wanted = torch.cat(rows) if rows else torch.empty(0, 4)
    torch.testing.assert_close(run(jagged)(jt).values, wanted)
    torch.testing.assert_close(run(manual)(jt.values, jt.offsets), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_layer_norm: jagged and manual agree with torch")
