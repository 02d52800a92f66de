"""Transforms: expressions from domains to domains, and their index rules.

In: domains. Out: new domains whose `definition` is the transform that made them. Every transform has an index rule in both
directions: `to_inputs` computes the indices of its inputs from those of its outputs, as a loop does to find its elements;
`to_outputs` is the reverse. Applying the same transform to the same domain twice returns the same domains, so two loops that
split a row alike share their domains. Transforms that create or undo rows are in `ragged_transforms`.

| transform        | from -> to           | to_inputs                    | extents                      |
| split f          | I -> (O, In)         | i = o*f + n                  | ceil(N/f), f                 |
|   outer split f: i = o*ceil(N/f) + n; of a ragged domain both work row by row                        |
| merge            | (A, B) -> M          | a = m // Nb, b = m % Nb      | Na*Nb                        |
| resize L, R      | I -> I'              | i = i' - L                   | N + L + R                    |
| swizzle          | B beside A -> B'     | b = b' xor a                 | Nb, a power of two           |
| restrict lo, hi  | I -> sub-range       | i = i' + lo                  | hi - lo                      |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import cast

from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain, NestedInts, ParallelType
from serrate.ir.expr import Expr, as_expr, ceildiv, maximum, minimum
from serrate.ir.uids import Uid, sent

Known = Mapping[int, Expr]
"""Index expressions by domain uid."""

Outputs = tuple[IterDomain, ...]


@dataclass(frozen=True, eq=False)
class Transform:
    """One expression from `inputs` to `outputs`; outputs are filled in right after construction.

    >>> print(split(IterDomain(6, name="i"), 4)[0].definition)
    split 4: i.i{6} -> i.io{2}, i.ii{4}
    """

    inputs: tuple[IterDomain, ...]
    outputs: tuple[IterDomain, ...]

    @property
    def label(self) -> str:
        """The name of the transform, with its arguments."""
        return type(self).__name__.lower()

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        """Other domains whose index the rules read: those that select the row."""
        return ()

    @property
    def ties(self) -> tuple[tuple[IterDomain, IterDomain], ...]:
        """Pairs of domains with equal indices, because this transform accepted one in place of the other."""
        return ()

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        """Indices of the inputs from those of the outputs."""
        raise NotImplementedError

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        """Indices of the outputs from those of the inputs."""
        raise NotImplementedError

    @property
    def nests(self) -> bool:
        """Whether rows owned by its output are nested: the output indexes the parts of its first input."""
        return False

    def nest(self, component: IterDomain, flat: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
        """A flat tuple over `component` (an output), nested like the components."""
        return flat

    def __reduce__(self) -> tuple[object, ...]:
        about = {d.uid for d in (*self.inputs, *self.outputs, *self.beside)}
        found = [
            (source, tuple(sent(k) if isinstance(k, int) and k in about else k for k in key))
            for source in self.inputs
            for key, outputs in source.derived.items()
            if outputs is self.outputs and isinstance(key, tuple)
        ]
        return (object.__new__, (type(self),), ({f.name: getattr(self, f.name) for f in fields(self)}, found))

    def __setstate__(self, state: tuple[dict[str, object], list[tuple[IterDomain, tuple[object, ...]]]]) -> None:
        own, found = state
        for name, value in own.items():
            object.__setattr__(self, name, value)
        for source, key in found:
            # The same transform of the same domain must return these outputs.
            source.derived[tuple(k.here if isinstance(k, Uid) else k for k in key)] = self.outputs

    def __str__(self) -> str:
        beside = f" beside {', '.join(map(str, self.beside))}" if self.beside else ""
        return f"{self.label}: {', '.join(map(str, self.inputs))}{beside} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, eq=False)
class Split(Transform):
    """I -> (O, In) with i = o*(extent of In) + n, row by row if I is ragged."""

    factor: Expr
    inner: bool = True

    @property
    def label(self) -> str:
        return f"split {self.factor}" if self.inner else f"outer split {self.factor}"

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        # An inner factor is the same in all rows; with an outer factor the inner extent depends on the row.
        return self.outputs[1].owners

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        outer, inner = (known[d.uid] for d in self.outputs)
        return (outer * self.outputs[1].extent_at(known) + inner,)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        index, size = known[self.inputs[0].uid], divisor(self.outputs[1].extent_at(known), ragged=self.outputs[1].is_ragged)
        return (index // size, index % size)

    @property
    def divides(self) -> bool:
        """Whether the split is known to leave no holes in any row."""
        return (self.inputs[0].row_length - self.outputs[0].row_length * self.outputs[1].row_length).value == 0


@dataclass(frozen=True, eq=False)
class Merge(Transform):
    """(A, B) -> M with a = m // Nb, b = m % Nb."""

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return self.inputs[1].owners

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        index, size = known[self.outputs[0].uid], divisor(self.inputs[1].extent_at(known), ragged=self.inputs[1].is_ragged)
        return (index // size, index % size)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        outer, inner = (known[d.uid] for d in self.inputs)
        return (outer * self.inputs[1].extent_at(known) + inner,)

    @property
    def nests(self) -> bool:
        return True

    def nest(self, component: IterDomain, flat: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
        outer = self.inputs[0]
        count, size = (cast(int, d.extent_expr.value) for d in self.inputs)
        groups = tuple(flat[k * size : (k + 1) * size] for k in range(count))
        return outer.definition.nest(outer, groups) if outer.definition else groups


@dataclass(frozen=True, eq=False)
class Shift(Transform):
    """I -> I' with i = i' + low: the same positions, counted from another origin."""

    low: Expr

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.outputs[0].uid] + self._low(known),)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.inputs[0].uid] - self._low(known),)

    def _low(self, known: Known) -> Expr:
        return self.low


