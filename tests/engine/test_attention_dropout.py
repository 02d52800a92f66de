"""Dropout in attention: of the weights after the softmax, as torch does it, in one pass, and the same numbers everywhere.

The oracle takes one sequence and one head at a time in plain torch, and draws by the Philox of `test_random`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, jit, ops
from serrate.errors import CallError
from tests.engine.oracle import BACKENDS
from tests.engine.test_random import STRATEGIES, next_seed, words

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:.*not contiguous:UserWarning")

HEADS, WIDTH, P = 2, 16, 0.3
QUERIES, KEYS = [5, 0, 9, 3], [4, 2, 11, 0]


def heads_of(lengths: list[int], heads: int = HEADS, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    values = torch.randn(heads, sum(lengths), WIDTH).to(dtype)
    return JaggedTensor.from_lengths(values.transpose(0, 1).contiguous(), torch.tensor(lengths)).permute(2, 0, 1, 3)


def kept(seed: int, first: int, queries: int, keys: int, p: float) -> Tensor:
    """What the weights of a run of queries are multiplied by; `first` is the number of the first among all queries."""
    rows = [words(seed, keys, first=(first + q) << 32) for q in range(queries)]
    drawn = torch.tensor([[(w >> 8) / 2**24 for w in row] for row in rows]).view(queries, keys)
    return (drawn >= p).double() / (1 - p)


def plainly(
    query: JaggedTensor, key: JaggedTensor, value: JaggedTensor, seed: int, p: float, causal: bool = False
) -> list[list[Tensor]]:
    """The result for each sequence and each head."""
    found, begin = [], 0
    count = query.values.shape[1]
    rows = [[piece.double() for piece in x.permute(1, 2, 0, 3).unbind()] for x in (query, key, value)]
    for q, k, v in zip(*rows, strict=True):
        group = q.shape[1] // k.shape[1]
        heads = []
        for h in range(q.shape[1]):
            scores = q[:, h] @ k[:, h // group].T / math.sqrt(WIDTH)
            if causal:
                scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
            weights = torch.softmax(scores, -1) * kept(seed, h * count + begin, len(q), len(k), p)
            heads.append(weights @ v[:, h // group])
        found.append(heads)
        begin += len(q)
    return found


def close(got: JaggedTensor, want: list[list[Tensor]], tolerance: float = 1e-5) -> None:
    for piece, heads in zip(got.permute(1, 2, 0, 3).unbind(), want, strict=True):
        for h, one in enumerate(heads):
            torch.testing.assert_close(piece[:, h].double(), one, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend: str, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = heads_of(QUERIES), heads_of(KEYS), heads_of(KEYS)
    want = plainly(q, k, v, next_seed(3), P, causal)
    for strategy in STRATEGIES[: None if backend == "reference" else 1]:

        def attend(q: Any, k: Any, v: Any) -> Any:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=causal)

        f = jit(attend, backend=backend, strategy=strategy)
        torch.manual_seed(3)
        close(f(q, k, v), want)
        assert "online" in str(f.explain(q, k, v)), "no scores are kept"


def test_eagerly_in_other_dtypes_and_with_shared_heads() -> None:
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float64, 1e-10)):
        q, k, v = heads_of(QUERIES, 4, dtype), heads_of(KEYS, 2, dtype), heads_of(KEYS, 2, dtype)
        want = plainly(q, k, v, next_seed(1), P)
        torch.manual_seed(1)
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=P, enable_gqa=True)
        assert got.dtype == dtype
        close(got, want, tolerance)


def test_dropout_of_a_softmax_by_hand_is_one_pass_too() -> None:
    torch.manual_seed(0)
    q, k, v = (JaggedTensor.from_lengths(torch.randn(sum(QUERIES), WIDTH), torch.tensor(QUERIES)) for _ in range(3))

    def weights(q: Any, k: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)

    f = jit(lambda q, k, v: F.dropout(weights(q, k), 0.4) @ v)
    torch.manual_seed(2)
    want = F.dropout(jit(weights)(q, k), 0.4) @ v
    torch.manual_seed(2)
    got = f(q, k, v)
    torch.testing.assert_close(got.values, want.values, rtol=1e-5, atol=1e-6)
    assert "online" in str(f.explain(q, k, v))


@pytest.mark.usefixtures("reference")
def test_nothing_and_everything_dropped() -> None:
    torch.manual_seed(0)
    q = heads_of(QUERIES)
    plain = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q, dropout_p=0.0).values, plain.values)
    assert not F.scaled_dot_product_attention(q, q, q, dropout_p=1.0).values.any()
    with pytest.raises(CallError, match=r"the probability must be between 0 and 1, got 1\.5"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=1.5)


def test_what_is_expected_is_attention_without_dropout() -> None:
    torch.manual_seed(0)
    q = heads_of([6, 3])
    plain = F.scaled_dot_product_attention(q, q, q).values
    total = torch.zeros_like(plain)
    for _ in range(400):
        total += F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).values
    assert ((total / 400 - plain).abs() < 0.35).all()
    assert (total / 400 - plain).abs().mean() < 0.05


def test_a_seed_repeats_what_was_dropped() -> None:
    torch.manual_seed(0)
    q, seed = heads_of(QUERIES), torch.tensor(77)
    f = jit(lambda q, seed: ops.attention(q, q, q, dropout_p=0.5, seed=seed))
    first = f(q, seed).values
    assert torch.equal(f(q, seed).values, first) and not torch.equal(f(q, seed + 1).values, first)
    close(f(q, seed), plainly(q, q, q, 77, 0.5))
