"""Guards: the conditions that keep holes from being read, written or counted, and only those that are needed.

In: logical domains and the loop domains made from them. Out: ordered `Guard`s; a loop position belongs to an element
exactly when all of them hold. `visits` is the brute force that the rules are tested against.

Loops stay inside their own extents. Going back from the loops, each transform either keeps positions in bounds or opens
holes. The rules, with the reason each one holds:

  split   i = o*f + n.  If f divides, o and n in bounds put i in bounds: o <= N/f - 1, n <= f - 1, so i <= N - 1.
          If not, i needs its guard.
          i < N implies o < ceil(N/f), because n >= 0: a guard on o is needless where i is in bounds.
          It implies n < N as well, because o >= 0: if N <= f, so is one on n (o's extent is then 1, or would be
          had an outer split not asked for more).
  merge   a = m // Nb < Na  iff  m < Na*Nb, and b = m % Nb < Nb always: only m can need a guard, and it is needless
          where a is in bounds.
  partition, combine   (c, r) is an element of a row iff i is an element: nothing new opens.
          A combined t past the end finds c = K, whose row would begin where i ends: where i is in bounds for another
          reason, so is t. But t keeps its guard if anything reads length[c], because length[K] does not exist.
  cover   rows shorter than the cover have holes: r < length[c], always; it implies the bound of the cover itself.
  ragged  as split, against length[c]; one past the end would land in the next row, inside the buffer.
What is needless makes more of the same needless, from a domain to what the loops have made of it (`_Path`).
A guard comes after the guards that make its own evaluation safe (c in range before length[c] is read).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from serrate.analysis.indices import Indices, ancestry
from serrate.errors import DomainError
from serrate.ir.domains import IterDomain, RaggedIterDomain
from serrate.ir.expr import Environment, Expr, Less, Symbol, ceildiv, symbol
from serrate.ir.transforms import Combine, Cover, Merge, Partition, Restrict, Split, Transform, row_length


@dataclass(frozen=True)
class Guard:
    """One condition: the index of `domain` lies inside its extent."""

    domain: IterDomain
    condition: Less
    reason: str

    def __str__(self) -> str:
        return f"{self.condition}  ({self.reason})"


def needed(loops: Sequence[IterDomain], unbounded: Iterable[IterDomain] = ()) -> list[tuple[IterDomain, str]]:
    """The domains behind `loops` whose bound must be checked, with the reason, in an order that is safe to evaluate.

    `unbounded` names loops that may themselves run past their extent (a launch grid sized by a bound).
    """
    open_: dict[int, tuple[IterDomain, str]] = {d.uid: (d, "launched by a bound") for d in unbounded}
    known = Indices(zip(loops, loop_symbols(loops), strict=True)).known
    # What these loops do not determine is somebody else's to guard (a part of a row without its inner positions).
    transforms = [t for t in _outputs_first(loops) if all(d.uid in known for d in t.outputs)]
    path = _Path(loops, transforms)
    for transform in transforms:
        reason = _opens(transform)
        if reason is not None:
            source = transform.inputs[0]
            open_.setdefault(source.uid, (source, reason))
            path.close(source, row_length(source), open_)
    return path.ordered(open_)


class _Path:
    """The way from domains to the loops that were made of them."""

    def __init__(self, loops: Sequence[IterDomain], transforms: Sequence[Transform]) -> None:
        self.loops = loops
        self.made_of: dict[int, Transform] = {}
        for transform in transforms:
            for source in transform.inputs:
                self.made_of.setdefault(source.uid, transform)

    def close(self, domain: IterDomain, limit: Expr, open_: dict[int, tuple[IterDomain, str]]) -> None:
        """Drops the guards that are needless because the index of `domain` is below `limit`, no more than its extent."""
        for implied, below in self._implied(domain, limit, [d for d, _ in open_.values()]):
            open_.pop(implied.uid, None)
            self.close(implied, below, open_)

    def _implied(self, domain: IterDomain, limit: Expr, guarded: Sequence[IterDomain]) -> Iterator[tuple[IterDomain, Expr]]:
        transform = self.made_of.get(domain.uid)
        if isinstance(transform, Split):
            outer, inner = transform.outputs
            size = inner.extent_expr
            if size.value != 0:
                yield outer, ceildiv(limit, size)
            if Less(limit - 1, size).proven:
                yield inner, limit
        elif isinstance(transform, Merge) and transform.inputs[0] is domain:
            yield transform.outputs[0], limit * transform.inputs[1].extent_expr
        elif isinstance(transform, Cover):
            yield transform.outputs[0], row_length(transform.outputs[0])
        elif isinstance(transform, Partition):
            combined = self._combined(transform.outputs[0], guarded)
            if combined is not None:
                yield combined, combined.extent_expr

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

    def ordered(self, open_: Mapping[int, tuple[IterDomain, str]]) -> list[tuple[IterDomain, str]]:
        """The guards in an order where each comes after those on domains that its own index or row is found by."""
        waiting = dict(open_)
        placed: list[tuple[IterDomain, str]] = []
        while waiting:
            ready = next(uid for uid, (d, _) in waiting.items() if not self._behind(d) & (waiting.keys() - {uid}))
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
            if isinstance(current, RaggedIterDomain):
                pending.append(current.component)
            if current.uid in self.made_of:
                pending.extend(self.made_of[current.uid].outputs)
            elif current.definition is not None and not any(current is d for d in self.loops):
                pending.extend(current.definition.inputs)
        return found - {domain.uid}


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


def _opens(transform: Transform) -> str | None:
    """Why the transform's input can be out of bounds although its outputs are in bounds, or None."""
    if isinstance(transform, Split):
        size = transform.outputs[1].extent_expr
        if transform.divides:
            return None
        if isinstance(transform.inputs[0], RaggedIterDomain):
            return f"rows are not whole tiles of {size}"
        return f"{size} may not divide {transform.inputs[0].extent_expr}"
    if isinstance(transform, Cover):
        return "rows are shorter than what covers them"
    if isinstance(transform, Restrict):
        source, part = transform.inputs[0], transform.outputs[0]
        last = transform.low + part.extent_expr - source.extent_expr
        inside = not source.is_ragged and last.bounds[1] is not None and last.bounds[1] <= 0
        return None if inside else "a sub-range may reach past the end"
    return None


