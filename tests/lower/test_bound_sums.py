"""A GPU checks offsets while programs already use them, so work lists of wrong offsets must not leave their memory either.

In: programs with work lists, as a GPU runs them, and offsets that do not fit the rows. Out: accesses outside of memory, which the
interpreter finds, and results of right offsets that differ from torch afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import serrate
from serrate import ir, ops
from serrate.errors import StructureError
from tests.conftest import INTERPRETED

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not INTERPRETED, reason="a device does not notice such accesses"),
]
RIGHT = [0, 300, 301, 301, 340]
WRONG = {
    "sums of more than all positions": [0, 340, 0, 340, 0],
    "a negative length": [0, 340, 20, 30, 340],
    "numbers that are no positions": [0, 1 << 62, -(1 << 63), (1 << 63) - 1, 340],
}
LISTS: dict[str, dict[str, int]] = {
    "pieces of long rows": {"chunk": 64, "tile": 64, "uncut": 200},
    "short rows in order": {"chunk": 8192, "rows": 32, "stages": 1, "tile": 1024, "uncut": 256},
}


def sums(x: Any, _: Any) -> Any:
    return ops.sum(x, 1)


def product(x: Any, weights: Any) -> Any:
    return ops.as_flattened(ops.matmul(x, weights))


def calls(compute: Callable[..., Any], *features: int, **options: int) -> Callable[[list[int]], Tensor]:
    with ir.Fusion("program") as f:
        x, offsets = f.input((None, *features), torch.float32), f.input((None,), torch.int64)
        f.output(compute(ops.as_nested(x, offsets), f.input((None, 20, 17), torch.float32) if features else None))
    run = f.compile("triton", "persistent_dynamic", **options)
    values = torch.linspace(-2, 2, 340)[:, None].expand(340, *features).contiguous() if features else torch.linspace(-2, 2, 340)
    weights = [torch.ones(4, 20, 17)] if features else []

    def call(bounds: list[int]) -> Tensor:
        with serrate.no_sync(strict=True):
            return run(values, torch.tensor(bounds), *weights)

    return call


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", LISTS)
def test_sums(kind: str, wrong: str) -> None:
    call = calls(sums, **LISTS[kind])
    with contextlib.suppress(StructureError):
        call(WRONG[wrong])
    wanted = torch.stack([torch.linspace(-2, 2, 340)[a:b].sum() for a, b in pairwise(RIGHT)])
    torch.testing.assert_close(call(RIGHT), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wrong", WRONG)
def test_products(wrong: str) -> None:
    call = calls(product, 20, tile=16, resident=1)
    with contextlib.suppress(StructureError):
        call(WRONG[wrong])
    torch.testing.assert_close(call(RIGHT), torch.linspace(-2, 2, 340)[:, None].expand(340, 17) * 20)
