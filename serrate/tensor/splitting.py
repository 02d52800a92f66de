"""A tensor cut along a dim: `unbind`, `split`, `chunk`, `tensor_split`.

In: values, their structure, a dim, and where to cut. Out: the pieces in order, each a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from serrate.errors import ShapeError
from serrate.tensor.indexing.reading import dims_of
from serrate.tensor.indexing.selecting import select
from serrate.tensor.indexing.slicing import slice_dim
from serrate.tensor.structure import Structure
from serrate.tensor.taking import Piece, take_all


def unbind(values: Tensor, structure: Structure, at: int) -> list[Piece]:
    """What is at every position of a dim; the dim goes away.

    >>> [row.tolist() for row, _ in unbind(torch.arange(3), Structure.from_lengths(torch.tensor([2, 1])), 0)]
    [[0, 1], [2]]
    """
    if at == 0:
        return take_all(values, structure, "unbind")
    size = _size(values, structure, at, "unbind")
    return [select(values, structure, dims_of(values, structure)[at], index, "unbind") for index in range(size)]


def split(values: Tensor, structure: Structure, sizes: int | Sequence[int], at: int) -> list[Piece]:
    """Pieces of that size, the last one smaller; or of these sizes.

    >>> pieces = split(torch.arange(3), Structure.from_lengths(torch.tensor([1, 1, 1])), 2, 0)
    >>> [piece.tolist() for piece, _ in pieces]
    [[0, 1], [2]]
    """
    wanted = sizes if isinstance(sizes, int) else list(sizes)
    return cut_as(values, structure, at, "split", lambda whole: torch.split(whole, wanted))


def cut_as(values: Tensor, structure: Structure, at: int, why: str, cut: Callable[[Tensor], Sequence[Tensor]]) -> list[Piece]:
    """The pieces that `cut` makes of a plain tensor of as many positions as the dim has, made of the ragged one.

    >>> jt = Structure.from_lengths(torch.tensor([1, 1, 1])), torch.arange(3)
    >>> [piece.tolist() for piece, _ in cut_as(jt[1], jt[0], 0, "chunk", lambda whole: whole.chunk(2))]
    [[0, 1], [2]]
    """
    size = _size(values, structure, at, why)
    # torch knows the rules of how pieces are sized; a tensor without data is enough to ask it.
    try:
        pieces = cut(torch.empty(size, device="meta"))
    except (RuntimeError, ValueError, IndexError) as error:
        raise ShapeError(f"{why}: dim {at} of size {size} cannot be cut so: {error}") from None
    bounds = [0]
    for piece in pieces:
        bounds.append(bounds[-1] + piece.shape[0])
    dim = dims_of(values, structure)[at]
    return [slice_dim(values, structure, dim, slice(a, b), why) for a, b in pairwise(bounds)]


def _size(values: Tensor, structure: Structure, at: int, why: str) -> int:
    dim = dims_of(values, structure)[at]
    if dim.level is not None:
        raise ShapeError(f"{why}: dim {at} is ragged and has another size in every row: take ranges of it, as in jt[:, :k]")
    return values.shape[dim.values_dim] if dim.axis is None else structure.rows[dim.axis].num_rows(0)
