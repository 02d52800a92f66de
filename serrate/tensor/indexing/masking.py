"""Selection by a ragged mask, and masks over the storage.

In: values, their structure, and a ragged mask with the same rows. Out: the selected positions, with shorter rows; or booleans
shaped like the values, for writing in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serrate.errors import DtypeError, ShapeError, StructureMismatch
from serrate.tensor.base import JaggedBase
from serrate.tensor.moving import gather_positions
from serrate.tensor.positions import compacted, storage_index
from serrate.tensor.rows import Rows, owners_and_places, rows_of, running_sum
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy


def keep(values: Tensor, structure: Structure, axis: int, mask: JaggedBase, why: str) -> tuple[Tensor, Structure]:
    """The positions of a partitioned dim where the mask is True. Rows get shorter; outer levels stay the same.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> keep(jt.values, jt.structure, 0, jt.with_values(jt.values % 2 == 0), "jt[mask]")
    (tensor([0, 2, 4]), Structure(2 > 3))
    """
    rows = structure.rows[axis]
    if rows.columns is not None and mask.structure.rows[0].columns is not None:
        raise ShapeError(
            "a mask over columns would leave rows with columns of different lengths: mask whole positions, or write jt[mask] = 0"
        )
    kept = _booleans(mask, why)
    # The number of selected positions is needed on the host. Read it explicitly: nonzero would read it unseen.
    total = int(host_copy(kept.sum().reshape(1), why))
    places = torch.nonzero_static(kept, size=total).reshape(-1)
    inner = running_sum(kept).index_select(0, rows.offsets[rows.depth - 1].long())
    owner, place = owners_and_places(rows.inner_lengths(), rows.total(rows.depth - 1, why))
    owner, place = owner.index_select(0, places), place.index_select(0, places)
    values, found = gather_positions(values, structure.dims[axis], rows, inner, owner, place, why)
    return values, structure.replace(axis, found)


def check_mask(structure: Structure, axis: int, mask: JaggedBase, why: str) -> None:
    """Raises unless the mask has one boolean for every position of a partitioned dim."""
    if mask.dtype is not torch.bool:
        raise DtypeError(f"{why}: a ragged index must be a mask of torch.bool, got {mask.dtype}: write mask != 0")
    rows = structure.rows[axis]
    if len(mask.structure.rows) > 1 or mask.structure.dims != (0,) or mask.values.dim() != mask.structure.rows[0].storage_dims:
        raise ShapeError(
            f"{why}: a mask has one boolean per position, got shape {mask.shape}: reduce inner dims, as in mask.any(dim=-1)"
        )
    own = mask.structure.rows[0]
    if not own.same_rows(rows if own.columns is not None else _without_columns(rows), why):
        raise StructureMismatch(
            f"{why}: the mask must have the same rows as the tensor: the mask has {own}, the tensor {rows}; "
            "make it from the tensor, as in jt > 0"
        )


def storage_mask(values: Tensor, structure: Structure, axis: int, mask: JaggedBase, why: str) -> Tensor:
    """A ragged mask laid out like the storage, with as many dims as the values.

    >>> from serrate.tensor import JaggedTensor
    >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    >>> storage_mask(jt.values, jt.structure, 0, jt.with_values(jt.values > 3), "jt[mask] = x")
    tensor([False, False, False, False,  True])
    """
    dim, rows = structure.dims[axis], structure.rows[axis]
    if rows.columns is not None and mask.structure.rows[0].columns is None:
        rows = _without_columns(rows)
        if structure.rows[axis].packed:
            raise ShapeError(f"{why}: the rows have packed columns; give the mask one boolean per column")
    held = _booleans(mask, why)
    if not rows.contiguous:
        width = values.shape[dim + 1] if rows.storage_dims == 2 else 1
        room = torch.zeros(values.shape[dim] * width, dtype=torch.bool, device=values.device)
        held = room.index_copy(0, storage_index(rows, width, why), held)
    return _among(held.view(values.shape[dim : dim + rows.storage_dims]), values, dim)


def existing(values: Tensor, structure: Structure) -> Tensor | None:
    """Which positions of the storage are not holes, with as many dims as the values; None if there are no holes.

    >>> existing(torch.arange(5), Structure.from_starts(torch.tensor([0, 3]), torch.tensor([2, 1])))
    tensor([ True,  True, False,  True, False])
    """
    found: Tensor | None = None
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        if rows.contiguous:
            continue
        here = _among(_covered(rows, values.shape[dim : dim + rows.storage_dims]), values, dim)
        found = here if found is None else found & here
    return found


def _covered(rows: Rows, extents: torch.Size) -> Tensor:
    # Add 1 where a row starts and subtract 1 where it ends; the running sum counts the rows that cover a position.
    sizes, starts = rows.sizes().long(), rows.row_starts().long()
    weight = torch.ones_like(sizes) if rows.storage_dims == 1 else rows.counts().long()
    steps = torch.zeros(extents[0] + 1, dtype=torch.int64, device=starts.device)
    steps = steps.index_add(0, starts, weight).index_add(0, starts + sizes, -weight)
    covered = steps.cumsum(0)[:-1]
    if rows.storage_dims == 1:
        return covered > 0
    return torch.arange(extents[1], device=starts.device) < covered[:, None]


def _booleans(mask: JaggedBase, why: str) -> Tensor:
    return compacted(mask.values, 0, mask.structure.rows[0], why)


def _among(mask: Tensor, values: Tensor, dim: int) -> Tensor:
    return mask.view(*mask.shape, *(1 for _ in range(values.dim() - dim - mask.dim())))


def _without_columns(rows: Rows) -> Rows:
    if rows.columns is None:
        return rows

    def make() -> Rows:
        found = rows_of(rows.offsets[: rows.depth], rows.depth, True, rows.starts, rows.room, {})
        found._host.update((level, host) for level, host in rows._host.items() if level < rows.depth)
        return found

    return rows.derived("without columns", make)
