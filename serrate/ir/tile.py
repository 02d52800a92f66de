"""TileProgram: phases of loops over domains. Schedules rewrite it, for fusions and kernels alike.

In: a fusion lowered op by op, or a traced kernel. Out: the same program with other loops. Statements name *logical* domains
only, and a schedule never changes them; it changes the domains that loops run over, and analysis connects the two.

    program   ::= phase*                          phases run one after the other, each one launch
                | Library(function, targets, values, ...)   one call on whole tensors, if a schedule chose it
    phase     ::= name, statement*, lanes
    statement ::= Loop(domain, kind, statement*)  kind: grid (spread over workers), serial, lanes (one block)
                | Store(tensor, index, value)     tensor[index] = value
                | Accumulate(targets, index, reduction, values, over)
                                                  combine values into targets[index] over the domains `over`; values are
                                                  whole states when `merge`, else plain values to lift
                | Scan(targets, index, place, reduction, values, over)
                                                  like Accumulate, and targets[place] = what was combined so far
                | a block statement               of loop programs: private blocks assigned in order, stores at computed indices,
                                                  atomic adds. Its lanes are axes; positions left by the loops are one block
                | If | While                      as in loop programs
                | ByLength(row, least, most, short, other)   `short` for rows of `least` to `most` positions, else `other`
                | At(domain, of, statement*)      for the position of `domain` that the loop over `of` is at
                | Along(axis, reverse, statement*)   for every lane of a tile, in order
    axis      ::= a domain that block statements refer to: its position and the properties of its tile are symbols

Fusions consist of Store, Accumulate and Scan; the domains determine which elements exist. Kernels consist of block statements,
in the user's order, with the conditions under which lanes exist. Lanes loops are innermost: a statement under lanes loops is one
operation on a block with those lanes. Block statements can have different lanes, so there is no lanes loop around several of
them; its domain is one of the `lanes` of the phase.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from serrate.errors import VerificationError
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.expr import Array, Bounds, Expr, Less, Symbol, const, symbol
from serrate.ir.loops import (
    Bind,
    Block,
    Declare,
    Guard,
    If,
    Lane,
    Load,
    Local,
    Node,
    While,
    Write,
    bodies,
    line_of,
    values_of,
    with_bodies,
)
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import Reduction
from serrate.ir.values import Index, Read, Role, Tensor, Value

GRID, SERIAL, LANES = ParallelType.GRID, ParallelType.SERIAL, ParallelType.LANES


@dataclass(frozen=True, eq=False)
class Store:
    """`tensor[index] = value`."""

    tensor: Tensor
    index: Index
    value: Value

    @property
    def targets(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def values(self) -> tuple[Value, ...]:
        return (self.value,)

    def __str__(self) -> str:
        return f"{_access(self.tensor, self.index)} = {self.value}"


@dataclass(frozen=True, eq=False)
class Accumulate:
    """Combine `values` into the states `targets[index]` over the domains `over`."""

    targets: tuple[Tensor, ...]
    index: Index
    reduction: Reduction
    values: tuple[Value, ...]
    over: tuple[IterDomain, ...]
    merge: bool = False
    places: tuple[Index, ...] = ()
    """The index of each target, if some do not vary along all of `index`: in attention, a row of scores has one maximum for all
    features of the values."""

    def place(self, target: Tensor) -> Index:
        """The index of a target."""
        return self.places[self.targets.index(target)] if self.places else self.index

    def __str__(self) -> str:
        targets = ", ".join(_access(t, self.place(t)) for t in self.targets)
        how = f"merge {self.reduction}" if self.merge else str(self.reduction)
        return f"{targets} {how}= {', '.join(map(str, self.values))} over {', '.join(d.name for d in self.over)}"


@dataclass(frozen=True, eq=False)
class Scan:
    """A running reduction: `targets[place]` combines the values at all positions of `over` up to this one.

    `index` identifies one scan: it is `place` without the scanned domain.
    """

    targets: tuple[Tensor, ...]
    index: Index
    place: Index
    reduction: Reduction
    values: tuple[Value, ...]
    over: tuple[IterDomain, ...]

    def __str__(self) -> str:
        targets = ", ".join(_access(t, self.place) for t in self.targets)
        return f"{targets} = running {self.reduction} of {', '.join(map(str, self.values))} over {self.over[0].name}"


@dataclass(frozen=True, eq=False)
class Axis:
    """A domain that block statements refer to, and the symbols for its positions and tiles.

    A position counts from `begin`, the index of the domain from 0. The tile of a position, its start and its number of lanes are
    known once a schedule has split the domain; only the user's own `tile.begin`, `tile.end`, `tile.id` and `tile.block_size`
    refer to them.
    """

    name: str
    begin: Expr
    end: Expr
    block: int | None
    """The tile size, if the user fixed it."""
    what: str
    """Its name in messages."""
    site: object = None
    """Its place in the source, by which block sizes of a configuration are assigned."""
    looped: bool = True
    """Whether a loop runs over it. If not, all its positions are lanes, and their number is known."""
    least: int = 1
    """The fewest lanes a schedule may choose."""
    alias_of: Axis | None = None
    """The axis that this one duplicates: if a value has the same tile in two dims, the second dim is over the alias."""
    given: IterDomain | None = None
    """The domain, if a schedule made it, such as a work list."""

    @functools.cached_property
    def domain(self) -> IterDomain:
        """The domain that loops run over."""
        return self.given or IterDomain(self.end - self.begin, name=self.name)

    @property
    def original(self) -> Axis:
        """The axis itself, or the one it is an alias of."""
        return self.alias_of or self

    @property
    def position(self) -> Symbol:
        """The index along it."""
        return symbol(self.name, *self._span)

    @property
    def _span(self) -> Bounds:
        high = self.end.bounds[1]
        return self.begin.bounds[0], None if high is None else high - 1

    @property
    def lane(self) -> Symbol:
        """The lane of a position in its tile."""
        return symbol(f"{self.name}_lane")

    @property
    def lanes(self) -> Symbol:
        """The number of lanes of its tiles."""
        return symbol(f"{self.name}_lanes", 1)

    @property
    def number(self) -> Symbol:
        """The number of the current tile."""
        return symbol(f"{self.name}_id")

    @property
    def first(self) -> Symbol:
        """The first position of the current tile."""
        return symbol(f"{self.name}_begin", self._span[0])

    @property
    def last(self) -> Symbol:
        """The end of the current tile: after `lanes` positions, or at the end of the axis."""
        low, high = self._span
        return symbol(f"{self.name}_end", low, None if high is None else high + 1)

    @property
    def block_lane(self) -> Lane:
        """The axis as a lane of a statement; its size is not known yet."""
        return Lane(self.position, 0)

    @property
    def size(self) -> int | None:
        """The number of positions, if it is known."""
        return (self.end - self.begin).value

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Carry:
    """Private blocks that a loop carries: the states of a reduction, or one block with any other update."""

    locals: tuple[Local, ...]
    reduction: Reduction | None

    def __str__(self) -> str:
        return ", ".join(local.name for local in self.locals)


@dataclass(frozen=True, eq=False)
class Loop:
    """`body` for every position of `domain`; `carried` are the private blocks that one iteration hands to the next."""

    domain: IterDomain
    kind: ParallelType
    body: tuple[Statement, ...]
    carried: tuple[Carry, ...] = ()
    index: Expr | None = None
    """The position, if something else determines it."""


@dataclass(frozen=True, eq=False)
class Along:
    """`body` for every lane of an axis, one after the other, from the first or from the last; private blocks of that axis are
    read and written at that lane."""

    axis: Axis
    reverse: bool
    body: tuple[Statement, ...]


@dataclass(frozen=True, eq=False)
class Library:
    """A call of a runtime function on whole tensors. In fusions, for what is not a loop nest (sorting): it ends one stage and
    starts the next. A tile program that is exactly such a call may be scheduled as one."""

    function: str
    targets: tuple[Tensor, ...]
    values: tuple[Value, ...]
    """The arguments, as reads."""
    options: tuple[int | Expr, ...] = ()
    """Numbers; an expression is evaluated in each call."""
    keywords: tuple[tuple[str, float], ...] = ()
    """Constants, by name."""
    rows: tuple[Array, ...] = ()
    """The offsets of the arguments' rows, if the function goes by rows."""

    def __str__(self) -> str:
        targets = ", ".join(t.name for t in self.targets)
        rows = f" by rows of {', '.join(map(str, dict.fromkeys(self.rows)))}" if self.rows else ""
        given = [*map(str, self.values), *map(str, self.options), *(f"{name}={value}" for name, value in self.keywords)]
        return f"{targets} = {self.function}({', '.join(given)}){rows}"


