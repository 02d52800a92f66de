"""Guards: the conditions that keep holes from being read, written or counted, and only those that are needed.

In: logical domains and the loop domains made from them. Out: ordered `Guard`s; a loop position belongs to an element
exactly when all of them hold. `visits` is the brute force that the rules are tested against.

Loops stay inside their own extents. Going back from the loops, each transform either keeps positions in bounds or opens
holes. The rules, with the reason each one holds:

  split   i = o*f + n.  If f divides, o and n in bounds put i in bounds: o <= N/f - 1, n <= f - 1, so i <= N - 1.
          If not, i needs its guard; and i < N implies o < ceil(N/f), because n >= 0: a guard on o is then dropped.
          If o's extent is 1, i = n: a guard on i makes one on n needless.
  merge   a = m // Nb < Na  iff  m < Na*Nb, and b = m % Nb < Nb always: only m can need a guard.
  partition, combine   (c, r) is an element of a row iff i is an element: nothing new opens.
  cover   rows shorter than the cover have holes: r < length[c], always; it implies the bound of the cover itself.
  ragged  as split, against length[c]; one past the end would land in the next row, inside the buffer.
A guard comes after the guards that make its own evaluation safe (c in range before length[c] is read), which is the order
in which indices are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from serrate.analysis.indices import Indices, ancestry
from serrate.errors import DomainError
from serrate.ir.domains import IterDomain, RaggedIterDomain
from serrate.ir.expr import Environment, Expr, Less, Symbol, symbol
from serrate.ir.transforms import Cover, Restrict, Split, Transform


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
    order: list[int] = list(open_)
    known = Indices(zip(loops, loop_symbols(loops), strict=True)).known
    for transform in _outputs_first(loops):
        reason = _opens(transform)
        # What these loops do not determine is somebody else's to guard (a part of a row without its inner positions).
        if reason is None or any(d.uid not in known for d in transform.outputs):
            continue
        source = transform.inputs[0]
        if source.uid not in open_:
            open_[source.uid] = (source, reason)
            order.append(source.uid)
        if isinstance(transform, Cover):
            open_.pop(transform.outputs[0].uid, None)
        if isinstance(transform, Split):
            open_.pop(transform.outputs[0].uid, None)
            if transform.outputs[0].extent == 1:
                open_.pop(transform.outputs[1].uid, None)
    return [open_[uid] for uid in order if uid in open_]


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
        if transform.divides or size.value == 1:
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
    ['i1 + i0*4 < 6']
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
    for position in _positions(loop, indices, dict(zip((d.uid for d in loop), symbols, strict=True))):
        environment = Environment(position)
        if not all(_holds(g.condition, environment) for g in guards):
            continue
        found = tuple(_position(d, e, indices, environment) for d, e in wanted)
        counted[None if None in found else (found[0] if len(found) == 1 else found)] += 1
    return counted


def _holds(wanted: Less, environment: Environment) -> bool:
    try:
        return bool(wanted.evaluate(environment))
    except IndexError:
        raise DomainError(f"guard {wanted} was evaluated where its own arrays end: a guard that protects it is missing") from None


def _position(domain: IterDomain, index: Expr, indices: Indices, environment: Environment) -> int | None:
    try:
        value = int(index.evaluate(environment))
        return value if 0 <= value and bool(condition(domain, indices).evaluate(environment)) else None
    except IndexError:
        return None


def _positions(loop: Sequence[IterDomain], indices: Indices, symbols: dict[int, Symbol]) -> Iterator[dict[Symbol, int]]:
    """All loop positions: a ragged loop runs over the row that the loops before it have chosen."""

    def extents(done: dict[Symbol, int], domain: IterDomain) -> int:
        extent = domain.extent_expr
        if isinstance(domain, RaggedIterDomain):
            extent = domain.length_of(indices.of(domain.component))
        return int(extent.evaluate(Environment(done)))

    def run(done: dict[Symbol, int], rest: Sequence[IterDomain]) -> Iterator[dict[Symbol, int]]:
        if not rest:
            yield done
            return
        for k in range(extents(done, rest[0])):
            yield from run({**done, symbols[rest[0].uid]: k}, rest[1:])

    yield from run({}, loop)
