"""The name under which a decorated function is pickled, as Python pickles functions.

In: what a decorator returned. Out: its name in its module, or None.
"""

from __future__ import annotations

import sys
from typing import Any


def global_name(decorated: Any) -> str | None:
    """The dotted name under which a function's module holds the result of its decorator; None if the module holds something else.

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