@dataclass(frozen=True, eq=False)
class ByLength:
    """`short` if the current row has `least` to `most` positions, else `other`."""

    row: RaggedIterDomain
    least: int
    most: int
    short: tuple[Statement, ...]
    other: tuple[Statement, ...]

    def guard(self, length: Expr) -> Guard:
        """The condition for `short`, given the length of the row."""
        at_least = (Less(const(self.least - 1), length),) if self.least else ()
        return (*at_least, Less(length, const(self.most + 1)))


@dataclass(frozen=True, eq=False)
class At:
    """`body` for the position of `domain` that the loop over `of` is at: the row, if that loop runs over pieces of rows."""

    domain: IterDomain
    of: IterDomain
    body: tuple[Statement, ...]
    finishes: bool = True
    """Whether no other statement needs the intermediate results of that position."""

    def inside(self, loops: tuple[Loop, ...], index: Expr | None = None) -> tuple[Loop, ...]:
        """The loops around its body: the one over `of` replaced by one over `domain`."""
        own = Loop(self.domain, GRID, self.body, index=index)
        return tuple(own if loop.domain is self.of else loop for loop in loops)


Leaf = Store | Accumulate | Scan
Around = Loop | Along | ByLength | At
"""Statements with bodies that loop programs do not have."""
Statement = Around | If | While | Leaf | Bind | Declare | Block


