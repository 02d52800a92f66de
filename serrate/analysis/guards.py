"""Guards: the conditions that keep holes from being read, written or counted. Only necessary ones are kept.

In: logical domains and the loop domains derived from them. Out: ordered `Guard`s; a loop position belongs to an element iff all
of them hold. The tests check the rules against `brute_force.visits`.

Loops stay inside their own extents. Going back from the loops to the logical domains, each transform either keeps positions in
bounds or opens holes. The rules, each with its reason:

  split   i = o*f + n.  If f divides, o and n in bounds put i in bounds: o <= N/f - 1, n <= f - 1, so i <= N - 1.
          If not, i needs its guard.
          i < N implies o < ceil(N/f), because n >= 0: a guard on o is redundant if i is in bounds.
          It implies n < N as well, because o >= 0: if N <= f, so is one on n (o's extent is then 1, or would be
          had an outer split not asked for more).
          If both parts are merged again, the result is i itself.
  outer split   the same with f = ceil(N/parts), which differs from row to row in a ragged domain: i < N implies
          o*f < N <= parts*f.
  merge   a = m // Nb < Na  iff  m < Na*Nb, and b = m % Nb < Nb always: only m can need a guard, and it is redundant
          if a is in bounds. (`Less.simplified` is the same rule.)
  product as merge, row by row. But a row where Nb = 0 has no positions although its a may have: m keeps its guard.
  partition, combine   (c, r) is an element of a row iff i is an element: nothing new opens.
          A combined t past the end finds c = K, whose row would begin where i ends: where i is in bounds for another
          reason, so is t. But t keeps its guard if anything reads length[c], because length[K] does not exist, and if rows
          lie under other domains or have gaps, because start[K] is then another row's, or does not exist.
          Rows with gaps: every (c, r) is some i, but an i in a gap has no (c, r); computed from i, r needs both bounds.
  regroup (g, r) is an element of R[g][c] iff r' is one of R'[c]: nothing new opens. Past the end of r' there is no g whose length
          could be read, so r' keeps its guard.
  cover   rows shorter than the cover have holes: r < length[c], always; it implies the bound of the cover itself.
  resize  i = i' - L.  i >= 0 needs a guard if L > 0, i < N if R > 0.  i < N implies i' < N + L <= N + L + R if R >= 0, and i >= 0
          implies i' >= L >= 0 if L >= 0: then the guards of i' are redundant. The other rules assume non-negative indices, which
          holds under these guards: sums, quotients and products of non-negative indices are non-negative.
  ordered c = order[c'] permutes the components: c in bounds iff c' in bounds.
  swizzle b = b' xor (a mod Nb) permutes 0 .. Nb-1 for every a: b in bounds iff b' in bounds. a is not changed.
  restrict i = i' + lo needs i < N unless hi <= N; a ragged domain's rows end with it.
  ragged  as split, against length[c]; one past the end would land in the next row, inside the buffer.
A redundant guard makes further guards redundant, from a domain to the domains the loops derived from it (`_Path`).
A guard comes after the guards that make its own evaluation safe (c in range before length[c] is read).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serrate.analysis.indices import Indices, ancestry
from serrate.errors import DomainError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, Less, Symbol, ceildiv, const, minimum, symbol
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine, Cover, Ordered, RaggedProduct, Spread
from serrate.ir.transforms import Merge, Resize, Restrict, Split, Swizzle, Transform


@dataclass(frozen=True)
class Guard:
    """One condition: the index of `domain` is within its extent, at one of the two ends."""

    domain: IterDomain
    condition: Less
    reason: str

    def __str__(self) -> str:
        return f"{self.condition}  ({self.reason})"


class Need(NamedTuple):
    """A bound that must be checked: that the index of `domain` is below its extent, or if `lower`, that it is 0 or more."""

    domain: IterDomain
    reason: str
    lower: bool = False


_Key = tuple[int, bool]
_Open = dict[_Key, Need]


def needed(loops: Sequence[IterDomain], unbounded: Iterable[IterDomain] = ()) -> list[Need]:
    """The bounds that must be checked for `loops`, with reasons, in an order that is safe to evaluate.

    `unbounded` names loops that may themselves run past their extent (a launch grid sized by a bound).
    """
    open_: _Open = {(d.uid, False): Need(d, "launched by a bound") for d in unbounded}
    path = _Path(loops)
    for transform in path.transforms:
        for need in _opens(transform):
            open_.setdefault((need.domain.uid, need.lower), need)
            path.close(need, open_)
    return path.ordered(open_)


def settled(loops: Sequence[IterDomain]) -> list[Need]:
    """The domains that need no check, because loops over `loops` stay inside them; each with the reason.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(24, name="d")
    >>> [(n.domain.name, n.reason) for n in settled(split(d, 8))]
    [('do', 'its loop ends there'), ('di', 'its loop ends there'), ('d', '8 divides 24')]
    """
    path, kept = _Path(loops), needed(loops)
    guarded = {need.domain.uid for need in kept}
    found = {d.uid: Need(d, "its loop ends there") for d in loops if d.uid not in guarded}
    for transform in path.transforms:
        for source in transform.inputs:
            if source.uid not in guarded:
                found.setdefault(source.uid, Need(source, path.reason(source, transform, kept)))
    return list(found.values())


class _Path:
    """The path from domains to the loops derived from them."""

    def __init__(self, loops: Sequence[IterDomain]) -> None:
        self.loops = loops
        indices = Indices(zip(loops, loop_symbols(loops), strict=True))
        known = dict(indices.known)
        # Domains that these loops do not determine are guarded elsewhere (part of a row without its inner positions, or
        # positions across rows without the row).
        self.transforms = [
            t
            for t in _outputs_first(loops)
            if all(d.uid in known for d in t.outputs) and all(indices.knows(c) for d in t.inputs for c in d.owners)
        ]
        self.made_of: dict[int, Transform] = {}
        for transform in self.transforms:
            for source in transform.inputs:
                self.made_of.setdefault(source.uid, transform)
        self.read = self._read()

    def _read(self) -> set[int]:
        """The domains (by uid) whose index is used to read offsets or lengths."""
        pending = [d for t in self.transforms if not isinstance(t, Swizzle) for d in t.beside]
        pending += [c for d in self.domains for c in d.owners]
        found: set[int] = set()
        while pending:
            current = pending.pop()
            if current.uid not in found:
                found.add(current.uid)
                derived = current.uid not in self.made_of and all(current.uid != d.uid for d in self.loops)
                if derived and current.definition is not None:
                    pending.extend((*current.definition.inputs, *current.definition.beside))
        return found

    @property
    def domains(self) -> list[IterDomain]:
        """The loops and all domains that they determine."""
        return [*self.loops, *(d for t in self.transforms for d in t.inputs)]

    def close(self, need: Need, open_: _Open) -> None:
        """Drops the guards that this one makes redundant."""
        if need.lower:
            self._close_lower(need.domain, open_)
        else:
            self._close(need.domain, need.domain.row_length, open_)

    def _close_lower(self, domain: IterDomain, open_: _Open) -> None:
        transform = self.made_of.get(domain.uid)
        if isinstance(transform, Resize) and _at_least(transform.left, 0):
            open_.pop((transform.outputs[0].uid, True), None)
            self._close_lower(transform.outputs[0], open_)

    def _close(self, domain: IterDomain, limit: Expr, open_: _Open) -> None:
        """Drops guards implied by the index of `domain` being below `limit`, which is at most its extent."""
        for implied, below in self._implied(domain, limit, [n.domain for n in open_.values()]):
            # If this index selects a row, its own guard must come before the one that would imply it.
            if implied.uid not in self.read:
                open_.pop((implied.uid, False), None)
                self._close(implied, below, open_)

    def _implied(self, domain: IterDomain, limit: Expr, guarded: Sequence[IterDomain]) -> Iterator[tuple[IterDomain, Expr]]:
        transform = self.made_of.get(domain.uid)
        if isinstance(transform, Split):
            outer, inner = transform.outputs
            size = inner.row_length
            again = self.made_of.get(outer.uid)
            # By identity: domains of one extent are equal.
            if isinstance(again, Merge) and all(a is b for a, b in zip(again.inputs, transform.outputs, strict=True)):
                yield again.outputs[0], limit
            if size.value != 0:
                yield outer, minimum(ceildiv(limit, size), outer.row_length)
            if Less(limit - 1, size).proven:
                yield inner, limit
        elif isinstance(transform, Merge) and transform.inputs[0] is domain:
            width = transform.inputs[1].row_length
            if width.value != 0 and (not isinstance(transform, RaggedProduct) or _at_least(width, 1)):
                yield transform.outputs[0], limit * width
        elif isinstance(transform, Cover | Ordered | Swizzle):
            yield transform.outputs[0], transform.outputs[0].row_length
        elif isinstance(transform, Resize) and _at_least(transform.right, 0):
            yield transform.outputs[0], limit + transform.left
        elif isinstance(transform, Partition) and transform.covers:
            combined = self._combined(transform.outputs[0], guarded)
            if combined is not None:
                yield combined, combined.extent_expr

    def implied_by(self, domain: IterDomain, kept: Sequence[Need]) -> set[int]:
        """The domains (by uid) that are in bounds because this one is, and that are not read before its guard."""
        found: set[int] = set()
        pending = [(domain, domain.row_length)]
        while pending:
            for implied, below in self._implied(*pending.pop(), [n.domain for n in kept]):
                if implied.uid not in self.read:
                    found.add(implied.uid)
                    pending.append((implied, below))
        return found

    def reason(self, domain: IterDomain, transform: Transform, kept: Sequence[Need]) -> str:
        """Why a domain that a transform has changed is in bounds."""
        for need in kept:
            if domain.uid in self.implied_by(need.domain, kept):
                return f"implied by the guard of {need.domain.name}"
        if isinstance(transform, Split):
            return f"{transform.outputs[1].row_length} divides {domain.row_length if domain.is_ragged else domain.extent_expr}"
        if isinstance(transform, Partition):
            return "a position of a row is a position of the whole"
        if isinstance(transform, Combine):
            return f"every position of {transform.outputs[0].name} belongs to a row"
        if isinstance(transform, Merge):
            return f"{transform.outputs[0].name} has exactly the positions of both"
        return f"{transform.outputs[0].name} is in bounds"

    def _combined(self, component: IterDomain, guarded: Sequence[IterDomain]) -> IterDomain | None:
        """The domain in which a component was combined with its rows, unless the length of a row is read on the way there."""
        read = {d.component.uid for d in (*guarded, *self.loops) if isinstance(d, RaggedIterDomain)}
        while component.uid not in read:
            user = self.made_of.get(component.uid)
            if isinstance(user, Combine):
                return user.outputs[0]
            if not isinstance(user, Merge | Partition) or user.inputs[0] is not component:
                return None
            component = user.outputs[0]
        return None

    def ordered(self, open_: Mapping[_Key, Need]) -> list[Need]:
        """Orders guards so that each comes after those on domains that its own index or row is computed from."""
        waiting = dict(open_)
        placed: list[Need] = []
        while waiting:
            uids = {uid for uid, _ in waiting}
            # Of a domain's two bounds, the lower comes first: reads for the upper one may depend on it.
            ready = next(
                (k for k in sorted(waiting, key=lambda k: not k[1]) if not self._behind(waiting[k].domain) & (uids - {k[0]})),
                None,
            )
            if ready is None:
                raise DomainError("guards depend on each other in a cycle: two ragged loops select each other's rows")
            placed.append(waiting.pop(ready))
        return placed

    def _behind(self, domain: IterDomain) -> set[int]:
        """The domains (by uid) whose index is computed before that of `domain`, or before the row it lies in."""
        found: set[int] = set()
        pending = [domain]
        while pending:
            current = pending.pop()
            if current.uid in found:
                continue
            found.add(current.uid)
            pending.extend(current.owners)
            if current.uid in self.made_of:
                pending.extend((*self.made_of[current.uid].outputs, *self.made_of[current.uid].beside))
            elif current.definition is not None and not any(current is d for d in self.loops):
                pending.extend((*current.definition.inputs, *current.definition.beside))
        return found - {domain.uid}


def _at_least(e: Expr, low: int) -> bool:
    return e.bounds[0] is not None and e.bounds[0] >= low


def _outputs_first(loops: Sequence[IterDomain]) -> list[Transform]:
    """Ancestry in an order where a transform comes after those that made its outputs' children."""
    transforms = ancestry(loops)
    placed: list[Transform] = []
    pending = list(transforms)
    while pending:
        for transform in pending:
            outputs = {d.uid for d in transform.outputs}
            if not any(outputs & {d.uid for d in other.inputs} for other in pending if other is not transform):
                placed.append(transform)
                pending.remove(transform)
                break
        else:
            raise DomainError("transforms form a cycle")
    return placed


