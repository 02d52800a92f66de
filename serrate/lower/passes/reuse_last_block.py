"""Reuse the last block: a loop over the blocks that the loop before it has read begins with the last one, and runs backward.

In: a loop program. Out: the same, but values of the first loop's last iteration that the second would compute again stay in
registers. The second loop visits the other blocks in reverse, so that it first reads what entered the cache last:

    serial k < n:  m, l softmax= x[k*64 + i]      ->   serial k < n:  m, l softmax= x[k*64 + i];  last = exp(x[k*64 + i] - m)
    serial k < n:  y[k*64 + i] =                       if 0 < n:      k = n - 1;  y[k*64 + i] = last / l
                   exp(x[k*64 + i] - m) / l            serial back < n - 1:  k = n - 2 - back
                                                                      y[k*64 + i] = exp(x[k*64 + i] - m) / l

A row that fits one block is read once. The rows of all programs together exceed the cache, so a second loop that started from the
front would find little of its row there. If a third loop follows, it begins with the block that the second ended with, and runs
forward again.

Why it is legal: a value is saved only if neither the blocks nor the memory that it reads change until the second loop uses it. No
iteration of the second loop reads what another one writes, all iterations store to different elements, and reductions commute. So
the order of iterations affects only the rounding of sums, and depends only on the plan and the length of the row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from serrate.ir.expr import Less, Symbol, const, maximum, symbol
from serrate.ir.loops import (
    MAX_NUMBER,
    Assign,
    Bind,
    Declare,
    Fold,
    For,
    If,
    Load,
    Local,
    LoopProgram,
    Node,
    Reduce,
    Write,
    blocks_read,
    expressions_of,
    held,
    nodes,
    values_of,
    written_by,
)
from serrate.ir.reductions import reduction
from serrate.ir.tile import SERIAL
from serrate.ir.values import Role, Tensor, Value
from serrate.lower.names import Names
from serrate.lower.passes.common import (
    Body,
    Effect,
    effects,
    inward,
    is_apart,
    kept,
    names_in,
    per_kernel,
    substituted,
    with_values,
)
from serrate.lower.passes.end_loops import settled
from serrate.lower.passes.peel import at_most_one_apart, first_failure, guards_of


def reuse_last_block(program: LoopProgram) -> LoopProgram:
    """Begins loops with the block that the loop before them ended with."""
    names = Names(program)
    return per_kernel(program, lambda k: _body(k.body, names))


@dataclass(frozen=True)
class Saved:
    """A value of the last iteration of a loop: the statement that computes it, with its position, and the block that holds it."""

    value: Value
    at: int
    source: Effect
    local: Local

    def serves(self, statement: Effect) -> bool:
        """Whether the block has all lanes that a statement needs."""
        return _covers(self.source, statement)


def _covers(source: Effect, statement: Effect) -> bool:
    return source.lanes == statement.lanes and set(source.guard) <= set(statement.guard)


def _body(body: Body, names: Names) -> Body:
    body = kept(body, (inward(node, lambda part: _body(part, names)) for node in body))
    loops = [(k, node) for k, node in enumerate(body) if isinstance(node, For) and node.kind is SERIAL]
    out: dict[int, list[Node]] = {}
    saved: list[Saved] = []
    backward = False
    for place, (k, loop) in enumerate(loops):
        before, saved = saved, []
        if place + 1 < len(loops):
            after, following = loops[place + 1]
            saved = _saved(loop, body[k + 1 : after], following, names)
        backward = bool(before) and not backward
        saving = _saving(loop, saved)
        own = _resumed(saving, loop, before, backward, names) if before else [saving]
        out[k] = [*(Declare(each.local, None) for each in saved), *own]
    return kept(body, (new for k, node in enumerate(body) for new in out.get(k, [node])))


def _saved(first: For, between: Body, second: For, names: Names) -> list[Saved]:
    """The values of the last iteration of a loop that the next loop needs for the same block."""
    if first.extent is not second.extent or first.symbol is not second.symbol or not _may_reverse(second):
        return []
    if not all(isinstance(n, Declare | Effect) for n in (*first.body, *second.body)) or not _whole_before_last(second):
        return []
    written = {n.tensor.memory for n in nodes((first, *between, second)) if isinstance(n, Write)}
    declared = {n.local.name for n in first.body if isinstance(n, Declare)}
    found: dict[Value, tuple[int, Effect]] = {}
    for at, statement in enumerate(first.body):
        if not isinstance(statement, Assign | Reduce | Fold):
            continue
        changing = declared | {x.name for n in nodes((*first.body[at:], *between, second)) for x in written_by(n)}
        if not names_in(*(side for g in statement.guard for side in (g.left, g.right))).isdisjoint(changing):
            continue
        for value in (v for each in values_of(statement) for v in each.walk()):
            if value not in found and _is_block(value, statement, first.symbol) and _stays(value, changing, written):
                found[value] = at, statement
    used = dict.fromkeys(v for s in effects(second.body) for value in values_of(s) for v in _largest(value, s, found))

    def save(value: Value) -> Saved:
        at, source = found[value]
        return Saved(value, at, source, Local(names.of((first, value), f"{_name(value)}_last"), value.dtype, source.lanes))

    return [save(value) for value in used]


def _largest(value: Value, statement: Effect, found: Mapping[Value, tuple[int, Effect]]) -> Iterator[Value]:
    """The largest parts of a value that the loop before computes, in all lanes that the statement needs."""
    if value in found and _covers(found[value][1], statement):
        yield value
    else:
        for part in value.args:
            yield from _largest(part, statement, found)


def _may_reverse(loop: For) -> bool:
    """Whether the iterations of a loop may run in any order: none reads what another one writes, each stores to its own elements,
    and its reductions commute."""
    statements = effects(loop.body)
    own = {n.local.name for n in loop.body if isinstance(n, Declare)}
    read = {name for n in loop.body for name in blocks_read(n)}
    loaded = {v.tensor.memory for n in statements for value in values_of(n) for v in value.walk() if isinstance(v, Load)}
    stored = {n.tensor.memory: n.index for n in statements if isinstance(n, Write)}

    def is_free(node: Effect) -> bool:
        if isinstance(node, Write):
            alone = node.tensor.memory not in loaded and node.index == stored[node.tensor.memory]
            return alone and not node.add and is_apart(node.index, node.lanes, loop)
        if isinstance(node, Reduce) and node.local.name not in own:
            commutes = node.operator == MAX_NUMBER or reduction(node.operator).commutative
            return commutes and node.local.name not in read
        return isinstance(node, Assign | Reduce) and node.local.name in own

    return all(map(is_free, statements))


def _whole_before_last(loop: For) -> bool:
    """Whether all blocks but the last are whole. Otherwise, as with rows side by side, the block in registers and all others need
    masks, and computing these twice takes longer than reading the block again."""
    ends = [first_failure(g, loop) for g in guards_of(loop)]
    return all(end is not None and at_most_one_apart(loop.extent, end) for end in ends)


def _is_block(value: Value, statement: Effect, position: Symbol) -> bool:
    """Whether a value is computed from a block of an input at a loop's position, with an element for each lane."""
    every = {position, *(lane.symbol for lane in statement.lanes)}
    loads = (v for v in value.walk() if isinstance(v, Load) and v.tensor.role is Role.INPUT)
    return any(every <= {s for e in v.index for s in e.symbols} for v in loads)


