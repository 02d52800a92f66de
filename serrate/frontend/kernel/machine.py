"""The machine that runs a kernel's function, its block sizes, and the user's line.

In: a machine, made current with `running`. Out: `current()`, which `serrate.language` dispatches to, and `refuse`, which raises
with the user's line.

A machine has a method for every construct of the language: `call` for torch's functions, `load` and `store`, `ranges`,
`jagged_range`, `full`, `arange`, `positions`, `number`, `block_size`, `dot`, `associative_scan`, `fill`.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from serrate.errors import KernelError, SerrateError

OURS = tuple(str(Path(__file__).parents[2] / name) for name in ("frontend", "interpret", "language", "tensor", "tiles"))
TORCH = str(Path(torch.__file__).parent)


BlockSite = tuple[CodeType, int, int]
"""The place in the code that requests a block size, and the number of the request at that place."""


class NamedBlock:
    """The lanes of a block size, compared by identity; prints as the place that requested them."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


class BlockSize(int):
    """A block size that knows the axis of its lanes: returned by `hl.register_block_size` and `tile.block_size`."""

    axis: Any
    tile: Any

    def __new__(cls, size: int, axis: Any, tile: Any = None) -> BlockSize:
        made = super().__new__(cls, size)
        made.axis, made.tile = axis, tile
        return made


class BlockSizes:
    """The block sizes of one kernel call, assigned in the order of first request."""

    depth = 0
    """The nesting depth of loops over tiles."""

    def __init__(self, blocks: tuple[int | None, ...], block: int | str) -> None:
        self.blocks = blocks
        self.block = block
        """The default size: a number, or "whole" for the extent of the loop."""
        self.sites: dict[BlockSite, int] = {}
        self.taken = 0

    def registered(self, frame: FrameType) -> BlockSite:
        """The place of an `hl.register_block_size`. Outside of loops over tiles, every execution is a separate block size."""
        count = 0
        while not self.depth and (frame.f_code, frame.f_lasti, count) in self.sites:
            count += 1
        return (frame.f_code, frame.f_lasti, count)

    def block_of(self, site: BlockSite, extent: int) -> int:
        """The block size of one dim of one `hl.tile`, taken from the configuration in order of first execution.

        >>> BlockSizes((4,), "whole").block_of((compile("1", "", "eval"), 0, 0), 100)
        4
        """
        if site not in self.sites:
            self.sites[site] = self.taken
            self.taken += 1
        number = self.sites[site]
        given = self.blocks[number] if number < len(self.blocks) else None
        if given is None:
            given = max(1, extent) if self.block == "whole" else int(self.block)
        return given


_current: ContextVar[Any] = ContextVar("serrate_kernel_machine", default=None)


class LazyMachine:
    """A machine that is created on first use: most calls of a compiled kernel need none."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


activate, deactivate = _current.set, _current.reset
"""As `running`, but without allocating an object, for the fast path."""


def current(what: str) -> Any:
    """The current machine; if there is none, raises and names the construct that needs it."""
    machine = _current.get()
    if type(machine) is LazyMachine:
        machine = machine.make()
        _current.set(machine)
    if machine is None:
        raise KernelError(f"{what} can only be used inside a function decorated with @serrate.kernel")
    return machine


def user_frame() -> FrameType | None:
    """The innermost frame outside torch and serrate."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*OURS, TORCH)):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """File, line and text of the code a frame is executing, with carets under it."""
    if frame is None:
        return ""
    return line_at(frame.f_code, frame.f_lasti)


def line_at(code: CodeType, at: int) -> str:
    """The same for a place in code, for frames that are gone."""
    positions = list(code.co_positions())
    line, end_line, start, end = positions[at // 2] if at // 2 < len(positions) else (None, None, None, None)
    line = line or code.co_firstlineno
    text = linecache.getline(code.co_filename, line).rstrip()
    shown = f'\n  File "{code.co_filename}", line {line}, in {code.co_name}'
    if not text:
        return shown
    blank = len(text) - len(text.lstrip())
    shown += f"\n    {text.strip()}"
    if start is None or end is None:
        return shown
    # Offsets count bytes.
    stop = len(text.encode()) if end_line != line else end
    left, width = (
        len(text.encode()[:start].decode(errors="ignore")),
        max(1, len(text.encode()[start:stop].decode(errors="ignore"))),
    )
    return f"{shown}\n    {' ' * max(0, left - blank)}{'^' * width}"


def refuse(message: str, kind: type[SerrateError] = KernelError) -> NoReturn:
    """Raises `KernelError` with the user's line."""
    raise kind(message + line_of(user_frame()))


class running:
    """Makes a machine current within a context."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def __enter__(self) -> Any:
        self._token = _current.set(self._machine)
        return self._machine

    def __exit__(self, *_: Any) -> None:
        _current.reset(self._token)
