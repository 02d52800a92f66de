"""Guess maxima: softmax statistics without a separate pass for the maximum, if a guess is good enough.

In: a loop program. Out: the same, with a row's exponentials taken relative to the largest of its first positions:

    m max= x over the row                       m max= x over its head
    t sum= e^(x - m) over the row        ->     t sum= e^(x - m), high max= height of x above m, over the row
                                                far max= whether that is too high
                                                if 0 < far:  both loops as before

Only m + log t matters, so any m works as long as no x is far above it: e^(x - m) must not overflow, and log t must not become so
large that rounding errors are visible. A NaN makes t NaN either way; an infinity is too far above any guess, and is never a guess
itself. If all results have 16 bits, the exponentials need only a few more bits than that.

Nothing else may depend on m. For a maximum that starts at the lowest finite number, the shift of a softmax, this always holds.
For any other maximum, `lower/shifts.py` checks all following statements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from serrate.ir.expr import Less, const, symbol
from serrate.ir.loops import (
    MAX_NUMBER,
    Assign,
    Declare,
    For,
    Held,
    If,
    Lane,
    Local,
    LoopProgram,
    Node,
    Prefetch,
    Reduce,
    Write,
    held,
    nodes,
)
from serrate.ir.tile import GRID
from serrate.ir.values import Call, Constant, Value, carried_dtype, constant, intern
from serrate.lower.names import Names
from serrate.lower.nests import locals_of
from serrate.lower.passes.common import Body, effects, inward, kept, per_kernel
from serrate.lower.shifts import is_shift

HEAD = 16
"""The guess is the maximum of this many positions at the start of a row's block."""
POWERS = ("exp_diff", "exp_below")
"""Functions that compute e^(x - m) for x <= m."""


def guess_maxima(program: LoopProgram) -> LoopProgram:
    """Guesses every maximum for which it is legal."""
    rough = all(t.dtype in (torch.bfloat16, torch.float16) for t in program.outputs)
    guessing = _Guessing(Names(program), "exp_rough" if rough else "exp_near")
    return per_kernel(program, lambda k: guessing.body(k.body, last=False))


@dataclass(frozen=True)
class _Statistics:
    """Two loops over a row: their places in the body, the initial values of their blocks, and the lane to guess from."""

    maxima: int
    sums: int
    shift: Assign
    total: Assign
    head: Lane


class _Guessing:
    def __init__(self, names: Names, power: str) -> None:
        self.names, self.power = names, power

    def body(self, body: Body, *, last: bool) -> Body:
        """Rewrites statements; `last`: whether they are the last of their worker."""
        for k in range(len(body)):
            found = _statistics(body, k, last)
            if found is not None:
                return (*body[:k], *self._guessed(body, found), *self.body(body[found.sums + 1 :], last=last))
        return kept(body, (self._inward(node, last and node is body[-1]) for node in body))

    def _inward(self, node: Node, last: bool) -> Node:
        ends = (isinstance(node, For) and node.kind is GRID) or (isinstance(node, If) and last)
        return inward(node, lambda part: self.body(part, last=ends))

    def _guessed(self, body: Body, found: _Statistics) -> list[Node]:
        maxima, sums, shift = body[found.maxima], body[found.sums], found.shift.local
        high = Local(self.names.of((shift, "high"), f"{shift.name}_high"), torch.int32, shift.lanes)
        far = Local(self.names.of((shift, "far"), f"{shift.name}_far"), torch.int32, ())
        between = body[found.maxima + 1 : found.sums]
        begins = Less(found.head.symbol, const(HEAD))
        too_high = intern(Call, torch.int32, "too_high", (held(high), held(shift)))
        exact = (
            found.shift,
            maxima,
            found.total,
            *_changed(sums, lambda n: () if isinstance(n, Prefetch) else (n,)),
        )
        return [
            *_changed(maxima, lambda n: (replace(n, guard=(*n.guard, begins), operator=MAX_NUMBER),)),
            *(n for n in between if isinstance(n, Declare)),
            Declare(high, 0),
            *_changed(sums, lambda n: self._quickly(n, high)),
            Declare(far, 0),
            Reduce(shift.lanes, (), far, "max", too_high),
            If((Less(const(0), symbol(far.name, None, None)),), exact, ()),
            *(n for n in between if not isinstance(n, Declare)),
        ]

    def _quickly(self, node: Node, high: Local) -> tuple[Node, ...]:
        """A statement with cheaper exponentials; if it sums them, it also tracks how far they exceed the guess."""
        if not isinstance(node, Reduce | Write):
            return (node,)
        assert isinstance(node.value, Call)
        quick = replace(node, value=intern(Call, node.value.dtype, self.power, node.value.args))
        if isinstance(node, Write):
            return (quick,)
        return (quick, Reduce(node.lanes, node.guard, high, "max", intern(Call, torch.int32, "height", node.value.args)))


