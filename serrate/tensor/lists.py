"""Lists of rows, and the same rows back to back.

In: tensors (or lists of numbers) in a list or in lists of lists. Out: values with their structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, ShapeError, StructureError
from serrate.tensor.chain import chain_from_lengths
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure


def gather_rows(rows: Sequence[Tensor], outer: Sequence[Sequence[int]]) -> tuple[Tensor, Structure]:
    """Rows back to back as values, and their structure; `outer` holds the lengths of the levels above the rows.

    >>> gather_rows([torch.ones(2), torch.zeros(1)], outer=())
    (tensor([1., 1., 0.]), Structure(2 > 3))
    """
    _check_rows(rows)
    values = torch.cat(list(rows)) if rows else torch.empty(0)
    lengths = [*outer, [row.shape[0] for row in rows]]
    host = chain_from_lengths([torch.tensor(level, dtype=torch.int64) for level in lengths], values.shape[0])
    found = Rows(tuple(level.to(values.device) for level in host), host=host)
    found.note("total", found.depth - 1, values.shape[0])
    return values, Structure((found,))


def flatten_nested(rows: Sequence[Sequence[Any]]) -> tuple[list[Tensor], list[list[int]]]:
    """The rows at the bottom of lists of lists, and the lengths of every level above them, outermost first.

    >>> flatten_nested([[torch.zeros(2)], []])
    ([tensor([0., 0.])], [[1, 0]])
    """
    items: list[Any] = list(rows)
    outer: list[list[int]] = []
    while not outer or any(isinstance(item, (list, tuple)) for item in items):
        for index, item in enumerate(items):
            if not isinstance(item, (list, tuple)):
                raise StructureError(
                    f"every branch of a nested list needs the same depth: at depth {len(outer) + 1} item {index} is a "
                    f"{type(item).__name__}, not a list; for a single level use from_list"
                )
        outer.append([len(item) for item in items])
        items = [part for item in items for part in item]
    return items, outer


def _check_rows(rows: Sequence[Tensor]) -> None:
    for index, row in enumerate(rows):
        if not isinstance(row, Tensor):
            raise CallError(f"rows must be tensors: rows[{index}] is a {type(row).__name__}")
        if row.dim() == 0:
            raise ShapeError(f"rows must have at least one dim, which is ragged: rows[{index}] is a scalar")
        first = rows[0]
        if row.shape[1:] != first.shape[1:]:
            raise ShapeError(
                f"rows must agree in every dim after the first: rows[{index}] has shape {tuple(row.shape)}, "
                f"rows[0] has shape {tuple(first.shape)}"
            )
        if row.dtype != first.dtype:
            raise DtypeError(f"rows must have one dtype: rows[{index}] is {row.dtype}, rows[0] is {first.dtype}")
        if row.device != first.device:
            raise DeviceError(f"rows must be on one device: rows[{index}] is on {row.device}, rows[0] on {first.device}")
