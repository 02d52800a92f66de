"""The transpose of a read: from adjoints at the places that a statement read to the gradient of the tensor it read from.

In: a read, its adjoint as a value, and the domains of the statement. Out: a tensor over the dims that were read. The rule for
each dim follows from its index:

    a domain            the dim itself; domains of the statement that the index lacks are summed over (a broadcast over rows
                        becomes a ragged sum; a dense dim read by rows gets 0 past their ends)
    None                a dim of extent 1
    an affine place     its inverse: slices, flips, padding, concatenation
    a place of a row    `where(place == position)`: one position selected in each row, by a number or by saved integers
    n // m              a sum over the m positions that share one: heads of grouped queries
    any other place     positions are grouped by place (`group_by`) and each group is summed in order, so the bits are always
                        the same
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from serrate.analysis.indices import Indices
from serrate.autograd.derivatives import select, zero
from serrate.errors import GradientError, ShapeError
from serrate.frontend.ops.movement import index as indexed
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.reducing import reduced
from serrate.frontend.ops.reductions import sum as summed_over
from serrate.frontend.ops.routing import group_by
from serrate.frontend.ops.structure import as_nested, flatten, viewed
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, FloorDiv, const, maximum, minimum
from serrate.ir.fusion import Equal, Fusion
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain, lengths_array
from serrate.ir.ragged_transforms import Cover, Spread
from serrate.ir.reductions import SUM
from serrate.ir.solve import factor_of
from serrate.ir.storage import storage_of
from serrate.ir.tile import Accumulate, Store
from serrate.ir.traversal import traverse
from serrate.ir.values import (
    Place,
    Read,
    Tensor,
    Value,
    call,
    computed,
    constant,
    domains_of,
    index_of,
    index_read,
    position,
    reindex,
)
from serrate.ir.view import TensorView

Index = tuple[IterDomain | Place | None, ...]


@dataclass
class _Reading:
    """The transpose of one read: the dims of the tensor, and where to find the adjoints, summed over domains that the index
    lacks."""

    fusion: Fusion
    own: tuple[IterDomain, ...]
    """The dims of the tensor, except those of extent 1."""
    index: tuple[IterDomain | Place, ...]
    """The domain at which each of these dims is read."""
    plain: dict[int, tuple[IterDomain, IterDomain]] = field(default_factory=dict)
    """uid of a domain of the statement -> that domain, and the dim it indexes."""
    solved: list[tuple[IterDomain, IterDomain, Expr, int]] = field(default_factory=list)
    """A dim, the domain of the statement that its place is solved for, the rest of the place, and the factor of that domain."""
    pinned: list[tuple[IterDomain, Place]] = field(default_factory=list)
    """A dim, and its only position that is read, which depends only on plain dims."""
    shared: list[tuple[IterDomain, IterDomain, int]] = field(default_factory=list)
    """A dim, and the domain of the statement of which as many positions share one of it."""
    scattered: bool = False
    """Whether a place has none of these forms."""

    @property
    def kept(self) -> list[IterDomain]:
        """The domains of the statement that adjoints are not summed over, in the order of the dims."""
        return [d for d, _ in self.plain.values()] + [d for _, d, _, _ in self.solved] + [d for _, d, _ in self.shared]


def transposed(fusion: Fusion, read: Read, adjoint: Value, domains: Sequence[IterDomain]) -> tuple[Tensor, TensorView]:
    """The contribution of a read to a gradient: the tensor that receives it, and a tensor over its dims.

    `domains` are those of the statement. The tensor is the memory itself if the view only permutes its dims, or adds or removes
    dims of extent 1; else the view.
    """
    tensor, index, conditions = _through_view(read)
    for condition in conditions:
        adjoint = select(condition, adjoint)
    wide = [(d, at) for d, at in zip(tensor.logical, index, strict=True) if at is not None]
    reading = _Reading(fusion, tuple(d for d, _ in wide), tuple(at for _, at in wide))
    for own, at in wide:
        if isinstance(at, IterDomain):
            if at.uid in reading.plain:
                raise GradientError(f"a read of {tensor.name} takes its diagonal, and has no gradient yet")
            reading.plain[at.uid] = (at, own)
    for own, at in wide:
        if isinstance(at, Place):
            _sort_out(reading, own, at)
    found = _scattered(reading, adjoint, domains) if reading.scattered else _gathered(reading, adjoint, domains)
    return tensor, found if len(found.domains) == len(tensor.logical) else viewed(found, tensor.logical)


def _through_view(read: Read) -> tuple[Tensor, Index, list[Value]]:
    """The memory and the index into it, if the view has the same dims in any order, and dims of extent 1; or if it has gaps
    between or after its rows, whose gradient is 0. Then also the conditions under which an element is read."""
    view, memory = read.tensor, read.tensor.memory
    if view is not memory and _has_gaps(view):
        return memory, *_in_memory(view, read.index)
    places = {d.uid: at for d, at in zip(view.logical, read.index, strict=True)}
    if view is memory or not _same_dims(view):
        return view, tuple(None if d.is_single else at for d, at in zip(view.logical, read.index, strict=True)), []
    return memory, tuple(None if d.is_single else places[d.uid] for d in memory.logical), []


def _same_dims(view: Tensor) -> bool:
    """Whether a view has the dims of its memory, in any order, except dims of extent 1."""
    wide = [{d.uid for d in tensor.logical if not d.is_single} for tensor in (view, view.memory)]
    return wide[0] == wide[1]


def _has_gaps(view: Tensor) -> bool:
    """Whether there are elements of the memory that the view does not reach: between rows, or after them."""
    inside, apart = {d.uid for d in view.logical}, {d.uid for d in view.memory.logical}
    if any(isinstance(d.definition, Cover | Spread) and d.uid not in inside for d in view.storage):
        return True
    made = (node for d in view.logical for node in traverse(d) if isinstance(node, Partition))
    return any(t.lengths is not None and t.inputs[0].uid in apart for t in made)


def _in_memory(view: Tensor, index: Sequence[IterDomain | Place | None]) -> tuple[Index, list[Value]]:
    """The index into the memory of a view: the position in each dim of its storage."""
    if [d.uid for d in view.memory.logical] != [d.uid for d in view.memory.storage]:
        raise GradientError("rows with gaps between them, inside of other rows, have no gradient yet: call contiguous() first")
    found = _located([(d, at) for d, at in zip(view.logical, index, strict=True) if at is not None])
    known = Indices([*found.indices, *((d, const(0)) for d, at in zip(view.logical, index, strict=True) if at is None)])
    places: list[IterDomain | Place | None] = []
    for domain, stored in zip(view.memory.logical, view.storage, strict=True):
        expr = known.of(stored)
        same = next((d for d in found.domains if index_of(d) is expr and not d.is_ragged), None)
        places.append(None if domain.is_single else same or found.place(expr))
    return tuple(places), found.conditions


@dataclass(frozen=True)
class _Located:
    """An index, dim by dim, as expressions that are always in range; and the conditions under which the index itself is."""

    indices: list[tuple[IterDomain, Expr]] = field(default_factory=list)
    domains: list[IterDomain] = field(default_factory=list)
    reads: list[Value] = field(default_factory=list)
    conditions: list[Value] = field(default_factory=list)

    def place(self, expr: Expr) -> Place:
        return place_of(expr, self.domains, self.reads)


def _located(index: Sequence[tuple[IterDomain, IterDomain | Place]]) -> _Located:
    """The index of each dim; places out of bounds are replaced by the place of an existing element."""
    found = _Located()
    for own, at in index:
        new = (at,) if isinstance(at, IterDomain) else at.domains
        found.domains.extend(d for d in new if all(d.uid != other.uid for other in found.domains))
        if isinstance(at, IterDomain):
            found.indices.append((own, index_of(at)))
            continue
        renamed: dict[Expr, Expr] = {index_read(k): index_read(len(found.reads) + k) for k in range(len(at.reads))}
        expr = at.expr.substitute(renamed)
        found.reads.extend(at.reads)
        size = own.extent_at({o.uid: Indices(found.indices).of(o) for o in own.owners})
        here = computed(found.place(expr))
        found.conditions.append(call("ge", here, constant(0, torch.int64), dtype=torch.bool))
        found.conditions.append(call("lt", here, computed(found.place(size)), dtype=torch.bool))
        found.indices.append((own, maximum(minimum(expr, size - 1), 0)))
    return found


def _sort_out(reading: _Reading, own: IterDomain, place: Place) -> None:
    """Chooses the rule for a place."""
    inside = {d.uid for d in domains_of((place,)) if not d.is_single}
    free = [d for d in place.domains if d.uid not in reading.plain and all(d.uid != s.uid for _, s, _, _ in reading.solved)]
    if inside <= reading.plain.keys():
        reading.pinned.append((own, place))
        return
    if not place.reads:
        for domain in free:
            factor = factor_of(place.expr, index_of(domain))
            rest = place.expr - index_of(domain) * factor
            others = {d.uid for d in place.domains if d.uid != domain.uid}
            if factor and others <= reading.plain.keys():
                reading.solved.append((own, domain, rest, factor))
                return
            expr = place.expr
            if isinstance(expr, FloorDiv) and expr.left is index_of(domain) and expr.right.value is not None:
                reading.shared.append((own, domain, expr.right.value))
                return
    reading.scattered = True


# --- sums over what an index lacks ---------------------------------------------------------------------------------------------


def summed(
    fusion: Fusion,
    value: Value,
    domains: Sequence[IterDomain],
    kept: Sequence[IterDomain],
    named: Sequence[IterDomain] | None = None,
) -> TensorView:
    """`value`, which has one number per position of `domains`, summed over those not in `kept`; the dims of the result are in the
    order of `kept`. Rows that are kept without the dim that counts them become regular, as long as the longest. `named` are
    other names of the dims of the result."""
    uids = {d.uid for d in kept}
    unit: dict[int, IterDomain | None] = {d.uid: None for d in domains if d.is_single and d.uid not in uids}
    value, domains = reindex(value, unit), [d for d in domains if d.uid not in unit]
    over = tuple(d for d in domains if d.uid not in uids)
    try:
        target = fusion.tensor(value.dtype, kept if named is None else named)
    except ShapeError:
        return _in_steps(fusion, value, domains, kept)
    if len([d for d in over if d.is_ragged]) > 1:
        return _in_steps(fusion, value, domains, kept)
    if not over:
        return fusion.define([target], kept, Store(target, tuple(kept), value))[0]
    return fusion.define([target], domains, Accumulate((target,), tuple(kept), SUM, (value,), over))[0]


def _in_steps(fusion: Fusion, value: Value, domains: Sequence[IterDomain], kept: Sequence[IterDomain]) -> TensorView:
    """The sum across rows, position by position, or over several ragged dims."""
    uids = [d.uid for d in kept]
    whole = pulled(fusion, value.dtype, domains, value)
    dims = tuple(k for k, d in enumerate(domains) if d.uid not in uids)
    found = reduced(SUM, whole, dims, value.dtype, value.dtype)[0]
    left = [d.uid for d in domains if d.uid in uids]
    return viewed(found, [found.domains[left.index(uid)] for uid in uids])


# --- dims that a place leads to ------------------------------------------------------------------------------------------------


def _gathered(reading: _Reading, adjoint: Value, domains: Sequence[IterDomain]) -> TensorView:
    """The gradient if the index of an element determines which positions of the statement read it."""
    kept = reading.kept
    direct = not (reading.solved or reading.pinned or reading.shared)
    total = summed(reading.fusion, adjoint, domains, kept, reading.own if direct and _alike(reading) else None)
    if direct and [d.uid for d in reading.own] == [d.uid for d in total.domains]:
        return total
    own = [*reading.own]
    known: dict[Expr, Expr] = {index_of(d): index_of(to) for d, to in reading.plain.values()}
    index: list[IterDomain | Place | None] = []
    conditions: list[Value] = []
    parts: list[IterDomain] = []
    for k, (domain, to) in enumerate(reading.plain.values()):
        moved = total.domains[k].uid != domain.uid or (domain.is_ragged and not to.is_ragged)
        index.append(Place(index_of(to), (to,)) if moved else to)
    for to, _, rest, factor in reading.solved:
        away = index_of(to) - rest.substitute(known)
        index.append(place_of(away * factor if factor in (1, -1) else away // factor, own))
        if factor not in (1, -1):
            even = call("eq", computed(place_of(away % abs(factor), own)), constant(0, torch.int64), dtype=torch.bool)
            conditions.append(even)
    for to, _, count in reading.shared:
        part = IterDomain(count, name=reading.fusion.fresh("d"))
        parts.append(part)
        index.append(Place(index_of(to) * count + index_of(part), (to, part)))
    renamed: dict[int, IterDomain | None] = {domain.uid: to for domain, to in reading.plain.values()}
    for to, place in reading.pinned:
        chosen = reindex(computed(place), renamed | dict.fromkeys(d.uid for d in domains_of((place,)) if d.is_single))
        conditions.append(call("eq", position(to), chosen, dtype=torch.bool))
    value = total.at(tuple(index))
    for condition in conditions:
        value = select(condition, value, zero(value))
    return summed(reading.fusion, value, (*own, *parts), own)


def _alike(reading: _Reading) -> bool:
    """Whether the dims of the statement that a read takes are as large as those of the tensor, whatever the call: then the sum
    over the others is the gradient."""
    equal = {frozenset((c.left, c.right)) for c in reading.fusion.checks if isinstance(c, Equal)}
    same: dict[int, int] = {}
    for domain, own in reading.plain.values():
        sizes = domain.extent_expr, own.extent_expr
        if isinstance(domain, RaggedIterDomain) and isinstance(own, RaggedIterDomain):
            rows = frozenset((lengths_array(domain), lengths_array(own)))
            alike = (domain.length is own.length or rows in equal) and same.get(domain.component.uid) == own.component.uid
        else:
            alike = not domain.is_ragged and not own.is_ragged and (sizes[0] is sizes[1] or frozenset(sizes) in equal)
        if not alike and domain.uid != own.uid:
            return False
        same[domain.uid] = own.uid
    return all(owner.uid in same for domain, _ in reading.plain.values() for owner in domain.owners)


def place_of(expr: Expr, domains: Iterable[IterDomain], reads: Sequence[Value] = ()) -> Place:
    """A place with exactly the domains it mentions: places are compared by their expressions."""
    return Place(expr, tuple(d for d in domains if index_of(d) in expr.symbols), tuple(reads))


def _scattered(reading: _Reading, adjoint: Value, domains: Sequence[IterDomain]) -> TensorView:
    """The gradient of a tensor read at places that integers decide: positions are grouped by place, groups summed in order."""
    fusion, own = reading.fusion, reading.own
    inside = {d.uid for d in domains_of(tuple(at for at in reading.index if isinstance(at, Place)))}
    keyed = 1 + max(
        k
        for k, (d, at) in enumerate(zip(own, reading.index, strict=True))
        if isinstance(at, Place) or d.is_ragged or at.uid in inside or any(d.uid == o.uid for r in own for o in r.owners)
    )
    features = [at for at in reading.index[keyed:] if isinstance(at, IterDomain)]
    used = {d.uid for d in domains_of(reading.index[:keyed])}
    first = [d for d in domains if d.uid in used]
    total = summed(fusion, adjoint, domains, (*first, *features))
    stored = storage_of(own[:keyed])
    count = reduce(lambda a, b: a * b, (d.extent_expr for d in stored))
    keys = pulled(fusion, torch.int64, first, _key(own[:keyed], reading.index[:keyed], stored, count))
    # The last group contains positions that read nothing.
    offsets, order = group_by(_flat(keys, len(first)), count + 1)
    sums = summed_over(as_nested(indexed(_flat(total, len(first)), order), offsets), 1)
    here = Indices([(d, index_of(d)) for d in own[:keyed]])
    at = place_of(_row_major([(here.of(d), d) for d in stored]), own)
    return pulled(fusion, adjoint.dtype, own, sums.at((at, *own[keyed:])))


def _row_major(indices: Sequence[tuple[Expr, IterDomain]]) -> Expr:
    flat: Expr = const(0)
    for index, domain in indices:
        flat = flat * domain.extent_expr + index
    return flat


def _key(own: Sequence[IterDomain], index: Sequence[IterDomain | Place], stored: Sequence[IterDomain], count: Expr) -> Value:
    """The number of the element at an index, in the order of memory; their `count` where it does not exist."""
    found = _located(list(zip(own, index, strict=True)))
    known = Indices(found.indices)
    key = computed(found.place(_row_major([(known.of(d), d) for d in stored])))
    for condition in found.conditions:
        key = call("where", condition, key, computed(place_of(count, ())), dtype=torch.int64)
    return key


def _flat(x: TensorView, count: int) -> TensorView:
    """`x` with its first dims as one, as they are stored."""
    stored = storage_of(x.domains[:count])
    x = viewed(x, (*stored, *x.domains[count:]))
    return flatten(x, 0, len(stored) - 1) if len(stored) > 1 else x


# --- views ---------------------------------------------------------------------------------------------------------------------


def memory_gradient(fusion: Fusion, view: Tensor, gradient: TensorView, dtype: torch.dtype) -> TensorView:
    """The gradient of a memory, from that of a view of all of it. It has the given dtype."""
    memory = view.memory
    if _same_dims(view):
        at = tuple(None if d.is_single else d for d in view.logical)
        return viewed(pulled(fusion, dtype, [d for d in memory.logical if not d.is_single], gradient.at(at)), memory.logical)
    tensor = gradient.tensor
    stored = [[d.uid for d in t.storage] for t in (tensor, view)]
    if tensor.base is not None or tensor.dtype != dtype or stored[0] != stored[1]:
        tensor = Tensor(fusion.fresh("T"), dtype, view.logical, view.storage)
        fusion.define([tensor], view.logical, Store(tensor, view.logical, gradient.at(view.logical)))
    return fusion.view(Tensor(fusion.fresh("T"), dtype, memory.logical, memory.storage, tensor.role, base=tensor))
