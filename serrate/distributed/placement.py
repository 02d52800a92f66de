"""`PartitionedShard`: a placement of torch.distributed for tensors whose partitions have different sizes.

In: a dim, a number of partitions and, where known, counts. Out: a frozen, hashable placement with the conversions between
unaligned, aligned and replicated tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from typing_extensions import TypeIs

from serrate.distributed import convert
from serrate.distributed.collectives import announced
from serrate.distributed.layout import check_counts, exchange_of, owned_partitions
from serrate.errors import PartitionError

Row = tuple[int, ...]


@dataclass(frozen=True)
class PartitionedShard(Placement):
    """A tensor that is sharded along `dim`, each shard made of blocks of `num_partitions` partitions.

    *Unaligned*, each rank holds a slice of every partition; *aligned*, it holds whole partitions, `partitions_per_rank[r]` of
    them (by default equally many). The full tensor is partition-major, and within a partition the ranks' blocks are in order.

    `splits` says how long the blocks are: None (taken from the tensor that is redistributed), this rank's row in storage order
    (unaligned: a count for each partition; aligned: P00 P10 P01 P11 ..., every source rank of the first own partition, then of
    the second), or the matrix of all ranks x partitions.

    >>> PartitionedShard(0, 4, [4, 6, 4, 2])
    PartitionedShard(dim=0, num_partitions=4, splits=(4, 6, 4, 2), aligned=False, partitions_per_rank=None)
    >>> PartitionedShard(0, 8, aligned=True, partitions_per_rank=(5, 3)).owned(2)
    (5, 3)
    """

    dim: int
    num_partitions: int
    splits: Row | tuple[Row, ...] | None = None
    aligned: bool = False
    partitions_per_rank: Row | None = None

    def __post_init__(self) -> None:
        # The base class is a C++ type: without this call its instances crash where torch reads them.
        Placement.__init__(self)
        if self.num_partitions < 1:
            raise PartitionError(f"PartitionedShard needs at least one partition, got {self.num_partitions}")
        if self.dim < 0:
            raise PartitionError(f"PartitionedShard takes a dim that is not negative, got {self.dim}")
        if self.partitions_per_rank is not None:
            owned = owned_partitions(self.num_partitions, len(self.partitions_per_rank), self.partitions_per_rank)
            object.__setattr__(self, "partitions_per_rank", owned)
        object.__setattr__(self, "splits", _splits(self.splits, self.num_partitions, self.aligned))

    def __reduce__(self) -> tuple[Any, ...]:
        # Instances of the C++ type cannot be copied field by field.
        return type(self), (self.dim, self.num_partitions, self.splits, self.aligned, self.partitions_per_rank)

    def owned(self, ranks: int) -> Row:
        """How many partitions each of `ranks` ranks owns."""
        return owned_partitions(self.num_partitions, ranks, self.partitions_per_rank)

    def without_splits(self, *, aligned: bool | None = None) -> PartitionedShard:
        """The same placement as a target, whose splits are taken from the tensor."""
        return replace(self, splits=None, aligned=self.aligned if aligned is None else aligned)

    @property
    def row(self) -> Row | None:
        """The splits, if they are this rank's own row."""
        return None if self.splits is None or _is_matrix(self.splits) else self.splits

    @property
    def matrix(self) -> tuple[Row, ...] | None:
        """The splits, if they are those of all ranks."""
        return self.splits if self.splits is not None and _is_matrix(self.splits) else None

    def counts(self, local: Tensor, group: ProcessGroup) -> Tensor:
        """The counts of all ranks, [ranks, partitions], on the host: gathered, unless the splits contain them."""
        if self.matrix is not None:
            return check_counts(torch.tensor(self.matrix, device="cpu"), group.size(), self.num_partitions)
        with announced("gather", local.device, group):
            row, owned, dim = self._own_row(), self.owned(group.size()), convert.own_dim(local, self.dim)
        return convert.gathered_counts(local, row, owned, group, dim, self.aligned)

    def _unaligned_to_replicate(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> Tensor:
        """Gathers [P00 P01 ...] of every rank and reorders the blocks to [P00 P10 P01 P11 ...]."""
        return self._replicated(local_tensor, mesh, mesh_dim, current_logical_shape, aligned=False)

    def _aligned_to_replicate(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> Tensor:
        """Gathers the ranks' whole partitions, which are in order."""
        return self._replicated(local_tensor, mesh, mesh_dim, current_logical_shape, aligned=True)

    def _replicate_to_unaligned_shard(self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int) -> Tensor:
        """This rank's block of every partition. Needs the matrix of splits."""
        return self._part(local_tensor, mesh, mesh_dim, shard_index, aligned=False)

    def _replicate_to_aligned_shard(self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int) -> Tensor:
        """All blocks of this rank's own partitions. Needs the matrix of splits."""
        return self._part(local_tensor, mesh, mesh_dim, shard_index, aligned=True)

    def _unaligned_to_aligned_shard(self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        """One exchange of counts, unless the splits are a matrix; one of data; then blocks are reordered."""
        group = mesh.get_group(mesh_dim)
        if self.matrix is not None:
            exchange = exchange_of(self.counts(local_tensor, group), self.owned(group.size()), group.rank())
        else:
            with announced("swap", local_tensor.device, group):
                row, owned = self.without_row_unless(aligned=False)._own_row(), self.owned(group.size())
                dim = convert.own_dim(local_tensor, self.dim)
            exchange = convert.plan_exchange(local_tensor, row, owned, group, dim)
        return convert.unaligned_to_aligned(local_tensor, exchange, group, self.dim)

    def _aligned_to_unaligned_shard(self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        """One exchange of counts, unless the splits are a matrix; blocks are reordered; then one exchange of data."""
        group = mesh.get_group(mesh_dim)
        counts = self.without_row_unless(aligned=True).counts(local_tensor, group)
        exchange = exchange_of(counts, self.owned(group.size()), group.rank())
        return convert.aligned_to_unaligned(local_tensor, exchange, group, self.dim)

    def without_row_unless(self, *, aligned: bool) -> PartitionedShard:
        """This placement, if its splits can describe a tensor that is aligned, or not; a row is in the order of one of the
        two."""
        if self.row is not None and self.aligned != aligned:
            wanted, got = ("aligned", "unaligned") if aligned else ("unaligned", "aligned")
            raise PartitionError(
                f"the splits {self.row} describe {got} blocks; expected splits of {wanted} blocks, or the matrix"
            )
        return self

    def _replicated(self, local: Tensor, mesh: DeviceMesh, mesh_dim: int, shape: Sequence[int], *, aligned: bool) -> Tensor:
        group = mesh.get_group(mesh_dim)
        counts = self.without_row_unless(aligned=aligned).counts(local, group)
        if int(counts.sum()) != shape[self.dim]:
            raise PartitionError(f"the splits sum to {int(counts.sum())}, but dim {self.dim} of the tensor has {shape[self.dim]}")
        return convert.to_replicate(local, counts, self.owned(group.size()), group, self.dim, aligned=aligned)

    def _part(self, full: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int, *, aligned: bool) -> Tensor:
        group = mesh.get_group(mesh_dim)
        if self.matrix is None:
            raise PartitionError("a replicated tensor has no splits; pass the matrix of splits of all ranks x partitions")
        if shard_index != group.rank():
            raise PartitionError(f"a rank takes its own shard: expected shard_index {group.rank()}, got {shard_index}")
        counts = self.counts(full, group)
        return convert.from_replicate(full, counts, self.owned(group.size()), group, self.dim, aligned=aligned)

    def _own_row(self) -> Tensor:
        if self.row is None:
            raise PartitionError("this conversion needs splits: this rank's row, or the matrix of all ranks x partitions")
        return torch.tensor(self.row, dtype=torch.int64, device="cpu")


def _is_matrix(splits: Row | tuple[Row, ...]) -> TypeIs[tuple[Row, ...]]:
    return bool(splits) and isinstance(splits[0], tuple)


def _splits(given: Any, partitions: int, aligned: bool) -> Any:
    """The splits as tuples of ints; raises for what cannot be splits of any tensor."""
    if given is None:
        return None
    rows = given.tolist() if isinstance(given, Tensor) else list(given)
    if rows and isinstance(rows[0], Sequence):
        matrix = tuple(_counts(row, "splits") for row in rows)
        for r, row in enumerate(matrix):
            if len(row) != partitions:
                raise PartitionError(f"splits[{r}] must have one count for each of {partitions} partitions, got {len(row)}")
        return matrix
    row = _counts(rows, "splits")
    if not aligned and len(row) != partitions:
        raise PartitionError(f"splits must have one count for each of {partitions} partitions, got {len(row)}")
    return row


def _counts(row: Sequence[Any], name: str) -> Row:
    try:
        found = tuple(operator.index(n) for n in row)
    except TypeError:
        raise PartitionError(f"{name} must be ints, got {list(row)}") from None
    if any(n < 0 for n in found):
        raise PartitionError(f"{name} must not be negative, got {list(found)}")
    return found
