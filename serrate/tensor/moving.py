"""Whole rows moved from one place to another: back to back, or each to a room of its own.

In: values, and where runs of positions of one dim start and how long they are. Out: those runs, copied. Compiled code moves
them at the speed of the memory where it is installed and takes them; else torch does, by an index for every position, through
which gradients flow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serrate.tensor.rows import owners_and_places
from serrate.tensor.sync import on_host
from serrate.tensor.torch_private import is_transformed

Mover = Callable[..., Tensor | None]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element: what moves elements need not know what they mean."""

_movers: dict[str, Mover] = {}


def install(**movers: Mover) -> None:
    """Called once by the engine: what `back_to_back` and `apart` do where they can; None where torch shall do it."""
    _movers.update(movers)


def back_to_back(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, total: int) -> Tensor | None:
    """`lengths[k]` positions of a dim from `starts[k]`, for every k, one behind the other, `total` in all; None where torch
    has to do it."""
    return _moved("back_to_back", values, dim, starts, lengths, total)


def apart(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, room: int, fill: complex) -> Tensor | None:
    """The same runs, each in a room of `room` positions, the rest of it `fill`: the dim becomes two. None likewise."""
    return _moved("apart", values, dim, starts, lengths, room, fill)


def _moved(name: str, values: Tensor, dim: int, starts: Tensor, lengths: Tensor, *rest: Any) -> Tensor | None:
    mover = _movers.get(name)
    if mover is None or not all(map(_plain, (values, starts, lengths))):
        return None
    return mover(values, dim, starts.contiguous(), lengths.contiguous(), *rest)


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is just numbers in the memory of a CPU: no gradient is asked for, nobody looks on."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not on_host(tensor) or tensor.layout is not torch.strided:
        return False
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or torch.compiler.is_compiling() or is_transformed(tensor))


def runs(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, total: int, step: int = 1) -> Tensor:
    """Runs of positions of a dim, back to back: `lengths[k]` positions from `starts[k]`, `step` apart.

    >>> runs(torch.arange(10), 0, torch.tensor([7, 0]), torch.tensor([2, 3]), 5, step=2)
    tensor([7, 9, 0, 2, 4])
    """
    moved = back_to_back(values, dim, starts, lengths, total) if step == 1 else None
    if moved is not None:
        return moved
    owner, place = owners_and_places(lengths, total)
    return values.index_select(dim, starts.long().index_select(0, owner) + place * step)
