"""Lengths of every kind that tile kernels are tried on, and the tiles they are tried with.

In: nothing. Out: lists of lengths by name, small enough for an interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
from serrate import Kernel
from serrate.errors import StrategyError
from tests.conftest import FULL

TILES: tuple[int | str, ...] = (
    1,
    3,
    "whole",
    "reference",
    "cpp",
    "reference masked",
    "reference persistent_dynamic cut",
    *(("triton", "triton masked", "triton persistent_dynamic cut") if FULL else ()),
)
"""Tiles of the interpreter; backends of the compiler, with a strategy where it is not its own choice."""


def ran(kernel: Kernel, tile: int | str, *, check: bool = True) -> Callable[..., Any]:
    """The kernel in one of these ways."""
    if isinstance(tile, str) and tile != "whole":
        backend, *strategy = tile.split()
        # Short rows are cut too, so that there is something to combine.
        lanes = {"chunk": 2} if "cut" in strategy else {}
        made = serrate.kernel(kernel.fn, config=kernel.config, strategy=strategy[0] if strategy else None, lanes=lanes)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return made.on(backend)(*args, **kwargs)
            except StrategyError as error:
                # Rows that a kernel does not let be cut are refused, with the reason.
                assert "cannot cut" in str(error)
                pytest.skip(str(error))

        return run
    return kernel.interpreted(tile=tile, check=check)


def _exponential(count: int) -> list[int]:
    torch.manual_seed(3)
    lengths: list[int] = torch.empty(count).exponential_(1 / 3).long().tolist()
    return lengths


LENGTHS: dict[str, list[int]] = {
    "uniform": [4] * 4,
    "exponential": _exponential(5),
    "bimodal": [1, 7, 1, 6],
    "giant": [1, 0, 10, 1],
    "zeros": [0, 3, 0, 0, 2, 0],
    "all_zero": [0, 0],
    "empty": [],
}
