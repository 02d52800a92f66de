"""Aliasing: arguments of a device loop that share memory.

In: a loop program, and the paths of its tensor arguments. Out: `KernelError` if a call stores to memory that it also accesses
through another argument, since the result would depend on the order of accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from serrate.errors import KernelError
from serrate.ir.loops import Load, LoopProgram, Write, nodes, values_of
from serrate.ir.values import Role
from serrate.tiles.sources import NUMBERS, Path


class Aliasing:
    """Which tensors of a program may share memory."""

    def __init__(self, program: LoopProgram, paths: Sequence[Path]) -> None:
        self._program, self._paths = program, paths
        stored = [k for k, t in enumerate(program.tensors[: len(paths)]) if t.role is Role.OUTPUT]
        named = [k for k, path in enumerate(paths) if path != (NUMBERS,)]
        self._pairs = [(k, j, self._in_place(k, j)) for k in stored for j in named if j != k and not (j in stored and j < k)]

    def _in_place(self, stored: int, read: int) -> bool:
        """Whether one tensor is only read at the index where the other is stored, so that they may be the same tensor."""
        x, y = (self._program.tensors[k] for k in (stored, read))
        if y.role is Role.OUTPUT:
            return False
        for kernel in self._program.kernels:
            for node in nodes(kernel.body):
                for v in (v for value in values_of(node) for v in value.walk() if isinstance(v, Load) and v.tensor is y):
                    if not (isinstance(node, Write) and node.tensor is x and node.index == v.index):
                        return False
        return True

    def require_apart(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises if a tensor that is stored to shares memory with another; strides are arbitrary."""
        if not self._pairs:
            return
        spans = [_span(t) for t in tensors]
        for k, j, in_place in self._pairs:
            (first, end), (other, last) = spans[k], spans[j]
            same = spans[k] == spans[j] and tensors[k].shape == tensors[j].shape
            if first < last and other < end and not (same and in_place):
                self._refuse(k, j)

    def check(self, tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[int]], None] | None:
        """`require_apart` for contiguous tensors of these sizes, as a function of their addresses; None if none can overlap."""
        sizes = [t.nbytes for t in tensors]
        pairs = [
            (k, j, sizes[k], sizes[j], in_place and tensors[k].shape == tensors[j].shape and sizes[k] == sizes[j])
            for k, j, in_place in self._pairs
            if sizes[k] and sizes[j]
        ]
        if not pairs:
            return None

        def apart(pointers: Sequence[int]) -> None:
            for k, j, mine, theirs, in_place in pairs:
                first, other = pointers[k], pointers[j]
                if first < other + theirs and other < first + mine and not (in_place and first == other):
                    self._refuse(k, j)

        return apart

    def _refuse(self, stored: int, other: int) -> NoReturn:
        first, second = (".".join(str(p) for p in self._paths[k] if p != "values") for k in (stored, other))
        raise KernelError(
            f"{first}, which the kernel stores to, shares memory with {second}: "
            f"use one name for both, or pass a copy, {second}.clone()"
        )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The address range of a tensor; empty if it has no elements or no memory."""
    if not x.numel() or x.is_meta:
        return 0, 0
    if x.is_contiguous():
        first = x.data_ptr()
        return first, first + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize
