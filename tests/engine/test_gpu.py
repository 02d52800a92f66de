"""The matrix of operations on a real GPU: the same cases, the same oracle, tensors on the device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.cases import CASES, NESTED_CASES
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_one_level_on_a_gpu(name: str, strategy: str) -> None:
    _run(CASES[name], strategy, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NESTED_CASES)
def test_two_levels_on_a_gpu(name: str, strategy: str) -> None:
    _run(NESTED_CASES[name], strategy, 2)
