"""Stages: a fusion, cut wherever one part must be complete before the next can be planned.

In: a fusion. Out: its stages in order, each a naive `TileProgram` or a library call. A cut is needed where the
fusion uses integers that it computes itself (offsets of rows, or indices that other tensors are read at), and on both sides of
a library call. A tensor that crosses a cut is an output of one stage and an input of the next, over the same domains, so
ragged tensors keep their structure. The offsets of a ragged result are hidden outputs: they stay on the device, and the user
sees one tensor. A fusion that computes no offsets is one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from serrate.ir.fusion import Definition, Fusion, live
from serrate.ir.tile import Library, TileProgram
from serrate.ir.traversal import arrays_in, arrays_of
from serrate.ir.values import Computed, Read, Role, Tensor
from serrate.lower.fold_indices import fold_indices
from serrate.lower.naive import naive
from serrate.lower.rounding import unrounded

Stage = TileProgram | Library


def stages(fusion: Fusion) -> tuple[Stage, ...]:
    """The stages of a fusion, in an order in which they can run."""
    fusion.verify()
    results = [view.tensor for view in fusion.results]
    definitions = live(fold_indices(fusion.definitions), fusion.results)
    needed = _grouped_and_inverted(unrounded(definitions, results))
    numbers = _numbered(needed)
    out: list[Stage] = []
    for number in sorted(set(numbers)) or [0]:
        here = [d for d, n in zip(needed, numbers, strict=True) if n == number]
        later = [d for d, n in zip(needed, numbers, strict=True) if n > number]
        out += [d.statement for d in here if isinstance(d.statement, Library)]
        own = [d for d in here if not isinstance(d.statement, Library)]
        if own or not needed:
            inputs = [view.tensor for view in fusion.inputs]
            out.append(_program(fusion.name, own, later, results, inputs, whole=len(set(numbers)) < 2))
    return tuple(out)


def _grouped_and_inverted(definitions: list[Definition]) -> list[Definition]:
    """Fuses a `group_by` with the inversion of its permutation: one call computes both."""
    calls = [(d, d.statement) for d in definitions if isinstance(d.statement, Library)]
    groups = {call.targets[1]: definition for definition, call in calls if call.function == "group_by"}
    inverses: dict[Definition, Definition] = {}
    for definition in definitions:
        statement = definition.statement
        if isinstance(statement, Library) and statement.function == "invert":
            (permutation,) = statement.values
            group = groups.get(permutation.tensor) if isinstance(permutation, Read) else None
            if group is not None:
                inverses.setdefault(group, definition)
    merged: dict[Definition, Definition | None] = dict.fromkeys(inverses.values())
    for group, inverse in inverses.items():
        call = group.statement
        assert isinstance(call, Library)
        both = replace(call, function="group_and_invert", targets=(*call.targets, *inverse.statement.targets))
        merged[group] = replace(group, statement=both)
    return [d for d in (merged.get(each, each) for each in definitions) if d is not None]


def _numbered(definitions: list[Definition]) -> list[int]:
    """The stage number of each definition: one more than that of anything that must be complete before it."""
    made: dict[str, tuple[int, bool]] = {}
    numbers: list[int] = []
    for definition in definitions:
        alone = isinstance(definition.statement, Library)
        number = 0
        for name in _read_as_tensors(definition):
            if name in made:
                before, complete = made[name]
                number = max(number, before + (alone or complete))
        for name in _read_as_arrays(definition):
            if name in made:
                number = max(number, made[name][0] + 1)
        numbers.append(number)
        made.update((t.name, (number, alone)) for t in definition.statement.targets)
    return numbers


def _read_as_tensors(definition: Definition) -> set[str]:
    return {r.tensor.memory.name for v in definition.statement.values for r in v.reads}


def _read_as_arrays(definition: Definition) -> set[str]:
    """Tensors that determine the domains or the computed indices of a definition."""
    found = {r.memory.name for v in definition.statement.values for r in _place_tensors(v.walk())}
    tensors = [*definition.statement.targets, *(r.tensor for v in definition.statement.values for r in v.reads)]
    domains = [*definition.domains, *(d for t in tensors for d in (*t.logical, *t.storage))]
    arrays = arrays_of(domains).union(*map(arrays_in, definition.statement.values))
    return found | {a.name for a in arrays}


def _place_tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Read | Computed):
            yield from (r.tensor for r in value.args if isinstance(r, Read))


def _program(
    name: str, own: list[Definition], later: list[Definition], results: list[Tensor], inputs: list[Tensor], *, whole: bool
) -> TileProgram:
    """The naive program of one stage. `whole`: it is the only stage, and takes the fusion's inputs unchanged."""
    written = {t for d in own for t in d.statement.targets}
    wanted = {n for d in later for n in (*_read_as_tensors(d), *_read_as_arrays(d))}
    wanted |= {t.memory.name for t in results} | {a.name for t in results for a in arrays_of(t.logical)}
    read = {r.tensor.memory: None for d in own for v in d.statement.values for r in v.reads}
    outside = [t for t in read if t not in written]
    taken = inputs if whole else [*(t for t in inputs if t in outside), *(t for t in outside if t.role is not Role.INPUT)]
    roles = {t: replace(t, role=Role.OUTPUT) for t in _in_order(own) if t.name in wanted}
    roles |= {t: replace(t, role=Role.INPUT) for t in taken if t.role is not Role.INPUT}
    return naive(name, own, tuple(roles.get(t, t) for t in taken), _swapped(roles))


def _in_order(own: list[Definition]) -> list[Tensor]:
    return [t for d in own for t in d.statement.targets]


def _swapped(roles: dict[Tensor, Tensor]) -> Callable[[Tensor], Tensor]:
    """Replaces tensors by ones with their role in this stage; a view follows its base."""

    def swap(tensor: Tensor) -> Tensor:
        if tensor.base is not None and tensor.memory in roles:
            memory = roles[tensor.memory]
            return replace(tensor, base=memory, role=memory.role)
        return roles.get(tensor, tensor)

    return swap
