"""Library calls: what is not a loop nest. Done by torch on whichever device the tensors are, or by compiled code on a CPU;
nothing is copied to the host.

In: a function's name, its tensors and numbers. Out: new tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serrate.codegen.cpp import printer as cpp
from serrate.errors import VerificationError
from serrate.runtime import cache
from serrate.runtime.compiler import find_compiler
from serrate.runtime.launch import PRELUDE


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
    """The permutation that undoes another one; -1 where nothing leads to a position, because it was none.

    >>> invert(torch.tensor([1, 3, 0, 2]))
    (tensor([2, 0, 3, 1]),)
    """
    inverse = torch.full_like(permutation, -1)
    inverse[permutation] = torch.arange(len(permutation), dtype=permutation.dtype, device=permutation.device)
    return (inverse,)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of the last dim, largest first, and where they are."""
    values, indices = torch.topk(x, k, dim=-1)
    return values, indices


FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {f.__name__: f for f in (group_by, invert, topk)}


def compiled_group_by(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`group_by` by generated code's own compiler: a counting sort instead of a comparing one."""
    threads = torch.get_num_threads() if len(keys) >= 1 << 15 else 1
    offsets, permutation = torch.empty(count + 1, dtype=torch.int64), torch.empty_like(keys)
    scratch = torch.empty((threads, count + 1), dtype=torch.int64)
    pointers = (ctypes.c_void_p * 4)(*(t.data_ptr() for t in (keys, offsets, permutation, scratch)))
    _compiled("group_by")(pointers, (ctypes.c_longlong * 3)(threads, len(keys), count))
    return offsets, permutation


COMPILED: dict[str, Callable[..., tuple[Tensor, ...]]] = {"group_by": compiled_group_by}


@functools.cache
def _compiled(name: str) -> Any:
    text = (Path(cpp.__file__).parent / "library.h").read_text()
    return cache.functions([cache.Unit(name, text)], PRELUDE, find_compiler())[0]


def run(function: str, tensors: Sequence[Tensor], options: Sequence[int], *, compiled: bool = False) -> tuple[Tensor, ...]:
    """Calls a function by name; with `compiled`, one that was written for a CPU where there is one."""
    if function not in FUNCTIONS:
        raise VerificationError(f"no library function is called {function!r}; there are {', '.join(FUNCTIONS)}")
    chosen = COMPILED.get(function) if compiled else None
    return (chosen or FUNCTIONS[function])(*tensors, *options)