@dataclass(frozen=True, eq=False)
class Resize(Shift):
    """I -> I' with `left` positions added before and `right` after; negative numbers remove positions."""

    left: Expr
    right: Expr

    @property
    def label(self) -> str:
        return f"resize {self.left}, {self.right}"


@dataclass(frozen=True, eq=False)
class Restrict(Shift):
    """I -> its positions from `low` up to `high`; both may depend on the row if the domain is ragged."""

    high: Expr

    @property
    def label(self) -> str:
        return f"restrict {self.low}, {self.high}"

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return self.inputs[0].owners if COORDINATE in self.low.symbols else ()

    def _low(self, known: Known) -> Expr:
        return self.inputs[0].in_row(self.low, known)


@dataclass(frozen=True, eq=False)
class Swizzle(Transform):
    """B beside A -> B' with b = b' xor (a mod Nb). Nb is a power of two, so for every a this is a permutation of B."""

    axis: IterDomain

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        return (self.axis,)

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.outputs[0].uid] ^ self._bits(known),)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.inputs[0].uid] ^ self._bits(known),)

    def _bits(self, known: Known) -> Expr:
        return known[self.axis.uid] % self.inputs[0].extent_expr


def once(domain: IterDomain, key: tuple[Hashable, ...], make: Callable[[], Outputs]) -> Outputs:
    """The outputs of this transform of `domain`, created on first use."""
    if key not in domain.derived:
        domain.derived[key] = make()
    return domain.derived[key]


def finish(transform: Transform, outputs: Outputs) -> Outputs:
    """Links a new transform and its outputs."""
    for output in outputs:
        object.__setattr__(output, "definition", transform)
    object.__setattr__(transform, "outputs", outputs)
    return outputs


def entangled(one: IterDomain, other: IterDomain) -> bool:
    """Whether the index of one domain restricts that of the other, so that they cannot both be dims of one tensor.

    One is made from the other, or both are made from a third domain. Outputs of one transform have independent indices.

    >>> whole = IterDomain(6)
    >>> outer, inner = split(whole, 3)
    >>> entangled(outer, inner), entangled(outer, whole), entangled(outer, split(whole, 2)[0])
    (False, True, True)
    """
    if one.uid == other.uid:
        return True
    if one.definition is None and other.definition is None:
        return False
    uses, others = _uses(one), _uses(other)
    return any(
        not uses[uid] or not others[uid] or any(a is not b for a in uses[uid] for b in others[uid])
        for uid in uses.keys() & others.keys()
    )


def _uses(domain: IterDomain) -> dict[int, list[Transform]]:
    """The domains that a domain is made from, by uid, each with the transforms of it that lead there; none for the domain."""
    found: dict[int, list[Transform]] = {domain.uid: []}
    todo = [domain]
    while todo:
        made = todo.pop().definition
        if made is not None:
            todo += [source for source in made.inputs if source.uid not in found]
            for source in made.inputs:
                found.setdefault(source.uid, []).append(made)
    return found


def divisor(extent: Expr, *, ragged: bool = False) -> Expr:
    """An extent as a divisor: for an empty domain, which has no positions, any divisor will do.

    A row may be empty in a program that divides even in holes, so its length is clamped to at least 1.
    """
    return maximum(extent, 1) if ragged or extent.value == 0 else extent


def size_of(what: str, value: int | Expr) -> Expr:
    """An argument as an expression; raises unless it is an integer or an expression."""
    try:
        return as_expr(value)
    except TypeError:
        raise DomainError(f"{what} must be an integer or an expression, got {value!r}") from None


