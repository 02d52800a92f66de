"""The naive tile program of a stage: one phase per operation, with serial loops over its domains.

In: definitions of a fusion. Out: a `TileProgram` that is correct and slow; schedules rewrite it. Views (`as_nested` and
friends) disappear here: a read of a view becomes a read of its base, if the domains determine the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from serrate.ir.domains import IterDomain, origins
from serrate.ir.fusion import Definition
from serrate.ir.tile import SERIAL, Leaf, Phase, Store, TileProgram, nest
from serrate.ir.values import Call, Place, Places, Read, Role, Tensor, Value, call, rewrite


def naive(
    name: str, definitions: Sequence[Definition], inputs: tuple[Tensor, ...], swap: Callable[[Tensor], Tensor]
) -> TileProgram:
    """One phase per definition, named after the tensor it writes; `swap` gives tensors their role in this stage."""

    def resolve(value: Value) -> Value | None:
        if isinstance(value, Call) and value.function in ("detach", "differentiated_as"):
            return rewrite(value.args[0], resolve)
        if isinstance(value, Call) and value.function == "where":
            condition, *chosen = (rewrite(a, resolve) for a in value.args)
            return chosen[0] if chosen[0] is chosen[1] else call("where", condition, *chosen, dtype=value.dtype)
        if not isinstance(value, Read):
            return None
        index = base_index(value)
        if index is not None:
            return value.of(swap(value.tensor.memory), index)
        return value.of(swap(value.tensor), value.index)

    def rebuild(leaf: Leaf) -> Leaf:
        values = tuple(rewrite(v, resolve) for v in leaf.values)
        if isinstance(leaf, Store):
            return Store(swap(leaf.tensor), leaf.index, values[0])
        return replace(leaf, targets=tuple(map(swap, leaf.targets)), values=values)

    phases = []
    for definition in definitions:
        assert isinstance(definition.statement, Leaf)
        leaf = rebuild(definition.statement)
        loops = tuple((d, SERIAL) for d in definition.domains)
        phases.append(Phase(leaf.targets[0].name, nest(loops, leaf)))
    outputs = tuple(t for phase in phases for leaf in phase.leaves for t in leaf.targets if t.role is Role.OUTPUT)
    return TileProgram(name, inputs, outputs, tuple(phases))


def base_index(element: Read) -> Places | None:
    """The index into the base of a view, if the domains alone determine it; for a plain tensor, the index itself.

    A base dim that is also a dim of the view keeps its index. A base dim that the view partitions (or combines) is itself
    the index, as long as the view is read at exactly the domains made from it. A base dim that the view stores under
    other domains (rows by columns) has no index of its own.
    """
    view, base = element.tensor, element.tensor.memory
    if view is base:
        return element.index
    places = {d.uid: at for d, at in zip(view.logical, element.index, strict=True)}
    stored = {d.uid for d in view.storage}
    own_storage = stored != {d.uid for d in base.storage}
    index: list[IterDomain | Place | None] = []
    for domain in base.logical:
        if domain.uid in places:
            index.append(places[domain.uid])
        elif domain.uid not in stored and own_storage:
            return None
        elif domain.is_single or _unmoved(domain, view, element.index):
            index.append(None if domain.is_single else domain)
        else:
            return None
    return tuple(index)


def _unmoved(domain: IterDomain, view: Tensor, index: Places) -> bool:
    """Whether every dim of the view that transforms connect to `domain` is read at itself. Dims made from the same domain are
    connected too, such as rows and a dim that merges their positions with another dim."""
    connected = origins(domain)
    moved = (own for own, at in zip(view.logical, index, strict=True) if not isinstance(at, IterDomain) or at.uid != own.uid)
    return all(connected.isdisjoint(origins(own)) for own in moved)
