"""Transforms: expressions from domains to domains, and the rules by which indices travel through them.

In: domains. Out: new domains whose `definition` is the transform that made them. Every transform knows its index rule in
both directions: `to_inputs` (indices of its outputs known, those of its inputs wanted: how a loop finds its elements) and
`to_outputs` (the other way). Applying the same transform to the same domain twice gives the same domains, so two loops
that split a row alike share their domains.

| transform        | from -> to           | to_inputs                    | extents                      |
| split f          | I -> (O, In)         | i = o*f + n                  | ceil(N/f), f                 |
| merge            | (A, B) -> M          | a = m // Nb, b = m % Nb      | Na*Nb                        |
| partition        | I -> (C, R)          | i = start[c] + r             | K, lengths                   |
|   of ragged R under G: the parts of all g, flattened, own the new rows; i = start[g][c] + r           |
| combine          | (C, R) -> I          | c = search(off, i), r = rest | sum of lengths               |
|   of an inner pair (C under G, R) -> ragged under G: the ragged domain it came from                  |
| cover            | R -> longer rows     | r = r' (guard r < length[c]) | the longest of a group       |
| restrict lo, hi  | I -> sub-range       | i = i' + lo                  | hi - lo                      |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from serrate.errors import DomainError, StructureMismatch
from serrate.ir.domains import COORDINATE, IterDomain, IterType, NestedInts, ParallelType, RaggedIterDomain
from serrate.ir.expr import Array, Expr, RunningSum, as_expr, ceildiv, const, maximum, search, symbol

Known = Mapping[int, Expr]
"""Index expressions by domain uid."""

Outputs = tuple[IterDomain, ...]

_SHOWN = symbol("c")
"""How a component's coordinate is spelled in the names of derived arrays."""