def _opens(transform: Transform) -> Iterator[Need]:
    """The inputs of a transform that can be out of bounds although its outputs are in bounds, with reasons."""
    source = transform.inputs[0]
    if isinstance(transform, Split) and not transform.divides:
        size = transform.outputs[1].row_length
        if not source.is_ragged:
            yield Need(source, f"{size} may not divide {source.extent_expr}")
        elif transform.inner:
            yield Need(source, f"rows are not whole tiles of {size}")
        else:
            yield Need(source, f"rows are not {transform.factor} equal parts")
    elif isinstance(transform, Cover):
        yield Need(source, "rows are shorter than their cover")
    elif isinstance(transform, Spread):
        if not _at_least(source.extent_expr, 1):
            yield Need(source, "there may be no rows at all")
        yield Need(transform.inputs[1], "the position may lie before the first row", lower=True)
        yield Need(transform.inputs[1], "the position may lie between two rows")
    elif isinstance(transform, Resize):
        if not _at_least(0 - transform.left, 0):
            yield Need(source, "positions were added before the first", lower=True)
        if not _at_least(0 - transform.right, 0):
            yield Need(source, "positions were added after the last")
    elif isinstance(transform, Restrict) and not source.is_ragged:
        last = transform.low + transform.outputs[0].extent_expr - source.extent_expr
        if last.bounds[1] is None or last.bounds[1] > 0:
            yield Need(source, "a sub-range may reach past the end")


