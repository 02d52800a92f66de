"""Fusions over a mesh: a fusion whose loop over groups is spread over ranks, cut where data must cross between them.

In: a fusion with a `regroup` whose loop over groups is parallelized as "mesh", and a mesh. Out: a program for each rank. The
part before the regroup runs on this rank's group, the part after it on the components that the rank owns; both are compiled as
usual. The regroup itself becomes the exchange from unaligned to aligned; its gradient is the reverse exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from serrate.compiled import Compiled
from serrate.distributed import convert
from serrate.distributed.collectives import announced
from serrate.distributed.layout import owned_partitions
from serrate.errors import PartitionError
from serrate.ir.clone import Cloner
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.expr import Array, Expr
from serrate.ir.fusion import Check, Definition, Fusion
from serrate.ir.ragged_transforms import Regroup
from serrate.ir.storage import storage_of
from serrate.ir.traversal import traverse
from serrate.ir.values import Role, Tensor
from serrate.ir.view import TensorView
from serrate.schedule.hand import schedule_of
from serrate.tensor import JaggedTensor, Structure

Node = TypeVar("Node")


class MeshProgram:
    """A fusion over a one-dimensional mesh.

    Each rank passes its own part of every argument: for tensors with the group dim, its own group (size 1); for tensors with one
    entry per component (weights of experts), the entries of the components it owns. Results after the regroup cover its own
    components, results before it its own group. Group and component dims must be declared with None.

    Both parts and the exchange between them record gradients. The backward pass contains one exchange in the other direction, in
    which every rank must take part.
    """

    def __init__(
        self, fusion: Fusion, mesh: DeviceMesh, partitions_per_rank: Sequence[int] | None = None, backend: str | None = None
    ) -> None:
        self.group, self.partitions_per_rank = mesh.get_group(), partitions_per_rank
        cut = _mesh_regroup(fusion)
        source = next(read.tensor for value in cut.statement.values for read in value.reads)
        (target,) = cut.statement.targets
        self._is_after = [view.tensor is target or fusion.reaches(target, view) for view in fusion.outputs]
        outputs = list(zip(fusion.outputs, self._is_after, strict=True))
        early = [view for view, after in outputs if not after]
        self.before, self._taken_before = _before(fusion, [fusion.view(source), *early])
        self.after, self._taken_after = _after(fusion, target, [view for view, after in outputs if after])
        self._early, self._late = Compiled(self.before, backend), Compiled(self.after, backend)

    def __call__(self, *args: Any) -> Any:
        first, *early = _tuple(self._early(*(args[k] for k in self._taken_before)))
        assert isinstance(first, JaggedTensor)
        with announced("swap", first.device, self.group):
            rows, counts = _rows_and_counts(first)
            owned = owned_partitions(counts.shape[0], self.group.size(), self.partitions_per_rank)
        exchange = convert.plan_exchange(rows, counts, owned, self.group)
        arrived = convert.unaligned_to_aligned(rows, exchange, self.group)
        lengths = exchange.blocks.sum(0).to(arrived.device, non_blocking=True)
        structure = Structure.from_lengths(lengths, total=arrived.shape[0], validate=False)
        late = _tuple(self._late(JaggedTensor(arrived, structure), *(args[k] for k in self._taken_after)))
        results = [(late if after else early).pop(0) for after in self._is_after]
        return results[0] if len(results) == 1 else tuple(results)


def _mesh_regroup(fusion: Fusion) -> Definition:
    """The regroup whose loop over groups is parallelized as "mesh"."""
    spread = {
        uid for state in schedule_of(fusion).states.values() for uid, kind in state.parallel.items() if kind is ParallelType.MESH
    }
    if not spread:
        raise PartitionError('no loop is spread over a mesh; parallelize(0, "mesh") the result of regroup')
    found = [d for d in fusion.definitions if (made := _regroup_of(d)) is not None and made.inputs[0].uid in spread]
    if len(found) != 1:
        raise PartitionError(f"expected one regroup whose group dim is spread over the mesh, got {len(found)}")
    made = _regroup_of(found[0])
    assert made is not None
    for what, domain in (("group", made.inputs[0]), ("component", made.outputs[0].component)):
        if domain.extent_expr.value is not None:
            raise PartitionError(
                f"a rank has its own part of the {what} dim, whose size is fixed at {domain.extent_expr}; declare it with None"
            )
    return found[0]


def _regroup_of(definition: Definition) -> Any:
    for tensor in definition.statement.targets:
        for domain in tensor.logical:
            # Later tensors have the same rows; the regroup itself still loops over the groups.
            if isinstance(domain.definition, Regroup) and domain.definition.inputs[0] in definition.domains:
                return domain.definition
    return None


def _before(fusion: Fusion, outputs: Sequence[TensorView]) -> tuple[Fusion, list[int]]:
    """The program up to some results, and which of the fusion's inputs it takes."""
    cloner, new = Cloner(), _empty(fusion, "before")
    whole = _empty(fusion, "before")
    whole.inputs, whole.outputs = list(fusion.inputs), list(outputs)
    whole.definitions = list(fusion.definitions)
    live = whole.live()
    taken = _inputs_of(fusion, live, [view.tensor for view in outputs])
    new.inputs = [new.view(cloner(fusion.inputs[k].tensor)) for k in taken]
    new.definitions = [cloner(d) for d in live]
    new.checks = [cloner(c) for c in fusion.checks if _is_bound(c, new.inputs)]
    for view in outputs:
        new.output(new.view(cloner(view.tensor)))
    return new, taken


