"""Which machine runs a kernel's function, the block sizes it gives out, and the user's line.

In: a machine, made the current one with `running`. Out: `current()`, which the names of `serrate.language` ask, and `refuse`,
which raises with the user's line.

A machine has a method for everything that the language says: `call` for torch's functions, `load` and `store`, `ranges`,
`jagged_range`, `full`, `arange`, `number`, `block_size`, `dot`, `associative_scan`, `fill`.
"""

from __future__ import annotations

import linecache
import sys
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from serrate.errors import KernelError, SerrateError

OURS = tuple(str(Path(__file__).parents[2] / name) for name in ("frontend", "interpret", "language", "tensor", "tiles"))
TORCH = str(Path(torch.__file__).parent)


BlockSite = tuple[CodeType, int, int]
"""Where in the code a block size is asked for, and which one of that place."""


class NamedBlock:
    """The lanes of a block size, compared by identity; it prints as the place that asked for them."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


class BlockSize(int):
    """A block size that knows the axis its lanes belong to: what `hl.register_block_size` and `tile.block_size` give."""

    axis: Any
    tile: Any

    def __new__(cls, size: int, axis: Any, tile: Any = None) -> BlockSize:
        made = super().__new__(cls, size)
        made.axis, made.tile = axis, tile
        return made


class BlockSizes:
    """The block sizes of one call of a kernel, given out in the order in which they are first asked for."""

    depth = 0
    """How many loops over tiles are open."""

    def __init__(self, blocks: tuple[int | None, ...], block: int | str) -> None:
        self.blocks = blocks
        self.block = block
        """The size where the configuration has none: a number, or "whole" for the extent of the loop."""
        self.sites: dict[BlockSite, int] = {}
        self.taken = 0

    def registered(self, frame: FrameType) -> BlockSite:
        """The place of a `hl.register_block_size`. Outside of loops over tiles each time that it runs is another block size."""
        count = 0
        while not self.depth and (frame.f_code, frame.f_lasti, count) in self.sites:
            count += 1
        return (frame.f_code, frame.f_lasti, count)

    def block_of(self, site: BlockSite, extent: int) -> int:
        """The block size of one dim of one `hl.tile`: given by the configuration in the order in which they first run.

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


def current(what: str) -> Any:
    """The machine that is running; raises where there is none, naming what was asked for."""
    machine = _current.get()
    if machine is None:
        raise KernelError(f"{what} is for the inside of a function decorated with @serrate.kernel, and was called outside of one")
    return machine


def user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*OURS, TORCH)):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """File, line and text of what a frame is doing, with a caret under it."""
    if frame is None:
        return ""
    return line_at(frame.f_code, frame.f_lasti)


def line_at(code: CodeType, at: int) -> str:
    """The same for a place in code: what `line_of` shows of a frame that is gone."""
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
    """Raises, with the user's line under a caret."""
    raise kind(message + line_of(user_frame()))


class running:
    """Makes a machine the current one for a while."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def __enter__(self) -> Any:
        self._token = _current.set(self._machine)
        return self._machine

    def __exit__(self, *_: Any) -> None:
        _current.reset(self._token)
