"""Every operation, under every strategy and backend, on every kind of structure, against plain torch row by row.

In: the cases of `cases.py`. Out: failures that name the structure, the first bad coordinate and both values. By default each
(case, backend, strategy) runs with one dtype, one feature shape and one set of options, chosen by name; all of them under
SERRATE_TEST_FULL=1. A program is built once and called with every structure, since it does not depend on lengths.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.oracle import (
    BACKENDS,
    FULL,
    ONE_LEVEL,
    STRATEGIES,
    TWO_LEVELS,
    VARIANTS,
    Case,
    Features,
    Rows,
    arguments,
    check,
    compiled,
    pick,
)

pytestmark = pytest.mark.filterwarnings("ignore:var:UserWarning", "ignore:std:UserWarning")

Options = tuple[tuple[str, Any], ...]
Point = tuple[str, str, str, Options, torch.dtype, Features]


def points(cases: dict[str, Case], level: int) -> list[Any]:
    """The sampled matrix, or all of it."""
    found: list[Any] = []
    for case in cases.values():
        for backend, strategy in itertools.product(BACKENDS, STRATEGIES):
            rest = list(itertools.product(VARIANTS[strategy], case.dtypes, case.features))
            chosen = rest if FULL else [pick(rest, level, case.name, backend, strategy)]
            for variant, dtype, features in chosen:
                options = tuple(sorted(variant.items()))
                shown = ",".join(f"{k}={v}" for k, v in options)
                name = "-".join(
                    (case.name, backend, strategy, shown, str(dtype).removeprefix("torch."), "x".join(map(str, features)))
                )
                found.append(pytest.param(case.name, backend, strategy, options, dtype, features, id=name))
    return found


def run(
    case: Case,
    backend: str,
    strategy: str,
    options: Options,
    dtype: torch.dtype,
    features: Features,
    structures: dict[str, Rows],
    level: int,
) -> None:
    program = compiled(case, backend, strategy, options, dtype, features, level)
    failures = []
    for name, rows in structures.items():
        given = arguments(case, rows, dtype, features, f"{case.name} {name} {dtype} {features}")
        try:
            check(case, program(*given.call), given, f"{case.name} on {name} {list(rows.lengths)}")
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, "\n" + "\n".join(failures)


@pytest.mark.parametrize(("case", "backend", "strategy", "options", "dtype", "features"), points(CASES, 1))
def test_one_level(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(CASES[case], backend, strategy, options, dtype, features, ONE_LEVEL, 1)


@pytest.mark.parametrize(("case", "backend", "strategy", "options", "dtype", "features"), points(NESTED_CASES, 2))
def test_two_levels(case: str, backend: str, strategy: str, options: Options, dtype: torch.dtype, features: Features) -> None:
    run(NESTED_CASES[case], backend, strategy, options, dtype, features, TWO_LEVELS, 2)
