"""Every operation, under every strategy and backend, on every kind of structure, against plain torch row by row.

In: the cases of `cases.py`. Out: failures that name the structure, the first bad coordinate and both values. By default each case
runs under every strategy (elementwise ones under one for each backend), with a backend, a dtype, a feature shape and options
chosen by name; all combinations under SERRATE_TEST_FULL=1. A program is built once and called with every structure, since it
does not depend on lengths.
"""

from __future__ import annotations

import pytest
import torch

from serrate.runtime import launch
from tests.engine.cases import CASES, NESTED_CASES, SPECIALS
from tests.engine.matrix import POINT, Options, points, run
from tests.engine.oracle import (
    BACKENDS,
    ONE_LEVEL,
    STRATEGIES,
    TWO_LEVELS,
    Features,
    Rows,
    arguments,
    check,
    compiled,
    pick,
    recorded,
    wanted,
)

pytestmark = [pytest.mark.sampled(3), pytest.mark.filterwarnings("ignore:var:UserWarning", "ignore:std:UserWarning")]


@pytest.mark.parametrize(POINT, points(CASES, "one level"))
def test_one_level(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(CASES[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize(POINT, points(NESTED_CASES, "two levels"))
def test_two_levels(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(NESTED_CASES[case], backend, strategy, options, dtype, features, TWO_LEVELS, 2)


@pytest.mark.parametrize("name", CASES)
def test_result_dtypes(name: str) -> None:
    """For every dtype, not only the sampled ones: recording alone tells."""
    case = CASES[name]
    for dtype in case.dtypes:
        given = arguments(case, ONE_LEVEL["single"], dtype, case.features[0], name)
        want = [w.dtype for w in wanted(case, given)]
        assert [v.dtype for v in recorded(case, dtype, case.features[0]).outputs] == want, f"{name} of {dtype}"


@pytest.mark.parametrize(POINT, points(SPECIALS, "special"))
def test_infinities_and_nan(
    case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features
) -> None:
    run(SPECIALS[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


STREAMED = ["relu", "add_component", "softmax_rows", "layer_norm_features", "cast_bfloat16", "sum_features", "matmul_shared"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", STREAMED)
def test_results_written_past_the_cache(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large results take another way to memory; here every result does."""
    monkeypatch.setattr(launch, "last_level_cache", lambda: -1)
    case = CASES[name]
    rows = {"long": Rows((300, 0, 1, 77, 2)), **ONE_LEVEL}
    dtype, features = pick([(torch.float32, (64,)), (torch.bfloat16, (64,)), (torch.float32, (5,))], name, strategy)
    run(case, "cpp", strategy, (), dtype, features, rows, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sum_rows", "softmax_rows", "layer_norm_both", "matmul_each", "var_rows", "relu_affine"])
def test_the_chosen_plan_is_right_too(name: str, backend: str) -> None:
    """No strategy named: rows decide, and the program changes with them between calls."""
    program = compiled(CASES[name], backend, None, (), torch.float32, (5,))
    long = {"long": Rows((9000, 3, 0, 70)), "even": Rows((50,) * 40)} if backend == "cpp" else {}
    for where, rows in {**ONE_LEVEL, **long}.items():
        given = arguments(CASES[name], rows, torch.float32, (5,), where)
        check(CASES[name], program(*given.call), given, f"{name} on {where}")
