"""Builds candidates and times them on the arguments of a call.

In: a function that plans and lowers a candidate, and the buffers to run on (`buffers.py`). Out: seconds. The results of every
candidate are compared with those of the first, so that a miscompiled candidate cannot win.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import torch

from serrate.runtime import memory
from serrate.runtime.dispatch import Prepared
from serrate.runtime.launch import CppExecutable, load_together
from serrate.schedule.plan import Plan
from serrate.tuner.buffers import Buffers
from serrate.tuner.candidates import Candidate
from serrate.tuner.search import SPENT, Unfit, reason_of

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""How much results of two plans may differ, relative to the largest element: more than rounding errors, less than bugs cause."""
COMPARED = 1 << 14
"""The most elements of a result that are compared: few enough for a single thread, which disturbs other timings least."""
BUILDERS = 4
"""The most compilers that run at once."""


class ProgramMeasurer:
    """Builds and runs the candidates for one call."""

    def __init__(
        self,
        prepare: Callable[[Candidate], Prepared],
        is_built: Callable[[Candidate], bool],
        buffers: Buffers,
        device: torch.device,
    ) -> None:
        self._prepare, self._buffers, self._device = prepare, buffers, device
        self.is_built = is_built
        # For a single thread, use its CPU clock, which does not count the time of other processes.
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._ready: dict[Candidate, Prepared] = {}
        self._plans: dict[Plan, Candidate] = {}
        self._runs: dict[Candidate, Callable[[], None]] = {}
        self._wanted: list[torch.Tensor] | None = None

    def now(self) -> float:
        return time.perf_counter()

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate that was built."""
        return self._ready[candidate].plan

    def build(self, candidates: Sequence[Candidate], seconds: float = float("inf")) -> dict[Candidate, str]:
        failed: dict[Candidate, str] = {}
        end = self.now() + seconds
        for candidate in candidates:
            if self.now() >= end:
                failed[candidate] = SPENT
                continue
            try:
                ready = self._prepare(candidate)
            except Exception as error:
                # Includes bugs of the compiler: either the call does not need this candidate, or it raises the same error.
                failed[candidate] = reason_of(error)
                continue
            same = self._plans.setdefault(_bare(ready.plan), candidate)
            if same != candidate:
                failed[candidate] = f"the same plan as {same}"
            else:
                self._ready[candidate] = ready
        found = {c: self._ready[c].executable for c in candidates if c in self._ready}
        missing = {c: e for c, e in found.items() if isinstance(e, CppExecutable) and not e.is_loaded}
        return failed | _compiled(missing, end - self.now())

    def run(self, candidate: Candidate, repeats: int) -> float:
        call = self._runs.get(candidate)
        if call is None:
            return self._first(candidate)
        seconds = float("inf")
        for _ in range(repeats):
            self._buffers.restore()
            seconds = min(seconds, _on_device(call) if self._device.type == "cuda" else _on_host(call, self._clock))
        return seconds

    def _first(self, candidate: Candidate) -> float:
        """The first run of a candidate, whose results are compared."""
        try:
            call = self._bound(self._ready[candidate])
            self._buffers.clear()
            start = time.perf_counter()
            call()
            found = [_sampled(t) for t in self._buffers.written()]
        except Exception as error:
            # Triton compiles now, and may find that a plan needs more registers or shared memory than there are.
            raise Unfit(reason_of(error)) from error
        spent = time.perf_counter() - start
        if self._wanted is None:
            self._wanted = [t.clone() for t in found]
        elif not all(map(agrees, found, self._wanted)):
            raise Unfit("its results differ from those of the first plan by more than rounding")
        self._runs[candidate] = call
        return spent

    def _bound(self, ready: Prepared) -> Callable[[], None]:
        tensors = self._buffers.tensors(ready)
        executable = ready.executable
        if isinstance(executable, CppExecutable):
            every = [memory.whole(t) for t in tensors]
            program = executable.bound([t.numel() for t in every], ready.arrays, ready.symbols)
            return lambda: program(every)
        launch, everything = executable.bound(ready.arrays, ready.symbols, self._device), [*tensors, *ready.arrays]
        addresses = [m.data_ptr() for m in everything]
        return lambda: launch(addresses, lambda: everything)


def _bare(plan: Plan) -> Plan:
    """A plan without its reasons and its strategy's name, because two strategies may choose the same steps."""
    short = None if plan.short is None else _bare(plan.short)
    return replace(plan, strategy="", reasons=(), short=short)


def _compiled(executables: dict[Candidate, CppExecutable], seconds: float) -> dict[Candidate, str]:
    """Compiles programs, in one group per core; returns the reasons of failures. Does not wait longer than `seconds`: programs
    that are compiled later stay in the cache for the next time."""
    new = list(executables)
    count = min(len(new), BUILDERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    groups = [new[k::count] for k in range(count)] if count else []

    def compiled(group: Sequence[Candidate]) -> dict[Candidate, str]:
        try:
            load_together([executables[c] for c in group])
        except Exception as error:
            if len(group) == 1:
                return {group[0]: reason_of(error).splitlines()[0]}
            return {c: why for each in group for c, why in compiled([each]).items()}
        return {}

    if not groups:
        return {}
    if len(groups) == 1 and seconds == float("inf"):
        return compiled(groups[0])
    pool = ThreadPoolExecutor(len(groups), thread_name_prefix="serrate-build")
    running = {pool.submit(compiled, group): group for group in groups}
    done, late = wait(running, None if seconds == float("inf") else max(seconds, 0.0))
    pool.shutdown(wait=False)
    failed = {c: why for each in done for c, why in each.result().items()}
    return failed | {c: SPENT for each in late for c in running[each]}


def _on_host(call: Callable[[], None], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def _on_device(call: Callable[[], None]) -> float:
    """Seconds of one run on a GPU, by its own clock."""
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // COMPARED))]


def agrees(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results agree within rounding.

    >>> agrees(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])), agrees(torch.tensor([1.0]), torch.tensor([1.1]))
    (True, False)
    """
    if found.shape != wanted.shape or not wanted.is_floating_point() or not wanted.numel():
        return bool(torch.equal(found, wanted))
    tolerance = TOLERANCE.get(wanted.dtype, 5e-2)
    found, wanted = found.double(), wanted.double()
    scale = float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return bool(torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