@dataclass(frozen=True, eq=False)
class Transform:
    """One expression from `inputs` to `outputs`; outputs are filled in right after construction."""

    inputs: tuple[IterDomain, ...]
    outputs: tuple[IterDomain, ...]

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        """The domains whose index the rules read besides those of inputs and outputs: which row all of these lie in."""
        return ()

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        """Indices of the inputs from those of the outputs."""
        raise NotImplementedError

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        """Indices of the outputs from those of the inputs."""
        raise NotImplementedError

    def nest(self, component: IterDomain, flat: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
        """A flat tuple over `component` (an output) in the shape the components are nested in."""
        return flat


@dataclass(frozen=True, eq=False)
class Split(Transform):
    """I -> (O, In) with i = o*factor + n."""

    factor: Expr

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        outer, inner = (known[d.uid] for d in self.outputs)
        return (outer * self.outputs[1].extent_expr + inner,)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        index, size = known[self.inputs[0].uid], _divisor(self.outputs[1])
        return (index // size, index % size)

    @property
    def divides(self) -> bool:
        """Whether the split is known to make no holes, in any row."""
        return (row_length(self.inputs[0]) - row_length(self.outputs[0]) * self.outputs[1].extent_expr).value == 0


@dataclass(frozen=True, eq=False)
class Merge(Transform):
    """(A, B) -> M with a = m // Nb, b = m % Nb."""

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        index, size = known[self.outputs[0].uid], _divisor(self.inputs[1])
        return (index // size, index % size)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        outer, inner = (known[d.uid] for d in self.inputs)
        return (outer * self.inputs[1].extent_expr + inner,)

    def nest(self, component: IterDomain, flat: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
        outer = self.inputs[0]
        count, size = (cast(int, d.extent_expr.value) for d in self.inputs)
        groups = tuple(flat[k * size : (k + 1) * size] for k in range(count))
        return outer.definition.nest(outer, groups) if outer.definition else groups


@dataclass(frozen=True, eq=False)
class Partition(Transform):
    """I -> (C, R) with i = start[c] + r."""

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = self.outputs
        return (self._ragged.start_of(known[component.uid]) + known[ragged.uid],)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        array = offsets_array(self._ragged)
        index = known[self.inputs[0].uid]
        component = search(array, self.outputs[0].extent_expr, index)
        return (component, index - self._ragged.start_of(component))

    @property
    def _ragged(self) -> RaggedIterDomain:
        return cast(RaggedIterDomain, self.outputs[1])


@dataclass(frozen=True, eq=False)
class PartitionInner(Transform):
    """R under G -> (C, R'): the parts of a row. Row g*K + c of `offsets` is part c of row g; all rows lie back to back."""

    offsets: Array

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return (cast(RaggedIterDomain, self.inputs[0]).component,)

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        part, ragged = self.outputs
        first = self._first(known)
        return (self.offsets[first + known[part.uid]] - self.offsets[first] + known[ragged.uid],)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        first = self._first(known)
        position = self.offsets[first] + known[self.inputs[0].uid]
        owner = search(self.offsets, cast(RaggedIterDomain, self.outputs[1]).component.extent_expr, position)
        return (owner - first, position - self.offsets[owner])

    def _first(self, known: Known) -> Expr:
        return known[self.beside[0].uid] * self.outputs[0].extent_expr


@dataclass(frozen=True, eq=False)
class Combine(Transform):
    """(C, R) -> I, where `offsets` say at which i each component's rows begin."""

    offsets: Array

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        index = known[self.outputs[0].uid]
        component = search(self.offsets, self.inputs[0].extent_expr, index)
        return (component, index - self.offsets[component])

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged = (known[d.uid] for d in self.inputs)
        return (self.offsets[component] + ragged,)


@dataclass(frozen=True, eq=False)
class CombineInner(Transform):
    """(C under G, R) -> ragged under G: sentences into their documents. Positions are those of the partitioned domain."""

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return (cast(RaggedIterDomain, self.inputs[0]).component,)

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged, combined = self._domains
        group = known[component.component.uid]
        position = combined.start_of(group) + known[combined.uid]
        owner = search(offsets_array(ragged), ragged.component.extent_expr, position)
        return (owner - component.start_of(group), position - ragged.start_of(owner))

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        component, ragged, combined = self._domains
        group = known[component.component.uid]
        owner = component.start_of(group) + known[component.uid]
        return (ragged.start_of(owner) + known[ragged.uid] - combined.start_of(group),)

    @property
    def _domains(self) -> tuple[RaggedIterDomain, RaggedIterDomain, RaggedIterDomain]:
        return cast(tuple[RaggedIterDomain, RaggedIterDomain, RaggedIterDomain], (*self.inputs, *self.outputs))


@dataclass(frozen=True, eq=False)
class Regular(Transform):
    """R -> regular domain over a group of components (`cover`), or a sub-range (`restrict`): i = i' + low."""

    low: Expr

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.outputs[0].uid] + self.low,)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.inputs[0].uid] - self.low,)


class Cover(Regular):
    """R -> the longest row of a group, as a regular domain."""


class Restrict(Regular):
    """I -> its positions from `low` on, up to a bound."""


def _once(domain: IterDomain, key: tuple[Hashable, ...], make: Callable[[], Outputs]) -> Outputs:
    """The outputs that this transform of `domain` made earlier, else new ones."""
    if key not in domain.derived:
        domain.derived[key] = make()
    return domain.derived[key]


def _finish(transform: Transform, outputs: Outputs) -> Outputs:
    """Ties a new transform and its outputs to each other."""
    for output in outputs:
        object.__setattr__(output, "definition", transform)
    object.__setattr__(transform, "outputs", outputs)
    return outputs


def row_length(domain: IterDomain) -> Expr:
    """The extent; of a ragged domain that of one row, as an expression in COORDINATE."""
    return domain.length if isinstance(domain, RaggedIterDomain) else domain.extent_expr


def _divisor(domain: IterDomain) -> Expr:
    """The extent as something to divide by: an empty domain has no positions, so any divisor will do."""
    return const(1) if domain.extent_expr.value == 0 else domain.extent_expr


def _size(what: str, value: int | Expr) -> Expr:
    try:
        return as_expr(value)
    except TypeError:
        raise DomainError(f"{what} must be an integer or an expression, got {value!r}") from None


def _plain(function: str, domain: object) -> IterDomain:
    if not isinstance(domain, IterDomain):
        raise DomainError(f"{function}: expected an IterDomain, got {type(domain).__name__}")
    return domain


