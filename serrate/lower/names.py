"""Names in loop programs: identifiers for the arrays a program reads, and fresh names.

In: a loop program. Out: identifiers.
"""

from __future__ import annotations

from serrate.ir.expr import Array, Element, Search
from serrate.ir.loops import Bind, Declare, For, LoopProgram, expressions_of, nodes

LONGEST = 60
"""The maximum length of a generated name."""


def array_names(program: LoopProgram) -> dict[Array, str]:
    """An identifier for every array the program reads: arguments keep their names, others are `derived0`, `derived1`, ..."""
    found: dict[Array, None] = {}
    for kernel in program.kernels:
        for node in nodes(kernel.body):
            for expr in expressions_of(node):
                for inner in expr.walk():
                    if isinstance(inner, Element | Search):
                        found[inner.array] = None
    # Strides may depend on lengths too, if an inner dim is as long as the longest row.
    strides = (d.extent_expr for tensor in program.tensors for d in tensor.storage[1:])
    found.update((e.array, None) for extent in strides for e in extent.walk() if isinstance(e, Element | Search))
    derived = (f"derived{k}" for k in range(len(found)))
    names = {a: a.name if a.recipe is None and a.data is None else next(derived) for a in found}
    # One tensor may serve as offsets and as indices. These are two arrays, because indices may be negative.
    return {a: f"{name}_index" if a.signed and not a.local else name for a, name in names.items()}


class Names:
    """Fresh names: different from all names that a loop program already uses."""

    def __init__(self, program: LoopProgram) -> None:
        self._taken = {t.name for t in program.tensors}
        for node in (n for k in program.kernels for n in nodes(k.body)):
            self._taken |= {s.name for e in expressions_of(node) for s in e.symbols}
            self._taken |= {lane.symbol.name for lane in getattr(node, "lanes", ())}
            if isinstance(node, Declare):
                self._taken.add(node.local.name)
            elif isinstance(node, For | Bind):
                self._taken.add(node.symbol.name)
        self._made: dict[object, str] = {}

    def of(self, key: object, wish: str) -> str:
        """The requested name, with a number appended if it is taken."""
        if key not in self._made:
            found, k = wish[:LONGEST], 1
            while found in self._taken:
                k += 1
                found = f"{wish[:LONGEST]}_{k}"
            self._taken.add(found)
            self._made[key] = found
        return self._made[key]
