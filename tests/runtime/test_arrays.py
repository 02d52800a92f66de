"""What is derived from offsets is remembered with them, and made again when it must be."""

from __future__ import annotations

import itertools

import pytest
import torch

from serrate import ir, ops
from serrate.errors import StructureError
from tests.engine.oracle import BACKENDS, STRATEGIES


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_are_written_to(backend: str, strategy: str) -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    program = f.compile(backend, strategy)
    values, given = torch.arange(24.0).reshape(12, 2), torch.zeros(4, dtype=torch.int64)
    for boundaries in ([0, 2, 2, 12], [0, 5, 6, 12], [0, 0, 12, 12]):
        given.copy_(torch.tensor(boundaries))
        want = [values[a:b].sum(0).tolist() for a, b in itertools.pairwise(boundaries)]
        assert program(values, given).tolist() == want
    given.copy_(torch.tensor([0, 9, 3, 12]))
    with pytest.raises(StructureError, match="must not decrease"):
        program(values, given)
