"""Random chains of transforms, and the same chain on other extents.

In: a `Chain` (which transforms, applied to which of the loops there are) and a seed that picks extents and offsets.
Out: logical domains, the loops made of them, and a number for each domain that is the same whatever the extents.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from serrate.analysis.indices import Indices, ancestry
from serrate.errors import DomainError
from serrate.ir import IterDomain, RaggedIterDomain, combine, merge, partition, product, regroup, resize, restrict, split, swizzle
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, as_expr
from serrate.ir.partition import Partition
from serrate.ir.transforms import Merge

KINDS = ("split", "split", "outer split", "merge", "partition", "partition under", "combine", "product")
ROOTS = ("one", "one", "two", "rows", "flattened rows", "parts", "rows of two", "pairs of rows")
MOVING = (*KINDS, "resize", "resize", "swizzle", "regroup", "regroup", "crop", "gaps")
"""With the transforms that add holes at both ends or give positions another place."""
WITH_GAPS = (*ROOTS, "gaps", "rows in gaps")


@dataclass(frozen=True)
class Step:
    """One transform: `pick` chooses among the loops it can be applied to, `size` is a factor."""

    kind: str
    pick: int
    size: int


@dataclass(frozen=True)
class Chain:
    """What is done to the roots, apart from every extent. `order` shuffles the loops at the end."""

    root: str
    steps: tuple[Step, ...]
    order: int = 0


def chains_of(kinds: tuple[str, ...], roots: tuple[str, ...]) -> st.SearchStrategy[Chain]:
    steps = st.builds(Step, st.sampled_from(kinds), st.integers(0, 11), st.integers(1, 6))
    return st.builds(Chain, st.sampled_from(roots), st.lists(steps, min_size=1, max_size=7).map(tuple), st.integers(0, 99))


chains = chains_of(KINDS, ROOTS)
moving_chains = chains_of(MOVING, WITH_GAPS)


@dataclass
class Built:
    """A chain on given extents."""

    rng: random.Random
    logical: list[IterDomain] = field(default_factory=list)
    loop: list[IterDomain] = field(default_factory=list)
    cropped: bool = False
    """Whether positions were taken away, so that some elements are not visited at all."""
    numbers: dict[int, int] = field(default_factory=dict)
    """By uid: when the domain was made."""

    @property
    def elements(self) -> set[object]:
        """Every logical position."""
        found = all_positions(self.logical)
        return {position[0] for position in found} if len(self.logical) == 1 else set(found)

    @property
    def size(self) -> int:
        """No fewer than the positions of the loops: a ragged loop counts with its longest row."""
        total = 1
        for domain in self.loop:
            total *= max(lengths(domain), default=0) if isinstance(domain, RaggedIterDomain) else number(domain)
        return total

    def note(self, *domains: IterDomain) -> list[IterDomain]:
        for domain in domains:
            self.numbers.setdefault(domain.uid, len(self.numbers))
        return list(domains)

    def cut(self, domain: IterDomain, *under: IterDomain) -> list[IterDomain]:
        """The domain partitioned somewhere; only an empty one can have no parts."""
        if isinstance(domain, RaggedIterDomain) or under:
            rows = lengths(domain) if isinstance(domain, RaggedIterDomain) else [number(domain)] * number(under[0])
            parts = self.rng.randint(1 if any(rows) else 0, 3)
            return self.note(*partition(domain, [self.boundaries(length, parts) for length in rows], under=under))
        parts = self.rng.randint(1 if number(domain) else 0, self.rng.choice((5, 5, 5, 17)))
        return self.note(*partition(domain, self.boundaries(number(domain), parts)))

    def cut_with_gaps(self, domain: IterDomain) -> list[IterDomain]:
        """The domain partitioned by rows that leave some of it out; a ragged one in every row."""
        parts = 2 * self.rng.randint(0, 4) + 1
        rows = lengths(domain) if isinstance(domain, RaggedIterDomain) else [number(domain)]
        bounds = [self.boundaries(length, parts) for length in rows]
        starts = [each[1:-1:2] for each in bounds]
        sizes = [[b - a for a, b in zip(each[1:-1:2], each[2:-1:2], strict=True)] for each in bounds]
        if isinstance(domain, RaggedIterDomain):
            return self.note(*partition(domain, starts, lengths=sizes))
        return self.note(*partition(domain, starts[0], lengths=sizes[0]))

    def beside(self, ragged: RaggedIterDomain) -> IterDomain:
        """Other rows of the same components."""
        rows = tuple(self.rng.randint(0, 4) for _ in range(number(ragged.component)))
        return self.note(ragged.with_rows(Array(f"other{list(rows)}", rows)[COORDINATE], name="other"))[0]

    def boundaries(self, total: int, parts: int) -> list[int]:
        """Offsets of `parts` components; two cuts at the same place make an empty one."""
        cuts = sorted(self.rng.randint(0, total) for _ in range(parts - 1))
        return [0, *cuts, total] if parts else [0]

    def apply(self, step: Step) -> None:
        """One step, unless there is nothing it can be applied to."""
        choices = self._choices(step.kind)
        if choices:
            chosen = choices[step.pick % len(choices)]
            made = self._made(step, *chosen)
            gone = {d.uid for d in chosen[-1 if step.kind in ("partition under", "swizzle") else 0 :]}
            self.loop = [d for d in self.loop if d.uid not in gone] + made

    def _choices(self, kind: str) -> list[tuple[IterDomain, ...]]:
        if kind in ("split", "outer split", "partition", "resize", "crop", "gaps"):
            return [(d,) for d in self.loop]
        test = TESTS[kind]
        return [pair for pair in itertools.permutations(self.loop, 2) if test(*pair)]

    def _made(self, step: Step, *chosen: IterDomain) -> list[IterDomain]:
        if step.kind == "partition":
            return self.cut(*chosen)
        if step.kind == "gaps":
            self.cropped = True
            return self.cut_with_gaps(*chosen)
        if step.kind == "partition under":
            return self.cut(chosen[1], chosen[0])
        if step.kind in ("split", "outer split"):
            return self.note(*split(*chosen, step.size, inner=step.kind == "split"))
        if step.kind == "resize":
            return self.note(resize(*chosen, self.rng.randint(0, 3), self.rng.randint(0, 3)))
        if step.kind == "crop":
            self.cropped = True
            left = self.rng.randint(-2, 3)
            right = self.rng.randint(-2, 3) if chosen[0].is_ragged else self.rng.randint(max(-2, -number(*chosen) - left), 3)
            made = resize(*chosen, left, right)
            low = self.rng.randint(0, 2)
            return self.note(restrict(made, low, low + self.rng.randint(0, 9)) if step.pick % 2 else made)
        if step.kind == "regroup":
            component = chosen[1].owners[0].definition.inputs[1]  # type: ignore[union-attr]
            return self.note(regroup(chosen[0], component, chosen[1])[1])
        function = {"merge": merge, "combine": combine, "product": product, "swizzle": lambda a, b: swizzle(a, b)[1]}[step.kind]
        return self.note(function(*chosen))


def all_positions(domains: list[IterDomain]) -> list[tuple[int, ...]]:
    """Every position of nested loops over the domains, each ragged one over the row that the others have picked."""
    found: list[tuple[int, ...]] = [()]
    for k, domain in enumerate(domains):
        longer = []
        for done in found:
            indices = Indices([(d, as_expr(at)) for d, at in zip(domains, done, strict=False)])
            end = domain.extent_at({d.uid: indices.of(d) for d in domain.owners}).value
            assert end is not None
            longer += [(*done, at) for at in range(end)]
        found = longer
        assert all(len(done) == k + 1 for done in found)
    return found


def mergeable(outer: IterDomain, inner: IterDomain) -> bool:
    try:
        merge(outer, inner)
    except DomainError:
        return False
    return True


def combinable(component: IterDomain, ragged: IterDomain) -> bool:
    """Whether they are a pair; two pairs whose offsets happen to be equal are not mixed, or chains would depend on extents."""
    if not isinstance(ragged, RaggedIterDomain):
        return False
    made, owner = component.definition, ragged.component.definition
    if isinstance(made, Partition) and isinstance(component, RaggedIterDomain) and ragged.component is made.inputs[0]:
        return True
    if isinstance(owner, Merge) and owner.inputs[1] is component and not owner.inputs[0].is_ragged:
        return True
    return ragged.component is component or (
        isinstance(made, Partition) and made.outputs[0] is component and made.outputs[1] is ragged
    )


def precedes(group: IterDomain, domain: IterDomain) -> bool:
    """Whether offsets of a regular domain can be given under another one."""
    return apart(group, domain) and not group.is_ragged and not domain.is_ragged and 0 < number(group) <= 12


def multiplied(outer: IterDomain, inner: IterDomain) -> bool:
    return outer.is_ragged and inner.is_ragged and outer.owners[0].uid == inner.owners[0].uid


def regrouped(group: IterDomain, ragged: IterDomain) -> bool:
    made = ragged.owners[0].definition if ragged.is_ragged else None
    return isinstance(made, Merge) and made.inputs[0].uid == group.uid


def swizzled(axis: IterDomain, domain: IterDomain) -> bool:
    return apart(axis, domain) and not any(d.is_ragged or number(d) not in (1, 2, 4, 8, 16) for d in (axis, domain))


def apart(one: IterDomain, other: IterDomain) -> bool:
    """Whether neither of two domains is found by the index of the other; else one could be made to depend on itself."""
    behind = ancestry([one, other])
    found_by = {d.uid for t in behind for d in t.beside}
    return not found_by & {one.uid, other.uid, *(d.uid for t in behind for d in t.inputs)}


TESTS = {
    "merge": mergeable,
    "combine": combinable,
    "product": multiplied,
    "partition under": precedes,
    "regroup": regrouped,
    "swizzle": swizzled,
}


def extent(chain: Chain, rng: random.Random) -> int:
    """Small, or such that some of the chain's splits divide it: where all the others do, the last one's guard shows."""
    if rng.random() < 0.6:
        return rng.randint(0, rng.choice((4, 13)))
    factors = [step.size for step in chain.steps if rng.random() < 0.5]
    return min(math.prod(factors) * rng.randint(1, 3), 200)


def build(chain: Chain, seed: int) -> Built | None:
    """The chain on extents and offsets chosen by `seed`; None where two rows pick each other, so that no loops can run."""
    rng = random.Random(seed)
    built = Built(rng)
    two = chain.root in ("two", "rows of two")
    whole = built.note(*(IterDomain(extent(chain, rng)) for _ in range(2 if two else 1)))
    if chain.root in ("one", "two"):
        built.logical = whole
    elif chain.root == "rows of two":
        whole = built.note(IterDomain(rng.randint(0, 4)), whole[1])
        built.logical = [whole[0], *built.cut(whole[1], whole[0])]
    elif "gaps" in chain.root:
        built.logical = built.cut_with_gaps(whole[0])
    else:
        built.logical = built.cut(whole[0])
        ragged = built.logical[1]
        assert isinstance(ragged, RaggedIterDomain)
        if chain.root == "parts":
            built.logical = [built.logical[0], *built.cut(ragged)]
        if chain.root == "pairs of rows":
            built.logical.append(built.beside(ragged))
    built.loop = list(whole if chain.root in ("flattened rows", "gaps") else built.logical)
    for step in chain.steps:
        built.apply(step)
    random.Random(chain.order).shuffle(built.loop)
    ordered = rows_after_their_component(built.loop)
    if ordered is None:
        return None
    built.loop = ordered
    return built


def rows_after_their_component(loop: list[IterDomain]) -> list[IterDomain] | None:
    """The loops in the nearest order in which every ragged loop finds its row chosen by the loops before it, if there is one."""
    before = {d.uid: chosen_by(d, loop) if isinstance(d, RaggedIterDomain) else set() for d in loop}
    waiting = list(loop)
    placed: list[IterDomain] = []
    while waiting:
        ready = next((d for d in waiting if not before[d.uid] & {w.uid for w in waiting}), None)
        if ready is None:
            return None
        waiting = [d for d in waiting if d is not ready]
        placed.append(ready)
    return placed


def chosen_by(domain: RaggedIterDomain, loop: list[IterDomain]) -> set[int]:
    """The loops (by uid) that pick the row of a ragged domain, whatever the extents."""
    made_of = {source.uid: t for t in ancestry(loop) for source in t.inputs}
    loops = {d.uid for d in loop}
    found: set[int] = set()
    pending: list[IterDomain] = [domain.component]
    while pending:
        current = pending.pop()
        if current.uid in found:
            continue
        found.add(current.uid)
        if isinstance(current, RaggedIterDomain):
            pending.append(current.component)
        if current.uid in made_of:
            pending.extend((*made_of[current.uid].outputs, *made_of[current.uid].beside))
        elif current.uid not in loops and current.definition is not None:
            pending.extend(current.definition.inputs)
    return found & loops


def number(domain: IterDomain) -> int:
    assert isinstance(domain.extent, int)
    return domain.extent


def lengths(domain: RaggedIterDomain) -> list[int]:
    """The rows of a ragged domain, those of nested components one after the other."""
    found = [domain.extent_for_component(c) for c in range(number(domain.component))]
    assert all(isinstance(length, int) for length in found)
    return found  # type: ignore[return-value]
