"""Methods for one task: serrate, hand-written, and what a user would call instead.

In: a name and how to prepare a call. Out: a `Method`; what it needs besides its inputs (padded copies, indices, compiled code)
is created in `prepare`, so that unused methods cost nothing.
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
class Method:
    """`prepare` returns the call to time; `values` converts its result to a plain tensor, untimed.

    `reason` says why a method is not tried; `compiles` that its first call may take long.
    """

    name: str
    prepare: Callable[[], Call]
    values: Callable[[Any], Tensor] = lambda result: result
    reason: str = ""
    compiles: bool = False


def simple(name: str, call: Call, values: Callable[[Any], Tensor] = lambda result: result) -> Method:
    """A method that needs no preparation."""
    return Method(name, lambda: call, values)


def both(
    name: str,
    function: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    values: Callable[[Any], Tensor] = lambda result: result,
    reason: str = "",
    compiled: bool = True,
) -> list[Method]:
    """A torch function, plain and under torch.compile. The arguments are created once for both."""
    arguments = functools.cache(arguments)

    def eager() -> Call:
        given = arguments()
        return lambda: function(*given)

    def by_compiler() -> Call:
        given, compiled_function = arguments(), _compiled(function)
        return lambda: compiled_function(*given)

    found = [Method(name, eager, values, reason)]
    if compiled:
        found.append(Method(f"{name} compiled", by_compiler, values, reason, compiles=True))
    return found


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    quiet()
    # dynamic: one compilation serves all lengths, as a user with varying batches needs
    return torch.compile(function, dynamic=True)


def quiet() -> None:
    """Silences torch's warnings about NestedTensors, which are irrelevant to the measurement."""
    warnings.filterwarnings("ignore", module=r"torch\..*")
    for name in ("torch.fx._symbolic_trace", "torch._inductor", "torch._dynamo", "torch._functorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def forget_compiled() -> None:
    """Resets torch.compile between tasks: after a number of recompilations it silently runs a function uncompiled."""
    if _compiled.cache_info().currsize:  # resetting an unused compiler would load all of it
        _compiled.cache_clear()
        torch.compiler.reset()


class OutOfTime(Exception):
    """A first call exceeded its time limit."""


@contextlib.contextmanager
def budget(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` inside the context after the given number of seconds."""

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
    """Why the padded data would not fit in memory, or an empty string.

    It is not tried, because torch might allocate until the system kills the process.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"pads to {data.padded_bytes / 1e9:.0f} GB" if data.padded_bytes > memory / 8 else ""
