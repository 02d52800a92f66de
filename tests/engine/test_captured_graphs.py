"""Calls recorded in a CUDA graph and replayed with other offsets and values in the same memory.

The oracle is torch, row by row. Without a GPU, Triton's interpreter calls the same programs again instead of replaying them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import serrate
from benchmarks.gpu_timing import no_synchronisation
from benchmarks.steps import pooled
from serrate import JaggedTensor, settings
from tests.conftest import INTERPRETED

WIDTH = 8
LENGTHS = [[5, 0, 3000, 1, 40], [1000, 1000, 0, 1045, 1], [0, 0, 0, 0, 3046], [609, 609, 609, 609, 610]]
SMALL = [[5, 0, 30, 1, 4], [10, 10, 0, 19, 1], [0, 0, 0, 0, 40], [8, 8, 8, 8, 8]]
"""Of one total each: a short row becomes a long one, which other programs of a launch process."""


def attention(x: Any) -> Any:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def row_attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0]


PROGRAMS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": (lambda x: x.sum(1), lambda row: row.sum(0)),
    "sum by itself": (serrate.jit(lambda x: x.sum(1)), lambda row: row.sum(0)),
    "pointwise": (lambda x: torch.relu(x * 2) + 1, lambda row: torch.relu(row * 2) + 1),
    "softmax": (lambda x: torch.softmax(x, 1), lambda row: row.softmax(0)),
    "centred": (serrate.jit(lambda x: x - x.mean(1, keepdim=True)), lambda row: row - row.mean(0)),
    "scan": (lambda x: x.cumsum(1), lambda row: row.cumsum(0)),
    "flipped": (lambda x: torch.flip(x, (1,)), lambda row: row.flip(0)),
    "features": (lambda x: functional.layer_norm(x, (WIDTH,)), lambda row: functional.layer_norm(row, (WIDTH,))),
    "attention": (serrate.jit(attention), row_attention),
    "kernel": (pooled, lambda row: row.mean(0)),
}


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def check(out: Any, values: torch.Tensor, lengths: list[int], row: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rows = [row(r) for r in values.double().split(lengths)]
    if isinstance(out, JaggedTensor):
        got, want = out.values, torch.cat(rows)
    else:
        # Empty rows have no mean.
        got, want = out, torch.stack(rows)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda m: f"{lengths}: {m}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_follow_the_offsets(name: str) -> None:
    function, row = PROGRAMS[name]
    values = torch.randn(sum(LENGTHS[0]), WIDTH, device="cuda")
    offsets = boundaries(LENGTHS[0]).cuda()
    jt = JaggedTensor.from_csr(values, offsets)
    function(jt)
    torch.cuda.synchronize()
    with no_synchronisation(torch.device("cuda")):
        function(jt)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(jt)
    for lengths in LENGTHS:
        offsets.copy_(boundaries(lengths))
        values.normal_()
        graph.replay()
        check(out, values, lengths, row)
    # And calls without the graph still do.
    check(function(jt), values, LENGTHS[-1], row)
    offsets.copy_(boundaries(LENGTHS[0]))
    check(function(jt), values, LENGTHS[0], row)


@pytest.mark.skipif(not INTERPRETED, reason="graphs are replayed here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_follow_the_offsets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_BACKEND", "triton")
    settings.reload()
    function, row = PROGRAMS[name]
    values, offsets = torch.randn(sum(SMALL[0]), WIDTH), boundaries(SMALL[0])
    jt = JaggedTensor.from_csr(values, offsets)
    for lengths in SMALL:
        offsets.copy_(boundaries(lengths))
        values.normal_()
        check(function(jt), values, lengths, row)
