"""TensorDomain: the domains of one tensor, from its origin to the loops that compute it.

In: domains. Out: an immutable record that prints every domain with its iter type, parallel type and extent.

root        the dims before its own transforms: for a view, the dims of the tensor it refers to
logical     its dims, as operations see them
allocation  the dims of its memory
loop        the loops that compute it; for a reduction, including the reduced domains
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from serrate.ir.domains import IterDomain, IterType


@dataclass(frozen=True)
class TensorDomain:
    """Four lists of domains. A view's partition and combine lead from root to logical, a schedule from logical to loop.

    >>> from serrate.ir import split
    >>> rows = IterDomain(6, name="d0")
    >>> print(TensorDomain((rows,), (rows,), (rows,), split(rows, 4)))
    root       [i.d0{6}]
    logical    [i.d0{6}]
    allocation [i.d0{6}]
    loop       [i.d0o{2}, i.d0i{4}]
    """

    root: tuple[IterDomain, ...]
    logical: tuple[IterDomain, ...]
    allocation: tuple[IterDomain, ...]
    loop: tuple[IterDomain, ...]

    @property
    def reduced(self) -> tuple[IterDomain, ...]:
        """The loops that are reduced away."""
        return tuple(d for d in self.loop if d.iter_type is IterType.REDUCTION)

    def __str__(self) -> str:
        parts = {"root": self.root, "logical": self.logical, "allocation": self.allocation, "loop": self.loop}
        return "\n".join(f"{name:<10} [{', '.join(map(shown, domains))}]" for name, domains in parts.items())


def shown(domain: IterDomain) -> str:
    """A domain as text; marks a reduced ragged domain as both."""
    return f"r.{domain}" if domain.is_ragged and domain.iter_type is IterType.REDUCTION else str(domain)


def as_reduced(domain: IterDomain) -> IterDomain:
    """The same domain (the same index), printed as a reduction."""
    return replace(domain, iter_type=IterType.REDUCTION)


def made_from(domain: IterDomain, sources: Iterable[IterDomain]) -> bool:
    """Whether a domain is one of `sources` or derived from one by transforms."""
    wanted = {d.uid for d in sources}
    seen: set[int] = set()
    pending = [domain]
    while pending:
        current = pending.pop()
        if current.uid in wanted:
            return True
        if current.uid not in seen and current.definition is not None:
            seen.add(current.uid)
            pending.extend(current.definition.inputs)
    return False
