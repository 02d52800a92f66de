"""The first steps of every strategy: inline elementwise results into their readers, and flatten loops to one ragged pair.

In: a recorder with a naive program. Out: the same recorder; its phases are now `[component, ragged, regular dims ...]`, or
have no ragged pair. `describe` then returns the `Shape` of each phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serrate.analysis.indices import Indices
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, symbol
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine, product
from serrate.ir.storage import collapse
from serrate.ir.tile import Accumulate, Leaf, Phase, Store, TileProgram, chain
from serrate.ir.transforms import Merge
from serrate.ir.values import Call, Computed, Extent, Ordinal, Place, Position, Read, Role, Tensor, domains_of
from serrate.schedule.heuristic import Carried
from serrate.schedule.plan import Recorder

WIDEST = 1024
"""The most features of the values that a contraction of a ragged product sums at once."""


@dataclass(frozen=True)
class Shape:
    """A phase that is a perfect loop nest: its ragged pair, if any, its regular loops, and which loops are reduced."""

    phase: str
    leaf: Leaf
    component: IterDomain | None
    ragged: RaggedIterDomain | None
    regular: tuple[IterDomain, ...]
    reduced: frozenset[int]

    @property
    def domains(self) -> tuple[IterDomain, ...]:
        """All loops: the ragged pair, then the others."""
        return (*(d for d in (self.component, self.ragged) if d is not None), *self.regular)

    @property
    def reduces_rows(self) -> bool:
        return self.ragged is not None and self.ragged.uid in self.reduced

    @property
    def has_other_rows(self) -> bool:
        """Whether another loop is ragged too: over the same component (a ragged product), or another one."""
        return any(d.is_ragged for d in self.regular)

    @property
    def own_rows(self) -> tuple[RaggedIterDomain, ...]:
        """The ragged loops of this component; two of them are a ragged product."""
        found = (*self.regular, *((self.ragged,) if self.ragged is not None else ()))
        component = None if self.component is None else self.component.uid
        return tuple(d for d in found if isinstance(d, RaggedIterDomain) and d.component.uid == component)

    @property
    def is_product(self) -> bool:
        """Whether this is a matrix product: a sum over one regular dim of products of two sides that share it."""
        if not isinstance(self.leaf, Accumulate) or self.leaf.reduction.operator != "sum" or self.leaf.merge:
            return False
        value = self.leaf.values[0]
        inner = [d for d in self.regular if d.uid in self.reduced]
        if len(inner) != 1 or self.reduces_rows or len(self.regular) < 2:
            return False
        if not (isinstance(value, Call) and value.function == "mul"):
            return False
        sides = [{d.uid for r in side.reads for d in domains_of(r.index)} for side in value.args]
        # Each side has a dim that the other lacks, else it is a row of elementwise products.
        return all(inner[0].uid in side for side in sides) and not (sides[0] <= sides[1] or sides[1] <= sides[0])

    @property
    def row_product(self) -> RowProduct | None:
        """This phase as a matrix product that sums over rows, as the gradient of a weight does; None if it is not one."""
        if not isinstance(self.leaf, Accumulate) or self.leaf.reduction.operator != "sum" or self.leaf.merge:
            return None
        value, reduced = self.leaf.values[0], [d for d in self.domains if d.uid in self.reduced]
        if len(reduced) != 1 or not (isinstance(value, Call) and value.function == "mul"):
            return None
        depth = reduced[0]
        # Positions of combined levels are found by search, one by one, so they do not form a block of consecutive rows.
        searched = depth.definition is not None or depth.extent_expr.value is not None
        if depth is not self.ragged and (self.component is not None or searched):
            return None
        sides = [{d.uid for r in side.reads for d in domains_of(r.index)} for side in value.args]
        wide = [d for d in self.leaf.index if d is not None and any(d.uid == r.uid for r in self.regular) and not d.is_ragged]
        own = [[d for d in wide if d.uid in a and d.uid not in b] for a, b in (sides, reversed(sides))]
        if not all(own) or any(d.extent_expr.value is None for side in own for d in side):
            return None
        order = [d.uid for d in wide]
        rows, columns = sorted((own[0][-1], own[1][-1]), key=lambda d: order.index(d.uid))
        return RowProduct(rows, columns, depth)


@dataclass(frozen=True)
class RowProduct:
    """A matrix product that sums over rows: `w[d, e] sum= x[r, d] * y[r, e] over r`."""

    rows: IterDomain
    columns: IterDomain
    depth: IterDomain


@dataclass(frozen=True)
class RowFacts:
    """The facts from which a strategy is chosen: the rows that workers share, and the cost of one position."""

    ragged: RaggedIterDomain
    """For a ragged product, the product of both lengths; for levels that are reduced together, all of them flattened."""
    inner: tuple[Expr, ...]
    itemsize: int
    product: bool
    carried: Carried
    """What a worker carries from one block of a row to the next."""
    over_features: bool
    """Whether rows have statistics over all of their features."""


def row_facts(program: TileProgram) -> RowFacts | None:
    """Facts about the rows of a naive program, with levels flattened; None if nothing is ragged."""
    recorder = Recorder(program)
    prepare(recorder)
    shapes = [describe(recorder.program, p.name) for p in recorder.program.phases]
    found = [s for s in shapes if s.ragged is not None]
    if not found:
        return None
    most = max(found, key=lambda s: len(s.own_rows))
    sides = {d.uid for d in most.own_rows}
    rows = most.own_rows[0] if len(sides) == 1 else product(*most.own_rows[:2])
    inner = tuple(d.extent_expr for d in collapse([d for d in most.regular if d.uid not in sides]))
    itemsize = max(t.dtype.itemsize for s in found for t in s.leaf.targets)
    reducing = [s for s in found if s.reduces_rows and isinstance(s.leaf, Accumulate)]
    statistics = [s for s in reducing if isinstance(s.leaf, Accumulate) and s.leaf.reduction.in_block is not None]
    carried: Carried = "statistics" if statistics else "sums" if reducing else "nothing"
    over_features = any(s.reduced & {d.uid for d in s.regular} for s in statistics)
    return RowFacts(rows, inner, itemsize, any(s.is_product for s in shapes), carried, over_features)


def describe(program: TileProgram, name: str) -> Shape:
    """The shape of a phase."""
    phase = next(p for p in program.phases if p.name == name)
    found = chain(phase)
    assert found is not None, f"phase {name} is not a perfect nest"
    loops, leaf = found
    domains = [loop.domain for loop in loops]
    ragged = next((d for d in reversed(domains) if isinstance(d, RaggedIterDomain)), None)
    component = None if ragged is None else next((d for d in domains if d.uid == ragged.component.uid), None)
    if component is None:
        # A phase per component, without a ragged loop: the first loop runs over components.
        component = next((d for d in domains if d.pairing is not None and not d.is_ragged), None)
        ragged = None
        if component is not None and component.uid in reduced_loops(leaf, domains):
            component = None
    paired = {d.uid for d in (component, ragged) if d is not None}
    regular = tuple(d for d in domains if d.uid not in paired)
    return Shape(name, leaf, component, ragged, regular, reduced_loops(leaf, domains))


def reduced_loops(leaf: Leaf, domains: list[IterDomain]) -> frozenset[int]:
    """The loops (by uid) that a statement reduces: the index of its result does not determine their position."""
    known = Indices([(d, symbol(f"@{d.uid}")) for d in leaf.index if d is not None])
    return frozenset(d.uid for d in domains if not known.knows(d))


def prepare(recorder: Recorder) -> None:
    """Inlines elementwise results, then flattens nested levels to one (component, ragged) pair per phase.

    Kernels are left as written.
    """
    if recorder.program.axes:
        return
    inline_elementwise(recorder)
    if align_products(recorder):
        inline_elementwise(recorder)
    if contract_products(recorder):
        inline_elementwise(recorder)
    flatten_levels(recorder)
    flatten_rows(recorder)


def inline_elementwise(recorder: Recorder) -> None:
    """Inlines elementwise results whose readers need each element once, or that cost nothing to recompute."""
    for phase in list(recorder.program.phases):
        found = chain(phase)
        if found is None or not isinstance(found[1], Store) or found[1].tensor.role is not Role.SCRATCH:
            continue
        own = {loop.domain.uid for loop in found[0]}
        free = not any(isinstance(v, Read) for v in found[1].value.walk())
        readers = [p for p in recorder.program.phases if found[1].tensor in {t.memory for t in p.reads}]
        alone = len(readers) == 1
        if free or all(_runs_over(p) == own or _reads_once(p, found[1].tensor, alone=alone) for p in readers):
            recorder.attempt("inline", phase.name)


def align_products(recorder: Recorder) -> bool:
    """Makes matrix products that one elementwise result combines, such as gate and up projections, run over the dims of that
    result, so that one worker can compute a block of each. Returns whether any loops changed."""
    found = False
    for phase in reversed(recorder.program.phases):
        loops = chain(phase)
        if loops is not None and loops[1].targets[0].role is not Role.PRIVATE and _of_products(recorder.program, loops[1]):
            found |= _align(recorder, loops[1])
    return found


def _align(recorder: Recorder, leaf: Leaf) -> bool:
    """Makes a statement run over the dims at which all of its readers read it. Returns whether its loops changed."""
    made, found = leaf.targets[0], False
    leaves = (each for p in recorder.program.phases for each in p.leaves)
    indices = {r.index for each in leaves for v in each.values for r in v.reads if r.tensor.memory is made}
    index = indices.pop() if len(indices) == 1 else ()
    for own, at in zip(leaf.index, index, strict=False):
        if own is not None and isinstance(at, IterDomain) and at.uid != own.uid:
            found |= recorder.attempt("align", made.name, own.name, at.name)
    return found


def _of_products(program: TileProgram, leaf: Leaf) -> bool:
    """Whether a statement is a matrix product, or a function of one at the same index."""
    if isinstance(leaf, Accumulate):
        return describe(program, leaf.targets[0].name).is_product
    read = {r.tensor for v in leaf.values for r in v.reads if r.index == leaf.index}
    return any(describe(program, p.name).is_product for p in program.phases if p.writes & read)


def gather_operands(recorder: Recorder) -> None:
    """Matrix products read rows at computed indices themselves, block by block, instead of a copy of them."""
    for phase in list(recorder.program.phases):
        stored = _stored(phase)
        if stored is None or stored.tensor.role is not Role.SCRATCH or not isinstance(stored.value, Read):
            continue
        looked_up = any(isinstance(at, Place) and at.reads for at in stored.value.index)
        readers = [
            describe(recorder.program, p.name) for p in recorder.program.phases if stored.tensor in {t.memory for t in p.reads}
        ]
        if looked_up and all(s.is_product or s.row_product is not None for s in readers):
            recorder.attempt("inline", phase.name)


def round_operands(recorder: Recorder) -> None:
    """Stores intermediates that only matrix products read, rounded to 16 bits, in 16 bits; inlines copies of 16-bit tensors."""
    for phase in list(recorder.program.phases):
        stored = _stored(phase)
        readers = [p for p in recorder.program.phases if stored is not None and stored.tensor in {t.memory for t in p.reads}]
        if stored is None or not all(_multiplies(describe(recorder.program, p.name)) for p in readers):
            continue
        if recorder.attempt("store_rounded", phase.name) and isinstance(stored.value, Read) and stored.value.dtype.itemsize == 2:
            recorder.attempt("inline", phase.name)


def _multiplies(shape: Shape) -> bool:
    """Whether a phase is a matrix product, or a contraction of a ragged product."""
    return shape.is_product or shape.row_product is not None or contracted(shape.leaf) is not None


def contract_products(recorder: Recorder) -> bool:
    """Contractions along one side of a ragged product: computes the elements that are summed in place, a block at a time.

    A sum weighted by a softmax becomes a state of the softmax; other functions of the elements are inlined. Contractions along
    different sides, as in gradients, each compute the product again: it is never stored. Returns whether there are any
    contractions.
    """
    found = False
    for phase in recorder.program.phases:
        loops = chain(phase)
        if loops is not None and contracted(loops[1]) is not None:
            found |= recorder.attempt("online", phase.name)
    while any(recorder.attempt("inline", name) for name in _summed_elements(recorder.program)):
        found = True
    first = set[str]()
    for group in contraction_groups(recorder.program):
        for tensor in _products_of(recorder.program, group):
            readers = {p.name for p in recorder.program.phases if tensor in {t.memory for t in p.reads}}
            if readers <= {p.name for p in group} or (tensor.name not in first and _all_contract(recorder.program, readers)):
                first.add(tensor.name)
            else:
                recorder.do("repeat", tensor.name, *(p.name for p in group if p.name in readers))
    # Each copy has different readers.
    for leaf in [leaf for p in recorder.program.phases if (leaf := _product(p)) is not None]:
        _align(recorder, leaf)
    return found


def _summed_elements(program: TileProgram) -> list[str]:
    """Tensors computed elementwise over both sides of a ragged product, and read only by contractions of it; by several only if
    it is a function of a product, which each of them computes."""
    found: list[str] = []
    for phase in program.phases:
        stored = _stored(phase)
        if stored is None or stored.tensor.role is not Role.SCRATCH:
            continue
        readers = [p for p in program.phases if stored.tensor in {t.memory for t in p.reads}]
        both = {d.uid for d in stored.tensor.logical}
        if not readers or not all(_contracts(p, both) for p in readers):
            continue
        reads = {r.tensor.memory for r in stored.value.reads}
        made = [p for p in program.phases if p.writes & reads and _product(p) is not None]
        if len(readers) == 1 or any(both <= {d.uid for d in t.logical} for p in made for t in p.writes):
            found.append(phase.name)
    return found


def _stored(phase: Phase) -> Store | None:
    found = chain(phase)
    return found[1] if found is not None and isinstance(found[1], Store) else None


def _contracts(phase: Phase, both: set[int]) -> bool:
    """Whether a phase is a contraction of a ragged product of these dims."""
    found = chain(phase)
    sides = None if found is None else contracted(found[1])
    return sides is not None and {d.uid for d in sides} <= both


def _product(phase: Phase) -> Accumulate | None:
    """The sum over a regular dim that makes the elements of a ragged product."""
    found = chain(phase)
    leaf = found[1] if found is not None else None
    if not isinstance(leaf, Accumulate) or leaf.reduction.operator != "sum" or leaf.merge or any(d.is_ragged for d in leaf.over):
        return None
    rows = [d.component.uid for d in leaf.index if isinstance(d, RaggedIterDomain)]
    return leaf if leaf.targets[0].role is Role.SCRATCH and len(set(rows)) < len(rows) else None


def _all_contract(program: TileProgram, names: set[str]) -> bool:
    loops = [chain(p) for p in program.phases if p.name in names]
    return all(found is not None and contracted(found[1]) is not None for found in loops)


def _products_of(program: TileProgram, group: Sequence[Phase]) -> list[Tensor]:
    """The ragged products that contractions read."""
    read = {t.memory for p in group for t in p.reads}
    return [leaf.targets[0] for p in program.phases if (leaf := _product(p)) is not None and leaf.targets[0] in read]


def contraction_groups(program: TileProgram) -> list[list[Phase]]:
    """Contractions by what they keep and sum; those of a group share one pass over the product, if none needs another."""
    groups: list[tuple[object, list[Phase]]] = []
    for phase in program.phases:
        found = chain(phase)
        sides = None if found is None else contracted(found[1])
        if found is None or sides is None or not isinstance(found[1], Accumulate):
            continue
        columns = {d.uid for d in columns_of(found[1], *sides)}
        outer = frozenset(loop.domain.uid for loop in found[0] if loop.domain.uid not in columns)
        key = (sides[0].uid, sides[1].uid, outer, bool(found[1].places))
        for other, members in groups:
            if other == key and not any(_depends(program, phase, member) for member in members):
                members.append(phase)
                break
        else:
            groups.append((key, [phase]))
    return [members for _, members in groups]


def _depends(program: TileProgram, later: Phase, earlier: Phase) -> bool:
    """Whether a phase needs what an earlier one computes, directly or through others."""
    made = set(earlier.writes)
    for phase in program.phases[program.phases.index(earlier) + 1 : program.phases.index(later) + 1]:
        if made & {t.memory for t in phase.reads}:
            made |= phase.writes
    return bool(made & later.writes)


def contracted(leaf: Leaf) -> tuple[RaggedIterDomain, RaggedIterDomain] | None:
    """The kept and the summed side of a contraction of a ragged product; None if a statement is not one."""
    if not isinstance(leaf, Accumulate) or leaf.merge or len(leaf.over) != 1 or not isinstance(leaf.over[0], RaggedIterDomain):
        return None
    along = leaf.over[0]
    kept = [d for d in leaf.index if isinstance(d, RaggedIterDomain) and d.component.uid == along.component.uid]
    if len(kept) != 1 or not all(fits_lanes(d) for d in columns_of(leaf, kept[0], along)):
        return None
    value = leaf.values[0]
    product = leaf.reduction.operator == "sum" and isinstance(value, Call) and value.function == "mul"
    return (kept[0], along) if product or leaf.places else None


def columns_of(leaf: Accumulate, kept: RaggedIterDomain, along: RaggedIterDomain) -> tuple[IterDomain, ...]:
    """The dims of a contraction's result that the ragged product lacks: features of the summed values."""
    own = {d.uid for v in leaf.values for r in v.reads for d in domains_of(r.index) if _has(r, kept) and _has(r, along)}
    own |= {kept.component.uid, kept.uid}
    return tuple(d for d in leaf.index if d is not None and d.uid not in own)


