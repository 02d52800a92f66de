"""Results: how the outputs of a fusion are returned.

In: the logical dims of an output, and a call. Out: the shape of its values, and the structure of its rows.

    [B, D]                    a plain tensor
    [4, C, R, D]              dim 1 of the values partitioned into rows
    [G, K, R] or [D, S, W]    nested rows, with equal or varying numbers of parts per component
    [C, R1, R2]               product of two ragged dims, packed
    [C1, R1, C2, R2]          two dims partitioned independently
    [C, H, R, D]              values [total, H, D]: rows are stored where the dim that counts them stands
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from serrate.errors import ShapeError
from serrate.ir.domains import IterDomain, shape_text
from serrate.ir.expr import Expr
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import product
from serrate.ir.storage import storage_of
from serrate.ir.transforms import merge
from serrate.ir.view import TensorView
from serrate.runtime.arguments import BoundCall, KnownRows, known_key, known_total, structure_key
from serrate.runtime.arrays import remembered
from serrate.runtime.bind import Binder
from serrate.runtime.outlined import OutlinedResult
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.checks.validate import Validate
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.jagged import trusted
from serrate.tensor.rows import Rows

Group = tuple[IterDomain, ...]
"""The logical dims of one dim of the values: a single dim, or components with their rows."""
Groups = list[tuple[Group, tuple[int, ...]]]
"""The groups of a result in the order of its values' dims; with each, how many regular dims come before each of its rows."""


class Result(NamedTuple):
    """One result: the tensor that holds it, its shape, its structure if it is ragged."""

    tensor: str
    place: int
    """The tensor's position among the inputs and outputs of a program that is the whole fusion."""
    shape: tuple[int, ...]
    structure: Structure | None
    hints: Hints = NO_HINTS

    def of(self, values: torch.Tensor) -> torch.Tensor | JaggedTensor:
        """Wraps values as this result."""
        if values.shape != self.shape:
            values = values.view(self.shape)
        return values if self.structure is None else trusted(values, self.structure, self.hints)


class ResultReader:
    """Shape and structure of an output of a fusion, as functions of a call."""

    def __init__(self, binder: Binder, view: TensorView) -> None:
        self.name = view.tensor.memory.name
        self._binder = binder
        dims = groups(view)
        rows = [(k, group) for k, (group, _) in enumerate(dims) if any(d.is_ragged for d in group)]
        self._dims = tuple(k for k, _ in rows)
        self._groups = [group for _, group in rows]
        self._ahead = tuple(before for group, before in dims if len(group) > 1)
        extents = [_extent(group) for group, _ in dims]
        self._shape, self._has_given_shape = binder.shape_reader(extents), not any(extent.arrays for extent in extents)
        self._key = self._argument_key()

    def __call__(self, call: BoundCall, place: int = -1) -> Result:
        """The result in a call; `place` is its tensor's among those of a program that is the whole fusion."""
        shape = self._shape(call)
        return Result(self.name, place, shape, self._structure(call, shape) if self._dims else None)

    def outlined(self, place: int) -> OutlinedResult | None:
        """The result, if its shape follows from sizes and its rows are those of arguments."""
        if not self._has_given_shape or (self._dims and self._key is None):
            return None
        return OutlinedResult(place, self._shape, self._key if self._dims else None, self._ahead)

    def _argument_key(self) -> tuple[object, ...] | None:
        """The key of the structure, if all its offsets are arguments."""
        places: list[int] = []
        for group in self._groups:
            for domain in (d for d in group if isinstance(d, RaggedIterDomain)):
                place = self._binder.place_of(self._binder.offsets_of(domain))
                if place is None or self._binder.has_equal_parts(domain, group):
                    return None
                places.append(place)
        depths = [sum(d.is_ragged for d in group) - (_product(group) is not None) for group in self._groups]
        return structure_key(self._dims, tuple(depths), tuple(places))

    def _structure(self, call: BoundCall, shape: tuple[int, ...]) -> Structure:
        known = call.known.structures.get(self._key) if self._key is not None else None
        return (self._made(call, shape) if known is None else known).transposed(self._ahead)

    def _made(self, call: BoundCall, shape: tuple[int, ...]) -> Structure:
        """The structure made of its offsets, or what was made of them before."""
        binder, dims = self._binder, self._dims
        chains: list[tuple[torch.Tensor, ...]] = []
        columns: list[torch.Tensor | None] = []
        for group in self._groups:
            pair = _product(group)
            columns.append(None if pair is None else binder.array(call, binder.offsets_of(pair[1])))
            chains.append(binder.levels(call, [d for d in group if pair is None or d.uid != pair[1].uid]))
        offsets = tuple(
            t for chain, width in zip(chains, columns, strict=True) for t in (*chain, *(() if width is None else (width,)))
        )

        def make() -> Structure:
            parts = zip(dims, chains, columns, strict=True)
            return Structure(tuple(_rows(chain, width, shape[dim], call.validate(chain)) for dim, chain, width in parts), dims)

        return call.remember(offsets, _key(dims, tuple(map(len, chains)), tuple(shape[dim] for dim in dims)), make)


