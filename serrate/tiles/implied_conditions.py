"""Implied conditions: a position inside its row is below the length of the longest row.

In: a traced program. Out: the same, without conditions that others imply.

    for k < max_length:  t sum= x[k]  where k < max_length and k < length[c]   ->   ...  where k < length[c]

Strategies then find one condition, not two. Memory safety does not depend on these conditions: offsets that change after they
were checked are clamped to their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serrate.ir.expr import Array, Element, Expr, Less
from serrate.ir.loops import Bind, Block, Declare, Guard, If, While
from serrate.ir.renaming import Renaming
from serrate.ir.tile import Statement, TileProgram, inner, with_inner


def without_implied(program: TileProgram) -> TileProgram:
    """The program with one condition, not two, for a position inside a row."""
    change = _Implied(frozenset(program.longest))
    return program.with_phases(tuple(replace(p, body=tuple(map(change.statement, p.body))) for p in program.phases))


@dataclass(frozen=True)
class _Implied(Renaming):
    longest: frozenset[tuple[Expr, Array]]

    def guard(self, guard: Guard) -> Guard:
        return tuple(g for g in guard if not any(self._implies(h, g) for h in guard))

    def _implies(self, known: Less, asked: Less) -> bool:
        if known.left is not asked.left:
            return False
        read = (e for e in known.right.walk() if isinstance(e, Element) and (asked.right, e.array) in self.longest)
        return any(known.right is e.array[e.index + 1] - e for e in read)

    def statement(self, node: Statement) -> Statement:
        if isinstance(node, If | While):
            node = replace(node, guard=self.guard(node.guard))
        if inner(node):
            return with_inner(node, tuple(tuple(map(self.statement, part)) for part in inner(node)))
        return self.node(node) if isinstance(node, Block | Declare | Bind) else node