def split(domain: IterDomain, factor: int | Expr, *, inner: bool = True) -> tuple[IterDomain, IterDomain]:
    """I -> (O, In). With `inner` the factor is the inner extent, else the outer one.

    >>> [d.extent for d in split(IterDomain(6), 4)]
    [2, 4]
    """
    _plain("split", domain)
    size = _size("split: a factor", factor)
    if size.value is not None and size.value < 1:
        raise DomainError(f"split: a factor must be at least 1, got {size}")

    def make() -> Outputs:
        if isinstance(domain, RaggedIterDomain):
            if not inner:
                raise DomainError(f"split of ragged {domain}: an outer factor would differ by row; split by the inner extent")
            per_row = ceildiv(domain.length, size)
            outer: IterDomain = RaggedIterDomain(
                _total(domain.component, per_row),
                iter_type=domain.iter_type,
                name=f"{domain.name}o",
                pairing=domain.pairing,
                component=domain.component,
                length=per_row,
                bound=domain.host_bound // size + domain.component.host_bound,
            )
            outputs = (outer, IterDomain(size, domain.iter_type, name=f"{domain.name}i"))
        else:
            other = ceildiv(domain.extent_expr, size)
            bound = None if domain.bound is None else ceildiv(domain.bound, size)
            o, n = (other, size) if inner else (size, other)
            bounds = (bound, None) if inner else (None, bound)
            outputs = (
                IterDomain(o, domain.iter_type, name=f"{domain.name}o", bound=bounds[0]),
                IterDomain(n, domain.iter_type, name=f"{domain.name}i", bound=bounds[1]),
            )
        return _finish(Split((domain,), (), size), outputs)

    return cast(tuple[IterDomain, IterDomain], _once(domain, ("split", size, inner), make))


def _total(component: IterDomain, length: Expr) -> Expr:
    """The summed lengths: a number where known, else the last element of their running sum."""
    count = component.extent_expr
    array = running_sum(component, length)
    return array[count]


def running_sum(component: IterDomain, length: Expr) -> Array:
    """The derived array `[0, length(0), length(0)+length(1), ...]` over a component domain."""
    count = component.extent_expr
    name = f"sum({length.substitute({COORDINATE: _SHOWN})})"
    if count.value is not None and all(a.data is not None for a in length.arrays) and not (length.symbols - {COORDINATE}):
        total, data = 0, [0]
        for c in range(count.value):
            total += cast(int, length.substitute({COORDINATE: const(c)}).value)
            data.append(total)
        return Array(name, tuple(data))
    return Array(name, recipe=RunningSum(length, COORDINATE, count))


def merge(outer: IterDomain, inner: IterDomain) -> IterDomain:
    """(A, B) -> M. A ragged outer domain with a regular inner one stays ragged.

    >>> c, r = partition(IterDomain(10), [0, 3, 8, 10])
    >>> merge(r, IterDomain(4)).extents
    (12, 20, 8)
    """
    _plain("merge", outer), _plain("merge", inner)
    if isinstance(inner, RaggedIterDomain):
        if inner.component is outer or (inner.pairing is not None and inner.pairing == outer.pairing):
            raise DomainError(f"merge({outer}, {inner}): a component and its ragged domain have no common width; use combine")
        raise DomainError(f"merge({outer}, {inner}): the outer domain does not own the ragged one, so rows have no common width")
    if isinstance(outer, RaggedIterDomain) and _picks(inner, outer.component):
        raise DomainError(f"merge({outer}, {inner}): the inner domain picks the row that the outer one lies in")
    if outer.iter_type is not inner.iter_type:
        kinds = f"{outer.iter_type.name.lower()} and {inner.iter_type.name.lower()}"
        raise DomainError(f"merge({outer}, {inner}): one domain cannot be both {kinds}")

    def make() -> Outputs:
        name = f"{outer.name}{inner.name}"
        if isinstance(outer, RaggedIterDomain):
            length = outer.length * inner.extent_expr
            start = None if outer.start is None else outer.start * inner.extent_expr
            output: IterDomain = RaggedIterDomain(
                outer.extent_expr * inner.extent_expr,
                iter_type=outer.iter_type,
                name=name,
                pairing=outer.pairing,
                component=outer.component,
                length=length,
                start=start,
                bound=outer.host_bound * inner.host_bound,
            )
        else:
            known = outer.bound is None and inner.bound is None
            bound = None if known else outer.host_bound * inner.host_bound
            output = IterDomain(outer.extent_expr * inner.extent_expr, outer.iter_type, name=name, bound=bound)
        return _finish(Merge((outer, inner), ()), (output,))

    return _once(outer, ("merge", inner.uid), make)[0]


