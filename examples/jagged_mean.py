"""Means over ragged rows that also differ in their number of features: two ragged dims.

Run as `python examples/jagged_mean.py`. Each row is a length x features rectangle in padded storage; features that a row does not
have are 0 in the result. `jagged` is the kernel; `manual` handles offsets, counts and masks itself.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Structure


@serrate.kernel
def jagged(jt: JaggedTensor, max_features: int) -> torch.Tensor:
    out = torch.empty([jt.num_rows, max_features], dtype=jt.dtype, device=jt.device)
    lengths = jt.structure.lengths(0)
    for tile_b, tile_m in hl.tile([jt.num_rows, max_features]):
        sums = hl.zeros([tile_b, tile_m], dtype=jt.dtype)
        for tile_k in hl.tile(jt.structure.max_length(0)):
            sums = sums + jt[tile_b, tile_k, tile_m].sum(dim=1)
        out[tile_b, tile_m] = sums / lengths[tile_b].clamp(min=1)[:, None]
    return out


@serrate.kernel
def manual(x_data: torch.Tensor, x_offsets: torch.Tensor, x_feature_counts: torch.Tensor, max_M: int) -> torch.Tensor:
    num_rows = x_offsets.size(0) - 1
    out = torch.zeros([num_rows, max_M], dtype=x_data.dtype, device=x_data.device)
    x_flat = x_data.view(-1)
    for tile_b in hl.tile(num_rows):
        starts = x_offsets[tile_b]
        ends = x_offsets[tile_b.index + 1]
        nnz = ends - starts
        max_nnz = nnz.amax()
        feature_counts = x_feature_counts[tile_b]
        for tile_m in hl.tile(max_M):
            feature_valid = tile_m.index < feature_counts[:, None]
            row_sums = hl.zeros([tile_b, tile_m], dtype=x_data.dtype)
            for tile_k in hl.tile(0, max_nnz):
                base_indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = base_indices[:, :, None] * max_M + tile_m.index[None, None, :]
                row_mask = tile_k.index[None, :] < nnz[:, None]
                combined_mask = row_mask[:, :, None] & feature_valid[:, None, :]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=combined_mask)
                row_sums = row_sums + x_slice.sum(dim=1)
            nnz_float = nnz.to(x_data.dtype)
            nnz_expanded = nnz_float[:, None]
            result = torch.where(nnz_expanded > 0, row_sums / nnz_expanded, 0.0)
            out[tile_b, tile_m] = torch.where(feature_valid, result, 0.0)
    return out


def check(lengths: list[int], run=lambda k: k) -> None:
    features = torch.tensor([(3 * k + len(lengths)) % 5 for k in range(len(lengths))], dtype=torch.int64)
    most = int(features.max()) if lengths else 0
    structure = Structure.from_lengths(torch.tensor(lengths, dtype=torch.int64)).with_columns(features, packed=False)
    jt = JaggedTensor(torch.randn(sum(lengths), most), structure)
    wanted = torch.zeros(len(lengths), most)
    start = 0
    for k, length in enumerate(lengths):
        if length:
            wanted[k, : features[k]] = jt.values[start : start + length, : features[k]].mean(0)
        start += length
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int64)
    torch.testing.assert_close(run(jagged)(jt, most), wanted)
    torch.testing.assert_close(run(manual)(jt.values, offsets, features, most), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_mean: jagged and manual agree with torch")
