"""The domain graph: which domains of a program's tensors have the same index, nearly the same index, or can share a loop.

In: a fusion, a tile program, or plain domains. Out: a `DomainGraph` with three maps, each coarser than the previous one.

  exact       The same index. A read relates each dim of the tensor to the domain it is read at, if their extents are equal (for
              ragged domains: the lengths of all rows, and the components). The relation then propagates both ways.
              Forwards: equal transforms of exact inputs have exact outputs, because the indices of the outputs are functions of
              the inputs' indices, the domains `beside`, the transform's fields and the extents, which are all equal.
              Backwards: equal transforms with exact outputs have exact inputs, because the inverse is such a function too.
  permissive  The same index up to trivial transforms and broadcasting. A transform is trivial for a domain if, with the index of
              every extent-1 domain set to 0, it passes the index on unchanged to a domain of the same extent: split by 1, merge
              with extent 1, partition into one component, restrict to everything. Broadcasting relates a dim of extent 1 to the
              dim it is expanded to. Each read is considered alone, so two dims that one vector is expanded to are related
              although their indices differ.
  loop        Domains that one loop can serve. In addition to permissive: rows and their cover; a dense operand and the rows next
              to it; the outputs of equal transforms (a split by the same factor) of inputs that share a loop. The loop runs over
              the *promoted* domain of its group: a concrete domain rather than a broadcast one (it has all positions); rows
              rather than a dense operand that reaches past them (nothing exists there); the cover of a group of rows rather
              than the rows (it is as long as the longest of them, and guards remove the rest).

Offsets equal by value map exactly, under the assumptions described in `equalities` and listed by `DomainGraph.assumptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from serrate.analysis.indices import ancestry
from serrate.analysis.inspection.equalities import Equalities
from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain, IterType
from serrate.ir.expr import Array, Expr, const, symbol
from serrate.ir.fusion import Equal, Fusion
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Cover
from serrate.ir.tile import Leaf, Library, Loop, Store, TileProgram, walk, written_at
from serrate.ir.transforms import Split, Transform
from serrate.ir.values import Place, Read, Tensor

Kind = Literal["exact", "permissive", "loop"]
KINDS: tuple[Kind, ...] = ("exact", "permissive", "loop")


@dataclass(frozen=True, eq=False)
class Group:
    """Domains that a map groups, oldest first. `in` compares by identity: equal extents do not make a member."""

    domains: tuple[IterDomain, ...]

    def __contains__(self, domain: object) -> bool:
        return isinstance(domain, IterDomain) and any(d.uid == domain.uid for d in self.domains)

    def __iter__(self) -> Iterator[IterDomain]:
        return iter(self.domains)

    def __len__(self) -> int:
        return len(self.domains)

    def __str__(self) -> str:
        return "{" + ", ".join(d.name for d in self.domains) + "}"


class _Classes:
    """Disjoint sets of uids; the oldest represents its set."""

    def __init__(self, finer: _Classes | None = None) -> None:
        self.parent: dict[int, int] = {} if finer is None else dict(finer.parent)

    def find(self, domain: IterDomain | int) -> int:
        uid = domain if isinstance(domain, int) else domain.uid
        while self.parent.get(uid, uid) != uid:
            uid = self.parent[uid]
        return uid

    def join(self, a: IterDomain, b: IterDomain) -> bool:
        """Joins the sets of `a` and `b`; False if they already were one."""
        low, high = sorted((self.find(a), self.find(b)))
        self.parent[high] = low
        return low != high


@dataclass(frozen=True, eq=False)
class _Tie:
    """A dim of a tensor and the domain at which it is read or written."""

    own: IterDomain
    at: IterDomain


class DomainGraph:
    """The three maps of a program.

    `loops` adds domains that the program itself does not mention, `same` adds ties, and `checks` says what else is known
    to be equal (a tile program has lost the checks of its fusion).

    >>> from serrate.ir import IterDomain, split
    >>> a, b = IterDomain(12, name="a"), IterDomain(12, name="b")
    >>> (ao, ai), (bo, bi) = split(a, 4), split(b, 4)
    >>> graph = DomainGraph([ao, ai, bo, bi], same=[(a, b)])
    >>> graph.same(ai, bi), graph.same(ai, bo), str(graph.exact(ao))
    (True, False, '{ao, bo}')
    """

    def __init__(
        self,
        source: Fusion | TileProgram | Iterable[IterDomain],
        loops: Iterable[IterDomain] = (),
        same: Iterable[tuple[IterDomain, IterDomain]] = (),
        checks: Iterable[Equal] = (),
    ) -> None:
        program = _gathered(source)
        ties = [*program.ties, *(_Tie(a, b) for a, b in same)]
        self.assumptions: tuple[Equal, ...] = (*program.checks, *checks)
        """Equalities that are assumed because every call checks them."""
        self._known = Equalities(self.assumptions)
        self._domains = _closed([*program.domains, *loops, *(d for tie in ties for d in (tie.own, tie.at))])
        self._apart = program.apart
        self._transforms = _transforms(self._domains.values())
        ties += [_Tie(a, b) for transform in self._transforms for a, b in transform.ties]
        self._classes: dict[Kind, _Classes] = {}
        self._classes["exact"] = self._exact_classes(ties)
        self._classes["permissive"] = self._permissive_classes(ties)
        self._classes["loop"] = self._loop_classes(ties)

    # --- queries ---

    def exact(self, domain: IterDomain) -> Group:
        """The domains that are the same index as `domain`, including itself."""
        return self._group("exact", domain)

    def permissive(self, domain: IterDomain) -> Group:
        """The domains that are the same index as `domain` but for transforms that do nothing and broadcasting."""
        return self._group("permissive", domain)

    def loop(self, domain: IterDomain) -> Group:
        """The domains that can share a loop with `domain`."""
        return self._group("loop", domain)

    def same(self, a: IterDomain, b: IterDomain, kind: Kind = "exact") -> bool:
        """Whether a map groups two domains."""
        return self._find(kind, a) == self._find(kind, b)

    def promoted(self, domain: IterDomain) -> IterDomain:
        """The domain that a loop shared by the group of `domain` runs over.

        >>> from serrate.ir import IterDomain, cover, partition
        >>> c, r = partition(IterDomain(10, name="d"), [0, 3, 8, 10])
        >>> x = cover(r, 5)
        >>> DomainGraph([c, x]).promoted(r) is x
        True
        """
        group = self.loop(domain).domains
        # Several of one rank: the longest, where extents are known to compare; otherwise the oldest.
        return max(group, key=lambda d: (_rank(d), d.row_length.value or 0, -d.uid))

    def groups(self, kind: Kind) -> tuple[Group, ...]:
        """All groups of a map, oldest first."""
        found: dict[int, list[IterDomain]] = {}
        for uid in sorted(self._domains):
            found.setdefault(self._classes[kind].find(uid), []).append(self._domains[uid])
        return tuple(Group(tuple(domains)) for domains in found.values())

    def __str__(self) -> str:
        lines: list[str] = []
        for kind in KINDS:
            lines.append(f"{kind}:")
            for group in self.groups(kind):
                if len(group) > 1:
                    over = f" over {self.promoted(group.domains[0])}" if kind == "loop" else ""
                    lines.append(f"  {group}{over}")
        lines += [f"assumed: {check.left} = {check.right}  ({check.what})" for check in self.assumptions]
        return "\n".join(lines) + "\n"

    def _find(self, kind: Kind, domain: IterDomain) -> int:
        if domain.uid not in self._domains:
            raise DomainError(f"DomainGraph.{kind}: {domain} is not a domain of this program; pass it in `loops`")
        if kind not in KINDS:
            raise DomainError(f"DomainGraph.same: unknown map {kind!r}: choose from {', '.join(KINDS)}")
        return self._classes[kind].find(domain)

    def _group(self, kind: Kind, domain: IterDomain) -> Group:
        wanted = self._find(kind, domain)
        return Group(tuple(self._domains[u] for u in sorted(self._domains) if self._classes[kind].find(u) == wanted))

    # --- the three maps ---

    def _exact_classes(self, ties: Sequence[_Tie]) -> _Classes:
        classes = _Classes()
        changed = True
        while changed:
            # A ragged tie waits until the components are known to be the same index, which another tie or transform may show.
            changed = self._spread(classes, self._signature, backwards=True)
            for tie in ties:
                if self._same_positions(tie.own, tie.at, classes):
                    changed |= self._tie(classes, tie)
        return classes

    def _tie(self, classes: _Classes, tie: _Tie) -> bool:
        """Joins the two sides of a tie, unless that would identify two indices of one statement, as in `T[j, i]`."""
        a, b = classes.find(tie.own), classes.find(tie.at)
        if a == b:
            return False
        for together in self._apart:
            found = {classes.find(uid) for uid in together}
            if a in found and b in found:
                return False
        return classes.join(tie.own, tie.at)

    def _same_positions(self, a: IterDomain, b: IterDomain, classes: _Classes) -> bool:
        """Whether one index can run over both: equal extents, for ragged domains in every row of the same components."""
        if a.is_ragged is not b.is_ragged or self._length(a) is not self._length(b):
            return False
        if isinstance(a, RaggedIterDomain) and isinstance(b, RaggedIterDomain):
            return classes.find(a.component) == classes.find(b.component)
        return True

    def _length(self, domain: IterDomain) -> Expr:
        return self._known.canonical(domain.row_length)

    def _permissive_classes(self, ties: Sequence[_Tie]) -> _Classes:
        classes = _Classes(self._classes["exact"])
        for transform in self._transforms:
            for source, result in _unchanged(transform):
                classes.join(source, result)
        while self._spread(classes, self._signature, backwards=True):
            pass
        # Only now, so that facts derived from the broadcast of one read are not applied to another.
        for tie in ties:
            if _is_broadcast(tie.own) or _is_broadcast(tie.at):
                self._tie(classes, tie)
        return classes

    def _loop_classes(self, ties: Sequence[_Tie]) -> _Classes:
        classes = _Classes(self._classes["permissive"])
        for tie in ties:
            self._tie(classes, tie)
        for transform in self._transforms:
            if isinstance(transform, Cover):
                classes.join(transform.inputs[0], transform.outputs[0])
        while self._spread(classes, self._action, backwards=False):
            pass
        return classes

    def _spread(self, classes: _Classes, key: Callable[[Transform], tuple[object, ...]], *, backwards: bool) -> bool:
        """Joins the outputs of equal transforms of joined domains (and, backwards, their inputs); True if anything changed."""
        changed = False
        seen: dict[tuple[object, ...], Transform] = {}
        for transform in self._transforms:
            directions = [("outputs", transform.inputs)] + ([("inputs", transform.outputs)] if backwards else [])
            for wanted, given in directions:
                places = tuple(classes.find(d) for d in (*given, *transform.beside))
                other = seen.setdefault((wanted, places, *key(transform)), transform)
                for a, b in zip(getattr(transform, wanted), getattr(other, wanted), strict=True):
                    changed |= classes.join(a, b)
        return changed

    def _signature(self, transform: Transform) -> tuple[object, ...]:
        """Everything its index rules depend on besides indices: class, fields, and row boundaries."""
        given = () if _ends_at_its_offsets(transform) else transform.inputs
        lengths = tuple(self._length(d) for d in (*given, *transform.outputs))
        starts = tuple(self._canonical(d.row_start) for d in transform.outputs if isinstance(d, RaggedIterDomain))
        # A split goes by the extent of its inner part, whichever of the two the factor was.
        parameters = () if isinstance(transform, Split) else self._parameters(transform)
        return (type(transform), *parameters, *lengths, *starts)

    def _action(self, transform: Transform) -> tuple[object, ...]:
        """The transform's effect regardless of extents: its class and fields, and which outputs have a field's extent."""
        parameters = self._parameters(transform)
        return (type(transform), *parameters, *(self._length(d) in parameters for d in transform.outputs))

    def _parameters(self, transform: Transform) -> tuple[object, ...]:
        own = [getattr(transform, f.name) for f in fields(transform) if f.name not in ("inputs", "outputs")]
        # Domains among them are `beside` the transform and are compared as indices, not as extents.
        return tuple(self._canonical(value) for value in own if not isinstance(value, IterDomain))

    def _canonical(self, value: Any) -> object:
        if isinstance(value, Array):
            return self._known.array(value)
        return self._known.canonical(value) if isinstance(value, Expr) else value


def _is_broadcast(domain: IterDomain) -> bool:
    return domain.iter_type is IterType.BROADCAST or domain.extent_expr.value == 1


def _rank(domain: IterDomain) -> int:
    """The preference of a shared loop for a domain; higher is better."""
    if any(isinstance(t, Cover) for t in ancestry([domain])):
        return 3
    if domain.is_ragged:
        return 2
    return 0 if _is_broadcast(domain) else 1


def _ends_at_its_offsets(transform: Transform) -> bool:
    """Whether the extent of the input follows from the lengths: offsets of rows back to back end at the extent."""
    ragged = transform.outputs[-1]
    if not isinstance(transform, Partition) or transform.inputs[0].is_ragged or not isinstance(ragged, RaggedIterDomain):
        return False
    return ragged.row_start is not None and ragged.length is ragged.start_of(COORDINATE + 1) - ragged.start_of(COORDINATE)


def _unchanged(transform: Transform) -> Iterator[tuple[IterDomain, IterDomain]]:
    """Pairs of an input and an output with the same index and positions, by the transform's own rules."""
    for given, wanted, rule in (
        (transform.inputs, transform.outputs, transform.to_outputs),
        (transform.outputs, transform.inputs, transform.to_inputs),
    ):
        known = {d.uid: _index(d) for d in (*transform.beside, *given)}
        try:
            found = rule(known)
        except (KeyError, NotImplementedError, DomainError):
            continue  # a rule that needs more information does not pass an index through
        for target, index in zip(wanted, found, strict=True):
            for source in given:
                if index is known[source.uid] and index.value is None and _positions(source) is _positions(target):
                    yield source, target


