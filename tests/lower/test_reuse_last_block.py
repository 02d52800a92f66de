"""Loops that begin with the block that the loop before them has ended with: every length is right, and a block is read once.

The oracle is plain torch in float64, row by row; Triton's interpreter checks that no access leaves its memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ops

pytestmark = pytest.mark.triton
Body = Callable[[Any], Any]


def rows(lengths: list[int], *inner: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    values = torch.randn(sum(lengths), *inner, generator=torch.Generator().manual_seed(0)).to(dtype)
    return JaggedTensor.from_lengths(values, torch.tensor(lengths))


def centred(x: Any) -> Any:
    """Two statistics, and a third loop that needs both."""
    shifted = x - x.amax(1, keepdim=True)
    return shifted / (1 + (shifted * shifted).sum(1, keepdim=True))


BODIES: dict[str, tuple[Body, Body]] = {
    "softmax": (lambda x: torch.softmax(x, 1), lambda row: torch.softmax(row, 0)),
    "log softmax": (lambda x: torch.log_softmax(x, 1), lambda row: torch.log_softmax(row, 0)),
    "layer norm": (lambda x: ops.layer_norm(x, (1, 2)), lambda row: functional.layer_norm(row, row.shape)),
    "scaled softmax": (lambda x: torch.softmax(x * 3, 1) * x, lambda row: torch.softmax(row * 3, 0) * row),
    "centred": (
        centred,
        lambda row: (row - row.amax(0)) / (1 + ((row - row.amax(0)) ** 2).sum(0)),
    ),
    "running": (
        lambda x: torch.cumsum(torch.softmax(x, 1), 1),
        lambda row: torch.cumsum(torch.softmax(row, 0), 0),
    ),
}


def compare(found: JaggedTensor, x: JaggedTensor, row: Body, tolerance: float) -> None:
    for own, one in zip(found.unbind(), x.unbind(), strict=True):
        wanted = row(one.double()) if len(one) else one.double()
        torch.testing.assert_close(own.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("strategy", ["maskless", "persistent_dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_length_around_a_block(name: str, strategy: str, dtype: torch.dtype) -> None:
    body, row = BODIES[name]
    x = rows([0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 0, 600], 48, dtype=dtype)
    found = serrate.jit(body, backend="triton", strategy=strategy)(x)
    compare(found, x, row, 1e-4 if dtype == torch.float32 else 3e-2)


@settings(max_examples=8)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.sampled_from([1, 5, 33]), st.sampled_from(list(BODIES)))
def test_any_lengths(lengths: list[int], width: int, name: str) -> None:
    body, row = BODIES[name]
    x = rows(lengths, width)
    compare(serrate.jit(body, backend="triton", strategy="maskless")(x), x, row, 1e-4)


def source_of(body: Body, strategy: str, width: int = 64) -> str:
    return serrate.jit(body, backend="triton", strategy=strategy).source(rows([70, 3], width)).split("\ndef ")[-1]


def test_the_exponentials_of_the_last_block_are_computed_once() -> None:
    source = source_of(BODIES["softmax"][0], "maskless")
    first, others = re.split(r"\n    if \(0 < r0o_count\):\n", source)
    begun, rest = others.split("\n    for r0o_step in ")
    assert "T0_last" in first and "tl.load(" not in begun and "exp" not in begun and "T0_last * " in begun
    assert "tl.load(T0" in rest and "mask=" not in rest


def test_rows_side_by_side_go_forward() -> None:
    """Their blocks end at different places, so that all would be masked."""
    assert "T0_last" not in source_of(BODIES["softmax"][0], "masked")


def test_a_loop_that_needs_its_elements_in_order_goes_forward() -> None:
    source = source_of(lambda x: torch.cumsum(x - x.mean(1, keepdim=True), 1), "maskless")
    assert "_back" not in source


def test_rows_that_change_between_two_loops_are_read_again() -> None:
    @serrate.kernel(config=serrate.Config(strategy="maskless"))
    def k(x: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(x.num_rows, x.size(2))
        for b in hl.grid(x.num_rows):
            total = hl.zeros([x.size(2)])
            for t in hl.tile(x.max_length):
                total = total + x[b, t].sum(0)
            for t in hl.tile(x.max_length):
                x[b, t] = x[b, t] - total[None, :]
            again = hl.zeros([x.size(2)])
            for t in hl.tile(x.max_length):
                again = again + x[b, t].sum(0)
            out[b] = again
        return out

    x = rows([5, 0, 130, 1], 8)
    wanted = torch.stack([(row.double() - row.double().sum(0)).sum(0) for row in x.unbind()])
    torch.testing.assert_close(k.on("triton")(x).double(), wanted, rtol=1e-4, atol=1e-3)
