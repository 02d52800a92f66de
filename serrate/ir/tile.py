"""TileProgram: phases of loops over domains, with two kinds of statement. What schedules rewrite.

In: a fusion lowered op by op, or a parsed kernel. Out: the same program with other loops. Statements name *logical*
domains only and never change under a schedule; loops run over whatever domains a schedule has made of them, and analysis
connects the two.

    program   ::= phase*                          phases run one after the other, each one launch
    phase     ::= name, statement*
    statement ::= Loop(domain, kind, statement*)  kind: grid (spread over workers), serial, lanes (one block)
                | Store(tensor, index, value)     tensor[index] = value
                | Accumulate(targets, index, reduction, values, over)
                                                  combine values into targets[index] over the domains `over`; values are
                                                  whole states when `merge`, else plain values to lift
Lanes loops are innermost: a statement under lanes loops is one operation on a block with those lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from serrate.errors import VerificationError
from serrate.ir.domains import IterDomain, ParallelType
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

    def __str__(self) -> str:
        targets = ", ".join(_access(t, self.index) for t in self.targets)
        how = f"merge {self.reduction}" if self.merge else str(self.reduction)
        return f"{targets} {how}= {', '.join(map(str, self.values))} over {', '.join(d.name for d in self.over)}"


@dataclass(frozen=True, eq=False)
class Loop:
    """`body` for every position of `domain`."""

    domain: IterDomain
    kind: ParallelType
    body: tuple[Statement, ...]


Statement = Loop | Store | Accumulate
Leaf = Store | Accumulate


@dataclass(frozen=True, eq=False)
class Phase:
    """One launch."""

    name: str
    body: tuple[Statement, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(s for s, _ in walk(self.body) if not isinstance(s, Loop))

    @property
    def writes(self) -> frozenset[Tensor]:
        return frozenset(t for leaf in self.leaves for t in leaf.targets)

    @property
    def reads(self) -> frozenset[Tensor]:
        return frozenset(r.tensor for leaf in self.leaves for v in leaf.values for r in v.reads)


@dataclass(frozen=True, eq=False)
class TileProgram:
    """Phases over named tensors; `inputs` and `outputs` in the order of the caller's arguments and results."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    phases: tuple[Phase, ...]

    def __str__(self) -> str:
        return text(self)

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        """Tensors that are neither inputs nor outputs, in the order they are written."""
        seen: dict[Tensor, None] = {}
        for phase in self.phases:
            for leaf in phase.leaves:
                seen.update((t, None) for t in leaf.targets if t.role is Role.SCRATCH)
        return tuple(seen)

    def with_phases(self, phases: tuple[Phase, ...]) -> TileProgram:
        return replace(self, phases=phases)


def walk(body: tuple[Statement, ...], outer: tuple[Loop, ...] = ()) -> Iterator[tuple[Statement, tuple[Loop, ...]]]:
    """Every statement with the loops around it, outermost first."""
    for statement in body:
        yield statement, outer
        if isinstance(statement, Loop):
            yield from walk(statement.body, (*outer, statement))


def map_leaves(body: tuple[Statement, ...], change: Callable[[Leaf], Leaf]) -> tuple[Statement, ...]:
    """The same loops with every leaf replaced."""
    return tuple(replace(s, body=map_leaves(s.body, change)) if isinstance(s, Loop) else change(s) for s in body)


def nest(loops: tuple[tuple[IterDomain, ParallelType], ...], leaf: Leaf) -> tuple[Statement, ...]:
    """A perfect nest: the loops in order around one statement."""
    body: tuple[Statement, ...] = (leaf,)
    for domain, kind in reversed(loops):
        body = (Loop(domain, kind, body),)
    return body


def chain(phase: Phase) -> tuple[tuple[Loop, ...], Leaf] | None:
    """The loops and the statement of a phase that is a perfect nest, else None."""
    loops: list[Loop] = []
    body = phase.body
    while len(body) == 1 and isinstance(body[0], Loop):
        loops.append(body[0])
        body = body[0].body
    if len(body) != 1 or isinstance(body[0], Loop):
        return None
    return tuple(loops), body[0]


def verify(program: TileProgram) -> None:
    """Raises unless the program is one that lowering understands; run after every schedule step when checks are on."""
    written: set[Tensor] = set()
    for phase in program.phases:
        for leaf, loops in walk(phase.body):
            if isinstance(leaf, Loop):
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
    """The program as people read it."""
    lines = [f"program {program.name}"]
    lines += [f"  input  {t}" for t in program.inputs]
    lines += [f"  output {t}" for t in program.outputs]
    for phase in program.phases:
        lines.append(f"  phase {phase.name}:")
        _statements(phase.body, "    ", lines)
    return "\n".join(lines) + "\n"


def _statements(body: tuple[Statement, ...], indent: str, lines: list[str]) -> None:
    for statement in body:
        if isinstance(statement, Loop):
            lines.append(f"{indent}{statement.kind.value} {statement.domain}:")
            _statements(statement.body, indent + "  ", lines)
        else:
            lines.append(f"{indent}{statement}")


__all__ = [
    "GRID",
    "LANES",
    "SERIAL",
    "Accumulate",
    "Leaf",
    "Loop",
    "Phase",
    "Read",
    "Statement",
    "Store",
    "TileProgram",
    "chain",
    "map_leaves",
    "nest",
    "text",
    "verify",
    "walk",
]
