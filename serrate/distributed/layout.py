"""Which rank holds which positions of a partitioned tensor, and what each rank sends and receives to change that.

In: counts (`counts[r][p]` positions of partition p come from rank r) and how many partitions each rank owns. Out: sizes of
messages, lengths of blocks, and runs of positions, all on the host. Nothing here communicates.

The full tensor is partition-major: partition 0 from rank 0, partition 0 from rank 1, ..., partition 1 from rank 0, ...
*Unaligned*, rank r holds its own row of blocks: (r, 0), (r, 1), ... *Aligned*, it holds all blocks of the partitions it owns, a
contiguous range of the full tensor. To convert one into the other, every rank sends contiguous ranges, and one side transposes a
matrix of blocks:

    unaligned --exchange--> blocks [source rank, own partition] --transpose--> aligned [own partition, source rank]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from serrate.errors import PartitionError


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of positions to pack back to back: `lengths[k]` positions from `starts[k]`, `total` in all.

    An exchange moves data several times, forward and backward, so metadata for copies is derived once and cached.
    """

    starts: Tensor
    lengths: Tensor
    total: int

    @cached_property
    def index(self) -> Tensor:
        """Where each packed position comes from.

        >>> Runs(torch.tensor([3, 0]), torch.tensor([2, 1]), 3).index
        tensor([3, 4, 0])
        """
        shift = self.starts - (self.lengths.cumsum(0) - self.lengths)
        places = torch.arange(self.total, device="cpu")
        return places.add_(torch.repeat_interleave(shift, self.lengths, output_size=self.total))

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The runs that are not empty.

        >>> Runs(torch.tensor([3, 3, 0]), torch.tensor([2, 0, 1]), 3).slices
        (slice(3, 5, None), slice(0, 1, None))
        """
        return tuple(slice(a, a + n) for a, n in zip(self.starts.tolist(), self.lengths.tolist(), strict=True) if n)


@dataclass(frozen=True, eq=False)
class Exchange:
    """The messages of one rank from unaligned to aligned; the inverse swaps `send` and `receive`."""

    send: tuple[int, ...]
    """Positions for each rank."""
    receive: tuple[int, ...]
    """Positions from each rank."""
    blocks: Tensor
    """Lengths of the received blocks, [source rank, own partition], on the host."""

    @cached_property
    def transpose(self) -> Runs:
        """The received blocks in aligned order."""
        return transposed_runs(self.blocks)

    @cached_property
    def transpose_back(self) -> Runs:
        """Aligned blocks in the order in which they are sent back."""
        return transposed_runs(self.blocks.T)

    @property
    def unaligned_size(self) -> int:
        return sum(self.send)

    @property
    def aligned_size(self) -> int:
        return sum(self.receive)

    @property
    def aligned_splits(self) -> tuple[int, ...]:
        """The aligned blocks in storage order: every source rank of the first own partition, then of the second, ..."""
        return tuple(self.blocks.T.flatten().tolist())


def owned_partitions(partitions: int, ranks: int, partitions_per_rank: Sequence[int] | None = None) -> tuple[int, ...]:
    """How many partitions each rank owns; they are consecutive.

    >>> owned_partitions(6, 3), owned_partitions(8, 2, (5, 3))
    ((2, 2, 2), (5, 3))
    """
    if partitions_per_rank is None:
        if partitions % ranks:
            raise PartitionError(
                f"{partitions} partitions cannot be shared out equally to {ranks} ranks; pass partitions_per_rank=, "
                f"for example {_nearly_equal(partitions, ranks)}"
            )
        return (partitions // ranks,) * ranks
    owned = tuple(int(n) for n in partitions_per_rank)
    if len(owned) != ranks or any(n < 0 for n in owned) or sum(owned) != partitions:
        raise PartitionError(
            f"partitions_per_rank must be {ranks} non-negative ints that sum to {partitions} partitions, got {owned}"
        )
    return owned


def check_counts(counts: Tensor, ranks: int, partitions: int) -> Tensor:
    """The counts as an int64 matrix on the host; raises PartitionError for a wrong shape, dtype or sign.

    >>> check_counts(torch.tensor([[4, -6]]), 1, 2)
    Traceback (most recent call last):
    serrate.errors.PartitionError: counts must not be negative: counts[0][1] = -6
    """
    if counts.dtype.is_floating_point or counts.dtype == torch.bool or counts.dtype.is_complex:
        raise PartitionError(f"counts must be integers, got {counts.dtype}")
    if tuple(counts.shape) != (ranks, partitions):
        raise PartitionError(f"expected counts of {ranks} ranks x {partitions} partitions, got shape {tuple(counts.shape)}")
    if counts.numel() and int(counts.min()) < 0:
        r, p = (counts < 0).nonzero()[0].tolist()
        raise PartitionError(f"counts must not be negative: counts[{r}][{p}] = {int(counts[r, p])}")
    return counts.to(torch.int64)


def exchange_of(counts: Tensor, owned: Sequence[int], rank: int) -> Exchange:
    """The exchange of one rank, from the counts of all ranks.

    >>> found = exchange_of(torch.tensor([[4, 6, 4, 2], [2, 4, 8, 2]]), (2, 2), 0)
    >>> found.send, found.receive, found.aligned_splits
    ((10, 6), (10, 6), (4, 2, 6, 4))
    """
    first, last = _range_of(owned, rank)
    return exchange_from(counts[rank], counts[:, first:last], owned)


def exchange_from(row: Tensor, received: Tensor, owned: Sequence[int]) -> Exchange:
    """The exchange of one rank, from its own counts and those that every rank has for the partitions it owns."""
    send = by_owner(row, owned).sum(1)
    return Exchange(tuple(send.tolist()), tuple(received.sum(1).tolist()), received.contiguous())


def by_owner(row: Tensor, owned: Sequence[int]) -> Tensor:
    """A row of counts as [ranks, most partitions of a rank]: the counts of each rank's partitions, then zeros.

    >>> by_owner(torch.tensor([4, 6, 3]), (2, 1))
    tensor([[4, 6],
            [3, 0]])
    """
    most = max(owned)
    if most == min(owned):
        return row.view(len(owned), most)
    owners = torch.tensor(owned, device="cpu").to(row.device, non_blocking=True)
    theirs = torch.arange(most, device=row.device) < owners[:, None]
    return row.new_zeros(theirs.shape).masked_scatter_(theirs, row)


def own_range(counts: Tensor, owned: Sequence[int], rank: int) -> tuple[int, int]:
    """The range of the full tensor that an aligned rank holds.

    >>> own_range(torch.tensor([[4, 6, 4, 2], [2, 4, 8, 2]]), (2, 2), 1)
    (16, 32)
    """
    bounds = aligned_bounds(counts, owned)
    return bounds[rank], bounds[rank + 1]


def aligned_bounds(counts: Tensor, owned: Sequence[int]) -> tuple[int, ...]:
    """The boundaries in the full tensor between the ranges of aligned ranks."""
    sizes = torch.split(counts.sum(0), list(owned))
    return tuple(accumulate((int(size.sum()) for size in sizes), initial=0))


def chunk_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """The boundaries between the chunks of `Shard`, which are those of `torch.chunk`.

    >>> chunk_bounds(10, 4)
    (0, 3, 6, 9, 10)
    """
    chunk = -(-size // ranks)
    return tuple(min(size, chunk * r) for r in range(ranks + 1))


def range_sizes(before: Sequence[int], after: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """What a rank sends and receives when the boundaries between contiguous ranges change.

    >>> range_sizes((0, 16, 32), (0, 4, 32), 0), range_sizes((0, 16, 32), (0, 4, 32), 1)
    (([4, 12], [4, 0]), ([0, 16], [12, 16]))
    """
    mine, wanted = before[rank : rank + 2], after[rank : rank + 2]
    return [_overlap(mine, other) for other in pairwise(after)], [_overlap(other, wanted) for other in pairwise(before)]


def shard_sizes(counts: Tensor, owned: Sequence[int], aligned: bool) -> list[int]:
    """How many positions each rank holds."""
    if not aligned:
        return [int(n) for n in counts.sum(1).tolist()]
    return [b - a for a, b in pairwise(aligned_bounds(counts, owned))]


def runs_of_rank(counts: Tensor, rank: int) -> Runs:
    """The blocks of an unaligned rank in the full tensor.

    >>> runs_of_rank(torch.tensor([[4, 6], [2, 4]]), 1).slices
    (slice(4, 6, None), slice(12, 16, None))
    """
    return _runs(_starts(counts.T)[:, rank], counts[rank])


def gathered_runs(counts: Tensor, room: int) -> Runs:
    """Where the blocks of the full tensor lie among unaligned shards that were gathered with `room` positions each.

    >>> gathered_runs(torch.tensor([[4, 6], [2, 4]]), 10).starts
    tensor([ 0, 10,  4, 12])
    """
    within = counts.cumsum(1) - counts
    starts = within + torch.arange(counts.shape[0], device="cpu")[:, None] * room
    return _runs(starts.T.flatten(), counts.T.flatten())


def gathered_shards(sizes: Sequence[int], room: int) -> Runs:
    """The same for shards that are in order: the first `sizes[r]` of each rank's `room` positions.

    >>> gathered_shards((2, 1), 2).slices
    (slice(0, 2, None), slice(2, 3, None))
    """
    return _runs(torch.arange(len(sizes), device="cpu") * room, torch.tensor(sizes, device="cpu"))


def transposed_runs(blocks: Tensor) -> Runs:
    """The blocks of a matrix, stored row by row, in the order of its transpose.

    >>> transposed_runs(torch.tensor([[4, 6], [2, 4]])).starts
    tensor([ 0, 10,  4, 12])
    """
    return _runs(_starts(blocks).T.flatten(), blocks.T.flatten())


def _runs(starts: Tensor, lengths: Tensor) -> Runs:
    return Runs(starts.contiguous(), lengths.contiguous(), int(lengths.sum()))


def _starts(lengths: Tensor) -> Tensor:
    """Where blocks start that are stored back to back, row by row."""
    flat = lengths.flatten()
    return (flat.cumsum(0) - flat).view(lengths.shape)


def _range_of(owned: Sequence[int], rank: int) -> tuple[int, int]:
    first = sum(owned[:rank])
    return first, first + owned[rank]


def _overlap(a: Sequence[int], b: Sequence[int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _nearly_equal(partitions: int, ranks: int) -> tuple[int, ...]:
    return tuple(partitions // ranks + (r < partitions % ranks) for r in range(ranks))
