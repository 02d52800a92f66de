"""Forward and backward programs, and the tensors that the forward program saves.

In: a fusion with gradients. Out: the forward program, whose further results are what it saves, and the backward program, which
takes them, the inputs it needs and the gradients of the results.

    "auto"     results of reductions, scans and library calls, and of the program; everything between them is computed again,
               and so are tensors over two ragged dims of one component (the scores of attention)
    "all"      every tensor that the backward program reads
    "inputs"   nothing but inputs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from serrate.autograd.adjoint import Gradients
from serrate.errors import CallError, ShapeError
from serrate.ir.clone import Cloner
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Expr, Symbol
from serrate.ir.fusion import Definition, Equal, Fusion
from serrate.ir.memory_order import in_order
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.tile import Store
from serrate.ir.traversal import arrays_in, arrays_of, traverse
from serrate.ir.values import Computed, Extent, Place, Read, Role, Tensor, Value
from serrate.runtime.results import groups, values_storage

Save = Literal["auto", "all", "inputs"]
Storage = tuple[IterDomain, ...]


def check_save(save: str) -> None:
    """Raises unless this is a choice."""
    if save not in get_args(Save):
        raise CallError(f"save: expected {', '.join(map(repr, get_args(Save)))}, got {save!r}")


@dataclass(frozen=True)
class Backward:
    """A backward program, and where its inputs come from."""

    fusion: Fusion
    inputs: tuple[int, ...]
    """Inputs of the forward program: the first inputs of this one."""
    saved: tuple[str, ...]
    """Tensors of the forward program: the next ones."""
    given: tuple[int, ...]
    """Results of the forward program whose gradients are the last ones."""
    found: tuple[int | None, ...]
    """For each wanted input, which result is its gradient; None if it is zero."""


def backward_of(made: Gradients, results: Iterable[str], save: Save) -> Backward:
    """The backward program; `results` names the tensors that the forward program returns anyway."""
    fusion, first = made.fusion, made.fusion.definitions[: made.forward]
    kept = {name for d in first if _is_kept(fusion, d, save, set(results)) for name in _names(d)}
    needed, arrays, live = _needed(fusion, [v.tensor for v in made.found if v is not None], kept)
    saved = [t for d in first for t in d.statement.targets if t.name in kept and (t in needed or t.name in arrays)]
    arriving = {k for k in made.given if k is not None}
    plain = [k for k in range(len(fusion.inputs)) if k not in arriving]
    given = [j for j, k in enumerate(made.given) if k is not None and fusion.inputs[k].tensor in needed]
    grads = [fusion.inputs[k].tensor for k in (made.given[j] for j in given) if k is not None]
    used = [k for k in plain if fusion.inputs[k].tensor in needed or fusion.inputs[k].tensor.name in arrays]
    stored = {t: values_storage(fusion.view(t)) for t in saved}
    inputs = _with_sizes(fusion, plain, used, live, stored, grads)
    return Backward(
        _assembled(made, live, [*(fusion.inputs[k].tensor for k in inputs), *saved, *grads], stored),
        tuple(inputs),
        tuple(t.name for t in saved),
        tuple(given),
        tuple(_numbered(made)),
    )


def _numbered(made: Gradients) -> list[int | None]:
    found: list[int | None] = []
    count = 0
    for view in made.found:
        found.append(None if view is None else count)
        count += view is not None
    return found


def _names(definition: Definition) -> list[str]:
    return [t.name for t in definition.statement.targets]


def _is_kept(fusion: Fusion, definition: Definition, save: Save, results: set[str]) -> bool:
    """Whether the results of a definition are saved if they are needed."""
    if save == "inputs" or any(not _can_be_kept(fusion, t) for t in definition.statement.targets):
        return False
    return save == "all" or not isinstance(definition.statement, Store) or not results.isdisjoint(_names(definition))


def _can_be_kept(fusion: Fusion, tensor: Tensor) -> bool:
    """Whether a tensor can be a result; scores of attention can, but take too much memory."""
    rows = [d.component.uid for d in tensor.logical if isinstance(d, RaggedIterDomain)]
    if len(set(rows)) < len(rows) or not in_order(tensor):
        return False
    try:
        groups(fusion.view(tensor))
    except ShapeError:
        return False
    return True


def _needed(fusion: Fusion, results: Sequence[Tensor], kept: set[str]) -> tuple[set[Tensor], set[str], list[Definition]]:
    """The memories and arrays that results depend on, and the definitions that compute them, except those that are kept."""
    needed = {t.memory for t in results}
    arrays = {name for t in results for name in _arrays((*t.logical, *t.storage))}
    live: list[Definition] = []
    for definition in reversed(fusion.definitions):
        names = _names(definition)
        if kept.issuperset(names) or not any(t in needed or t.name in arrays for t in definition.statement.targets):
            continue
        live.append(definition)
        reads = [r.tensor for v in definition.statement.values for r in v.reads]
        needed.update(t.memory for t in reads)
        domains = [*definition.domains, *(d for t in (*reads, *definition.statement.targets) for d in (*t.logical, *t.storage))]
        arrays |= _arrays(domains) | {a.name for v in definition.statement.values for a in arrays_in(v)}
    return needed, arrays, live[::-1]


def _arrays(domains: Iterable[IterDomain]) -> set[str]:
    """Names of the tensors that determine domains."""
    return {source.name for source in arrays_of(domains)}


def _with_sizes(
    fusion: Fusion,
    plain: Sequence[int],
    used: Sequence[int],
    live: Sequence[Definition],
    stored: Mapping[Tensor, Storage],
    grads: Sequence[Tensor],
) -> list[int]:
    """Adds inputs whose sizes the program needs, if no other input has them."""
    found = list(used)
    tensors = [*stored, *grads, *(fusion.inputs[k].tensor for k in used)]
    reads = [r.tensor for d in live for v in d.statement.values for r in v.reads]
    domains = [d for definition in live for d in definition.domains]
    domains += [d for t in (*tensors, *reads, *(t for d in live for t in d.statement.targets)) for d in (*t.logical, *t.storage)]
    wanted = {symbol for domain in domains for symbol in _symbols_of(domain)}
    wanted |= {symbol for d in live for v in d.statement.values for symbol in _symbols_in(v)}
    known = {s for t in tensors for s in _sizes(stored.get(t, t.storage))}
    for k in plain:
        missing = _sizes(fusion.inputs[k].tensor.storage) & wanted - known
        if k not in used and missing:
            found.append(k)
            known |= missing
    return sorted(found)


def _sizes(storage: Storage) -> set[Symbol]:
    """The sizes that an input determines."""
    return {d.extent_expr for d in storage if isinstance(d.extent_expr, Symbol)}


def _symbols_of(domain: IterDomain) -> Iterator[Symbol]:
    """All symbols that a domain depends on."""
    for node in traverse(domain):
        record = node.recipe if isinstance(node, Array) else node
        for field in fields(record) if record is not None else ():
            value = getattr(record, field.name)
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Expr):
                    yield from each.symbols


def _symbols_in(value: Value) -> Iterator[Symbol]:
    for node in value.walk():
        places = node.index if isinstance(node, Read) else (node.place,) if isinstance(node, Computed) else ()
        for at in places:
            if isinstance(at, Place):
                yield from at.expr.symbols
        if isinstance(node, Extent):
            yield from _symbols_of(node.domain)


def _assembled(made: Gradients, live: Sequence[Definition], inputs: Sequence[Tensor], stored: Mapping[Tensor, Storage]) -> Fusion:
    old = made.fusion
    cloner = _InputCloner(stored)
    new = Fusion(old.name, identity=old.identity)
    new._numbers = dict(old._numbers)
    new.inputs = [new.view(cloner(t)) for t in inputs]
    new.definitions = [cloner(d) for d in live]
    # Structures that a call compared once stay equal.
    new.checks = [cloner(c) for c in old.checks if isinstance(c, Equal) and isinstance(c.left, Array)]
    new.output(*(new.view(cloner(v.tensor)) for v in made.found if v is not None))
    return new


class _InputCloner(Cloner):
    """Copies a program in which some tensors are inputs, stored as the values of results are."""

    def __init__(self, given: Mapping[Tensor, Storage]) -> None:
        super().__init__()
        self._given = given

    def _record(self, node: object) -> object:
        new = super()._record(node)
        if isinstance(node, Tensor) and node.memory in self._given:
            object.__setattr__(new, "role", Role.INPUT)
            if node in self._given:
                object.__setattr__(new, "storage", self(self._given[node]))
        return new


def forward_of(fusion: Fusion, saved: Sequence[str]) -> Fusion:
    """The program with further results: the tensors of these names. Seeds are plain inputs."""
    new = fusion.clone()
    new.seeds = []
    tensors = {t.name: t for d in new.definitions for t in d.statement.targets}
    new.output(*(new.view(tensors[name]) for name in saved))
    return new
