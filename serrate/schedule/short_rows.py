"""Short rows: a row that fits one piece is finished by the worker that takes it; only longer rows leave partial results.

In: one program under two plans: whole rows, and pieces of rows. Out: a program that runs the first plan for short rows and the
second for long ones. On a CPU, one work list holds both, so that a worker goes through memory in order:

    whole  for c: (a; b)
    pieces for (c, o): p = a;   for c: a = p;   for (c, o): b
        ->  for (c, o): if length[c] <= N: (a; b)  else: p = a
            for c: unless 0 < length[c] <= N: a = p
            for (c, o): if N < length[c]: b
An empty row has no pieces; the phases over rows compute its result. If the list holds only pieces of long rows (`several`), as
on a GPU, short rows have phases of their own, which come first, and the list is empty if no row is long:

        ->  for c: if length[c] <= N: (a; b)
            for (c, o): p = a;   for c, if it is in the list: a = p;   for (c, o): b
Rows that are lanes of one block cannot branch, so long rows count as empty there (`short_part`); later phases overwrite the
results that this stores for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from serrate.errors import ScheduleError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import maximum, minimum
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine, WithinRow, combine, lists_long_rows, within_row
from serrate.ir.rewrites import with_tensor
from serrate.ir.tile import GRID, At, ByLength, Loop, Phase, Statement, TileProgram, statements
from serrate.ir.transforms import Split
from serrate.ir.values import Role


def by_length(whole: TileProgram, pieces: TileProgram, most: int) -> TileProgram:
    """Rows of at most `most` positions as `whole` schedules them, longer ones as `pieces` does."""
    found = [_grid(phase) for phase in pieces.phases]
    lists = [loops[0].domain for loops in found if loops and isinstance(loops[0].domain.definition, Combine)]
    if long := [each for each in lists if lists_long_rows(each)]:
        return _rows_first(whole, pieces, long, most)
    rows = _grid(whole.phases[0]) if len(whole.phases) == 1 else ()
    if not rows or not lists or not found[0] or found[0][0].domain is not lists[0] or len(pieces.phases) == 1:
        raise ScheduleError("rows are not processed one by one, or their pieces leave no partial results")
    if any(t.role is not Role.OUTPUT for t in whole.phases[0].writes & pieces.phases[0].writes):
        raise ScheduleError("pieces and whole rows write the same temporary")
    component, row, size = _pieces(lists[0])
    if rows[0].domain.uid != component.uid or any(_pieces(each)[1] is not row for each in lists) or most != size:
        raise ScheduleError("not all phases run over the rows that are cut, or not in the same pieces")
    if [loop.domain.uid for loop in rows[1:]] != [loop.domain.uid for loop in found[0][1:]]:
        raise ScheduleError("workers share whole rows and pieces in different ways")
    phases: list[Phase] = []
    for phase, loops in zip(pieces.phases, found, strict=True):
        if not loops or not (loops[0].domain.uid == component.uid or any(loops[0].domain is d for d in lists)):
            raise ScheduleError(f"phase {phase.name} does not run over the rows that are cut")
        first, last = loops[0].domain, loops[-1]
        # A later list may have smaller pieces. What matters is whether the row fitted one piece in the first phase.
        short: tuple[Statement, ...] = () if phases else (At(component, first, rows[-1].body),)
        chosen = ByLength(row, 1 if first.uid == component.uid else 0, most, short, last.body)
        phases.append(replace(phase, body=_around(loops, chosen)))
    return pieces.with_phases(tuple(phases))


def _rows_first(whole: TileProgram, pieces: TileProgram, lists: list[IterDomain], most: int) -> TileProgram:
    """Short rows on their own, then lists of the pieces of long ones, for each component whose rows are cut. Phases that do not
    run over these rows, such as a check of all indices, stay before or after them."""
    groups: dict[int, LongRows] = {}
    for listed in lists:
        made = LongRows(listed, *_pieces(listed), [])
        known = groups.setdefault(made.component.uid, made)
        if known.row is not made.row or known.size != made.size or not _lists_rows_longer_than(most, listed):
            raise ScheduleError("not all phases run over the rows that are cut, or not in the same pieces")
    owners = {id(listed): _pieces(listed)[0].uid for listed in lists}
    others: dict[str, Phase] = {}
    for phase in pieces.phases:
        loops = _grid(phase)
        outer = loops[0].domain if loops else None
        if outer is not None and id(outer) in owners:
            groups[owners[id(outer)]].phases.append(phase)
        elif outer is not None and outer.uid in groups:
            groups[outer.uid].phases.append(groups[outer.uid].finishing(phase, loops))
        else:
            others[phase.name] = phase
    short = [phase for phase in whole.phases if phase.name not in others]
    if len(short) != len(groups) or len(whole.phases) != len(others) + len(groups):
        raise ScheduleError("not all phases run over the rows that are cut")
    if all(len(group.phases) == 1 for group in groups.values()):
        raise ScheduleError("pieces leave no partial results")
    whole = _with_temporaries_of(whole, others)
    short = [phase for phase in whole.phases if phase.name not in others]
    phases: list[Phase] = []
    for phase in whole.phases:
        if phase.name in others:
            phases.append(others[phase.name])
            continue
        rows = _grid(phase)
        own = next((uid for uid, group in groups.items() if rows and group.are_left_by(phase, rows, most)), None)
        if own is None:
            raise ScheduleError("rows are not processed one by one, or long ones are not left out")
        group = groups.pop(own)
        # What other phases read must be stored, also of short rows.
        elsewhere = {t.memory for each in (*short, *others.values()) if each is not phase for t in each.reads}
        phases += [group.short(phase, rows, most, finishes=phase.writes.isdisjoint(elsewhere)), *group.phases]
    return pieces.with_phases(tuple(phases))


def _with_temporaries_of(whole: TileProgram, others: Mapping[str, Phase]) -> TileProgram:
    """The program, with every temporary that another phase stores or reads replaced by that phase's tensor: each plan creates its
    own tensor for the same temporary."""
    stored = {tensor.name: tensor for phase in others.values() for tensor in phase.writes}
    used = {t.memory.name: t.memory for phase in others.values() for t in phase.reads}
    short = [phase for phase in whole.phases if phase.name not in others]
    pairs = [(t.memory, stored.get(t.memory.name)) for phase in short for t in phase.reads]
    pairs += [(t, used.get(t.name)) for phase in short for t in phase.writes]
    for tensor, made in {t: made for t, made in pairs if made is not None and made is not t}.items():
        if (made.dtype, made.logical, made.storage, made.role) != (tensor.dtype, tensor.logical, tensor.storage, tensor.role):
            raise ScheduleError(f"{tensor.name} is stored differently for short rows and for long ones")
        whole = with_tensor(whole, tensor, made)
    return whole


@dataclass(frozen=True)
class LongRows:
    """The phases over lists of the pieces of one component's long rows, and over these rows."""

    listed: IterDomain
    component: IterDomain
    row: RaggedIterDomain
    size: int
    phases: list[Phase]

    def finishing(self, phase: Phase, loops: tuple[Loop, ...]) -> Phase:
        """A phase over components as one over those in the list."""
        listed = combine(self.component, first_of(self.listed))
        of_row = At(self.component, listed, loops[-1].body, finishes=False)
        return replace(phase, body=_around((replace(loops[0], domain=listed), *loops[1:]), of_row))

    def are_left_by(self, phase: Phase, rows: tuple[Loop, ...], most: int) -> bool:
        """Whether a phase runs over rows of this component, one by one, or without the long ones."""
        return rows[0].domain.uid == self.component.uid or _leaves_long_rows(phase, self.row, most)

    def short(self, phase: Phase, rows: tuple[Loop, ...], most: int, *, finishes: bool) -> Phase:
        """A phase over whole rows as one over short ones."""
        body: Statement = At(rows[0].domain, rows[0].domain, rows[-1].body, finishes=finishes)
        if rows[0].domain.uid == self.component.uid:
            body = ByLength(self.row, 0, most, (body,), ())
        return Phase(f"{phase.name}_short", _around(rows, body), is_short=True)


