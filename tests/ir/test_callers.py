"""What the caller of a traced tensor is about to do.

In: objects that look at their caller's frame. Out: failures where a call is taken for a question, or a question for a call.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import pytest

from serrate.ir.callers import asks_for_class, is_own


class Pretender:
    """Claims to be a `str` to those who ask for its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return str if asks_for_class(sys._getframe(1)) else Pretender


def given(x: Any) -> Any:
    return x


def test_questions_of_python() -> None:
    x = Pretender()
    assert isinstance(x, str) and isinstance(x, (int, str)) and isinstance(x, int | str)
    assert isinstance(given(x), str)
    assert [isinstance(each, str) for each in (x, 1)] == [True, False]
    assert not isinstance(x, int)
    assert x.__class__ is str
    match x:
        case str():
            pass
        case _:
            pytest.fail("not matched")


def test_calls_of_functions_written_in_c_are_not_questions() -> None:
    """They see the same frame at the same line; torch would take the object for what it claims to be."""
    x = Pretender()
    assert operator.attrgetter("__class__")(x) is Pretender
    assert isinstance(x, str) and getattr(x, "__class__") is Pretender  # noqa: B009
    assert isinstance(operator.attrgetter("__class__")(x), type)
    assert list(map(isinstance, [x], [str])) == [False]


def test_own_code_is_not_answered() -> None:
    import serrate

    code = compile("found = isinstance(x, str)", serrate.__file__, "exec")
    names: dict[str, Any] = {"x": Pretender()}
    exec(code, names)
    assert not names["found"]
    assert not is_own(sys._getframe())
