"""The same plan gives the same bits: over repeated runs, and for one thread and two.

In: every example, in its ragged and its manual forms, on compiled C++. Out: a failure for the first kernel with another bit
somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import serrate
from serrate import Kernel
from serrate.errors import StrategyError
from serrate.tensor import JaggedTensor
from tests.language.kinds import LENGTHS
from tests.language.test_examples import NAMES, example

LONG = [257, 0, 1, 64, 130, 7]
RUNS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 3))
"""Threads, and which run it is."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(result: Any) -> list[torch.Tensor]:
    """Results as whole numbers, so that nan is compared too."""
    parts = result if isinstance(result, tuple) else (result,)
    tensors = [p.values if isinstance(p, JaggedTensor) else p for p in parts]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.contiguous().view(whole[t.element_size()]).clone() for t in tensors]


def steadily(kernel: Kernel, **options: Any) -> Callable[..., Any]:
    """The kernel, run several times; fails if a run differs from the first."""
    kernel = serrate.kernel(kernel.fn, config=kernel.config, **options) if options else kernel

    def run(*args: Any) -> Any:
        first: list[torch.Tensor] | None = None
        result = None
        for count, number in RUNS:
            torch.set_num_threads(count)
            result = kernel.on("cpp")(*args)
            now = bits(result)
            first = first or now
            for a, b in zip(first, now, strict=True):
                assert torch.equal(a, b), f"{kernel} on {count} threads, run {number}: {int((a != b).sum())} elements differ"
        return result

    return run


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lengths", [LONG, LENGTHS["exponential"]], ids=["long", "exponential"])
@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    example(name).check(lengths, steadily)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_pieces(name: str) -> None:
    """Pieces of one row are worked on by whoever comes first, and combined in order."""

    def cut(kernel: Kernel) -> Callable[..., Any]:
        run = steadily(kernel, strategy="persistent_dynamic", lanes={"chunk": 16})

        def one(*args: Any) -> Any:
            try:
                return run(*args)
            except StrategyError as error:
                # Rows that a kernel does not let be cut are refused, with the reason.
                assert "cannot cut" in str(error)
                return kernel.on("cpp")(*args)

        return one

    torch.manual_seed(0)
    example(name).check(LONG, cut)


def test_another_bit_is_seen() -> None:
    calls = [0]

    class Unsteady(Kernel):
        def on(self, backend: str) -> Any:
            def run(x: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                return torch.where(torch.arange(3) == 1, x * (1 + 2e-7 * (calls[0] == len(RUNS))), x)

            return run

    kernel = Unsteady(test_another_bit_is_seen, Kernel(bits, None).config)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="1 elements differ"):
        steadily(kernel)(torch.ones(3))