def _has(element: Read, domain: IterDomain) -> bool:
    return any(d.uid == domain.uid for d in domains_of(element.index))


def fits_lanes(domain: IterDomain) -> bool:
    """Whether all positions of a dim fit the lanes of one block."""
    size = domain.extent_expr.value
    return not domain.is_ragged and size is not None and size <= WIDEST


def _reads_once(phase: Phase, tensor: Tensor, *, alone: bool) -> bool:
    """Whether a phase reads each element of a dense tensor at exactly one position of its loops. The loops of the only reader may
    be parts of the tensor's dims."""
    found = chain(phase)
    if found is None or any(d.is_ragged for d in tensor.logical):
        return False
    indices = {r.index for value in found[1].values for r in value.reads if r.tensor.memory is tensor}
    read = [[at for at in index if isinstance(at, IterDomain)] for index in indices]
    if alone:
        known = (Indices([(d, symbol(f"@{d.uid}")) for d in index]) for index in read)
        return all(at.knows(loop.domain) for at in known for loop in found[0])
    own = sorted(loop.domain.uid for loop in found[0])
    return all(sorted(d.uid for d in index) == own for index in read)


def _runs_over(phase: Phase) -> set[int]:
    found = chain(phase)
    return set() if found is None else {loop.domain.uid for loop in found[0]}