def _picks(domain: IterDomain, component: IterDomain) -> bool:
    """Whether the index of `component` depends on that of `domain`."""
    if isinstance(component.definition, Merge) and any(_picks(domain, part) for part in component.definition.inputs):
        return True
    sources = domain.definition.inputs if domain.definition else ()
    return domain.uid == component.uid or any(_picks(source, component) for source in sources)


def partition(
    domain: IterDomain,
    offsets: Sequence[int] | Sequence[Sequence[int]] | Array | torch.Tensor,
    count: int | Expr | None = None,
    *,
    names: tuple[str, str] | None = None,
) -> tuple[IterDomain, RaggedIterDomain]:
    """I -> (C, R) by K+1 boundaries. A ragged input takes one row of K+1 boundaries for each of its components.

    >>> c, r = partition(IterDomain(325), [0, 127, 127, 325])
    >>> c.extent, r.extents, r.extent, r.offsets
    (3, (127, 0, 198), 325, (0, 127, 127, 325))
    """
    _plain("partition", domain)
    if domain.iter_type is not IterType.ITERATION:
        raise DomainError(f"partition: {domain} is a {domain.iter_type.name.lower()} domain; only iteration domains have parts")
    if domain.parallel is not ParallelType.SERIAL:
        raise DomainError(f"partition: {domain} is already parallelized; partition it first, then parallelize the parts")
    if isinstance(offsets, Array):
        if isinstance(domain, RaggedIterDomain):
            raise DomainError(
                f"partition of ragged {domain}: needs one row of offsets for each component, got the array {offsets}"
            )
        if count is None:
            raise DomainError(f"partition by {offsets}: the number of components must be given")
        number = as_expr(count)
        if offsets.data is not None and number.value is not None:
            _check_boundaries(offsets.data[: number.value + 1], domain.extent_expr.value)
        return _partition_by(domain, offsets, number, names)
    rows = _integers(offsets)
    if isinstance(domain, RaggedIterDomain):
        return _partition_inner(domain, rows, names)
    if not all(isinstance(b, int) for b in rows):
        raise DomainError(
            f"partition: offsets of {domain} must have one dim, because no ragged or component dim precedes it; got {rows}"
        )
    boundaries = cast(tuple[int, ...], rows)
    _check_boundaries(boundaries, domain.extent_expr.value)
    return _partition_by(domain, Array(f"offsets{list(boundaries)}", boundaries), const(len(boundaries) - 1), names)


def _integers(offsets: object) -> tuple[NestedInts, ...]:
    """Offsets as nested tuples of ints."""
    if isinstance(offsets, torch.Tensor):
        if offsets.is_floating_point() or offsets.ndim == 0:
            raise DomainError(f"partition: offsets must be integers, one row or more, got {offsets.dtype} of {offsets.ndim} dims")
        offsets = offsets.tolist()
    if not isinstance(offsets, Sequence) or isinstance(offsets, str):
        raise DomainError(f"partition: offsets must be integers, got {offsets!r}")
    if any(not isinstance(b, int) and (not isinstance(b, Sequence) or isinstance(b, str)) for b in offsets):
        raise DomainError(f"partition: offsets must be integers, got {list(offsets)}")
    return tuple(b if isinstance(b, int) else _integers(b) for b in offsets)


def _check_boundaries(boundaries: tuple[int, ...], total: int | None) -> None:
    if not boundaries or boundaries[0] != 0:
        raise DomainError(f"partition: offsets must start at 0, got {list(boundaries[:1])}")
    for k in range(1, len(boundaries)):
        if boundaries[k] < boundaries[k - 1]:
            raise DomainError(
                f"partition: offsets must not decrease: offsets[{k}] = {boundaries[k]} < offsets[{k - 1}] = {boundaries[k - 1]}"
            )
    if total is not None and boundaries[-1] != total:
        raise DomainError(f"partition: offsets must end at the extent {total}, got {boundaries[-1]}")