def plain(function: str, domain: object) -> IterDomain:
    """The domain, if it can be transformed; raises otherwise."""
    if not isinstance(domain, IterDomain):
        raise DomainError(f"{function}: expected an IterDomain, got {type(domain).__name__}")
    if domain.start != 0:
        raise DomainError(f"{function}: {domain} starts at {domain.start}; only domains that start at 0 can be transformed")
    return domain


def serial(function: str, domain: object) -> IterDomain:
    """The domain, if it can be transformed and has no parallel type, which the results would not have."""
    found = plain(function, domain)
    if found.parallel is not ParallelType.SERIAL:
        raise DomainError(f"{function}: {found} is already parallelized; {function} it first, then parallelize the parts")
    return found


def split(domain: IterDomain, factor: int | Expr, *, inner: bool = True) -> tuple[IterDomain, IterDomain]:
    """I -> (O, In). The factor is the inner extent, or the outer one if not `inner`. Always legal; holes are guarded.

    A ragged domain is split row by row: an inner factor gives ragged outer parts, an outer factor ragged inner ones.

    >>> [d.extent for d in split(IterDomain(6), 4)]
    [2, 4]
    """
    serial("split", domain)
    size = size_of("split: a factor", factor)
    if size.value is not None and size.value < 1:
        raise DomainError(f"split: a factor must be at least 1, got {size}")

    def make() -> Outputs:
        names = (f"{domain.name}o", f"{domain.name}i")
        parts = ceildiv(domain.row_length, size)
        per_row = domain.with_rows(parts, name=names[0 if inner else 1], bound=domain.bound_in_parts(size))
        same = IterDomain(size, domain.iter_type, name=names[1 if inner else 0])
        return finish(Split((domain,), (), size, inner), (per_row, same) if inner else (same, per_row))

    return cast(tuple[IterDomain, IterDomain], once(domain, ("split", size, inner), make))


def merge(outer: IterDomain, inner: IterDomain) -> IterDomain:
    """(A, B) -> M. A ragged outer domain with a regular inner one stays ragged.

    Legal if the inner domain has the same width at every position of the outer one. For a component and its rows, which do not,
    use `combine`; for two ragged domains of one component, use `product`.

    >>> from serrate.ir import RaggedIterDomain
    >>> merge(RaggedIterDomain.from_extents([3, 5, 2]), IterDomain(4)).extents
    (12, 20, 8)
    """
    serial("merge", outer), serial("merge", inner)
    if inner.is_ragged:
        (component,) = inner.owners
        if component.uid == outer.uid or (inner.pairing is not None and inner.pairing == outer.pairing and not outer.is_ragged):
            raise DomainError(f"merge({outer}, {inner}): a component and its ragged domain have no common width; use combine")
        if any(d.uid == component.uid for d in outer.owners):
            raise DomainError(f"merge({outer}, {inner}): both are ragged; use product, which merges row by row")
        raise DomainError(f"merge({outer}, {inner}): the outer domain does not own the ragged one, so rows have no common width")
    if any(picks(inner, component) for component in outer.owners):
        raise DomainError(f"merge({outer}, {inner}): the inner domain selects the row of the outer one")
    same_iter_type("merge", outer, inner)

    def make() -> Outputs:
        exact = outer.bound is None and inner.bound is None and not outer.is_ragged
        output = outer.with_rows(
            outer.row_length * inner.extent_expr,
            name=f"{outer.name}{inner.name}",
            bound=None if exact else outer.host_bound * inner.host_bound,
            total=outer.extent_expr * inner.extent_expr,
        )
        whole = rejoined(outer, inner)
        if whole is not None and not whole.is_ragged:
            # The index is that of the domain that was split, so it indexes the same rows.
            output = replace(output, pairing=whole.pairing)
        return finish(Merge((outer, inner), ()), (output,))

    return once(outer, ("merge", inner.uid), make)[0]


def rejoined(outer: IterDomain, inner: IterDomain) -> IterDomain | None:
    """The domain that was split into these two without holes, whose index their merge has; None if they do not come from one.

    Either may itself have been split and merged again.
    """
    first, second = _with_index_of(outer), _with_index_of(inner)
    made = first.definition
    if not isinstance(made, Split) or made is not second.definition or not made.divides:
        return None
    return _with_index_of(made.inputs[0]) if [d.uid for d in made.outputs] == [first.uid, second.uid] else None