def flatten_levels(recorder: Recorder) -> None:
    """Combines and merges nested levels, parts of components and independent pairs that no phase distinguishes, until one
    (component, ragged) pair is left."""
    coarse = any(_reduces_two_levels(p) for p in recorder.program.phases)
    for name in [p.name for p in recorder.program.phases]:
        while _flattens_one(recorder, next(p for p in recorder.program.phases if p.name == name), coarse):
            pass


def _flattens_one(recorder: Recorder, phase: Phase, coarse: bool) -> bool:
    """Flattens one pair of loops of a phase, if there is one to flatten."""
    domains = [loop.domain for loop in (chain(phase) or ((), None))[0]]
    ragged = [d for d in domains if isinstance(d, RaggedIterDomain)]
    for row in ragged:
        if _joins_parts(recorder, phase, domains, row):
            return True
    if len(ragged) >= 2 and _nests(ragged[-2], ragged[-1]):
        if _combines_inner(phase, ragged[-2], ragged[-1], coarse):
            return _combined(recorder, phase, ragged[-2], ragged[-1])
        return _kept(phase, ragged[0]) and _combined(recorder, phase, ragged[0].component, ragged[0])
    if len(ragged) == 1 and _keeps_both(phase, ragged[0]):
        return _combined(recorder, phase, ragged[0].component, ragged[0])
    if len(ragged) >= 2:
        return _joins_pairs(recorder, phase, domains, ragged)
    return False