def _partition_by(
    domain: IterDomain, offsets: Array, count: Expr, names: tuple[str, str] | None
) -> tuple[IterDomain, RaggedIterDomain]:
    component_name, ragged_name = names or (f"{domain.name}c", f"{domain.name}r")

    def make() -> Outputs:
        component = IterDomain(count, name=component_name, pairing=offsets)
        ragged = RaggedIterDomain(
            domain.extent_expr,
            name=ragged_name,
            pairing=offsets,
            component=component,
            length=offsets[COORDINATE + 1] - offsets[COORDINATE],
            start=offsets[COORDINATE],
        )
        return _finish(Partition((domain,), ()), (component, ragged))

    made = _once(domain, ("partition", offsets, count), make)
    return cast(tuple[IterDomain, RaggedIterDomain], made)


def _partition_inner(
    domain: RaggedIterDomain, offsets: tuple[NestedInts, ...], names: tuple[str, str] | None
) -> tuple[IterDomain, RaggedIterDomain]:
    """Same number of parts in every component: the parts of all components, flattened, own the new ragged domain."""
    rows, lengths = _rows(offsets), _flat(domain.extents)
    if len(rows) != len(lengths):
        raise DomainError(
            f"partition of ragged {domain}: expected one row of offsets for each of {len(lengths)} components, got {len(rows)}"
        )
    width = len(rows[0]) - 1 if rows else 0
    flat = [0]
    for row, length in zip(rows, lengths, strict=True):
        if len(row) - 1 != width:
            raise DomainError(
                f"partition of ragged {domain}: every component must have {width} parts, got the offsets {list(row)}"
            )
        _check_boundaries(row, length)
        base = flat[-1]
        flat.extend(base + boundary for boundary in row[1:])
    starts = Array(f"offsets{flat}", tuple(flat))
    component_name, ragged_name = names or (f"{domain.name}c", f"{domain.name}r")

    def make() -> Outputs:
        part = IterDomain(width, name=component_name, pairing=starts)
        ragged = RaggedIterDomain(
            domain.extent_expr,
            name=ragged_name,
            pairing=starts,
            component=merge(domain.component, part),
            length=starts[COORDINATE + 1] - starts[COORDINATE],
            start=starts[COORDINATE],
        )
        return _finish(PartitionInner((domain,), (), starts), (part, ragged))

    return cast(tuple[IterDomain, RaggedIterDomain], _once(domain, ("partition", starts, width), make))


def _rows(offsets: NestedInts) -> list[tuple[int, ...]]:
    """The innermost rows of nested offsets, in order."""
    if isinstance(offsets, int):
        raise DomainError(f"partition of a ragged domain: expected rows of offsets, got {offsets}")
    if offsets and all(isinstance(b, int) for b in offsets):
        return [cast(tuple[int, ...], offsets)]
    return [row for inner in offsets for row in _rows(inner)]


def _flat(extents: NestedInts) -> list[int]:
    return [extents] if isinstance(extents, int) else [length for inner in extents for length in _flat(inner)]


def offsets_array(ragged: RaggedIterDomain) -> Array:
    """The array whose element c is where row c begins when all rows are laid back to back."""
    if ragged.start is not None:
        arrays = list(ragged.start.arrays)
        if len(arrays) == 1 and ragged.start is arrays[0][COORDINATE]:
            return arrays[0]
    return running_sum(ragged.component, ragged.length)