def groups(view: TensorView) -> Groups:
    """Groups the logical dims of an output by the dims of its values; raises if no values can hold it."""
    logical = view.tensor.logical
    owned = {r.uid: {d.uid for d in owners(r)} for r in logical if r.is_ragged}
    every = {uid for own in owned.values() for uid in own}
    found: Groups = []
    taken: set[int] = set()
    for k, first in enumerate(logical):
        if k in taken:
            continue
        mine = [j for j in range(k + 1, len(logical)) if first.uid in owned.get(logical[j].uid, ())]
        if first.is_ragged:
            raise ShapeError(
                f"a result of shape {shape_text(logical)} cannot be returned: dim {k} is ragged, and the dim that counts them "
                "must come before; permute the dims, or make one dim of both with as_flattened"
            )
        rows = {d for j in mine for d in owned[logical[j].uid]} | {logical[j].uid for j in mine}
        inside = [k, *(j for j in range(k + 1, max(mine, default=k) + 1) if logical[j].uid in rows)]
        between = [j for j in range(k, inside[-1]) if j not in inside]
        strange = next((j for j in between if logical[j].is_ragged or logical[j].uid in every), None)
        if strange is not None:
            raise ShapeError(
                f"a result of shape {shape_text(logical)} cannot be returned: dim {strange} holds or counts rows, but is "
                "between other rows and the dim that counts them; permute the dims so that it comes before or after both"
            )
        counting = [d.component.uid for d in (logical[j] for j in inside) if isinstance(d, RaggedIterDomain)]
        if len(set(counting[:-1])) < len(counting) - 1:
            raise ShapeError(
                f"a result of shape {shape_text(logical)} cannot be returned: only the last two ragged dims can be counted "
                "by the same dim; reduce one of them in the same traced function"
            )
        before = tuple(sum(j < at for j in between) for at in inside[1:])
        found.append((tuple(logical[j] for j in inside), before))
        taken.update(inside)
    return found


def values_storage(view: TensorView) -> tuple[IterDomain, ...]:
    """The storage of an output's values: one domain per dim. Where a tensor has one for each of several dims that count rows
    (`[G, I]` for rows by `[G, K+1]` offsets), the values have one dim for all of them."""
    return tuple(functools.reduce(merge, storage_of(group)) for group, _ in groups(view))


