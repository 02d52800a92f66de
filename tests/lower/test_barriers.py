"""Barriers between accesses of a program to the same memory: where they are needed, and only there.

In: kernels that read what they have stored, or store again. Out: failures where a barrier is missing or needless. Results are
compared with plain Python loops; Triton's interpreter, as patched for tests, raises where a barrier is missing before a read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.ir.loops import Barrier, For, LoopProgram, Node, bodies
from serrate.ir.tile import SERIAL

pytestmark = pytest.mark.triton


def barriers(body: tuple[Node, ...], inside: int = 0) -> list[int]:
    """For each barrier, the number of loops in a program that it is inside."""
    found: list[int] = []
    for node in body:
        if isinstance(node, Barrier):
            found.append(inside)
        deeper = inside + (isinstance(node, For) and node.kind is SERIAL)
        for part in bodies(node):
            found += barriers(part, deeper)
    return found


def of(kernel: Any, *args: Any) -> list[int]:
    (variant,) = kernel.on("triton").variants(*args)
    program: LoopProgram = variant.executable.program
    return [place for k in program.kernels for place in barriers(k.body)]


def through_memory(jt: JaggedTensor, kept: torch.Tensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.grid(jt.num_rows):
        for k in hl.tile(jt.lengths[b], block_size=8):
            kept[b, k] = jt[b, k] * 2
        for k in hl.tile(jt.lengths[b], block_size=4):
            out[b, k] = kept[b, k] + 1
    return out


def running(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.size(0))
    for _ in hl.grid(1):
        for k in hl.grid(1, x.size(0)):
            out[k] = out[k - 1] + x[k]
    return out


def doubled_in_place(jt: JaggedTensor) -> JaggedTensor:
    for b in hl.grid(jt.num_rows):
        for k in hl.tile(jt.max_length, block_size=4):
            jt[b, k] = jt[b, k] * 2
    return jt


def read_again(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    for i in hl.tile(x.size(0)):
        x[i] = x[i] + 1
        out[i] = x[i] * 10
    return out


def overwritten(x: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    for i in hl.tile(x.size(0)):
        before = x[i]
        x[i] = torch.zeros_like(before)
        old[i] = before
    return old


def summed_and_doubled(x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    for i in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1), block_size=8):
            each = x[i, k]
            sums[i] = each.sum()
            x[i, k] = each * 2
    return sums


def filled_then_scattered(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    for _ in hl.grid(1):
        for i in hl.tile(out.size(0), block_size=16):
            out[i] = hl.zeros([i]) - 1
        for i in hl.tile(x.size(0), block_size=4):
            out[i.index * 2] = x[i]
    return out


def added(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    for i in hl.tile(x.size(0)):
        hl.atomic_add(out, [i.index // 2], x[i])
        hl.atomic_add(out, [i.index // 3], x[i])
    return out


def rotated(x: JaggedTensor) -> JaggedTensor:
    """Each half of the columns is computed from both."""
    out = torch.empty_like(x)
    for b in hl.grid(x.num_rows):
        for k in hl.tile(x.lengths[b], block_size=4):
            out[b, k, 0:3] = x[b, k, 0:3] - x[b, k, 3:6]
            out[b, k, 3:6] = x[b, k, 0:3] + x[b, k, 3:6]
    return out


def test_stores_to_different_columns_do_not_wait_for_each_other() -> None:
    x, kernel = JaggedTensor.from_lengths(torch.randn(30, 6), [19, 0, 11]), serrate.kernel(rotated)
    assert of(kernel, x) == []
    low, high = x.values[:, :3], x.values[:, 3:]
    torch.testing.assert_close(kernel.on("triton")(x).values, torch.cat([low - high, low + high], 1))


def test_an_iteration_does_not_wait_for_other_positions() -> None:
    def swapped(x: JaggedTensor) -> JaggedTensor:
        for b in hl.grid(x.num_rows):
            for k in hl.tile(x.lengths[b], block_size=4):
                low, high = x[b, k, 0:3], x[b, k, 3:6]
                x[b, k, 0:3] = low - high
                x[b, k, 3:6] = low + high
        return x

    x, kernel = JaggedTensor.from_lengths(torch.randn(30, 6), [19, 0, 11]), serrate.kernel(swapped)
    low, high = x.values[:, :3].clone(), x.values[:, 3:].clone()
    # Within an iteration, the stores wait for the threads that use what they replace.
    assert of(kernel, x) == [1]
    torch.testing.assert_close(kernel.on("triton")(x).values, torch.cat([low - high, low + high], 1))


def test_stores_to_columns_that_overlap_wait_for_each_other() -> None:
    def overlapping(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for i in hl.tile(x.size(0), block_size=4):
            out[i, 0:4] = x[i, 0:4]
            out[i, 3:6] = -x[i, 3:6]
        return out

    x, kernel = torch.randn(9, 6), serrate.kernel(overlapping)
    assert len(of(kernel, x, torch.zeros(9, 6))) == 1
    torch.testing.assert_close(kernel.on("triton")(x, torch.zeros(9, 6)), torch.cat([x[:, :3], -x[:, 3:]], 1))


def test_a_loop_waits_once_for_what_the_loop_before_has_stored() -> None:
    jt = JaggedTensor.from_lengths(torch.randn(30), [19, 0, 11])
    kernel, kept = serrate.kernel(through_memory), torch.zeros(3, 20)
    assert of(kernel, jt, kept) == [0]
    torch.testing.assert_close(kernel.on("triton")(jt, kept).values, jt.values * 2 + 1)


def test_an_iteration_waits_for_the_one_before() -> None:
    x, kernel = torch.randn(9), serrate.kernel(running)
    places = of(kernel, x)
    assert places and 1 in places
    wanted = [0.0]
    for each in x[1:].tolist():
        wanted.append(wanted[-1] + each)
    torch.testing.assert_close(kernel.on("triton")(x), torch.tensor(wanted))


def test_elements_that_are_read_only_where_they_are_stored_need_none() -> None:
    jt = JaggedTensor.from_lengths(torch.randn(30), [19, 0, 11])
    kernel, wanted = serrate.kernel(doubled_in_place), jt.values * 2
    assert of(kernel, jt) == []
    torch.testing.assert_close(kernel.on("triton")(jt).values, wanted)


@pytest.mark.parametrize(
    ("function", "count", "wanted"),
    [
        (read_again, 1, lambda x: (x + 1) * 10),
        # The stored zeros do not wait for what was read.
        (overwritten, 1, torch.clone),
    ],
)
def test_stores_and_reads_of_one_element(
    function: Callable[..., Any], count: int, wanted: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x, kernel = torch.randn(37), serrate.kernel(function)
    expected = wanted(x)
    assert len(of(kernel, x, torch.zeros(37))) == count
    torch.testing.assert_close(kernel.on("triton")(x, torch.zeros(37)), expected)


def test_a_store_waits_for_threads_that_use_what_was_there() -> None:
    x, kernel = torch.randn(3, 20), serrate.kernel(summed_and_doubled)
    last, doubled = x[:, 16:].sum(1), x * 2
    assert of(kernel, x, torch.zeros(3)) == [1]
    torch.testing.assert_close(kernel.on("triton")(x, torch.zeros(3)), last)
    torch.testing.assert_close(x, doubled)


def test_a_second_store_waits_for_the_first() -> None:
    x, kernel = torch.randn(7), serrate.kernel(filled_then_scattered)
    wanted = -torch.ones(16)
    wanted[:14:2] = x
    assert of(kernel, x, torch.zeros(16)) == [0]
    torch.testing.assert_close(kernel.on("triton")(x, torch.zeros(16)), wanted)


def test_atomic_additions_do_not_wait_for_each_other() -> None:
    x, kernel = torch.randn(12), serrate.kernel(added)
    wanted = torch.zeros(6)
    for at, value in enumerate(x.tolist()):
        wanted[at // 2] += value
        wanted[at // 3] += value
    assert of(kernel, x, torch.zeros(6)) == []
    torch.testing.assert_close(kernel.on("triton")(x, torch.zeros(6)), wanted)


def overlapping(x: torch.Tensor, n: int) -> torch.Tensor:
    """The last store of an element is that of another lane than the one before."""
    out = torch.zeros(x.size(0) + 16)
    for _ in hl.grid(1):
        for k in hl.grid(n):
            i = hl.arange(64)
            out[i + k] = x[i] * (k + 1)
    return out


def in_turn(x: torch.Tensor, t: torch.Tensor, n: int) -> torch.Tensor:
    """The second of two rows is the first of the next two."""
    out = torch.zeros(x.size(0))
    for _ in hl.grid(1):
        for k in hl.grid(n):
            for j in hl.grid(2):
                i = hl.arange(64)
                t[k + j, i] = x[i] * (k + 1) + j
                out[i] = t[k + j, 63 - i]
    return out


def chained(x: torch.Tensor, t: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The wait for `u`, from the iteration before, makes the wait for `v` needless; that one also served `t`."""
    for _ in hl.grid(1):
        i = hl.arange(4)
        for k in hl.grid(x.size(0)):
            count = t[i]
            v[i] = x[k, :]
            total = u[i]
            t[i] = count + 1
            v[i] = v[i] * 2
            u[i] = total + x[k, :]
    return t


