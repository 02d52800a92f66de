"""Programs on which compiled kernels once gave other numbers than the interpreter, as small as they get.

In: kernels of a few lines, each called as it was when it failed. Out: a failure for a backend that differs from the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor

BACKENDS = ("reference", "cpp")
Given = Callable[[], tuple[Any, ...]]


def ragged(lengths: list[int], *inner: int) -> JaggedTensor:
    torch.manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *inner), lengths)


def same(function: Any, backend: str, *calls: Given, lanes: dict[str, int] | None = None) -> None:
    """Every call, one after the other on one kernel, against the interpreter; arguments are made anew, since kernels may store to them."""
    kernel = serrate.kernel(function.fn, config=function.config, **({"lanes": lanes} if lanes else {}))
    for given in calls:
        wanted, found = function.interpreted(tile=1)(*given()), kernel.on(backend)(*given())
        for w, f in zip(*((x if isinstance(x, tuple) else (x,)) for x in (wanted, found)), strict=True):
            pair = [x.values if isinstance(x, JaggedTensor) else x for x in (f, w)]
            torch.testing.assert_close(*pair, equal_nan=True)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.xfail(strict=True, reason="a first dim that is compiled in is not part of the key of a program")
def test_a_slice_of_a_dim_that_changes(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(1))
        for t in hl.tile(x.size(1)):
            out[t] = x[:, t].sum(0)
        return out

    same(k, backend, lambda: (torch.ones(3, 4),), lambda: (torch.ones(5, 4),))


@pytest.mark.xfail(strict=True, reason="a number that is a row count in one call only: KeyError")
def test_a_number_that_is_sometimes_a_row_count(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.zeros(8)
        for t in hl.tile(n):
            out[t] = x[t]
        return out

    same(k, backend, lambda: (torch.ones(3), 3), lambda: (torch.ones(3), 2), lambda: (torch.ones(5), 1))


@pytest.mark.xfail(strict=True, reason="a block that happens to be a length is refused")
def test_a_block_that_is_also_a_length(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        block = 4
        out = torch.zeros(2, dtype=torch.int64)
        for g in hl.grid(2):
            out[g] = jt.total_tiles(block) + hl.arange(block).sum()
        return out

    same(k, backend, lambda: (ragged([5, 4]),), lambda: (ragged([4, 4]),))


@pytest.mark.xfail(strict=True, reason="a loop ends with the row although something dense goes on")
@pytest.mark.parametrize("lanes", [{"b": 1, "t": 1}, {"b": 3, "t": 1}])
def test_a_dense_sum_beside_a_ragged_one(backend: str, lanes: dict[str, int]) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, two = torch.zeros(jt.num_rows), torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            own, all_of_it = hl.zeros([b]), hl.zeros([b])
            for t in hl.tile(dense.size(1)):
                own = own + jt[b, t].sum(1)
                all_of_it = all_of_it + dense[b, t].sum(1)
            out[b], two[b] = own, all_of_it
        return out, two

    same(k, backend, lambda: (ragged([2, 0, 5]), torch.ones(3, 7)), lanes=lanes)


@pytest.mark.xfail(strict=True, reason="a loop ends with the row although a counter goes on")
def test_a_counter_beside_a_ragged_sum(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, counts = torch.zeros(jt.num_rows), torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            own, count = hl.zeros([b]), hl.zeros([b])
            for t in hl.tile(n, block_size=1):
                own = own + jt[b, t].sum(1)
                count = count + 1
            out[b], counts[b] = own, count
        return out, counts

    same(k, backend, lambda: (ragged([2, 0, 5]), 7))


@pytest.mark.xfail(strict=True, reason="a load happens where it is used, behind a store")
def test_two_tensors_change_places(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for t in hl.tile(x.size(0)):
            a, b = x[t], y[t]
            x[t] = b
            y[t] = a
        return x, y

    same(k, backend, lambda: (torch.arange(5.0), torch.arange(5.0) + 10))


@pytest.mark.xfail(strict=True, reason="a sum moves behind the store that empties what it sums")
def test_a_sum_of_what_is_then_emptied(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(2)
        for g in hl.grid(2):
            acc = hl.zeros([])
            for t in hl.tile(x.size(1)):
                acc = acc + x[g, t].sum()
                x[g, t] = hl.zeros([t])
            out[g] = acc
        return out, x

    same(k, backend, lambda: (torch.ones(2, 5),))


def test_a_branch_changes_a_value(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in hl.tile(x.size(0), block_size=2):
            y = x[t]
            if t.begin > 1:
                y = y * 2
            out[t] = y
        return out

    same(k, backend, lambda: (torch.ones(5),))


@pytest.mark.xfail(strict=True, reason="a row rests although the branch that ran has nothing ragged")
def test_a_branch_without_rows_does_not_rest(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, n: int) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(n, block_size=2):
                if t.begin > 1:
                    acc = acc * 0.5 + jt[b, t].sum(1)
                else:
                    acc = acc + 1
            out[b] = acc
        return out

    same(k, backend, lambda: (ragged([2, 0, 5]), 8))
