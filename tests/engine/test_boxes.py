"""Operands of products that a copy engine reads as boxes: results against torch row by row, and which operands are boxes.

In: grouped products and attention in 16 bits. Out: failures where a box reaches past its row, is not aligned, or is none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import serrate
from serrate import JaggedTensor
from serrate.runtime import triton as runtime
from tests.conftest import INTERPRETED

pytestmark = pytest.mark.triton
DEPTH, WIDTH = 128, 256


def product() -> Any:
    return serrate.jit(lambda x, w: x @ w, backend="triton")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(values: Tensor, lengths: list[int]) -> JaggedTensor:
    return JaggedTensor.from_csr(values, torch.tensor([0, *lengths]).cumsum(0))


def boxes_in(function: Any, *args: Any) -> int:
    """How many operands a program reads as boxes."""
    return sum(".load([" in line for line in function.source(*args).splitlines())


def check(got: JaggedTensor, values: Tensor, weights: Tensor, lengths: list[int]) -> None:
    for own, x, w in zip(got.unbind(), values.split(lengths), weights, strict=True):
        torch.testing.assert_close(own.float(), x.float() @ w.float(), rtol=2e-2, atol=2e-1)


@pytest.mark.skipif(not INTERPRETED, reason="the device may have no copy engine")
@pytest.mark.parametrize(
    ("depth", "width", "dtype", "wanted"),
    [
        (128, 256, torch.bfloat16, 2),
        (128, 256, torch.float16, 2),
        (128, 256, torch.float32, 0),
        # Rows of 200 bytes, and a last block of 8 of 64: neither can be read as a whole.
        (100, 256, torch.bfloat16, 0),
        (72, 256, torch.bfloat16, 0),
        # Columns may be missing.
        (128, 264, torch.bfloat16, 2),
        (128, 260, torch.bfloat16, 1),
    ],
)
def test_which_operands_are_boxes(depth: int, width: int, dtype: torch.dtype, wanted: int) -> None:
    lengths = [130, 5]
    values, weights = random(135, depth, dtype=dtype), random(2, depth, width, seed=1, dtype=dtype) / 8
    x, function = rows_of(values, lengths), product()
    check(function(x, weights), values, weights, lengths)
    assert boxes_in(function, x, weights) == wanted


@pytest.mark.parametrize(("first", "wanted"), [(3, 0), (8, 1)])
def test_columns_from_some_place_on(first: int, wanted: int) -> None:
    """Triton moves only blocks that begin at a multiple of 16 bytes in their row."""
    values, weights = random(45, DEPTH), random(2, DEPTH, WIDTH, seed=1) / 8
    function, x = serrate.jit(lambda x, w: x @ w[:, :, first:], backend="triton"), rows_of(values, [40, 5])
    check(function(x, weights), values, weights[:, :, first:], [40, 5])
    assert boxes_in(function, x, weights) == wanted or not INTERPRETED


@pytest.mark.parametrize("lengths", [[0], [1], [128], [129, 0, 0], [0, 3, 0, 130, 1], [127, 128, 2]])
def test_rows_of_any_length(lengths: list[int]) -> None:
    values, weights = random(sum(lengths), DEPTH), random(len(lengths), DEPTH, WIDTH, seed=1) / 8
    check(product()(rows_of(values, lengths), weights), values, weights, lengths)


def test_what_other_groups_hold_does_not_matter() -> None:
    """The last block of a group reaches into the next, whose numbers are none."""
    lengths = [130, 3, 70]
    values, weights = random(203, DEPTH), random(3, DEPTH, WIDTH, seed=1) / 8
    wanted = product()(rows_of(values, lengths), weights).unbind()
    values[130:133] = float("nan")
    weights[1] = float("inf")
    got = product()(rows_of(values, lengths), weights).unbind()
    for k in (0, 2):
        torch.testing.assert_close(got[k], wanted[k], rtol=0, atol=0)


@pytest.fixture
def boxed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the programs that are launched read boxes."""
    found: list[bool] = []
    plain = runtime.SizedLaunches.__call__

    def noted(self: runtime.SizedLaunches, *args: Any) -> None:
        found.append(any(launch.boxes for launch, _ in self._launches))
        plain(self, *args)

    monkeypatch.setattr(runtime.SizedLaunches, "__call__", noted)
    return found


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_memory_that_is_not_aligned(shift: int, boxed: list[bool]) -> None:
    """Two bytes past an aligned address, or eight, a copy engine reads nothing; sixteen past it does."""
    lengths = [400, 0, 9]
    memory, weights = random(409 * DEPTH + shift), random(3, DEPTH, WIDTH, seed=1) / 8
    values = memory[shift:].view(409, DEPTH)
    function = product()
    for given in (values.clone(), values, values.clone()):
        boxed.clear()
        check(function(rows_of(given, lengths), weights), given, weights, lengths)
        assert any(boxed) == (given is not values or shift == 8) or not INTERPRETED


def test_more_rows_than_a_copy_engine_counts(monkeypatch: pytest.MonkeyPatch, boxed: list[bool]) -> None:
    monkeypatch.setattr(runtime, "FARTHEST", 300)
    function, weights = product(), random(2, DEPTH, WIDTH, seed=1) / 8
    for lengths in ([30, 20], [330, 3], [40, 50]):
        values = random(sum(lengths), DEPTH, seed=sum(lengths))
        boxed.clear()
        check(function(rows_of(values, lengths), weights), values, weights, lengths)
        assert any(boxed) == (sum(lengths) < 300) or not INTERPRETED


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_wide_heads(causal: bool) -> None:
    lengths = [1, 63, 64, 0, 65, 129]
    q, k, v = (random(sum(lengths), 1, 128, seed=seed) for seed in range(3))

    @serrate.jit(backend="triton")
    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    ragged = [rows_of(each, lengths) for each in (q, k, v)]
    got = attend(*ragged)
    assert not INTERPRETED or boxes_in(attend, *ragged) > 1
    parts = [[row.transpose(0, 1).float() for row in each.split(lengths)] for each in (q, k, v)]
    for own, *each in zip(got.unbind(), *parts, strict=True):
        want = functional.scaled_dot_product_attention(*each, is_causal=causal).transpose(0, 1)
        torch.testing.assert_close(own.float(), want, rtol=2e-2, atol=2e-2)
    # Other sequences hold no numbers: a block at the end of one reaches into the next.
    for each in (k, v):
        each[1:] = float("nan")
    alone = attend(*(rows_of(each, lengths) for each in (q, k, v))).unbind()[0]
    torch.testing.assert_close(alone, got.unbind()[0], rtol=0, atol=0)
