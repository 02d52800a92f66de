"""Seeds of programs with random numbers, drawn from torch's generator at every call.

In: a binding whose last leaves are seeds. Out: a binding that draws them. So `torch.manual_seed` makes programs repeatable,
whatever backend runs them. Each operation draws one seed, so a traced function draws the same seeds as its operations would one
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import empty_like

from serrate.runtime.dispatch import Binding, Leaves


def placeholders(count: int, device: torch.device) -> list[torch.Tensor]:
    """Scalars in place of seeds, for code that uses only dtypes and shapes."""
    return [torch.zeros((), dtype=torch.int64, device=device) for _ in range(count)]


def drawing(binding: Binding, count: int, device: torch.device) -> Binding:
    """A binding that draws its last leaves."""
    draw = _on_host(count) if device.type == "cpu" else _on_device(count, device)

    def run(leaves: Leaves, into: Sequence[torch.Tensor] = ()) -> object:
        return binding([*leaves, *draw()], into)

    return run


def _on_host(count: int) -> Callable[[], Sequence[torch.Tensor]]:
    if count == 1:
        one = torch.empty((), dtype=torch.int64, device="cpu")
        return lambda: (empty_like(one).random_(),)
    several = torch.empty(count, dtype=torch.int64, device="cpu")
    return lambda: empty_like(several).random_().unbind()


def _on_device(count: int, device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    """Seeds on a device. They are drawn from the CPU's generator, so that devices agree, and filled in on the device, so that
    nothing waits for a copy.

    While a CUDA graph is captured, the device draws them, so that every replay draws new ones.
    """

    def draw() -> Sequence[torch.Tensor]:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.empty(count, dtype=torch.int64, device=device).random_().unbind()
        seeds = torch.empty(count, dtype=torch.int64, device="cpu").random_().tolist()
        return [torch.full((), seed, dtype=torch.int64, device=device) for seed in seeds]

    return draw
