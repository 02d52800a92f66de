"""Containers of a kernel: lists, dicts and sets must not change inside a loop over tiles, or in a branch on a runtime value.

In: the local variables of a kernel where a loop or branch begins, and the same containers where it ends. Out: `KernelError` if
one has changed. Only names are carried from one iteration to the next; a change to a container would happen once, while the loop
is traced.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from serrate.frontend.kernel.machine import refuse, user_frame

Contents = list[tuple[str, Any, list[Any]]]
"""Containers by name, each with what it contained."""


def contents_now() -> Contents:
    """The containers that the local variables of the kernel hold, directly or inside others."""
    frame = user_frame()
    found: Contents = []
    seen: set[int] = set()
    pending = [] if frame is None else [*frame.f_locals.items()]
    while pending:
        name, value = pending.pop()
        inside = list(_parts(value))
        if not inside and not isinstance(value, list | dict | set | deque | types.SimpleNamespace):
            continue
        if id(value) not in seen:
            seen.add(id(value))
            found.append((name, value, inside))
            pending += [(name, each) for each in inside]
    return found


def require_unchanged(before: Contents, what: str) -> None:
    """Raises if a container has changed."""
    for name, value, inside in before:
        now = list(_parts(value))
        if len(now) != len(inside) or any(a is not b for a, b in zip(now, inside, strict=True)):
            refuse(
                f"{name}, a {type(value).__name__}, changes in {what}: only names are carried from one iteration to the next, "
                "so give each of its elements a name"
            )


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set | deque):
        yield from value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, types.SimpleNamespace):
        yield from vars(value).values()
