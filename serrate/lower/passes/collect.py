"""Collect: lists the arrays and symbols that a program needs from its caller.

In: a loop program after all other passes. Out: the same, with `arrays` and `symbols` filled in.
"""

from __future__ import annotations

from dataclasses import replace

from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Expr, Search, Symbol, symbol
from serrate.ir.loops import Bind, Declare, For, LoopProgram, expressions_of, lanes_in, nodes
from serrate.lower.names import array_names


def collect(program: LoopProgram) -> LoopProgram:
    """Lists the arrays and symbols that the caller must supply."""
    introduced: set[Symbol] = set()
    used: dict[Symbol, None] = {}

    def uses(e: Expr) -> None:
        used.update(dict.fromkeys(sorted(e.symbols, key=str)))

    for node in (n for k in program.kernels for n in nodes(k.body)):
        if isinstance(node, For | Bind):
            introduced.add(node.symbol)
        elif isinstance(node, Declare) and not node.local.lanes:
            introduced.update((symbol(node.local.name, None, None), symbol(node.local.name)))
        introduced.update(lane.symbol for lane in lanes_in(node))
        for expr in expressions_of(node):
            uses(expr)
            for inner in expr.walk():
                if isinstance(inner, Search):
                    uses(inner.count)
        if isinstance(node, For):
            uses(node.bound)
    for tensor in program.tensors:
        for domain in tensor.storage:
            uses(domain.host_bound)
    symbols = tuple(s for s in used if s not in introduced and s is not COORDINATE)
    return replace(program, arrays=tuple(a for a in array_names(program) if not a.local), symbols=symbols)
