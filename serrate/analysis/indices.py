"""Indices: index expressions of domains in terms of loop indices, through transforms in both directions.

In: index expressions of some domains (the loops). Out: the index expression of any domain that they determine. First, the indices
of all domains that the loops were derived from are computed, backwards through the transforms. Then the index of a requested
domain is computed forwards from its definition; there, a position finds its component by search.
"""

from __future__ import annotations

from collections.abc import Iterable

from serrate.errors import DomainError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, const
from serrate.ir.transforms import Transform


def ancestry(domains: Iterable[IterDomain]) -> list[Transform]:
    """Every transform that led to `domains`, nearest first."""
    found: dict[int, Transform] = {}
    order: list[Transform] = []
    pending = [d.definition for d in domains if d.definition is not None]
    while pending:
        transform = pending.pop(0)
        if id(transform) in found:
            continue
        found[id(transform)] = transform
        order.append(transform)
        pending.extend(d.definition for d in transform.inputs if d.definition is not None)
    return order


class Indices:
    """The index expressions determined by those of some domains.

    >>> from serrate.ir import IterDomain, split
    >>> from serrate.ir.expr import symbol
    >>> d = IterDomain(100)
    >>> o, n = split(d, 8)
    >>> print(Indices([(o, symbol("o")), (n, symbol("n", 0, 7))]).of(d))
    n + o*8
    """

    def __init__(self, loops: Iterable[tuple[IterDomain, Expr]]) -> None:
        # Pairs, not a mapping: domains of equal extent are equal, so a mapping would lose one of them.
        pairs = list(loops)
        self.known: dict[int, Expr] = {d.uid: e for d, e in pairs}
        self._fill(ancestry(d for d, _ in pairs))

    def _fill(self, transforms: list[Transform]) -> None:
        waiting = list(transforms)
        while True:
            left = []
            for transform in waiting:
                if all(d.uid in self.known for d in transform.inputs):
                    self._tie(transform)
                    continue
                for domain in transform.beside:
                    self._derive(domain)
                try:
                    inputs = transform.to_inputs(self.known)
                except KeyError:
                    left.append(transform)
                    continue
                for domain, index in zip(transform.inputs, inputs, strict=True):
                    self.known.setdefault(domain.uid, index)
                self._tie(transform)
            if len(left) == len(waiting):
                return
            waiting = left

    def of(self, domain: IterDomain) -> Expr:
        """The index of `domain`; raises if the loops do not determine it. A dim of extent 1 needs no loop."""
        found = self._derive(domain)
        if found is None and domain.is_single:
            return const(0)
        if found is None:
            raise DomainError(f"the index of {domain} does not follow from the loops")
        return found

    def knows(self, domain: IterDomain) -> bool:
        """Whether the loops determine the index of `domain`."""
        return self._derive(domain) is not None

    def _tie(self, transform: Transform) -> None:
        """Gives domains that the transform identified the same index."""
        for one, other in transform.ties:
            for domain, same in ((one, other), (other, one)):
                if same.uid in self.known:
                    self.known.setdefault(domain.uid, self.known[same.uid])

    def _derive(self, domain: IterDomain) -> Expr | None:
        if domain.uid in self.known:
            return self.known[domain.uid]
        transform = domain.definition
        if transform is None:
            return None
        for pair in transform.ties:
            for source in pair:
                self._derive(source)
        self._tie(transform)
        for source in (*transform.inputs, *transform.beside):
            if self._derive(source) is None:
                return None
        try:
            outputs = transform.to_outputs(self.known)
        except KeyError:
            return None
        for output, index in zip(transform.outputs, outputs, strict=True):
            self.known.setdefault(output.uid, index)
        return self.known[domain.uid]
