"""Factor operands: an operand of a matrix product is computed by fewer operations per element.

In: a loop program. Out: the same; a common factor of two terms is multiplied once, and a constant scale of an operand is applied
to the sums instead, which are far fewer. Results differ only in rounding. The exception are operands that are rounded to
float16, which keep their scale: without it they could overflow, or underflow.

    serial k:  t += (a*p + b*p)*0.5 @ y[k]              serial k:  t += (a + b)*p @ y[k]
    z = t                                        ->     z = t*0.5
"""

from __future__ import annotations

from dataclasses import replace

import torch

from serrate.ir.loops import Declare, Dot, Held, LoopProgram, Node, Write, nodes, values_of, written_by
from serrate.ir.values import Call, Constant, Value, call, carried_dtype, constant, rewrite
from serrate.lower.passes.common import Body, Effect, inward, kept, per_kernel, with_values


def factor_operands(program: LoopProgram) -> LoopProgram:
    """Simplifies the operands of products."""
    return per_kernel(program, lambda k: _scaled_after(_factored(k.body)))


def _factored(body: Body) -> Body:
    out: list[Node] = []
    for node in body:
        product = isinstance(node, Dot) and node.local.dtype.is_floating_point
        out.append(with_values(node, _with_common_factor) if product and isinstance(node, Dot) else inward(node, _factored))
    return kept(body, out)


def _with_common_factor(value: Value) -> Value | None:
    """a*p + b*p as (a - -b)*p. For a + b, Triton would use b as the initial accumulator of the product a, and wait for it at
    once."""
    if not isinstance(value, Call) or value.function not in ("add", "sub") or not value.dtype.is_floating_point:
        return None
    left, right = value.args
    if not (isinstance(left, Call) and isinstance(right, Call) and left.function == right.function == "mul"):
        return None
    if any(v.dtype != value.dtype for v in (left, right, *left.args, *right.args)):
        return None
    for a, p in (left.args, left.args[::-1]):
        for b, other in (right.args, right.args[::-1]):
            if p is other:
                a, b, p = (rewrite(v, _with_common_factor) for v in (a, b, p))
                b = call("neg", b, dtype=value.dtype) if value.function == "add" else b
                return call("mul", call("sub", a, b, dtype=value.dtype), p, dtype=value.dtype)
    return None


def _scaled_after(body: Body) -> Body:
    """Scales the sums of products by the number that all their operands are scaled by."""
    scales = {name: scale for name in _summed(body) if (scale := _scale_of(body, name)) is not None}
    return _rescaled(body, scales) if scales else body


def _summed(body: Body) -> dict[str, None]:
    """The private blocks of sums that begin with zeros, to which only products add, and which are only stored."""
    begun = [n for n in nodes(body) if isinstance(n, Declare)]
    zeros = {n.local.name for n in begun if n.number == 0 and carried_dtype(n.local.dtype) == torch.float32}
    zeros -= {n.local.name for n in begun if n.number != 0}
    found = dict.fromkeys(n.local.name for n in nodes(body) if isinstance(n, Dot) and n.local.name in zeros)
    for node in nodes(body):
        written = {x.name for x in written_by(node)} if isinstance(node, Effect) and not isinstance(node, Dot) else set()
        read = {v.local.name for value in values_of(node) for v in value.walk() if isinstance(v, Held)}
        for name in written | (set() if isinstance(node, Write) else read):
            found.pop(name, None)
    return found


def _scale_of(body: Body, name: str) -> float | None:
    """The number that scales an operand of all products of a sum."""
    found = {_scale(n) for n in nodes(body) if isinstance(n, Dot) and n.local.name == name}
    return found.pop() if len(found) == 1 else None


def _scale(product: Dot) -> float | None:
    return next((s for side in (product.left, product.right) if (s := _split(side)[1]) is not None), None)


def _split(operand: Value) -> tuple[Value, float | None]:
    """A computed operand without the number that scales it, and that number."""
    if not isinstance(operand, Call) or operand.dtype not in (torch.float32, torch.bfloat16):
        return operand, None
    if operand.function == "cast":
        inner, scale = _split(operand.args[0])
        return (operand, None) if scale is None else (call("cast", inner, dtype=operand.dtype), scale)
    if operand.function == "mul":
        for value, number in (operand.args, operand.args[::-1]):
            if isinstance(number, Constant) and isinstance(value, Call) and value.dtype == operand.dtype:
                return value, float(number.number)
    return operand, None


def _rescaled(body: Body, scales: dict[str, float]) -> Body:
    def whole(v: Value) -> Value | None:
        if not isinstance(v, Held) or v.local.name not in scales:
            return None
        return call("mul", v, constant(scales[v.local.name], torch.float32), dtype=torch.float32)

    out: list[Node] = []
    for node in body:
        if isinstance(node, Dot) and node.local.name in scales:
            left, found = _split(node.left)
            node = replace(node, left=left) if found is not None else replace(node, right=_split(node.right)[0])
        elif isinstance(node, Write):
            node = with_values(node, whole)
        else:
            node = inward(node, lambda part: _rescaled(part, scales))
        out.append(node)
    return kept(body, out)
