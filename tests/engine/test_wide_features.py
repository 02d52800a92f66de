"""Rows whose features take several blocks, under the plans that a GPU has for rows of unknown length.

In: short rows, rows that are cut, rows without elements. Out: what plain torch gives for each row, and its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, jit, ops

pytestmark = pytest.mark.triton
LENGTHS = [3, 0, 258]
"""Rows of more than 256 positions are cut."""
GROUPS = [2, 0, 1]
WIDTH = 1025
"""More than one block."""

BY_ROW: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "layer norm": (lambda x: ops.layer_norm(x, (1, -1)), lambda r: (r - r.mean()) / (r.var(correction=0) + 1e-5).sqrt()),
    "deviations": (lambda x: x - x.mean((1, 2), keepdim=True), lambda r: r - r.mean()),
    "variance": (lambda x: x.var((1, 2), correction=0), lambda r: r.var(correction=0)),
}


def values_of(width: int) -> Tensor:
    return torch.randn(sum(LENGTHS), width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BY_ROW)
def test_each_row_and_its_gradient(name: str) -> None:
    ours, by_row = BY_ROW[name]
    values, other = values_of(WIDTH).requires_grad_(), values_of(WIDTH).requires_grad_()
    got = jit(ours, backend="triton", strategy="persistent_dynamic")(JaggedTensor.from_lengths(values, LENGTHS))
    filled = [k for k, n in enumerate(LENGTHS) if n]
    rows = other.split(LENGTHS)
    want = [by_row(rows[k]) for k in filled]
    parts = got.values.split(LENGTHS) if isinstance(got, JaggedTensor) else got
    weights = [torch.randn(w.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k, w in enumerate(want)]
    for k, expected in zip(filled, want, strict=True):
        torch.testing.assert_close(parts[k], expected)
    sum((parts[k] * w).sum() for k, w in zip(filled, weights, strict=True)).backward()
    sum((x * w).sum() for x, w in zip(want, weights, strict=True)).backward()
    torch.testing.assert_close(values.grad, other.grad)


def test_groups_of_rows() -> None:
    """The mean of each group is computed on the way, and nothing reads it."""
    values = values_of(5)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    program = jit(lambda x: x.var((1, 2, 3)), backend="triton", strategy="persistent_dynamic")
    got = program(JaggedTensor.from_lengths(values, [torch.tensor(GROUPS), torch.tensor(LENGTHS)]))
    bounds = [0, ends[GROUPS[0] - 1], ends[GROUPS[0] - 1], ends[-1]]
    for k in (0, 2):
        torch.testing.assert_close(got[k], values[bounds[k] : bounds[k + 1]].var())
