"""Policy: who tunes, when, and for how long.

In: what the user asked for (arguments of the decorators, the environment, `tuning()`), and the state of the device. Out: whether
a call may be measured now, and with which effort.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

import torch

from serrate import settings
from serrate.errors import CallError, choices
from serrate.modes import is_batch_invariant
from serrate.settings import TUNE
from serrate.tensor.sync import may_wait
from serrate.tuner.search import EFFORTS, Effort


@dataclass(frozen=True)
class Policy:
    """The user's settings for one function; None means the setting of the environment."""

    tune: str | None = None
    effort: str | None = None
    eager: bool = False
    """Whether this is an operator, which is measured only inside `tuning()`: a script of fifty operators should not stall fifty
    times."""

    def __post_init__(self) -> None:
        if self.tune is not None and self.tune not in TUNE:
            raise CallError(f"tune={self.tune!r}: {choices(str(self.tune), TUNE)}")
        if self.effort is not None and self.effort not in settings.EFFORTS:
            raise CallError(f"effort={self.effort!r}: {choices(str(self.effort), settings.EFFORTS)}")

    def now(self) -> tuple[str, Effort] | None:
        """When and with which effort a call without a record is measured: "first_call" or "background"; None if it is not."""
        if _paused.get():
            return None
        request, current = _request.get(), settings.current()
        if request is not None and (request.overrides_never or (self.tune != "never" and self.effort != "none")):
            return "first_call", EFFORTS[request.effort or _some(self.effort or current.effort)]
        tune, effort = self.tune or current.tune, self.effort or current.effort
        return None if self.eager or tune == "never" or effort == "none" else (tune, EFFORTS[effort])


def _some(effort: str) -> str:
    return "quick" if effort == "none" else effort


USUAL, EAGER, NEVER = Policy(), Policy(eager=True), Policy(tune="never")


@dataclass
class TuningRequest:
    """The arguments of `tuning()`."""

    effort: str | None
    again: bool
    overrides_never: bool
    """Whether functions that say `tune="never"` are measured too."""
    done: set[object] = field(default_factory=set)
    """The keys that were measured again."""


_request: ContextVar[TuningRequest | None] = ContextVar("serrate_tuning", default=None)
_paused: ContextVar[bool] = ContextVar("serrate_tuning_paused", default=False)


class tuning:
    """In this context, every call is tuned, including eager operators, except functions with `tune="never"`.

    `effort` is "quick" (3 s per program on a CPU) or "full". With `again`, programs that have records are measured again.

    >>> import torch
    >>> from serrate import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.ones(5, 2), [2, 3])
    >>> with tuning():  # doctest: +SKIP
    ...     total = jt.sum(dim=1)
    """

    _overrides_never = False

    def __init__(self, effort: str | None = None, *, again: bool = False) -> None:
        if effort is not None and effort not in EFFORTS:
            raise CallError(f"tuning(effort={effort!r}): {choices(str(effort), tuple(EFFORTS))}")
        self._effort, self._again = effort, again
        self._tokens: list[Token[TuningRequest | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_request.set(TuningRequest(self._effort, self._again, self._overrides_never)))
        # Bindings that were made outside are not looked for inside.
        settings.replan()

    def __exit__(self, *_: object) -> None:
        _request.reset(self._tokens.pop())


class retuning(tuning):
    """The context of `f.tune(...)`: everything is measured again, including functions with `tune="never"`. Raises if measuring is
    not possible."""

    _overrides_never = True

    def __init__(self, effort: str | None = None) -> None:
        super().__init__(effort, again=True)

    def __enter__(self) -> None:
        if not may_measure():
            raise CallError(
                "tune() runs programs and waits for them, which is not possible here: leave serrate.no_sync(), "
                "serrate.batch_invariant(), torch's sync debug mode and the recording of CUDA graphs first"
            )
        super().__enter__()


def is_requested() -> bool:
    """Whether the user asked for measurements here, by `tuning()` or `tune()`."""
    return _request.get() is not None


def measured_again(what: object) -> bool:
    """Whether `tuning(again=True)` requires measuring this key again; True once per key."""
    request = _request.get()
    if request is None or not request.again or _paused.get() or what in request.done:
        return False
    request.done.add(what)
    return True


@contextmanager
def paused() -> Iterator[None]:
    """In this context nothing is measured: for calls that return plans or sources and run nothing."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


is_paused = _paused.get


def may_measure(device: torch.device | None = None) -> bool:
    """Whether programs may run (on this device) and be waited for now: not while a CUDA graph records, in `no_sync()`, or in
    torch's sync debug mode. Under `batch_invariant()` one plan serves all rows, and there is nothing to choose."""
    if is_batch_invariant() or not may_wait():
        return False
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return not on_gpu or not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())