def _nests(component: IterDomain, ragged: RaggedIterDomain) -> bool:
    """Whether the positions of one ragged loop are the components of another."""
    made, owner = component.definition, ragged.component.definition
    if isinstance(owner, Combine) and owner.inputs[1].uid == component.uid:
        return True
    return isinstance(made, Partition) and made.inputs[0].uid == ragged.component.uid


def _joins_parts(recorder: Recorder, phase: Phase, domains: list[IterDomain], row: RaggedIterDomain) -> bool:
    """Handles components with the same number of parts: if part and row are both reduced, combines them, after everything inside
    the row; otherwise merges component and part, which together own the rows."""
    owner = row.component.definition
    if not isinstance(owner, Merge) or any(d.uid == row.component.uid for d in domains):
        return False
    group, part = owner.inputs
    there = {d.uid for d in domains}
    if part.uid in there and not _kept(phase, part) and not _kept(phase, row):
        if any(isinstance(d, RaggedIterDomain) and _nests(row, d) for d in domains):
            return False
        return recorder.attempt("combine", phase.name, part.name, row.name)
    outer = group.definition
    if group.uid not in there and isinstance(outer, Merge) and {d.uid for d in outer.inputs} <= there:
        # Merge two dims before the parts first.
        return recorder.attempt("merge", phase.name, outer.inputs[0].name, outer.inputs[1].name)
    if group.uid in there and part.uid in there and _kept(phase, group) == _kept(phase, part):
        return recorder.attempt("merge", phase.name, group.name, part.name)
    return False


