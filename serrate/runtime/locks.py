"""Locks that survive a fork.

In: nothing. Out: `making`, which is held while programs are traced and built, and the class of such locks.
"""

from __future__ import annotations

import os
import threading


class Lock:
    """A reentrant lock that a forked child gets anew, because the parent's thread that held it does not exist in the child. For
    locks that live as long as the process."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.own = threading.RLock()
        """The lock itself, which calls that take it often enter without a detour."""

    def __enter__(self) -> None:
        self.own.acquire()

    def __exit__(self, *_: object) -> None:
        self.own.release()


class OwnedLock(Lock):
    """A lock that knows who holds it."""

    def _renew(self) -> None:
        super()._renew()
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        super().__enter__()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        super().__exit__()

    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()


making = OwnedLock()
"""Held while a program is traced and built, so that concurrent calls build it once. One lock serves all programs, because traced
functions may call each other in any order. It is also held while Python code is compiled, which Python 3.11 cannot do in two
threads (AST constructor recursion depth mismatch). Calls that find their program do not take it. Nothing is measured by a thread
that holds it: others would wait for the whole search."""

searching = Lock()
"""Held while plans are measured, so that two searches of one process do not disturb each other's times. The order of locks is
`searching`, the lock file of a record, `making`."""
