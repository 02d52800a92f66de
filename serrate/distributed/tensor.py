"""`PartitionedTensor`: a tensor whose partitions are spread over the ranks of a mesh.

In: local tensors and a `PartitionedShard`. Out: the same tensor in other layouts, as DTensor or as a JaggedTensor, and results of
operations that each rank computes on its own part.

It is a separate wrapper, not a DTensor, because DTensor does not support new redistributions: it silently does nothing for
unknown placements, and it uses placements as cache keys, so splits that change at every step would accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from serrate.distributed import convert
from serrate.distributed.layout import Exchange, aligned_bounds, check_counts, chunk_bounds, exchange_of, shard_sizes
from serrate.distributed.placement import PartitionedShard
from serrate.errors import PartitionError
from serrate.tensor import JaggedTensor, Structure


@dataclass(frozen=True, eq=False)
class MeshLayout:
    """How a tensor is spread over a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """One for each dim of the mesh; exactly one is a PartitionedShard, without splits."""
    counts: Tensor
    """[ranks, partitions], on the host."""
    exchanges: dict[tuple[int, ...], Exchange] = field(default_factory=dict)
    """Exchanges by the number of partitions that each rank owns, shared by all layouts with the same counts."""

    @cached_property
    def mesh_dim(self) -> int:
        return next(k for k, each in enumerate(self.placements) if isinstance(each, PartitionedShard))

    @property
    def shard(self) -> PartitionedShard:
        found = self.placements[self.mesh_dim]
        assert isinstance(found, PartitionedShard)
        return found

    @property
    def others(self) -> tuple[Placement, ...]:
        """The placements on the other dims of the mesh."""
        return self.placements[: self.mesh_dim] + self.placements[self.mesh_dim + 1 :]

    @property
    def dim(self) -> int:
        return self.shard.dim

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group(self.mesh_dim)

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank(self.mesh_dim))

    @cached_property
    def owned(self) -> tuple[int, ...]:
        return self.shard.owned(self.counts.shape[0])

    @property
    def exchange(self) -> Exchange:
        if self.owned not in self.exchanges:
            self.exchanges[self.owned] = exchange_of(self.counts, self.owned, self.rank)
        return self.exchanges[self.owned]

    @property
    def local_size(self) -> int:
        return shard_sizes(self.counts, self.owned, self.shard.aligned)[self.rank]

    def shape_of(self, local: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shape = list(local.shape)
        shape[self.dim] = int(self.counts.sum())
        for k, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] *= self.mesh.size(k)
        return tuple(shape)

    def with_shard(self, shard: PartitionedShard, counts: Tensor | None = None) -> MeshLayout:
        placements = (*self.placements[: self.mesh_dim], shard, *self.placements[self.mesh_dim + 1 :])
        if counts is not None:
            return MeshLayout(self.mesh, placements, counts)
        return MeshLayout(self.mesh, placements, self.counts, self.exchanges)

    def with_dim(self, dim: int, counts: Tensor | None = None) -> MeshLayout:
        return self.with_shard(replace(self.shard, dim=dim), counts)

    def same(self, other: MeshLayout) -> bool:
        if self.placements != other.placements or self.mesh != other.mesh:
            return False
        return self.counts is other.counts or torch.equal(self.counts, other.counts)

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of a replicated tensor: no communication."""
        return convert.from_replicate(full, self.counts, self.owned, self.group, self.dim, aligned=self.shard.aligned)

    def __str__(self) -> str:
        layout = "aligned" if self.shard.aligned else "unaligned"
        ranks, partitions = self.counts.shape
        return f"{layout}, dim {self.dim}, {partitions} partitions, rank {self.rank} of {ranks}"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _not_traced(function: _Function) -> _Function:
    """Breaks the graph under `torch.compile`: layouts depend on counts, which are data."""
    disable: Callable[..., Any] = torch.compiler.disable
    return cast(_Function, disable(function))


def _shown(self: PartitionedTensor) -> str:
    return f"PartitionedTensor({tuple(self.shape)}, {self._layout}, local={self._local})"


@_not_traced
def _dispatched(cls: type[PartitionedTensor], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    # Imported here: the operations are defined on the class.
    from serrate.distributed.local_ops import run

    return run(func, args, kwargs or {})


class PartitionedTensor(Tensor):
    """A tensor spread over ranks by a `PartitionedShard`. Its shape is that of the whole tensor; each rank holds `to_local()`.

    Elementwise math, casts, matrix products and reductions run on the local part, without communication, if they do not mix
    positions of the sharded dim. Sums over that dim, such as gradients of weights and biases, add the ranks' results and give a
    plain tensor. A plain tensor operand is assumed to be the same on every rank. Anything else raises `PartitionError`.

    `from_local` gathers the counts of all ranks once; after that, layouts change with one exchange of data and none of counts.
    """

    _local: Tensor
    _layout: MeshLayout

    def __new__(cls, local: Tensor, layout: MeshLayout) -> PartitionedTensor:
        found: PartitionedTensor = Tensor._make_wrapper_subclass(
            cls, layout.shape_of(local), dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        found._local, found._layout = local, layout
        return found

    @staticmethod
    @_not_traced
    def from_local(
        local: Tensor, mesh: DeviceMesh, placement: PartitionedShard | Sequence[Placement], *, counts: Tensor | None = None
    ) -> PartitionedTensor:
        """Joins the local tensors of all ranks: one collective, which gathers the counts, unless the placement or `counts` has
        them.

        On a mesh with several dims pass one placement for each: the PartitionedShard, and Replicate() or Shard() of other dims.
        """
        placements = _placements(mesh, placement)
        layout = MeshLayout(mesh, placements, torch.empty(0, device="cpu"))
        shard = layout.shard
        if counts is None:
            counts = shard.counts(local, layout.group)
        convert.own_dim(local, shard.dim)
        layout = layout.with_shard(
            shard.without_splits(), check_counts(counts.cpu(), mesh.size(layout.mesh_dim), shard.num_partitions)
        )
        if local.shape[shard.dim] != layout.local_size:
            raise PartitionError(
                f"the local tensor has {local.shape[shard.dim]} positions in dim {shard.dim}, but its counts sum to "
                f"{layout.local_size}"
            )
        return _wrapped(local, layout)

    @staticmethod
    @_not_traced
    def from_dtensor(tensor: DTensor, placement: PartitionedShard, mesh_dim: int = 0) -> PartitionedTensor:
        """A DTensor that is replicated, or sharded along the same dim, on `mesh_dim`; needs the matrix of splits."""
        mesh, shard = tensor.device_mesh, placement.without_splits()
        if placement.matrix is None:
            raise PartitionError("from_dtensor needs the matrix of splits of all ranks x partitions")
        counts, owned = torch.tensor(placement.matrix, device="cpu"), placement.owned(mesh.size(mesh_dim))
        placements = (*tensor.placements[:mesh_dim], shard, *tensor.placements[mesh_dim + 1 :])
        layout = MeshLayout(mesh, _placements(mesh, placements), check_counts(counts, mesh.size(mesh_dim), shard.num_partitions))
        local, here, dim = tensor.to_local(), tensor.placements[mesh_dim], placement.dim
        if int(counts.sum()) != tensor.shape[dim]:
            raise PartitionError(f"the splits sum to {int(counts.sum())}, but dim {dim} of the DTensor has {tensor.shape[dim]}")
        if here == Replicate():
            return _wrapped(layout.part_of(local), layout)
        if here != Shard(dim):
            raise PartitionError(f"expected a DTensor with Replicate() or Shard({dim}) on dim {mesh_dim} of the mesh, got {here}")
        chunks = chunk_bounds(tensor.shape[dim], mesh.size(mesh_dim))
        moved = convert.exchange_ranges(local, chunks, aligned_bounds(counts, owned), layout.group, dim)
        aligned = _wrapped(moved, layout.with_shard(replace(shard, aligned=True)))
        return aligned if shard.aligned else aligned._partitioned(shard)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._layout.placements

    @property
    def counts(self) -> Tensor:
        """How many positions of each partition come from each rank: [ranks, partitions], on the host."""
        return self._layout.counts

    @_not_traced
    def to_local(self) -> Tensor:
        """This rank's part. Its gradient, too, is this rank's part."""
        apply: Callable[[PartitionedTensor], Tensor] = _ToLocal.apply
        return apply(self)

    @_not_traced
    def redistribute(self, placement: Placement) -> PartitionedTensor | DTensor:
        """The same tensor in another layout: a PartitionedTensor, or a DTensor for Replicate() and Shard().

        Unaligned <-> aligned is one exchange of data, Replicate() one gathering; Shard() of the same dim is one exchange from
        aligned and two from unaligned.
        """
        layout = self._layout
        if isinstance(placement, PartitionedShard):
            return self._partitioned(placement)
        if placement == Replicate():
            return self._dtensor(self._gathered(), placement)
        if isinstance(placement, Shard):
            if placement.dim != layout.dim:
                found = self._dtensor(self._gathered(), Replicate())
                return found.redistribute(placements=[*self._with(placement)])
            aligned = self._partitioned(replace(layout.shard, aligned=True))
            chunks = chunk_bounds(self.shape[layout.dim], layout.counts.shape[0])
            before = aligned_bounds(layout.counts, layout.owned)
            moved = convert.exchange_ranges(aligned.to_local(), before, chunks, layout.group, layout.dim)
            return self._dtensor(moved, placement)
        raise PartitionError(f"cannot redistribute to {placement}; choose from PartitionedShard, Replicate and Shard")

    @_not_traced
    def full_tensor(self) -> Tensor:
        """The whole tensor, partition-major, on every rank: one gathering for each dim of the mesh that shards it."""
        found = self.redistribute(Replicate())
        assert isinstance(found, DTensor)
        return found.full_tensor()

    @_not_traced
    def as_jagged(self) -> JaggedTensor:
        """This rank's part as ragged rows: [partition, tokens] if unaligned, [own partition, source rank, tokens] if aligned."""
        layout = self._layout
        first = sum(layout.owned[: layout.rank])
        blocks = (
            layout.counts[:, first : first + layout.owned[layout.rank]].T if layout.shard.aligned else layout.counts[layout.rank]
        )
        lengths = blocks.contiguous().to(self.device, non_blocking=True)
        structure = Structure.from_lengths(lengths, dim=layout.dim, total=layout.local_size, validate=False)
        return JaggedTensor(self.to_local(), structure)

    def _partitioned(self, target: PartitionedShard) -> PartitionedTensor:
        layout = self._layout
        shard, ranks = layout.shard, layout.counts.shape[0]
        if (target.dim, target.num_partitions) != (shard.dim, shard.num_partitions):
            raise PartitionError(
                f"redistribute keeps the dim and the partitions, {shard.dim} and {shard.num_partitions}; "
                f"got {target.dim} and {target.num_partitions}"
            )
        owned = target.owned(ranks) if target.partitions_per_rank is not None else layout.owned
        wanted = layout.with_shard(replace(target.without_splits(), partitions_per_rank=owned if len({*owned}) > 1 else None))
        _check_target_splits(target, wanted)
        local, group, dim = self.to_local(), layout.group, layout.dim
        if shard.aligned and target.aligned:
            if owned == layout.owned:
                return self
            before, after = aligned_bounds(layout.counts, layout.owned), aligned_bounds(layout.counts, owned)
            return _wrapped(convert.exchange_ranges(local, before, after, group, dim), wanted)
        if shard.aligned:
            return _wrapped(convert.aligned_to_unaligned(local, layout.exchange, group, dim), wanted)
        if target.aligned:
            return _wrapped(convert.unaligned_to_aligned(local, wanted.exchange, group, dim), wanted)
        return _wrapped(local, wanted)

    def _gathered(self) -> Tensor:
        layout = self._layout
        return convert.to_replicate(
            self.to_local(), layout.counts, layout.owned, layout.group, layout.dim, aligned=layout.shard.aligned
        )

    def _with(self, placement: Placement) -> tuple[Placement, ...]:
        mesh_dim = self._layout.mesh_dim
        return (*self.placements[:mesh_dim], placement, *self.placements[mesh_dim + 1 :])

    def _dtensor(self, local: Tensor, placement: Placement) -> DTensor:
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local.contiguous(), self.device_mesh, self._with(placement), run_check=False, shape=self.shape, stride=stride
        )

    def numpy(self, *, force: bool = False) -> Any:
        raise PartitionError("a PartitionedTensor has no numpy(); call to_local().numpy() or full_tensor().numpy()")

    def tolist(self) -> Any:
        raise PartitionError("a PartitionedTensor has no tolist(); call to_local().tolist() or full_tensor().tolist()")

    # The base class declares these two without types.
    __repr__: Any = _shown
    __torch_dispatch__: Any = classmethod(_dispatched)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: MeshLayout) -> PartitionedTensor:
        ctx.layout = layout
        return PartitionedTensor(local.view_as(local), layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _local_of(grads[0], ctx.layout), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PartitionedTensor) -> Tensor:
        ctx.layout = tensor._layout
        return tensor._local.view_as(tensor._local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (_wrapped(grads[0], ctx.layout),)


def _wrapped(local: Tensor, layout: MeshLayout) -> PartitionedTensor:
    apply: Callable[[Tensor, MeshLayout], PartitionedTensor] = _FromLocal.apply
    return apply(local, layout)


def _local_of(grad: Tensor, layout: MeshLayout) -> Tensor:
    """A gradient's local part; a plain gradient is replicated."""
    if not isinstance(grad, PartitionedTensor):
        return layout.part_of(grad)
    if not grad._layout.same(layout):
        raise PartitionError(f"the gradient has another layout than its tensor: {grad._layout} and {layout}")
    return grad.to_local()


def _placements(mesh: DeviceMesh, given: PartitionedShard | Sequence[Placement]) -> tuple[Placement, ...]:
    placements: tuple[Placement, ...] = (given,) if isinstance(given, PartitionedShard) else tuple(given)
    if len(placements) != mesh.ndim:
        raise PartitionError(f"the mesh has {mesh.ndim} dims; pass one placement for each, got {list(placements)}")
    ours = [each for each in placements if isinstance(each, PartitionedShard)]
    if len(ours) != 1:
        raise PartitionError(f"expected one PartitionedShard among the placements, got {list(placements)}")
    for each in placements:
        if each is not ours[0] and each != Replicate() and not (isinstance(each, Shard) and each.dim != ours[0].dim):
            raise PartitionError(
                f"beside PartitionedShard, a dim of the mesh may have Replicate() or Shard() of another dim, got {each}; "
                'for tensors that differ along that dim of the mesh, pass the submesh of the other, as in mesh["expert"]'
            )
    return placements


def _check_target_splits(target: PartitionedShard, wanted: MeshLayout) -> None:
    """Raises if a target's splits are not those of the tensor: redistribution does not change who holds which block."""
    if target.matrix is not None and target.matrix != tuple(map(tuple, wanted.counts.tolist())):
        raise PartitionError(f"the target's splits {target.matrix} differ from the tensor's {wanted.counts.tolist()}")
    own = wanted.exchange.aligned_splits if target.aligned else tuple(wanted.counts[wanted.rank].tolist())
    if target.row is not None and target.row != own:
        raise PartitionError(f"the target's splits {target.row} differ from those of the tensor on this rank, {own}")
