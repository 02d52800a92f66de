"""The primitive `share`: common subexpression elimination and hoisting for block statements.

In: a phase of block statements. Out: the same, with shared subexpressions in private blocks.

A subexpression with fewer axes than its statement would be recomputed in every lane that it does not depend on; an expensive one
that several statements need would be recomputed in each. Neither is moved across a statement that changes its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serrate.ir.expr import Element
from serrate.ir.loops import (
    Assign,
    Declare,
    Dot,
    Existing,
    Held,
    If,
    Lane,
    Load,
    Local,
    Reduce,
    Running,
    While,
    Write,
    expressions_of,
    held,
    symbols_of,
    values_of,
)
from serrate.ir.tile import (
    SERIAL,
    Along,
    Around,
    Axis,
    ByLength,
    Leaf,
    Loop,
    Statement,
    TileProgram,
    inner,
    statements,
    with_inner,
)
from serrate.ir.values import COSTLY, Call, Constant, Role, Value, call, rewrite


def shared(program: TileProgram, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The statements of a phase, with shared subexpressions computed once."""
    return _Sharing(program, body).body(body)


def names_in(program: TileProgram, body: tuple[Statement, ...]) -> set[str]:
    """All names that statements, axes and tensors use, to be avoided by new ones."""
    found = {t.name for t in (*program.inputs, *program.outputs, *program.scratch)} | {a.name for a in program.axes}
    exprs = [e for a in program.axes for e in (a.begin, a.end)]
    for node in statements(body):
        found |= {node.local.name} if isinstance(node, Declare) else set()
        exprs += [] if isinstance(node, Around | Leaf) else expressions_of(node)
    return found | {s.name for e in exprs for s in e.symbols}


