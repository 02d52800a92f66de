"""Rows without features in C++: many positions reduced side by side, a part of the last ones; results written past the cache,
where rows end in the middle of a cache line; float16 converted in blocks. The oracle is plain torch, row by row."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator

import pytest
import torch

import serrate
from serrate import JaggedTensor
from serrate.codegen.cpp.printer import ABREAST
from serrate.runtime import cache, launch
from serrate.runtime.compiler import find_compiler

LENGTHS = (0, 1, 7, ABREAST - 1, ABREAST, ABREAST + 1, 0, 3 * ABREAST - 1, 3 * ABREAST, 4096, 4096 + ABREAST + 5, 2)


def rows_of(dtype: torch.dtype, repeat: int = 1) -> JaggedTensor:
    lengths = torch.tensor(LENGTHS * repeat)
    values = torch.randint(-50, 50, (int(lengths.sum()),), generator=torch.Generator().manual_seed(3))
    return JaggedTensor.from_lengths(values.to(dtype) / 8 if dtype.is_floating_point else values.to(dtype), lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_every_position_counts_once(dtype: torch.dtype) -> None:
    jt = rows_of(dtype)
    totals, largest = serrate.jit(lambda x: (x.sum(1), x.amax(1)))(jt)
    # Multiples of 1/8 are summed exactly, so that one position too many or too few shows.
    expected = torch.stack([row.to(torch.float64).sum() for row in jt.unbind()])
    assert torch.equal(totals, expected.to(totals.dtype))
    for row, found in zip(jt.unbind(), largest, strict=True):
        assert row.numel() == 0 or found == row.max()


@pytest.mark.parametrize("length", [1, ABREAST - 1, ABREAST, 2 * ABREAST + 3])
def test_nan_is_seen_wherever_it_stands(length: int) -> None:
    highest = serrate.jit(lambda jt: jt.amax(1))
    for place in range(length):
        values = torch.arange(float(length + 2))
        values[place] = float("nan")
        jt = JaggedTensor.from_lengths(values, torch.tensor([length, 2]))
        assert torch.equal(highest(jt).isnan(), torch.tensor([True, False])), place


@pytest.fixture
def past_the_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every result is written past the cache; afterwards the usual number of threads."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(launch, "last_level_cache", lambda: -1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("past_the_cache")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_end_within_a_cache_line(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    jt = rows_of(dtype, repeat=5)
    got = serrate.jit(lambda x: torch.softmax(x, 1))(jt)
    for row, result in zip(jt.unbind(), got.unbind(), strict=True):
        torch.testing.assert_close(result, torch.softmax(row.float(), 0).to(dtype), atol=2e-3, rtol=1e-2)


PIECES = """
extern "C" void pieces(void* const* pointer, const i64* given) {
  Stream stream;
  const i64* place = (const i64*)pointer[2];
  for (i64 n = 0; n < given[0]; n++) {
    const i64 begin = place[2 * n], end = place[2 * n + 1];
    if (given[1]) {
      const i32* from = (const i32*)pointer[1];
      stream.each((i32*)pointer[0], begin, end, given[1] > 1, [&](i32* __restrict to, i64 first, i64 count) {
        for (i64 k = 0; k < count; k++) to[k] = from[first + k];
      });
    } else {
      stream.copy((i32*)pointer[0] + begin, (const i32*)pointer[1] + begin, (end - begin) * sizeof(i32));
    }
  }
  stream.flush();
  stream_fence();
}
"""
COPIED, IN_CACHE, PAST = range(3)


@pytest.mark.parametrize("how", [COPIED, IN_CACHE, PAST])
@pytest.mark.parametrize("seed", range(20))
def test_a_stream_writes_its_pieces_and_nothing_else(seed: int, how: int) -> None:
    """Pieces that follow each other, and pieces that do not: what waits for a neighbour is written when another comes."""
    (function,) = cache.functions([cache.Unit("pieces", PIECES)], launch.PRELUDE, find_compiler())
    choice = random.Random(seed)
    bounds = sorted(choice.sample(range(2000), 90))
    pieces = [pair for pair in itertools.pairwise(bounds) if choice.random() < 0.8]
    pieces.append((bounds[-1] + 8, bounds[-1] + 3))
    if seed % 2:
        choice.shuffle(pieces)
    if how == COPIED:
        pieces = [(begin, end) for begin, end in pieces if begin < end]
    source = torch.randint(1, 2**30, (2048,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    got, expected = torch.zeros_like(source), torch.zeros_like(source)
    for begin, end in pieces:
        expected[begin:end] = source[begin:end]
    place = torch.tensor(pieces)
    given = (ctypes.c_longlong * 2)(len(pieces), how)
    function((ctypes.c_void_p * 3)(got.data_ptr(), source.data_ptr(), place.data_ptr()), given)
    assert torch.equal(got, expected)


def test_every_float16_is_converted_right() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    jt = JaggedTensor.from_lengths(every, torch.tensor([2**15 + 3, 2**15 - 3]))
    # Halves of the spacing between neighbours: ties, and what becomes subnormal or infinite.
    for factor in (1.0, 0.5, 1.5, 0.4999, 2.0):
        got = serrate.jit(lambda x, f: x * f)(jt, factor).values
        torch.testing.assert_close(got, every * factor, atol=0, rtol=0, equal_nan=True)
