"""The index of every position: in storage, in the padded box of the same rows, and in tiles.

In: rows, or values with their structure. Out: int64 tensors on the device: owners, coordinates, indices, tile lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serrate.errors import StructureError
from serrate.tensor.moving import pack_runs
from serrate.tensor.rows import Rows, owners_and_places
from serrate.tensor.structure import Structure


def owners(rows: Rows, why: str) -> tuple[Tensor, Tensor]:
    """The innermost row of every position, and the position's index in that row; columns are counted position by position.

    >>> import torch
    >>> owners(Rows((torch.tensor([0, 2, 2, 3]),)), "row_ids")
    (tensor([0, 0, 2]), tensor([0, 1, 0]))
    """
    total = rows.elements(why)
    sizes = rows.inner_lengths() if rows.columns is None else rows.inner_lengths().long() * rows.counts().long()
    return rows.derived("owners", lambda: owners_and_places(sizes, total))


def coordinates(rows: Rows, why: str) -> tuple[Tensor, ...]:
    """The coordinates of every position: outermost row, index on each inner level, index in the innermost row, column.

    >>> import torch
    >>> coordinates(Rows((torch.tensor([0, 2]), torch.tensor([0, 1, 3]))), "to_padded")
    (tensor([0, 0, 0]), tensor([0, 1, 1]), tensor([0, 0, 1]))
    """

    def make() -> tuple[Tensor, ...]:
        row, place = owners(rows, why)
        found: tuple[Tensor, ...] = (place,)
        if rows.columns is not None:
            # A row without columns has no positions, so no division by zero happens.
            counts = rows.counts().long().index_select(0, row)
            found = (place // counts, place % counts)
        for level in reversed(range(rows.depth - 1)):
            outer, place = owners_and_places(rows.lengths(level), rows.num_rows(level + 1))
            found = (place.index_select(0, row), *found)
            row = outer.index_select(0, row)
        return (row, *found)

    return rows.derived("coordinates", make)


def storage_index(rows: Rows, width: int, why: str) -> Tensor:
    """The storage index of every position: in the dim of the values, or in that dim merged with the next (of size `width`).

    >>> import torch
    >>> storage_index(Rows((torch.tensor([0, 2, 3]),), starts=torch.tensor([0, 4])), 1, "contiguous")
    tensor([0, 1, 4])
    """

    def make() -> Tensor:
        row, place = owners(rows, why)
        start = rows.row_starts().long().index_select(0, row)
        if rows.storage_dims == 1:
            return start + place
        counts = rows.counts().long().index_select(0, row)
        return (start + place // counts) * width + place % counts

    return rows.derived(("in storage", width), make)


def padded_index(rows: Rows, extents: tuple[int, ...], why: str) -> Tensor:
    """The index of every position in padded storage whose ragged dims have these extents, all dims merged.

    >>> import torch
    >>> padded_index(Rows((torch.tensor([0, 2, 3]),)), (4,), "to_padded")
    tensor([0, 1, 4])
    """

    def make() -> Tensor:
        row, *inner = coordinates(rows, why)
        for place, extent in zip(inner, extents, strict=True):
            row = row * extent + place
        return row

    return rows.derived(("in box", extents), make)


def padded_row_index(rows: Rows, extents: tuple[int, ...]) -> Tensor:
    """The index of every innermost row in padded storage whose outer ragged dims have these extents.

    >>> import torch
    >>> padded_row_index(Rows((torch.tensor([0, 1, 3]), torch.tensor([0, 1, 3, 4]))), (2,))
    tensor([0, 2, 3])
    """

    def make() -> Tensor:
        found = torch.arange(rows.num_rows(0), device=rows.device)
        for level, extent in zip(range(rows.depth - 1), extents, strict=True):
            owner, place = owners_and_places(rows.lengths(level), rows.num_rows(level + 1))
            found = found.index_select(0, owner) * extent + place
        return found

    return rows.derived(("boxes", extents), make)


def compacted(values: Tensor, dim: int, rows: Rows, why: str) -> Tensor:
    """Packs the rows of one dim of the values; returns the values themselves if the rows already lie back to back.

    >>> import torch
    >>> compacted(torch.arange(6), 0, Rows((torch.tensor([0, 2, 3]),), starts=torch.tensor([0, 4])), "contiguous")
    tensor([0, 1, 4])
    """
    if rows.contiguous:
        return values
    width = values.shape[dim + 1] if rows.storage_dims == 2 else 1
    flat = values.flatten(dim, dim + 1) if rows.storage_dims == 2 else values
    moved = None if rows.storage_dims == 2 else pack_runs(flat, dim, rows.row_starts(), rows.sizes(), rows.elements(why))
    return flat.index_select(dim, storage_index(rows, width, why)) if moved is None else moved


def compact(values: Tensor, structure: Structure, why: str) -> tuple[Tensor, Structure]:
    """Packs the rows and columns of every dim; returns the arguments themselves if they already are packed.

    >>> import torch
    >>> compact(torch.arange(6), Structure.from_starts(torch.tensor([0, 4]), torch.tensor([2, 1])), "contiguous")
    (tensor([0, 1, 4]), Structure(2 > 3))
    """
    for dim, rows in reversed(list(zip(structure.dims, structure.rows, strict=True))):
        values = compacted(values, dim, rows, why)
    return values, structure.back_to_back()


def compact_axis(values: Tensor, structure: Structure, axis: int, why: str) -> tuple[Tensor, Structure]:
    """As `compact`, for one partitioned dim."""
    dim, rows = structure.dims[axis], structure.rows[axis]
    if rows.contiguous:
        return values, structure
    dims = tuple(other - (rows.storage_dims - 1) if other > dim else other for other in structure.dims)
    return compacted(values, dim, rows, why), structure.with_rows(structure.replace(axis, rows.back_to_back()).rows, dims)


def row_ids(rows: Rows, level: int, why: str) -> Tensor:
    """The row of a level that every position belongs to; columns belong to innermost rows.

    >>> import torch
    >>> words = Rows((torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3, 4])))
    >>> row_ids(words, 0, "row_ids"), row_ids(words, 1, "row_ids")
    (tensor([0, 0, 0, 1]), tensor([0, 1, 1, 2]))
    """

    def make() -> Tensor:
        row, _ = owners(rows, why)
        for outer in reversed(range(level, rows.depth - 1)):
            parent, _ = owners_and_places(rows.lengths(outer), rows.num_rows(outer + 1))
            row = parent.index_select(0, row)
        return row

    return rows.derived(("row ids", level), make)


def total_tiles(structure: Structure, block: int) -> int:
    """The total number of tiles of the innermost rows; an empty row has none.

    >>> import torch
    >>> total_tiles(Structure.from_lengths(torch.tensor([5, 0, 2])), 2)
    4
    """
    return int(tile_list(structure, block)[0].numel())


def tile_list(structure: Structure, block: int) -> tuple[Tensor, Tensor]:
    """The innermost row of every tile, and the tile's first position in that row.

    >>> import torch
    >>> tile_list(Structure.from_lengths(torch.tensor([5, 0, 2])), 2)
    (tensor([0, 0, 0, 2]), tensor([0, 2, 4, 0]))
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise StructureError(f"a tile must have at least 1 position, and a whole number: got {block!r}")
    rows, own = structure.at(-1)

    def made() -> tuple[Tensor, Tensor]:
        counts = (rows.host_lengths(own, "total_tiles").long() + block - 1) // block
        owner, place = owners_and_places(counts, int(counts.sum()))
        return owner.to(rows.device), (place * block).to(rows.device)

    return rows.derived(("tiles", own, int(block)), made)