def _index(domain: IterDomain) -> Expr:
    """A symbol for the index of a domain, bounded if the extent is known; 0 if the extent is 1."""
    high = None if domain.is_ragged else domain.extent_expr.value
    return const(0) if high == 1 else symbol(f"@{domain.uid}", 0, None if high is None else max(high - 1, 0))


def _positions(domain: IterDomain) -> Expr:
    """The number of positions in the current row; with a single component there is only one row."""
    alone = isinstance(domain, RaggedIterDomain) and domain.component.extent_expr.value == 1
    return domain.row_length.substitute({COORDINATE: const(0)}) if alone else domain.row_length


# --- domains of a program ------------------------------------------------------------------------------------------------


@dataclass
class _Program:
    """The facts that a program states about its domains."""

    domains: list[IterDomain]
    leaves: list[Leaf]
    checks: tuple[Equal, ...] = ()
    ties: list[_Tie] = field(default_factory=list)
    apart: set[frozenset[int]] = field(default_factory=set)
    """Domains (by uid) that are dims of one tensor or of one access, and therefore different indices."""


def _gathered(source: Fusion | TileProgram | Iterable[IterDomain]) -> _Program:
    """The domains a program mentions, what its reads and writes tie together, and the checks it makes."""
    if isinstance(source, Fusion):
        domains = [d for definition in source.definitions for d in definition.domains]
        domains += [d for view in (*source.inputs, *source.outputs) for d in _of_tensor(view.tensor)]
        checks = tuple(check for check in source.checks if isinstance(check, Equal))
        # A library call takes whole tensors: it ties no dims.
        leaves = [d.statement for d in source.definitions if not isinstance(d.statement, Library)]
        found = _Program(domains, leaves, checks)
    elif isinstance(source, TileProgram):
        statements = [s for phase in source.phases for s, _ in walk(phase.body)]
        domains = [s.domain for s in statements if isinstance(s, Loop)]
        domains += [d for tensor in (*source.inputs, *source.outputs) for d in _of_tensor(tensor)]
        found = _Program(domains, [s for s in statements if isinstance(s, Leaf)])
    else:
        return _Program(list(source), [])
    for leaf in found.leaves:
        elements = [r for value in leaf.values for r in value.reads]
        for tensor, index in (*((t, written_at(leaf, t)) for t in leaf.targets), *((e.tensor, e.index) for e in elements)):
            found.domains += _of_tensor(tensor)
            # A computed place says where an element is, not that two dims are one index.
            plain = tuple(at if isinstance(at, IterDomain) else None for at in index)
            found.ties += [_Tie(own, at) for own, at in zip(tensor.logical, plain, strict=True) if at is not None]
            found.apart |= {frozenset(d.uid for d in dims if d is not None) for dims in (tensor.logical, plain)}
        if isinstance(leaf, Store):
            found.ties += [tie for element in elements for tie in _stretched(element, leaf)]
    found.ties = list({(tie.own.uid, tie.at.uid): tie for tie in found.ties if tie.own.uid != tie.at.uid}.values())
    return found


