"""Conversion from and to lists of rows.

In: tensors or numbers, in a list or in lists of lists. Out: values with their structure; and rows as lists of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, ShapeError, StructureError
from serrate.tensor.components import take_all
from serrate.tensor.offsets import chain_from_lengths
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy


def gather_rows(rows: Iterable[Tensor], outer: Sequence[Sequence[int]]) -> tuple[Tensor, Structure]:
    """Concatenates rows; returns values and structure. `outer` holds the lengths of the outer levels.

    >>> gather_rows([torch.ones(2), torch.zeros(1)], outer=())
    (tensor([1., 1., 0.]), Structure(2 > 3))
    """
    if isinstance(rows, Tensor):
        constructor = "from_torch_nested" if rows.is_nested else "from_padded, with the lengths of its rows, or give x.unbind()"
        raise CallError(f"from_list takes a list of rows, got one tensor of {rows.dim()} dims: use {constructor}")
    rows = list(rows)
    _check_rows(rows)
    values = torch.cat(rows) if rows else torch.empty(0, device=None)
    return values, _structure(values, [*outer, [row.shape[0] for row in rows]])


def from_lists(rows: Sequence[Any], dtype: torch.dtype | None, device: torch.device | str | None) -> tuple[Tensor, Structure]:
    """Values and structure of nested lists with tensors or plain numbers as leaves.

    >>> from_lists([[[1.5], []], []], dtype=None, device=None)
    (tensor([1.5000]), Structure(2 > 2 > 1))
    """
    bottom, lengths = flatten_nested(rows)
    if bottom and isinstance(bottom[0], Tensor):
        values, structure = gather_rows(bottom, lengths)
        values = values.to(device=device, dtype=dtype)
        return values, structure.to(values.device)
    for index, item in enumerate(bottom):
        if not isinstance(item, Number):
            raise CallError(
                f"the leaves of a nested list must be tensors or numbers: leaf {index} is of type {type(item).__name__}"
            )
    if not lengths:
        raise StructureError("a list of plain numbers has no rows: give a list of lists, or use torch.tensor")
    values = torch.tensor(bottom, dtype=dtype, device=device)
    return values, _structure(values, lengths)


def flatten_nested(rows: Sequence[Any]) -> tuple[list[Any], list[list[int]]]:
    """The leaves of nested lists, and the lengths of the lists on every level below the outermost.

    The deepest list determines the depth: an empty list may appear at any depth, leaves only at the last.

    >>> flatten_nested([[torch.zeros(2)], []])
    ([tensor([0., 0.])], [[1, 0]])
    """
    items: list[Any] = list(rows)
    lengths: list[list[int]] = []
    # Empty lists count as lists of numbers: nothing indicates more levels.
    while any(isinstance(item, (list, tuple)) for item in items) or not (items or lengths):
        for index, item in enumerate(items):
            if not isinstance(item, (list, tuple)):
                raise StructureError(
                    "every branch of a nested list must have the same depth: "
                    f"at depth {len(lengths) + 1} item {index} is of type {type(item).__name__}, but another is a list"
                )
        lengths.append([len(item) for item in items])
        items = [part for item in items for part in item]
    return items, lengths


def to_numbers(values: Tensor, structure: Structure, why: str) -> list[Any]:
    """The rows as nested lists of plain Python numbers.

    >>> to_numbers(torch.arange(3), Structure.from_lengths(torch.tensor([1, 2])), "tolist")
    [[0], [1, 2]]
    """
    pieces = take_all(host_copy(values, why), structure, why)
    return [piece.tolist() if inner is None else to_numbers(piece, inner, why) for piece, inner in pieces]


def _structure(values: Tensor, lengths: Sequence[Sequence[int]]) -> Structure:
    host = chain_from_lengths([torch.tensor(level, dtype=torch.int64, device="cpu") for level in lengths], values.shape[0])
    rows = Rows(tuple(level.to(values.device) for level in host), host=host)
    rows.note("total", rows.depth - 1, values.shape[0])
    return Structure((rows,))


def _check_rows(rows: Sequence[Tensor]) -> None:
    for index, row in enumerate(rows):
        if not isinstance(row, Tensor):
            constructor = (
                "from_nested_list" if isinstance(row, (list, tuple)) else "from_numpy" if hasattr(row, "__array__") else None
            )
            advice = f": use {constructor}" if constructor else ""
            raise CallError(f"rows must be tensors: rows[{index}] is of type {type(row).__name__}{advice}")
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
