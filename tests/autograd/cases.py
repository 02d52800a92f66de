"""Programs to differentiate, with the shapes of their arguments.

`one(D)`: rows of lengths 3, 0, 2 with D features; `nested(D)`: groups of 2 and 1 of those rows; `dense(...)`: a plain tensor;
`integers(...)`: tokens or indices, over the same rows or plain, which have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from serrate import JaggedTensor, ops

OFFSETS = torch.tensor([0, 3, 3, 5])
GROUPS = torch.tensor([0, 2, 3])


@dataclass(frozen=True)
class Argument:
    kind: str
    shape: tuple[int, ...]
    given: tuple[int, ...] = ()

    def values(self, generator: torch.Generator) -> torch.Tensor:
        if self.given:
            return torch.tensor(self.given).reshape(self.shape)
        return torch.randn(self.shape, dtype=torch.float64, generator=generator).requires_grad_()

    def wrapped(self, values: torch.Tensor) -> Any:
        if self.kind == "rows":
            return JaggedTensor.from_csr(values, OFFSETS)
        if self.kind == "heads":
            return JaggedTensor.from_csr(values, OFFSETS).transpose(1, 2)
        if self.kind == "nested":
            return JaggedTensor.from_csr(values, (GROUPS, OFFSETS))
        if self.kind == "gaps":
            return JaggedTensor.from_starts(values, torch.tensor([1, 4, 5]), torch.tensor([3, 0, 2]))
        if self.kind == "product":
            return JaggedTensor.from_product(values, OFFSETS, torch.tensor([0, 2, 3, 5]))
        return values


def one(*features: int) -> Argument:
    return Argument("rows", (5, *features))


def heads(*features: int) -> Argument:
    return Argument("heads", (5, *features))


def nested(*features: int) -> Argument:
    return Argument("nested", (5, *features))


def gaps(*features: int) -> Argument:
    return Argument("gaps", (8, *features))


def dense(*shape: int) -> Argument:
    return Argument("dense", shape)


def integers(*given: int, shape: tuple[int, ...] | None = None, rows: bool = True) -> Argument:
    return Argument("rows" if rows else "dense", shape or (len(given),), given)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    arguments: tuple[Argument, ...]


def _routed(x: Any, expert: Any, weight: Any) -> Any:
    offsets, order = ops.group_by(expert, 3)
    rows = ops.as_nested(ops.index(x, order), offsets) @ weight
    return ops.index(ops.as_flattened(rows), ops.invert(order))


CASES: dict[str, Case] = {
    "a product with a vector, summed over rows": Case(lambda x, w: (x * w).sum(1), (one(2), dense(2))),
    "one vector for each row": Case(lambda x, w: x + w, (one(2), dense(3, 1, 2))),
    "a dense operand longer than the rows": Case(lambda x, w: x * w, (one(2), dense(3, 4, 2))),
    "positions that all rows share": Case(lambda x, w: x * w, (one(2), dense(1, 4, 2))),
    "a scalar tensor": Case(lambda x, w: x / w, (one(2), dense())),
    "two ragged operands": Case(lambda x, y: x * y, (one(2), one(2))),
    "an operand used twice": Case(lambda x: x * x + x, (one(2),)),
    "mean over features": Case(lambda x: x.mean(2), (one(2),)),
    "mean over everything": Case(lambda x: x.mean(), (one(2),)),
    "sum across rows": Case(lambda x: x.sum(0), (one(2),)),
    "sum kept and broadcast back": Case(lambda x: x - x.sum(1, keepdim=True), (one(2),)),
    "product of a row": Case(lambda x: x.prod(1), (one(2),)),
    "matmul with a shared weight": Case(lambda x, w: x @ w, (one(2), dense(2, 3))),
    "matmul with a weight for each row": Case(lambda x, w: x @ w, (one(2), dense(3, 2, 3))),
    "matmul with a vector": Case(lambda x, w: x @ w, (one(2), dense(2))),
    "einsum": Case(lambda x, w: torch.einsum("brd,dk->brk", x, w), (one(2), dense(2, 3))),
    "linear": Case(lambda x, w, b: F.linear(x, w, b), (one(2), dense(4, 2), dense(4))),
    "rows by rows": Case(lambda x, y: (x @ y.transpose(1, 2)).sum(2), (one(2), one(2))),
    "contraction of rows": Case(lambda x, y: x.transpose(1, 2) @ y, (one(2), one(3))),
    "softmax over rows": Case(lambda x: torch.softmax(x, 1), (one(2),)),
    "softmax over features": Case(lambda x: torch.softmax(x, 2), (one(3),)),
    "log_softmax over rows": Case(lambda x: torch.log_softmax(x, 1), (one(2),)),
    "logsumexp": Case(lambda x: torch.logsumexp(x, 2), (one(3),)),
    "layer norm": Case(lambda x, w, b: F.layer_norm(x, (3,), w, b), (one(3), dense(3), dense(3))),
    "layer norm over rows": Case(lambda x: ops.layer_norm(x, (1, 2)), (one(3),)),
    "rms norm": Case(lambda x, w: F.rms_norm(x, (3,), w), (one(3), dense(3))),
    "variance": Case(lambda x: x.var(2), (one(3),)),
    "standard deviation": Case(lambda x: x.std(2), (one(3),)),
    "amax": Case(lambda x: x.amax(2), (one(3),)),
    "max": Case(lambda x: x.max(2)[0], (one(3),)),
    "min over a row": Case(lambda x: x.min(1)[0][::2], (one(3),)),
    "cross entropy": Case(lambda x, t: F.cross_entropy(x, t), (one(3), integers(1, 0, 1, 0, 2))),
    "embedding": Case(lambda t, w: F.embedding(t, w), (integers(1, 0, 1, 3, 1), dense(4, 2))),
    "pooled embedding": Case(lambda t, w: F.embedding(t, w).mean(1)[::2], (integers(1, 0, 1, 3, 1), dense(4, 2))),
    "embedding bag": Case(lambda t, w: F.embedding_bag(t, w, mode="sum"), (integers(1, 0, 1, 3, 1), dense(4, 2))),
    "embedding bag with weights": Case(
        lambda t, w, p: F.embedding_bag(t, w, mode="sum", per_sample_weights=p),
        (integers(1, 0, 1, 3, 1), dense(4, 2), one()),
    ),
    "largest of an embedding bag": Case(lambda t, w: F.embedding_bag(t, w, mode="max"), (integers(1, 0, 1, 3, 1), dense(4, 2))),
    "routed experts": Case(lambda x, k, w: _routed(x, k, w), (dense(5, 2), integers(2, 0, 2, 1, 0, rows=False), dense(3, 2, 2))),
    "slice": Case(lambda x: x[:, 1:], (one(2),)),
    "every other position": Case(lambda x: ops.slice(x, 1, 0, None, 2), (one(2),)),
    "flip": Case(lambda x: torch.flip(x, (1,)), (one(2),)),
    "pad": Case(lambda x: ops.pad(x, 1, 1, 2, 0.5), (one(2),)),
    "cat along rows": Case(lambda x, y: torch.cat([x, y], 1), (one(2), one(2))),
    "cat of rows": Case(lambda x, y: torch.cat([x, y], 0), (one(2), one(2))),
    "cat of features": Case(lambda x, y: torch.cat([x, y], 2), (one(2), one(3))),
    "select a row": Case(lambda x: ops.select(x, 0, 2), (one(2),)),
    "last positions": Case(lambda x: ops.select(x, 1, -1), (one(2),)),
    "rows by number": Case(lambda x, k: x[k], (one(2), integers(2, 0, 2, rows=False))),
    "gather in rows": Case(lambda x, k: torch.gather(x, 1, k), (one(2), integers(0, 1, 0, 0, 2, 1, 1, 1, 0, 1, shape=(5, 2)))),
    "gather in rows of one feature": Case(lambda x, k: torch.gather(x, 1, k), (one(1), integers(2, 0, 0, 1, 0, shape=(5, 1)))),
    "gather of features": Case(
        lambda x, k: torch.gather(x, 2, k), (one(3), integers(0, 1, 0, 2, 2, 1, 1, 1, 0, 1, shape=(5, 2)))
    ),
    "cumsum": Case(lambda x: torch.cumsum(x, 1), (one(2),)),
    "cumprod": Case(lambda x: torch.cumprod(x, 1), (one(2),)),
    "cummax": Case(lambda x: torch.cummax(x, 1)[0], (one(2),)),
    "nested: cumsum": Case(lambda x: torch.cumsum(x, 2), (nested(2),)),
    "sorted rows": Case(lambda x: torch.sort(x, 1)[0], (one(2),)),
    "sorted features": Case(lambda x: torch.sort(x, 2, descending=True)[0], (one(3),)),
    "nested: sorted rows": Case(lambda x: torch.sort(x, 2)[0], (nested(2),)),
    "sorted across rows": Case(lambda x: torch.sort(x, 0)[0], (one(2),)),
    "topk of rows": Case(lambda x: torch.topk(x, 2, 1)[0], (one(2),)),
    "topk of features": Case(lambda x: torch.topk(x, 2, 2)[0], (one(3),)),
    "to_padded": Case(lambda x: x.to_padded(), (one(2),)),
    "values": Case(lambda x: x.with_values(x.values * 2), (one(2),)),
    "rows with gaps": Case(lambda x, w: (x * w).sum(1), (gaps(2), dense(2))),
    "nested: product with a vector": Case(lambda x, w: (x * w).sum(2), (nested(2), dense(2))),
    "nested: both levels": Case(lambda x, w: (x * w).sum((1, 2)), (nested(2), dense(2))),
    "nested: softmax": Case(lambda x: torch.softmax(x, 2), (nested(2),)),
    "nested: matmul": Case(lambda x, w: x @ w, (nested(2), dense(2, 3))),
    "nested: layer norm": Case(lambda x, w: F.layer_norm(x, (3,), w), (nested(3), dense(3))),
    "attention": Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (one(2), one(2), one(3))),
    "causal attention": Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (one(2), one(2), one(2))),
    "attention of heads": Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (heads(2, 2), heads(2, 2), heads(2, 2))),
    "grouped queries": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (heads(4, 2), heads(2, 2), heads(2, 2))
    ),
}
