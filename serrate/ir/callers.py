"""Callers: what the Python code that calls into a traced tensor is about to do.

In: the caller's frame. Out: whether it asks for the class of an object; whether it is serrate's own.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from types import CodeType, FrameType

ASKING: list[CodeType] = []
"""Code that does nothing but ask, for code outside serrate: what replaces `isinstance` while a function is traced."""

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def is_own(frame: FrameType) -> bool:
    """Whether a frame runs serrate's own code."""
    return _is_own(frame.f_code.co_filename)


def outside() -> FrameType:
    """The innermost frame that does not run serrate's own code."""
    frame = sys._getframe(1)
    while is_own(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    return os.path.abspath(file).startswith(PACKAGE)


def asks_for_class(frame: FrameType) -> bool:
    """Whether code outside serrate is at `isinstance(x, ...)`, `x.__class__` or `case torch.Tensor():`.

    A frame that calls a function written in C stays at that call while the function asks about its arguments. So a question is
    Python's own only if the call is one of `isinstance`.
    """
    if is_own(frame):
        return any(frame.f_code is code for code in ASKING)
    return frame.f_lasti in _questions(frame.f_code)


@functools.lru_cache(maxsize=4096)
def _questions(code: CodeType) -> frozenset[int]:
    """The places of such instructions. A call begins in the source where the name of its function does."""
    found: set[int] = set()
    named: set[tuple[int, int]] = set()
    for each in dis.get_instructions(code):
        at = each.positions
        begin = (at.lineno, at.col_offset) if at is not None and at.lineno is not None and at.col_offset is not None else None
        if each.opname.startswith("LOAD") and each.argval == "isinstance" and begin is not None:
            named.add(begin)
        asked = each.opname.startswith(("CALL", "PRECALL")) and begin in named
        if asked or each.opname == "MATCH_CLASS" or (each.opname.startswith("LOAD_ATTR") and each.argval == "__class__"):
            found.add(each.offset)
    return frozenset(found)
