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

from serrate.analysis.indices import ancestry
from serrate.errors import DomainError
from serrate.ir import IterDomain, RaggedIterDomain, combine, merge, partition, split
from serrate.ir.ragged_transforms import Partition

KINDS = ("split", "split", "outer split", "merge", "partition", "combine")
ROOTS = ("one", "one", "two", "rows", "flattened rows")


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


steps = st.builds(Step, st.sampled_from(KINDS), st.integers(0, 11), st.integers(1, 6))
chains = st.builds(Chain, st.sampled_from(ROOTS), st.lists(steps, min_size=1, max_size=7).map(tuple), st.integers(0, 99))


@dataclass
class Built:
    """A chain on given extents."""

    rng: random.Random
    logical: list[IterDomain] = field(default_factory=list)
    loop: list[IterDomain] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """By uid: when the domain was made."""

    @property
    def elements(self) -> set[object]:
        """Every logical position."""
        if len(self.logical) == 1:
            return set(range(number(self.logical[0])))
        first, second = self.logical
        if isinstance(second, RaggedIterDomain):
            return {(c, r) for c, length in enumerate(lengths(second)) for r in range(length)}
        return set(itertools.product(range(number(first)), range(number(second))))

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

    def cut(self, domain: IterDomain) -> list[IterDomain]:
        """The domain partitioned somewhere; only an empty one can have no parts."""
        if isinstance(domain, RaggedIterDomain):
            rows = lengths(domain)
            parts = self.rng.randint(1 if any(rows) else 0, 3)
            return self.note(*partition(domain, [self.boundaries(length, parts) for length in rows]))
        parts = self.rng.randint(1 if number(domain) else 0, self.rng.choice((5, 5, 5, 17)))
        return self.note(*partition(domain, self.boundaries(number(domain), parts)))

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
            self.loop = [d for d in self.loop if all(d is not gone for gone in chosen)] + made

    def _choices(self, kind: str) -> list[tuple[IterDomain, ...]]:
        if kind == "outer split":
            return [(d,) for d in self.loop if not d.is_ragged]
        if kind in ("split", "partition"):
            return [(d,) for d in self.loop]
        test = {"merge": mergeable, "combine": combinable}[kind]
        return [pair for pair in itertools.permutations(self.loop, 2) if test(*pair)]

    def _made(self, step: Step, *chosen: IterDomain) -> list[IterDomain]:
        if step.kind == "partition":
            return self.cut(*chosen)
        if step.kind in ("split", "outer split"):
            return self.note(*split(*chosen, step.size, inner=step.kind == "split"))
        return self.note((merge if step.kind == "merge" else combine)(*chosen))


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
    made = component.definition
    if isinstance(made, Partition) and isinstance(component, RaggedIterDomain) and ragged.component is made.inputs[0]:
        return True
    return ragged.component is component or (isinstance(made, Partition) and made.outputs[1] is ragged)


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
    whole = built.note(*(IterDomain(extent(chain, rng)) for _ in range(2 if chain.root == "two" else 1)))
    built.logical = built.cut(whole[0]) if "rows" in chain.root else whole
    built.loop = list(built.logical if chain.root == "rows" else whole)
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
