"""Everything that is shared, under threads: traced functions, eager operators, kernels, caches and the pool of memory.

In: threads that start together. Out: failures against plain torch. Each thread does the same calls, first and warm, on cpp.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, jit
from serrate.runtime import memory

THREADS = 8


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Runs the work in threads that begin at once; raises what one of them raised."""
    barrier, errors = threading.Barrier(threads), []

    def run(k: int) -> None:
        barrier.wait()
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(k,)) for k in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def rows(lengths: list[int], width: int = 3) -> JaggedTensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), width, generator=generator), lengths)


def made(k: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A function of its own that closes over tensors, and what it computes of the values."""
    first, second = torch.full((3,), float(k)), [torch.full((1,), 2.0), torch.full((3,), 3.0)]

    def function(x: Any) -> Any:
        return torch.relu(x * first + second[0]) - second[1] * k

    return jit(function), function


def test_first_calls_of_functions_that_close_over_tensors() -> None:
    pairs = [made(k) for k in range(6)]
    xs = [rows([2, 0, 3]), rows([1, 4]), rows([5])]

    def work(k: int) -> None:
        for turn in range(3):
            for function, plain in pairs[k % len(pairs) :] + pairs[: k % len(pairs)]:
                x = xs[(k + turn) % len(xs)]
                torch.testing.assert_close(function(x).values, plain(x.values))

    together(work)
    work(0)


def test_many_states_and_kinds_of_one_function() -> None:
    """More states and prepared calls than are kept."""
    names: dict[str, Any] = {"torch": torch}
    exec("def f(x, cfg): return x * cfg.scale + cfg.shift", names)

    class Config:
        def __init__(self, scale: float, shift: torch.Tensor) -> None:
            self.scale, self.shift = scale, shift

    function = jit(names["f"], backend="reference")

    def work(k: int) -> None:
        for turn in range(12):
            config = Config(float((k + turn) % 20), torch.full((1,), float(k)))
            x = rows([turn % 4 + 1, k])
            torch.testing.assert_close(function(x, config).values, x.values * config.scale + config.shift)

    with pytest.warns(UserWarning, match="was retraced"):
        together(work)


class Scaled:
    def __init__(self, scale: float) -> None:
        self.w = torch.full((3,), scale)

    @jit
    def run(self, x: Any) -> Any:
        return x * self.w


def test_methods_of_objects_that_come_and_go() -> None:
    x = rows([2, 3])

    def work(k: int) -> None:
        for turn in range(4):
            own = Scaled(float(k + turn))
            torch.testing.assert_close(own.run(x).values, x.values * own.w)
            del own

    together(work)
    gc.collect()


def test_eager_operators_and_structures() -> None:
    shared = [rows([2, 0, 3]), rows([4, 1])]

    def work(k: int) -> None:
        for turn in range(6):
            x = shared[turn % 2]
            own = rows([k + 1, turn])
            for jt in (x, own):
                torch.testing.assert_close((jt * 2.5 + float(turn + 10 * k)).values, jt.values * 2.5 + float(turn + 10 * k))
                torch.testing.assert_close(jt.sum(1), torch.stack([row.sum(0) for row in jt]))
                torch.testing.assert_close(torch.softmax(jt, 1).values, torch.cat([row.softmax(0) for row in jt]))
                assert jt.max_length == max(len(row) for row in jt)
                torch.testing.assert_close(jt.to_padded()[0, : len(jt[0])], jt[0])

    together(work)


def test_functions_in_stages() -> None:
    """Offsets that are computed, so that structures are remembered in the middle of a call."""

    def routed(x: Any, keys: Any) -> Any:
        offsets, order = serrate.ops.group_by(keys, 3)
        return serrate.ops.as_nested(serrate.ops.index(x, order), offsets).sum(1)

    function = jit(routed)

    def work(k: int) -> None:
        for turn in range(5):
            generator = torch.Generator().manual_seed(100 * k + turn)
            x, keys = torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator)
            wanted = torch.stack([x[keys == e].sum(0) for e in range(3)])
            torch.testing.assert_close(function(x, keys), wanted)

    together(work)


@serrate.kernel
def row_sums(jt: Any, scale: float) -> Any:
    out = torch.empty(jt.num_rows)
    for tile_b in hl.tile(jt.num_rows):
        total = hl.zeros([tile_b])
        for tile_k in hl.tile(jt.max_length):
            total = total + jt[tile_b, tile_k].sum(1)
        out[tile_b] = total * scale
    return out


def test_kernels() -> None:
    shared = JaggedTensor.from_lengths(torch.arange(9.0), [4, 0, 5])

    def work(k: int) -> None:
        for turn in range(6):
            own = JaggedTensor.from_lengths(torch.arange(float(k + turn + 1)), [k, turn, 1])
            for jt in (shared, own):
                wanted = torch.tensor([float(row.sum()) for row in jt]) * float(turn + 1)
                torch.testing.assert_close(row_sums(jt, float(turn + 1)), wanted)

    together(work)


def test_memory_of_large_results_is_never_shared() -> None:
    x = JaggedTensor.from_lengths(torch.ones(1 << 19), [1 << 18, 1 << 18])

    def work(k: int) -> None:
        held: list[Any] = []
        for turn in range(10):
            held.append((x * float(k * 10 + turn), float(k * 10 + turn)))
            if turn % 3 == 2:
                held.pop(0)
            for result, wanted in held:
                assert (result.values == wanted).all()

    together(work)
    assert memory.kept() <= memory.LIMIT


def test_a_function_that_calls_another_while_both_are_traced() -> None:
    w = torch.full((3,), 2.0)

    @jit
    def inner(x: Any) -> Any:
        return x * w

    @jit
    def outer(x: Any) -> Any:
        return inner(x) + inner(x * 2)

    x = rows([2, 3])

    def work(k: int) -> None:
        if k % 2:
            torch.testing.assert_close(inner(x).values, x.values * 2)
        torch.testing.assert_close(outer(x).values, x.values * 6)

    together(work)
