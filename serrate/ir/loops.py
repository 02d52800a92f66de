"""LoopProgram: the output of lowering, printed by every backend. All indices are expressions, all guards are explicit.

In: a scheduled tile program. Out: kernels of loops and block operations on lanes; nothing here mentions domains.

    kernel    ::= name, statement*
    statement ::= For(symbol, extent, kind, body)          kind: grid or serial
                | Bind(symbol, expression, lanes)          a name for an index used several times
                | Declare(local, number)                   a private block (carried values live in these)
                | Assign(lanes, guard, local, value)       local = value, lane by lane; other lanes stay, or are undefined
                | Reduce(lanes, guard, local, operator, value)   local = local op value, over the lanes the local lacks
                | Fold(lanes, guard, locals, reduction, values)  likewise by any combine of whole states, in order
                | Dot(lanes, guard, local, left, right)    local += left @ right over the last lane
                | Running(lanes, guard, local, carry, axis, operator, value)   local = carry op values up to each position
                | Write(lanes, guard, tensor, index, value)
                | Prefetch(lanes, guard, tensor, index)    a hint that these elements are needed soon
                | Barrier()                                lanes wait for each other: all see what any has stored
                | If(guard, then, other)                   a uniform branch: the guard is the same in all lanes
                | While(test, guard, body)                 run `test`; while the guard holds, run `body` and `test` again
    value     ::= Constant | Call | Load(tensor, index) | Held(local) | Number(expression) | Existing(lanes, guard)
A guard is an ordered conjunction: the lanes in which the statement's elements exist. Loads happen only there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from serrate.ir.domains import ParallelType
from serrate.ir.expr import Array, Element, Expr, Less, Symbol, const, key_part
from serrate.ir.reductions import Reduction, reduction
from serrate.ir.values import Call, Tensor, Value, carried_dtype, intern

Guard = tuple[Less, ...]


@dataclass(frozen=True)
class Lane:
    """One axis of a block: positions 0 .. size-1."""

    symbol: Symbol
    size: int

    def __str__(self) -> str:
        return f"{self.symbol}:{self.size}"


Lanes = tuple[Lane, ...]


@dataclass(frozen=True)
class Local:
    """A private block; a scalar if it has no lanes."""

    name: str
    dtype: torch.dtype
    lanes: Lanes

    @property
    def nbytes(self) -> int:
        """Its size in bytes, in the dtype it is computed in."""
        return math.prod(lane.size for lane in self.lanes) * carried_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}<{', '.join(map(str, self.lanes))}>"


class Load(Value):
    """An element of memory, with one index expression per storage dim; `other` where `guard` does not hold."""

    tensor: Tensor = key_part(1)
    guard: Guard = key_part(3)
    index: tuple[Expr, ...] = key_part(2)
    other: float | int | bool = key_part(4)

    def __str__(self) -> str:
        where = f" if {' and '.join(map(str, self.guard))}" if self.guard else ""
        where += "" if not self.guard or repr(self.other) == "0" else f" else {self.other}"
        return f"{self.tensor.name}[{', '.join(map(str, self.index))}{where}]"


class Boxed(Load):
    """A read of a block that may be copied as a whole: where its guard or its statement's guard fails, its value is undefined."""

    def __str__(self) -> str:
        return f"box {super().__str__()}"


class Held(Value):
    """The contents of a private block."""

    local: Local = key_part(1)

    def __str__(self) -> str:
        return self.local.name


class Number(Value):
    """An index expression as a number."""

    expr: Expr = key_part(1)

    def __str__(self) -> str:
        return f"({self.expr})"


class Existing(Value):
    """How many positions of `lanes` exist under `guard`."""

    guard: Guard = key_part(2)
    lanes: Lanes = key_part(1)

    def __str__(self) -> str:
        return f"existing({', '.join(map(str, self.lanes))})"


def load(tensor: Tensor, index: tuple[Expr, ...], guard: Guard = (), other: float | int | bool = 0) -> Value:
    return intern(Load, tensor.dtype, tensor, index, guard, other, repr(other))


def boxed(value: Load) -> Value:
    """The same read, which a copy engine may do."""
    return intern(Boxed, value.dtype, value.tensor, value.index, value.guard, value.other, repr(value.other))


def held(local: Local) -> Value:
    return intern(Held, local.dtype, local)


def number(expr: Expr, dtype: torch.dtype = torch.int64) -> Value:
    return intern(Number, dtype, expr)


def existing(lanes: Lanes, guard: Guard, dtype: torch.dtype) -> Value:
    return intern(Existing, dtype, lanes, guard)


@dataclass(frozen=True, eq=False)
class For:
    """`body` for every value of `symbol` below `extent`. A grid loop is launched with `bound` programs, at least its extent."""

    symbol: Symbol
    extent: Expr
    kind: ParallelType
    body: tuple[Node, ...]
    bound: Expr
    sparse: bool = False
    """Whether the extent is usually far below the bound: the grid then has fewer programs, which share the positions."""
    brief: bool = False
    """Whether it runs a few times at most, so that keeping blocks of later iterations in flight would cost more than it saves."""


@dataclass(frozen=True, eq=False)
class Bind:
    """A name for an index expression; with lanes, one value in each."""

    symbol: Symbol
    expr: Expr
    lanes: Lanes
    guard: Guard


@dataclass(frozen=True, eq=False)
class Declare:
    """Declares a private block filled with a number, or uninitialised if the next statement fills everything that is read."""

    local: Local
    number: float | int | bool | None


@dataclass(frozen=True, eq=False)
class Assign:
    """`local = value` in every lane.

    `rests` says where a carried value stays unchanged: where none of these guards holds in any lane.
    """

    lanes: Lanes
    guard: Guard
    local: Local
    value: Value
    rests: tuple[Guard, ...] = ()
    undefined: bool = False
    """Whether lanes in which the guard does not hold are undefined afterwards; otherwise they keep their values."""


@dataclass(frozen=True, eq=False)
class Reduce:
    """`local = local op value`, over the lanes of the statement that the local lacks; holes do not count."""

    lanes: Lanes
    guard: Guard
    local: Local
    operator: str
    value: Value


@dataclass(frozen=True, eq=False)
class Fold:
    """`locals = combine(locals, values)`, position by position over the lanes that the locals lack; holes do not count."""

    lanes: Lanes
    guard: Guard
    locals: tuple[Local, ...]
    reduction: Reduction
    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Dot:
    """`local[m, n] += sum over k of left[m, k] * right[k, n]`; `lanes` are (m, n, k)."""

    lanes: Lanes
    guard: Guard
    local: Local
    left: Value
    right: Value


@dataclass(frozen=True, eq=False)
class Running:
    """`local = carry op value`, position by position along the lane `axis`; `carry` then holds the last result; holes do not
    count.

    Without an axis there is one position.
    """

    lanes: Lanes
    guard: Guard
    local: Local
    carry: Local
    axis: Lane | None
    operator: str
    value: Value


@dataclass(frozen=True, eq=False)
class Write:
    """`tensor[index] = value` in every lane that exists; with `add`, an atomic addition."""

    lanes: Lanes
    guard: Guard
    tensor: Tensor
    index: tuple[Expr, ...]
    value: Value
    add: bool = False


@dataclass(frozen=True, eq=False)
class Prefetch:
    """A hint that the elements at `index` are needed soon. They may lie past the tensor's end; semantically a no-op."""

    lanes: Lanes
    guard: Guard
    tensor: Tensor
    index: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Barrier:
    """Lanes wait until all have done what comes before: what one has stored, another may then read or overwrite."""


@dataclass(frozen=True, eq=False)
class If:
    """`then` where the guard holds, else `other`."""

    guard: Guard
    then: tuple[Node, ...]
    other: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class While:
    """Runs `test`, which computes what the guard reads; while the guard holds, runs `body` and `test` again."""

    test: tuple[Node, ...]
    guard: Guard
    body: tuple[Node, ...]


Block = Assign | Reduce | Fold | Dot | Running | Write | Prefetch
BlockT = TypeVar("BlockT", bound=Block)
Node = For | Bind | Declare | Barrier | If | While | Block


@dataclass(frozen=True, eq=False)
class LoopKernel:
    """One launch."""

    name: str
    body: tuple[Node, ...]
    is_short: bool = False
    """Whether it is launched with the warps and stages of the plan for short rows."""


@dataclass(frozen=True, eq=False)
class LoopProgram:
    """Kernels over tensors in memory; index expressions read `arrays`; the caller passes the extents `symbols`."""

    name: str
    kernels: tuple[LoopKernel, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    scratch: tuple[Tensor, ...]
    arrays: tuple[Array, ...]
    symbols: tuple[Symbol, ...]
    header: tuple[str, ...] = ()
    launched: tuple[tuple[Symbol, Expr], ...] = ()
    """Symbols for grid sizes that depend on lengths, which the caller computes."""
    limits: tuple[tuple[Array, Expr], ...] = ()
    """Upper bounds of the elements of arrays: the number of positions or rows."""
    counts: tuple[tuple[Array, Expr | None], ...] = ()
    """Arrays that describe rows, with the number of rows if it is a single number: they are read only at rows that exist."""
    longest: tuple[tuple[Symbol, Array], ...] = ()
    """Numbers that equal the length of the longest row, each with the boundaries of the rows."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in memory: inputs, outputs, scratch."""
        return (*self.inputs, *self.outputs, *self.scratch)

    def __str__(self) -> str:
        return text(self)


MAX_NUMBER = "max_number"
"""An operator besides those of `ir/reductions.py`: a maximum that ignores NaN, and starts from the lowest finite number."""


def identity_of(operator: str, dtype: torch.dtype) -> float | int | bool:
    """The initial value of a block reduction by an operator."""
    return torch.finfo(dtype).min if operator == MAX_NUMBER else reduction(operator).identity(0, dtype)


def flat_index(index: Sequence[Expr], sizes: Sequence[Expr]) -> Expr:
    """The position in row-major memory of an index into dims with these sizes."""
    place: Expr = const(0)
    for e, size in zip(index, sizes, strict=True):
        place = e if place.value == 0 else place * size + e
    return place


def nodes(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every statement, outer ones first."""
    for node in body:
        yield node
        for part in bodies(node):
            yield from nodes(part)


def bodies(node: Node) -> tuple[tuple[Node, ...], ...]:
    """The nested statements: one list for a loop, two for a branch."""
    if isinstance(node, For):
        return (node.body,)
    if isinstance(node, If):
        return (node.then, node.other)
    return (node.test, node.body) if isinstance(node, While) else ()


def with_bodies(node: Node, new: tuple[tuple[Node, ...], ...]) -> Node:
    """The statement with new nested statements, one list for each that `bodies` returns."""
    if isinstance(node, For):
        return replace(node, body=new[0])
    if isinstance(node, If):
        return replace(node, then=new[0], other=new[1])
    return replace(node, test=new[0], body=new[1]) if isinstance(node, While) else node


def values_of(node: Node) -> tuple[Value, ...]:
    """The values a statement computes."""
    if isinstance(node, Assign | Reduce | Running | Write):
        return (node.value,)
    if isinstance(node, Fold):
        return node.values
    return (node.left, node.right) if isinstance(node, Dot) else ()


def written_by(node: Node) -> tuple[Local, ...]:
    """The private blocks that the statement itself writes."""
    if isinstance(node, Fold):
        return node.locals
    if isinstance(node, Running):
        return node.local, node.carry
    return (node.local,) if isinstance(node, Assign | Reduce | Dot) else ()


def map_values(node: BlockT, change: Callable[[Value], Value]) -> BlockT:
    """The statement with `change` applied to the values that `values_of` returns."""
    if isinstance(node, Dot):
        return replace(node, left=change(node.left), right=change(node.right))
    if isinstance(node, Fold):
        return replace(node, values=tuple(map(change, node.values)))
    return node if isinstance(node, Prefetch) else replace(node, value=change(node.value))


def lanes_in(node: Node) -> list[Lane]:
    """The lanes of a statement, including those it counts."""
    counted = [lane for value in values_of(node) for v in value.walk() if isinstance(v, Existing) for lane in v.lanes]
    return [*getattr(node, "lanes", ()), *counted]


def factors_of(node: Node) -> tuple[Value, Value] | None:
    """The two factors whose products a statement sums. Such a sum uses fused multiply-adds where a backend has them; all other
    products are rounded first."""
    value = node.value if isinstance(node, Reduce) and node.operator == "sum" else None
    if not isinstance(node, Reduce) or not isinstance(value, Call) or value.function not in ("mul", "square"):
        return None
    kind = carried_dtype(node.local.dtype)
    same = all(carried_dtype(v.dtype) == kind for v in (value, *value.args))
    return (value.args[0], value.args[-1]) if same and kind.is_floating_point else None


def expressions_of(node: Node, *, numbers: bool = True) -> Iterator[Expr]:
    """The index expressions a statement itself uses, excluding nested statements; without `numbers`, only those that decide
    which elements are accessed, and not those that values are computed from."""
    if isinstance(node, For):
        yield node.extent
    elif isinstance(node, Bind):
        yield node.expr
    if isinstance(node, Block | If | While):
        for condition in node.guard:
            yield condition.left
            yield condition.right
    if isinstance(node, Write | Prefetch):
        yield from node.index
    for value in values_of(node):
        for inner in value.walk():
            if isinstance(inner, Load):
                yield from inner.index
            elif isinstance(inner, Number) and numbers:
                yield inner.expr
            if isinstance(inner, Load | Existing):
                for condition in inner.guard:
                    yield condition.left
                    yield condition.right


def blocks_read(node: Node) -> set[str]:
    """The private blocks that a statement reads, including those it uses as indices."""
    found = {v.local.name for value in values_of(node) for v in value.walk() if isinstance(v, Held)}
    return found | {e.array.name for x in expressions_of(node) for e in x.walk() if isinstance(e, Element) and e.array.local}


def multiplies_matrices(node: Dot) -> bool:
    """Whether the operands of a product are blocks of rows by depth and of depth by columns, as matrix units require. Along an
    axis of size 1 every position reads the same element, so an operand with such an axis is not a block of this form."""
    if len(node.lanes) < 3:
        return False
    rows, columns, depth = (lane.symbol for lane in node.lanes[-3:])
    left, right = (symbols_of(operand, conditions=False) for operand in (node.left, node.right))
    return {rows, depth} <= left and columns not in left and {columns, depth} <= right and rows not in right


def symbols_of(value: Value, *, conditions: bool = True) -> frozenset[Symbol]:
    """The symbols that a value depends on, with or without those that only the conditions of its loads mention."""
    found: set[Symbol] = set()
    for v in value.walk():
        if isinstance(v, Load):
            found.update(s for e in v.index for s in e.symbols)
            found.update(s for g in v.guard for s in g.symbols if conditions)
        elif isinstance(v, Number):
            found.update(v.expr.symbols)
        elif isinstance(v, Held):
            found.update(lane.symbol for lane in v.local.lanes)
        elif isinstance(v, Existing):
            own = {lane.symbol for lane in v.lanes}
            found.update(s for g in v.guard for s in g.symbols if s not in own)
    return frozenset(found)


def text(program: LoopProgram) -> str:
    """The program as readable text."""
    lines = [f"# {line}" for line in program.header]
    for tensor in program.tensors:
        shape = ", ".join(str(d.extent_expr) for d in tensor.storage)
        lines.append(f"{tensor.role.value} {tensor.name}: {str(tensor.dtype).removeprefix('torch.')}[{shape}]")
    for kernel in program.kernels:
        lines.append(f"kernel {kernel.name}:")
        _lines(kernel.body, "  ", lines)
    return "\n".join(lines) + "\n"


def _lines(body: tuple[Node, ...], indent: str, lines: list[str]) -> None:
    for node in body:
        if isinstance(node, For):
            lines.append(f"{indent}{node.kind.value} {node.symbol} < {node.extent}:")
            _lines(node.body, indent + "  ", lines)
        elif isinstance(node, If):
            lines.append(f"{indent}if {' and '.join(map(str, node.guard))}:")
            _lines(node.then, indent + "  ", lines)
            if node.other:
                lines.append(f"{indent}else:")
                _lines(node.other, indent + "  ", lines)
        elif isinstance(node, While):
            lines.append(f"{indent}loop:")
            _lines(node.test, indent + "  ", lines)
            lines.append(f"{indent}  leave unless {' and '.join(map(str, node.guard))}")
            _lines(node.body, indent + "  ", lines)
        else:
            lines.append(indent + line_of(node))


def line_of(node: Node) -> str:
    """A statement without a body as text."""
    if isinstance(node, Bind):
        return f"{node.symbol} := {node.expr}"
    if isinstance(node, Declare):
        return f"{node.local}" if node.number is None else f"{node.local} = {node.number}"
    if isinstance(node, Barrier):
        return "barrier"
    assert not isinstance(node, For | If | While)
    lanes = f"[{', '.join(map(str, node.lanes))}] " if node.lanes else ""
    where = "  where " + " and ".join(map(str, node.guard)) if node.guard else ""
    if isinstance(node, Write):
        return f"{lanes}{node.tensor.name}[{', '.join(map(str, node.index))}] {'+' * node.add}= {node.value}{where}"
    if isinstance(node, Prefetch):
        return f"{lanes}prefetch {node.tensor.name}[{', '.join(map(str, node.index))}]{where}"
    if isinstance(node, Dot):
        return f"{lanes}{node.local.name} += {node.left} @ {node.right}{where}"
    if isinstance(node, Running):
        return f"{lanes}{node.local.name}, {node.carry.name} running {node.operator}= {node.value}{where}"
    if isinstance(node, Fold):
        names, values = ", ".join(x.name for x in node.locals), ", ".join(map(str, node.values))
        return f"{lanes}{names} {node.reduction}= {values}{where}"
    operator = node.operator if isinstance(node, Reduce) else ""
    otherwise = " else undefined" if isinstance(node, Assign) and node.undefined and node.guard else ""
    return f"{lanes}{node.local.name} {operator}= {node.value}{where}{otherwise}"
