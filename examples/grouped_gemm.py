"""Grouped matrix product: every group of rows times one shared matrix, or times its own.

Run as `python examples/grouped_gemm.py`. `jagged` and `jagged_per_group` are the kernels; `manual` and `manual_persistent` handle
offsets themselves, the second with persistent workers that stride over the tiles of each group.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(A: JaggedTensor, B: torch.Tensor) -> JaggedTensor:
    K, N = B.shape
    out = A.with_values(torch.empty([A.total_elements, N], dtype=torch.promote_types(A.dtype, B.dtype), device=A.device))
    for tile_g, tile_m, tile_n in hl.tile([A.num_groups, A.max_length, N]):
        acc = hl.zeros([tile_g, tile_m, tile_n])
        for tile_k in hl.tile(K):
            acc = acc + A[tile_g, tile_m, tile_k] @ B[tile_k, tile_n]
        out[tile_g, tile_m, tile_n] = acc.to(out.dtype)
    return out


@serrate.kernel
def jagged_per_group(A: JaggedTensor, B: torch.Tensor) -> JaggedTensor:
    G, K, N = B.shape
    out = A.with_values(torch.empty([A.total_elements, N], dtype=torch.promote_types(A.dtype, B.dtype), device=A.device))
    for tile_g, tile_m, tile_n in hl.tile([G, A.max_length, N]):
        acc = hl.zeros([tile_g, tile_m, tile_n])
        for tile_k in hl.tile(K):
            acc = acc + A[tile_g, tile_m, tile_k] @ B[tile_g, tile_k, tile_n]
        out[tile_g, tile_m, tile_n] = acc.to(out.dtype)
    return out


@serrate.kernel(static_shapes=False)
def manual(A_packed: torch.Tensor, B: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    total_M, K = A_packed.shape
    K2, N = B.shape
    assert K == K2
    out = torch.empty(total_M, N, dtype=torch.promote_types(A_packed.dtype, B.dtype), device=A_packed.device)
    G = group_offsets.size(0) - 1
    for g in hl.grid(G):
        start = group_offsets[g]
        end = group_offsets[g + 1]
        M_g = end - start
        if M_g != 0:
            for tile_m, tile_n in hl.tile([M_g, N]):
                acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
                for tile_k in hl.tile(K):
                    a_blk = A_packed[start + tile_m.index, tile_k]
                    b_blk = B[tile_k, tile_n]
                    acc = torch.addmm(acc, a_blk, b_blk)
                out[start + tile_m.index, tile_n] = acc.to(out.dtype)
    return out


@serrate.kernel(static_shapes=False)
def manual_persistent(A_packed: torch.Tensor, B: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    num_workers = torch.get_num_threads()
    BLOCK_M = hl.register_block_size(32, 128)
    BLOCK_N = hl.register_block_size(32, 128)
    total_M, K = A_packed.shape
    K2, N = B.shape
    assert K == K2
    out = torch.zeros(total_M, N, dtype=torch.promote_types(A_packed.dtype, B.dtype), device=A_packed.device)
    G = group_offsets.size(0) - 1
    for worker_id in hl.grid(num_workers):
        for g in hl.grid(G):
            group_start = group_offsets[g]
            group_end = group_offsets[g + 1]
            m_size = group_end - group_start
            if m_size > 0:
                num_m_tiles = (m_size + BLOCK_M - 1) // BLOCK_M
                num_n_tiles = (N + BLOCK_N - 1) // BLOCK_N
                num_group_tiles = num_m_tiles * num_n_tiles
                for local_tile in hl.grid(num_group_tiles):
                    tile_in_group = local_tile * num_workers + worker_id
                    if tile_in_group < num_group_tiles:
                        m_tile_idx = tile_in_group % num_m_tiles
                        n_tile_idx = tile_in_group // num_m_tiles
                        base_row = group_start + m_tile_idx * BLOCK_M
                        base_col = n_tile_idx * BLOCK_N
                        row_idx = base_row + hl.arange(BLOCK_M)
                        col_idx = base_col + hl.arange(BLOCK_N)
                        rows_valid = row_idx < group_end
                        cols_valid = col_idx < N
                        acc = hl.zeros([BLOCK_M, BLOCK_N], dtype=torch.float32)
                        for k_tile in hl.tile(K):
                            k_idx = k_tile.index
                            a_blk = hl.load(A_packed, [row_idx, k_idx], extra_mask=rows_valid[:, None])
                            b_blk = hl.load(B, [k_idx, col_idx], extra_mask=cols_valid[None, :])
                            acc = torch.addmm(acc, a_blk, b_blk)
                        valid_2d = rows_valid[:, None] & cols_valid[None, :]
                        hl.store(out, [row_idx, col_idx], acc.to(out.dtype), extra_mask=valid_2d)
    return out


def check(lengths: list[int], run=lambda k: k) -> None:
    A = JaggedTensor.from_lengths(torch.randn(sum(lengths), 6), lengths)
    shared, own = torch.randn(6, 5), torch.randn(len(lengths), 6, 5)
    wanted = A.values @ shared
    torch.testing.assert_close(run(jagged)(A, shared).values, wanted)
    torch.testing.assert_close(run(manual)(A.values, shared, A.offsets), wanted)
    torch.testing.assert_close(run(manual_persistent)(A.values, shared, A.offsets), wanted)
    rows = [row @ w for row, w in zip(A.unbind(), own, strict=True)]
    torch.testing.assert_close(run(jagged_per_group)(A, own).values, torch.cat(rows) if rows else torch.empty(0, 5))


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("grouped_gemm: jagged, manual and persistent forms agree with torch")
