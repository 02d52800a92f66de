"""The matrix of operations on a real GPU: the same cases, the same oracle, tensors on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serrate import ir, ops
from tests.engine.across_cases import ACROSS
from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.movement_cases import MOVEMENT, STRUCTURE
from tests.engine.oracle import FEW, ONE_LEVEL, STRATEGIES, TWO_LEVELS, VARIANTS, Case, arguments, check, compiled, pick

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:var:UserWarning", "ignore:std:UserWarning")]


def _on_host(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_on_host(r) for r in result)
    return result.to("cpu")


def _run(case: Case, strategy: str, level: int) -> None:
    structures = ONE_LEVEL if level == 1 else TWO_LEVELS
    options = tuple(sorted(pick(VARIANTS[strategy], case.name, strategy).items()))
    dtype, features = pick(case.dtypes, case.name, strategy), pick(case.features, case.name, strategy)
    program = compiled(case, "triton", strategy, options, dtype, features, level)
    for name in FEW:
        given = arguments(case, structures[name], dtype, features, f"{case.name} {name}")
        got = program(*(t.cuda() for t in given.call))
        check(case, _on_host(got), given, f"{case.name} on {name} {dtype} {features} {options}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_one_level_on_a_gpu(name: str, strategy: str) -> None:
    _run(CASES[name], strategy, 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NESTED_CASES)
def test_two_levels_on_a_gpu(name: str, strategy: str) -> None:
    _run(NESTED_CASES[name], strategy, 2)


NEW = {**MOVEMENT, **STRUCTURE, **ACROSS}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NEW)
def test_moving_and_crossing_rows_on_a_gpu(name: str, strategy: str) -> None:
    _run(NEW[name], strategy, 1)


@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
def test_routing_on_a_gpu_copies_nothing_to_the_host(strategy: str | None) -> None:
    """Many tiles for each expert, sixteen-bit tokens, and every synchronisation an error."""
    tokens, width, experts, choices = 4096, 64, 16, 2
    with ir.Fusion("routing") as f:
        x, logits = f.input((None, width), torch.bfloat16), f.input((None, experts), torch.float32)
        w = f.input((experts, width, width), torch.bfloat16)
        gate, choice = ops.topk(ops.softmax(logits, -1), choices)
        offsets, permutation = ops.group_by(ops.flatten(choice), experts)
        routed = ops.as_nested(ops.index(x, ops.floor_divide(permutation, choices)), offsets)
        back = ops.index(ops.as_flattened(ops.matmul(routed, w)), ops.invert(permutation))
        parts = ops.cast(ops.unflatten(back, 0, (-1, choices)), torch.float32)
        f.output(ops.sum(parts * ops.unsqueeze(gate, 2), 1))
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(tokens, width, device="cuda", generator=generator).bfloat16()
    scores = torch.randn(tokens, experts, device="cuda", generator=generator)
    weights = torch.randn(experts, width, width, device="cuda", generator=generator).bfloat16()
    program = f.compile("triton", strategy)
    program(values, scores, weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = program(values, scores, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    probability, chosen = torch.softmax(scores, -1).topk(choices)
    each = torch.einsum("nd,ndj->nj", values.float().repeat_interleave(choices, 0), weights.float()[chosen.flatten()])
    want = (each.view(tokens, choices, width) * probability[:, :, None]).sum(1)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-1)
