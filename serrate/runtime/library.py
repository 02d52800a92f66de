"""Library calls: what is not a loop nest, done by torch on whichever device the tensors are; nothing is copied to the host.

In: a function's name, its tensors and numbers. Out: new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from serrate.errors import VerificationError


def group_by(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Offsets of `count` groups, and the permutation that puts equal keys side by side, each group in its old order.

    >>> group_by(torch.tensor([2, 0, 2, 1]), 3)
    (tensor([0, 1, 2, 4]), tensor([1, 3, 0, 2]))
    """
    # Keys of no group come last, behind every group's end.
    known = torch.where((keys < 0) | (keys >= count), count, keys)
    ordered, permutation = torch.sort(known, stable=True)
    bounds = torch.arange(count + 1, device=keys.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered, bounds), permutation


def invert(permutation: Tensor) -> tuple[Tensor]:
    """The permutation that undoes another one.

    >>> invert(torch.tensor([1, 3, 0, 2]))
    (tensor([2, 0, 3, 1]),)
    """
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), dtype=permutation.dtype, device=permutation.device)
    return (inverse,)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of the last dim, largest first, and where they are."""
    values, indices = torch.topk(x, k, dim=-1)
    return values, indices


FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {f.__name__: f for f in (group_by, invert, topk)}


def run(function: str, tensors: Sequence[Tensor], options: Sequence[int]) -> tuple[Tensor, ...]:
    """Calls a function by name."""
    if function not in FUNCTIONS:
        raise VerificationError(f"no library function is called {function!r}; there are {', '.join(FUNCTIONS)}")
    return FUNCTIONS[function](*tensors, *options)