def _stays(value: Value, changing: Collection[str], written: Collection[Tensor]) -> bool:
    """Whether a value is the same after a loop as in its last iteration. An index may be a private number or block, too."""
    if any(isinstance(v, Load) and v.tensor.memory in written for v in value.walk()):
        return False
    read = Assign((), (), Local("", value.dtype, ()), value)
    return (blocks_read(read) | names_in(*expressions_of(read))).isdisjoint(changing)


def _name(value: Value) -> str:
    return next(v.tensor.name for v in value.walk() if isinstance(v, Load) and v.tensor.role is Role.INPUT)


def _saving(loop: For, saved: Sequence[Saved]) -> For:
    """A loop that saves values of every iteration, so that those of the last remain."""
    if not saved:
        return loop
    body: list[Node] = []
    for at, node in enumerate(loop.body):
        body.append(node)
        body += (Assign(x.source.lanes, x.source.guard, x.local, x.value, undefined=True) for x in saved if x.at == at)
    return replace(loop, body=tuple(body))


def _resumed(loop: For, plain: For, saved: Sequence[Saved], backward: bool, names: Names) -> list[Node]:
    """A loop that begins with the block that the one before it ended with. `plain` is the loop without what it saves itself."""

    def reusing(node: Node) -> Node:
        if not isinstance(node, Effect):
            return node
        return with_values(node, {x.value: held(x.local) for x in saved if x.serves(node)}.get)

    begun = tuple(map(reusing, loop.body))
    count = symbol(names.of((plain, "count"), f"{plain.symbol}_count"), 0)
    back = symbol(names.of((plain, "back"), f"{plain.symbol}_back"), 0)
    step = symbol(names.of((plain, "step"), f"{plain.symbol}_step"), 0)
    first, rest = substituted(begun, {plain.symbol: const(0)}), substituted(loop.body, {plain.symbol: step + 1})
    if backward:
        body = settled(loop.body, guards_of(plain))
        first = (Bind(back, count - 1, (), ()), *substituted(begun, {plain.symbol: back}))
        rest = (Bind(back, count - 2 - step, (), ()), *substituted(body, {plain.symbol: back}))
    others = maximum(count - 1, const(0))
    return [
        Bind(count, plain.extent, (), ()),
        If((Less(const(0), count),), first, ()),
        For(step, others, plain.kind, rest, others),
    ]
