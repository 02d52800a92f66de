"""Library calls: operations that are not loop nests, done by torch on the tensors' device, or by compiled code: C++ on a CPU,
Triton on a GPU (`device_library.py`). Nothing is copied to the host.

In: a function's name, its tensors and numbers. Out: new tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serrate.codegen.cpp import printer as cpp
from serrate.codegen.cpp.names import PRELUDE
from serrate.codegen.cpp.values import CTYPES
from serrate.errors import VerificationError
from serrate.runtime import cache
from serrate.runtime.compiler import find_compiler


def group_by(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Offsets of `count` groups, and the stable permutation that groups equal keys.

    >>> group_by(torch.tensor([2, 0, 2, 1]), 3)
    (tensor([0, 1, 2, 4]), tensor([1, 3, 0, 2]))
    """
    # Keys outside all groups come last. On a GPU every operation is a launch, and a sort takes one for every byte of a key.
    known = torch.where(keys.clamp(0, max(count - 1, 0)) == keys, keys, count)
    narrow = next((dtype for dtype in (torch.uint8, torch.int16, torch.int32) if count <= torch.iinfo(dtype).max), torch.int64)
    ordered, permutation = torch.sort(known.to(narrow), stable=True)
    bounds = torch.arange(count + 1, device=keys.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered, bounds), permutation


