"""Matrix products whose GPU programs stay on their multiprocessor, and compute one block of the result after another.

In: random groups. Out: differences from torch, group by group, and from the bits of one program per block.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from serrate import ir, ops
from serrate.errors import ScheduleError, StrategyError
from serrate.runtime import triton as runtime
from serrate.runtime.launch import device_workers
from tests.engine.test_expert_layers import CHOICES, by_token, close, layer
from tests.engine.test_expert_layers import given as tokens

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
RESIDENT = {"strategy": "persistent_dynamic", "resident": 1}


def grouped(dtype: torch.dtype, groups: int, depth: int, width: int) -> ir.Fusion:
    with ir.Fusion("grouped") as f:
        x, offsets = f.input((None, depth), dtype), f.input((None,), torch.int64)
        f.output(ops.as_flattened(ops.relu(ops.matmul(ops.as_nested(x, offsets), f.input((groups, depth, width), dtype)))))
    return f


def by_group(lengths: list[int], depth: int, width: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """Arguments of `grouped`, and its result by torch."""
    generator = torch.Generator().manual_seed(len(lengths) * 31 + depth)
    x = torch.randn(sum(lengths), depth, generator=generator).to(dtype)
    weights = torch.randn(len(lengths), depth, width, generator=generator).to(dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.split(x.double(), lengths)
    return (x, offsets, weights), torch.cat([torch.relu(r @ w) for r, w in zip(rows, weights.double(), strict=True)])


@pytest.mark.sampled(1)
@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.integers(1, 40),
    st.sampled_from([1, 17, 256, 257, 8 * 256, 9 * 256 + 1]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
)
def test_grouped_products(lengths: list[int], depth: int, width: int, dtype: torch.dtype, resident: int) -> None:
    args, want = by_group(lengths, depth, width, dtype)
    program = grouped(dtype, len(lengths), depth, width)
    got = program.compile("triton", strategy="persistent_dynamic", resident=resident, tile=16)(*args)
    assert torch.equal(got, program.compile("triton", strategy="persistent_dynamic", tile=16)(*args))
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2e-2, 0.3)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [300], [70, 0, 1, 130], [3] * 40], ids=str)
def test_sums_over_rows(lengths: list[int]) -> None:
    """The gradients of weights: a product for each group, of any depth, including 0."""
    with ir.Fusion("weights") as f:
        x, y = (f.input((None, n), torch.float32) for n in (20, 33))
        offsets = f.input((None,), torch.int64)
        left, right = (ops.as_nested(t, offsets) for t in (x, y))
        f.output(ops.matmul(ops.transpose(left, 1, 2), right))
    x, y = torch.randn(sum(lengths), 20), torch.randn(sum(lengths), 33)
    args = (x, y, torch.tensor([0, *lengths]).cumsum(0))
    want = [a.T @ b for a, b in zip(torch.split(x, lengths), torch.split(y, lengths), strict=True)]
    torch.testing.assert_close(f.compile("triton", **RESIDENT)(*args), torch.stack(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, (experts, _) in CHOICES.items() if experts < 100])
def test_layers_of_experts(name: str) -> None:
    experts, chosen = CHOICES[name]
    args = tokens(chosen, experts, 37, 29, torch.float32)
    program = layer(experts, 37, 29, chosen.shape[1], torch.float32).compile("triton", **RESIDENT)
    close(program(*args), by_token(args))


def test_a_multiprocessor_has_as_many_programs_as_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, int]] = []
    launch = runtime.TritonFunction.launch

    def counted(self: Any, grid: tuple[int, int], *given: Any) -> None:
        grids.append(grid)
        launch(self, grid, *given)

    args, want = by_group([90, 0, 40], 16, 300, torch.float32)
    program = grouped(torch.float32, 3, 16, 300).compile("triton", strategy="persistent_dynamic", resident=3, tile=16)
    monkeypatch.setattr(runtime.TritonFunction, "launch", counted)
    torch.testing.assert_close(program(*args).double(), want, rtol=1e-4, atol=1e-4)
    workers = device_workers(torch.device("cuda")) if torch.cuda.is_available() else runtime.INTERPRETED
    blocks, resident = 9 * 2, 3 * workers
    assert max(n for n, _ in grids) == min(blocks, resident)


def test_blocks_of_many_columns_are_computed_in_squares() -> None:
    """Blocks of few columns are computed row by row."""
    args, _ = by_group([40, 7], 16, 9 * 256, torch.float32)
    for options in ({}, {"resident": 1}):
        source = grouped(torch.float32, 2, 16, 9 * 256).compile("triton", "persistent_dynamic", **options).source(*args)
        (line,) = re.findall(r"\w+, \w+ = tl\.swizzle2d\(.*", source)
        assert line.endswith(", 9, 8)")
        assert ("flatten=True" in source) == bool(options)
        # Triton flattens only a loop that contains nothing but the loop over the depth.
        assert not options or " if " not in source.split("tl.range")[1]
    args, _ = by_group([40, 7], 16, 8 * 256, torch.float32)
    assert "swizzle2d" not in grouped(torch.float32, 2, 16, 8 * 256).compile("triton", "persistent_dynamic").source(*args)


def test_refusals() -> None:
    args, _ = by_group([4], 3, 5, torch.float32)
    program = grouped(torch.float32, 1, 3, 5)
    with pytest.raises(ScheduleError, match="resident= is for GPUs"):
        program.compile("cpp", **RESIDENT)(*args)
    with pytest.raises(StrategyError, match="resident must be at least 1"):
        program.compile("triton", strategy="persistent_dynamic", resident=0)(*args)
    with pytest.raises(ScheduleError, match="rows=, uncut= and short_tile= do not apply"):
        program.compile("triton", **RESIDENT, uncut=64)(*args)
    with ir.Fusion("sums") as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    with pytest.raises(ScheduleError, match="this program computes none"):
        f.compile("triton", **RESIDENT)(args[0], args[1])