def _with_index_of(domain: IterDomain) -> IterDomain:
    """The domain with the same index: itself, or the one that was split and merged back into it."""
    made = domain.definition
    whole = rejoined(*made.inputs) if type(made) is Merge else None
    return domain if whole is None else whole


def same_iter_type(function: str, outer: IterDomain, inner: IterDomain) -> None:
    """Raises if two domains with different iter types would become one."""
    if outer.iter_type is not inner.iter_type:
        kinds = f"{outer.iter_type.name.lower()} and {inner.iter_type.name.lower()}"
        raise DomainError(f"{function}({outer}, {inner}): one domain cannot be both {kinds}")


def picks(domain: IterDomain, component: IterDomain) -> bool:
    """Whether the index of `component` depends on that of `domain`."""
    made = component.definition
    if made is not None and made.nests and any(picks(domain, part) for part in made.inputs):
        return True
    sources = domain.definition.inputs if domain.definition else ()
    return domain.uid == component.uid or any(picks(source, component) for source in sources)


def resize(domain: IterDomain, left: int | Expr, right: int | Expr) -> IterDomain:
    """I -> I' with `left` positions added before and `right` after; negative numbers remove positions.

    Added positions are holes. A ragged domain is resized row by row; a row never gets fewer than 0 positions.

    >>> resize(IterDomain(6), 1, 1).extent, resize(IterDomain(6), -2, 0).extent
    (8, 4)
    """
    serial("resize", domain)
    before, after = size_of("resize: the left size", left), size_of("resize: the right size", right)
    extent = domain.row_length + before + after
    if not domain.is_ragged and extent.value is not None and extent.value < 0:
        raise DomainError(f"resize: cannot remove {0 - before - after} positions from {domain}")

    def make() -> Outputs:
        more = maximum(before + after, 0)
        bound = domain.host_bound + (more * domain.owners[0].host_bound if domain.is_ragged else more)
        exact = domain.bound is None and not domain.is_ragged
        output = domain.with_rows(maximum(extent, 0), name=f"{domain.name}z", bound=None if exact else bound)
        return finish(Resize((domain,), (), 0 - before, before, after), (output,))

    return once(domain, ("resize", before, after), make)[0]


def swizzle(axis: IterDomain, domain: IterDomain) -> tuple[IterDomain, IterDomain]:
    """(A, B) -> (A, B') with b' = b xor a: the positions of B in a different order for each a. A is unchanged.

    Legal for regular domains whose extents are known powers of two, where xor is a permutation. If A is longer than B, only the
    low bits of a that B has are used.

    >>> a, b = IterDomain(4), IterDomain(8)
    >>> swizzled = swizzle(a, b)[1]
    >>> [swizzled.definition.to_outputs({a.uid: as_expr(3), b.uid: as_expr(k)})[0].value for k in range(8)]
    [3, 2, 1, 0, 7, 6, 5, 4]
    """
    serial("swizzle", axis), serial("swizzle", domain)
    if axis.uid == domain.uid:
        raise DomainError(f"swizzle: {domain} cannot be swizzled by itself")
    for each in (axis, domain):
        if each.is_ragged:
            raise DomainError(f"swizzle: {each} is ragged; only regular domains can be swizzled")
        size = each.extent_expr.value
        if size is None or size < 1 or size & (size - 1):
            raise DomainError(f"swizzle: extents must be known powers of two, got {each}")

    def make() -> Outputs:
        output = domain.with_rows(domain.extent_expr, name=f"{domain.name}x", bound=domain.bound)
        return finish(Swizzle((domain,), (), axis), (output,))

    return axis, once(domain, ("swizzle", axis.uid), make)[0]


def restrict(domain: IterDomain, low: Expr | int, high: Expr | int) -> IterDomain:
    """I -> its positions from `low` (inclusive) to `high` (exclusive), as a new domain.

    A ragged domain stays ragged, the bounds may be expressions in COORDINATE, and rows shorter than `high` keep their end. A
    regular sub-range that may extend past the end is guarded.

    >>> restrict(IterDomain(10), 2, 7).extent
    5
    """
    serial("restrict", domain)
    low, high = size_of("restrict: the lower bound", low), size_of("restrict: the upper bound", high)
    if low.bounds[0] is None or low.bounds[0] < 0:
        raise DomainError(f"restrict: the lower bound must not be negative, got {low}")

    def make() -> Outputs:
        end = minimum(high, domain.row_length) if domain.is_ragged else high
        bound = domain.host_bound if domain.is_ragged else None
        output = domain.with_rows(maximum(end - low, 0), name=f"{domain.name}s", bound=bound)
        return finish(Restrict((domain,), (), low, high), (output,))

    return once(domain, ("restrict", low, high), make)[0]
