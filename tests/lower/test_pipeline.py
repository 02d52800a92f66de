"""Passes of the lowering pipeline, looked at one by one.

In: scheduled programs. Out: failures that name the pass's promise that was broken.
"""

from __future__ import annotations

import pytest
import torch

from serrate import ir, ops
from serrate.ir.expr import Element
from serrate.ir.loops import For, expressions_of, nodes
from serrate.ir.recipes import Owners
from serrate.ir.tile import GRID, TileProgram
from serrate.lower.pipeline import lower
from serrate.lower.stages import stages
from serrate.schedule.strategies import plan
from serrate.schedule.target import GPU
from tests.engine.oracle import BACKENDS


def test_a_table_of_owners_is_as_long_as_the_grid_that_reads_it() -> None:
    """Two kernels may call their grids by one name and cut rows into parts of different sizes."""
    with ir.Fusion() as f:
        x, offsets = f.input((None, 64), torch.bfloat16), f.input((None,), torch.int64)
        w = f.input((16, 64, 64), torch.bfloat16)
        rows = ops.as_nested(x, offsets)
        f.output(ops.matmul(rows, w), ops.relu(rows))
    (program,) = stages(f)
    assert isinstance(program, TileProgram)
    chosen = plan(program, "persistent_dynamic", GPU)
    lowered = lower(chosen.apply(program), "f", (), GPU)
    sizes = []
    for kernel in lowered.kernels:
        every = list(nodes(kernel.body))
        bounds = {n.symbol: n.bound for n in every if isinstance(n, For) and n.kind is GRID}
        for array in {e.array for n in every for x in expressions_of(n) for e in x.walk() if isinstance(e, Element)}:
            if isinstance(array.recipe, Owners):
                sizes.append(array.recipe.size)
                assert array.recipe.size in bounds.values()
    assert len(set(sizes)) == 2, "the product and what is done to each element cut rows differently"


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_may_be_indices_too(backend: str) -> None:
    with ir.Fusion() as f:
        x, offsets, table = f.input((None,), torch.float32), f.input((None,), torch.int64), f.input((7,), torch.float32)
        f.output(ops.sum(ops.as_nested(x, offsets), 1), ops.index(table, offsets))
    totals, picked = f.compile(backend)(torch.arange(6.0), torch.tensor([0, 2, 2, 6]), torch.arange(7.0) * 10)
    assert totals.tolist() == [1, 0, 14] and picked.tolist() == [0, 20, 20, 60]
