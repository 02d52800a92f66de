"""`print` of a ragged tensor: the text holds the rows, aligned, with the middle of long ones left out.

In: tensors of every composition. Out: failures where the rows read back from the text are others.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.tensor import JaggedTensor
from tests.tensor.models import KINDS, ragged
from tests.tensor.shown import SHOWN


def rows_of(text: str) -> Any:
    """The rows that a printed tensor shows, read as Python; Ellipsis where something is left out."""
    assert text.startswith("JaggedTensor([")
    return ast.literal_eval(text[len("JaggedTensor(") : text.index("shape=")].rstrip().rstrip(","))


@pytest.mark.parametrize("name", SHOWN)
def test_rows_can_be_read_back(name: str) -> None:
    jt, rows = SHOWN[name]
    assert rows_of(str(jt)) == rows
    facts = re.sub(r", values=[^\]]*\]", "", repr(jt).removeprefix("JaggedTensor("))
    assert str(jt).endswith(facts)


@given(st.lists(st.integers(0, 12), max_size=12))
def test_the_middle_is_left_out(lengths: list[int]) -> None:
    def cut(items: list[Any]) -> list[Any]:
        return items if len(items) <= 6 else [*items[:3], ..., *items[-3:]]

    numbers = iter(range(sum(lengths)))
    rows = [[next(numbers) for _ in range(length)] for length in lengths]
    jt = JaggedTensor.from_lengths(torch.arange(sum(lengths)), lengths)
    assert rows_of(str(jt)) == cut([cut(row) for row in rows])


def test_numbers_are_aligned_as_torch_aligns_them() -> None:
    jt = JaggedTensor.from_lengths(torch.tensor([1.5, -20.25, 3.0, 4.0]), [1, 0, 3])
    assert str(jt) == textwrap.dedent(
        """\
        JaggedTensor([[  1.5000],
                      [],
                      [-20.2500,   3.0000,   4.0000]],
                     shape=(3, r0), dtype=torch.float32, device=cpu, lengths=[1, 0, 3])"""
    )


def test_blocks_are_told_apart_by_an_empty_line() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(9.0).view(9, 1), [1, 8]).with_hint(reuse="high")
    assert str(jt) == textwrap.dedent(
        """\
        JaggedTensor([[[0.]],

                      [[1.],
                       [2.],
                       [3.],
                       ...,
                       [6.],
                       [7.],
                       [8.]]],
                     shape=(2, r0, 1), dtype=torch.float32, device=cpu, lengths=[1, 8], hints=(reuse=high))"""
    )


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (torch.tensor([1e-9, float("nan"), 1e9, float("-inf")]), "[1.0000e-09,        nan, 1.0000e+09,       -inf]"),
        (torch.tensor([True, False]), "[ True, False]"),
        (torch.tensor([1 + 2j, -0.5j]), "[ 1.0000+2.0000j, -0.0000-0.5000j]"),
        (torch.tensor([0.5, 2], dtype=torch.bfloat16), "[0.5000, 2.0000]"),
        (torch.tensor([3, 200], dtype=torch.uint8), "[  3, 200]"),
        (torch.tensor([float("nan")] * 2), "[nan, nan]"),
    ],
)
def test_every_kind_of_number(values: torch.Tensor, shown: str) -> None:
    assert f"([{shown}]," in str(JaggedTensor.from_lengths(values, [len(values)]))


def test_tensors_of_many_dims_stay_short() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(1000, 8, 8), torch.full((10, 10), 10))
    assert len(str(jt).splitlines()) < 600
    assert rows_of(str(JaggedTensor.from_lengths(torch.arange(100).view(100, 1), torch.full((10, 10), 1))))[2] is ...


@given(ragged(*KINDS))
def test_rows_of_any_composition_can_be_read_back(drawn: tuple[JaggedTensor, list[Any]]) -> None:
    jt, model = drawn
    edge = 3 if jt.ndim <= 3 else 2

    def cut(items: Any) -> Any:
        if not isinstance(items, list):
            return items
        kept = items if len(items) <= 2 * edge else [*items[:edge], ..., *items[-edge:]]
        return [each if each is ... else cut(each) for each in kept]

    assert rows_of(str(jt)) == cut(model)
    assert repr(jt).startswith(f"JaggedTensor(shape={jt.shape}, ")
