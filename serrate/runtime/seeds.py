"""Seeds: what a call of a program with random numbers draws, from torch's own generator.

In: a binding whose last leaves are seeds. Out: a binding that draws them. `torch.manual_seed` therefore repeats what programs
draw, and the same seeds are drawn whatever runs the program. One operation draws one seed, so a traced function draws what its
operations draw when they are called one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import empty_like

from serrate.runtime.dispatch import Binding, Leaves


def placeholders(count: int, device: torch.device) -> list[torch.Tensor]:
    """Scalars like seeds, for what looks at dtypes and shapes only."""
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
    """Drawn from the generator of the CPU too, so that devices agree, and filled in there, so that nothing waits for a copy.

    While a CUDA graph is captured, the device draws: a captured graph draws again whenever it is replayed.
    """

    def draw() -> Sequence[torch.Tensor]:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.empty(count, dtype=torch.int64, device=device).random_().unbind()
        seeds = torch.empty(count, dtype=torch.int64, device="cpu").random_().tolist()
        return [torch.full((), seed, dtype=torch.int64, device=device) for seed in seeds]

    return draw