def written_at(leaf: Leaf, target: Tensor) -> Index:
    """The index at which a statement writes one of its targets."""
    if isinstance(leaf, Accumulate):
        return leaf.place(target)
    return leaf.place if isinstance(leaf, Scan) else leaf.index


@dataclass(frozen=True, eq=False)
class Phase:
    """One launch."""

    name: str
    body: tuple[Statement, ...]
    lanes: tuple[IterDomain, ...] = ()
    """The domains that are lanes of block statements: what remains of an axis inside the loops over its tiles."""
    is_short: bool = False
    """Whether it computes rows that `Plan.short` leaves whole, with the warps of that plan."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The statements that name domains."""
        return tuple(s for s in statements(self.body) if isinstance(s, Leaf))

    @property
    def writes(self) -> frozenset[Tensor]:
        stored = (s.tensor for s in statements(self.body) if isinstance(s, Write))
        return frozenset((*(t for leaf in self.leaves for t in leaf.targets), *stored))

    @property
    def reads(self) -> frozenset[Tensor]:
        values = (v for s in statements(self.body) if isinstance(s, Block) for value in values_of(s) for v in value.walk())
        loaded = (v.tensor for v in values if isinstance(v, Load))
        return frozenset((*(r.tensor for leaf in self.leaves for v in leaf.values for r in v.reads), *loaded))

    @property
    def is_blocks(self) -> bool:
        """Whether it is written in block statements."""
        return any(isinstance(s, Block | Declare) for s in statements(self.body))


