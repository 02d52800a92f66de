"""Asynchronous checks of numbers on a device: the host never waits for them, and errors surface at a later call.

In: a few numbers on a device, and a function that verifies them on the host. Out: nothing at first. If they are wrong, the next
construction, host copy or end of `no_sync()` after they have arrived raises, and so does `wait_for_checks()`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serrate.errors import SerrateError
from serrate.tensor.torch_private import is_recorded

Verify = Callable[[list[int]], None]
"""Takes the numbers of a check; raises if they are wrong."""


Arrival = Callable[[bool], list[int] | None]
"""Returns the numbers of a check, or None if they have not arrived; can also wait for them."""


class _Check:
    __slots__ = ("arrival", "device", "place", "verify")

    def __init__(self, arrival: Arrival, device: torch.device, verify: Verify, place: tuple[str, int]) -> None:
        self.arrival = arrival
        self.device = device
        self.verify = verify
        self.place = place


_pending: deque[_Check] = deque()
_lock = threading.Lock()
_Start = Callable[[Sequence[Tensor]], Arrival | None]
_summarise: _Start | None = None
_send: _Start | None = None


def install_device_checks(summarise: _Start, report: _Start) -> None:
    """Installs the functions that check offsets on a GPU and send numbers to the host, in one launch each; called once, by the
    engine."""
    global _summarise, _send
    _summarise, _send = summarise, report


def summary(offsets: Sequence[Tensor]) -> Arrival | None:
    """For every level of offsets on a GPU: the first, the last, the shortest and the longest length; None if numbers must be
    computed by torch."""
    return _summarise(offsets) if _summarise is not None and offsets[0].is_cuda else None


def defer(numbers: Sequence[Tensor], verify: Verify) -> None:
    """Calls `verify` with these numbers (0-d, on one device) once they reach the host; what it raises surfaces at a later call.

    Nothing waits for the device. If the numbers never arrive, nothing is checked: on the meta device, while a CUDA graph is
    captured (its numbers exist only on replay), and while torch compiles.

    >>> def verify(numbers):
    ...     if numbers[0] < 0:
    ...         raise SerrateError(f"{numbers[0]} is negative")
    >>> defer([torch.tensor(-1)], verify)
    >>> poll()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.SerrateError: -1 is negative (detected asynchronously on cpu, for the call at ...; anything computed ...)
    """
    first = numbers[0]
    if not can_report(first):
        return
    sent = _send(numbers) if _send is not None and first.is_cuda else None
    if sent is not None:
        defer_arrival(sent, first.device, verify)
        return
    host, arrived = _copy_to_host(torch.stack(tuple(numbers)))

    def arrival(wait: bool) -> list[int] | None:
        if arrived is not None:
            if wait:
                arrived.synchronize()
            elif not arrived.query():
                return None
        found: list[int] = host.tolist()
        return found

    defer_arrival(arrival, first.device, verify)


def defer_arrival(arrival: Arrival, device: torch.device, verify: Verify) -> None:
    """As `defer`, for numbers that arrive in any other way."""
    check = _Check(arrival, device, verify, _user_frame())
    with _lock:
        _pending.append(check)


def poll() -> None:
    """Raises the errors of checks whose numbers have arrived; waits for none, and asks for none while a CUDA graph is recorded.

    >>> poll()
    """
    if _pending and not (_pending[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        _report(wait=False)


def wait_for_checks() -> None:
    """Waits for every check still running on a device; raises if one failed.

    On a device, offsets and lengths are checked asynchronously, and errors surface at a later call. Call this to see them now:
    at the end of a test, or before writing a checkpoint.

    >>> import serrate
    >>> jt = serrate.JaggedTensor.from_csr(torch.zeros(4), torch.tensor([0, 3, 2]), validate="deferred")
    >>> serrate.wait_for_checks()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must not decrease: offsets[2] = 2 < offsets[1] = 3 (detected asynchronously ...
    """
    _report(wait=True)


def pending() -> int:
    """The number of checks that have not reported yet.

    >>> pending()
    0
    """
    return len(_pending)


def can_report(tensor: Tensor) -> bool:
    """Whether a check of this tensor would ever report; not on the meta device, nor during graph capture or compilation.

    >>> can_report(torch.zeros(2)), can_report(torch.zeros(2, device="meta"))
    (True, False)
    """
    # A subclass may have no data now (fake, functional tensors), or have it elsewhere.
    if tensor.is_meta or type(tensor) is not Tensor or torch.compiler.is_compiling():
        return False
    return not is_recorded(tensor)


def _report(*, wait: bool) -> None:
    arrived: list[tuple[_Check, list[int]]] = []
    with _lock:
        while _pending:
            numbers = _pending[0].arrival(wait)
            if numbers is None:
                # The checks after it were issued later. Querying each of them on every call would cost too much.
                break
            arrived.append((_pending.popleft(), numbers))
    found = [error for check, numbers in arrived if (error := _failure_of(check, numbers)) is not None]
    if not found:
        return
    for other in found[1:]:
        found[0].add_note(f"also: {other}")
    raise found[0]


def _failure_of(check: _Check, numbers: list[int]) -> SerrateError | None:
    try:
        check.verify(numbers)
    except SerrateError as error:
        file, line = check.place
        return type(error)(
            f"{error} (detected asynchronously on {check.device}, for the call at {file}:{line}; "
            "anything computed with these rows since then may be wrong)"
        )
    return None


def _copy_to_host(packed: Tensor) -> tuple[Tensor, Any]:
    """The tensor that will hold the numbers on the host, and the event after which it does; None if it already does."""
    if packed.is_cpu:
        return packed, None
    # A copy to pageable memory would wait for the device.
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived = torch.Event(device=packed.device)
    arrived.record(torch.accelerator.current_stream(packed.device))
    return host, arrived


def _user_frame() -> tuple[str, int]:
    """File and line of the innermost caller outside this package and torch; keeps no frame alive."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@functools.cache
def _is_ours(file: str) -> bool:
    """Whether a file belongs to this package or to torch. Cached, because every construction asks for several frames."""
    return file.startswith(_OURS)


_OURS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))


def _reset_after_fork() -> None:
    """Drops pending checks: a forked process cannot use its parent's device, and the parent reports them."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
