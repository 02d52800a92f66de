"""What the caller of a traced tensor is about to do.

In: objects that look at their caller's frame. Out: failures where a call is taken for a question, or a question for a call.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
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


# pytest rewrites what is inside of an `assert`: these functions have none.


def unanswered(x: Any, is_true: bool) -> list[str]:
    """Calls of `isinstance` in all kinds of places, which Python compiles in different ways: those that were not answered."""
    # fmt: off
    in_lines = (builtins
                .isinstance(
                    x,
                    str))
    # fmt: on
    found = {
        "two arguments in one": isinstance(*(x, str)),
        "parentheses": (isinstance)(x, str),
        "attribute": builtins.isinstance(x, str),
        "lines": in_lines,
        "choice": isinstance(x if is_true else None, str) and not isinstance(None if is_true else x, str),
        "choice of class": isinstance(x, str if is_true else int),
        "condition": isinstance(is_true and x, str),
        "generator": isinstance(next(y for y in [x]), str),
        "list": isinstance([given(y) for y in [x]][0], str),  # noqa: RUF015
        "in a list": [isinstance(y, str) for y in [x, 1] if isinstance(y, str)] == [True],
        "in a generator": list(isinstance(y, str) for y in (x, 1)) == [True, False],  # noqa: C400
        "lambda": (lambda y: isinstance(y, str))(x),
        "text": f"{isinstance(x, str)}" == "True",
        "assignment": isinstance(y := x, str) and y is x,
        "method of the answer": isinstance(x, str).bit_length() == 1,
        "dictionary": {**{"a": isinstance(x, str)}} == {"a": True},
        "class that is called": x.__class__() == "",
        "attribute of the class": x.__class__.__name__ == "str",
    }
    match [x, 1]:
        case [str(), int()]:
            found["pattern"] = True
        case _:
            found["pattern"] = False
    try:
        found["try"] = isinstance(x, str)
        raise ValueError
    except ValueError:
        found["except"] = isinstance(x, str)
    finally:
        found["finally"] = isinstance(x, str)
    return [name for name, is_answered in found.items() if not is_answered]


def answered(x: Any, asked: Callable[[Any], type]) -> list[str]:
    """Calls of a function written in C, next to questions: those that were answered."""
    found = {
        "call": asked(x) is str,
        "object": not isinstance(asked(x), type) or asked(x) is str,
        "class": isinstance("", asked(x)),
        "argument of a method of an answer": isinstance(x, str).__add__(asked(x) is str) != 1,
        "argument of the class of an answer": isinstance(x, str).__class__(asked(x) is str),
        "argument of the class": x.__class__(asked(x)) != str(Pretender),
    }
    try:
        raise ValueError
    except ValueError:
        found["except"] = asked(x) is str
    return [name for name, is_answered in found.items() if is_answered]


def test_questions_and_calls_in_any_place() -> None:
    assert not unanswered(Pretender(), True)
    assert not answered(Pretender(), operator.attrgetter("__class__"))


def without_columns(code: CodeType) -> CodeType:
    """The code as Python compiles it under `-X no_debug_ranges`: of the source only lines are known."""
    inner = tuple(without_columns(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    # Each entry is for up to 8 instructions: of the kind that has no columns, at the same line.
    count = len(code.co_code) // 2
    lines = b"".join(bytes([0x80 | 13 << 3 | min(8, count - k) - 1, 0]) for k in range(0, count, 8))
    return code.replace(co_consts=inner, co_linetable=lines)


def test_code_without_columns() -> None:
    """PYTHONNODEBUGRANGES leaves them out."""
    for each, argument in ((unanswered, True), (answered, operator.attrgetter("__class__"))):
        code = without_columns(each.__code__)
        assert {column for _, _, column, _ in code.co_positions()} == {None}
        assert not FunctionType(code, globals())(Pretender(), argument)


def test_code_that_runs_often() -> None:
    """Python replaces its instructions by faster ones."""
    x, asked = Pretender(), operator.attrgetter("__class__")
    for _ in range(200):
        assert x.__class__ is str
        assert not unanswered(x, True) and not answered(x, asked)


def test_code_with_many_names() -> None:
    """The places of these names do not fit into one instruction."""
    assignments = "\n".join(f"    given.v{k} = {k}" for k in range(300))
    names: dict[str, Any] = {"x": Pretender(), "given": given, "asked": operator.attrgetter("__class__")}
    exec(f"def f():\n{assignments}\n    return isinstance(x, str), x.__class__, x.__class__(), asked(x)", names)
    assert names["f"]() == (True, str, "", Pretender)
    exec("found = isinstance(x, str), isinstance(*[x, str]), x.__class__, asked(x)", names)
    assert names["found"] == (True, True, str, Pretender)


def test_own_code_is_not_answered() -> None:
    import serrate

    code = compile("found = isinstance(x, str)", serrate.__file__, "exec")
    names: dict[str, Any] = {"x": Pretender()}
    exec(code, names)
    assert not names["found"]
    assert not is_own(sys._getframe())
