"""Copies of lengths to the host: the only function that makes them, and the context that forbids them.

In: a tensor of offsets or lengths, and the name of the operation that reads it.
Out: the tensor on the CPU, or a SyncError under `no_sync()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum

import torch
from torch import Tensor

from serrate.errors import SyncError
from serrate.tensor.checks.deferred import poll


class _Mode(IntEnum):
    FREE = 0
    NO_DEVICE_COPY = 1
    NO_READ_AT_ALL = 2


_mode: ContextVar[_Mode] = ContextVar("serrate_no_sync", default=_Mode.FREE)


@contextmanager
def no_sync(*, strict: bool = False) -> Iterator[None]:
    """In this context, any operation that would copy lengths from a device to the host raises SyncError instead.

    With `strict=True` it raises for tensors on the CPU too, so that programs meant for a device can be tested without one.
    At the end of the context, errors that deferred checks have found so far are raised.

    >>> import torch
    >>> from serrate.tensor import Structure
    >>> structure = Structure.from_offsets(torch.tensor([0, 2, 5]), validate=False)
    >>> with no_sync(strict=True):
    ...     structure.num_rows()
    2
    >>> with no_sync(strict=True):  # doctest: +ELLIPSIS
    ...     structure.max_length()
    Traceback (most recent call last):
    serrate.errors.SyncError: max_length needs lengths on the host, and no_sync() forbids the copy from cpu: ...
    """
    token = _mode.set(max(_mode.get(), _Mode.NO_READ_AT_ALL if strict else _Mode.NO_DEVICE_COPY))
    try:
        yield
    finally:
        _mode.reset(token)
    poll()


def on_host(tensor: Tensor) -> bool:
    """Whether the tensor can be read without a copy.

    >>> import torch
    >>> on_host(torch.zeros(2)), on_host(torch.zeros(2, device="meta"))
    (True, False)
    """
    return tensor.is_cpu and _mode.get() is not _Mode.NO_READ_AT_ALL


def is_host(device: torch.device) -> bool:
    """Whether tensors on a device can be read without a copy.

    >>> is_host(torch.device("cpu")), is_host(torch.device("cuda"))
    (True, False)
    """
    return device.type == "cpu" and _mode.get() is not _Mode.NO_READ_AT_ALL


def may_copy(tensor: Tensor) -> bool:
    """Whether `host_copy` of this tensor would succeed.

    >>> import torch
    >>> with no_sync(strict=True):
    ...     may_copy(torch.zeros(2))
    False
    """
    return on_host(tensor) or (_mode.get() is _Mode.FREE and not tensor.is_meta)


def may_wait() -> bool:
    """Whether the host may wait for a device: not in `no_sync()`.

    >>> with no_sync():
    ...     may_wait()
    False
    """
    return _mode.get() is _Mode.FREE


def host_copy(tensor: Tensor, why: str) -> Tensor:
    """The tensor on the CPU (itself if it is already there); `why` names the operation in the SyncError.

    >>> import torch
    >>> host_copy(torch.tensor([0, 2]), "unbind").tolist()
    [0, 2]
    """
    if _mode.get() is not _Mode.FREE and not on_host(tensor):
        raise SyncError(
            f"{why} needs lengths on the host, and no_sync() forbids the copy from {tensor.device}: "
            "do it once beforehand (the result is cached), or pass max_length=, min_length= and total= to the constructor"
        )
    copy = tensor.detach().cpu()
    # The copy has synchronised, so earlier checks have arrived: report wrong lengths before they are used.
    poll()
    return copy
