"""Nested lists of columnar libraries as values with a structure, and back.

In: one node per nesting depth, outermost first, and the leaf. Out: values with their structure.
In: the rows of a structure. Out: offsets per nesting depth, and the starts of the innermost lists if they have gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serrate.tensor.rows import Rows, owners_and_places
from serrate.tensor.structure import Structure


@dataclass(frozen=True)
class Lists:
    """Lists back to back: list k holds items `offsets[k]` to `offsets[k + 1]`."""

    offsets: Tensor


@dataclass(frozen=True)
class Views:
    """Lists anywhere: list k holds `lengths[k]` items from `starts[k]` on."""

    starts: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class FixedLists:
    """`count` lists of the same size, back to back."""

    size: int
    count: int


Node = Lists | Views | FixedLists


def in_order(starts: Tensor, lengths: Tensor) -> bool:
    """Whether lists are in order and do not overlap, so that they can be rows with gaps.

    >>> in_order(torch.tensor([4, 0]), torch.tensor([2, 3]))
    False
    """
    ends = starts + lengths
    return bool((ends[:-1] <= starts[1:]).all())


def assemble(nodes: Sequence[Node], leaf: Tensor) -> tuple[Tensor, Structure]:
    """The leaf as values and the nodes as their structure; fixed-size lists inside the innermost ragged ones become inner dims.

    Only the last ragged node may be `Views`, and only in order.

    >>> assemble([Lists(torch.tensor([0, 2, 3])), FixedLists(2, 3)], torch.arange(6))
    (tensor([[0, 1],
            [2, 3],
            [4, 5]]), Structure(2 > 3))
    """
    last = max((depth for depth, node in enumerate(nodes) if not isinstance(node, FixedLists)), default=0)
    inner = [node.size for node in nodes[last + 1 :] if isinstance(node, FixedLists)]
    count = nodes[last + 1].count if inner else leaf.shape[0]  # type: ignore[union-attr]
    values = leaf.view(count, *inner, *leaf.shape[1:])
    bottom = nodes[last]
    if isinstance(bottom, Views):
        lengths = [_offsets(node, bottom.lengths.dtype).diff() for node in nodes[:last]]
        return values, Structure.from_starts(bottom.starts, *lengths, bottom.lengths, extent=count)
    levels = [node.offsets.dtype for node in nodes if isinstance(node, Lists)]
    dtype = levels[0] if levels else torch.int64
    return values, Structure.from_offsets(*(_offsets(node, dtype) for node in nodes[: last + 1]), total=count)


def lists_of(rows: Rows, width: int, why: str) -> tuple[list[Tensor], Tensor | None]:
    """Offsets per nesting depth, on the CPU, and the starts of the innermost lists if they have gaps.

    A position of a row with columns becomes a list of its columns; `width` is the extent of the dim that holds padded columns.

    >>> rows = Structure.from_lengths(torch.tensor([2, 1])).with_columns(torch.tensor([3, 1])).rows[0]
    >>> lists_of(rows, 1, "to_arrow")
    ([tensor([0, 2, 3]), tensor([0, 3, 6, 7])], None)
    """
    offsets = [rows.host_offsets(level, why) for level in range(rows.depth)]
    if rows.columns is None:
        return offsets, None if rows.starts is None else rows.host_row_starts(why)
    lengths, counts = (rows.host_lengths(level, why) for level in (rows.depth - 1, rows.depth))
    owner, place = owners_and_places(lengths, rows.total(rows.depth - 1, why))
    per_position = counts.index_select(0, owner)
    boundaries = torch.nn.functional.pad(per_position.cumsum(0), (1, 0)).to(offsets[0].dtype)
    if rows.contiguous:
        return [*offsets, boundaries], None
    step = per_position.long() if rows.packed else torch.full_like(place, width)
    row_starts = rows.host_row_starts(why).long() * (1 if rows.packed else width)
    return [*offsets, boundaries], row_starts.index_select(0, owner) + place * step


def _offsets(node: Node, dtype: torch.dtype) -> Tensor:
    if isinstance(node, FixedLists):
        return torch.arange(node.count + 1, dtype=dtype, device="cpu") * node.size
    assert isinstance(node, Lists)
    return node.offsets