def group_first(keys: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `group_by`, for the first `positions` keys; those in the rest of the buffer mean nothing, and come after all groups.

    >>> group_first(torch.tensor([2, 0, 2, 1]), torch.tensor([3]), 3)
    (tensor([0, 1, 1, 3]), tensor([1, 0, 2, 3]))
    """
    return group_by(torch.where(torch.arange(len(keys), device=keys.device) < positions, keys, count), count)


def invert(permutation: Tensor) -> tuple[Tensor]:
    """The inverse permutation; -1 at positions that the argument, if it is not a permutation, does not reach.

    >>> invert(torch.tensor([1, 3, 0, 2]))
    (tensor([2, 0, 3, 1]),)
    """
    inverse = torch.full_like(permutation, -1)
    inverse[permutation] = torch.arange(len(permutation), dtype=permutation.dtype, device=permutation.device)
    return (inverse,)


def group_and_invert(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `group_by`, and the inverse of its permutation.

    >>> group_and_invert(torch.tensor([2, 0, 2, 1]), 3)
    (tensor([0, 1, 2, 4]), tensor([1, 3, 0, 2]), tensor([2, 0, 3, 1]))
    """
    offsets, permutation = group_by(keys, count)
    return offsets, permutation, *invert(permutation)


def topk(x: Tensor, k: int, dim: int, largest: int) -> tuple[Tensor, Tensor]:
    """The `k` largest or smallest elements along a dim, in order, and their positions."""
    values, indices = torch.topk(x, k, dim, bool(largest))
    return values, indices


def sort(x: Tensor, dim: int, descending: int) -> tuple[Tensor, Tensor]:
    """A stable sort along a dim: the elements and their original positions."""
    values, indices = torch.sort(x, dim=dim, descending=bool(descending), stable=True)
    return values, indices


def sort_rows(x: Tensor, within: Tensor, positions: Tensor, before: int, descending: int) -> tuple[Tensor, Tensor]:
    """Sorts every row; returns the elements, and their original indices in the row. Rows lie along the dims of `within`, which
    are dim `before` of `x` and those after it.

    `within` holds each position's index in its row, `positions` the number of positions: the buffer may be larger, and
    anything past them stays in place.

    >>> sort_rows(torch.tensor([3, 1, 9, 4]), torch.tensor([0, 1, 0, 1]), torch.tensor([4]), 0, 0)
    (tensor([1, 3, 4, 9]), tensor([1, 0, 1, 0]))
    """
    within = within.reshape(-1)
    inside = torch.arange(len(within), device=x.device) < positions
    rows = torch.where(inside, (within == 0).cumsum(0), len(within) + 1)
    flat = x.reshape(prod(x.shape[:before]), len(within), -1) if x.numel() else x.reshape(0, len(within), 1)
    order = torch.sort(flat, dim=1, descending=bool(descending), stable=True).indices
    order = order.gather(1, torch.sort(rows[order], dim=1, stable=True).indices)
    return flat.gather(1, order).reshape(x.shape), within[order].reshape(x.shape)


def sort_lines(x: Tensor, along: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Sorts elements of different rows: those with equal `others`, their positions in all dims but the sorted one. The sorted
    elements of a line take the places of that line, in order.

    `rest` are the others, the number of dims before the lines, and whether the order is descending. `along` holds each position's
    index along the sorted dim; `positions` is as in `sort_rows`.

    >>> sort_lines(torch.tensor([5, 1, 3, 4]), torch.tensor([0, 0, 1, 2]), torch.tensor([4]), torch.tensor([0, 1, 0, 0]), 0, 0)
    (tensor([3, 1, 4, 5]), tensor([1, 0, 2, 0]))
    """
    *others, before, descending = rest
    along = along.reshape(-1)
    count = len(along)
    inside = torch.arange(count, device=x.device) < positions
    keys = torch.stack([torch.where(inside, key.reshape(-1), count + 1) for key in others])
    places = torch.arange(count, device=x.device)
    for key in keys.flip(0):
        places = places[torch.sort(key[places], stable=True).indices]
    begins = (keys[:, places].diff(dim=1) != 0).any(0) if count else keys[0].bool()
    line = torch.zeros_like(along)
    line[places[1:]] = begins.cumsum(0)
    flat = x.reshape(prod(x.shape[:before]), count, -1) if x.numel() else x.reshape(0, count, 1)
    order = torch.sort(flat, dim=1, descending=bool(descending), stable=True).indices
    order = order.gather(1, torch.sort(line[order], dim=1, stable=True).indices)
    values, indices = torch.empty_like(flat), torch.empty(flat.shape, dtype=torch.int64, device=x.device)
    values[:, places], indices[:, places] = flat.gather(1, order), along[order]
    return values.reshape(x.shape), indices.reshape(x.shape)


FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    f.__name__: f for f in (group_by, group_first, invert, group_and_invert, topk, sort, sort_rows, sort_lines)
}


def compiled_group_by(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`group_by` as compiled C++: a counting sort instead of a comparison sort."""
    threads = torch.get_num_threads() if len(keys) >= 1 << 15 else 1
    offsets, permutation = torch.empty(count + 1, dtype=torch.int64, device="cpu"), torch.empty_like(keys)
    scratch = torch.empty((threads, count + 1), dtype=torch.int64, device="cpu")
    pointers = (ctypes.c_void_p * 4)(*(t.data_ptr() for t in (keys, offsets, permutation, scratch)))
    _compiled("group_by", "library.h")(pointers, (ctypes.c_longlong * 3)(threads, len(keys), count))
    return offsets, permutation


def compiled_group_and_invert(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`group_and_invert` with the compiled `group_by`."""
    offsets, permutation = compiled_group_by(keys, count)
    return offsets, permutation, *invert(permutation)


def compiled_sort_rows(x: Tensor, within: Tensor, positions: Tensor, before: int, descending: int) -> tuple[Tensor, Tensor]:
    """`sort_rows` without comparing elements of different rows: each row is sorted in place."""
    inner = prod(x.shape[before + within.ndim :])
    within, total = within.reshape(-1), int(positions)
    starts = torch.cat([(within[:total] == 0).nonzero().flatten(), positions])
    longest = int(starts.diff().max()) if len(starts) > 1 else 0
    outer = prod(x.shape[:before])
    threads = torch.get_num_threads() if x.numel() >= 1 << 13 else 1
    values, indices = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64, device="cpu")
    # Two rows of words per thread; a word is a key and a position, each of at most 64 bits.
    scratch = torch.empty((threads, 2, longest, 2), dtype=torch.int64, device="cpu")
    pointers = (ctypes.c_void_p * 5)(*(t.data_ptr() for t in (x, starts, values, indices, scratch)))
    numbers = (threads, outer, len(starts) - 1, inner, len(within), longest, descending)
    _compiled("sort_rows", "sort.h", CTYPES[x.dtype])(pointers, (ctypes.c_longlong * 7)(*numbers))
    return values, indices


COMPILED: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "group_by": compiled_group_by,
    "group_and_invert": compiled_group_and_invert,
    "sort_rows": compiled_sort_rows,
}


@functools.cache
def _compiled(name: str, file: str, element: str = "") -> Any:
    text = (Path(cpp.__file__).parent / file).read_text()
    own = text.replace("ELEMENT", element)
    return cache.functions([cache.Unit(name, own)], PRELUDE, find_compiler())[0]


def run(function: str, tensors: Sequence[Tensor], options: Sequence[int], backend: str = "reference") -> tuple[Tensor, ...]:
    """Calls a function by name: the version for a backend if there is one."""
    if function not in FUNCTIONS:
        raise VerificationError(f"no library function is called {function!r}; there are {', '.join(FUNCTIONS)}")
    return _chosen(function, backend)(*tensors, *options)


@functools.cache
def _chosen(function: str, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    if backend == "cpp":
        return COMPILED.get(function, FUNCTIONS[function])
    if backend == "triton":
        from serrate.runtime import device_library  # triton is optional: only its backend may import it

        return device_library.FUNCTIONS.get(function, FUNCTIONS[function])
    return FUNCTIONS[function]
