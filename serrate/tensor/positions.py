"""Where every position of rows is: in the dim that stores it, in the padded box of the same rows, and in tiles of one size.

In: rows, or values with their structure. Out: int64 tensors on the device: owners, coordinates, addresses, tile lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serrate.errors import StructureError
from serrate.tensor.moving import back_to_back
from serrate.tensor.rows import Rows, owners_and_places
from serrate.tensor.structure import Structure


def owners(rows: Rows, why: str) -> tuple[Tensor, Tensor]:
    """Which innermost row every position belongs to, and its place in that row; a rectangle counts row by row.

    >>> import torch
    >>> owners(Rows((torch.tensor([0, 2, 2, 3]),)), "row_ids")
    (tensor([0, 0, 2]), tensor([0, 1, 0]))
    """
    total = rows.elements(why)
    sizes = rows.inner_lengths() if rows.columns is None else rows.inner_lengths().long() * rows.counts().long()
    return rows.derived("owners", lambda: owners_and_places(sizes, total))


def coordinates(rows: Rows, why: str) -> tuple[Tensor, ...]:
    """For every position: the row it is in, its place in each level below the outermost, in the innermost row, its column.

    >>> import torch
    >>> coordinates(Rows((torch.tensor([0, 2]), torch.tensor([0, 1, 3]))), "to_padded")
    (tensor([0, 0, 0]), tensor([0, 1, 1]), tensor([0, 0, 1]))
    """

    def make() -> tuple[Tensor, ...]:
        row, place = owners(rows, why)
        found: tuple[Tensor, ...] = (place,)
        if rows.columns is not None:
            # A row without columns has no positions, so nothing is divided by its count.
            counts = rows.counts().long().index_select(0, row)
            found = (place // counts, place % counts)
        for level in reversed(range(rows.depth - 1)):
            outer, place = owners_and_places(rows.lengths(level), rows.num_rows(level + 1))
            found = (place.index_select(0, row), *found)
            row = outer.index_select(0, row)
        return (row, *found)

    return rows.derived("coordinates", make)


def in_storage(rows: Rows, width: int, why: str) -> Tensor:
    """Where every position is stored: in the dim of the values, or in that dim and the next (of `width`) made one.

    >>> import torch
    >>> in_storage(Rows((torch.tensor([0, 2, 3]),), starts=torch.tensor([0, 4])), 1, "contiguous")
    tensor([0, 1, 4])
    """

    def make() -> Tensor:
        row, place = owners(rows, why)
        start = rows.where().long().index_select(0, row)
        if rows.takes == 1:
            return start + place
        counts = rows.counts().long().index_select(0, row)
        return (start + place // counts) * width + place % counts

    return rows.derived(("in storage", width), make)


def in_box(rows: Rows, extents: tuple[int, ...], why: str) -> Tensor:
    """Where every position is in padded storage whose ragged dims have these extents, all its dims made one.

    >>> import torch
    >>> in_box(Rows((torch.tensor([0, 2, 3]),)), (4,), "to_padded")
    tensor([0, 1, 4])
    """

    def make() -> Tensor:
        row, *inner = coordinates(rows, why)
        for place, extent in zip(inner, extents, strict=True):
            row = row * extent + place
        return row

    return rows.derived(("in box", extents), make)


def boxes(rows: Rows, extents: tuple[int, ...]) -> Tensor:
    """Which of the boxes of innermost rows each innermost row is in, where outer ragged dims have these extents.

    >>> import torch
    >>> boxes(Rows((torch.tensor([0, 1, 3]), torch.tensor([0, 1, 3, 4]))), (2,))
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
    """The positions of all rows back to back in one dim of the values; the values themselves if they are stored so.

    >>> import torch
    >>> compacted(torch.arange(6), 0, Rows((torch.tensor([0, 2, 3]),), starts=torch.tensor([0, 4])), "contiguous")
    tensor([0, 1, 4])
    """
    if rows.contiguous:
        return values
    width = values.shape[dim + 1] if rows.takes == 2 else 1
    flat = values.flatten(dim, dim + 1) if rows.takes == 2 else values
    moved = None if rows.takes == 2 else back_to_back(flat, dim, rows.where(), rows.sizes(), rows.elements(why))
    return flat.index_select(dim, in_storage(rows, width, why)) if moved is None else moved


def compact(values: Tensor, structure: Structure, why: str) -> tuple[Tensor, Structure]:
    """Values and structure with the rows of every dim back to back, columns packed; themselves if they are stored so.

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
    dims = tuple(other - (rows.takes - 1) if other > dim else other for other in structure.dims)
    return compacted(values, dim, rows, why), Structure(structure.replace(axis, rows.back_to_back()).rows, dims)


def row_ids(rows: Rows, level: int, why: str) -> Tensor:
    """Which row of a level every position belongs to; columns belong to innermost rows.

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
    """How many tiles the innermost rows have together; an empty row has none.

    >>> import torch
    >>> total_tiles(Structure.from_lengths(torch.tensor([5, 0, 2])), 2)
    4
    """
    return int(tile_list(structure, block)[0].numel())


def tile_list(structure: Structure, block: int) -> tuple[Tensor, Tensor]:
    """The innermost row that every tile belongs to, and its first position there.

    >>> import torch
    >>> tile_list(Structure.from_lengths(torch.tensor([5, 0, 2])), 2)
    (tensor([0, 0, 0, 2]), tensor([0, 2, 4, 0]))
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise StructureError(f"tiles have a whole number of positions, at least 1: got {block!r}")
    rows, own = structure.at(-1)

    def made() -> tuple[Tensor, Tensor]:
        counts = (rows.host_lengths(own, "total_tiles").long() + block - 1) // block
        owner, place = owners_and_places(counts, int(counts.sum()))
        return owner.to(rows.device), (place * block).to(rows.device)

    return rows.derived(("tiles", own, int(block)), made)
