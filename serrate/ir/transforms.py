"""Transforms: expressions from domains to domains, and the rules by which indices travel through them.

In: domains. Out: new domains whose `definition` is the transform that made them. Every transform knows its index rule in
both directions: `to_inputs` (indices of its outputs known, those of its inputs wanted: how a loop finds its elements) and
`to_outputs` (the other way). Applying the same transform to the same domain twice gives the same domains, so two loops
that split a row alike share their domains. Those that make or undo rows are in `ragged_transforms`.

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
from serrate.ir.domains import COORDINATE, IterDomain, NestedInts
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
        """The transform in a word or two, with its arguments."""
        return type(self).__name__.lower()

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        """The domains whose index the rules read besides those of inputs and outputs: which row all of these lie in."""
        return ()

    @property
    def ties(self) -> tuple[tuple[IterDomain, IterDomain], ...]:
        """Pairs of domains that have one index because this transform took one for the other."""
        return ()

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        """Indices of the inputs from those of the outputs."""
        raise NotImplementedError

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        """Indices of the outputs from those of the inputs."""
        raise NotImplementedError

    @property
    def nests(self) -> bool:
        """Whether its output counts the parts of its first input: rows owned by the output are then nested."""
        return False

    def nest(self, component: IterDomain, flat: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
        """A flat tuple over `component` (an output) in the shape the components are nested in."""
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
            # The same transform of the same domain finds these outputs again.
            source.derived[tuple(k.here if isinstance(k, Uid) else k for k in key)] = self.outputs

    def __str__(self) -> str:
        beside = f" beside {', '.join(map(str, self.beside))}" if self.beside else ""
        return f"{self.label}: {', '.join(map(str, self.inputs))}{beside} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, eq=False)
class Split(Transform):
    """I -> (O, In) with i = o*(extent of In) + n, row by row where I is ragged."""

    factor: Expr
    inner: bool = True

    @property
    def label(self) -> str:
        return f"split {self.factor}" if self.inner else f"outer split {self.factor}"

    @property
    def beside(self) -> tuple[IterDomain, ...]:
        # An inner factor is the same in all rows; an outer one makes inner parts that differ.
        return self.outputs[1].owners

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        outer, inner = (known[d.uid] for d in self.outputs)
        return (outer * self.outputs[1].extent_at(known) + inner,)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        index, size = known[self.inputs[0].uid], divisor(self.outputs[1].extent_at(known), ragged=self.outputs[1].is_ragged)
        return (index // size, index % size)

    @property
    def divides(self) -> bool:
        """Whether the split is known to make no holes, in any row."""
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
    """I -> I' with i = i' + low: the positions of one counted from another place."""

    low: Expr

    def to_inputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.outputs[0].uid] + self._low(known),)

    def to_outputs(self, known: Known) -> tuple[Expr, ...]:
        return (known[self.inputs[0].uid] - self._low(known),)

    def _low(self, known: Known) -> Expr:
        return self.low


@dataclass(frozen=True, eq=False)
class Resize(Shift):
    """I -> I' with `left` positions before it and `right` positions behind it, fewer where they are negative."""

    left: Expr
    right: Expr

    @property
    def label(self) -> str:
        return f"resize {self.left}, {self.right}"


@dataclass(frozen=True, eq=False)
class Restrict(Shift):
    """I -> its positions from `low` on, up to `high`; of a ragged domain both may depend on the row."""

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
    """B beside A -> B' with b = b' xor (a mod Nb). Nb is a power of two, so this permutes the positions of B for every a."""

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
    """The outputs that this transform of `domain` made earlier, else new ones."""
    if key not in domain.derived:
        domain.derived[key] = make()
    return domain.derived[key]


def finish(transform: Transform, outputs: Outputs) -> Outputs:
    """Ties a new transform and its outputs to each other."""
    for output in outputs:
        object.__setattr__(output, "definition", transform)
    object.__setattr__(transform, "outputs", outputs)
    return outputs


