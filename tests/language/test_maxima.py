"""Kernels that carry the maximum of a row, and use the same elements for something else.

In: kernels as users write them. The oracle is plain torch, row by row.
"""

from __future__ import annotations

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor

BACKENDS = ["cpp", "triton"]
LENGTHS = [3, 0, 64, 1, 70]


def rows(dtype: torch.dtype = torch.float32) -> JaggedTensor:
    draw = torch.Generator().manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), generator=draw).to(dtype), LENGTHS)


@serrate.kernel
def smoothed_loss(logits: JaggedTensor, target: torch.Tensor) -> torch.Tensor:
    out = torch.empty(logits.num_rows)
    for b in hl.tile(logits.num_rows):
        top, total, picked, plain = hl.full([b], -torch.inf), hl.zeros([b]), hl.zeros([b]), hl.zeros([b])
        for k in hl.tile(logits.max_length):
            x = logits[b, k].float()
            new = torch.maximum(top, x.amax(1))
            total = total * torch.exp(top - new) + torch.exp(x - new[:, None]).sum(1)
            top = new
            picked = picked + torch.where(k.index[None, :] == target[b][:, None], x, 0.0).sum(1)
            plain = plain + x.sum(1)
        out[b] = top + torch.log(total) - 0.9 * picked - 0.1 * plain / logits.lengths[b]
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_widened_elements_are_summed_as_well(backend: str) -> None:
    """Lanes that are masked as -inf for a maximum count as 0 in a sum of the same elements."""
    x, target = rows(torch.bfloat16), torch.tensor([1, 0, 63, 0, 5])
    wanted = [
        torch.logsumexp(row, 0) - 0.9 * row[k] - 0.1 * row.mean() if len(row) else torch.tensor(torch.nan, dtype=torch.float64)
        for row, k in zip((row.double() for row in x.unbind()), target, strict=True)
    ]
    found = smoothed_loss.on(backend)(x, target)
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-4, atol=1e-4, equal_nan=True)


@serrate.kernel
def largest(x: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    place, value = torch.empty(x.num_rows, dtype=torch.int64), torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        best, at = hl.full([b], -torch.inf), hl.full([b], -1, dtype=torch.int64)
        for k in hl.tile(x.max_length):
            top = x[b, k].amax(1)
            at = torch.where(top > best, x[b, k].argmax(1) + k.begin, at)
            best = torch.maximum(best, top)
        place[b], value[b] = at, best
    return place, value


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_place_of_the_maximum_is_carried_as_well(backend: str) -> None:
    x = rows()
    place, value = largest.on(backend)(x)
    assert place.tolist() == [int(row.argmax()) if len(row) else -1 for row in x.unbind()]
    assert value.tolist() == [float(row.max()) if len(row) else -torch.inf for row in x.unbind()]


@serrate.kernel
def powers(x: JaggedTensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = torch.empty(x.num_rows, width), torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        top, total = hl.full([b], -torch.inf), hl.zeros([b])
        for k in hl.tile(width, block_size=8):
            new = torch.maximum(top, x[b, k].amax(1))
            power = torch.exp(x[b, k] - new[:, None])
            out[b, k] = power
            total = total * torch.exp(top - new) + power.sum(1)
            top = new
        sums[b] = top + torch.log(total)
    return out, sums


@pytest.mark.parametrize("backend", BACKENDS)
def test_exponentials_past_a_row_are_not_below_its_maximum(backend: str) -> None:
    """Zeros past the end of a row of large negative numbers are far above it: e^100 is infinite."""
    x = JaggedTensor.from_list([torch.full((3,), -100.0), torch.tensor([-1.0])])
    found, sums = powers.on(backend)(x, 5)
    wanted = torch.tensor([[1.0] * 3 + [torch.inf] * 2, [1.0] + [torch.e] * 4])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(sums, torch.stack([torch.logsumexp(row, 0) for row in x.unbind()]))


def statistics(x: JaggedTensor, y: JaggedTensor, n: int) -> torch.Tensor:
    out = torch.empty(x.num_rows, 2)
    for b in hl.tile(x.num_rows):
        top, total = hl.full([b], -torch.inf), hl.zeros([b])
        top2, total2 = hl.full([b], -torch.inf), hl.zeros([b])
        for k in hl.tile(n):
            new = torch.maximum(top, x[b, k].amax(1))
            total = total * torch.exp(top - new) + torch.exp(x[b, k] - new[:, None]).sum(1)
            top = new
            new = torch.maximum(top2, y[b, k].amax(1))
            total2 = total2 * torch.exp(top2 - new) + torch.exp(y[b, k] - new[:, None]).sum(1)
            top2 = new
        out[b, 0] = top + torch.log(total)
        out[b, 1] = top2 + torch.log(total2)
    return out


@pytest.mark.parametrize("strategy", ["maskless", "masked"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_row_adds_nothing_to_a_sum_of_exponentials(backend: str, strategy: str) -> None:
    """Even in a block with longer rows, or in a loop that continues for another tensor: e^(-inf - -inf) would be NaN."""
    x, y = (JaggedTensor.from_lengths(torch.randn(9), lengths) for lengths in ([5, 0, 4, 0], [0, 2, 7, 0]))
    wanted = [torch.stack([torch.logsumexp(row, 0) for row in t.unbind()]) for t in (x, y)]
    found = serrate.kernel(statistics, strategy=strategy).on(backend)(x, y, 8)
    torch.testing.assert_close(found, torch.stack(wanted, 1))