def condition(domain: IterDomain, indices: Indices) -> Less:
    """`index < extent`, the extent being that of the row the index lies in."""
    index = indices.of(domain)
    if isinstance(domain, RaggedIterDomain):
        return Less(index, domain.length_of(indices.of(domain.component)))
    return Less(index, domain.extent_expr)


def guards(logical: Sequence[IterDomain], loop: Sequence[IterDomain]) -> tuple[Guard, ...]:
    """All guards that loops over `loop` need to visit every element of `logical` once and nothing else.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(6)
    >>> [str(g.condition) for g in guards([d], split(d, 4))]
    ['i0*4 + i1 < 6']
    """
    symbols = loop_symbols(loop)
    indices = Indices(zip(loop, symbols, strict=True))
    for domain in logical:
        indices.of(domain)
    return tuple(Guard(d, condition(d, indices), reason) for d, reason in needed(loop))


def loop_symbols(loop: Sequence[IterDomain]) -> list[Symbol]:
    """One symbol for each loop, bounded by its extent where that is known."""
    out: list[Symbol] = []
    for k, domain in enumerate(loop):
        high = None if domain.is_ragged else domain.extent_expr.bounds[1]
        out.append(symbol(f"i{k}", 0, None if high is None else max(high - 1, 0)))
    return out


def visits(logical: Sequence[IterDomain], loop: Sequence[IterDomain], guards: Sequence[Guard]) -> Counter[object]:
    """How often each logical position is visited by the guarded loops; positions outside are counted under None.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(6)
    >>> loop = split(d, 4)
    >>> set(visits([d], loop, ()).values()), visits([d], loop, ())[None]
    ({1, 2}, 2)
    """
    symbols = loop_symbols(loop)
    indices = Indices(zip(loop, symbols, strict=True))
    wanted = [(d, indices.of(d)) for d in logical]
    counted: Counter[object] = Counter()
    for position in _positions(loop, symbols, indices, [g.condition for g in guards]):
        environment = Environment(position)
        found = tuple(_position(d, e, indices, environment) for d, e in wanted)
        counted[None if None in found else (found[0] if len(found) == 1 else found)] += 1
    return counted


def _evaluated(what: Expr | Less, environment: Environment) -> int:
    try:
        return int(what.evaluate(environment))
    except IndexError:
        raise DomainError(f"{what} was evaluated where its own arrays end: a guard that protects it is missing") from None


def _position(domain: IterDomain, index: Expr, indices: Indices, environment: Environment) -> int | None:
    try:
        value = int(index.evaluate(environment))
        return value if value >= 0 and bool(condition(domain, indices).evaluate(environment)) else None
    except IndexError:
        return None


def _positions(
    loop: Sequence[IterDomain], symbols: Sequence[Symbol], indices: Indices, conditions: Sequence[Less]
) -> Iterator[dict[Symbol, int]]:
    """All loop positions where the conditions hold: each is checked, in order, as soon as the loops it depends on are there.

    A ragged loop runs over the row that the loops before it have chosen, so what guards that row's length is checked before.
    """
    ends = [
        domain.length_of(indices.of(domain.component)) if isinstance(domain, RaggedIterDomain) else domain.extent_expr
        for domain in loop
    ]
    depths = [max((symbols.index(s) + 1 for s in c.symbols if s in symbols), default=0) for c in conditions]

    def run(done: dict[Symbol, int]) -> Iterator[dict[Symbol, int]]:
        depth, environment = len(done), Environment(done)
        if not all(_evaluated(c, environment) for c, d in zip(conditions, depths, strict=True) if d == depth):
            return
        if depth == len(loop):
            yield done
            return
        for k in range(_evaluated(ends[depth], environment)):
            yield from run({**done, symbols[depth]: k})

    yield from run({})
