"""Same plan, same bits: the number of threads changes who computes what, never a result.

In: programs with rows long and numerous enough that threads share the work. Out: failures where one bit differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from serrate.runtime.launch import CppExecutable
from serrate.tensor import JaggedTensor
from tests.engine.cases import CASES
from tests.engine.oracle import STRATEGIES, Rows, arguments, check, compiled

SKEWED = Rows((40_000, 3, 0, 9_000, *[5, 0, 61] * 60, 1))
EVEN = Rows((97,) * 600)
NAMES = [
    "sum_rows",
    "prod_rows",
    "mean_both",
    "var_rows",
    "logsumexp_rows",
    "softmax_rows",
    "layer_norm_both",
    "matmul_each",
    "matmul_each_sum",
    "sum_everything",
    "sum_components",
    "relu_affine",
]
FEATURES = (5,)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _bits(result: Any) -> list[torch.Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    values = [r.values if isinstance(r, JaggedTensor) else r for r in results]
    return [v.clone().view(torch.int32 if v.dtype == torch.float32 else torch.int64) for v in values]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(name: str, strategy: str, threads: None) -> None:
    case = CASES[name]
    options = (("chunk", 1000),) if strategy == "persistent_dynamic" else ()
    program = compiled(case, "cpp", strategy, options, torch.float32, FEATURES)
    for where, rows in {"skewed": SKEWED, "even": EVEN}.items():
        given = arguments(case, rows, torch.float32, FEATURES, f"{name} {where}")
        assert given.values.numel() >= CppExecutable.SMALL, "too small for threads to be used"
        found = []
        for count in (1, 2, 3, 2, 1):
            torch.set_num_threads(count)
            result = program(*given.call)
            found.append((count, _bits(result)))
        for (one, left), (other, right) in itertools.pairwise(found):
            for k, (a, b) in enumerate(zip(left, right, strict=True)):
                assert torch.equal(a, b), (
                    f"{name} on {where}, {strategy}: result {k} differs between {one} and {other} threads, "
                    f"first at {(a != b).nonzero()[0].tolist()}"
                )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["sum_rows", "softmax_rows", "var_rows", "matmul_each", "amax_both"])
def test_long_rows_are_right(name: str, strategy: str) -> None:
    """Rows that are cut between threads and finished later; float64, so that the tolerance stays small."""
    case = CASES[name]
    program = compiled(case, "cpp", strategy, (), torch.float64, FEATURES)
    given = arguments(case, Rows((120_000, 0, 7, 60_001)), torch.float64, FEATURES, name)
    check(case, program(*given.call), given, f"{name}, {strategy}")
