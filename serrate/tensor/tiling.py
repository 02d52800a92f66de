"""Rows cut into tiles of one size: how many there are, and where each one starts.

In: a structure and a number of positions. Out: the number of tiles, or a list of them, made once and remembered with the rows.
"""

from __future__ import annotations

from torch import Tensor

from serrate.errors import StructureError
from serrate.tensor.rows import owners_and_places
from serrate.tensor.structure import Structure


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