def _of_tensor(tensor: Tensor) -> list[IterDomain]:
    return [*tensor.logical, *tensor.storage, *tensor.memory.logical, *tensor.memory.storage]


def _stretched(element: Read, leaf: Store) -> list[_Tie]:
    """Dims that a read broadcasts, with the dims of the result they are expanded to.

    Dims are aligned from the right; a read whose other dims are elsewhere contributes nothing.
    """
    own, at = element.tensor.logical, element.index
    if len(at) > len(leaf.index):
        return []
    aligned = leaf.index[len(leaf.index) - len(at) :]
    if any(d is not None and (isinstance(d, Place) or to is None or d.uid != to.uid) for d, to in zip(at, aligned, strict=True)):
        return []
    return [_Tie(o, to) for o, d, to in zip(own, at, aligned, strict=True) if d is None and to is not None]


def _closed(domains: Iterable[IterDomain]) -> dict[int, IterDomain]:
    """The domains, everything they were derived from, and the other outputs of the same transforms."""
    found: dict[int, IterDomain] = {}
    pending = list(domains)
    while pending:
        domain = pending.pop()
        if domain.uid in found:
            continue
        found[domain.uid] = domain
        if isinstance(domain, RaggedIterDomain):
            pending.append(domain.component)
        if domain.definition is not None:
            pending.extend((*domain.definition.inputs, *domain.definition.outputs, *domain.definition.beside))
    return found


def _transforms(domains: Iterable[IterDomain]) -> list[Transform]:
    """The transforms that made the domains, in the order in which their outputs were made."""
    made = {id(d.definition): d.definition for d in sorted(domains, key=lambda d: d.uid) if d.definition is not None}
    return list(made.values())
