"""Numbers that tell domains apart, in one process and between processes.

In: nothing, or a number from another process. Out: a number that no other domain of this process has. A pickled domain carries
its number and the process that gave it; where it arrives it has a number of its own there, the same one every time.
"""

from __future__ import annotations

import itertools
import os
import secrets
from dataclasses import dataclass

_numbers = itertools.count()
_process = secrets.token_hex(8)
_arrived: dict[tuple[str, int], int] = {}
"""Numbers given by other processes -> what they are here."""


def fresh_uid() -> int:
    """A number that no domain has."""
    return next(_numbers)


@dataclass(frozen=True)
class Uid:
    """A number, and the process that gave it: what is pickled."""

    number: int
    process: str

    @property
    def here(self) -> int:
        """The number in this process."""
        if self.process == _process:
            return self.number
        return _arrived.setdefault((self.process, self.number), fresh_uid())


def sent(number: int) -> Uid:
    """A number of this process as another one will know it."""
    return Uid(number, _process)


def _after_fork() -> None:
    # A child goes on counting where its parent is, so their next numbers would be the same.
    global _process
    _process = secrets.token_hex(8)


os.register_at_fork(after_in_child=_after_fork)
