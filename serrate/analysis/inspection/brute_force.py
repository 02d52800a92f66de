"""Brute force: runs guarded loops position by position and counts visits, to test the rules of `guards`.

In: logical domains, loops, guards. Out: how often each element is visited, and how often positions outside are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from serrate.analysis.guards import Guard, condition, loop_symbols
from serrate.analysis.indices import Indices
from serrate.errors import DomainError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Environment, Expr, Less, Symbol


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
        raise DomainError(f"{what} was evaluated past the end of its arrays: a guard that protects it is missing") from None


def _position(domain: IterDomain, index: Expr, indices: Indices, environment: Environment) -> int | None:
    try:
        value = int(index.evaluate(environment))
        return value if value >= 0 and bool(condition(domain, indices).evaluate(environment)) else None
    except IndexError:
        return None


def _positions(
    loop: Sequence[IterDomain], symbols: Sequence[Symbol], indices: Indices, conditions: Sequence[Less]
) -> Iterator[dict[Symbol, int]]:
    """All loop positions at which the conditions hold; each is checked, in order, as soon as its loops have positions.

    A ragged loop runs over the row that the loops before it selected, so the guards of that row's length are checked first.
    """
    ends = [condition(domain, indices).right for domain in loop]
    # A condition that still reads an array after empty loops were folded away is checked last.
    depths = [
        max((symbols.index(s) + 1 for s in c.symbols if s in symbols), default=len(loop) if c.left.arrays | c.right.arrays else 0)
        for c in conditions
    ]

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
