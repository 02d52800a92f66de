"""The first steps of every strategy: inline elementwise results into their readers, and flatten loops to one ragged pair.

In: a recorder with a naive program. Out: the same recorder; its phases are now `[component, ragged, regular dims ...]`, or
have no ragged pair. `describe` then returns the `Shape` of each phase.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class RowFacts:
    """The facts from which a strategy is chosen: the rows that workers share, and the cost of one position."""

    ragged: RaggedIterDomain
    """For a ragged product, the product of both lengths; for levels that are reduced together, all of them flattened."""
    inner: tuple[Expr, ...]
    itemsize: int
    product: bool


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
    return RowFacts(rows, inner, itemsize, any(s.is_product for s in shapes))


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
        if free or all(_runs_over(p) == own or _reads_once(p, found[1].tensor) for p in readers):
            recorder.attempt("inline", phase.name)


def contract_products(recorder: Recorder) -> bool:
    """Contractions along one side of a ragged product: computes the elements that are summed in place, a block at a time.

    A sum weighted by a softmax becomes a state of the softmax; other functions of the elements are inlined. Returns whether
    there are any contractions.
    """
    found = False
    for phase in recorder.program.phases:
        loops = chain(phase)
        sides = None if loops is None else contracted(loops[1])
        if sides is None or loops is None:
            continue
        if recorder.attempt("online", phase.name):
            found = True
            continue
        for element in {r.tensor: r for v in loops[1].values for r in v.reads}.values():
            if _is_ragged_product(recorder.program, element.tensor, sides, phase):
                found |= recorder.attempt("inline", element.tensor.name)
    return found


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


def _is_ragged_product(program: TileProgram, tensor: Tensor, sides: tuple[IterDomain, IterDomain], reader: Phase) -> bool:
    """Whether a tensor is computed elementwise over both sides of a ragged product, and read by one phase only."""
    readers = [p for p in program.phases if tensor in {t.memory for t in p.reads}]
    stored = next((found[1] for p in program.phases if p.name == tensor.name and (found := chain(p)) is not None), None)
    both = {d.uid for d in sides} <= {d.uid for d in tensor.logical}
    return both and isinstance(stored, Store) and tensor.role is Role.SCRATCH and readers == [reader]


def _reads_once(phase: Phase, tensor: Tensor) -> bool:
    """Whether a phase reads each element of a dense tensor at exactly one position of its loops."""
    found = chain(phase)
    if found is None or any(d.is_ragged for d in tensor.logical):
        return False
    own = sorted(loop.domain.uid for loop in found[0])
    indices = {r.index for value in found[1].values for r in value.reads if r.tensor.memory is tensor}
    return all(sorted(at.uid for at in index if isinstance(at, IterDomain)) == own for index in indices)


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
    """Makes one loop of components and their rows; dims that stand between the two come after."""
    _put_beside(recorder, phase, component, ragged)
    recorder.do("combine", phase.name, component.name, ragged.name)
    return True


def _put_beside(recorder: Recorder, phase: Phase, component: IterDomain, ragged: IterDomain) -> None:
    """Puts a ragged loop right inside that of its components, where other dims stand between them."""
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
        # Rows of another structure are written: they go to a place of their own, each as a whole.
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