def scattered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.size(0))
    for _ in hl.grid(1):
        for k in hl.tile(x.size(0), block_size=8):
            out[places[k]] = x[k] * 2
    return out


def test_iterations_that_store_again_at_other_lanes_wait() -> None:
    x, n = torch.randn(64), 5
    wanted = torch.zeros(80)
    for k in range(n):
        wanted[k : k + 64] = x * (k + 1)
    kernel = serrate.kernel(overlapping)
    torch.testing.assert_close(kernel.on("triton")(x, n), wanted)
    assert set(of(kernel, x, n)) == {1}


def test_an_outer_iteration_waits_for_what_inner_ones_have_stored() -> None:
    x, t, n = torch.randn(64), torch.zeros(20, 64), 5
    kernel = serrate.kernel(in_turn)
    torch.testing.assert_close(kernel.on("triton")(x, t, n), (x * n + 1).flip(0))
    assert 1 in of(kernel, x, t, n)


def test_a_wait_that_moves_leaves_others_to_be_waited_for() -> None:
    x, (t, u, v) = torch.randn(5, 4), torch.zeros(3, 4)
    torch.testing.assert_close(serrate.kernel(chained).on("triton")(x, t, u, v), torch.full((4,), 5.0))
    torch.testing.assert_close((u, v), (x.sum(0), x[4] * 2))


