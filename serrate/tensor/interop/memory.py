"""Shared and page-locked memory for values and structure.

In: values and their structure. Out: the same, in that memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from serrate.tensor.rows import rows_of
from serrate.tensor.structure import Structure


def parts(values: Tensor, structure: Structure) -> Iterator[Tensor]:
    """Every tensor that makes up a ragged tensor.

    >>> import torch
    >>> len(list(parts(torch.zeros(3), Structure.from_lengths(torch.tensor([1, 2])))))
    2
    """
    yield values
    for rows in structure.rows:
        yield from rows.offsets
        if rows.starts is not None:
            yield rows.starts


def share(values: Tensor, structure: Structure) -> None:
    """Moves the storage of every part into shared memory; the tensors stay the same objects.

    >>> import torch
    >>> values = torch.zeros(3)
    >>> share(values, Structure.from_lengths(torch.tensor([1, 2])))
    >>> values.is_shared()
    True
    """
    each: list[Any] = list(parts(values, structure))
    for part in each:
        part.share_memory_()


def shared(values: Tensor, structure: Structure) -> bool:
    """Whether the storage of every part is in shared memory.

    >>> import torch
    >>> shared(torch.zeros(3), Structure.from_lengths(torch.tensor([1, 2])))
    False
    """
    each: list[Any] = list(parts(values, structure))
    return all(part.is_shared() for part in each)


def pinned(values: Tensor, structure: Structure) -> tuple[Tensor, Structure]:
    """Copies every part to page-locked memory; known facts about the rows are kept."""
    rows = tuple(
        rows_of(
            tuple(level.pin_memory() for level in each.offsets),
            each.depth,
            each.packed,
            None if each.starts is None else each.starts.pin_memory(),
            each.room,
            each.facts(),
        )
        for each in structure.rows
    )
    return values.pin_memory(), structure.with_rows(rows)
