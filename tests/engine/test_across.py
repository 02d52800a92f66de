"""Reductions across rows, arg-reductions and scans on every backend, against plain torch row by row.

In: the cases of `across_cases.py`. Out: failures that name the structure, the first bad coordinate and both values.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine.across_cases import ACROSS, NESTED_SCANS, SCANS, SPECIAL_SCANS
from tests.engine.matrix import POINT, Options, points, run
from tests.engine.oracle import ONE_LEVEL, TWO_LEVELS, Features, arguments, recorded, wanted

pytestmark = [pytest.mark.sampled(3), pytest.mark.filterwarnings("ignore:var:UserWarning", "ignore:std:UserWarning")]


@pytest.mark.parametrize(POINT, points(ACROSS, "across"))
def test_across(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(ACROSS[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize(POINT, points(SCANS, "scans"))
def test_scans(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(SCANS[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize(POINT, points(NESTED_SCANS, "two levels"))
def test_two_levels(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(NESTED_SCANS[case], backend, strategy, options, dtype, features, TWO_LEVELS, 2)


@pytest.mark.parametrize(POINT, points(SPECIAL_SCANS, "special"))
def test_infinities_and_nan(
    case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features
) -> None:
    run(SPECIAL_SCANS[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize("name", [*ACROSS, *SCANS])
def test_result_dtypes(name: str) -> None:
    case = (ACROSS | SCANS)[name]
    for dtype in case.dtypes:
        given = arguments(case, ONE_LEVEL["single"], dtype, case.features[0], name)
        want = [w.dtype for w in wanted(case, given)]
        assert [v.dtype for v in recorded(case, dtype, case.features[0]).outputs] == want, f"{name} of {dtype}"
