"""Grid positions shared between threads in C++: every position is visited once, also if fewer threads run than were asked for."""

from __future__ import annotations

import ctypes

import pytest
import torch

from serrate.codegen.cpp.names import PRELUDE
from serrate.runtime import cache
from serrate.runtime.compiler import find_compiler
from serrate.schedule.plan import ORDERS

TEXT = """
extern "C" void visited(void* const* pointer, const i64* given) {
  i32* visits = (i32*)pointer[0];
  i64* order = (i64*)pointer[1];
  i64 done = 0;
  const int threads = (int)given[0];
  Part parts[threads];
  const Runs runs(parts, threads, given[2], given[3], given[4]);
#pragma omp parallel num_threads((int)given[1])
  for (Run run; runs.take(run);) for (i64 k = run.begin; k < run.end; k++) {
#pragma omp atomic
    visits[k]++;
    i64 place;
#pragma omp atomic capture
    place = done++;
    order[place] = k;
  }
}
"""


def _visited(threads: int, running: int, positions: int, most: int, order: str = "blocked") -> tuple[torch.Tensor, torch.Tensor]:
    (function,) = cache.functions([cache.Unit("visited", TEXT)], PRELUDE, find_compiler())
    visits, taken = torch.zeros(positions, dtype=torch.int32), torch.zeros(positions, dtype=torch.int64)
    addresses = (ctypes.c_void_p * 2)(visits.data_ptr(), taken.data_ptr())
    function(addresses, (ctypes.c_longlong * 5)(threads, running, positions, most, ORDERS.index(order)))
    return visits, taken


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("most", [1, 16])
@pytest.mark.parametrize("order", ORDERS)
def test_every_position_is_visited_once(threads: int, most: int, order: str) -> None:
    for positions in (0, 1, 2, 5, 31, 100, 4099):
        for running in {1, threads}:
            visits, _ = _visited(threads, running, positions, most, order)
            assert (visits == 1).all(), (positions, running, (visits != 1).nonzero().flatten()[:5])


def test_a_thread_takes_its_own_part_in_order_and_then_the_back_halves_of_others() -> None:
    _, order = _visited(threads=3, running=1, positions=24, most=1)
    # Of parts 8 to 15 and 16 to 23, always the larger rest: 12 to 15, then 20 to 23, and so on.
    taken = [12, 13, 14, 15, 20, 21, 22, 23, 10, 11, 18, 19, 9, 17, 8, 16]
    assert order.tolist() == [*range(8), *taken]


def test_other_orders() -> None:
    _, taken = _visited(threads=3, running=1, positions=8, most=1, order="interleaved")
    assert taken.tolist() == [0, 3, 6, 1, 4, 7, 2, 5]
    _, taken = _visited(threads=3, running=1, positions=8, most=1, order="shared")
    assert taken.tolist() == [*range(8)]
