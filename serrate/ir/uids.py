"""Unique ids of domains, within a process and across processes.

In: nothing, or an id from another process. Out: an id that no other domain of this process has. A pickled domain carries its id
and the process that assigned it; the receiving process maps it to an id of its own, always the same one.
"""

from __future__ import annotations

import itertools
import os
import secrets
from dataclasses import dataclass

_numbers = itertools.count()
_process = secrets.token_hex(8)
_arrived: dict[tuple[str, int], int] = {}
"""Ids of other processes -> their ids here."""


def fresh_uid() -> int:
    """An unused id."""
    return next(_numbers)


@dataclass(frozen=True)
class Uid:
    """An id and the process that assigned it, as pickled."""

    number: int
    process: str

    @property
    def here(self) -> int:
        """The id in this process."""
        if self.process == _process:
            return self.number
        return _arrived.setdefault((self.process, self.number), fresh_uid())


def sent(number: int) -> Uid:
    """An id of this process, ready to be pickled."""
    return Uid(number, _process)


def _after_fork() -> None:
    # A child would continue the parent's counter and assign the same ids.
    global _process
    _process = secrets.token_hex(8)


os.register_at_fork(after_in_child=_after_fork)
