"""Aliasing: arguments of a device loop that share memory.

In: a loop program, and the paths of its tensor arguments. Out: `KernelError` if a call stores to memory that it also accesses
through another argument, since the result would depend on the order of accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from serrate.errors import KernelError
from serrate.ir.expr import Element, Expr, Symbol
from serrate.ir.loops import Block, If, Load, LoopProgram, Write, values_of
from serrate.ir.solve import terms_of
from serrate.ir.tile import GRID, Loop, Statement, TileProgram, inner, statements
from serrate.ir.values import Role, Tensor
from serrate.tiles.sources import NUMBERS, Path


class Aliasing:
    """Which tensors of a program may share memory."""

    def __init__(self, traced: TileProgram, program: LoopProgram, paths: Sequence[Path]) -> None:
        """`program` has the same tensors as the traced one, in the order of `paths`."""
        self._paths = paths
        tensors = program.tensors[: len(paths)]
        stored = [k for k, t in enumerate(tensors) if t.role is Role.OUTPUT]
        named = [k for k, path in enumerate(paths) if path != (NUMBERS,)]
        pairs = [(k, j) for k in stored for j in named if j != k and not (j in stored and j < k)]
        self._pairs = [(k, j, _in_place(traced, tensors[k], tensors[j])) for k, j in pairs]

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


def _in_place(program: TileProgram, x: Tensor, y: Tensor) -> bool:
    """Whether each element of `y` is read only at the index where it is stored in `x`, and before it is stored: then both may be
    the same tensor. Generated code assumes that different tensors do not overlap; it may load an element once for several
    statements."""

    def stored_after(body: Sequence[Statement], before: bool) -> bool | None:
        """Whether these statements may store elements; None if an element may be read after it was stored, or at another
        index."""
        for node in body:
            if isinstance(node, Block):
                reads = [v for value in values_of(node) for v in value.walk() if isinstance(v, Load) and v.tensor is y]
                stores = isinstance(node, Write) and node.tensor is x
                if reads and (before or not stores or any(v.index != node.index for v in reads if isinstance(node, Write))):
                    return None
                before = before or stores
                continue
            sides = [stored_after(part, before) for part in inner(node)]
            if None in sides or (y in _read((node,)) and not _once(program, node, x)):
                return None
            before = before or True in sides
        return before

    return y.role is not Role.OUTPUT and all(stored_after(phase.body, False) is not None for phase in program.phases)


def _read(body: tuple[Statement, ...]) -> set[Tensor]:
    """The tensors that statements read."""
    blocks = (node for node in statements(body) if isinstance(node, Block))
    return {v.tensor for node in blocks for value in values_of(node) for v in value.walk() if isinstance(v, Load)}


def _once(program: TileProgram, node: Statement, x: Tensor) -> bool:
    """Whether no iteration of a loop stores an element of `x` that a later one may read. Programs of a grid never do."""
    if isinstance(node, If) or (isinstance(node, Loop) and node.kind is GRID):
        return True
    axis = program.axis_of(node.domain) if isinstance(node, Loop) else None
    stores = [n for n in statements((node,)) if isinstance(n, Write) and n.tensor is x]
    if axis is None or len({n.index for n in stores}) != 1:
        return False
    moving = {s for a in program.axes for s in (a.position, a.lane, a.number, a.first, a.last)}
    moving |= {lane.symbol for n in stores for lane in n.lanes}
    return any(_follows(e, axis.position, moving) for e in stores[0].index)


def _follows(index: Expr, position: Symbol, moving: set[Symbol]) -> bool:
    """Whether an index is a position plus terms that no iteration changes: then it differs from position to position."""
    others = [term for term, _ in terms_of(index) if term is not position]
    from_blocks = any(isinstance(e, Element) and e.array.local for term in others for e in term.walk())
    return len(others) < len(terms_of(index)) and not from_blocks and not any(term.symbols & moving for term in others)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The address range of a tensor; empty if it has no elements or no memory."""
    first = x.data_ptr()
    if not first or x.is_contiguous():
        return first, first + (x.nbytes if first else 0)
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first, first + (last + 1) * x.itemsize
