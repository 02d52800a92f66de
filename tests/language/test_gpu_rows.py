"""Kernels over rows of features on a GPU: they get the blocks, warps and statements that operators with the same math get.

In: example kernels, planned without a GPU and run by Triton's interpreter. The oracle is plain torch, row by row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import serrate
import serrate.language as hl
from serrate import JaggedTensor, jit
from serrate.tiles.stage import Variant
from tests.language.test_examples import example

pytestmark = pytest.mark.triton
LENGTHS = [3, 0, 64, 1, 63, 65, 1500, 16, 1025, 128, 5]
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "jagged_sum": lambda x: x.sum(1),
    "jagged_softmax": lambda x: torch.softmax(x, 1),
}
PER_ROW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "jagged_sum": lambda row: row.sum(0, keepdim=True),
    "jagged_softmax": lambda row: torch.softmax(row, 0),
    "jagged_layer_norm": lambda row: functional.layer_norm(row, row.shape, eps=1e-6) if len(row) else row,
}
CASES = [("jagged_sum", torch.float32), ("jagged_softmax", torch.float32), ("jagged_softmax", torch.bfloat16)]


def rows(dtype: torch.dtype = torch.float32, features: int = 128) -> JaggedTensor:
    draw = torch.Generator().manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), features, generator=draw).to(dtype), LENGTHS)


def kernel(name: str, strategy: str = "persistent_dynamic") -> Any:
    return serrate.kernel(example(name).jagged.fn, strategy=strategy).on("triton")


def built(name: str, x: JaggedTensor) -> Variant:
    (found,) = kernel(name).variants(x)
    return found


def first_kernel(name: str, x: JaggedTensor) -> str:
    """The source of the kernel that finishes short rows."""
    return built(name, x).executable.source.split("\ndef jagged(")[1].split("@triton.jit")[0]


def loops_of(source: str) -> list[str]:
    """The bodies of the innermost loops of a kernel."""
    lines, found = source.splitlines(), []
    for at, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if line.lstrip().startswith("for "):
            body = []
            for inner in lines[at + 1 :]:
                if len(inner) - len(inner.lstrip()) <= depth:
                    break
                body.append(inner)
            found.append("\n".join(body))
    assert found
    return found


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_blocks_and_warps_are_those_of_the_operator(name: str, dtype: torch.dtype) -> None:
    x = rows(dtype)
    mine = built(name, x).plan
    theirs = jit(OPERATORS[name], backend="triton", strategy="persistent_dynamic").plan(x)
    assert theirs.short is not None
    assert (mine.warps, mine.stages) == (theirs.warps, theirs.stages) == (theirs.short.warps, theirs.short.stages)
    own, wanted = {t.loop: t.size for t in mine.tiles}, {t.loop: t.size for t in theirs.short.tiles}
    assert (own["k_shortr"], own["m"]) == (wanted["r0"], wanted["d1"])
    cut = {step.args[2] * own["m"] for step in mine.steps if step.primitive == "cut"}
    pieces = {t.loop: t.size for t in theirs.tiles}
    assert cut == {pieces["r0"] * pieces["d1"]}, "pieces have as many elements"


def test_statistics_over_features_take_whole_rows_and_many_warps() -> None:
    plan = built("jagged_layer_norm", rows()).plan
    operator = jit(lambda x: functional.layer_norm(x, x.shape[1:]), backend="triton", strategy="persistent_dynamic")
    theirs = operator.plan(rows()).short
    assert theirs is not None and (plan.warps, plan.stages) == (theirs.warps, theirs.stages)
    assert {t.size for t in plan.tiles if t.loop.startswith("k")} == {t.size for t in theirs.tiles if t.loop == "r0"}


def test_rows_of_numbers_have_blocks_of_their_own() -> None:
    @serrate.kernel(strategy="persistent_dynamic")
    def totals(x: JaggedTensor) -> torch.Tensor:
        out = torch.empty(x.num_rows)
        for b in hl.tile(x.num_rows):
            total = hl.zeros([b])
            for k in hl.tile(x.max_length):
                total = total + x[b, k].sum(1)
            out[b] = total
        return out

    x = JaggedTensor.from_lengths(torch.randn(sum(LENGTHS)), LENGTHS)
    (made,) = totals.on("triton").variants(x)
    assert made.plan.warps == 4
    assert {t.size for t in made.plan.tiles if t.loop.startswith("k")} == {512}
    torch.testing.assert_close(totals.on("triton")(x), torch.stack([row.sum() for row in x.unbind()]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["persistent_dynamic", "maskless"])
@pytest.mark.parametrize("features", [128, 72])
@pytest.mark.parametrize(("name", "dtype"), [*CASES, ("jagged_layer_norm", torch.float32)], ids=str)
def test_results_are_those_of_torch(name: str, dtype: torch.dtype, features: int, strategy: str) -> None:
    x = rows(dtype, features)
    found = kernel(name, strategy)(x)
    wanted = torch.cat([PER_ROW[name](row.double()) for row in x.unbind()])
    values = found.values if isinstance(found, JaggedTensor) else found
    assert values.dtype == dtype
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(values.double(), wanted, **tolerance)


@pytest.mark.parametrize("name", PER_ROW)
def test_row_boundaries_are_read_once(name: str) -> None:
    source = first_kernel(name, rows())
    assert source.count("tl.load(jt_offsets0_at") == 2
    assert not any("_at +" in body for body in loops_of(source))


@pytest.mark.parametrize("name", PER_ROW)
def test_one_condition_keeps_positions_inside_their_row(name: str) -> None:
    source = first_kernel(name, rows())
    masks = re.findall(r"mask=(.*)", source)
    assert masks and not any("&" in mask for mask in masks)
    assert "max_length" not in source


@pytest.mark.parametrize("name", ["jagged_sum", "jagged_layer_norm"])
def test_lanes_of_whole_rows_are_combined_after_the_loop(name: str) -> None:
    short = first_kernel(name, rows()).split("        else:")[0]
    assert "tl.sum(" in short and not any("tl.sum(" in body for body in loops_of(short))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exponentials_of_a_softmax_take_two_instructions(dtype: torch.dtype) -> None:
    source = first_kernel("jagged_softmax", rows(dtype))
    assert "sr_exp_below" in source and "tl.exp(" not in source


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dtype"), [*CASES, ("jagged_layer_norm", torch.float32)], ids=str)
def test_partial_results_are_combined_in_blocks(name: str, dtype: torch.dtype) -> None:
    """A row of 1500 positions has 47 pieces of 32: more than one block, and the last is not whole."""
    x = rows(dtype, 72)
    made = serrate.kernel(example(name).jagged.fn, strategy="persistent_dynamic", lanes={"chunk": 32}).on("triton")
    (found,) = made.variants(x)
    at_once = [step.args[3] for step in found.plan.steps if step.primitive == "cut" and len(step.args) > 3]
    assert at_once and all(int(count) > 1 for count in at_once)
    result = made(x)
    values = result.values if isinstance(result, JaggedTensor) else result
    wanted = torch.cat([PER_ROW[name](row.double()) for row in x.unbind()])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(values.double(), wanted, **tolerance)
