"""Logging: the standard logger `serrate`, and a child logger for each topic.

In: the value of `SERRATE_LOG`. Out: loggers with their levels, and a handler that writes to stderr unless the application has
configured logging itself.

| logger           | level | what it reports                                        |
| `serrate.cache`  | info  | programs that are compiled, and how long that takes    |
| `serrate.plan`   | info  | the plan of every program that is built                |
| `serrate.tune`   | info  | what was measured, and which plan was chosen           |
| `serrate.source` | debug | generated code                                         |
| `serrate.passes` | debug | the program after every pass that changes it           |

`SERRATE_LOG=info` shows everything of that level and above; `SERRATE_LOG=plan,source` everything of these topics.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
TOPICS = ("plan", "passes", "source", "tune", "cache")

_ROOT = "serrate"


def logger(topic: str) -> logging.Logger:
    """The logger of a topic.

    >>> logger("plan").name
    'serrate.plan'
    """
    assert topic in TOPICS, topic
    return logging.getLogger(f"{_ROOT}.{topic}")


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to the current stderr, unless records reach a handler of the application."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)
            super().emit(record)


_handler = _ToStderr()
_handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
_set: list[logging.Logger] = []
"""Loggers whose level this module has set."""


def configure(asked: Collection[str]) -> None:
    """Sets the levels of all loggers; resets levels that an earlier call set and that are no longer requested."""
    root = logging.getLogger(_ROOT)
    while _set:
        _set.pop().setLevel(logging.NOTSET)
    root.removeHandler(_handler)
    levels = [level for level in LEVELS if level in asked]
    if levels:
        root.setLevel(levels[0].upper())
        _set.append(root)
    for topic in TOPICS:
        if topic in asked:
            logger(topic).setLevel(logging.DEBUG)
            _set.append(logger(topic))
    if _set:
        root.addHandler(_handler)
