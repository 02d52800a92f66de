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


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("own_columns", [False, True])
def test_products_of_rows_meet_a_rectangle_that_was_made_alone(backend: str, own_columns: bool) -> None:
    """Its rows and columns are as long as the rows that are multiplied, but share nothing with them."""
    x, y = rows(), rows()
    y = x.with_values(y.values) if own_columns else y
    bias = JaggedTensor(
        torch.randn(13, dtype=torch.float64), Structure.from_lengths(LENGTHS.clone()).with_columns(LENGTHS.clone())
    )
    got = jit(lambda x, y, bias: torch.softmax(x @ y.transpose(1, 2) + bias, -1) @ y, backend=backend)(x, y, bias)
    for a, b, c, found in zip(x.unbind(), y.unbind(), bias.unbind(), got.unbind(), strict=True):
        torch.testing.assert_close(found, torch.softmax(a @ b.T + c.view(len(a), len(b)), -1) @ b)


def test_attention_takes_a_mask_that_was_made_alone() -> None:
    x = JaggedTensor.from_lengths(torch.randn(5, 2, 4), LENGTHS.clone()).transpose(1, 2)
    mask = JaggedTensor(torch.randn(13) > 0, Structure.from_lengths(LENGTHS.clone()).with_columns(LENGTHS.clone()))
    got = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask.unsqueeze(1))
    for a, m, found in zip(x.unbind(), mask.unbind(), got.unbind(), strict=True):
        n = a.shape[1]
        want = torch.nn.functional.scaled_dot_product_attention(a, a, a, attn_mask=m.view(n, n))
        torch.testing.assert_close(found, want.nan_to_num() if n else want)


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