def divisor(extent: Expr, *, ragged: bool = False) -> Expr:
    """An extent as something to divide by: an empty domain has no positions, so any divisor will do.

    A row may be empty in a program that divides in lanes where nothing exists, so its length is kept from being 0.
    """
    return maximum(extent, 1) if ragged or extent.value == 0 else extent


def size_of(what: str, value: int | Expr) -> Expr:
    """An argument as an expression; refuses what is neither an integer nor one."""
    try:
        return as_expr(value)
    except TypeError:
        raise DomainError(f"{what} must be an integer or an expression, got {value!r}") from None


def plain(function: str, domain: object) -> IterDomain:
    """The domain, if it is one that transforms apply to."""
    if not isinstance(domain, IterDomain):
        raise DomainError(f"{function}: expected an IterDomain, got {type(domain).__name__}")
    if domain.start != 0:
        raise DomainError(f"{function}: {domain} starts at {domain.start}; only domains that start at 0 have transforms")
    return domain


def split(domain: IterDomain, factor: int | Expr, *, inner: bool = True) -> tuple[IterDomain, IterDomain]:
    """I -> (O, In). With `inner` the factor is the inner extent, else the outer one. Always legal; holes are guarded.

    A ragged domain is split row by row: an inner factor gives ragged outer parts, an outer factor ragged inner ones.

    >>> [d.extent for d in split(IterDomain(6), 4)]
    [2, 4]
    """
    plain("split", domain)
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

    Legal where the inner domain has one width for every position of the outer one. A component and its rows have not: that
    is `combine`. Two ragged domains of one component have, row by row: that is `product`.

    >>> from serrate.ir import RaggedIterDomain
    >>> merge(RaggedIterDomain.from_extents([3, 5, 2]), IterDomain(4)).extents
    (12, 20, 8)
    """
    plain("merge", outer), plain("merge", inner)
    if inner.is_ragged:
        (component,) = inner.owners
        if component.uid == outer.uid or (inner.pairing is not None and inner.pairing == outer.pairing and not outer.is_ragged):
            raise DomainError(f"merge({outer}, {inner}): a component and its ragged domain have no common width; use combine")
        if any(d.uid == component.uid for d in outer.owners):
            raise DomainError(f"merge({outer}, {inner}): both are ragged, and a row of one differs from row to row; use product")
        raise DomainError(f"merge({outer}, {inner}): the outer domain does not own the ragged one, so rows have no common width")
    if any(picks(inner, component) for component in outer.owners):
        raise DomainError(f"merge({outer}, {inner}): the inner domain picks the row that the outer one lies in")
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
            # The index is that of the domain that was split, so it counts what that counts.
            output = replace(output, pairing=whole.pairing)
        return finish(Merge((outer, inner), ()), (output,))

    return once(outer, ("merge", inner.uid), make)[0]


def rejoined(outer: IterDomain, inner: IterDomain) -> IterDomain | None:
    """The domain that was split into these two without leaving holes, and so has the index of their merge; None if there is none.

    Either may have been split and merged again itself.
    """
    first, second = _with_index_of(outer), _with_index_of(inner)
    made = first.definition
    if not isinstance(made, Split) or made is not second.definition or not made.divides:
        return None
    return _with_index_of(made.inputs[0]) if [d.uid for d in made.outputs] == [first.uid, second.uid] else None


def _with_index_of(domain: IterDomain) -> IterDomain:
    """The domain that this one is the same index of: itself, or what it was split from and merged to again."""
    made = domain.definition
    whole = rejoined(*made.inputs) if type(made) is Merge else None
    return domain if whole is None else whole


def same_iter_type(function: str, outer: IterDomain, inner: IterDomain) -> None:
    """Refuses to make one domain of two kinds."""
    if outer.iter_type is not inner.iter_type:
        kinds = f"{outer.iter_type.name.lower()} and {inner.iter_type.name.lower()}"
        raise DomainError(f"{function}({outer}, {inner}): one domain cannot be both {kinds}")


def picks(domain: IterDomain, component: IterDomain) -> bool:
    """Whether the index of `component` depends on that of `domain`."""
    if isinstance(component.definition, Merge) and any(picks(domain, part) for part in component.definition.inputs):
        return True
    sources = domain.definition.inputs if domain.definition else ()
    return domain.uid == component.uid or any(picks(source, component) for source in sources)


def resize(domain: IterDomain, left: int | Expr, right: int | Expr) -> IterDomain:
    """I -> I' with `left` more positions before it and `right` more behind it; negative numbers take positions away.

    The positions that are added are holes. A ragged domain is resized row by row; a row has no fewer than 0 positions.

    >>> resize(IterDomain(6), 1, 1).extent, resize(IterDomain(6), -2, 0).extent
    (8, 4)
    """
    plain("resize", domain)
    before, behind = size_of("resize: the left size", left), size_of("resize: the right size", right)
    extent = domain.row_length + before + behind
    if not domain.is_ragged and extent.value is not None and extent.value < 0:
        raise DomainError(f"resize: {domain} has no {0 - before - behind} positions to take away")

    def make() -> Outputs:
        more = maximum(before + behind, 0)
        bound = domain.host_bound + (more * domain.owners[0].host_bound if domain.is_ragged else more)
        exact = domain.bound is None and not domain.is_ragged
        output = domain.with_rows(maximum(extent, 0), name=f"{domain.name}z", bound=None if exact else bound)
        return finish(Resize((domain,), (), 0 - before, before, behind), (output,))

    return once(domain, ("resize", before, behind), make)[0]


def swizzle(axis: IterDomain, domain: IterDomain) -> tuple[IterDomain, IterDomain]:
    """(A, B) -> (A, B') with b' = b xor a: the positions of B in another order for each a. A is kept as it is.

    Legal for regular domains whose extents are known powers of two: only there does xor give every position once. Where A is
    longer than B, only as many low bits of a are used as B has.

    >>> a, b = IterDomain(4), IterDomain(8)
    >>> swizzled = swizzle(a, b)[1]
    >>> [swizzled.definition.to_outputs({a.uid: as_expr(3), b.uid: as_expr(k)})[0].value for k in range(8)]
    [3, 2, 1, 0, 7, 6, 5, 4]
    """
    plain("swizzle", axis), plain("swizzle", domain)
    if axis.uid == domain.uid:
        raise DomainError(f"swizzle: {domain} cannot be swizzled by itself")
    for each in (axis, domain):
        if each.is_ragged:
            raise DomainError(f"swizzle: {each} is ragged; only regular domains have a power of two as extent in every row")
        size = each.extent_expr.value
        if size is None or size < 1 or size & (size - 1):
            raise DomainError(f"swizzle: extents must be known powers of two, got {each}")

    def make() -> Outputs:
        output = domain.with_rows(domain.extent_expr, name=f"{domain.name}x", bound=domain.bound)
        return finish(Swizzle((domain,), (), axis), (output,))

    return axis, once(domain, ("swizzle", axis.uid), make)[0]


def restrict(domain: IterDomain, low: Expr | int, high: Expr | int) -> IterDomain:
    """I -> its positions from `low` (included) to `high` (not included), as a domain of its own.

    A ragged domain stays ragged, the bounds may be expressions in COORDINATE, and rows that end before `high` end there. A
    regular sub-range that may reach past the end is guarded.

    >>> restrict(IterDomain(10), 2, 7).extent
    5
    """
    plain("restrict", domain)
    low, high = size_of("restrict: the lower bound", low), size_of("restrict: the upper bound", high)
    if low.bounds[0] is None or low.bounds[0] < 0:
        raise DomainError(f"restrict: the lower bound must not be negative, got {low}")

    def make() -> Outputs:
        end = minimum(high, domain.row_length) if domain.is_ragged else high
        bound = domain.host_bound if domain.is_ragged else None
        output = domain.with_rows(maximum(end - low, 0), name=f"{domain.name}s", bound=bound)
        return finish(Restrict((domain,), (), low, high), (output,))

    return once(domain, ("restrict", low, high), make)[0]
