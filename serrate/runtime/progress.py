"""Progress on a terminal: what a process is busy with while it compiles or measures.

In: a title and steps. Out: one line on stderr that is gone afterwards. Nothing is written, and rich is not imported, if stderr is
not a terminal, or if `SERRATE_LOG` asks for a log there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serrate import settings

Report = Callable[[str], None]
"""Takes what is done now."""

_shown = threading.Lock()
"""Held by the one that writes: a terminal has one line for this."""


def is_visible() -> bool:
    """Whether there is a terminal to show progress on."""
    return sys.stderr is not None and sys.stderr.isatty() and not settings.current().log


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """Shows a title and what is done now, until the end of the `with` statement.

    >>> with progress("tuning softmax") as report:
    ...     report("masked(rows=16)")
    """
    if not is_visible() or not _shown.acquire(blocking=False):
        yield lambda text: None
        return
    try:
        from rich.console import Console  # a process without a terminal does not need it
        from rich.markup import escape

        with Console(stderr=True).status(f"serrate: {escape(title)}") as status:
            yield lambda text: status.update(f"serrate: {escape(title)} [dim]{escape(text)}[/dim]")
    finally:
        _shown.release()
