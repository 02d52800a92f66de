"""Facts: what loops and guards say at a place of a loop program, and what follows from it.

In: conditions that hold, names of expressions. Out: whether an expression cannot be negative there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from serrate.ir.expr import Element, Expr, FloorDiv, Less, Maximum, Minimum, Search, const
from serrate.ir.loops import Bind
from serrate.ir.recipes import Joined, Owners, RunningSum
from serrate.ir.solve import terms_of

DEPTH = 8
"""How many facts a proof may use."""


class Facts:
    """What loops and guards say, each as an expression that is not negative. `0 <= e` holds if `e` is a sum of facts and of
    something whose bounds are not negative."""

    def __init__(self, known: Sequence[Expr], names: Mapping[Expr, Expr] = MappingProxyType({})) -> None:
        self.known, self.names = tuple(known), names
        """Names stand for expressions, of which more is known: facts and what is to be proven are spelled out."""

    def and_(self, *conditions: Less) -> Facts:
        """With conditions that hold here."""
        spelled = (Less(self.spelled_out(c.left), self.spelled_out(c.right)) for c in conditions)
        return Facts((*self.known, *(fact for c in spelled for fact in _facts_of(c))), self.names)

    def named(self, node: Bind) -> Facts:
        """With a name for an expression."""
        return self if node.guard else Facts(self.known, {**self.names, node.symbol: self.spelled_out(node.expr)})

    def spelled_out(self, e: Expr) -> Expr:
        """An expression without names."""
        return e.substitute(self.names) if self.names else e

    def holds(self, condition: Less) -> bool:
        """Whether a condition follows."""
        return self.prove(self.spelled_out(condition.right) - self.spelled_out(condition.left) - 1)

    def prove(self, e: Expr, depth: int = DEPTH) -> bool:
        """Whether 0 <= e follows."""
        if e.bounds[0] is not None and e.bounds[0] >= 0:
            return True
        if depth == 0:
            return False
        for term, factor in terms_of(e):
            bound = term.bounds[1 if factor < 0 else 0]
            if bound is None or (factor > 0 and bound < 0):
                return self._without(e, term, factor, depth)
        # Bounds of all terms are known, and yet too far apart: a fact about several of them may say more.
        return any(self._without(e, term, factor, depth) for term, factor in terms_of(e) if factor < 0)

    def _without(self, e: Expr, term: Expr, factor: int, depth: int) -> bool:
        """Whether 0 <= e follows from facts about one of its terms."""
        for fact in (*self.known, *_about(term)):
            own = next((f for t, f in terms_of(fact) if t is term), 0)
            if own * factor > 0 and factor % own == 0 and self.prove(e - fact * (factor // own), depth - 1):
                return True
        rest = e - term * factor
        if isinstance(term, FloorDiv) and term.right.value is not None:
            size = term.right.value
            # size * (v // size) is at most v, and more than v - size; what is more than -size is not negative when divided.
            top = term.left if factor < 0 else term.left - (size - 1)
            return self.prove(rest * size + top * factor + (size - 1), depth - 1)
        if isinstance(term, Minimum | Maximum) and (factor < 0) == isinstance(term, Maximum):
            return all(self.prove(rest + operand * factor, depth - 1) for operand in term.operands)
        return False


def _facts_of(condition: Less) -> Iterator[Expr]:
    """left < right: right - left - 1 is not negative; of the smaller of two, that of both."""
    if isinstance(condition.right, Minimum):
        for operand in condition.right.operands:
            yield from _facts_of(Less(condition.left, operand))
    elif isinstance(condition.left, Maximum):
        for operand in condition.left.operands:
            yield from _facts_of(Less(operand, condition.right))
    else:
        yield condition.right - condition.left - 1


def _about(e: Expr) -> Iterator[Expr]:
    """What is true of an expression by what it is."""
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
        elif isinstance(recipe, Owners):
            yield recipe.count - 1 - e
        yield from _owned(e)


def _owned(e: Element) -> Iterator[Expr]:
    """Of a running sum at the owner of a position: it is at most that position, and the next one is more."""
    for owner, after in ((e.index, 0), (e.index - 1, 1)):
        position: Expr | None = None
        if isinstance(owner, Search) and owner.array == e.array:
            position = owner.position
        elif isinstance(owner, Element) and isinstance(owner.array.recipe, Owners) and owner.array.recipe.offsets == e.array:
            position = owner.index
        if position is not None:
            yield e - position - 1 if after else position - e
