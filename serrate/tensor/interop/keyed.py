"""Keyed rows in the layout of recommender libraries: several features of the same samples in one tensor of values.

In: keys, values back to back key by key, lengths `[keys * samples]` key by key, and perhaps a weight for every value.
Out: values and structure for every key, sharing the values; and from a dict of ragged tensors the joined tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError, FormatError, ShapeError, StructureError
from serrate.tensor.checks.validate import check_layout, check_lengths, check_values_layout
from serrate.tensor.interop.common import Copying, rows_of_one_level
from serrate.tensor.positions import compacted
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy


class Keyed(NamedTuple):
    """The parts of a KeyedJaggedTensor."""

    keys: list[str]
    """The names of the features, in the order of their values."""
    values: Tensor
    """The values of all keys back to back."""
    lengths: Tensor
    """`[keys * samples]`: the length of every sample's row, key by key."""
    offsets: Tensor
    """`[keys * samples + 1]`: where every row starts, and where the last one ends."""
    weights: Tensor | None
    """One weight for every value, or None."""


def from_keyed(
    keys: Sequence[str], values: Tensor, lengths: Tensor, rows_per_key: Sequence[int] | None, copying: Copying
) -> dict[str, tuple[Tensor, Structure]]:
    """Values and structure of every key; `rows_per_key` if keys have different numbers of samples.

    >>> from_keyed(["a", "b"], torch.arange(4), torch.tensor([1, 0, 1, 2]), None, Copying("from_keyed", None))["b"]
    (tensor([1, 2, 3]), Structure(2 > 3))
    """
    check_values_layout(values)
    check_layout("lengths", (lengths,))
    if lengths.dim() != 1:
        raise ShapeError(f"from_keyed: lengths must be 1-D, key by key, got shape {tuple(lengths.shape)}")
    if len(set(keys)) != len(keys):
        raise CallError(f"from_keyed: a key must not repeat, got {list(keys)}")
    if rows_per_key is None:
        if not keys or lengths.shape[0] % len(keys):
            raise StructureError(
                f"from_keyed: {lengths.shape[0]} lengths do not divide among {len(keys)} keys: give rows_per_key= "
                "where keys have different numbers of rows"
            )
        rows_per_key = [lengths.shape[0] // len(keys)] * len(keys)
    if len(rows_per_key) != len(keys) or sum(rows_per_key) != lengths.shape[0]:
        raise StructureError(
            f"from_keyed: rows_per_key={list(rows_per_key)} must have one number for each of {len(keys)} keys "
            f"and sum to the {lengths.shape[0]} lengths"
        )
    host = host_copy(lengths, copying.bridge)
    check_lengths([host], values.shape[0])
    values = copying.kept(values)
    found: dict[str, tuple[Tensor, Structure]] = {}
    start = 0
    for key, own in zip(keys, torch.split(host, list(rows_per_key)), strict=True):
        stop = start + int(own.sum())
        found[key] = values[start:stop], Structure.from_lengths(own, total=stop - start).to(values.device)
        start = stop
    return found


def to_keyed(
    parts: Mapping[str, tuple[Tensor, Structure]], weights: Mapping[str, tuple[Tensor, Structure]] | None, copying: Copying
) -> Keyed:
    """The values of all keys back to back, with their lengths and offsets.

    >>> one = torch.arange(3), Structure.from_lengths(torch.tensor([1, 2]))
    >>> to_keyed({"a": one, "b": one}, None, Copying("to_keyed", True)).lengths
    tensor([1, 2, 1, 2])
    """
    if not parts:
        raise CallError("to_keyed: give at least one key")
    for key, (values, _) in parts.items():
        first = next(iter(parts.values()))[0]
        if values.shape[1:] != first.shape[1:] or values.dtype != first.dtype or values.device != first.device:
            raise DtypeError(
                f"to_keyed: all keys need the same inner dims, dtype and device: {key!r} has {tuple(values.shape[1:])}, "
                f"{values.dtype} on {values.device}, the first {tuple(first.shape[1:])}, {first.dtype} on {first.device}"
            )
    rows = {key: rows_of_one_level(copying.bridge, structure) for key, (_, structure) in parts.items()}
    joined_weights = None
    if weights is not None:
        if weights.keys() != parts.keys() or any(not weights[key][1].same_rows(parts[key][1]) for key in parts):
            raise FormatError("to_keyed: weights need the keys and the rows of the values")
        own = {key: rows_of_one_level(copying.bridge, weights[key][1]) for key in parts}
        joined_weights = _joined([weights[key][0] for key in parts], list(own.values()), copying)
    values = _joined([values for values, _ in parts.values()], list(rows.values()), copying)
    lengths = torch.cat([each.inner_lengths() for each in rows.values()])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return Keyed(list(parts), values, lengths, offsets, joined_weights)


def _joined(tensors: list[Tensor], rows: list[Rows], copying: Copying) -> Tensor:
    whole = _whole(tensors) if all(each.contiguous for each in rows) else None
    if whole is not None:
        return copying.kept(whole)
    copying.forced("the values of the keys do not lie back to back in memory")
    return torch.cat([compacted(values, 0, own, copying.bridge) for values, own in zip(tensors, rows, strict=True)])


def _whole(tensors: list[Tensor]) -> Tensor | None:
    """The tensor that these are consecutive slices of, if they are and none requires grad."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if any(part.requires_grad or not part.is_contiguous() for part in tensors):
        return None
    place, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for part in tensors:
        if part.untyped_storage().data_ptr() != storage or (part.numel() and part.storage_offset() != place):
            return None
        place += part.numel()
    total = sum(part.shape[0] for part in tensors)
    return first.as_strided((total, *first.shape[1:]), first.stride())
