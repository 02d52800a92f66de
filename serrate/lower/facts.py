"""Facts: what loops and guards imply at a point of a loop program.

In: conditions that hold, names of expressions. Out: whether an expression is provably non-negative there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from serrate.ir.expr import Element, Expr, FloorDiv, Less, Maximum, Minimum, Search, const
from serrate.ir.loops import Bind
from serrate.ir.recipes import Joined, Order, Owners, RunningSum
from serrate.ir.solve import terms_of

DEPTH = 8
"""How many facts a proof may use."""


class Facts:
    """Facts from loops and guards, each an expression that is non-negative. `0 <= e` holds if `e` is a sum of facts plus an
    expression whose lower bound is non-negative."""

    def __init__(self, known: Sequence[Expr], names: Mapping[Expr, Expr] = MappingProxyType({})) -> None:
        self.known, self.names = tuple(known), names
        """Names stand for expressions about which more is known, so facts and goals are expanded before a proof."""
        self._unproven: dict[Expr, int] = {}
        """With how many facts each expression was not proven: the same few facts are tried in many orders."""

    def and_(self, *conditions: Less) -> Facts:
        """These facts and the given conditions."""
        spelled = (Less(self.spelled_out(c.left), self.spelled_out(c.right)) for c in conditions)
        return Facts((*self.known, *(fact for c in spelled for fact in _facts_of(c))), self.names)

    def named(self, node: Bind) -> Facts:
        """These facts and a name for an expression."""
        return self if node.guard else Facts(self.known, {**self.names, node.symbol: self.spelled_out(node.expr)})

    def spelled_out(self, e: Expr) -> Expr:
        """An expression with all names expanded."""
        return e.substitute(self.names) if self.names else e

    def holds(self, condition: Less) -> bool:
        """Whether a condition follows."""
        return self.prove(self.spelled_out(condition.right) - self.spelled_out(condition.left) - 1)

    def prove(self, e: Expr, depth: int = DEPTH) -> bool:
        """Whether 0 <= e follows."""
        if e.bounds[0] is not None and e.bounds[0] >= 0:
            return True
        if depth <= self._unproven.get(e, 0):
            return False
        unbounded = [(term, factor) for term, factor in terms_of(e) if _is_unbounded(term, factor)]
        # If all terms have bounds, those may be too loose; a fact about several terms may be tighter.
        loose = unbounded or [(term, factor) for term, factor in terms_of(e) if factor < 0]
        if any(self._without(e, term, factor, depth) for term, factor in loose):
            return True
        self._unproven[e] = depth
        return False

    def _without(self, e: Expr, term: Expr, factor: int, depth: int) -> bool:
        """Whether 0 <= e follows from facts about one of its terms."""
        for fact in (*self.known, *_about(term)):
            own = next((f for t, f in terms_of(fact) if t is term), 0)
            if own * factor > 0 and factor % own == 0 and self.prove(e - fact * (factor // own), depth - 1):
                return True
        rest = e - term * factor
        if isinstance(term, FloorDiv) and term.right.value is not None:
            size = term.right.value
            # size * (v // size) is at most v and more than v - size; a multiple of size that exceeds -size is non-negative.
            top = term.left if factor < 0 else term.left - (size - 1)
            return self.prove(rest * size + top * factor + (size - 1), depth - 1)
        if isinstance(term, Minimum | Maximum):
            # The smaller of two is at most either of them, and at least what both are.
            enough = all if (factor < 0) == isinstance(term, Maximum) else any
            return enough(self.prove(rest + operand * factor, depth - 1) for operand in term.operands)
        return False


def _is_unbounded(term: Expr, factor: int) -> bool:
    """Whether a term of a sum has no useful lower bound of its own."""
    bound = term.bounds[1 if factor < 0 else 0]
    return bound is None or (factor > 0 and bound < 0)


def _facts_of(condition: Less) -> Iterator[Expr]:
    """left < right: right - left - 1 is non-negative. A minimum on the right gives one fact for each operand."""
    if isinstance(condition.right, Minimum):
        for operand in condition.right.operands:
            yield from _facts_of(Less(condition.left, operand))
    elif isinstance(condition.left, Maximum):
        for operand in condition.left.operands:
            yield from _facts_of(Less(operand, condition.right))
    else:
        yield condition.right - condition.left - 1


def _about(e: Expr) -> Iterator[Expr]:
    """Facts that follow from the form of an expression."""
    if isinstance(e, Minimum):
        yield from (operand - e for operand in e.operands)
    elif isinstance(e, Maximum):
        yield from (e - operand for operand in e.operands)
    elif isinstance(e, Search):
        yield e.count - 1 - e
    elif isinstance(e, Element) and e.most is not None:
        yield e.most - e
    elif isinstance(e, Element) and e.array.recipe is not None:
        recipe = e.array.recipe
        if isinstance(recipe, RunningSum):
            yield e.array[recipe.count] - e
        elif isinstance(recipe, Joined):
            yield e.array[sum(recipe.counts, const(0))] - e
        elif isinstance(recipe, Owners | Order):
            yield recipe.count - 1 - e
        yield from _owned(e)


def _owned(e: Element) -> Iterator[Expr]:
    """Facts about a running sum at the owner of a position: it is at most that position, and the next sum exceeds it."""
    for owner, after in ((e.index, 0), (e.index - 1, 1)):
        position: Expr | None = None
        if isinstance(owner, Search) and owner.array == e.array:
            position = owner.position
        elif isinstance(owner, Element) and isinstance(owner.array.recipe, Owners) and owner.array.recipe.offsets == e.array:
            position = owner.index
        if position is not None:
            yield e - position - 1 if after else position - e
