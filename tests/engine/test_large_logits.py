"""Softmax and its relatives far from zero: masks of -1e10, large offsets, and rows near the largest number.

The oracle is torch in float64, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.schedule.strategies import SCHEDULES

BACKENDS = ["reference", "cpp", "triton"]
MAGNITUDES = (0.0, 1e2, 1e4, -1e5, -1e6, -1e9, 1e10, -1e10, -1.5e10, 3e10, 1e20, -1e30, 3e38, -3e38)
FUNCTIONS: dict[str, Callable[[Any, int], Any]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "logsumexp": torch.logsumexp,
}


def rows(width: int) -> list[Tensor]:
    """Rows of equal numbers of every magnitude, and rows with small differences between large numbers."""
    draw = torch.Generator().manual_seed(0)
    equal = [torch.full((n, width), v) for v, n in zip(MAGNITUDES, (1, 3, 64, 65, 2, 130, 3, 3, 1, 200, 3, 5, 2, 3), strict=True)]
    return [*equal, *(v + torch.randn(70, width, generator=draw) * 3 for v in (1e3, -1e5, 1e6))]


def compare(found: Any, given: list[Tensor], row: Callable[[Tensor], Tensor]) -> None:
    parts = found.unbind() if isinstance(found, JaggedTensor) else found
    for own, one in zip(parts, given, strict=True):
        torch.testing.assert_close(own, row(one.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("strategy", [*(s for s in SCHEDULES if s != "library"), None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_far_from_zero(backend: str, strategy: str | None, name: str) -> None:
    given, function = rows(3), FUNCTIONS[name]
    found = serrate.jit(lambda x: function(x, 1), backend=backend, strategy=strategy)(JaggedTensor.from_list(given))
    compare(found, given, lambda row: function(row, 0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fully_masked_row(backend: str) -> None:
    given = [torch.randn(3, 2), torch.randn(40, 2)]
    masks = [torch.ones(3, 2, dtype=torch.bool), torch.arange(80).view(40, 2) % 3 == 0]
    mask = JaggedTensor.from_list(masks)

    def attended(x: Any, mask: Any) -> Any:
        return torch.softmax(x.masked_fill(mask, -1e10), 1)

    found = serrate.jit(attended, backend=backend)(JaggedTensor.from_list(given), mask)
    wanted = [torch.softmax(row.double().masked_fill(own, -1e10), 0) for row, own in zip(given, masks, strict=True)]
    for own, row in zip(found.unbind(), wanted, strict=True):
        torch.testing.assert_close(own, row.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_with_running_statistics(backend: str) -> None:
    @serrate.kernel
    def softmax(x: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(x)
        for b in hl.tile(x.num_rows):
            top, total = hl.full([b], float("-inf")), hl.zeros([b])
            for t in hl.tile(x.max_length):
                new = torch.maximum(top, x[b, t].amax(1))
                total = total * torch.exp(top - new) + torch.exp(x[b, t] - new[:, None]).sum(1)
                top = new
            for t in hl.tile(x.max_length):
                out[b, t] = torch.exp(x[b, t] - top[:, None]) / total[:, None]
        return out

    given = [row[:, 0].contiguous() for row in rows(1)]
    compare(softmax.on(backend)(JaggedTensor.from_list(given)), given, lambda row: torch.softmax(row, 0))