def _leaves(transform: Transform) -> Iterator[Need]:
    """The outputs of a transform that can be out of bounds although its inputs are in bounds, with reasons."""
    output = transform.outputs[-1]
    if isinstance(transform, Partition) and transform.lengths is not None:
        if not _at_least(transform.outputs[0].extent_expr, 1):
            yield Need(transform.outputs[0], "there may be no rows at all")
        yield Need(output, "the position may lie before the first row", lower=True)
        yield Need(output, "the position may lie between two rows")
    elif isinstance(transform, Resize):
        if not _at_least(transform.left, 0):
            yield Need(output, "positions were removed at the start", lower=True)
        if not _at_least(transform.right, 0):
            yield Need(output, "positions were removed at the end")
    elif isinstance(transform, Restrict):
        yield Need(output, "the position may lie before the sub-range", lower=True)
        yield Need(output, "the position may lie after the sub-range")


def condition(domain: IterDomain, indices: Indices, lower: bool = False) -> Less:
    """`index < extent`, for ragged domains the extent of the index's row; the lower bound is `-1 < index`."""
    index = indices.of(domain)
    if lower:
        return Less(const(-1), index)
    for component in domain.owners:
        indices.of(component)
    return Less(index, domain.extent_at(indices.known))


def guards(logical: Sequence[IterDomain], loop: Sequence[IterDomain], *, idempotent: bool = False) -> tuple[Guard, ...]:
    """All guards that loops over `loop` need to visit every element of `logical` once and nothing else.

    With `idempotent`, elements may be visited more than once (a plain store may be repeated, a sum may not): guards that only
    prevent repeats are left out; those that keep logical indices in bounds or a read safe stay.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(24)
    >>> o, n = split(d, 5)
    >>> [str(g.condition) for g in guards([d], [o, *split(n, 3)])]
    ['i1*3 + i2 < 5', 'i0*5 + i1*3 + i2 < 24']
    >>> [str(g.condition) for g in guards([d], [o, *split(n, 3)], idempotent=True)]
    ['i0*5 + i1*3 + i2 < 24']
    """
    indices = Indices(zip(loop, loop_symbols(loop), strict=True))
    determined = set(indices.known)
    for domain in logical:
        indices.of(domain)
    found = needed(loop)
    if idempotent:
        found = _without_repeats(logical, loop, found)
    found += [need for domain in logical for need in _forwards(domain, determined)]
    # One transform may derive two dims.
    once = {(n.domain.uid, n.lower): n for n in found}.values()
    return tuple(Guard(n.domain, condition(n.domain, indices, n.lower), n.reason) for n in once)


