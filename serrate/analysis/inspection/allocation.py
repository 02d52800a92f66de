"""Allocation: the size of a tensor stored over given domains, and where its holes are.

In: storage domains (row-major, the last one innermost) and the logical domains they were made from. Out: `Allocation`.

The rule: each position of a loop nest over the storage domains is a slot, in that order. Every element has exactly one slot,
because every transform is one-to-one on elements. The slots without an element are the holes: the positions where a guard of that
nest fails, `slots - elements` in number. Rows back to back, rows in blocks and padded rows all follow this rule:

    [c, r]              rows back to back   row c starts at offsets[c], no holes
    [c, ro, 128]        rows in blocks      row c starts at 128 * (blocks of the rows before), holes at the end of rows
    [c, cover of r]     padded              row c starts at c * longest, holes at the end of shorter rows
A ragged domain is counted together with its component: the sum of the row sizes, never the number of rows times the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from serrate.analysis.guards import Guard, guards
from serrate.analysis.indices import ancestry
from serrate.analysis.inspection.brute_force import visits
from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain, NestedInts
from serrate.ir.expr import Expr, const
from serrate.ir.ragged import RaggedIterDomain, running_sum
from serrate.ir.transforms import Merge, Restrict, Split


@dataclass(frozen=True, eq=False)
class Allocation:
    """Slots for the elements over `logical`, stored over `storage`."""

    storage: tuple[IterDomain, ...]
    logical: tuple[IterDomain, ...]
    guards: tuple[Guard, ...]
    """A slot is a hole iff one of these fails."""

    @property
    def extents(self) -> tuple[Expr | int | NestedInts, ...]:
        """One per storage dim: a number or an expression; for a ragged dim its row lengths, if known."""
        return tuple(_shown(d) for d in self.storage)

    @property
    def elements(self) -> Expr | int:
        """The number of slots, including holes."""
        return _number(_count(self.storage))

    @property
    def holes(self) -> Expr | int:
        """The number of slots without an element."""
        return _number(_count(self.storage) - _count(self.logical))

    @property
    def starts(self) -> tuple[int, ...] | Expr:
        """The start of each component's row, in slots; an expression in COORDINATE if lengths are known only at run time.

        >>> from serrate.ir import IterDomain, partition, split
        >>> c, r = partition(IterDomain(512), [0, 100, 250, 512])
        >>> blocks = allocation([c, *split(r, 128)])
        >>> blocks.starts, blocks.elements, blocks.holes
        ((0, 128, 384), 768, 256)
        """
        component, row = self._rows()
        if row.value is not None:
            start = COORDINATE * row
        else:
            start = running_sum(component, row)[COORDINATE]
        count = component.extent_expr.value
        found = [start.substitute({COORDINATE: const(c)}).value for c in range(count or 0)]
        return start if count is None or None in found else cast(tuple[int, ...], tuple(found))

    def _rows(self) -> tuple[IterDomain, Expr]:
        """The component domain, and the slots that one of its rows takes."""
        found = [d.component for d in self.storage if isinstance(d, RaggedIterDomain)]
        found += [d for d in self.storage if d.pairing is not None and not d.is_ragged]
        place = next((k for c in found for k, d in enumerate(self.storage) if d.uid == c.uid), None)
        if place is None:
            raise DomainError(f"allocation of {self}: no dim counts components, so there are no rows")
        component = self.storage[place]
        row = const(1)
        for domain in self.storage[place + 1 :]:
            if isinstance(domain, RaggedIterDomain) and domain.component.uid != component.uid:
                raise DomainError(f"allocation of {self}: the rows of {domain} are not owned by {component} alone")
            row = row * (domain.length if isinstance(domain, RaggedIterDomain) else domain.extent_expr)
        return component, row

    def where(self) -> Iterator[tuple[int, ...]]:
        """The position of every hole, one index per storage dim; extents and lengths must be known.

        >>> from serrate.ir import IterDomain, split
        >>> list(allocation(split(IterDomain(6), 4)).where())
        [(1, 2), (1, 3)]
        """
        if not isinstance(self.holes, int):
            raise DomainError(f"allocation of {self}: holes can be listed only if extents and lengths are known")
        filled = visits(self.storage, self.storage, self.guards)
        # A component that does not exist has no row, and so no slots: keep the guards that say so.
        owners = [d.component for d in self.storage if isinstance(d, RaggedIterDomain)]
        picking = {uid for owner in owners for uid in _lineage(owner, self.storage)}
        slots = visits(self.storage, self.storage, tuple(g for g in self.guards if g.domain.uid in picking))
        for slot in sorted(slots.keys() - filled.keys(), key=_tuple):
            yield _tuple(slot)

    def __str__(self) -> str:
        return ", ".join(map(str, self.storage))

    def explain(self) -> str:
        """The allocation in words.

        >>> from serrate.ir import IterDomain, split
        >>> print(allocation(split(IterDomain(6), 4)).explain())
        [2, 4]: 8 slots, 2 of them holes: where i0*4 + i1 < 6 fails
        """
        sizes = ", ".join(str(list(e) if isinstance(e, tuple) else e).replace(str(COORDINATE), "c") for e in self.extents)
        failing = " or ".join(str(g.condition) for g in self.guards)
        holes = f"{self.holes} of them holes: where {failing} fails" if self.guards else "no holes"
        return f"[{sizes}]: {self.elements} slots, {holes}"


def allocation(storage: Sequence[IterDomain], logical: Sequence[IterDomain] | None = None) -> Allocation:
    """The allocation of a tensor over `storage`; `logical` defaults to the domains that the storage was derived from.

    >>> from serrate.ir import IterDomain, split
    >>> six = allocation(split(IterDomain(6), 4))
    >>> six.extents, six.elements, six.holes
    ((2, 4), 8, 2)
    """
    wanted = tuple(sources(storage) if logical is None else logical)
    return Allocation(tuple(storage), wanted, guards(wanted, storage))


def sources(domains: Sequence[IterDomain]) -> list[IterDomain]:
    """The underived domains that `domains` were derived from.

    Sub-ranges and resized domains count as underived: their positions are the elements.
    """
    found: dict[int, IterDomain] = {}
    pending = list(domains)
    while pending:
        domain = pending.pop(0)
        made = domain.definition
        if made is None or isinstance(made, Restrict) or type(made).__name__ == "Resize":
            found[domain.uid] = domain
        else:
            pending.extend(made.inputs)
    return list(found.values())


def _tuple(slot: object) -> tuple[int, ...]:
    return cast(tuple[int, ...], slot) if isinstance(slot, tuple) else (cast(int, slot),)


def _number(value: Expr) -> Expr | int:
    return value if value.value is None else value.value


def _shown(domain: IterDomain) -> Expr | int | NestedInts:
    if isinstance(domain, RaggedIterDomain):
        try:
            return domain.extents
        except DomainError:
            return domain.length
    return domain.extent


def _count(domains: Sequence[IterDomain]) -> Expr:
    """The number of positions of a loop nest over the domains.

    Rows of one component are counted together: the sum, over components, of the product of their lengths. If the component is not
    among the domains but they determine it (it was split, partitioned, or merged from them), it replaces them first: a position
    has a row only if its component exists, and then corresponds to one position of the component.
    """
    # The order in which owners replace their dims can matter, so try all until one succeeds.
    pending, seen = [list(domains)], set[frozenset[int]]()
    while pending:
        left = pending.pop()
        present = frozenset(d.uid for d in left)
        rows = [d for d in left if isinstance(d, RaggedIterDomain)]
        lost = [row for row in rows if row.component.uid not in present]
        if not rows:
            total = const(1)
            for domain in left:
                total = total * domain.extent_expr
            return total
        if present not in seen:
            seen.add(present)
            pending += [new for row in lost for new in _towards(left, row.component)] if lost else [_summed(left, rows)]
    names, owners = ", ".join(map(str, domains)), ", ".join(str(d.component) for d in domains if isinstance(d, RaggedIterDomain))
    raise DomainError(f"allocation of [{names}]: rows need the dims that select them, here {owners}")


def _summed(left: list[IterDomain], rows: list[RaggedIterDomain]) -> list[IterDomain]:
    """[c, r1, r2, ...] -> one domain with as many positions as all rows of `c` have."""
    # Rows may count the components of other rows; sum those first.
    owners = {d.component.uid for d in rows}
    innermost = next((d for d in rows if d.uid not in owners), rows[0])
    component = innermost.component
    own = [d for d in rows if d.component.uid == component.uid]
    length = const(1)
    for row in own:
        length = length * row.length
    total = running_sum(component, length)[component.extent_expr]
    gone = {component.uid, *(d.uid for d in own)}
    return [IterDomain(total), *(d for d in left if d.uid not in gone)]


def _towards(left: list[IterDomain], owner: IterDomain) -> Iterator[list[IterDomain]]:
    """The domains after applying or undoing one transform towards `owner`."""
    present = {d.uid for d in left}
    wanted, deciding = _lineage(owner, left, merged_inner=True), _lineage(owner, left)
    for transform in (*ancestry([owner]), *ancestry(left)):
        # Undoing a split that leaves holes drops positions, so the owner must not exist there.
        near = wanted if not isinstance(transform, Split) or transform.divides else deciding
        for new, old in ((transform.outputs, transform.inputs), (transform.inputs, transform.outputs)):
            if all(d.uid in present for d in old) and any(d.uid in near and d.uid not in present for d in new):
                gone = {d.uid for d in old}
                yield [*new, *(d for d in left if d.uid not in gone)]


def _lineage(owner: IterDomain, loops: Sequence[IterDomain], *, merged_inner: bool = False) -> set[int]:
    """The domains (by uid) between `owner` and the loops that determine it: derived from it, or those it was derived from.

    If one of them is out of bounds, `owner` does not exist. That is not true of a merge with `owner` as its inner domain (the
    inner index wraps around), so such merges are included only if `merged_inner`.
    """
    applied = ancestry(loops)
    met = {d.uid for d in loops} | {d.uid for t in applied for d in t.inputs}
    found, pending = set[int](), [owner]
    while pending:
        domain = pending.pop()
        found.add(domain.uid)
        if domain.uid not in met and domain.definition is not None:
            pending.extend(domain.definition.inputs)
    size = 0
    while size != len(found):
        size = len(found)
        for transform in applied:
            sources = transform.inputs if merged_inner or not isinstance(transform, Merge) else transform.inputs[:1]
            if any(d.uid in found for d in sources):
                found |= {d.uid for d in transform.outputs}
    return found
