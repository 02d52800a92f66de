"""One call of a kernel on the interpreter: its loops, and the clock that orders their iterations.

In: the kernel's configuration. Out: the state that loops, stores and carried values use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serrate.frontend.kernel.machine import BlockSizes

if TYPE_CHECKING:
    from serrate.interpret.loops import LoopRun
    from serrate.interpret.races import Accesses

DEFAULT_BLOCK = 16


class KernelRun(BlockSizes):
    """The state of one call. Loops are a stack, innermost last; `clock` counts iterations of all loops together."""

    def __init__(
        self, blocks: tuple[int | None, ...], block: int | str | None, accesses: Accesses | None, first: int, last: int
    ) -> None:
        super().__init__(blocks, DEFAULT_BLOCK if block is None else block)
        self.accesses = accesses
        self.lines = range(first, last + 1)
        self.loops: list[LoopRun] = []
        self.clock = 0
        self.depth = 0
        self.program = 0
