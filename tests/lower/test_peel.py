"""Loops with products on a GPU: whole blocks without masks, then what is left; every length around a block is right."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as functional

import serrate
from serrate import JaggedTensor


def attention(causal: bool, size: int) -> serrate.Compiled:
    def body(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> JaggedTensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return serrate.jit(body, backend="triton")


def rows(lengths: list[int], *inner: int) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *inner), lengths)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [16, 20])
def test_every_length_around_a_block(causal: bool, size: int) -> None:
    lengths = [0, 1, 63, 64, 65, 127, 128, 129]
    q, k, v = (rows(lengths, 2, size) for _ in range(3))
    found = attention(causal, size)(q, k, v)
    for own, a, b, c in zip(found.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True):
        a, b, c = (x.transpose(0, 1) for x in (a, b, c))
        wanted = functional.scaled_dot_product_attention(a, b, c, is_causal=causal).transpose(0, 1)
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_whole_blocks_have_no_masks(causal: bool) -> None:
    function = attention(causal, 16)
    q, k, v = (rows([70, 3], 2, 16) for _ in range(3))
    source = function.source(q, k, v)
    loop = source.split("in range(0, whole_")[1].split("\n        if (whole_")[0]
    queries = r"tl\.load\(T0 .*"
    assert "tl.dot(" in loop and "mask=" not in re.sub(queries, "", loop) and "tl.where(" not in loop


def test_rows_of_other_sequences_do_not_matter() -> None:
    """NaNs in the next sequence: a block that reaches past the end of its own must not read them."""
    lengths = [65, 64, 3]
    q, k, v = (rows(lengths, 2, 16) for _ in range(3))
    alone = attention(False, 16)(q, k, v).unbind()
    for each in (k, v):
        each.values[65:] = float("nan")
    torch.testing.assert_close(attention(False, 16)(q, k, v).unbind()[0], alone[0], rtol=0, atol=0)
