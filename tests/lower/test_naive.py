"""Views in naive programs: a read of a view is a read of what it views, where its dims are read as they are."""

from __future__ import annotations

import pytest
import torch

from serrate import JaggedTensor, ir, jit, ops
from tests.engine.oracle import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_dim_that_are_read_elsewhere(backend: str) -> None:
    with ir.Fusion() as f:
        x = f.input((None, 6), torch.float32)
        parts = ops.unflatten(ops.relu(x), 1, (2, 3))
        f.output(ops.flip(parts, 1), ops.flip(parts, 2), ops.slice(parts, 2, 1), ops.flatten(parts, 1, 2) + x)
    values = torch.arange(-4.0, 8.0).reshape(2, 6)
    want = values.relu().reshape(2, 2, 3)
    got = f.compile(backend)(values)
    for mine, wanted in zip(got, (want.flip(1), want.flip(2), want[:, :, 1:], values.relu() + values), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_of_rows_of_one_feature_that_are_read_elsewhere(backend: str) -> None:
    """The merged dim and the rows are made from the same dim, and neither from the other."""
    with ir.Fusion() as f:
        x, offsets, order = f.input((None, 1), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        doubled = ops.as_nested(x, offsets) * 2
        f.output(ops.index(ops.flatten(ops.as_flattened(doubled)), order))
    values, order = torch.tensor([[3.0], [1.0], [0.0], [4.0], [2.0]]), torch.tensor([4, 2, 3, 0, 1])
    assert torch.equal(f.compile(backend)(values, torch.tensor([0, 3, 5]), order), values[order, 0] * 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_elements_of_rows_of_one_feature(backend: str) -> None:
    values = torch.randn(5, 1, requires_grad=True)
    rows, at = JaggedTensor.from_lengths(values, [3, 2]), torch.tensor([[2], [0], [0], [1], [0]])
    weight = torch.randn(5, 1)
    found = jit(lambda x, k: torch.gather(x, 1, k), backend=backend)(rows, rows.with_values(at))
    (gradient,) = torch.autograd.grad(found.values, values, weight)
    wanted = torch.zeros(5, 1).index_add_(0, torch.tensor([2, 0, 0, 4, 3]), weight)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_elements_of_rows_without_their_only_feature(backend: str) -> None:
    rows, at = JaggedTensor.from_lengths(torch.randn(5, 1), [3, 2]), torch.tensor([2, 0, 0, 1, 0])
    found = jit(lambda x, k: torch.gather(x.squeeze(2), 1, k), backend=backend)(rows, rows.with_values(at))
    assert torch.equal(found.values, rows.values[[2, 0, 0, 4, 3], 0])