def _statistics(body: Body, at: int, last: bool) -> _Statistics | None:
    """The statistics that start at this statement: it takes the maximum of a row, and a later one sums exponentials relative to
    it. In between there may be declarations, and stores of the maximum, which can be postponed."""
    found = _maximum(body[at])
    if found is None:
        return None
    shift, head = found
    start = _start(body, at, shift)
    sums = next((k for k, n in enumerate(body[at + 1 :], at + 1) if not _waits(n, shift)), len(body))
    if start is None or sums == len(body):
        return None
    powers = [n for n in nodes((body[sums],)) if not isinstance(n, For)]
    summed = [n for n in powers if isinstance(n, Reduce)]
    if len(summed) != 1 or summed[0].operator != "sum" or not _is_power(summed[0].value, shift):
        return None
    if not all(isinstance(n, Prefetch) or (isinstance(n, Reduce | Write) and n.value is summed[0].value) for n in powers):
        return None
    total = _start(body, sums, summed[0].local)
    if total is None or _number(total.value) != 0:
        return None
    if _number(start.value) != torch.finfo(shift.dtype).min:
        own = {n.local for n in body[:sums] if isinstance(n, Declare)}
        if not last or not {shift, summed[0].local} <= own or not is_shift(shift, body[at + 1 :]):
            return None
    return _Statistics(at, sums, start, total, head)


def _waits(node: Node, shift: Local) -> bool:
    """Whether a statement may lie between the two loops: a declaration, or a store of the maximum itself."""
    return isinstance(node, Declare) or (isinstance(node, Write) and node.value is held(shift))


def _start(body: Sequence[Node], at: int, local: Local) -> Assign | None:
    """The initial value of a block that is untouched before this place of a body."""
    for node in reversed(body[:at]):
        if isinstance(node, Declare) and node.local == local:
            return None if node.number is None else Assign(local.lanes, (), local, constant(node.number, local.dtype))
        if isinstance(node, Assign) and node.local == local:
            whole = not node.guard and set(node.lanes) == set(local.lanes)
            return node if whole and not any(isinstance(v, Held) for v in node.value.walk()) else None
        if any(local in locals_of(n) for n in effects((node,)) if not (isinstance(n, Write) and n.value is held(local))):
            return None
    return None


def _number(value: Value) -> float | None:
    return value.number if isinstance(value, Constant) else None


def _maximum(node: Node) -> tuple[Local, Lane] | None:
    """The block into which a loop takes the maximum of a row, and the lane along the row to guess from."""
    found = [n for n in nodes((node,)) if not isinstance(n, For)]
    if len(found) != 1 or not isinstance(found[0], Reduce) or found[0].operator != "max":
        return None
    shift = found[0].local
    long = [lane for lane in found[0].lanes if lane not in shift.lanes and lane.size > HEAD]
    return (shift, long[0]) if long and shift.dtype == torch.float32 else None


def _is_power(value: Value, shift: Local) -> bool:
    if not isinstance(value, Call) or value.function not in POWERS or value.args[1] is not held(shift):
        return False
    within = any(isinstance(v, Held) and v.local == shift for v in value.args[0].walk())
    return not within and value.dtype == carried_dtype(value.args[0].dtype) == torch.float32


def _changed(node: Node, change: Callable[[Any], tuple[Node, ...]]) -> tuple[Node, ...]:
    """A statement replaced, or the statements inside a loop."""
    if isinstance(node, For):
        return (replace(node, body=tuple(new for inner in node.body for new in _changed(inner, change))),)
    return change(node)
