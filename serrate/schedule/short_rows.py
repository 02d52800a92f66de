"""Short rows: a row that fits one piece is finished by the worker that takes it; only longer rows leave partial results.

In: one program under two plans: whole rows, and pieces of rows. Out: a program that branches between them on the length of each
row.

    whole  for c: (a; b)
    pieces for (c, o): p = a;   for c: a = p;   for (c, o): b
        ->  for (c, o): if length[c] <= N: (a; b)  else: p = a
            for c: unless 0 < length[c] <= N: a = p
            for (c, o): if N < length[c]: b
An empty row has no piece; the phases over rows give it its result.
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


def by_length(whole: TileProgram, pieces: TileProgram) -> TileProgram:
    """Rows that fit one piece as `whole` schedules them, longer ones as `pieces` does."""
    found = [_outermost(phase) for phase in pieces.phases]
    (rows,) = (_outermost(phase) for phase in whole.phases) if len(whole.phases) == 1 else (None,)
    lists = [loop.domain for loop in found if loop is not None and isinstance(loop.domain.definition, Combine)]
    if rows is None or not lists or found[0] is None or found[0].domain is not lists[0] or len(pieces.phases) == 1:
        raise ScheduleError("rows are not processed one by one, or their pieces leave no partial results")
    if any(t.role is not Role.OUTPUT for t in whole.phases[0].writes & pieces.phases[0].writes):
        raise ScheduleError("pieces and whole rows write the same temporary")
    component, row, most = _pieces(lists[0])
    if rows.domain.uid != component.uid or any(_pieces(each)[1] is not row for each in lists):
        raise ScheduleError("not all phases run over the rows that are cut")
    phases: list[Phase] = []
    for phase, loop in zip(pieces.phases, found, strict=True):
        if loop is None or not (loop.domain.uid == component.uid or any(loop.domain is d for d in lists)):
            raise ScheduleError(f"phase {phase.name} does not run over the rows that are cut")
        # A later list may have smaller pieces. What matters is whether the row fitted one piece in the first phase.
        short: tuple[Statement, ...] = () if phases else (At(component, loop.domain, rows.body),)
        chosen = ByLength(row, 1 if loop.domain.uid == component.uid else 0, most, short, loop.body)
        phases.append(replace(phase, body=(replace(loop, body=(chosen,)),)))
    return pieces.with_phases(tuple(phases))


def longest_piece(pieces: TileProgram) -> int:
    """The length of the longest row that fits one piece."""
    found = (loop for phase in pieces.phases if (loop := _outermost(phase)) is not None)
    return next(_pieces(loop.domain)[2] for loop in found if isinstance(loop.domain.definition, Combine))


def _outermost(phase: Phase) -> Loop | None:
    """The grid loop that makes up a whole phase; None for any other phase."""
    loop = phase.body[0] if len(phase.body) == 1 else None
    return loop if isinstance(loop, Loop) and loop.kind is GRID else None


def _pieces(listed: IterDomain) -> tuple[IterDomain, RaggedIterDomain, int]:
    """The component, the row and the piece size of a work list."""
    made = listed.definition
    assert isinstance(made, Combine)
    cut = made.inputs[1].definition
    size = cut.outputs[1].extent_expr.value if isinstance(cut, Split) else None
    if not isinstance(cut, Split) or size is None or not isinstance(cut.inputs[0], RaggedIterDomain):
        raise ScheduleError(f"{listed} is not a work list of pieces of rows")
    return made.inputs[0], cut.inputs[0], size
