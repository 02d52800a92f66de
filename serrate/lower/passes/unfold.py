"""Unfold: folds of lanes become loops, on targets where lanes are loops anyway.

In: a loop program. Out: the same without `Fold`: positions are combined in order, from first to last.

    [r:8, d:4] a, b fold= x[r, d]   ->   serial r < 8:  [d:4] a, b = combine((a, b), lift(x[r, d]))
"""

from __future__ import annotations

from serrate.ir.expansion import steps
from serrate.ir.loops import Fold, LoopProgram, Node
from serrate.lower.passes.common import Body, inward, kept, per_kernel


def unfold(program: LoopProgram) -> LoopProgram:
    """The program with folds as loops over the lanes they reduce."""
    return per_kernel(program, lambda k: _unfolded(k.body))


def _unfolded(body: Body) -> Body:
    out: list[Node] = []
    for node in body:
        out += steps(node) if isinstance(node, Fold) else (inward(node, _unfolded),)
    return kept(body, out)
