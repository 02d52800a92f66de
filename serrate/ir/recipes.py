"""Recipes: how derived arrays are computed from others. The runtime computes each array once per structure.

In: expressions over arrays. Out: frozen records that say what to compute; nothing is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from serrate.ir.expr import Array, Expr, Symbol


@dataclass(frozen=True)
class PerComponent:
    """Computed from `f(0), f(1), ...`, where `f` is `term` as a function of `coordinate`, for `count` components."""

    term: Expr
    coordinate: Symbol
    count: Expr

    @property
    def arrays(self) -> frozenset[Array]:
        """The arrays that are read."""
        return self.term.arrays | self.count.arrays

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The extents that must be known."""
        return (self.term.symbols | self.count.symbols) - {self.coordinate}


@dataclass(frozen=True)
class RunningSum(PerComponent):
    """`[0, f(0), f(0)+f(1), ...]`. With `most`, elements are clamped to it, and negative terms to 0."""

    most: Expr | None = None

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The extents that must be known."""
        return super().symbols | (frozenset() if self.most is None else self.most.symbols)


class Largest(PerComponent):
    """One element: the largest `f(c)` of all components, or 0 if there are none."""


@dataclass(frozen=True)
class GroupMaximum(PerComponent):
    """Element g is the largest `f(c)` among the components `g*size .. (g+1)*size-1`."""

    size: int


@dataclass(frozen=True)
class Order(PerComponent):
    """The components, sorted by `f(c)` within each run of `size` components; the sort is stable."""

    size: int


@dataclass(frozen=True)
class InverseOrder:
    """The inverse of a permutation: element `order[i]` is i."""

    order: Array

    @property
    def arrays(self) -> frozenset[Array]:
        """The arrays that are read."""
        return frozenset((self.order,))

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The extents that must be known."""
        return frozenset()


@dataclass(frozen=True)
class Owners:
    """Element i is the component that owns position i under `offsets`; `size` elements."""

    offsets: Array
    count: Expr
    size: Expr

    @property
    def arrays(self) -> frozenset[Array]:
        """The arrays that are read."""
        return frozenset((self.offsets,))

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The extents that must be known."""
        return self.count.symbols | self.size.symbols


@dataclass(frozen=True)
class Joined:
    """The running sum of several concatenated lists of lengths."""

    terms: tuple[Expr, ...]
    coordinate: Symbol
    counts: tuple[Expr, ...]

    @property
    def arrays(self) -> frozenset[Array]:
        """The arrays that are read."""
        return frozenset(a for e in (*self.terms, *self.counts) for a in e.arrays)

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The extents that must be known."""
        return frozenset(s for e in (*self.terms, *self.counts) for s in e.symbols) - {self.coordinate}


Recipe = PerComponent | Owners | Joined | InverseOrder
