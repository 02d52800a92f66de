"""Same plan, same bits: the number of threads changes who computes what, never a result.

In: programs with rows long and numerous enough that threads share the work. Out: failures where one bit differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate.codegen.cpp.printer import SMALL
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(name: str, strategy: str, threads: None) -> None:
    case = CASES[name]
    options = (("chunk", 1000),) if strategy == "persistent_dynamic" else ()
    program = compiled(case, "cpp", strategy, options, torch.float32, FEATURES)
    for where, rows in {"skewed": SKEWED, "even": EVEN}.items():
        given = arguments(case, rows, torch.float32, FEATURES, f"{name} {where}")
        assert given.values.numel() >= SMALL, "too small for threads to be used"
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


LENGTHS = {
    "skewed": [60_000, 3, 0, 9_000, *[5, 0, 61] * 60],
    "uniform": [700] * 100,
    "giant": [200_000],
    "a few long": [20_000] * 5,
}
PROGRAMS: dict[str, Callable[[JaggedTensor], Any]] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "softmax": lambda x: torch.softmax(x, 1),
    "var": lambda x: x.var(1),
    "norm": lambda x: x / (x * x).sum(1, keepdim=True).sqrt(),
    "sum of all": lambda x: x.sum((0, 1)),
    "sum across rows": lambda x: x.sum(0),
}


@serrate.kernel
def scaled_rows(x: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for row in hl.tile(x.num_rows):
        total = hl.zeros([row, x.size(2)])
        for at in hl.tile(x.max_length):
            total = total + x[row, at, :].sum(1)
        for at in hl.tile(x.max_length):
            out[row, at, :] = x[row, at, :] / total[:, None, :]
    return out


@serrate.kernel
def centred_rows(x: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.num_rows, x.size(2))
    for row in hl.tile(x.num_rows):
        x_row = x[row, :, :]
        out[row, :] = (x_row - x_row.mean(1)[:, None, :]).square().sum(1)
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_plans_that_nobody_chose_do_not_depend_on_threads(lengths: str, threads: None) -> None:
    rows = LENGTHS[lengths]
    values = torch.randn(sum(rows), 3, generator=torch.Generator().manual_seed(1))
    ways: dict[str, Callable[[JaggedTensor], Any]] = {
        **{f"jit {name}": serrate.jit(function) for name, function in PROGRAMS.items()},
        **{f"eager {name}": function for name, function in PROGRAMS.items()},
        "kernel scaled_rows": scaled_rows,
        "kernel centred_rows": centred_rows,
    }
    found: dict[str, list[torch.Tensor]] = {}
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        for name, run in ways.items():
            bits = _bits(run(JaggedTensor.from_lengths(values, rows)))
            assert all(map(torch.equal, found.setdefault(name, bits), bits)), f"{name} of {lengths} rows on {count} threads"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["sum_rows", "softmax_rows", "var_rows", "matmul_each", "amax_both"])
def test_long_rows_are_right(name: str, strategy: str) -> None:
    """Rows that are cut between threads and finished later; float64, so that the tolerance stays small."""
    case = CASES[name]
    program = compiled(case, "cpp", strategy, (), torch.float64, FEATURES)
    given = arguments(case, Rows((120_000, 0, 7, 60_001)), torch.float64, FEATURES, name)
    check(case, program(*given.call), given, f"{name}, {strategy}")
