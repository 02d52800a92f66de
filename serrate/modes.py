"""Modes: what a `with` block asks of everything that is called in it.

In: `batch_invariant`, around calls. Out: `is_batch_invariant()`, which is part of every key under which a plan or a prepared
call is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import ParamSpec, TypeVar

from serrate.errors import TraceError

P = ParamSpec("P")
R = TypeVar("R")

_invariant: ContextVar[bool] = ContextVar("serrate_batch_invariant", default=False)
_tracing: ContextVar[bool] = ContextVar("serrate_tracing", default=False)

is_batch_invariant: Callable[[], bool] = _invariant.get
"""Whether the bits of a row's result must follow from that row alone. Asked at every call."""


class batch_invariant:
    """Within this context, or in a function that it decorates, the bits of a row's result depend on that row alone.

    The other rows of the batch, their number and their order, and the number of threads have no part in them. One plan serves
    every batch: a worker takes whole rows, in blocks that follow from the row's own length. What cannot be computed so raises
    `InvarianceError`. A reduction over the rows themselves (`dim=0`) is computed in the order of the rows, as always.

    >>> import torch
    >>> from serrate import JaggedTensor
    >>> row, others = torch.randn(1000), torch.randn(5000)
    >>> with batch_invariant():
    ...     alone = JaggedTensor.from_list([row]).sum(dim=1)[0]
    ...     among = JaggedTensor.from_list([others, row, others]).sum(dim=1)[1]
    >>> bool(alone == among)
    True

    `batch_invariant(False)` ends the mode for a while, as `torch.set_grad_enabled(True)` does with `torch.no_grad`.
    """

    def __init__(self, mode: bool = True) -> None:
        self.mode = mode
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        if _tracing.get():
            raise TraceError(
                "serrate.batch_invariant() in a function that is being traced: the mode belongs to the call: put it around the "
                "call, or decorate the function with it above @serrate.jit"
            )
        self._tokens.append(_invariant.set(self.mode))

    def __exit__(self, *_: object) -> None:
        _invariant.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            # Of its own: threads may be in the function at the same time.
            with batch_invariant(self.mode):
                return function(*args, **kwargs)

        return called


class tracing:
    """Says that what runs is being traced, and is not the call itself."""

    def __enter__(self) -> None:
        self._token = _tracing.set(True)

    def __exit__(self, *_: object) -> None:
        _tracing.reset(self._token)