@dataclass(frozen=True, eq=False)
class TileProgram:
    """Phases over named tensors; `inputs` and `outputs` in the order of the caller's arguments and results."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    phases: tuple[Phase, ...]
    axes: tuple[Axis, ...] = ()
    """The axes of block statements, in creation order: bounds of an axis may depend on earlier ones."""
    counts: tuple[tuple[Array, Expr], ...] = ()
    """The number of components that each array of row boundaries describes."""
    limits: tuple[tuple[Array, Expr], ...] = ()
    """The upper bound of the elements of these arrays: the number of positions or rows."""
    longest: tuple[tuple[Symbol, Array], ...] = ()
    """Numbers that are the length of the longest row, each with the boundaries of the rows."""
    notes: tuple[str, ...] = field(default=())
    """For each loop, the values it carries and the reductions they were recognised as."""
    call: Library | None = None
    """The library call that computes all of it, if a schedule chose one; there are no phases then."""

    def __str__(self) -> str:
        return text(self)

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        """Tensors that are neither inputs nor outputs, in the order they are written."""
        seen: dict[Tensor, None] = {}
        for phase in self.phases:
            for s in statements(phase.body):
                targets = s.targets if isinstance(s, Leaf) else (s.tensor,) if isinstance(s, Write) else ()
                seen.update((t, None) for t in targets if t.role is Role.SCRATCH)
        return tuple(seen)

    def axis_of(self, domain: IterDomain) -> Axis | None:
        """The axis that a domain belongs to."""
        ancestors, pending = {domain.uid}, [domain]
        while pending:
            made = pending.pop().definition
            pending += made.inputs if made is not None else ()
            ancestors |= {d.uid for d in made.inputs} if made is not None else set()
        return next((a for a in self.axes if a.looped and a.alias_of is None and a.domain.uid in ancestors), None)

    def with_phases(self, phases: tuple[Phase, ...]) -> TileProgram:
        return replace(self, phases=phases)


def inner(node: Statement) -> tuple[tuple[Statement, ...], ...]:
    """The bodies inside a statement: one for a loop, two for a branch."""
    if isinstance(node, Loop | Along | At):
        return (node.body,)
    if isinstance(node, ByLength):
        return (node.short, node.other)
    return () if isinstance(node, Leaf) else cast(tuple[tuple[Statement, ...], ...], bodies(node))


def with_inner(node: Statement, new: tuple[tuple[Statement, ...], ...]) -> Statement:
    """The statement with other bodies, one for each that `inner` returns."""
    if isinstance(node, Loop | Along | At):
        return replace(node, body=new[0])
    if isinstance(node, ByLength):
        return replace(node, short=new[0], other=new[1])
    return node if isinstance(node, Leaf) else cast(Statement, with_bodies(node, cast(tuple[tuple[Node, ...], ...], new)))


def branch(guard: Guard, then: tuple[Statement, ...], other: tuple[Statement, ...] = ()) -> If:
    """An `If` around statements of tile programs."""
    return If(guard, cast(tuple[Node, ...], then), cast(tuple[Node, ...], other))


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement, outer ones first."""
    for node in body:
        yield node
        for part in inner(node):
            yield from statements(part)


def walk(body: tuple[Statement, ...], outer: tuple[Loop, ...] = ()) -> Iterator[tuple[Statement, tuple[Loop, ...]]]:
    """Every statement with the loops around it, outermost first."""
    for statement in body:
        yield statement, outer
        around = (*outer, statement) if isinstance(statement, Loop) else outer
        around = statement.inside(outer) if isinstance(statement, At) else around
        for part in inner(statement):
            yield from walk(part, around)


def map_leaves(body: tuple[Statement, ...], change: Callable[[Leaf], Leaf]) -> tuple[Statement, ...]:
    """The same loops with every leaf replaced."""
    return tuple(
        change(s) if isinstance(s, Leaf) else with_inner(s, tuple(map_leaves(part, change) for part in inner(s))) for s in body
    )


def nest(loops: tuple[tuple[IterDomain, ParallelType], ...], leaf: Leaf) -> tuple[Statement, ...]:
    """A perfect nest: the loops in order around one statement."""
    body: tuple[Statement, ...] = (leaf,)
    for domain, kind in reversed(loops):
        body = (Loop(domain, kind, body),)
    return body


def chain(phase: Phase) -> tuple[tuple[Loop, ...], Leaf] | None:
    """The loops and the statement of a phase that is a perfect nest around one statement over domains; None for any other."""
    loops: list[Loop] = []
    body = phase.body
    while len(body) == 1 and isinstance(body[0], Loop):
        loops.append(body[0])
        body = body[0].body
    if len(body) != 1 or not isinstance(body[0], Leaf):
        return None
    return tuple(loops), body[0]


