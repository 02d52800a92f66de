"""Ways to do one piece of work: ours, by hand, and what a user would call instead.

Comes in: a name and how to prepare a call. Goes out: a `Way`; what a way needs beside its inputs (padded copies, indices,
compiled code) is made when it is prepared, so that a way that is not asked for costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import Ragged

Call = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """`prepare` gives the call that is timed; `values` turns its result into one plain tensor, and is not timed.

    `reason` says why a way is not tried at all; `compiles` that its first call may take long.
    """

    name: str
    prepare: Callable[[], Call]
    values: Callable[[Any], Tensor] = lambda result: result
    reason: str = ""
    compiles: bool = False


def simple(name: str, call: Call, values: Callable[[Any], Tensor] = lambda result: result) -> Way:
    """A way that needs nothing prepared."""
    return Way(name, lambda: call, values)


def both(
    name: str,
    function: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    values: Callable[[Any], Tensor] = lambda result: result,
    reason: str = "",
    compiled: bool = True,
) -> list[Way]:
    """A function of torch's as it is, and by torch.compile. The arguments are made once for both."""
    arguments = functools.cache(arguments)

    def eager() -> Call:
        given = arguments()
        return lambda: function(*given)

    def by_compiler() -> Call:
        given, compiled_function = arguments(), _compiled(function)
        return lambda: compiled_function(*given)

    found = [Way(name, eager, values, reason)]
    if compiled:
        found.append(Way(f"{name} compiled", by_compiler, values, reason, compiles=True))
    return found


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    quiet()
    # dynamic: one build serves all lengths, as it would have to for a user whose batches differ
    return torch.compile(function, dynamic=True)


def quiet() -> None:
    """torch says much when NestedTensors are first used or compiled; none of it is about the measurement."""
    warnings.filterwarnings("ignore", module=r"torch\..*")
    for name in ("torch.fx._symbolic_trace", "torch._inductor", "torch._dynamo", "torch._functorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def forget_compiled() -> None:
    """Between works: torch compiles one function only so many times, then silently runs it as it is."""
    if _compiled.cache_info().currsize:  # to reset what was never used would load all of torch's compiler
        _compiled.cache_clear()
        torch.compiler.reset()


class OutOfTime(Exception):
    """A first call took longer than its budget."""


@contextlib.contextmanager
def budget(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` in what runs inside once the seconds are over."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"not compiled after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def too_large(data: Ragged) -> str:
    """Why the padded data would not fit beside its copies, or nothing.

    Asked for, torch may take memory until the system ends the process, so it is not tried.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"pads to {data.padded_bytes / 1e9:.0f} GB" if data.padded_bytes > memory / 8 else ""
