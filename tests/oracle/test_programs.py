"""Operators and random programs on ragged tensors of every composition, against nested lists: every backend, strategy and tile.

A failure prints the program as a file that can be run.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

from serrate import JaggedTensor, Structure, jit, settings
from tests.oracle.model import Lists, difference
from tests.oracle.programs import COMPOSITIONS, OPTIONS, Composition, Example, every, examples, ragged, rows

FULL = os.environ.get("SERRATE_TEST_FULL") == "1"
CLOSE = 1e-7
NAMES = {"torch": torch, "JaggedTensor": JaggedTensor, "Structure": Structure}


def arguments(example: Example) -> list[Any]:
    return [eval(a.code, NAMES) for a in example.arguments]


def lists(result: Any) -> Any:
    """Rows inside of rows, as lists of tensors."""
    if isinstance(result, tuple | list):
        return tuple(lists(each) for each in result)
    return [lists(each) for each in result.unbind()] if isinstance(result, JaggedTensor) else result


def check(example: Example, got: Any) -> None:
    different = difference(example.wanted(), lists(got if isinstance(got, tuple) else (got,)), CLOSE)
    assert not different, different


def ran(example: Example, backend: str, strategy: str | None = None, **options: Any) -> Any:
    """What a program gives, traced and compiled by a plan."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if not options:
            return jit(example.function, backend=backend, strategy=strategy)(*arguments(example))
        compiled, tensors = jit(example.function, backend=backend, strategy=strategy).compiled(*arguments(example))
        return compiled.fusion.compile(backend, strategy, **options)(*tensors)
    except Exception as error:
        error.add_note(f"{backend}, {strategy} {options}")
        raise
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda c: c.name)
@hypothesis.settings(max_examples=40 if FULL else 8)
@hypothesis.given(data=st.data())
def test_rows_are_where_they_were_put(composition: Composition, data: st.DataObject) -> None:
    given = ragged(composition, data.draw(rows(composition)), "float32", 2, "x", 0)
    x = eval(given.code, NAMES)
    assert isinstance(given.model, Lists)
    assert not difference(given.model, lists(x), 0.0), given.code
    assert not difference(given.model, lists(x.contiguous()), 0.0), given.code


SOME = ("one level", "gaps", "nested", "product")
ALL = [pytest.param(c, id=c.name, marks=() if c.name in SOME else pytest.mark.slow) for c in COMPOSITIONS]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("whole", [False, True], ids=["float64", "int64"])
@pytest.mark.parametrize("composition", ALL)
def test_every_operator_over_every_dim(composition: Composition, whole: bool) -> None:
    example = every(composition, whole)
    check(example, ran(example, "reference"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda c: c.name)
def test_every_operator_over_every_dim_compiled(composition: Composition, backend: str) -> None:
    for whole in (False, True):
        example = every(composition, whole)
        for strategy in OPTIONS:
            check(example, ran(example, backend, strategy))


@hypothesis.settings(max_examples=2000 if FULL else 100)
@hypothesis.given(example=examples())
def test_random_programs_on_the_reference(example: Example) -> None:
    check(example, ran(example, "reference"))


@pytest.mark.parametrize("strategy", OPTIONS)
@hypothesis.settings(max_examples=500 if FULL else 30)
@hypothesis.given(example=examples(), data=st.data())
def test_random_programs_under_every_plan(example: Example, strategy: str, data: st.DataObject) -> None:
    check(example, ran(example, "reference", strategy, **data.draw(OPTIONS[strategy])))


@pytest.mark.parametrize("strategy", OPTIONS)
@hypothesis.settings(max_examples=150 if FULL else 5)
@hypothesis.given(example=examples(), data=st.data())
def test_random_programs_in_cpp(example: Example, strategy: str, data: st.DataObject) -> None:
    check(example, ran(example, "cpp", strategy, **data.draw(OPTIONS[strategy])))


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("strategy", OPTIONS)
@hypothesis.settings(max_examples=60 if FULL else 8)
@hypothesis.given(example=examples())
def test_random_programs_in_triton(example: Example, strategy: str) -> None:
    check(example, ran(example, "triton", strategy))


@hypothesis.settings(max_examples=100 if FULL else 15)
@hypothesis.given(example=examples())
def test_random_programs_one_operation_at_a_time(example: Example) -> None:
    # Rows that are columns are something that programs have, and tensors have not.
    hypothesis.assume(not any("transpose" in line for line in example.body))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERRATE_BACKEND", "reference")
        settings.reload()
        try:
            got = example.function(*arguments(example))
        finally:
            patch.undo()
            settings.reload()
    check(example, got)


def test_a_failing_program_prints_as_a_file_that_runs() -> None:
    example = every(COMPOSITIONS[1], whole=True)
    assert pretty(example) == repr(example)
    exec(repr(example).replace("print(", "("), {})