def short_part(row: RaggedIterDomain, most: int) -> RaggedIterDomain:
    """The rows that have at most `most` positions; longer ones are empty.

    >>> from serrate.ir import partition
    >>> _, r = partition(IterDomain(10), [0, 7, 10])
    >>> short_part(r, 4).extents
    (0, 3)
    """
    fits = minimum(maximum(most + 1 - row.length, 0), 1)
    return within_row(row.component, row, minimum(row.length, fits * most), row.bound)


def _leaves_long_rows(phase: Phase, row: RaggedIterDomain, most: int) -> bool:
    """Whether all loops over rows of a phase leave out those longer than `most`."""
    part = short_part(row, most)
    loops = ((n.domain, *above(n.domain)) for n in statements(phase.body) if isinstance(n, Loop))
    found = [made for made in loops if any(row is d for d in made)]
    return bool(found) and all(any(part is d for d in made) for made in found)


def above(domain: IterDomain) -> list[IterDomain]:
    """All domains that a domain is made from."""
    made = domain.definition
    return [] if made is None else [d for source in made.inputs for d in (source, *above(source))]


def _around(loops: tuple[Loop, ...], body: Statement) -> tuple[Statement, ...]:
    for loop in reversed(loops):
        body = replace(loop, body=(body,))
    return (body,)


