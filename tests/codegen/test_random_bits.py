"""Random bits in C++: runs of positions with vectors of each width, and one position at a time, against Python integers."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch

from serrate.codegen.cpp.names import PRELUDE
from serrate.runtime import cache
from serrate.runtime.compiler import find_compiler
from tests.engine.test_random import words

TEXT = """
extern "C" void drawn(void* const* pointer, const i64* given) {
  const i32* run = random_run((u32*)pointer[0], given[0], given[1], given[2], given[3]);
  for (i64 k = 0; k < given[3]; k++) {
    ((i32*)pointer[1])[k] = run[k];
    ((i32*)pointer[2])[k] = random_bits(given[0], given[1], given[2] + k);
  }
}
"""
CPU = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists() else ""
TARGETS = [(), *([("-march=x86-64",)] if CPU else []), *([("-march=haswell",)] if "avx2" in CPU and "fma" in CPU else [])]


@pytest.mark.parametrize("flags", TARGETS, ids=str)
def test_runs_of_positions(flags: tuple[str, ...]) -> None:
    (function,) = cache.functions([cache.Unit("drawn", TEXT)], PRELUDE, find_compiler(flags))
    for first, count in ((0, 5), (3, 70), (2**34 - 9, 40), (1, 0), (6, 1), (4, 64), (2, 129)):
        # As much room as programs have, and something after it that must stay.
        to = torch.full((count + 68,), 77, dtype=torch.int32)
        runs, singles = torch.zeros(2, count, dtype=torch.int32)
        addresses = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in (to, runs, singles)))
        function(addresses, (ctypes.c_longlong * 4)(0x0123456789ABCDEF, 2, first, count))
        want = [w - 2**32 * (w >= 2**31) for w in words(0x0123456789ABCDEF, count, word=2, first=first)]
        assert runs.tolist() == want and singles.tolist() == want, (first, count)
        assert int(to[-1]) == 77
