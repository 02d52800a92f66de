"""Rows that are one part, finished by whoever has that part; only longer rows leave partial results.

In: one program under two plans: whole rows, and parts of rows. Out: a program that does each row as one of them says, by its
length.

    whole  for c: (a; b)
    parts  for (c, o): p = a;   for c: a = p;   for (c, o): b
        ->  for (c, o): if length[c] <= N: (a; b)  else: p = a
            for c: unless 0 < length[c] <= N: a = p
            for (c, o): if N < length[c]: b
An empty row has no part; the phases over rows give it what it has.
"""

from __future__ import annotations

from dataclasses import replace

from serrate.errors import ScheduleError
from serrate.ir.domains import IterDomain
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine
from serrate.ir.tile import GRID, At, ByLength, Loop, Phase, Statement, TileProgram
from serrate.ir.transforms import Split
from serrate.ir.values import Role


def by_length(whole: TileProgram, parts: TileProgram) -> TileProgram:
    """The rows that are one part as `whole` has them, longer ones as `parts` has them."""
    found = [_outermost(phase) for phase in parts.phases]
    (rows,) = (_outermost(phase) for phase in whole.phases) if len(whole.phases) == 1 else (None,)
    lists = [loop.domain for loop in found if loop is not None and isinstance(loop.domain.definition, Combine)]
    if rows is None or not lists or found[0] is None or found[0].domain is not lists[0] or len(parts.phases) == 1:
        raise ScheduleError("rows are not done one by one, or their parts leave nothing that is partial")
    if any(t.role is not Role.OUTPUT for t in whole.phases[0].writes & parts.phases[0].writes):
        raise ScheduleError("what is found out about a part is also found out about a whole row")
    component, row, most = _parts(lists[0])
    if rows.domain.uid != component.uid or any(_parts(each)[1] is not row for each in lists):
        raise ScheduleError("not all phases run over the rows that are cut")
    phases: list[Phase] = []
    for phase, loop in zip(parts.phases, found, strict=True):
        if loop is None or not (loop.domain.uid == component.uid or any(loop.domain is d for d in lists)):
            raise ScheduleError(f"phase {phase.name} does not run over the rows that are cut")
        # Parts of a later list may be smaller: what matters is whether the first phase had the row as one.
        short: tuple[Statement, ...] = () if phases else (At(component, loop.domain, rows.body),)
        chosen = ByLength(row, 1 if loop.domain.uid == component.uid else 0, most, short, loop.body)
        phases.append(replace(phase, body=(replace(loop, body=(chosen,)),)))
    return parts.with_phases(tuple(phases))


def longest_part(parts: TileProgram) -> int:
    """How many positions a row has at most that is one part."""
    found = (loop for phase in parts.phases if (loop := _outermost(phase)) is not None)
    return next(_parts(loop.domain)[2] for loop in found if isinstance(loop.domain.definition, Combine))


def _outermost(phase: Phase) -> Loop | None:
    """The one loop on the grid that a phase is, if it is one."""
    loop = phase.body[0] if len(phase.body) == 1 else None
    return loop if isinstance(loop, Loop) and loop.kind is GRID else None


def _parts(listed: IterDomain) -> tuple[IterDomain, RaggedIterDomain, int]:
    """The component, the row and the size of the parts that a list is of."""
    made = listed.definition
    assert isinstance(made, Combine)
    cut = made.inputs[1].definition
    size = cut.outputs[1].extent_expr.value if isinstance(cut, Split) else None
    if not isinstance(cut, Split) or size is None or not isinstance(cut.inputs[0], RaggedIterDomain):
        raise ScheduleError(f"{listed} is not a list of parts of rows")
    return made.inputs[0], cut.inputs[0], size