def _forwards(domain: IterDomain, known: set[int]) -> list[Need]:
    """The bounds of domains derived forwards from the loops, on the path to `domain`; nearest to the loops first."""
    transform = domain.definition
    if domain.uid in known or transform is None:
        return []
    earlier = [need for source in (*transform.inputs, *transform.beside) for need in _forwards(source, known)]
    return [*earlier, *_leaves(transform)]


def _without_repeats(logical: Sequence[IterDomain], loop: Sequence[IterDomain], found: list[Need]) -> list[Need]:
    """Leaves out guards without which all logical indices, and all indices that select a row, are still in bounds."""
    path = _Path(loop)
    # If positions were removed, another visit may be to a removed position, and is then not a repeat.
    if any(True for t in path.transforms for _ in _leaves(t)):
        return found
    wanted = {uid for d in logical for uid in _sources(d, {x.uid for x in path.domains})}
    kept = list(found)
    for need in found:
        rest = [n for n in kept if n is not need]
        if need.domain.uid not in wanted and not need.lower and _safe(path, wanted, rest):
            kept = rest
    return kept


def _sources(domain: IterDomain, reached: set[int]) -> set[int]:
    """The domains (by uid) from which a logical index is computed: itself, or those it is derived from."""
    transform = domain.definition
    if domain.uid in reached or transform is None:
        return {domain.uid}
    return {uid for source in (*transform.inputs, *transform.beside) for uid in _sources(source, reached)}


def _safe(path: _Path, wanted: set[int], kept: Sequence[Need]) -> bool:
    """Whether the kept guards put every wanted index in bounds, and every index by which an array is read.

    A domain is in bounds if it is a loop, if it is guarded, if a guard implies it, or if the domains derived from it are in
    bounds and no transform in between opens holes.
    """
    inside = {d.uid for d in path.loops}
    for need in kept:
        # Lower bounds are never left out; this decides about upper bounds.
        if not need.lower:
            inside |= {need.domain.uid, *path.implied_by(need.domain, kept)}
    for transform in path.transforms:
        if all(d.uid in inside for d in (*transform.outputs, *transform.beside)) and not any(True for _ in _opens(transform)):
            inside |= {d.uid for d in transform.inputs}
    return (wanted | path.read) & {d.uid for d in path.domains} <= inside


def loop_symbols(loop: Sequence[IterDomain]) -> list[Symbol]:
    """One symbol per loop, bounded by its extent if that is known."""
    out: list[Symbol] = []
    for k, domain in enumerate(loop):
        high = None if domain.is_ragged else domain.extent_expr.bounds[1]
        out.append(symbol(f"i{k}", 0, None if high is None else max(high - 1, 0)))
    return out
