"""Warps, stages and blocks of rows on a GPU, by what a program does with rows; and that such plans compute what torch does.

In: functions of rows of features, planned without a GPU and run by Triton's interpreter. The oracle is plain torch, row by row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from serrate import JaggedTensor, jit, ops
from serrate.fusion_stage import FusionStage
from serrate.schedule.heuristic import RowStatistics, choose
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import plan as planned
from serrate.schedule.strategies.persistent_dynamic import FINISH
from serrate.schedule.target import GPU

pytestmark = pytest.mark.triton
LENGTHS = (3, 0, 17, 1, 40, 2, 1500, 16, 5)
Body = Callable[..., Any]
TABLE = torch.zeros(50, 128)


def both(body: Body, *args: JaggedTensor | torch.Tensor) -> tuple[Plan, Plan]:
    """The plan for long rows and the one for short rows."""
    found = jit(body, backend="triton", strategy="persistent_dynamic").plan(*args)
    assert found.short is not None
    return found, found.short


def bags(dtype: torch.dtype, features: int = 128) -> tuple[JaggedTensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (sum(LENGTHS),), generator=draw)
    return JaggedTensor.from_lengths(ids, LENGTHS), torch.randn(50, features, generator=draw).to(dtype)


@pytest.mark.parametrize(("dtype", "features"), [(torch.float32, 128), (torch.bfloat16, 512)], ids=str)
def test_one_warp_without_stages_sums_rows_that_are_looked_up(dtype: torch.dtype, features: int) -> None:
    ids, table = bags(dtype, features)

    def pooled(ids: Any, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding_bag(ids, table, mode="sum")

    for plan in both(pooled, ids, table):
        assert (plan.warps, plan.stages) == (1, 1)
        sizes = {t.loop: t.size for t in plan.tiles}
        # 512 bytes of sums, and as many elements as a warp holds.
        assert ({t.size for t in plan.tiles if t.loop == "d3"} - {FINISH[1]} or {features}) == {128}
        assert sizes["r0i" if plan.short else "r0"] == 2048 // 128
    made = jit(pooled, backend="triton", strategy="persistent_dynamic")
    exact = functional.embedding_bag(ids.values, table.double(), ids.offsets[:-1], mode="sum")
    torch.testing.assert_close(made(ids, table), exact.to(dtype))


@pytest.mark.parametrize("strategy", ["maskless", "persistent_dynamic"])
def test_rows_of_a_block_that_are_looked_up_are_summed_at_once(strategy: str) -> None:
    """A block of partial sums would take the registers of the loads that should be in flight; reads outside of rows are zeros,
    so that nothing selects between these and a sum."""
    ids, table = bags(torch.float32)
    made = jit(lambda ids, table: functional.embedding_bag(ids, table, mode="sum"), backend="triton", strategy=strategy)
    source = made.source(ids, table)
    assert "tl.full([16, 128]" not in source and "tl.where((r0i" not in source
    assert re.search(r"\+ tl\.sum\(v\d+, 0\)", source)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda ids, table: functional.embedding(ids, table).sum((1, 2)), lambda row: row.sum()),
        (lambda ids, table: functional.embedding(ids, table).amax(1), lambda row: row.amax(0)),
        (lambda ids, table: (functional.embedding(ids, table) + 1).sum(1), lambda row: (row + 1).sum(0)),
    ],
    ids=["over features", "maxima", "computed"],
)
def test_reductions_of_rows_that_are_looked_up(body: Body, expected: Body) -> None:
    ids, table = bags(torch.float32, 32)
    for strategy in ("maskless", "persistent_dynamic"):
        got = jit(body, backend="triton", strategy=strategy)(ids, table)
        for k, row in enumerate(ids.unbind()):
            if len(row):
                torch.testing.assert_close(got[k].double(), expected(table.double()[row]), rtol=1e-5, atol=1e-3)


def test_rows_that_are_read_in_order_keep_stages_in_flight() -> None:
    x = JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), 128), LENGTHS)
    for plan in both(lambda x: x.sum(1), x):
        assert plan.stages > 1
        assert plan.warps > 1


@pytest.mark.parametrize(
    ("dtype", "elements", "warps"), [(torch.float32, 4096, 16), (torch.bfloat16, 2048, 8), (torch.float16, 2048, 8)], ids=str
)
def test_statistics_over_features_take_smaller_blocks_of_smaller_elements(dtype: torch.dtype, elements: int, warps: int) -> None:
    x = JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), 128, dtype=dtype), LENGTHS)
    for plan in both(lambda x: ops.layer_norm(x, (1, 2)), x):
        assert plan.warps == warps
        sizes = {t.loop: t.size for t in plan.tiles}
        # Pieces combine lanes in every block.
        assert sizes["r0i" if plan.short else "r0"] == (8192 if plan.short else elements) // 128


@pytest.mark.parametrize(
    ("dims", "dtype", "pieces"),
    [((1,), torch.float32, 2), ((1,), torch.bfloat16, 1), ((1, 2), torch.float32, 2), ((1, 2), torch.bfloat16, 1)],
    ids=str,
)
def test_rows_of_few_pieces_stay_whole(dims: tuple[int, ...], dtype: torch.dtype, pieces: int) -> None:
    x = JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), 128, dtype=dtype), LENGTHS)
    plan, _ = both(lambda x: ops.layer_norm(x, dims), x) if len(dims) > 1 else both(lambda x: torch.softmax(x, dims[0]), x)
    assert plan.most == pieces * next(t.size for t in plan.tiles if t.loop == "r0")


def test_whole_rows_that_are_read_twice_have_few_columns() -> None:
    x = JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), 128), LENGTHS)
    for function, columns in ((lambda x: torch.softmax(x, 1), 32), (lambda x: x.sum(1), 64)):
        plan, _ = both(function, x)
        assert plan.short is not None and {t.size for t in plan.short.tiles if t.loop == "d1"} == {columns}


def test_many_workers_combine_the_partial_results_of_a_row() -> None:
    x = JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), 128), LENGTHS)
    plan, _ = both(lambda x: torch.softmax(x, 1), x)
    own = plan.steps[[s.primitive for s in plan.steps].index("rfactor") + 1 :]
    assert [step.args[1:] for step in own[:2]] == [("d1", FINISH[1]), ("r0or", FINISH[0])]


@pytest.mark.parametrize("share", [1.2, 35.0], ids=["about equal rows", "some long rows"])
@pytest.mark.parametrize(
    ("body", "mean", "features", "dtype"),
    [
        (lambda x: x.sum(1), 256, (128,), torch.float32),
        (lambda x: torch.softmax(x, 1), 256, (128,), torch.float32),
        (lambda x: torch.softmax(x, 1), 256, (128,), torch.bfloat16),
        (lambda x: ops.layer_norm(x, (1, 2)), 256, (128,), torch.bfloat16),
        (lambda x: x.sum(1), 2048, (), torch.float32),
        (lambda x: torch.softmax(x, 1), 2048, (), torch.float32),
        (lambda x: functional.embedding(x.long(), TABLE).sum(1), 16, (), torch.float32),
    ],
    ids=["sum", "softmax", "softmax of 16 bits", "layer norm of 16 bits", "sum of numbers", "softmax of numbers", "bags"],
)
def test_known_lengths_only_remove_the_pieces_of_long_rows(
    body: Body, mean: int, features: tuple[int, ...], dtype: torch.dtype, share: float
) -> None:
    """Rows that would stay whole without the longest length run under the same plan with it."""
    x = JaggedTensor.from_lengths(torch.zeros(8, *features, dtype=dtype), [3, 5])
    stage = next(s for s in jit(body, backend="triton").compiled(x)[0].stages if isinstance(s, FusionStage) and s._facts)
    facts = stage._facts
    assert facts is not None
    width = facts.itemsize * math.prod(each.value or 1 for each in facts.inner)
    unknown = RowStatistics(1 << 16, mean << 16, None, width)

    def chosen(rows: RowStatistics) -> Plan:
        found = choose(rows, GPU, 132, carried=facts.carried, over_features=facts.over_features)
        return planned(stage.naive, found.strategy, GPU, None, **found.options)

    short, whole = chosen(unknown).short, chosen(replace(unknown, longest=int(share * mean)))
    assert short is not None
    if whole.short is not None:
        # Longer rows would change how the moments of all are computed.
        assert whole == chosen(unknown) and facts.over_features and share > 2
        return
    assert (whole.steps, whole.launch_options, whole.combines_lanes) == (short.steps, short.launch_options, short.combines_lanes)
