"""Containers of a kernel: lists, dicts and sets must not be modified in a loop over tiles, or in a branch on a runtime value.

In: the local variables of a kernel where a loop or branch begins, and the same containers where it ends. Out: `KernelError` if
one was modified. Loops carry variables, not the contents of containers: a modification would happen once, while the loop is
traced.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from serrate.frontend.kernel.machine import refuse, user_frame

Contents = list[tuple[str, Any, list[Any]]]
"""Containers, each with the name of its variable and a copy of its items."""


def contents_now() -> Contents:
    """The containers that the local variables of the kernel hold, directly or in other containers."""
    frame = user_frame()
    found: Contents = []
    seen: set[int] = set()
    pending = [] if frame is None else [*frame.f_locals.items()]
    while pending:
        name, value = pending.pop()
        items = list(_items(value))
        if not items and not isinstance(value, list | dict | set | deque | types.SimpleNamespace):
            continue
        if id(value) not in seen:
            seen.add(id(value))
            found.append((name, value, items))
            pending += [(name, item) for item in items]
    return found


def require_unchanged(before: Contents, where: str) -> None:
    """Raises if a container was modified."""
    for name, container, items in before:
        now = list(_items(container))
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            refuse(
                f"{name}, a {type(container).__name__}, is modified in {where}: this happens only once, when the kernel is "
                "traced; use a variable for each of its elements"
            )


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set | deque):
        yield from value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, types.SimpleNamespace):
        yield from vars(value).values()