def combine(component: IterDomain, ragged: IterDomain) -> IterDomain:
    """(C, R) -> I, the inverse of partition: gives back the very domain that was partitioned, be it regular or ragged.

    >>> d = IterDomain(325)
    >>> combine(*partition(d, [0, 127, 127, 325])) is d
    True
    """
    _plain("combine", component), _plain("combine", ragged)
    if not isinstance(ragged, RaggedIterDomain):
        raise DomainError(f"combine: the second domain must be ragged, got {ragged}; use merge for regular ones")
    owner = component.definition.inputs[0] if isinstance(component.definition, Partition) else None
    if isinstance(component, RaggedIterDomain) and ragged.component is owner:
        return _combine_inner(component, ragged)
    if ragged.component is not component:
        if component.pairing is None or ragged.pairing is None:
            paired = component.pairing is None and ragged.pairing is None and component.extent == ragged.component.extent
        else:
            paired = component.pairing == ragged.pairing
        # Both sides of a pair carry its identity, so a ragged domain could pass for the component of another one.
        if not paired or isinstance(component, RaggedIterDomain):
            raise StructureMismatch(
                f"combine: {component} counts the components of {component.pairing or 'no partition'}, "
                f"but {ragged} belongs to {ragged.pairing or ragged.component}; pass the component it was made with"
            )
    made = ragged.definition
    if isinstance(made, Partition | PartitionInner) and made.outputs[0] is component and made.outputs[1] is ragged:
        return made.inputs[0]
    if isinstance(component.definition, PartitionInner):
        group = cast(RaggedIterDomain, component.definition.inputs[0]).component
        raise DomainError(
            f"combine: {component} counts the parts of one row and {ragged} was transformed since; combine them before that, "
            f"or combine merge({group}, {component}) with it"
        )

    def make() -> Outputs:
        offsets = offsets_array(ragged)
        total = offsets[ragged.component.extent_expr]
        output = IterDomain(total, name=f"{component.name}{ragged.name}", bound=ragged.host_bound)
        return _finish(Combine((component, ragged), (), offsets), (output,))

    return _once(component, ("combine", ragged.uid), make)[0]


def _combine_inner(component: RaggedIterDomain, ragged: RaggedIterDomain) -> IterDomain:
    if ragged.start is None:
        raise DomainError(f"combine: the rows of {ragged} have no common place; combine before splitting")
    start = ragged.start

    def make() -> Outputs:
        first = start.substitute({COORDINATE: component.start_of(COORDINATE)})
        behind = start.substitute({COORDINATE: component.start_of(COORDINATE) + component.length_of(COORDINATE)})
        output = RaggedIterDomain(
            ragged.extent_expr,
            name=f"{component.name}{ragged.name}",
            pairing=component.pairing,
            component=component.component,
            length=behind - first,
            start=first,
        )
        return _finish(CombineInner((component, ragged), ()), (output,))

    return _once(component, ("combine", ragged.uid), make)[0]


def cover(ragged: IterDomain, bound: Expr | int, group: IterDomain | None = None) -> IterDomain:
    """R -> positions up to `bound`, at least the longest row it stands for; shorter rows leave holes.

    With `group`, a domain whose positions are groups of components, `bound` is an expression in COORDINATE: the longest
    row of that group.
    """
    _plain("cover", ragged)
    if not isinstance(ragged, RaggedIterDomain):
        raise DomainError(f"cover: expected a ragged domain, got {ragged}; a regular domain covers itself")
    name, length = f"{ragged.name}x", _size("cover: the bound", bound)
    longest = _longest(ragged)
    if group is None and length.value is not None and longest is not None and length.value < longest:
        raise DomainError(f"cover: {ragged} has a row of {longest}, which is longer than the bound {length}")

    def make() -> Outputs:
        output = IterDomain(length, name=name)
        if group is not None:
            output = RaggedIterDomain(_total(group, length), name=name, component=group, length=length)
        return _finish(Cover((ragged,), (), const(0)), (output,))

    return _once(ragged, ("cover", length, None if group is None else group.uid), make)[0]


def _longest(ragged: RaggedIterDomain) -> int | None:
    """The longest row, where lengths are known."""
    try:
        return max(_flat(ragged.extents), default=0)
    except DomainError:
        return None


def restrict(domain: IterDomain, low: Expr | int, high: Expr | int) -> IterDomain:
    """I -> its positions from `low` (included) to `high` (not included), as a domain of its own.

    >>> restrict(IterDomain(10), 2, 7).extent
    5
    """
    _plain("restrict", domain)
    low, high = _size("restrict: the lower bound", low), _size("restrict: the upper bound", high)
    if low.bounds[0] is None or low.bounds[0] < 0:
        raise DomainError(f"restrict: the lower bound must not be negative, got {low}")

    def make() -> Outputs:
        output = IterDomain(maximum(high - low, 0), name=f"{domain.name}s")
        return _finish(Restrict((domain,), (), low), (output,))

    return _once(domain, ("restrict", low, high), make)[0]
