"""Kernels that read an element, store to it, and read it again: the second read gives what was stored.

In: kernels with both reads in one body, or before and after a loop, a branch or an atomic addition. Out: a failure for a backend
or strategy that differs from a loop over plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor

Numbers = list[float]


def twice(x: torch.Tensor, out: torch.Tensor) -> None:
    for r in hl.tile(x.size(0)):
        out[r] = out[r] + x[r]
        out[r] = out[r] * 2


def twice_plain(x: Numbers, out: Numbers) -> None:
    for r in range(len(x)):
        out[r] = (out[r] + x[r]) * 2


def in_place(x: torch.Tensor, out: torch.Tensor) -> None:
    for r in hl.tile(x.size(0)):
        out[r] += x[r]
        out[r] *= out[r]
        x[r] = out[r]


def in_place_plain(x: Numbers, out: Numbers) -> None:
    for r in range(len(x)):
        x[r] = out[r] = (out[r] + x[r]) ** 2


def stored(x: torch.Tensor, out: torch.Tensor) -> None:
    for r in hl.tile(x.size(0)):
        before = hl.load(out, [r])
        hl.store(out, [r], before + x[r])
        x[r] = hl.load(out, [r]) - before


def stored_plain(x: Numbers, out: Numbers) -> None:
    for r in range(len(x)):
        out[r] += x[r]


def atomic(x: torch.Tensor, out: torch.Tensor) -> None:
    for r in hl.grid(x.size(0)):
        before = out[r]
        hl.atomic_add(out, [r], x[r])
        x[r] = out[r] * 10 + before


def atomic_plain(x: Numbers, out: Numbers) -> None:
    for r in range(len(x)):
        before = out[r]
        out[r] += x[r]
        x[r] = out[r] * 10 + before


def around_a_loop(x: torch.Tensor, out: torch.Tensor) -> None:
    for r in hl.tile(x.size(0)):
        first = out[r] * 2
        for _ in hl.grid(3):
            out[r] = out[r] * 2 + x[r]
        x[r] = first - out[r] * 2


def around_a_loop_plain(x: Numbers, out: Numbers) -> None:
    for r in range(len(x)):
        first = out[r] * 2
        for _ in range(3):
            out[r] = out[r] * 2 + x[r]
        x[r] = first - out[r] * 2


def around_a_branch(x: torch.Tensor, out: torch.Tensor) -> None:
    for r in hl.grid(x.size(0)):
        first = out[r]
        if x[r] > 1:
            out[r] = first + 7
        else:
            out[r] = out[r] - 1
        x[r] = out[r] * 100 + first


def around_a_branch_plain(x: Numbers, out: Numbers) -> None:
    for r in range(len(x)):
        first = out[r]
        out[r] = first + 7 if x[r] > 1 else first - 1
        x[r] = out[r] * 100 + first


def repeated(x: torch.Tensor, out: torch.Tensor) -> None:
    for r in hl.grid(x.size(0)):
        while out[r] < 5:
            out[r] = out[r] + 2


def repeated_plain(x: Numbers, out: Numbers) -> None:
    for r in range(len(x)):
        while out[r] < 5:
            out[r] += 2


def neighbours(x: torch.Tensor, out: torch.Tensor) -> None:
    for _ in hl.grid(1):
        for r in hl.grid(1, x.size(0)):
            out[r] = out[r - 1] + out[r]
            x[r] = out[r] * out[r - 1]


def neighbours_plain(x: Numbers, out: Numbers) -> None:
    for r in range(1, len(x)):
        out[r] += out[r - 1]
        x[r] = out[r] * out[r - 1]


KERNELS: dict[str, tuple[Callable[..., None], Callable[[Numbers, Numbers], None]]] = {
    "twice": (twice, twice_plain),
    "in place": (in_place, in_place_plain),
    "load and store": (stored, stored_plain),
    "an atomic addition": (atomic, atomic_plain),
    "around a loop": (around_a_loop, around_a_loop_plain),
    "around a branch": (around_a_branch, around_a_branch_plain),
    "repeated until large": (repeated, repeated_plain),
    "neighbours": (neighbours, neighbours_plain),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic", None])
@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", KERNELS)
def test_elements_are_read_again(name: str, backend: str, strategy: str | None) -> None:
    written, plain = KERNELS[name]
    for size in (1, 7, 40):
        x, out = (torch.arange(size, dtype=torch.float32) % k - 1 for k in (5, 7))
        wanted: Any = x.tolist(), out.tolist()
        plain(*wanted)
        serrate.kernel(written, strategy=strategy).on(backend)(x, out)
        assert (x.tolist(), out.tolist()) == wanted


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_rows_are_read_again(backend: str) -> None:
    @serrate.kernel
    def k(x: JaggedTensor, out: JaggedTensor) -> None:
        for b in hl.tile(x.num_rows):
            for t in hl.tile(x.max_length, block_size=4):
                out[b, t] = out[b, t] + x[b, t]
                out[b, t] = out[b, t] * 2 + x[b, t]

    x = JaggedTensor.from_lengths(torch.arange(20.0), [3, 0, 11, 6])
    out = x.with_values(torch.ones(20))
    k.on(backend)(x, out)
    assert torch.equal(out.values, (1 + x.values) * 2 + x.values)
