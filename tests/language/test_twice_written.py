"""Kernels as users write them against plain Python loops over single numbers, which share nothing with serrate.

In: pairs drawn by `twice_written.py`. Out: a failure with both texts. A strategy that a kernel does not allow may be refused; a
kernel without one may not.
"""

from __future__ import annotations

from typing import Any

import pytest

from serrate.errors import StrategyError
from tests.conftest import FULL
from tests.language.twice_written import KINDS, Pair, close, write

pytestmark = pytest.mark.sampled(2)

SEEDS = 200 if FULL else 6


def checked(pair: Pair, kernel: Any, tolerance: float, how: str) -> None:
    got, wanted = pair.results(kernel), pair.wanted()
    for k, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert close(one, other, tolerance), f"{how}: result {k} is {one}, not {other}\n{pair}"


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernels_give_what_loops_over_numbers_give(kind: str, seed: int) -> None:
    pair, tolerance = write(kind, seed)
    for plan in pair.plans:
        try:
            checked(pair, pair.kernel(plan), tolerance, f"compiled, {plan}")
        except StrategyError:
            assert plan, f"without a strategy nothing may be refused for one\n{pair}"


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_kernels_give_what_loops_over_numbers_give(kind: str, seed: int) -> None:
    pair, tolerance = write(kind, seed)
    for tile in (1, 3, "whole"):
        checked(pair, pair.kernel({}).interpreted(tile=tile), tolerance, f"interpreted, tile {tile}")
