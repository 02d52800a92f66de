"""Views in naive programs: a read of a view is a read of what it views, where its dims are read as they are."""

from __future__ import annotations

import pytest
import torch

from serrate import ir, ops
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
