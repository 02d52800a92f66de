"""What is worked out once: parts of values that several statements share, or that many lanes would repeat.

In: a kernel program as traced. Out: the same, in which such parts are private blocks of their own.

A part with fewer axes than its statement would be computed again in every lane that it does not depend on; a costly part that
several statements need would be computed again in each. Neither is moved across a statement that changes what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serrate.ir.kernel import Along, Axis, KernelProgram, Statement, Tiles, inner, statements, with_inner
from serrate.ir.loops import Assign, Declare, Dot, Held, If, Lane, Load, Local, Reduce, Running, While, Write, held, values_of
from serrate.ir.values import Call, Constant, Value, call, rewrite
from serrate.tiles.values import symbols_of

COSTLY = frozenset("exp log sqrt rsqrt sigmoid tanh silu gelu erf pow sin cos div exp_diff".split())  # noqa: SIM905


def tidy(program: KernelProgram) -> KernelProgram:
    """The program with shared parts worked out once."""
    worker = _Tidy(program)
    return replace(program, body=worker.body(program.body))


class _Tidy:
    def __init__(self, program: KernelProgram) -> None:
        self.axes = {a.position: a for a in program.axes} | {a.lane: a for a in program.axes}
        self.used = {n.local.name for n in statements(program.body) if isinstance(n, Declare)}
        self.count = 0

    def body(self, body: Sequence[Statement]) -> tuple[Statement, ...]:
        out: list[Statement] = []
        kept: dict[Value, Local] = {}
        counts = self._counts(body)
        for node in body:
            if isinstance(node, Tiles | Along | If | While):
                node = with_inner(node, tuple(self.body(part) for part in inner(node)))
            elif isinstance(node, Assign | Reduce | Dot | Running | Write):
                node = self._node(node, out, kept, counts)
            self._forget(node, kept)
            out.append(node)
        return tuple(out)

    def _counts(self, body: Sequence[Statement]) -> dict[Value, int]:
        """In how many statements of a body each part occurs."""
        found: dict[Value, int] = {}
        for node in body:
            if isinstance(node, Assign | Reduce | Dot | Running | Write):
                for v in {v for value in values_of(node) for v in value.walk() if isinstance(v, Call)}:
                    found[v] = found.get(v, 0) + 1
        return found

    def _node(self, node: Any, out: list[Statement], kept: dict[Value, Local], counts: dict[Value, int]) -> Any:
        lanes = {lane.symbol for lane in node.lanes}

        def change(v: Value) -> Value | None:
            if v in kept:
                return held(kept[v])
            if not isinstance(v, Call) or v.function == "cast":
                return None
            if v.function == "div" and v.dtype.is_floating_point and {a.position for a in self._axes(v.args[1])} < lanes:
                # One quotient for all lanes that share the divisor; products in the lanes.
                return rewrite(call("mul", v.args[0], call("reciprocal", v.args[1], dtype=v.dtype), dtype=v.dtype), change)
            own = self._axes(v)
            wide = {a.position for a in own} < lanes and not all(isinstance(a, Constant) for a in v.args)
            shared = counts.get(v, 0) > 1 and _costly(v) and {a.position for a in own} <= lanes
            if not (wide or shared) or not _worth(v):
                return None
            local = self._kept(v, own, out)
            kept[v] = local
            return held(local)

        if isinstance(node, Dot):
            return replace(node, left=rewrite(node.left, change), right=rewrite(node.right, change))
        if isinstance(node, Assign) and not self._shares(node, kept):
            # A statement that is nothing but the part itself is where it is worked out.
            return replace(node, value=self._inside(node.value, change))
        node = replace(node, value=rewrite(node.value, change))
        if isinstance(node, Write) and any(
            isinstance(v, Load) and v.tensor is node.tensor and v.index != node.index for v in node.value.walk()
        ):
            # What one lane writes, another one may still have to read.
            local = self._kept(node.value, [self.axes[lane.symbol] for lane in node.lanes], out)
            node = replace(node, value=held(local))
        return node

    def _shares(self, node: Assign, kept: dict[Value, Local]) -> bool:
        return node.value in kept

    def _inside(self, value: Value, change: Any) -> Value:
        if not isinstance(value, Call):
            return value
        return call(value.function, *(rewrite(a, change) for a in value.args), dtype=value.dtype)

    def _axes(self, value: Value) -> list[Axis]:
        found = dict.fromkeys(self.axes[s] for s in sorted(symbols_of(value), key=str) if s in self.axes)
        return list(found)

    def _kept(self, value: Value, axes: Sequence[Axis], out: list[Statement]) -> Local:
        self.count += 1
        name = f"t{self.count}"
        while name in self.used:
            self.count += 1
            name = f"t{self.count}"
        lanes = tuple(Lane(a.position, 0) for a in axes if a.looped or (a.size or 2) > 1)
        local = Local(name, value.dtype, lanes)
        out += [Declare(local, 0), Assign(lanes, (), local, value)]
        return local

    @staticmethod
    def _forget(node: Statement, kept: dict[Value, Local]) -> None:
        """Parts that are made of something the statement changes are not what they were."""
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


def _worth(value: Value) -> bool:
    """Whether a part is more than what it is read from."""
    return isinstance(value, Call)
