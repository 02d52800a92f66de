"""Branches on runtime values: names that are set in one side or in both.

In: kernels as users write them. The oracle is plain Python, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, errors

BACKENDS = ["cpp", "triton"]
LENGTHS = [3, 0, 9, 70]


def rows() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0)), LENGTHS)


@serrate.kernel
def by_length(x: JaggedTensor, least: int) -> JaggedTensor:
    out = torch.empty_like(x)
    for b in hl.grid(x.num_rows):
        if x.lengths[b] > least:
            for k in hl.tile(x.max_length):
                own = x[b, k]
                out[b, k] = own * 2
        else:
            for k in hl.tile(x.max_length):
                own = -x[b, k]
                out[b, k] = own
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_sides_may_have_loops_over_tiles_of_one_name(backend: str) -> None:
    x = rows()
    wanted = torch.cat([row * 2 if len(row) > 5 else -row for row in x.unbind()])
    assert torch.equal(by_length.on(backend)(x, 5).values, wanted)


@serrate.kernel
def steps(x: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.num_rows, dtype=torch.int64)
    for b in hl.grid(x.num_rows):
        left, taken = x.lengths[b] * 1, hl.zeros([], dtype=torch.int64)
        more = left
        while more > 1:
            if left % 2 == 0:
                more = left // 2
            else:
                more = 3 * left + 1
            left = more
            taken = taken + 1
        out[b] = taken
    return out


def collatz(n: int) -> int:
    return 0 if n <= 1 else 1 + collatz(n // 2 if n % 2 == 0 else 3 * n + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_condition_reads_what_a_branch_of_its_loop_sets(backend: str) -> None:
    assert steps.on(backend)(rows()).tolist() == [collatz(n) for n in LENGTHS]


@serrate.kernel
def until(x: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.num_rows, dtype=torch.int64)
    for b in hl.grid(x.num_rows):
        left = x.lengths[b] * 1
        more = left > 4
        while more:
            left = left - 3
            if left > 20:
                more = left > 30
            else:
                more = left > 10
        out[b] = left
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_condition_alone_reads_what_a_branch_sets(backend: str) -> None:
    def wanted(n: int) -> int:
        more = n > 4
        while more:
            n -= 3
            more = n > 30 if n > 20 else n > 10
        return n

    assert until.on(backend)(rows()).tolist() == [wanted(n) for n in LENGTHS]


def added(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.grid(x.num_rows):
        if x.lengths[b] > 5:
            own = x.lengths[b] * 2
        out[b] = own + 1
    return out


def stored(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.grid(x.num_rows):
        if x.lengths[b] > 5:
            own = x.lengths[b] * 2
        out[b] = own
    return out


def called(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.grid(x.num_rows):
        if x.lengths[b] > 5:
            own = x.lengths[b] * 2
        out[b] = torch.exp(own)
    return out


def asked(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.grid(x.num_rows):
        if x.lengths[b] > 5:
            own = x.lengths[b] * 2
        else:
            out[b] = 1.0
        if own > 3:
            out[b] = 2.0
    return out


@pytest.mark.parametrize("written", [added, stored, called, asked], ids=lambda f: f.__name__)
def test_a_name_that_one_side_sets_is_refused_where_it_is_read(written: Callable[..., Any]) -> None:
    with pytest.raises(errors.KernelError, match="own may not be set: the condition of the `if`"):
        serrate.kernel(written)(rows())
