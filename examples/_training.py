"""Shared code of the training examples: one optimiser step, losses and times of two models side by side, a progress bar.

In: a ragged model, the padded torch model of the same weights, and batches. Out: their losses, and the seconds of their steps.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Run(NamedTuple):
    losses: list[float]
    seconds: list[float]

    def milliseconds(self) -> float:
        """The median of the steps after the first few, which compile programs and warm up."""
        return 1000 * statistics.median(self.seconds[min(5, len(self.seconds) - 1) :])


def bimodal(count: int, short: tuple[int, int], long: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Lengths of rows: one in ten is long."""
    lengths = torch.randint(short[0], short[1] + 1, (count,), generator=generator)
    others = torch.randint(long[0], long[1] + 1, (count,), generator=generator)
    return torch.where(torch.arange(count) % 10 == 9, others, lengths)


def side_by_side(models: list[nn.Module], batches: Iterable[Any], lr: float = 1e-3) -> list[Run]:
    """Trains models on the same batches, step by step in turns; the second and later ones start with the weights of the first.

    A model called with a batch returns its loss.
    """
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for model in models]
    runs = [Run([], []) for _ in models]
    for batch in batches:
        for model, optimizer, run in zip(models, optimizers, runs, strict=True):
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.losses.append(loss.item())
            run.seconds.append(time.perf_counter() - begin)
    return runs


def report(
    name: str, models: tuple[nn.Module, nn.Module], batches: Callable[[int], Iterator[Any]], lr: float, steps: int = 60
) -> None:
    """Compares 20 steps with those of the padded model, then trains on; prints losses and speeds."""
    ours, padded = side_by_side(list(models), shown(batches(20), 20, f"{name}: ragged and padded"), lr)
    for step in (0, 1, 5, 10, 19):
        print(f"step {step:3}: loss {ours.losses[step]:.4f}, padded {padded.losses[step]:.4f}")
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(padded.losses), rtol=2e-3, atol=2e-3)
    one, other = ours.milliseconds(), padded.milliseconds()
    print(f"a step takes {one:.1f} ms, padded {other:.1f} ms: {other / one:.1f} times faster")
    (further,) = side_by_side([models[0]], shown(batches(steps), steps, f"{name}: training"), lr)
    for step in range(0, steps, max(1, steps // 5)):
        print(f"step {20 + step:3}: loss {further.losses[step]:.4f}")
    last = statistics.mean(further.losses[-10:])
    print(f"{name}: {ours.losses[0]:.4f} at first, {last:.4f} in the end")
    assert last < ours.losses[0]


def shown(batches: Iterator[Any], total: int, title: str) -> Iterator[Any]:
    """Shows a progress bar on a terminal."""
    if not sys.stdout.isatty():
        return batches
    from rich.progress import track

    return iter(track(batches, title, total, transient=True))