def owners(ragged: IterDomain) -> list[IterDomain]:
    """The owners of a ragged domain: its component, the domains that was made from, and so on."""
    assert isinstance(ragged, RaggedIterDomain)
    found: list[IterDomain] = []
    pending = [ragged.component]
    while pending:
        component = pending.pop()
        found.append(component)
        if component.definition is not None and component.definition.nests:
            pending += component.definition.inputs
        if isinstance(component, RaggedIterDomain):
            pending.append(component.component)
        for made in component.derived.values():
            # The component was partitioned in turn: sentences of documents.
            inner = made[-1]
            if len(made) > 1 and isinstance(inner, RaggedIterDomain) and isinstance(inner.definition, Partition):
                found.append(inner)
                pending.append(inner.component)
    return found


def _extent(group: Group) -> Expr:
    """The extent of the dim of the values that a group takes."""
    ragged = [d for d in group if isinstance(d, RaggedIterDomain)]
    pair = _product(group)
    return product(*pair).extent_expr if pair is not None else (ragged[-1] if ragged else group[0]).extent_expr


def _product(group: Group) -> tuple[RaggedIterDomain, RaggedIterDomain] | None:
    """The innermost two ragged domains if both belong to one component."""
    ragged = [d for d in group if isinstance(d, RaggedIterDomain)]
    if len(ragged) > 1 and ragged[-1].component.uid == ragged[-2].component.uid:
        return ragged[-2], ragged[-1]
    return None


def _rows(chain: tuple[torch.Tensor, ...], columns: torch.Tensor | None, size: int, validate: Validate) -> Rows:
    if columns is None:
        return Structure.from_offsets(*chain, total=size, validate=validate).rows[0]
    rows = Structure.from_offsets(*chain).rows[0]
    if columns.dtype == chain[0].dtype:
        wide = Rows(rows.offsets, columns=columns)
    else:
        wide = Rows(tuple(level.long() for level in rows.offsets), columns=columns.long())
    wide.note(*wide.extent_fact, size)
    return wide


def _key(dims: tuple[int, ...], depths: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[object, ...]:
    """The key of a cached structure, in addition to its offsets."""
    return ("structure", dims, depths, sizes)


def known_rows(given: Iterable[tuple[Structure, int]]) -> KnownRows:
    """The rows of ragged arguments: the structure of each, with the number of the first argument that describes it.

    Offsets that are not verified, or were written to since, are left out, and so are checked like any others.
    """
    levels: dict[int, tuple[Rows, int]] = {}
    structures: dict[tuple[object, ...], Structure] = {}
    for structure, first in given:
        each = structure._rows
        rows = each[0]
        if len(each) == 1 and rows.starts is None and len(rows.offsets) == 1:
            # The most usual rows, without a loop.
            if rows.verified():
                levels[first] = (rows, 0)
                structures[structure_key(structure._dims, (1,), (first,))] = structure.canonical
            continue
        at, contiguous, depths = first, True, []
        for rows in each:
            if not rows.verified():
                break
            depth, count = rows.depth, len(rows.offsets)
            depths.append(depth)
            if rows.starts is not None:
                contiguous = False
                at += len(rows.buffers())
                continue
            if count == depth:
                for level in range(depth):
                    levels[at + level] = (rows, level)
            elif not rows.packed:
                contiguous = False
            at += count
        else:
            if contiguous:
                structures[structure_key(structure.dims, tuple(depths), tuple(range(first, at)))] = structure.canonical
    return KnownRows(levels, structures)


def remember_rows(known: KnownRows, args: Sequence[torch.Tensor]) -> None:
    """Caches known rows with their offsets, so that they are not checked again by other programs that are given these offsets:
    backward programs."""
    for place, (rows, level) in known.levels.items():
        total = known_total(rows, level)
        if total is not None:
            remembered((args[place],), known_key(int(total)), functools.partial(_level, rows, level))


def _level(rows: Rows, level: int) -> Structure:
    """One level of rows as a separate structure, with its known facts."""
    if rows.levels == 1:
        return Structure((rows,))
    alone = Rows((rows.offsets[level],))
    for name in ("total", "max", "min"):
        fact = rows.known(name, level)
        if fact is not None:
            alone.note(name, 0, fact)
    return Structure((alone,))
