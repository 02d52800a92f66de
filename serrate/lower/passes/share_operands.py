"""Share operands: common subexpression elimination for costly values in operands of several matrix products.

In: a loop program. Out: the same; a costly value that occurs in operands of several products of one body gets a private block.

    [k, d, q] a += exp(s) @ x[q, d]                  [k, q] t = exp(s)
    [k, d, q] b += (exp(s) * u) @ y[q, d]     ->     [k, d, q] a += t @ x[q, d];  [k, d, q] b += (t * u) @ y[q, d]
"""

from __future__ import annotations

from collections.abc import Iterable

from serrate.ir.loops import (
    Assign,
    Declare,
    Dot,
    Held,
    Load,
    Local,
    LoopProgram,
    Node,
    Write,
    held,
    nodes,
    symbols_of,
    written_by,
)
from serrate.ir.values import COSTLY, Call, Value
from serrate.lower.names import Names
from serrate.lower.passes.common import Body, Effect, inward, kept, per_kernel, with_values


def share_operands(program: LoopProgram) -> LoopProgram:
    """Computes costly subexpressions of operands once for all products of a body."""
    names = Names(program)
    return per_kernel(program, lambda k: _shared(k.body, names))


def _shared(body: Body, names: Names) -> Body:
    body = kept(body, (inward(node, lambda part: _shared(part, names)) for node in body))
    counts: dict[Value, int] = {}
    for node in body:
        for value in _costly(node) if isinstance(node, Dot) else ():
            counts[value] = counts.get(value, 0) + 1
    for value in (v for v, count in counts.items() if count > 1):
        users = [k for k, node in enumerate(body) if isinstance(node, Dot) and value in _costly(node)]
        if len(users) > 1 and not _changes(body[users[0] : users[-1]], value):
            body = _computed_before(body, users, value, names)
    return body


def _costly(product: Dot) -> set[Value]:
    """The costly values in the operands of a product that vary along both lanes of an operand."""
    rows, columns, depth = (lane.symbol for lane in product.lanes)
    found: set[Value] = set()
    for operand, across in ((product.left, {rows, depth}), (product.right, {columns, depth})):
        for v in operand.walk():
            if isinstance(v, Call) and v.function in COSTLY and symbols_of(v) & {rows, columns, depth} == across:
                found.add(v)
    return found


def _changes(between: Iterable[Node], value: Value) -> bool:
    """Whether statements change what a value is computed from."""
    private = {v.local.name for v in value.walk() if isinstance(v, Held)}
    memory = {v.tensor.memory for v in value.walk() if isinstance(v, Load)}
    for node in nodes(tuple(between)):
        if isinstance(node, Write) and node.tensor.memory in memory:
            return True
        if isinstance(node, Effect) and not private.isdisjoint(local.name for local in written_by(node)):
            return True
    return False


def _computed_before(body: Body, users: list[int], value: Value, names: Names) -> Body:
    """The body with the value in a private block, of which only what all products need is computed."""
    products = [node for k in users if isinstance(node := body[k], Dot)]
    symbols = symbols_of(value)
    lanes = tuple(lane for lane in products[0].lanes if lane.symbol in symbols)
    others = {lane.symbol for product in products for lane in product.lanes} - {lane.symbol for lane in lanes}
    guard = tuple(g for g in products[0].guard if not g.symbols & others and all(g in p.guard for p in products))
    local = Local(names.of(value, f"{products[0].local.name}_operand"), value.dtype, lanes)
    made: list[Node] = []
    for k, node in enumerate(body):
        if k == users[0]:
            made += [Declare(local, 0), Assign(lanes, guard, local, value)]
        if k in users and isinstance(node, Dot):
            node = with_values(node, lambda v: held(local) if v is value else None)
        made.append(node)
    return tuple(made)