def several(pieces: IterDomain, most: int) -> RaggedIterDomain:
    """The pieces of rows that have more than `most` positions."""
    cut = pieces.definition
    size = cut.outputs[1].extent_expr.value if isinstance(cut, Split) else None
    if not isinstance(pieces, RaggedIterDomain) or cut is None or size is None:
        raise ScheduleError(f"{pieces} are not pieces of rows")
    long = minimum(maximum(cut.inputs[0].row_length - most, 0), 1)
    # A row has at most one partial piece, and the number of rows with more than `most` positions is bounded.
    bound = cut.inputs[0].host_bound
    return within_row(pieces.component, pieces, long * pieces.length, bound // size + bound // (most + 1))


def _lists_rows_longer_than(most: int, listed: IterDomain) -> bool:
    """Whether a work list holds all pieces of rows of more than `most` positions, and no others."""
    made = listed.definition
    assert isinstance(made, Combine)
    within = made.inputs[1].definition
    return isinstance(within, WithinRow) and several(within.inputs[0], most) is made.inputs[1]


def first_of(listed: IterDomain) -> RaggedIterDomain:
    """One piece of each row of a work list."""
    made = listed.definition
    assert made is not None and isinstance(made.inputs[1], RaggedIterDomain)
    pieces = made.inputs[1]
    return within_row(pieces.component, pieces, minimum(pieces.length, 1), pieces.host_bound)


def piece_size(pieces: TileProgram) -> int:
    """The number of positions of a piece."""
    found = (loops[0].domain for phase in pieces.phases if (loops := _grid(phase)))
    size = next((_pieces(domain)[2] for domain in found if isinstance(domain.definition, Combine)), None)
    if size is None:
        raise ScheduleError("no phase runs over pieces of rows")
    return size


def _grid(phase: Phase) -> tuple[Loop, ...]:
    """The grid loops around a whole phase, outermost first."""
    found: list[Loop] = []
    body = phase.body
    while len(body) == 1 and isinstance(body[0], Loop) and body[0].kind is GRID:
        found.append(body[0])
        body = body[0].body
    return tuple(found)


def _pieces(listed: IterDomain) -> tuple[IterDomain, RaggedIterDomain, int]:
    """The component, the row and the piece size of a work list."""
    made = listed.definition
    assert isinstance(made, Combine)
    cut = made.inputs[1].definition
    if isinstance(cut, WithinRow):
        cut = cut.inputs[0].definition
    size = cut.outputs[1].extent_expr.value if isinstance(cut, Split) else None
    if not isinstance(cut, Split) or size is None or not isinstance(cut.inputs[0], RaggedIterDomain):
        raise ScheduleError(f"{listed} is not a work list of pieces of rows")
    return made.inputs[0], cut.inputs[0], size
