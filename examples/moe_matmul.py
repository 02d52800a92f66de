"""Mixture of experts: gather tokens, multiply by their expert's matrix, and scatter back, each token exactly once.

Run as `python examples/moe_matmul.py`. `jagged` takes the token indices of each expert as a ragged tensor; `manual` handles
offsets and masks itself. In published versions, lanes past an expert's tokens overwrite a token of another expert; these do not.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(A: torch.Tensor, W: torch.Tensor, tokens: JaggedTensor) -> torch.Tensor:
    E, K, N = W.shape
    out = torch.zeros(A.size(0), N, dtype=torch.promote_types(A.dtype, W.dtype), device=A.device)
    for e in hl.grid(E):
        for tile_t, tile_n in hl.tile([tokens.max_length, N]):
            token = tokens[e, tile_t]
            acc = hl.zeros([tile_t, tile_n])
            for tile_k in hl.tile(K):
                acc = acc + A[token, tile_k] @ W[e, tile_k, tile_n]
            out[token, tile_n] = acc.to(out.dtype)
    return out


@serrate.kernel(static_shapes=False)
def manual(
    A: torch.Tensor,
    W: torch.Tensor,
    expert_token_counts: torch.Tensor,
    expert_token_offsets: torch.Tensor,
    sorted_to_orig_token_idx: torch.Tensor,
    max_T_per_expert: int,
) -> torch.Tensor:
    T, K = A.shape
    E, _, N = W.shape
    C = torch.zeros(T, N, dtype=torch.promote_types(A.dtype, W.dtype), device=A.device)
    for e_idx in hl.grid(E):
        start = expert_token_offsets[e_idx]
        num_tokens = expert_token_counts[e_idx]
        if num_tokens != 0:
            for tile_t, tile_n in hl.tile([max_T_per_expert, N]):
                local_token_offsets = tile_t.index
                token_valid = local_token_offsets < num_tokens
                local_token_offsets_valid = torch.where(token_valid, local_token_offsets, 0)
                expert_sorted_token_indices = start + local_token_offsets_valid
                expert_orig_token_indices = sorted_to_orig_token_idx[expert_sorted_token_indices]
                acc = hl.zeros([tile_t, tile_n], dtype=torch.float32)
                for tile_k in hl.tile(K):
                    A_frag = A[expert_orig_token_indices, tile_k]
                    W_frag = W[e_idx, tile_k, tile_n]
                    acc = torch.addmm(acc, A_frag, W_frag)
                hl.store(C, [expert_orig_token_indices, tile_n], acc.to(C.dtype), extra_mask=token_valid[:, None])
    return C


def check(lengths: list[int], run=lambda k: k) -> None:
    total = sum(lengths)
    A, W, order = torch.randn(total, 6), torch.randn(len(lengths), 6, 5), torch.randperm(total)
    tokens = JaggedTensor.from_lengths(order, lengths)
    wanted = torch.zeros(total, 5)
    for own, w in zip(tokens.unbind(), W, strict=True):
        wanted[own] = A[own] @ w
    torch.testing.assert_close(run(jagged)(A, W, tokens), wanted)
    torch.testing.assert_close(run(manual)(A, W, tokens.lengths, tokens.offsets, order, tokens.max_length), wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("moe_matmul: jagged and manual agree with torch")
