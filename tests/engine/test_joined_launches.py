"""Short rows and pieces of long ones in one launch on a GPU; exponentials relative to a maximum, also of extreme numbers.

In: rows shorter and longer than a piece. Out: failures where a row differs from torch's in float64, or from an earlier run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serrate import ir, ops
from serrate.codegen.triton.printer import print_triton
from serrate.runtime import triton as runtime

pytestmark = pytest.mark.triton
LENGTHS = (3, 0, 200, 1, 64, 65, 7, 130)
LOWEST, HUGE = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
BODIES: dict[str, tuple[Any, Any]] = {
    "softmax": (lambda x: ops.softmax(x, 1), lambda row: row.softmax(0)),
    "sum": (lambda x: ops.sum(x, 1), lambda row: row.sum(0)),
}


def joined(name: str, features: tuple[int, ...] = (4,)) -> Any:
    with ir.Fusion(name) as f:
        x, offsets = f.input((None, *features), torch.float32), f.input((None,), torch.int64)
        f.output(BODIES[name][0](ops.as_nested(x, offsets)))
    return f.compile("triton", strategy="persistent_dynamic", tile=8, chunk=64)


def check(name: str, x: torch.Tensor) -> None:
    offsets, run = torch.tensor([0, *LENGTHS]).cumsum(0), joined(name, x.shape[1:])
    got, again = (list(run(x, offsets).unbind()) for _ in range(2))
    for one, other, row in zip(got, again, torch.split(x, list(LENGTHS)), strict=True):
        torch.testing.assert_close(one, BODIES[name][1](row.double()).float(), equal_nan=True)
        assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))


def values(*features: int) -> torch.Tensor:
    return torch.randn(sum(LENGTHS), *features, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("features", [(), (4,)], ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_one_launch_computes_short_and_long_rows(name: str, features: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []

    def watch(*args: Any, **how: Any) -> Any:
        made = print_triton(*args, **how)
        texts.append(made.text)
        return made

    monkeypatch.setattr(runtime, "print_triton", watch)
    check(name, values(*features))
    # The first programs share the list of pieces; no program takes positions of both grids.
    assert sum(text.count("if (first < step):") for text in texts) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [0.0, -1e38, 1e38, LOWEST, HUGE, -torch.inf, 88.0, -3e5], ids=str)
def test_rows_of_one_number(number: float) -> None:
    check("softmax", torch.full((sum(LENGTHS), 4), number))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("large", [1e4, 2e38, HUGE], ids=str)
@pytest.mark.parametrize("place", [3, 73, 202])
def test_one_large_number_in_a_long_row(large: float, place: int) -> None:
    x = values(4)
    x[place, 1], x[place, 2], x[204, 3] = large, -torch.inf, -large
    check("softmax", x)
