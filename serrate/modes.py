"""Modes: settings that apply to all calls inside a `with` block.

In: `batch_invariant`, around calls. Out: `is_batch_invariant()`, which is part of the cache key of every plan and prepared call,
and so is torch's own mode, `is_deterministic()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import ParamSpec, TypeVar

import torch

from serrate.errors import TraceError

P = ParamSpec("P")
R = TypeVar("R")

_invariant: ContextVar[bool] = ContextVar("serrate_batch_invariant", default=False)
_tracing: ContextVar[bool] = ContextVar("serrate_tracing", default=False)

is_batch_invariant: Callable[[], bool] = _invariant.get
"""Whether the bits of a row's result must depend on that row alone. Read at every call."""

is_deterministic: Callable[[], bool] = torch.are_deterministic_algorithms_enabled
"""Whether `torch.use_deterministic_algorithms` is on: no plan calls a library then, whose bits may depend on the number of
threads. Read at every call."""


class batch_invariant:
    """Within this context, or in a function that it decorates, the bits of a row's result depend on that row alone.

    They do not depend on the other rows of the batch, their number or order, or the number of threads. One plan serves every
    batch: a worker takes whole rows, in blocks that depend only on the row's length. Anything that cannot be computed this way
    raises `InvarianceError`. A reduction over the rows themselves (`dim=0`) combines them in order, as always.

    >>> import torch
    >>> from serrate import JaggedTensor
    >>> row, others = torch.randn(1000), torch.randn(5000)
    >>> with batch_invariant():
    ...     alone = JaggedTensor.from_list([row]).sum(dim=1)[0]
    ...     among = JaggedTensor.from_list([others, row, others]).sum(dim=1)[1]
    >>> bool(alone == among)
    True

    `batch_invariant(False)` suspends the mode, as `torch.set_grad_enabled(True)` suspends `torch.no_grad`.
    """

    def __init__(self, mode: bool = True) -> None:
        self.mode = mode
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        if _tracing.get():
            raise TraceError(
                "serrate.batch_invariant() cannot be entered inside a traced function: put it around the call, or decorate the "
                "function with it above @serrate.jit"
            )
        self._tokens.append(_invariant.set(self.mode))

    def __exit__(self, *_: object) -> None:
        _invariant.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            # A new context per call: several threads may be in the function at once.
            with batch_invariant(self.mode):
                return function(*args, **kwargs)

        return called


class tracing:
    """Marks that a function is being traced."""

    def __enter__(self) -> None:
        self._token = _tracing.set(True)

    def __exit__(self, *_: object) -> None:
        _tracing.reset(self._token)
