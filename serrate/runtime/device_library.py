"""Library calls on a GPU in a few launches of Triton, where torch takes a dozen.

In: keys, or a permutation. Out: what the functions of the same name in `library.py` return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from serrate.codegen.triton.grouping import BLOCK, print_grouping
from serrate.runtime import library
from serrate.runtime.memory import scratch
from serrate.runtime.triton import TritonFunction, load

GROUPS = 1024
"""The most groups that are counted for every block of keys."""
COUNTS = 1 << 18
"""The most counts that one program sums: with more of them, a sort is faster."""


@functools.cache
def _kernel(name: str, groups: int, dtype: torch.dtype) -> TritonFunction:
    return TritonFunction(getattr(load(print_grouping(groups), "grouping"), name), {})


def group_by(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Offsets of `count` groups, and the stable permutation that groups equal keys."""
    if not _counts(keys, count):
        return library.group_by(keys, count)
    offsets, permutation = _grouped(keys, count, "order_keys", 1)
    return offsets, permutation


def group_and_invert(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `group_by`, and the inverse of its permutation."""
    if not _counts(keys, count):
        offsets, permutation = library.group_by(keys, count)
        return offsets, permutation, *invert(permutation)
    offsets, permutation, inverse = _grouped(keys, count, "order_and_invert", 2)
    return offsets, permutation, inverse


def _counts(keys: Tensor, count: int) -> bool:
    """Whether keys are counted for every block."""
    size, groups = len(keys), 1 << count.bit_length()
    return bool(size) and groups <= GROUPS and groups * -(-size // BLOCK) <= COUNTS and keys.is_contiguous()


def _grouped(keys: Tensor, count: int, last: str, orders: int) -> list[Tensor]:
    """Offsets, and the `orders` permutations that the last kernel stores."""
    size, groups, device = len(keys), 1 << count.bit_length(), keys.device
    blocks = -(-size // BLOCK)
    offsets = torch.empty(count + 1, dtype=torch.int64, device=device)
    found = [torch.empty(size, dtype=torch.int64, device=device) for _ in range(orders)]
    allocate = scratch(((((groups * blocks,), torch.int32),) * 2 + (((groups * blocks,), torch.int64),)), device)
    assert allocate is not None
    counts, before, places = allocate()

    def kernel(name: str) -> TritonFunction:
        return _kernel(name, groups, keys.dtype)

    kernel("count_keys")((blocks, 1), [keys, counts, before], (size, count, blocks), device)
    kernel("place_groups")((1, 1), [counts, places, offsets], (count, blocks), device)
    kernel(last)((blocks, 1), [keys, before, places, *found], (size, count, blocks), device)
    return [offsets, *found]


def invert(permutation: Tensor) -> tuple[Tensor]:
    """The inverse permutation; -1 at positions that the argument, if it is not a permutation, does not reach."""
    size = len(permutation)
    if not size or not permutation.is_contiguous():
        return library.invert(permutation)
    inverse = torch.full_like(permutation, -1)
    kernel = _kernel("invert", 2, permutation.dtype)
    kernel((-(-size // BLOCK), 1), [permutation, inverse], (size,), permutation.device)
    return (inverse,)


FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "group_by": group_by,
    "group_and_invert": group_and_invert,
    "invert": invert,
}