def test_iterations_that_store_at_indices_from_memory_do_not_wait() -> None:
    """These are assumed to be distinct, as in torch."""
    x, places = torch.randn(30), torch.randperm(30)
    kernel = serrate.kernel(scattered)
    assert of(kernel, x, places) == []
    torch.testing.assert_close(kernel.on("triton")(x, places)[places], x * 2)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_block_that_is_carried_is_used_iterations_later(delay: int) -> None:
    """What replaces it waits for the threads that have not read it yet, however many iterations carry the block."""

    def once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in hl.grid(1):
            i = hl.arange(64)
            a = hl.zeros([64])
            for n in hl.grid(x.size(0)):
                y[n, i] = a
                a = x[n, i]
                x[n, i] = torch.zeros_like(a)
        return y

    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in hl.grid(1):
            i = hl.arange(64)
            a = hl.zeros([64])
            b = hl.zeros([64])
            for n in hl.grid(x.size(0)):
                y[n, i] = b
                b = a
                a = x[n, i]
                x[n, i] = torch.zeros_like(a)
        return y

    def thrice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in hl.grid(1):
            i = hl.arange(64)
            a = hl.zeros([64])
            b = hl.zeros([64])
            c = hl.zeros([64])
            for n in hl.grid(x.size(0)):
                y[n, i] = c
                c = b
                b = a
                a = x[n, i]
                x[n, i] = torch.zeros_like(a)
        return y

    kernel = serrate.kernel((once, twice, thrice)[delay - 1])
    x = torch.randn(5, 64)
    assert of(kernel, x.clone(), torch.zeros(5, 64)) == [1]
    wanted = torch.cat([torch.zeros(delay, 64), x[: 5 - delay]])
    torch.testing.assert_close(kernel.on("triton")(x, torch.zeros(5, 64)), wanted)
