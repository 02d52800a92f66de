"""Row ends: drops the length of the longest row from bounds that the row's own length already tightens.

In: a loop program, and the numbers that are the length of the longest row (`LoopProgram.longest`). Out: the same, without these
numbers where a bound by the row's own length is at least as tight:

    serial r < min(longest, len[c]):  ...  where r < longest and r < len[c]   ->   serial r < len[c]:  ...  where r < len[c]
    serial k < min((len[c] + 7)//8, (min(longest, q*8 + 8) + 7)//8)           ->   serial k < min((len[c] + 7)//8, q + 1)

An operand of a minimum is dropped if it is monotonic in `longest` and, even with `len[c] <= longest` substituted, at least as
large as another operand: then it never determines the minimum. On a GPU, a program without `longest` needs no host copy of
lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

from serrate.ir.expr import Array, Element, Expr, FloorDiv, Less, Maximum, Minimum, Sum, Symbol, minimum
from serrate.ir.loops import Bind, Block, Declare, For, Guard, If, LoopProgram, Node, While
from serrate.ir.renaming import Renaming
from serrate.lower.facts import Facts
from serrate.lower.passes.common import Body, changed, found_in, inward, kept, per_kernel


def row_ends(program: LoopProgram) -> LoopProgram:
    """Drops the length of the longest row from bounds that contain a row's own length."""
    used = {e for kernel in program.kernels for e in found_in(kernel.body)}
    longest: dict[Symbol, set[Array]] = {}
    for number, rows in program.longest:
        if number in used:
            longest.setdefault(number, set()).add(rows)
    if not longest:
        return program
    ends = _RowEnds(longest)
    return per_kernel(program, lambda k: ends.body(k.body))


class _RowEnds(Renaming):
    def __init__(self, longest: dict[Symbol, set[Array]]) -> None:
        self.longest, self.facts = longest, Facts(())

    def body(self, body: Body) -> Body:
        """Statements, at any depth."""
        return kept(body, map(self.statement, body))

    def statement(self, node: Node) -> Node:
        """A statement with everything inside it."""
        if self.longest.keys().isdisjoint(found_in((node,))):
            return node
        if isinstance(node, Block | Declare | Bind):
            return self.node(node)
        node = inward(node, self.body)
        if isinstance(node, For):
            return changed(node, extent=self.expr(node.extent), bound=self.expr(node.bound))
        return changed(node, guard=self.guard(node.guard)) if isinstance(node, If | While) else node

    def expr(self, expr: Expr) -> Expr:
        if expr.symbols.isdisjoint(self.longest):
            return expr
        operands = tuple(map(self.expr, expr.operands))
        expr = expr if operands == expr.operands else expr.rebuild(operands)
        if not isinstance(expr, Minimum):
            return expr
        terms = self._terms(expr)
        needed = self._needed(terms, ())
        return expr if len(needed) == len(terms) else functools.reduce(minimum, needed)

    def guard(self, guard: Guard) -> Guard:
        guard = super().guard(guard)
        found = list(guard)
        for condition in guard:
            terms = self._terms(condition.right)
            beside = [t for g in found if g is not condition and g.left is condition.left for t in self._terms(g.right)]
            needed = self._needed(terms, beside)
            if len(needed) < len(terms):
                tighter = [Less(condition.left, functools.reduce(minimum, needed))] if needed else []
                found = [g for other in found for g in (tighter if other is condition else [other])]
        return tuple(found)

    def _terms(self, expr: Expr) -> list[Expr]:
        """Expressions whose minimum this one is. Minima inside it are moved out where they may hide the longest row."""
        if isinstance(expr, Minimum):
            return [term for operand in expr.operands for term in self._terms(operand)]
        if expr.symbols.isdisjoint(self.longest):
            return [expr]
        if isinstance(expr, FloorDiv) and (expr.right.value or 0) > 0:
            return [term // expr.right for term in self._terms(expr.left)]
        if isinstance(expr, Sum):
            for inner, factor in expr.terms:
                if isinstance(inner, Minimum) and factor > 0 and not inner.symbols.isdisjoint(self.longest):
                    rest = expr - inner * factor
                    return [found for term in self._terms(inner) for found in self._terms(rest + term * factor)]
        return [expr]

    def _needed(self, terms: Sequence[Expr], beside: Iterable[Expr]) -> list[Expr]:
        """The terms that may determine a minimum, given other bounds on the same value."""
        kept = list(terms)
        for term in terms:
            others = [*(t for t in kept if t is not term), *beside]
            if any(self._is_beyond(term, other) for other in others):
                kept.remove(term)
        return kept

    def _is_beyond(self, term: Expr, other: Expr) -> bool:
        """Whether a term, which depends on the longest row, is at least as large as another, which depends on one row."""
        for longest in term.symbols & self.longest.keys():
            if not _grows(term, longest):
                continue
            lengths = _lengths(other, self.longest[longest])
            if any(self.facts.prove(term.substitute({longest: length}) - other) for length in lengths):
                return True
        return False


def _lengths(expr: Expr, offsets: Collection[Array]) -> list[Expr]:
    """The lengths of rows with these offsets that an expression contains."""
    starts = [e for e in expr.walk() if isinstance(e, Element) and e.array in offsets]
    lengths = [e.array[e.index + 1] - e for e in starts]
    return [length for length in lengths if length.operands and set(starts).issuperset(length.operands)]


def _grows(expr: Expr, symbol: Symbol) -> bool:
    """Whether an expression never decreases as a symbol grows."""
    if expr is symbol or symbol not in expr.symbols:
        return True
    if isinstance(expr, Sum):
        return all(symbol not in term.symbols or (factor > 0 and _grows(term, symbol)) for term, factor in expr.terms)
    if isinstance(expr, FloorDiv):
        return (expr.right.value or 0) > 0 and _grows(expr.left, symbol)
    return isinstance(expr, Minimum | Maximum) and all(_grows(operand, symbol) for operand in expr.operands)
