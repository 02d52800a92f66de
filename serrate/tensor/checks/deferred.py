"""Checks of numbers that are on a device: they run there, and report once the answer has arrived, without anyone waiting.

In: a few numbers on a device, and a function that judges them on the host. Out: nothing at first. If the numbers are wrong,
an error at the next construction, host copy or end of `no_sync()` after they have arrived, or from `wait_for_checks()`.
"""

from __future__ import annotations

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

Judge = Callable[[list[int]], None]
"""Raises if the numbers of a check are wrong."""


class _Check:
    __slots__ = ("arrived", "device", "judge", "numbers", "place")

    def __init__(self, numbers: Tensor, arrived: Any, device: torch.device, judge: Judge, place: tuple[str, int]) -> None:
        self.numbers = numbers
        self.arrived = arrived
        self.device = device
        self.judge = judge
        self.place = place


_pending: deque[_Check] = deque()
_lock = threading.Lock()


def later(numbers: Sequence[Tensor], judge: Judge) -> None:
    """Has `judge` look at these numbers (0-d, on one device) when they have reached the host; what it raises is raised later.

    Nothing waits for the device. Where there is nothing to wait for, nothing is checked: on the meta device, while a CUDA
    graph is captured (its numbers come with the replay), and while torch compiles.

    >>> def judge(numbers):
    ...     if numbers[0] < 0:
    ...         raise SerrateError(f"{numbers[0]} is negative")
    >>> later([torch.tensor(-1)], judge)
    >>> poll()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.SerrateError: -1 is negative (found late, by a check on cpu for the call at ...: what was computed ...)
    """
    first = numbers[0]
    if not arrives(first):
        return
    packed = torch.stack(tuple(numbers))
    host, arrived = _sent(packed)
    check = _Check(host, arrived, first.device, judge, _place_of_user())
    with _lock:
        _pending.append(check)


def poll() -> None:
    """Raises what was found by checks whose numbers have arrived; waits for none of them.

    >>> poll()
    """
    if _pending:
        _report(wait=False)


def wait_for_checks() -> None:
    """Waits until every check that runs on a device has reported; raises if one found something wrong.

    On a device, offsets and lengths are checked without waiting, and a mistake is told at some later construction. This is for
    where it must be known now: at the end of a test, before a checkpoint is written.

    >>> import serrate
    >>> jt = serrate.JaggedTensor.from_csr(torch.zeros(4), torch.tensor([0, 3, 2]), validate="deferred")
    >>> serrate.wait_for_checks()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must not decrease: offsets[2] = 2 < offsets[1] = 3 (found late, ...
    """
    _report(wait=True)


def pending() -> int:
    """How many checks have not reported yet.

    >>> pending()
    0
    """
    return len(_pending)


def arrives(tensor: Tensor) -> bool:
    """Whether a check of this tensor's numbers would ever report: not on the meta device, during a capture or a compilation.

    >>> arrives(torch.zeros(2)), arrives(torch.zeros(2, device="meta"))
    (True, False)
    """
    # A subclass stands for a tensor that has no numbers now (fake, functional) or has them elsewhere.
    if tensor.is_meta or type(tensor) is not Tensor or torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _report(*, wait: bool) -> None:
    arrived: list[_Check] = []
    with _lock:
        while _pending:
            check = _pending[0]
            if check.arrived is not None:
                if wait:
                    check.arrived.synchronize()
                elif not check.arrived.query():
                    # Those behind it were sent later; to ask every one of them each time would cost more than it tells.
                    break
            arrived.append(_pending.popleft())
    found = [error for check in arrived if (error := _judged(check)) is not None]
    if not found:
        return
    for other in found[1:]:
        found[0].add_note(f"also: {other}")
    raise found[0]


def _judged(check: _Check) -> SerrateError | None:
    try:
        check.judge(check.numbers.tolist())
    except SerrateError as error:
        file, line = check.place
        return type(error)(
            f"{error} (found late, by a check on {check.device} for the call at {file}:{line}: "
            "what was computed with these rows since then may be wrong)"
        )
    return None


def _sent(packed: Tensor) -> tuple[Tensor, Any]:
    """Where the numbers will be on the host, and the event that says they are there; None if they are there already."""
    if packed.is_cpu:
        return packed, None
    # A copy to memory that is not pinned would wait for the device.
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived = torch.Event(device=packed.device)
    arrived.record(torch.accelerator.current_stream(packed.device))
    return host, arrived


def _place_of_user() -> tuple[str, int]:
    """File and line of the innermost caller outside this package and torch; no frame is kept."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_OURS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))


def _forget() -> None:
    """A forked process cannot ask the device of its parent, and the parent reports."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_forget)
