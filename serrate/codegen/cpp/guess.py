"""Softmax statistics without a pass for the maximum, where a guess serves.

In: a loop program. Out: the same, in which a row's exponentials are taken relative to the largest of its first positions:

    m max= x over the row;  t sum= e^(x - m)
        ->  m max= x over its head;  t sum= e^(x - m), high max= height of x above m;  if too high: as before

Only m + log t means anything, so any m will do that nothing lies far above: e^(x - m) must not overflow, and log t not grow so
large that its rounding shows. A NaN makes t NaN either way; an infinity is too high above any guess, and not a guess itself.
Where all results have sixteen bits, the exponentials need not have more than a few bits beyond those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from serrate.codegen.cpp.statements import MAX_NUMBER
from serrate.ir.expr import Less, const
from serrate.ir.loops import (
    Assign,
    Attempt,
    Declare,
    For,
    Held,
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
from serrate.ir.values import Call, constant, intern

HEAD = 16
"""Positions of every block of a row whose largest value is the guess."""


def guess(program: LoopProgram) -> LoopProgram:
    """The program with every maximum guessed that may be."""
    exactness = "rough" if all(t.dtype in (torch.bfloat16, torch.float16) for t in program.outputs) else "near"
    return replace(program, kernels=tuple(replace(k, body=_guessed(k.body, exactness)) for k in program.kernels))


def _guessed(body: tuple[Node, ...], exactness: str) -> tuple[Node, ...]:
    out: list[Node] = []
    k = 0
    while k < len(body):
        # Four statements make an attempt: m from nothing, its loop, t from nothing, its loop. Where m is needed by others too
        # there is a fifth, which writes it before the sums begin, and now after they end.
        window = [n for n in body[k : k + 5] if not _publishes(n, body[k])]
        found = _attempt(window[:4], exactness)
        node = body[k]
        out.append(found or (replace(node, body=_guessed(node.body, exactness)) if isinstance(node, For) else node))
        if found:
            later = [n for n in body[k : k + 5] if _publishes(n, body[k])]
            out += later
            k += 4 + len(later)
        else:
            k += 1
    return tuple(out)


def _publishes(node: Node, start: Node) -> bool:
    """Whether a statement writes the block that `start` declares to memory, as it is."""
    return isinstance(node, Write) and isinstance(start, Declare) and node.value is held(start.local)


def _attempt(body: Sequence[Node], exactness: str) -> Attempt | None:
    """The first statements of a body as an attempt, if they are: a maximum from nothing, and sums of powers relative to it."""
    if len(body) < 4:
        return None
    start, maxima, zero, sums = body
    if not (isinstance(start, Declare) and isinstance(zero, Declare)):
        return None
    shift, total = start.local, zero.local
    if shift.dtype != torch.float32 or start.number != torch.finfo(shift.dtype).min:
        return None
    head = _head(maxima, shift)
    powers = [n for n in nodes((sums,)) if not isinstance(n, For)]
    summed = [n for n in powers if isinstance(n, Reduce) and n.local == total]
    if head is None or len(summed) != 1 or not all(_is_power(n, summed[0], shift) for n in powers):
        return None
    high = Local(f"{shift.name}_high", torch.int32, shift.lanes)
    quick = (
        start,
        *_changed(maxima, lambda n: (replace(n, guard=(*n.guard, Less(head.symbol, const(HEAD))), operator=MAX_NUMBER),)),
        zero,
        Declare(high, 0),
        *_changed(sums, lambda n: _quickly(n, high, exactness)),
    )
    exact = (_reset(start), maxima, _reset(zero), *_changed(sums, lambda n: () if isinstance(n, Prefetch) else (n,)))
    return Attempt(quick, ("too_high", (high, shift)), exact)


def _head(maxima: Node, shift: Local) -> Lane | None:
    """The lane along a row whose first positions make the guess; None if this does not take the maximum of a row."""
    found = [n for n in nodes((maxima,)) if not isinstance(n, For)]
    if len(found) != 1 or not isinstance(found[0], Reduce) or (found[0].local, found[0].operator) != (shift, "max"):
        return None
    long = [lane for lane in found[0].lanes if lane not in shift.lanes and lane.size > HEAD]
    return long[0] if long else None


def _is_power(node: Node, summed: Reduce, shift: Local) -> bool:
    """Whether a statement keeps, sums or hints at the powers that are summed."""
    if isinstance(node, Prefetch):
        return True
    value = summed.value
    power = isinstance(value, Call) and value.function == "exp_diff" and value.args[1] is held(shift)
    others = [v for v in value.args[0].walk() if isinstance(v, Held) and v.local == shift] if isinstance(value, Call) else []
    return power and not others and isinstance(node, Reduce | Write) and node.value is value


def _quickly(node: Node, high: Local, exactness: str) -> tuple[Node, ...]:
    """A statement of powers with the short form of them; where they are summed, how high they are too."""
    if not isinstance(node, Reduce | Write):
        return (node,)
    assert isinstance(node.value, Call)
    quick = replace(node, value=intern(Call, node.value.dtype, f"exp_{exactness}", node.value.args))
    if isinstance(node, Write):
        return (quick,)
    height = intern(Call, torch.int32, "height", node.value.args)
    return (quick, Reduce(node.lanes, node.guard, high, "max", height))


def _changed(node: Node, change: Callable[[Any], tuple[Node, ...]]) -> tuple[Node, ...]:
    """The statements inside a loop, or a statement itself, replaced."""
    if isinstance(node, For):
        return (replace(node, body=tuple(new for inner in node.body for new in _changed(inner, change))),)
    return change(node)


def _reset(node: Declare) -> Assign:
    assert node.number is not None
    return Assign(node.local.lanes, (), node.local, constant(node.number, node.local.dtype))
