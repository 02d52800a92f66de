"""Hooks that later stages install in the IR: running a fusion, drawing it, scheduling it.

In: functions by name, installed once by the engine. Out: the functions that methods of `Fusion` and `TensorView` call. The IR
does not import those stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serrate.errors import VerificationError

_installed: dict[str, Callable[..., Any]] = {}


def install(**functions: Callable[..., Any]) -> None:
    """Called once, by the engine."""
    _installed.update(functions)


def installed(name: str) -> Callable[..., Any]:
    if name not in _installed:
        raise VerificationError("serrate.compiled is not imported; import serrate, not serrate.ir alone, to run programs")
    return _installed[name]