def _after(fusion: Fusion, target: Tensor, outputs: Sequence[TensorView]) -> tuple[Fusion, list[int]]:
    """The program from the regrouped tensor on, which is its first input, and which of the fusion's inputs it takes besides."""
    new = _empty(fusion, "after")
    component, rows, *rest = target.logical
    if component.is_ragged or not rows.is_ragged or any(d.is_ragged for d in rest):
        raise PartitionError(f"the result of a regroup over a mesh must be [components, rows, ...], got {target}")
    shape = [None, *(d.extent_expr.value for d in rest)]
    example = Structure.from_lengths(torch.tensor([1], device="cpu"))
    given = new.input(shape, target.dtype, structure=example)
    cloner = _Replacing(
        dict(zip(target.logical, given.domains, strict=True)),
        {target: given.tensor},
        {
            old.extent_expr: put.extent_expr
            for old, put in zip(target.logical, given.domains, strict=True)
            if old.extent_expr.value is None
        },
    )
    later = [d for d in fusion.live() if any(fusion.reaches(target, t) for t in d.statement.targets)]
    taken = _inputs_of(fusion, later, [], except_for=(component, rows))
    _check_arrays(target, later)
    new.inputs += [new.view(cloner(fusion.inputs[k].tensor)) for k in taken]
    new.definitions += [cloner(d) for d in later]
    new.checks += [made for c in fusion.checks if _is_bound(made := cloner(c), new.inputs)]
    for view in outputs:
        new.output(new.view(cloner(view.tensor)))
    return new, taken


def _check_arrays(target: Tensor, later: Sequence[Definition]) -> None:
    """Raises if domains after the regroup, other than its own, depend on the offsets before it, which are of other rows."""
    offsets, own = _sources(target.logical), {d.uid for d in target.logical}
    for definition in later:
        for tensor in (*definition.statement.targets, *(r.tensor for v in definition.statement.values for r in v.reads)):
            if _sources(d for d in tensor.logical if d.uid not in own) & offsets:
                raise PartitionError(
                    f"{tensor} is computed from the offsets before the regroup over the mesh; after it, "
                    "only its own rows can be used"
                )


def _sources(domains: Iterable[IterDomain]) -> set[str]:
    """The tensors that domains depend on, by name."""
    return {source.name for d in domains for node in traverse(d) if isinstance(node, Array) for source in node.sources}


def _empty(fusion: Fusion, name: str) -> Fusion:
    new = Fusion(f"{fusion.name}_{name}")
    new._numbers = dict(fusion._numbers)
    return new


class _Replacing(Cloner):
    """Copies nodes, with others in place of some domains, tensors and extents."""

    def __init__(self, domains: dict[IterDomain, IterDomain], tensors: dict[Tensor, Tensor], extents: dict[Expr, Expr]) -> None:
        super().__init__()
        self._extents = extents
        for old, new in domains.items():
            self._remember(old, new)
            self.uids[old.uid] = new.uid
        for old_tensor, new_tensor in tensors.items():
            self._remember(old_tensor, new_tensor)

    def __call__(self, node: Node) -> Node:
        if isinstance(node, Expr):
            return cast(Node, node.substitute(self._extents))
        return super().__call__(node)

    def _record(self, node: Any) -> Any:
        known = id(node) in self._made
        new = super()._record(node)
        if isinstance(node, Tensor) and not known and node.role is not Role.INPUT:
            # Rows are stored back to back in the order of the new domains, not of those that they replace.
            storage = storage_of(new.logical) if new.base is None else new.memory.storage
            object.__setattr__(new, "storage", storage)
        return new


def _inputs_of(
    fusion: Fusion, definitions: Iterable[Definition], results: Iterable[Tensor], except_for: Sequence[IterDomain] = ()
) -> list[int]:
    """The inputs that definitions read, or that their domains depend on, by position."""
    ours = {d.uid for d in except_for}
    tensors = [
        *results,
        *(t for d in definitions for t in d.statement.targets),
        *(r.tensor for d in definitions for v in d.statement.values for r in v.reads),
    ]
    names = {t.memory.name for t in tensors}
    names |= _sources(each for t in tensors for each in t.logical if each.uid not in ours)
    return [k for k, view in enumerate(fusion.inputs) if view.tensor.name in names]


def _is_bound(check: Check, inputs: Sequence[TensorView]) -> bool:
    """Whether a check involves only these inputs."""
    names = {view.tensor.name for view in inputs}
    known = {s for view in inputs for d in view.tensor.logical for s in d.extent_expr.symbols}
    for value in (getattr(check, field.name) for field in fields(check)) if is_dataclass(check) else ():
        exprs = [value] if isinstance(value, Expr) else [value.extent_expr] if isinstance(value, IterDomain) else []
        arrays = [value] if isinstance(value, Array) else [a for e in exprs for a in e.arrays]
        if any(not e.symbols <= known for e in exprs) or any(s.name not in names for a in arrays for s in a.sources):
            return False
    return True


def _rows_and_counts(local: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank's group, and how many there are of each component."""
    groups = local.contiguous().unbind()
    if len(groups) != 1:
        raise PartitionError(
            f"a rank has one group of its own: the group dim of its arguments must have size 1, got {len(groups)}"
        )
    rows = groups[0].contiguous()
    return rows.values, rows.lengths


def _tuple(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]
