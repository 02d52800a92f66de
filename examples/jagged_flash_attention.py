"""Flash attention over ragged sequences, with an online softmax, causal or full.

Run as `python examples/jagged_flash_attention.py`. Queries and keys may have different lengths.
"""

import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor


@serrate.kernel
def jagged(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, causal: bool) -> JaggedTensor:
    out = q.with_values(torch.empty([q.total_elements, v.size(2)], device=q.device))
    scale, dim_v = q.size(2) ** -0.5, v.size(2)
    for tile_b, tile_q in hl.tile([q.num_rows, q.max_length]):
        top = hl.full([tile_b, tile_q], float("-inf"))
        total = hl.zeros([tile_b, tile_q])
        acc = hl.zeros([tile_b, tile_q, dim_v])
        for tile_k in hl.tile(0, tile_q.end if causal else k.max_length):
            scores = q[tile_b, tile_q] @ k[tile_b, tile_k].transpose(1, 2) * scale
            if causal:
                scores = torch.where(tile_q.index[:, None] >= tile_k.index[None, :], scores, float("-inf"))
            new_top = torch.maximum(top, scores.amax(2))
            # new_top is finite wherever the query exists: tile 0 always has a key that a causal query may see.
            p = torch.exp(scores - new_top[:, :, None])
            shrink = torch.exp(top - new_top)
            total = total * shrink + p.sum(2)
            acc = acc * shrink[:, :, None] + p @ v[tile_b, tile_k]
            top = new_top
        out[tile_b, tile_q] = acc / total[:, :, None]
    return out


def check(lengths: list[int], run=lambda k: k) -> None:
    keys = [length + (n % 3) + 1 for n, length in enumerate(lengths)]
    q = JaggedTensor.from_lengths(torch.randn(sum(lengths), 4), lengths)
    for causal, own in ((True, lengths), (False, keys)):
        k = JaggedTensor.from_lengths(torch.randn(sum(own), 4), own)
        v = JaggedTensor.from_lengths(torch.randn(sum(own), 3), own)
        rows = []
        for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
            scores = a @ b.T * 0.5
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) if causal else torch.zeros_like(scores, dtype=torch.bool)
            rows.append(torch.softmax(scores.masked_fill(hidden, float("-inf")), 1) @ c)
        wanted = torch.cat(rows) if rows else torch.empty(0, 3)
        torch.testing.assert_close(run(jagged)(q, k, v, causal).values, wanted)


if __name__ == "__main__":
    check([3, 0, 17, 1])
    print("jagged_flash_attention: causal and full attention agree with torch")
