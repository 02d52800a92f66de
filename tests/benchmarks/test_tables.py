"""The tables: every method computes its task correctly, and verdicts are right."""

from __future__ import annotations

import dataclasses
import io
import time

import pytest
import torch
from rich.console import Console

from benchmarks import cells, limits, memory, methods, peers, report, tasks
from benchmarks.measure import Timing, measure
from benchmarks.tasks import DTYPES, TASKS, Sizes
from serrate.runtime.launch import last_level_cache

TINY = Sizes(rows=32, mean=8, features=16, mean_flat=8, groups=4, tokens=32, width=32, bags=32, entries=100)
STEADY = {"limit: read": Timing(1.0, 1.0, 3)}
CELL = cells.Cell("sum", "float32", "uniform", 9.0, None, 10.0, "", {"slow": 20.0, "fast": 12.0}, {}, STEADY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("task", TASKS)
def test_every_method_computes_its_task(task: str, dtype: str) -> None:
    it = tasks.make_task(task, "exponential", DTYPES[dtype], TINY)
    wanted = tasks.expected(it)
    tried = {
        method.name: cells._tried(method, it, wanted, 60.0)
        for method in cells._methods(it, compiled=False)
        if method.name != "hand C++"
    }
    faults = {name: reason for name, (call, _, reason) in tried.items() if call is None and reason.startswith(("wrong", "Type"))}
    if dtype == "bfloat16":
        # in this dtype torch sums as it stores: it is shown as wrong, which it is
        faults = {name: reason for name, reason in faults.items() if not name.startswith(("segment", "index_add_"))}
    if task.endswith(tasks.BACKWARD):
        # torch's gradient of a NestedTensor's softmax is wrong, and rounded numbers may be on the other side of a relu's edge
        faults = {name: reason for name, reason in faults.items() if name == "serrate"}
    assert not faults
    right = [name for name, (call, _, _) in tried.items() if call is not None and name != "serrate"]
    assert len(tried) > 1 and (right or task.endswith(tasks.BACKWARD))


def test_a_wrong_result_and_an_error_are_shown_and_not_timed() -> None:
    it = tasks.make_task("sum", "uniform", torch.float32, TINY)
    wanted = tasks.expected(it)
    wrong = methods.simple("wrong", lambda: wanted + 1)

    def fails() -> None:
        raise RuntimeError("not today\nnor tomorrow")

    assert cells._tried(wrong, it, wanted, 1.0)[0::2] == (None, "wrong result")
    assert cells._tried(methods.simple("fails", fails), it, wanted, 1.0)[0::2] == (None, "RuntimeError: not today")


def test_what_is_built_in_the_first_call_is_not_the_time_of_a_call() -> None:
    it = tasks.make_task("sum", "uniform", torch.float32, TINY)
    wanted, calls = tasks.expected(it), []

    def builds_first() -> torch.Tensor:
        time.sleep(0 if calls else 0.3)
        calls.append(1)
        return wanted

    call, seconds, _ = cells._tried(methods.simple("builds", builds_first), it, wanted, 1.0)
    assert call is not None and seconds < 0.2


def test_what_takes_too_long_to_compile_is_left_out() -> None:
    it = tasks.make_task("sum", "uniform", torch.float32, TINY)
    slow = methods.Method("slow", lambda: lambda: time.sleep(30), compiles=True)
    begin = time.perf_counter()
    call, _, reason = cells._tried(slow, it, tasks.expected(it), 0.2)
    assert call is None and "not compiled after" in reason and time.perf_counter() - begin < 10


def test_what_would_pad_to_more_than_memory_is_not_tried() -> None:
    it = tasks.make_task("softmax", "giant", torch.float32, Sizes(rows=4096, mean=64, features=16))
    reasons = {method.name: method.reason for method in peers.methods(it)}
    assert reasons["NestedTensor"].startswith("pads to") and reasons["padded + mask compiled"].startswith("pads to")
    assert not reasons["segments"]


def test_what_is_missed_is_named() -> None:
    every = [CELL]
    assert report.misses(CELL, every) == []
    assert report.misses(dataclasses.replace(CELL, ours=11.0), every) == ["limit", "peer"]
    # the limit leaves no room to be ahead of this peer
    assert report.misses(dataclasses.replace(CELL, ours=9.9, peers={"near": 10.0}), every) == []
    assert report.misses(dataclasses.replace(CELL, ours=None, fault="why"), every) == ["all"]
    product = dataclasses.replace(CELL, task="grouped matmul", ours=9.9, peers={"torch.mm per group": 9.8})
    assert report.misses(product, every) == ["peer"]
    narrow = dataclasses.replace(CELL, dtype="bfloat16", ours=12.0, peers={})
    assert report.misses(narrow, every) == [] and narrow.goal == 72


def test_a_cell_that_supports_no_claim_says_so() -> None:
    assert not CELL.unsteady
    assert dataclasses.replace(CELL, timings={"limit: read": Timing(2.0, 1.0, 3)}).unsteady
    assert dataclasses.replace(CELL, ours=5.0).unsteady
    assert dataclasses.replace(CELL, peers={"fast": 5.0}).unsteady


@pytest.mark.parametrize(("width", "said"), [(80, ()), (110, ("fast 12.0",)), (200, ("fast 12.0", "slow 20.0", "gone: why not"))])
def test_the_table_shows_what_there_is_room_for(width: int, said: tuple[str, ...]) -> None:
    failed = dataclasses.replace(CELL, task="max", ours=None, fault="no such thing")
    console = Console(width=width, record=True, file=io.StringIO())
    report.print_tables([dataclasses.replace(CELL, skipped={"gone": "why not"}), failed], console)
    shown = console.export_text()
    assert all(word in shown for word in (*said, "uniform", "90", "1.2", "serrate, max, float32, uniform: no such thing", "all"))
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width


def test_a_giant_row_is_held_to_what_rows_alike_reach() -> None:
    giant = dataclasses.replace(CELL, lengths="giant", ours=11.0, peers={})
    assert report.goal(giant, [CELL, giant]) == pytest.approx(81)
    assert report.goal(giant, [giant]) == pytest.approx(81)
    assert report.goal(giant, [dataclasses.replace(CELL, ours=9.0), giant]) == pytest.approx(90)


def test_limits_count_the_bytes_that_move() -> None:
    it = tasks.make_task("to_padded", "bimodal", torch.float32, TINY)
    limit = limits.of_traffic(tasks.traffic(it), it.data.values, it.data.offsets)
    times = {name: Timing(1.0, 1.0, 1) for name in limit.calls}
    moved = it.data.values.nbytes + it.data.padded_bytes
    source, target = next(call() for name, call in limit.calls.items())[1:]
    assert source.nbytes >= 2 * last_level_cache(), "what is small is held to memory, not to the cache"
    assert limit.milliseconds(times) == pytest.approx(moved / (2 * source.nbytes))
    assert torch.equal(target.view(source.dtype).view_as(source), source)


def test_a_row_larger_than_the_cache_is_read_twice() -> None:
    sizes = dataclasses.replace(TINY, rows=64, mean=limits.own_cache() // 1024)
    it = tasks.make_task("softmax", "giant", torch.float32, sizes)
    limit = limits.of_traffic(tasks.traffic(it), it.data.values, it.data.offsets)
    never = {name: Timing(0.0, 0.0, 1) for name in limit.calls}
    assert limit.milliseconds(never | {"limit: read again": Timing(1.0, 1.0, 1)}) == 1.0
    assert set(limit.before) == {"limit: read again"}


def test_what_comes_before_a_call_is_not_timed() -> None:
    seen: list[str] = []
    timed = measure({"a": lambda: seen.append("a")}, 2, before={"a": lambda: (seen.append("before"), time.sleep(0.05))})
    assert seen == ["before", "a"] * 3 and timed["a"].median < 25


def test_a_peak_shows_what_padding_holds() -> None:
    it = tasks.make_task("softmax", "exponential", torch.float32, tasks.QUICK)
    found = {method.name: memory._peak(method, it.inputs, 0) for method in memory._methods(it)}
    extra = {name: peak["extra"] for name, peak in found.items()}
    if extra["serrate"] is None:
        pytest.skip("the system does not say how much memory a process holds")
    assert extra["serrate"] < 4 < it.data.padded_bytes / 1e6 <= extra["padded + mask"]
