"""Results of kernels that go past the cache: here every result does. The oracle is plain torch, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.runtime import launch

LENGTHS = (5, 300, 0, 17, 1000, 64, 3)


@pytest.fixture(autouse=True)
def past_the_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No result is small enough to stay; afterwards the usual number of threads."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(launch, "last_level_cache", lambda: -1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_read_ends_at_several_places(dtype: torch.dtype, threads: int) -> None:
    """A row, a dense batch and the result each end somewhere else, and where changes from call to call."""
    torch.set_num_threads(threads)

    @serrate.kernel
    def k(jt: JaggedTensor, dense: torch.Tensor, columns: int) -> torch.Tensor:
        out = torch.empty([jt.num_rows, columns], dtype=dense.dtype)
        for row in hl.tile(jt.num_rows):
            for col in hl.tile(columns):
                out[row, col] = dense[row, col] + jt[row, col] + 1
        return out

    jt = JaggedTensor.from_lengths(torch.randint(-8, 8, (sum(LENGTHS),)).to(dtype), list(LENGTHS))
    for width, columns in ((1000, 1000), (700, 1003), (1203, 1000), (2, 257), (300, 299), (0, 70)):
        dense = torch.randint(-8, 8, (len(LENGTHS), width)).to(dtype)
        wanted = torch.ones(len(LENGTHS), columns, dtype=dtype)
        for row, own, other in zip(wanted, jt.unbind(), dense, strict=True):
            first, second = torch.zeros(2, columns, dtype=dtype)
            first[: len(own)] = own[:columns]
            second[: len(other)] = other[:columns]
            row[:] = second + first + 1
        assert torch.equal(k(jt, dense, columns), wanted)


def test_what_is_added_to_a_result_is_not_stored_over_it() -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(1))
        for r in hl.tile(x.size(0)):
            for t in hl.tile(x.size(1)):
                hl.atomic_add(out, [t], x[r, t].sum(0))
        return out

    x = torch.randn(40, 3000)
    torch.testing.assert_close(k(x), x.sum(0), atol=1e-4, rtol=1e-4)


def test_a_result_that_is_read_again_is_there() -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> tuple[JaggedTensor, torch.Tensor]:
        out, totals = torch.empty_like(jt), torch.empty(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(jt.max_length):
                out[b, t] = jt[b, t] * 2 + 1
            total = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                total = total + out[b, t].sum(1)
            totals[b] = total
        return out, totals

    jt = JaggedTensor.from_lengths(torch.arange(float(sum(LENGTHS))) % 7, list(LENGTHS))
    out, totals = k(jt)
    assert torch.equal(out.values, jt.values * 2 + 1)
    assert totals.tolist() == [float((row * 2 + 1).sum()) for row in jt.unbind()]
