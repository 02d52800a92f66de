"""Timing on a CUDA device: the device's time and the host's, apart.

In: functions that launch work. Out: milliseconds of the device for a call, measured round robin; microseconds of the host.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch

Run = Callable[[], object]

WARM_UP, CALLS = 20, 60
"""Calls before host time is measured, and calls per measurement: fewer launches than the device's queue holds."""
HEAD_START = 3_000_000
"""Cycles for which the device waits before a measured call, so that the host has launched all of it: about 1.5 ms."""
READ_BEFORE = 1 << 28
"""Bytes that are read before a measured call: more than the cache of any device holds."""
COPIED = 1 << 32
"""The most bytes of a copy; the time of a larger one is scaled up."""


def device_times(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Milliseconds that each run takes on the device, the median of rounds in turn. A run that waits for the device also counts
    the host's time in between.

    Before each, something else is read that fills the cache: what the run before has written, and the cache still holds, would
    have to be written to memory meanwhile. (A sum after a copy took 13% longer than after another sum.)
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    other = torch.zeros(READ_BEFORE // 4, device="cuda")
    for _ in range(rounds):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
            other.sum()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Every host synchronisation is an error, on a device that has any."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(run: Run) -> Run:
    """The run as a CUDA graph. What is derived from offsets is derived again in every replay.

    Raises before anything is recorded if the run waits for the device: a recording that fails leaves torch's allocator unusable.
    """
    torch.cuda.synchronize()
    with no_synchronisation(torch.device("cuda")):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def host_time(run: Run) -> float:
    """Microseconds that the host spends on a call, the fastest of some measurements."""
    for _ in range(WARM_UP):
        run()
    found = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return min(found)


def copy_runs(moved: float) -> tuple[dict[str, Run], float]:
    """Copies that read and write `moved` bytes together, and by how much their time must be scaled. The faster is the limit: a
    kernel can beat the copy engine."""
    used = min(moved, COPIED)
    source = torch.empty(max(int(used) // 8, 1), device="cuda")
    target = torch.empty_like(source)
    runs: dict[str, Run] = {"copy": lambda: target.copy_(source), "copy by kernel": lambda: torch.add(source, 0.0, out=target)}
    return runs, moved / used


def dense_run(size: int = 8192) -> tuple[Run, float]:
    """A large dense product in bfloat16, and its FLOPs: what the matrix units reach."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return (lambda: a @ b), 2.0 * size**3
