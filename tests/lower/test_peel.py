"""Loops that compute on a GPU: whole blocks without masks, then what is left; every length around a block is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ops


def attention(causal: bool, size: int) -> serrate.Compiled:
    def body(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> JaggedTensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return serrate.jit(body, backend="triton")


def rows(lengths: list[int], *inner: int) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *inner), lengths)


@pytest.mark.sampled(1)
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


def normalised(x: Any) -> Any:
    return ops.layer_norm(x, (1, 2))


ROWS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (lambda x: torch.softmax(x, 1), lambda row: torch.softmax(row, 0)),
    "layer norm": (normalised, lambda row: functional.layer_norm(row, row.shape) if len(row) else row),
    "sum of squares": (lambda x: (x * x).sum(1), lambda row: (row * row).sum(0)),
    "running sum": (lambda x: torch.cumsum(x * 2, 1), lambda row: torch.cumsum(row * 2, 0)),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("strategy", ["maskless", "persistent_dynamic"])
def test_every_length_of_rows_around_a_block(name: str, strategy: str) -> None:
    body, row = ROWS[name]
    x = rows([0, 1, 63, 64, 65, 128, 129, 300], 64)
    found = serrate.jit(body, backend="triton", strategy=strategy)(x)
    parts = found.unbind() if isinstance(found, JaggedTensor) else found
    for own, given in zip(parts, x.unbind(), strict=True):
        torch.testing.assert_close(own, row(given.double()).float(), rtol=1e-4, atol=1e-4)


def loops_of(body: Callable[[Any], Any]) -> list[str]:
    """The loops over whole blocks, and all others, of the program for short rows."""
    function = serrate.jit(body, backend="triton", strategy="maskless")
    source = function.source(rows([70, 3], 64)).split("\ndef ")[-1]
    return [line.strip() for line in source.splitlines() if line.strip().startswith("for ")]


def test_whole_blocks_of_rows_have_no_masks() -> None:
    source = serrate.jit(ROWS["layer norm"][0], backend="triton", strategy="maskless").source(rows([70, 3], 64))
    whole = [part.split("\n    if (whole_")[0] for part in re.split(r"for r0o\w* in range\(", source)[1:]]
    assert len(whole) == 2 and all("tl.load(" in part and "mask=" not in part and "tl.where(" not in part for part in whole)


def test_the_rest_of_a_row_stays_in_cache_as_its_blocks_do() -> None:
    source = serrate.jit(ROWS["softmax"][0], backend="triton", strategy="maskless").source(rows([70, 3], 64))
    reads = re.findall(r"tl\.load\(T0.*eviction_policy=\"(\w+)\"", source)
    assert reads == ["evict_last", "evict_last", "evict_first"]


def test_loops_that_only_add_up_stay_whole() -> None:
    assert any("whole_" in line for line in loops_of(ROWS["sum of squares"][0]))
    assert not any("whole_" in line for line in loops_of(lambda x: x.sum(1)))


def test_rows_of_other_sequences_do_not_matter() -> None:
    """NaNs in the next sequence: a block that reaches past the end of its own must not read them."""
    lengths = [65, 64, 3]
    q, k, v = (rows(lengths, 2, 16) for _ in range(3))
    alone = attention(False, 16)(q, k, v).unbind()
    for each in (k, v):
        each.values[65:] = float("nan")
    torch.testing.assert_close(attention(False, 16)(q, k, v).unbind()[0], alone[0], rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_the_other_branch_of_a_condition_does_not_rely_on_it(backend: str) -> None:
    """The end of a loop is read where either branch runs."""

    @serrate.kernel
    def k(x: JaggedTensor) -> JaggedTensor:
        out = torch.zeros_like(x)
        for b in hl.grid(x.num_rows):
            for t in hl.tile(x.max_length, block_size=4):
                if b > 1:
                    out[b + 1, t] = torch.exp(x[b + 1, t])
                else:
                    out[b + 1, t] = torch.exp(x[b + 1, t]) * 2
        return out

    x = rows([2, 3, 9, 9])
    first, *others = x.unbind()
    wanted = [first * 0, torch.exp(others[0]) * 2, torch.exp(others[1]) * 2, torch.exp(others[2])]
    torch.testing.assert_close(k.on(backend)(x).values, torch.cat(wanted))