class _Sharing:
    def __init__(self, program: TileProgram, body: tuple[Statement, ...]) -> None:
        self.program = program
        self.axes = {a.position: a for a in program.axes} | {a.lane: a for a in program.axes}
        self.used = names_in(program, body)
        self.count = 0
        self.summed = {n.local.name for n in statements(body) if isinstance(n, Dot)}
        self.made: set[str] = set()
        """Private blocks that hold shared subexpressions."""

    def body(self, body: Sequence[Statement]) -> tuple[Statement, ...]:
        out: list[Statement] = []
        kept: dict[Value, Local] = {}
        counts = self._counts(body)
        for node in body:
            if isinstance(node, Loop | Along | ByLength | If | While):
                node = with_inner(node, tuple(self.body(part) for part in inner(node)))
                if isinstance(node, Loop) and node.kind is SERIAL:
                    node, fixed = self._outward(node)
                    out += fixed
            elif isinstance(node, Assign | Reduce | Dot | Running | Write):
                node = self._node(node, out, kept, counts)
            self._forget(node, kept)
            out.append(node)
        return tuple(out)

    def _outward(self, loop: Loop) -> tuple[Loop, list[Statement]]:
        """Hoists loop-invariant subexpressions: returns the loop without them, and the hoisted statements."""
        axis = self.program.axis_of(loop.domain)
        axes = {a for a in self.axes.values() if a.original is axis}
        own = {s for a in axes for s in (a.position, a.lane, a.number, a.first, a.last)}
        changed = {n.local.name for n in statements(loop.body) if isinstance(n, Assign | Reduce | Dot | Running)}
        tensors = {n.tensor for n in statements(loop.body) if isinstance(n, Write)}
        fixed: list[Statement] = []
        moved: set[str] = set()
        for node in loop.body:
            if not isinstance(node, Assign) or node.local.name not in self.made:
                continue
            parts = list(node.value.walk())
            inside = {v.local.name for v in parts if isinstance(v, Held)} & (changed - moved)
            counts = any(isinstance(v, Existing) and {lane.symbol for lane in v.lanes} & own for v in parts)
            loads = counts or any(isinstance(v, Load) and v.tensor in tensors for v in parts)
            local = {
                e.array.name for v in parts if isinstance(v, Load) for x in v.index for e in x.walk() if isinstance(e, Element)
            }
            if not inside and not loads and not symbols_of(node.value) & own and not local & changed:
                moved.add(node.local.name)
                fixed += [Declare(node.local, None), node]
        rest = tuple(n for n in loop.body if not (isinstance(n, Declare | Assign) and n.local.name in moved))
        return replace(loop, body=rest), fixed

    def _counts(self, body: Sequence[Statement]) -> dict[Value, int]:
        """In how many statements of a body each subexpression occurs; neighbours over the same lanes count as one."""
        found: dict[Value, int] = {}
        before: tuple[Any, set[Any]] = (None, set())
        for node in body:
            if not isinstance(node, Assign | Reduce | Dot | Running | Write):
                continue
            form = None if isinstance(node, Dot) else (node.lanes, node.guard)
            parts = {v for value in values_of(node) for v in value.walk() if isinstance(v, Call)}
            for v in parts - (before[1] if form is not None and form == before[0] else set()):
                found[v] = found.get(v, 0) + 1
            before = (form, parts)
        return found

    def _node(self, node: Any, out: list[Statement], kept: dict[Value, Local], counts: dict[Value, int]) -> Any:
        lanes = {lane.symbol for lane in node.lanes}
        order = {lane.symbol: k for k, lane in enumerate(node.lanes)}

        def change(v: Value) -> Value | None:
            if v in kept:
                return held(kept[v])
            if not isinstance(v, Call) or v.function == "cast":
                return None
            if v.function == "div" and self._rounded(v) and {a.position for a in self._axes(v.args[1])} < lanes:
                # One quotient for all lanes that share the divisor; products in the lanes.
                return rewrite(call("mul", v.args[0], call("reciprocal", v.args[1], dtype=v.dtype), dtype=v.dtype), change)
            own = sorted(self._axes(v), key=lambda a: order.get(a.position, len(order)))
            wide = {a.position for a in own} < lanes and not all(isinstance(a, Constant) for a in v.args)
            shared = counts.get(v, 0) > 1 and _costly(v) and {a.position for a in own} <= lanes
            if not (wide or shared):
                return None
            kept[v] = local = self._kept(v, own, out, kept, counts)
            return held(local)

        if isinstance(node, Dot):
            return replace(node, left=rewrite(node.left, change), right=rewrite(node.right, change))
        if isinstance(node, Assign) and not self._shares(node, kept):
            # A statement that only assigns the subexpression is where it is computed.
            return replace(node, value=self._inside(node.value, change))
        node = replace(node, value=rewrite(node.value, change))
        if isinstance(node, Write) and any(
            isinstance(v, Load) and v.tensor is node.tensor and v.index != node.index for v in node.value.walk()
        ):
            # One lane must not overwrite what another has yet to read.
            local = self._kept(node.value, [self.axes[lane.symbol] for lane in node.lanes], out, kept, counts)
            node = replace(node, value=held(local))
        return node

    def _rounded(self, quotient: Call) -> bool:
        """Whether the operands of a quotient are rounded by a sum anyway, so multiplying by the reciprocal is as accurate."""
        over, by = quotient.args
        powers = any(isinstance(v, Call) and v.function in ("exp", "exp_below") for v in over.walk())
        kept = any(isinstance(v, Load) and v.tensor.role is Role.PRIVATE for v in over.walk())
        products = any(isinstance(v, Held) and v.local.name in self.summed for v in over.walk())
        return quotient.dtype.is_floating_point and isinstance(by, Held) and (powers or kept or products)

    def _shares(self, node: Assign, kept: dict[Value, Local]) -> bool:
        return node.value in kept

    def _inside(self, value: Value, change: Any) -> Value:
        if not isinstance(value, Call):
            return value
        return call(value.function, *(rewrite(a, change) for a in value.args), dtype=value.dtype)

    def _axes(self, value: Value) -> list[Axis]:
        found = dict.fromkeys(self.axes[s] for s in sorted(symbols_of(value), key=str) if s in self.axes)
        return list(found)

    def _kept(
        self, value: Value, axes: Sequence[Axis], out: list[Statement], kept: dict[Value, Local], counts: dict[Value, int]
    ) -> Local:
        """A private block for a subexpression, whose own subexpressions may get blocks too."""
        self.count += 1
        name = f"t{self.count}"
        while name in self.used:
            self.count += 1
            name = f"t{self.count}"
        lanes = tuple(Lane(a.position, 0) for a in axes if a.looped or (a.size or 2) > 1)
        local = Local(name, value.dtype, lanes)
        self.made.add(name)
        node = self._node(Assign(lanes, (), local, value), out, kept, counts)
        out += [Declare(local, None), node]
        return local

    @staticmethod
    def _forget(node: Statement, kept: dict[Value, Local]) -> None:
        """Drops the subexpressions whose operands a statement changes."""
        inside = statements((node,))
        changed = {n.local.name for n in inside if isinstance(n, Assign | Reduce | Dot | Running)}
        changed |= {n.carry.name for n in statements((node,)) if isinstance(n, Running)}
        tensors = {n.tensor for n in statements((node,)) if isinstance(n, Write)}
        for value in list(kept):
            for v in value.walk():
                if (isinstance(v, Held) and v.local.name in changed) or (isinstance(v, Load) and v.tensor in tensors):
                    kept.pop(value, None)


def _costly(value: Value) -> bool:
    return any(isinstance(v, Call) and v.function in COSTLY for v in value.walk())
