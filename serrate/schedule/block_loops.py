"""The primitives `split`, `combine` and `mark` on phases of block statements.

In: a program, the name of a phase, and the name of one of its loops. Out: a new program. The phase is a tree of loops around
statements over axes; a loop is identified by the name of its domain, at any depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from serrate.errors import ScheduleError
from serrate.ir import transforms
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.tile import GRID, LANES, SERIAL, Loop, Phase, Statement, TileProgram, inner, statements, with_inner
from serrate.schedule import cutting
from serrate.schedule.dependences import require_independent


def find(program: TileProgram, name: str) -> Phase:
    """The phase of that name."""
    for phase in program.phases:
        if phase.name == name:
            return phase
    raise ScheduleError(f"unknown phase {name!r}: choose from {', '.join(p.name for p in program.phases)}")


def swap(program: TileProgram, name: str, *new: Phase) -> TileProgram:
    """The program with one phase replaced by others."""
    phases: list[Phase] = []
    for phase in program.phases:
        phases.extend(new if phase.name == name else (phase,))
    return program.with_phases(tuple(phases))


def loop_replaced(
    program: TileProgram, name: str, domain: str, change: Callable[[Loop], tuple[Statement, ...]], *lanes: IterDomain
) -> TileProgram:
    """The program with one loop of a phase of block statements replaced, at any depth; `lanes` are added to the phase."""
    phase, found = find(program, name), 0

    def rewritten(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        nonlocal found
        out: list[Statement] = []
        for node in body:
            if isinstance(node, Loop) and node.domain.name == domain:
                found += 1
                out += change(node)
            else:
                out.append(with_inner(node, tuple(rewritten(part) for part in inner(node))))
        return tuple(out)

    new = replace(phase, body=rewritten(phase.body), lanes=(*phase.lanes, *lanes))
    if found != 1:
        loops = ", ".join(n.domain.name for n in statements(phase.body) if isinstance(n, Loop))
        raise ScheduleError(f"phase {name} has {found or 'no'} loops over {domain!r}; it loops over {loops}")
    return swap(program, name, new)


def loop_named(phase: Phase, domain: str) -> Loop:
    """The loop of a phase of block statements that runs over the domain of that name."""
    found = [n for n in statements(phase.body) if isinstance(n, Loop) and n.domain.name == domain]
    if len(found) != 1:
        loops = ", ".join(n.domain.name for n in statements(phase.body) if isinstance(n, Loop))
        raise ScheduleError(f"phase {phase.name} has {len(found) or 'no'} loops over {domain!r}; it loops over {loops}")
    return found[0]


def split(program: TileProgram, name: str, domain: str, factor: int) -> TileProgram:
    loop = loop_named(find(program, name), domain)
    axis = program.axis_of(loop.domain)
    if axis is not None and axis.block is not None and factor % axis.block:
        raise ScheduleError(f"phase {name}: tiles of {axis} have {axis.block} lanes, and {factor} is not a multiple of that")
    whole, made = loop.domain.extent_expr.value, loop.domain.definition
    if isinstance(made, transforms.Split) and loop.domain is made.outputs[1] and whole is not None and whole % factor:
        raise ScheduleError(f"phase {name}: a piece has {whole} positions of {axis}, which is not a multiple of {factor}")

    def change(loop: Loop) -> tuple[Statement, ...]:
        outer, rest = transforms.split(loop.domain, factor)
        return (Loop(outer, loop.kind, (Loop(rest, loop.kind, loop.body, loop.carried),), loop.carried),)

    return loop_replaced(program, name, domain, change)


def combine(program: TileProgram, name: str, component: str, ragged: str) -> TileProgram:
    """`combine` for two loops on the grid. These run in any order, so other grid loops may lie between them."""
    phase = find(program, name)
    pair = [loop_named(phase, each) for each in (component, ragged)]
    if any(loop.kind is not GRID for loop in pair):
        raise ScheduleError(f"phase {name}: {component} and {ragged} are not both on the grid; cut the row instead")
    return swap(program, name, replace(phase, body=cutting.list_tiles(program, phase, *pair)))


def mark(program: TileProgram, name: str, domain: str, wanted: ParallelType) -> TileProgram:
    """for i: (a; b)   ->   a in lanes i;  b in lanes i.  Each statement of a kernel processes its tile as one block."""
    loop = loop_named(find(program, name), domain)
    axis, size = program.axis_of(loop.domain), loop.domain.extent_expr.value
    if wanted is SERIAL and loop.kind is GRID:
        # One worker then runs these iterations one after the other.
        return loop_replaced(program, name, domain, lambda found: (replace(found, kind=SERIAL),))
    if wanted is GRID and loop is _alone(find(program, name)) and not loop.carried:
        require_independent(program, loop)
        return loop_replaced(program, name, domain, lambda found: (replace(found, kind=GRID),))
    if wanted is not LANES:
        raise ScheduleError(
            f"phase {name}: {domain} cannot be {wanted.value}: besides the outermost loops of a kernel, the grid takes only a "
            "loop that is alone inside them and carries nothing"
        )
    if axis is None or loop.domain.is_ragged or size is None:
        raise ScheduleError(f"phase {name}: {loop.domain} cannot be lanes: its extent is not known; split it first")
    if axis.block not in (None, size):
        raise ScheduleError(f"phase {name}: tiles of {axis} have {axis.block} lanes, not {size}")
    return loop_replaced(program, name, domain, lambda found: found.body, loop.domain)


def _alone(phase: Phase) -> Statement | None:
    """The only statement inside the grid loops of a phase; None if there are several."""
    body = phase.body
    while len(body) == 1 and isinstance(body[0], Loop) and body[0].kind is GRID:
        body = body[0].body
    return body[0] if len(body) == 1 else None
