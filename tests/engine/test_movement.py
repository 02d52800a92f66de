"""Gathers, slices, padding, joining and views on every backend, against plain torch row by row.

In: the cases of `movement_cases.py`. Out: failures that name the structure, the first bad coordinate and both values.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine.matrix import POINT, Options, points, run
from tests.engine.movement_cases import MOVEMENT, STRUCTURE
from tests.engine.oracle import ONE_LEVEL, Features, arguments, recorded, wanted

pytestmark = pytest.mark.sampled(2)


@pytest.mark.parametrize(POINT, points(MOVEMENT, "movement"))
def test_movement(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(MOVEMENT[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize(POINT, points(STRUCTURE, "structure"))
def test_structure(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(STRUCTURE[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize("name", [*MOVEMENT, *STRUCTURE])
def test_result_dtypes(name: str) -> None:
    case = (MOVEMENT | STRUCTURE)[name]
    for dtype in case.dtypes:
        given = arguments(case, ONE_LEVEL["single"], dtype, case.features[0], name)
        want = [w.dtype for w in wanted(case, given)]
        assert [v.dtype for v in recorded(case, dtype, case.features[0]).outputs] == want, f"{name} of {dtype}"