def _joins_pairs(recorder: Recorder, phase: Phase, domains: list[IterDomain], ragged: list[RaggedIterDomain]) -> bool:
    """Combines each kept one of several independent pairs to a regular loop. Both sides of a ragged product belong to one
    component, which therefore stays."""
    owners = [d.component.uid for d in ragged]
    if len(set(owners)) < 2:
        return False
    for row in ragged:
        if owners.count(row.component.uid) > 1:
            continue
        component = next((d for d in domains if d.uid == row.component.uid), None)
        if component is not None and _kept(phase, row) and recorder.attempt("combine", phase.name, component.name, row.name):
            return True
    return False


def _combines_inner(phase: Phase, component: RaggedIterDomain, ragged: RaggedIterDomain, coarse: bool) -> bool:
    """Whether a phase treats the inner pair as one dim: it reduces both, or keeps both and nothing depends on one alone."""
    if not _kept(phase, component):
        return True
    if not _kept(phase, ragged) or not coarse:
        return False
    indices = [{d.uid for d in domains_of(r.index)} for leaf in phase.leaves for v in leaf.values for r in v.reads]
    return not any(component.uid in index and ragged.uid not in index for index in indices)


def _kept(phase: Phase, domain: IterDomain) -> bool:
    found = chain(phase)
    assert found is not None
    return domain.uid not in reduced_loops(found[1], [loop.domain for loop in found[0]])


