"""Eager operations and moves of rows on a real GPU, against the same on the CPU.

In: a few tensors of each composition. Out: failures that name the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import serrate
from serrate import JaggedTensor
from tests.engine.test_compositions import STRUCTURES, tensor_of

pytestmark = pytest.mark.gpu

OPERATIONS: dict[str, Callable[[JaggedTensor], Any]] = {
    "arithmetic": lambda jt: jt * 2 + 1 - jt / 3,
    "comparison": lambda jt: torch.where(jt > 0, jt, 0.0),
    "sum": lambda jt: jt.sum(),
    "last": lambda jt: jt.amax(-1),
    "padded": lambda jt: jt.to_padded(-1),
    "contiguous": lambda jt: jt.contiguous(),
    "rows": lambda jt: jt[:1],
    "in place": lambda jt: jt.clone().add_(1),
    "cat": lambda jt: serrate.cat([jt, jt], -1),
}
ROWS: dict[str, Callable[[JaggedTensor], Any]] = {
    "softmax": lambda jt: torch.softmax(jt, 1),
    "sort": lambda jt: torch.sort(jt, 1).values,
    "layer norm": lambda jt: functional.layer_norm(jt, (4,)),
    "linear": lambda jt: functional.linear(jt, torch.ones(3, 4, device=jt.device)),
    "attention": lambda jt: functional.scaled_dot_product_attention(jt, jt, jt, is_causal=True),
    "range": lambda jt: torch.exp(jt[:, :2]),
    "picked": lambda jt: jt[[1, 0]],
    "cumsum": lambda jt: jt.cumsum(1),
}


def _agree(operation: Callable[[JaggedTensor], Any], jt: JaggedTensor) -> None:
    want, got = operation(jt), operation(jt.to("cuda"))
    if isinstance(want, JaggedTensor):
        assert got.structure.to("cpu").same_rows(want.structure)
        want, got = want.to_padded(), got.to_padded()
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_composition(operation: str, name: str) -> None:
    _agree(OPERATIONS[operation], tensor_of(name))


@pytest.mark.parametrize("operation", ROWS)
def test_rows(operation: str) -> None:
    _agree(ROWS[operation], tensor_of("one level"))


def test_more_numbers_than_an_operation_is_built_for() -> None:
    jt = tensor_of("one level")
    there = jt.to("cuda")
    for k in range(12):
        torch.testing.assert_close((there * (0.5 + k)).values.cpu(), jt.values * (0.5 + k))


DRAWN: dict[str, Callable[[JaggedTensor], Any]] = {
    "uniform": torch.rand_like,
    "whole": lambda jt: torch.randint_like(jt, -3, 1000),
    "dropout": lambda jt: functional.dropout(jt, 0.5),
    "traced": serrate.jit(lambda jt: functional.dropout(jt * 2, 0.25) + torch.rand_like(jt)),
    "attention": lambda jt: functional.scaled_dot_product_attention(jt, jt, jt, dropout_p=0.5),
}


@pytest.mark.parametrize("operation", DRAWN)
def test_random_numbers_are_those_of_the_cpu_and_wait_for_nothing(operation: str) -> None:
    jt, found = tensor_of("one level"), []
    for each in (jt, jt.to("cuda")):
        DRAWN[operation](each)
        torch.cuda.synchronize()
        torch.manual_seed(3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found.append(DRAWN[operation](each))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    want, got = (each.values.cpu() for each in found)
    if operation == "attention":
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(got, want)


def test_a_captured_graph_draws_anew_when_it_is_replayed() -> None:
    jt = tensor_of("one level").to("cuda")
    f = serrate.jit(torch.rand_like)
    f(jt)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f(jt)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.values.clone())
    assert not torch.equal(*found) and all(x.min() >= 0 and x.max() < 1 for x in found)
