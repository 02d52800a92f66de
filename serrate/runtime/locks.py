"""Locks that survive a fork.

In: nothing. Out: `making`, which is held while programs are traced and built, and the class of such locks.
"""

from __future__ import annotations

import os
import threading


class Lock:
    """A lock that the thread which holds it may take again. A forked child has a new one: the thread of the parent that held it
    is not there to give it back. For locks that live as long as the process."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


making = Lock()
"""Held while programs are looked for in vain and made, so that threads that call at once make one. Only one for all programs:
functions that are traced call each other in any order. Also while Python code is made, which Python 3.11 cannot do in two threads
(AST constructor recursion depth mismatch). Calls that find their program do not take it."""
