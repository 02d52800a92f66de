"""One call of a kernel: its block sizes and loops, the clock that orders iterations, and the user's line.

In: what the kernel was decorated with. Out: `current()`, which the language asks, and `refuse`, which raises with the line.
"""

from __future__ import annotations

import linecache
import sys
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from serrate.errors import KernelError, SerrateError

if TYPE_CHECKING:
    from serrate.interpret.loops import Loop
    from serrate.interpret.races import Writes

OURS = (
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent / "language"),
    str(Path(__file__).parent.parent / "tiles"),
    str(Path(__file__).parent.parent / "tensor"),
)
TORCH = str(Path(torch.__file__).parent)
DEFAULT_BLOCK = 16


BlockSite = tuple[CodeType, int, int]
"""Where in the code a block size is asked for, and which one of that place."""


class Run:
    """The state of one call. Loops are a stack, innermost last; `clock` counts iterations of all loops together."""

    def __init__(
        self, blocks: tuple[int | None, ...], block: int | str | None, writes: Writes | None, first: int, last: int
    ) -> None:
        self.blocks = blocks
        self.block = block
        self.writes = writes
        self.lines = range(first, last + 1)
        self.loops: list[Loop] = []
        self.clock = 0
        self.depth = 0
        self.program = 0
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

        >>> Run((4,), "whole", None, 0, 0).block_of((compile("1", "", "eval"), 0, 0), 100)
        4
        """
        if site not in self.sites:
            self.sites[site] = self.taken
            self.taken += 1
        number = self.sites[site]
        given = self.blocks[number] if number < len(self.blocks) else None
        if given is None:
            given = max(1, extent) if self.block == "whole" else DEFAULT_BLOCK if self.block is None else int(self.block)
        return given


_current: ContextVar[Any] = ContextVar("serrate_kernel_run", default=None)


def current(what: str) -> Any:
    """The call that is running; raises where there is none, naming what was asked for."""
    run = _current.get()
    if run is None:
        raise KernelError(f"{what} is for the inside of a function decorated with @serrate.kernel, and was called outside of one")
    return run


def user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor the interpreter's."""
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
    """Makes a run the current one for a while."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __enter__(self) -> Any:
        self._token = _current.set(self._run)
        return self._run

    def __exit__(self, *_: Any) -> None:
        _current.reset(self._token)
