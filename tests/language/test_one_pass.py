"""A sum of a row and squares relative to its mean, in one pass where rows are cut. The oracle is float64, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import ScheduleError
from serrate.schedule.plan import Recorder

LENGTHS = (3, 9000, 0, 1, 4096, 4097, 40)


def variances(jt: JaggedTensor) -> torch.Tensor:
    """Of all positions and features of a row."""
    out = torch.empty([jt.num_rows, 2], dtype=torch.float64)
    for b in hl.tile(jt.num_rows):
        count = (jt.lengths[b] * jt.size(2)).to(torch.float32).clamp(min=1)
        total, square = hl.zeros([b]), hl.zeros([b])
        for k, m in hl.tile([jt.max_length, jt.size(2)]):
            total = total + jt[b, k, m].sum([1, 2])
        mean = total / count
        for k, m in hl.tile([jt.max_length, jt.size(2)]):
            square = square + (jt[b, k, m] - mean[:, None, None]).square().sum([1, 2])
        out[b, 0] = mean
        out[b, 1] = square / count
    return out


def by_feature(jt: JaggedTensor) -> torch.Tensor:
    """Of every feature alone, from products instead of squares; both begin with numbers of their own."""
    out = torch.empty([jt.num_rows, 2, jt.size(2)], dtype=torch.float64)
    for b in hl.tile(jt.num_rows):
        for m in hl.tile(jt.size(2)):
            count = jt.lengths[b][:, None].to(torch.float32).clamp(min=1)
            total, square = hl.zeros([b, m]) + 5, hl.zeros([b, m]) + 7
            for k in hl.tile(jt.max_length):
                total = total + jt[b, k, m].sum(1)
            mean = (total - 5) / count
            for k in hl.tile(jt.max_length):
                away = jt[b, k, m] - mean[:, None, :]
                square = square + (away * away).sum(1)
            out[b, 0, m] = mean
            out[b, 1, m] = (square - 7) / count
    return out


def around_another_value(jt: JaggedTensor) -> torch.Tensor:
    """Squares relative to twice the mean, which is not where they are least."""
    out = torch.empty([jt.num_rows, 2], dtype=torch.float64)
    for b in hl.tile(jt.num_rows):
        count = (jt.lengths[b] * jt.size(2)).to(torch.float32).clamp(min=1)
        total, square = hl.zeros([b]), hl.zeros([b])
        for k in hl.tile(jt.max_length):
            total = total + jt[b, k, :].sum([1, 2])
        twice = total / count * 2
        for k in hl.tile(jt.max_length):
            square = square + (jt[b, k, :] - twice[:, None, None]).square().sum([1, 2])
        out[b, 0] = twice
        out[b, 1] = square / count
    return out


def wanted(rows: list[torch.Tensor], dims: tuple[int, ...], times: int) -> torch.Tensor:
    found = []
    for row in rows:
        values = row.double()
        count = max(values.numel() // (values.size(1) if dims == (0,) else 1), 1)
        mean = values.sum(dims) / count * times
        found.append(torch.stack([mean, (values - mean).square().sum(dims) / count]))
    return torch.stack(found)


KERNELS: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "rows": (variances, (0, 1), 1),
    "features": (by_feature, (0,), 1),
    "another value": (around_another_value, (0, 1), 2),
}


def rows(dtype: torch.dtype, mean: float, lengths: tuple[int, ...] = LENGTHS) -> JaggedTensor:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(sum(lengths), 12, generator=generator, dtype=torch.float64) + mean).to(dtype)
    return JaggedTensor.from_lengths(values, list(lengths))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_rows_are_read_once_and_squares_do_not_cancel(name: str, dtype: torch.dtype, mean: float) -> None:
    function, dims, times = KERNELS[name]
    kernel = serrate.kernel(strategy="persistent_dynamic", lanes={"chunk": 64})(function)
    jt = rows(dtype, mean)
    assert "one_pass" in str(kernel.explain(jt))
    got, expected = kernel(jt), wanted(jt.unbind(), dims, times)
    # A mean is rounded to float32 on its way to the squares.
    torch.testing.assert_close(got[:, 0], expected[:, 0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got[:, 1], expected[:, 1], rtol=2e-5, atol=2e-5)


def test_an_outlier_at_the_beginning_of_a_row_does_not_hide_the_others() -> None:
    jt = rows(torch.float32, 0.0)
    jt.values[3] = 1e6
    got = serrate.kernel(strategy="persistent_dynamic", lanes={"chunk": 64})(by_feature)(jt)
    torch.testing.assert_close(got, wanted(jt.unbind(), (0,), 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("odd", [(math.inf,), (-math.inf,), (math.inf, -math.inf), (math.nan,), (3e38, 3e38)], ids=str)
def test_infinities_and_nan_come_out_as_in_two_passes(odd: tuple[float, ...]) -> None:
    jt = rows(torch.float32, 0.0)
    for place, number in enumerate(odd):
        jt.values[500 + 90 * place] = number
    kernel = serrate.kernel(strategy="persistent_dynamic", lanes={"chunk": 64})(by_feature)
    found = []
    for row in jt.unbind():
        mean = row.sum(0) / max(len(row), 1)
        found.append(torch.stack([mean, (row - mean).square().sum(0) / max(len(row), 1)]))
    torch.testing.assert_close(kernel(jt).float(), torch.stack(found), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_one_giant_row_has_the_same_bits_for_any_number_of_threads() -> None:
    kernel = serrate.kernel(strategy="persistent_dynamic")(variances)
    jt = rows(torch.float32, 3.0, (5, 60000, 0, 2))
    usual, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(kernel(jt))
    finally:
        torch.set_num_threads(usual)
    torch.testing.assert_close(found[0], wanted(jt.unbind(), (0, 1), 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def other_elements(jt: JaggedTensor, other: JaggedTensor) -> torch.Tensor:
    out = torch.empty(jt.num_rows)
    for b in hl.tile(jt.num_rows):
        total, square = hl.zeros([b]), hl.zeros([b])
        for k in hl.tile(jt.max_length):
            total = total + jt[b, k, :].sum([1, 2])
        for k in hl.tile(jt.max_length):
            square = square + (other[b, k, :] - total[:, None, None]).square().sum([1, 2])
        out[b] = square
    return out


def relative_to_itself(jt: JaggedTensor, other: JaggedTensor) -> torch.Tensor:
    out = torch.empty(jt.num_rows)
    for b in hl.tile(jt.num_rows):
        total, square = hl.zeros([b]), hl.zeros([b])
        for k in hl.tile(jt.max_length):
            total = total + jt[b, k, :].sum([1, 2])
        for k in hl.tile(jt.max_length):
            square = square + (jt[b, k, :] - jt[b, k, :] * total[:, None, None]).square().sum([1, 2])
        out[b] = square
    return out


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (other_elements, lambda x, y: (y - x.sum()).square().sum()),
        (relative_to_itself, lambda x, y: (x - x * x.sum()).square().sum()),
    ],
)
def test_what_only_looks_like_it_stays_two_passes(function: Any, reference: Any) -> None:
    kernel = serrate.kernel(strategy="persistent_dynamic", lanes={"chunk": 64})(function)
    lengths = [3, 300, 0, 70]
    jt, other = (JaggedTensor.from_lengths(torch.randint(-4, 5, (sum(lengths), 3)).double(), lengths) for _ in range(2))
    assert "one_pass" not in str(kernel.explain(jt, other))
    expected = [reference(x, y) for x, y in zip(jt.unbind(), other.unbind(), strict=True)]
    torch.testing.assert_close(kernel(jt, other), torch.stack(expected).float(), rtol=1e-5, atol=1e-5)


@serrate.kernel
def changed_between(jt: JaggedTensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.empty(jt.num_rows)
    for b in hl.tile(jt.num_rows):
        total, square = hl.zeros([b]), hl.zeros([b])
        for k in hl.tile(jt.max_length):
            total = total + (jt[b, k, :] * weights[b][:, None, None]).sum([1, 2])
        weights[b] = weights[b] * 2
        for k in hl.tile(jt.max_length):
            square = square + (jt[b, k, :] * weights[b][:, None, None] - total[:, None, None]).square().sum([1, 2])
        out[b] = square
    return out


def test_elements_that_are_stored_between_the_passes_are_read_again() -> None:
    jt = rows(torch.float32, 1.0, (3, 0, 5))
    recorder = Recorder(changed_between.on("reference").variants(jt, torch.ones(3))[0].program)
    with pytest.raises(ScheduleError, match="the loop over k does more than reduce a row"):
        recorder.do("one_pass", "changed_between", "k", "k2")
