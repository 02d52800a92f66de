"""Operands that bring ragged dims and what counts them from different tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serrate import JaggedTensor, Structure, jit
from serrate.errors import ShapeError

LENGTHS = torch.tensor([3, 0, 2])


def rows() -> JaggedTensor:
    """Built anew each time: of equal rows, and of no common structure."""
    return JaggedTensor.from_lengths(torch.randn(5, 2, dtype=torch.float64), LENGTHS.clone())


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_what_is_left_of_one_tensor_meets_rows_of_another(backend: str) -> None:
    x, y = rows(), rows()
    for program in (lambda x, y: y.sum(1, keepdim=True) - x, lambda x, y: torch.where(y.amax(1, keepdim=True) > 0, x, -x)):
        got = jit(program, backend=backend)(x, y)
        want = [program(a[None], b[None])[0] if len(a) else a for a, b in zip(x.unbind(), y.unbind(), strict=True)]
        for a, b in zip(got.unbind(), want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_rows_of_one_rectangle_meet_columns_of_another(backend: str) -> None:
    counts = torch.tensor([2, 4, 1])

    def rectangles() -> JaggedTensor:
        structure = Structure.from_lengths(LENGTHS.clone()).with_columns(counts.clone())
        return JaggedTensor(torch.randn(8, 3, dtype=torch.float64), structure)

    def program(x: Any, y: Any) -> Any:
        return x.sum(2, keepdim=True) - y.sum(1, keepdim=True)

    x, y = rectangles(), rectangles()
    got = jit(program, backend=backend)(x, y)
    for a, b, c in zip(got.unbind(), x.unbind(), y.unbind(), strict=True):
        torch.testing.assert_close(a, program(b[None], c[None])[0])


@pytest.mark.parametrize("other", ["rows", "rectangles"])
def test_rows_never_meet_rows_that_another_dim_counts(other: str) -> None:
    """Row i of one operand would meet all rows of the other, whose lengths differ."""
    structure = Structure.from_lengths(LENGTHS.clone())
    x = JaggedTensor(torch.randn(5), structure)
    if other == "rectangles":
        x = JaggedTensor(torch.randn(13), structure.with_columns(LENGTHS.clone()))
    for program in (lambda x: x.unsqueeze(1) + x, lambda x: torch.where(x > 0, x.unsqueeze(1), 0.0)):
        with pytest.raises(ShapeError, match=r"dim 0 of \(3, 1, r0.*\), which counts rows, is not .* unsqueeze\(1\) adds"):
            program(x)
    torch.testing.assert_close((x.unsqueeze(1) + x.unsqueeze(1)).values.flatten(), 2 * x.values)