def verify(program: TileProgram) -> None:
    """Raises unless the program is one that lowering understands; run after every schedule step when checks are on."""
    written: set[Tensor] = set()
    for phase in program.phases:
        for leaf, loops in walk(phase.body):
            if inner(leaf):
                continue
            kinds = [loop.kind for loop in loops]
            ranks = {GRID: 0, SERIAL: 1, LANES: 2}
            strange = next((k for k in kinds if k not in ranks), None)
            if strange is not None:
                raise VerificationError(f"phase {phase.name}: loops run as grid, serial or lanes, got {strange.value}")
            if [ranks[k] for k in kinds] != sorted(ranks[k] for k in kinds):
                raise VerificationError(f"phase {phase.name}: loops around `{leaf}` are not grid, then serial, then lanes")
            domains = [loop.domain for loop in loops]
            for k, domain in enumerate(domains):
                if isinstance(domain, RaggedIterDomain) and any(
                    later.kind is LANES and later.domain.uid == domain.component.uid for later in loops[:k]
                ):
                    raise VerificationError(f"phase {phase.name}: the extent of {domain} depends on a lane")
            if not isinstance(leaf, Leaf):
                written.update((leaf.tensor,) if isinstance(leaf, Write) else ())
                continue
            for value in leaf.values:
                for element in value.reads:
                    if element.tensor.role is not Role.INPUT and element.tensor.memory not in written:
                        raise VerificationError(f"phase {phase.name}: {element.tensor.name} is read before it is written")
            written.update(leaf.targets)
    for tensor in {t for p in program.phases for t in p.writes if t.role is Role.PRIVATE}:
        users = [p.name for p in program.phases if tensor in p.writes | p.reads]
        if len(users) > 1:
            raise VerificationError(f"{tensor.name} is private to a worker, yet phases {', '.join(users)} share it")
    for tensor in program.outputs:
        if tensor not in written:
            raise VerificationError(f"output {tensor.name} is never written")


def _access(tensor: Tensor, index: Index) -> str:
    return f"{tensor.name}[{', '.join('0' if d is None else d.name for d in index)}]"


def text(program: TileProgram) -> str:
    """The program as readable text."""
    lines = [f"program {program.name}"]
    lines += [f"  input  {t}" for t in program.inputs]
    lines += [f"  output {t}" for t in program.outputs]
    lines += [f"  carried {note}" for note in program.notes]
    begins = {a.domain.uid: a.begin for a in program.axes if a.looped and a.begin.value != 0}
    lines += [] if program.call is None else [f"  {program.call}"]
    for phase in program.phases:
        lanes = f" with lanes {', '.join(map(str, phase.lanes))}" if phase.lanes else ""
        lines.append(f"  phase {phase.name}{lanes}:")
        _statements(phase.body, "    ", lines, begins)
    return "\n".join(lines) + "\n"


def _statements(body: tuple[Statement, ...], indent: str, lines: list[str], begins: dict[int, Expr]) -> None:
    for statement in body:
        parts = inner(statement)
        if isinstance(statement, Loop):
            begin = begins.get(statement.domain.uid)
            lines.append(f"{indent}{statement.kind.value} {statement.domain}{'' if begin is None else f' from {begin}'}:")
        elif isinstance(statement, Along):
            lines.append(f"{indent}along {statement.axis.name}{' backwards' if statement.reverse else ''}:")
        elif isinstance(statement, ByLength):
            lines.append(f"{indent}rows of {statement.least} to {statement.most} positions of {statement.row.name}:")
        elif isinstance(statement, At):
            lines.append(f"{indent}at {statement.domain}:")
        elif isinstance(statement, If):
            lines.append(f"{indent}if {' and '.join(map(str, statement.guard))}:")
        elif isinstance(statement, While):
            lines.append(f"{indent}loop:")
        elif isinstance(statement, Leaf):
            lines.append(f"{indent}{statement}")
        else:
            lines.append(indent + line_of(statement).replace(":0", ""))
        for k, part in enumerate(parts):
            if k and isinstance(statement, While):
                lines.append(f"{indent}  leave unless {' and '.join(map(str, statement.guard))}")
            elif k and part:
                lines.append(f"{indent}else:")
            _statements(part, indent + "  ", lines, begins)


__all__ = [
    "GRID",
    "LANES",
    "SERIAL",
    "Accumulate",
    "Along",
    "Around",
    "At",
    "Axis",
    "ByLength",
    "Carry",
    "Leaf",
    "Library",
    "Loop",
    "Phase",
    "Read",
    "Scan",
    "Statement",
    "Store",
    "TileProgram",
    "branch",
    "chain",
    "inner",
    "map_leaves",
    "nest",
    "statements",
    "text",
    "verify",
    "walk",
    "with_inner",
    "written_at",
]