def _keeps_both(phase: Phase, ragged: RaggedIterDomain) -> bool:
    """Whether a lone ragged loop counts components of rows (sentences of a document) rather than elements of rows."""
    made = ragged.definition
    return isinstance(made, Partition) and made.covers and made.inputs[0].pairing is not None and _kept(phase, ragged)


def _reduces_two_levels(phase: Phase) -> bool:
    found = chain(phase)
    if found is None:
        return False
    domains = [loop.domain for loop in found[0]]
    reduced = reduced_loops(found[1], domains)
    return sum(1 for d in domains if d.is_ragged and d.uid in reduced) >= 2


def flatten_rows(recorder: Recorder) -> None:
    """If no phase distinguishes rows, flattens all elements to one regular dim."""
    for phase in recorder.program.phases:
        shape = describe(recorder.program, phase.name)
        if shape.reduces_rows and shape.component is not None and shape.component.uid in shape.reduced:
            assert shape.ragged is not None
            if any(d.is_ragged and shape.component.uid in {o.uid for o in d.owners} for d in shape.regular):
                # A ragged product cannot be flattened to one loop: reduce each component, then all of them.
                recorder.do("rfactor", shape.phase, shape.component.name)
                continue
            _combined(recorder, phase, shape.component, shape.ragged)
    shapes = [describe(recorder.program, p.name) for p in recorder.program.phases]
    if any(s.reduces_rows or _distinguishes_rows(s) for s in shapes):
        return
    for shape in shapes:
        if shape.ragged is not None and shape.component is not None:
            if not any(d.is_ragged for d in shape.regular):
                phase = next(p for p in recorder.program.phases if p.name == shape.phase)
                _put_beside(recorder, phase, shape.component, shape.ragged)
            recorder.attempt("combine", shape.phase, shape.component.name, shape.ragged.name)


