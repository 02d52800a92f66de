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
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


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
    """The offsets of such instructions and of their inline caches: while Python 3.12 runs a property, `f_lasti` may be at
    one of these.

    Which call is one of `isinstance` is found by following how high the stack is, which is the same in all versions of Python and
    needs no positions in the source: the function and a NULL (or an object, if it is a method) are below the arguments.
    """
    found: set[int] = set()
    depth, held = 0, frozenset[int]()  # how high the stack is; where `isinstance` is on it
    at_target: dict[int, tuple[int, frozenset[int]]] = {}
    instructions = list(dis.get_instructions(code))
    for each, end in zip(instructions, [*(i.offset for i in instructions[1:]), len(code.co_code)], strict=True):
        depth, held = at_target.get(each.offset, (depth, held))
        before, depth = depth, depth + dis.stack_effect(each.opcode, each.arg, jump=False)
        if each.opcode in _JUMPS:
            height = before + dis.stack_effect(each.opcode, each.arg, jump=True)
            at_target.setdefault(each.argval, (height, frozenset(k for k in held if k < height)))
        is_attribute = each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
        is_call = each.opname.startswith(("CALL", "PRECALL"))
        # Python 3.11 calls in two steps, of which the first takes one element less.
        function = depth - (2 if each.opname.startswith("PRECALL") else 1)
        is_question = each.opname == "MATCH_CLASS" or (is_attribute and each.argval == "__class__")
        if is_question or (is_call and not held.isdisjoint((function, function + 1))):
            found.update(range(each.offset, end, 2))
        kept = before - 1 if is_attribute else function if each.opname.startswith("CALL") else depth
        held = frozenset(k for k in held if k < kept)
        if each.opname.startswith("LOAD") and each.argval == "isinstance":
            held |= {depth - 1}
    return frozenset(found)
