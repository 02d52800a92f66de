"""`jt[key]`: applies the keys dim by dim, from the first to the last.

In: values, their structure, and a key. Out: the selected values and their structure; None if nothing ragged is left.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from serrate.errors import CallError, ShapeError
from serrate.tensor.base import JaggedBase
from serrate.tensor.components import dims_of, shift_dims
from serrate.tensor.indexing.keys import Key, keys_of, numbers_of
from serrate.tensor.indexing.masking import check_mask, keep
from serrate.tensor.indexing.slicing import pick_positions, pick_rows, select, slice_dim
from serrate.tensor.permuting import MaybeRagged, arranged
from serrate.tensor.positions import compact_axis
from serrate.tensor.structure import Dim, Structure


def getitem(values: Tensor, structure: Structure, key: Any) -> MaybeRagged:
    """The values and structure of `jt[key]`.

    >>> import torch
    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> getitem(jt.values, jt.structure, (1, slice(1, None)))
    (tensor([4]), None)
    """
    keys = keys_of(key, len(dims_of(values, structure)), "jt[key]")
    if structure.ahead is not None:
        return _transposed(values, structure, keys)
    piece, _ = follow((values, structure), keys)
    return piece


def _transposed(values: Tensor, structure: Structure, keys: list[Key]) -> MaybeRagged:
    """`getitem` for a tensor with regular dims before ragged ones: indexes it in canonical order, then permutes the result."""
    plain, left = plain_keys(values, structure, [key for key in keys if key is not None], "jt[key]")
    piece, _ = follow((values, structure.canonical), plain)
    piece = arranged(piece, left)
    at = 0
    for key in keys:
        if key is None:
            piece = new_dim(*piece, at)
        at += not isinstance(key, int)
    return piece


def plain_keys(values: Tensor, structure: Structure, keys: list[Key], why: str) -> tuple[list[Key], list[int]]:
    """The keys in canonical order of dims, and the permutation that restores the requested order of the remaining dims.

    >>> import torch
    >>> heads = Structure.from_lengths(torch.tensor([3, 2])).transposed(((1,),))
    >>> plain_keys(torch.zeros(5, 8, 4), heads, [1, 0], "jt[key]")
    ([1, slice(None, None, None), 0, slice(None, None, None)], [0, 1])
    """
    order = structure.order(values.dim())
    if any(isinstance(key, JaggedBase) for key in keys):
        raise CallError(
            f"{why}: with a ragged mask, every ragged dim must directly follow the dim that counts its rows: permute first"
        )
    every = [*keys, *[slice(None)] * (len(order) - len(keys))]
    plain: list[Key] = [slice(None)] * len(order)
    for k, key in zip(order, every, strict=True):
        plain[k] = key
    left = [k for k, key in zip(order, every, strict=True) if not isinstance(key, int)]
    return plain, [sorted(left).index(k) for k in left]


def follow(piece: MaybeRagged, keys: list[Key], *, in_place: bool = False) -> tuple[MaybeRagged, int]:
    """Applies keys to the first dims; returns the result, and how many of its dims they covered.

    With `in_place`, rows selected by number are not copied, which requires increasing numbers.
    """
    at = 0
    for key in keys:
        values, structure = piece
        if key is None:
            piece = new_dim(values, structure, at)
            at += 1
            continue
        if isinstance(key, JaggedBase):
            axis = axis_of_mask(values, structure, at, key, "jt[mask]")
            assert structure is not None
            check_mask(structure, axis, key, "jt[mask]")
            piece = keep(values, structure, axis, key, "jt[mask]")
            at += key.ndim
            continue
        dim = dims_of(values, structure)[at]
        if isinstance(key, int):
            piece = select(values, structure, dim, key, _why("i", at))
            continue
        if isinstance(key, slice):
            piece = slice_dim(values, structure, dim, key, _why("a:b", at))
        else:
            piece = _numbered(values, structure, dim, key, in_place, _why("rows", at))
        at += 1
    return piece, at


def new_dim(values: Tensor, structure: Structure | None, at: int) -> MaybeRagged:
    """Inserts a dim of size 1 before dim `at`.

    >>> import torch
    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> new_dim(jt.values, jt.structure, 0)
    (tensor([[0, 1, 2, 3, 4]]), Structure(2 > 5 of dim 1))
    """
    place = place_of_new_dim(values, structure, at)
    if place is not None:
        return values.unsqueeze(place), None if structure is None else shift_dims(structure, place, 1)
    assert structure is not None
    return put_last(values.unsqueeze(-1), structure, at)


def place_of_new_dim(values: Tensor, structure: Structure | None, at: int) -> int | None:
    """The dim of the values before which a new dim `at` of the tensor goes; None if it goes before a ragged dim.

    >>> import torch
    >>> place_of_new_dim(torch.zeros(5, 2), Structure.from_lengths(torch.tensor([3, 2])), 2)
    1
    """
    if structure is not None and structure.ahead is not None:
        return None
    dims = dims_of(values, structure)
    if at == len(dims):
        return values.dim()
    return dims[at].values_dim if dims[at].level is None else None


def put_last(values: Tensor, structure: Structure, at: int) -> MaybeRagged:
    """Moves the last dim of the values, which is new, to dim `at` of the tensor.

    >>> import torch
    >>> put_last(torch.zeros(5, 1), Structure.from_lengths(torch.tensor([3, 2])), 1)[1]
    Structure(2 > 5, 1 dim before r0)
    """
    last = len(dims_of(values, structure)) - 1
    return arranged((values, structure), [*range(at), last, *range(at, last)])


def axis_of_mask(values: Tensor, structure: Structure | None, at: int, mask: JaggedBase, why: str) -> int:
    """The partitioned dim that a ragged mask at dim `at` selects from."""
    dim = dims_of(values, structure)[at]
    if structure is None or dim.axis is None or dim.level is not None:
        raise ShapeError(f"{why}: dim {at} does not count rows, so a ragged mask of shape {mask.shape} cannot index it")
    return dim.axis


def _numbered(values: Tensor, structure: Structure | None, dim: Dim, key: Tensor, in_place: bool, why: str) -> MaybeRagged:
    if structure is None or dim.axis is None:
        ids = numbers_of(key, values.shape[dim.values_dim], "position", why)
        return values.index_select(dim.values_dim, ids.to(values.device)), structure
    if dim.level is not None:
        if in_place:
            raise CallError(f"{why} = x: a ragged dim takes an int, a slice or a ragged mask; write positions one by one")
        return pick_positions(values, structure, dim.axis, dim.level, key, why)
    ids = numbers_of(key, structure.rows[dim.axis].num_rows(0), "row", why)
    if in_place and bool((ids[1:] <= ids[:-1]).any()):
        raise CallError(f"{why} = x takes row numbers in increasing order without repeats: sort them, or write row by row")
    found = pick_rows(values, structure, dim.axis, ids, why)
    return found if in_place else compact_axis(*found, dim.axis, why)


def _why(key: str, at: int) -> str:
    return f"jt[{':, ' * at}{key}]"