def _combined(recorder: Recorder, phase: Phase, component: IterDomain, ragged: IterDomain) -> bool:
    """Combines the loops over components and their rows; dims between the two move after them."""
    _put_beside(recorder, phase, component, ragged)
    recorder.do("combine", phase.name, component.name, ragged.name)
    return True


def _put_beside(recorder: Recorder, phase: Phase, component: IterDomain, ragged: IterDomain) -> None:
    """Moves a ragged loop directly inside the loop over its components, past the dims between them."""
    order = [loop.domain.name for loop in (chain(phase) or ((), None))[0]]
    wanted = [name for name in order if name != ragged.name]
    wanted.insert(wanted.index(component.name) + 1, ragged.name)
    if wanted != order:
        recorder.do("reorder", phase.name, *wanted)


def _distinguishes_rows(shape: Shape) -> bool:
    """Whether a phase reads or computes something per component rather than per element."""
    if shape.ragged is None:
        return shape.component is not None
    made = shape.ragged.definition
    if isinstance(made, Partition) and made.lengths is not None:
        # With gaps, the position of an element depends on its row.
        return True
    if shape.ragged.uid not in {d.uid for d in shape.leaf.index if d is not None} and not shape.reduces_rows:
        # Rows of another structure are written, each as a whole, to positions of their own.
        return True
    paired = {d.uid for d in (shape.component, shape.ragged) if d is not None}
    for value in shape.leaf.values:
        for element in value.reads:
            index = {d.uid for d in domains_of(element.index)}
            if shape.component is not None and shape.component.uid in index and shape.ragged.uid not in index:
                return True
            if any(isinstance(at, Place) and paired & {d.uid for d in domains_of((at,))} for at in element.index):
                return True
            if shape.ragged.uid in index and len(element.tensor.storage) == len(element.tensor.logical):
                return True
            if _has_gaps(element.tensor, shape.ragged):
                return True
    nodes = [node for value in shape.leaf.values for node in value.walk()]
    if any(isinstance(node, Ordinal) and not paired <= {d.uid for d in node.index if d is not None} for node in nodes):
        return True
    return any(isinstance(node, Extent | Position | Computed) for node in nodes)


def _has_gaps(tensor: Tensor, ragged: RaggedIterDomain) -> bool:
    """Whether rows have explicit starts: in a flattened loop, every element would have to search for its row."""
    made = ragged.definition
    return isinstance(made, Partition) and made.lengths is not None and any(d.uid == made.inputs[0].uid for d in tensor.storage)
