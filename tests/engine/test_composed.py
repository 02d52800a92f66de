"""Every operation on every composition of ragged dims, against padded torch: strategies, backends, dtypes and dims.

In: `composed.py`. Out: failures that name composition, lengths, and the first bad coordinate. By default every operation meets
every composition once, and the other choices go round so that any two choices meet somewhere (a test counts them); all
combinations under SERRATE_TEST_FULL=1. A program is built once for a point and called with lengths of every awkward kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.composed import COMPOSITIONS, LENGTHS, OPERATIONS, Dims, Way, choices, run, tensor_of
from tests.engine.oracle import BACKENDS, FULL, VARIANTS

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = [pytest.mark.sampled(3), pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:var:UserWarning")]

WAYS = [(strategy, tuple(sorted(options.items()))) for strategy, some in VARIANTS.items() for options in some]
Point = tuple[str, str, str, Way, torch.dtype, Dims]


def _dims(operation: str, composition: str) -> list[Dims]:
    return choices(operation, tensor_of(composition, "mixed"))


def points(*, full: bool = FULL) -> Iterator[Point]:
    """Operation and composition in every combination; the rest by counters that run at speeds of their own."""
    for (i, operation), (j, composition) in itertools.product(enumerate(OPERATIONS), enumerate(COMPOSITIONS)):
        dims, dtypes = _dims(operation, composition), OPERATIONS[operation].dtypes
        if full:
            yield from itertools.product([operation], [composition], BACKENDS, WAYS, dtypes, dims)
            continue
        backend, way = BACKENDS[(i + j) % len(BACKENDS)], WAYS[(2 * i + 4 * j) % len(WAYS)]
        yield operation, composition, backend, way, dtypes[(i + 7 * j + j // 3) % len(dtypes)], dims[(i + j // 2) % len(dims)]


def _named(point: Point) -> Any:
    operation, composition, backend, (strategy, options), dtype, dims = point
    shown = ",".join(f"{k}={v}" for k, v in options)
    name = "-".join((operation, composition, backend, strategy, shown, str(dtype).removeprefix("torch."), str(dims)))
    return pytest.param(*point, id=name.replace(" ", "_"))


def _lengths(backend: str) -> list[str]:
    """Triton's interpreter runs programs one by one in Python."""
    return ["mixed", "none"] if backend == "triton" and not FULL else list(LENGTHS)


@pytest.mark.parametrize(("operation", "composition", "backend", "way", "dtype", "dims"), [_named(point) for point in points()])
def test_operation(operation: str, composition: str, backend: str, way: Way, dtype: torch.dtype, dims: Dims) -> None:
    run(operation, composition, backend, way, dtype, dims, _lengths(backend))


@pytest.mark.skipif(FULL, reason="all combinations run")
def test_any_two_choices_meet() -> None:
    """What the counters are for: each backend with each strategy and its options, each of them with each composition, ..."""
    found = [(o, c, b, w, d) for o, c, b, w, d, _ in points()]
    every: tuple[list[Any], ...] = (list(OPERATIONS), list(COMPOSITIONS), BACKENDS, WAYS, sorted({p[4] for p in found}, key=str))
    for first, second in itertools.combinations(range(len(every)), 2):
        met = {(point[first], point[second]) for point in found}
        missing = [
            (a, b)
            for a, b in itertools.product(every[first], every[second])
            if (a, b) not in met and not (second == 4 and first == 0 and b not in OPERATIONS[a].dtypes)
        ]
        assert not missing, missing
