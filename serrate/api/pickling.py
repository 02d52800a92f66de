"""The name of a decorated function, for pickling: as Python pickles functions, by where they are found.

In: what a decorator returned. Out: its name within its module, or None.
"""

from __future__ import annotations

import sys
from typing import Any


def global_name(decorated: Any) -> str | None:
    """The dotted name under which the module of a function holds what its decorator returned; None if it does not.

    >>> import serrate
    >>> global_name(serrate.jit(lambda x: x)) is None
    True
    """
    name = getattr(decorated, "__qualname__", None)
    found: Any = sys.modules.get(getattr(decorated, "__module__", None) or "")
    if name is None or found is None:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is decorated else None
