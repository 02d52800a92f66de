"""Statistics of rows on a GPU: every thread keeps those of the positions that it reads until the row is done.

In: fusions over rows of features. Out: failures if a result differs from plain torch, or if the loop over a row combines what
several threads have.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from serrate import ops
from serrate.ir import Fusion
from serrate.ir.loops import For, Reduce, nodes
from serrate.ir.tile import SERIAL
from serrate.lower.pipeline import lower
from serrate.lower.stages import stages
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import plan
from serrate.schedule.target import GPU

THREADS, LOADED = 32, 16


def softmax(features: int, dtype: torch.dtype) -> Fusion:
    """A softmax along rows of features; along rows of numbers if `features` is 0."""
    with Fusion("softmax") as f:
        x, offsets = f.input((None, features) if features else (None,), dtype), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), 1))
    return f


def plans(features: int, dtype: torch.dtype) -> list[Plan]:
    """The plans of pieces of long rows and of short rows; and the one of whole rows."""
    (program,) = stages(softmax(features, dtype))
    cut = plan(program, "persistent_dynamic", GPU)
    assert cut.short is not None
    return [cut, cut.short, plan(program, "maskless", GPU)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("features", [0, 16, 33, 128, 300])
def test_a_loop_over_a_row_combines_no_threads(features: int, dtype: torch.dtype) -> None:
    (program,) = stages(softmax(features, dtype))
    for chosen in plans(features, dtype):
        loops = lower(chosen.apply(program), "softmax", (), GPU)
        inside = [loop for k in loops.kernels for loop in nodes(k.body) if isinstance(loop, For) and loop.kind is SERIAL]
        # Partial results of pieces have two lanes; they are combined once for each row.
        lanes = 3 if features else 2
        reduced = [n for loop in inside for n in nodes(loop.body) if isinstance(n, Reduce) and len(n.lanes) == lanes]
        assert reduced, f"{chosen}: no thread keeps statistics"
        threads = chosen.launch_options.warps * THREADS
        for node in reduced:
            own, at_once, *columns = node.lanes
            assert own not in node.local.lanes and at_once in node.local.lanes, f"{node} combines what threads have"
            # A thread loads one number, or 16 bytes of features.
            assert at_once.size == (threads * LOADED // (columns[0].size * dtype.itemsize) if columns else threads)


def rows_of(x: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    return [x[a:b] for a, b in pairwise(offsets.tolist())]


@pytest.mark.triton
@given(
    st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 130, 200]), min_size=1, max_size=5),
    st.sampled_from(["plain", "far", "infinite", "nan", "masked"]),
    st.sampled_from([(0, torch.float32), (0, torch.bfloat16), (8, torch.float32), (24, torch.bfloat16), (64, torch.float16)]),
)
def test_any_rows(lengths: list[int], kind: str, shape: tuple[int, torch.dtype]) -> None:
    features, dtype = shape
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(sum(lengths), max(features, 1), generator=torch.Generator().manual_seed(len(lengths))).to(dtype)
    if len(x):
        at = len(x) // 2
        match kind:
            case "far":
                x = x + torch.linspace(-9000, 9000, x.shape[1]).to(dtype)
            case "infinite":
                x[at, -1] = float("inf")
            case "nan":
                x[at, 0] = float("nan")
            case "masked":
                x[: at + 1] = float("-inf")
    x = x if features else x[:, 0].contiguous()
    want = [row.double().softmax(0) for row in rows_of(x, offsets)]
    for strategy in (None, "maskless", "persistent_dynamic"):
        found: Any = softmax(features, dtype).compile("triton", strategy=strategy)(x, offsets)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.values.double(), torch.cat(want), rtol=tolerance, atol=tolerance, equal_nan=True)


def test_statistics_with_many_states_are_combined_in_every_block() -> None:
    """Kept by every thread, the three of a variance would take the registers that loads need."""
    with Fusion("variance") as f:
        x, offsets = f.input((None, 128), torch.float32), f.input((None,), torch.int64)
        f.output(ops.var(ops.as_nested(x, offsets), 1))
    (program,) = stages(f)
    assert not any(step.args[1:2] == ("r0i",) for step in plan(program, "maskless", GPU).steps if step.primitive == "split")
    assert any(step.args[1:2] == ("r0i",) for step in plans(128, torch.float32)[2].steps if step.primitive == "split")
