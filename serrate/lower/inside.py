"""Inside: no access leaves its tensor, whatever numbers the arrays of a program hold.

In: a loop program, and how large the numbers in its arrays may be. Out: the same program; elements of those arrays are clamped,
and an access that could still leave its tensor is guarded.

Offsets are checked before a program runs, but they can be written to where nobody can notice: through NumPy memory, through
`.data`, in inference mode. So memory safety rests on nothing that a caller holds, only on what programs are given by the runtime:
extents, and derived arrays, which lie in memory of their own. If offsets change late, rows are wrong, but never outside.

    T1[c]       ->   clamp(T1[c], n0)           T1 has the offsets of rows in n0 positions
    T2[c, r]    ->   T2[c, r] where r < n2      the length of row c was all that kept r inside

Starts and ends are scalars of a row, so a clamp costs nothing in the loop over its elements, and a guard on a lane is one more
bound of that loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from serrate.errors import VerificationError
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import (
    Array,
    Element,
    Expr,
    FloorDiv,
    Less,
    Maximum,
    Minimum,
    Search,
    Sum,
    const,
    element,
    minimum,
)
from serrate.ir.loops import (
    Attempt,
    Bind,
    Declare,
    Dot,
    Existing,
    For,
    Guard,
    If,
    Lanes,
    Load,
    LoopProgram,
    Node,
    Number,
    Prefetch,
    While,
    Write,
    bodies,
    existing,
    expressions_of,
    load,
    map_values,
    nodes,
    number,
    with_bodies,
)
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain, longest
from serrate.ir.ragged_transforms import Spread
from serrate.ir.recipes import Joined, Owners, RunningSum
from serrate.ir.tile import Loop, TileProgram, walk
from serrate.ir.traversal import traverse
from serrate.ir.values import Role, Tensor, Value, rewrite

DEPTH = 8
"""How many facts a proof may use."""

Limits = Mapping[Array, Expr]
"""What elements of arrays are at most."""


def is_held(array: Array) -> bool:
    """Whether an array lies in memory that a caller holds, and may change at any time."""
    return array.recipe is None and array.data is None and not array.local


def limits_of(program: TileProgram) -> dict[Array, Expr]:
    """What the offsets, starts and lengths of rows are at most: the extent that rows lie in."""
    tensors = {*program.inputs, *program.outputs, *(t for phase in program.phases for t in phase.reads | phase.writes)}
    domains = [d for t in tensors for d in (*t.logical, *t.storage)]
    domains += [s.domain for phase in program.phases for s, _ in walk(phase.body) if isinstance(s, Loop)]
    behind = {node: None for domain in domains for node in traverse(domain)}
    found: dict[Array, Expr] = {}
    for node in behind:
        if isinstance(node, Partition | Spread):
            whole = node.inputs[0] if isinstance(node, Partition) else node.outputs[0]
            arrays = (node.starts, node.lengths) if isinstance(node, Partition) else (node.starts,)
            for array in arrays:
                if array is not None and is_held(array):
                    found[array] = minimum(found.get(array, settled(whole.extent_expr)), settled(whole.extent_expr))
    for node in behind:
        if isinstance(node, RaggedIterDomain):
            # Rows without a common place, such as those of rectangles: what they ended at when they were checked.
            for e in node.length.walk():
                if isinstance(e, Element) and is_held(e.array) and not e.array.signed and e.array not in found:
                    found[e.array] = most_of(e.array, node.component.extent_expr)
    return found


def settled(extent: Expr) -> Expr:
    """An extent as it was when its program was prepared: memory is as large as that."""
    read = [e for e in extent.walk() if isinstance(e, Element) and is_held(e.array)]
    # An element of any array, at any place: the length of a row that was selected, as well as where the last one ends.
    return extent.substitute({e: longest(e, const(1)) for e in read}) if read else extent


def most_of(offsets: Array, count: Expr) -> Expr:
    """The end of the last of `count` rows, as it was when the program was prepared."""
    return longest(offsets[COORDINATE + 1], count)


def inside(program: LoopProgram, limits: Limits) -> LoopProgram:
    """Clamps what is read from arrays that callers hold, and guards accesses that could still leave their tensors."""
    limits, steps = dict(limits), {}
    for row in [_row_of(t) for t in program.scratch if t.role is Role.PRIVATE]:
        # Where rows end is an element of its own only where lengths are, or differences of neighbours. The rows of groups, and
        # others whose length is computed, are kept inside by guards.
        most = longest(row.length, row.component.extent_expr)
        for array in {e.array for e in row.length.walk() if isinstance(e, Element) and is_held(e.array)}:
            if row.length is array[COORDINATE]:
                limits[array] = minimum(limits[array], most)
            elif row.length is array[COORDINATE + 1] - array[COORDINATE]:
                steps[array] = most
    return replace(program, kernels=tuple(replace(k, body=kept_inside(k.body, limits, steps)) for k in program.kernels))


def kept_inside(body: tuple[Node, ...], limits: Limits, steps: Limits = MappingProxyType({})) -> tuple[Node, ...]:
    """One kernel; `steps` say how far apart offsets are at most, of rows of which a worker keeps one in private memory."""
    used = {e for node in nodes(body) for x in expressions_of(node) for e in x.walk()}
    for e in used:
        if isinstance(e, Element) and is_held(e.array) and not e.array.signed and e.array not in limits:
            raise VerificationError(f"nothing says how large {e.array} may be, so reads by it cannot be kept inside")
    return _guarded(_mapped(body, _Clamps(limits, steps, used)), _Facts(()))


def _row_of(tensor: Tensor) -> RaggedIterDomain:
    """The rows of which a private tensor holds one."""
    return next(d for d in tensor.logical if isinstance(d, RaggedIterDomain))


class _Clamps:
    """Expressions with elements clamped."""

    def __init__(self, limits: Limits, steps: Limits, used: set[Expr]) -> None:
        self.limits, self.steps, self.used = limits, steps, used
        self.made: dict[Expr, Expr] = {}

    def __call__(self, e: Expr) -> Expr:
        if e not in self.made:
            operands = tuple(map(self, e.operands))
            self.made[e] = e.rebuild(operands) if operands != e.operands else e
            if isinstance(e, Element) and e.array in self.limits:
                self.made[e] = element(e.array, operands[0], self._most(e))
        return self.made[e]

    def _most(self, e: Element) -> Expr:
        limit, step = self.limits[e.array], self.steps.get(e.array)
        if step is None:
            return limit
        before = element(e.array, e.index - 1)
        # Of two neighbours, the second is the end of a row; what stands alone may be where any row begins.
        return minimum(limit, self(before) + step) if before in self.used else limit


# --- facts -------------------------------------------------------------------------------------------------------------


class _Facts:
    """What loops and guards say, each as an expression that is not negative. `0 <= e` holds if `e` is a sum of facts and of
    something whose bounds are not negative."""

    def __init__(self, known: Sequence[Expr], names: Mapping[Expr, Expr] = MappingProxyType({})) -> None:
        self.known, self.names = tuple(known), names
        """Names stand for expressions, of which more is known: facts and what is to be proven are spelled out."""

    def and_(self, *conditions: Less) -> _Facts:
        """With conditions that hold here."""
        spelled = (Less(self.spelled_out(c.left), self.spelled_out(c.right)) for c in conditions)
        return _Facts((*self.known, *(fact for c in spelled for fact in _facts_of(c))), self.names)

    def named(self, node: Bind) -> _Facts:
        """With a name for an expression."""
        return self if node.guard else _Facts(self.known, {**self.names, node.symbol: self.spelled_out(node.expr)})

    def spelled_out(self, e: Expr) -> Expr:
        """An expression without names."""
        return e.substitute(self.names) if self.names else e

    def prove(self, e: Expr, depth: int = DEPTH) -> bool:
        """Whether 0 <= e follows."""
        if e.bounds[0] is not None and e.bounds[0] >= 0:
            return True
        if depth == 0:
            return False
        for term, factor in _terms(e):
            bound = term.bounds[1 if factor < 0 else 0]
            if bound is None or (factor > 0 and bound < 0):
                return self._without(e, term, factor, depth)
        # Bounds of all terms are known, and yet too far apart: a fact about several of them may say more.
        return any(self._without(e, term, factor, depth) for term, factor in _terms(e) if factor < 0)

    def _without(self, e: Expr, term: Expr, factor: int, depth: int) -> bool:
        """Whether 0 <= e follows from facts about one of its terms."""
        for fact in (*self.known, *_about(term)):
            own = next((f for t, f in _terms(fact) if t is term), 0)
            if own * factor > 0 and factor % own == 0 and self.prove(e - fact * (factor // own), depth - 1):
                return True
        rest = e - term * factor
        if isinstance(term, FloorDiv) and term.right.value is not None:
            size = term.right.value
            # size * (v // size) is at most v, and more than v - size; what is more than -size is not negative when divided.
            top = term.left if factor < 0 else term.left - (size - 1)
            return self.prove(rest * size + top * factor + (size - 1), depth - 1)
        if isinstance(term, Minimum | Maximum) and (factor < 0) == isinstance(term, Maximum):
            return all(self.prove(rest + operand * factor, depth - 1) for operand in term.operands)
        return False


def _terms(e: Expr) -> tuple[tuple[Expr, int], ...]:
    if isinstance(e, Sum):
        return e.terms
    return () if e.value is not None else ((e, 1),)


def _facts_of(condition: Less) -> Iterator[Expr]:
    """left < right: right - left - 1 is not negative; of the smaller of two, that of both."""
    if isinstance(condition.right, Minimum):
        for operand in condition.right.operands:
            yield from _facts_of(Less(condition.left, operand))
    elif isinstance(condition.left, Maximum):
        for operand in condition.left.operands:
            yield from _facts_of(Less(operand, condition.right))
    else:
        yield condition.right - condition.left - 1


def _about(e: Expr) -> Iterator[Expr]:
    """What is true of an expression by what it is."""
    if isinstance(e, Minimum):
        yield from (operand - e for operand in e.operands)
    elif isinstance(e, Maximum):
        yield from (e - operand for operand in e.operands)
    elif isinstance(e, Search):
        yield e.count - 1 - e
    elif isinstance(e, Element) and e.most is not None:
        yield e.most - e
    elif isinstance(e, Element) and e.array.recipe is not None:
        recipe = e.array.recipe
        if isinstance(recipe, RunningSum):
            yield e.array[recipe.count] - e
        elif isinstance(recipe, Joined):
            yield e.array[sum(recipe.counts, const(0))] - e
        elif isinstance(recipe, Owners):
            yield recipe.count - 1 - e
        yield from _owned(e)


def _owned(e: Element) -> Iterator[Expr]:
    """Of a running sum at the owner of a position: it is at most that position, and the next one is more."""
    for owner, after in ((e.index, 0), (e.index - 1, 1)):
        position: Expr | None = None
        if isinstance(owner, Search) and owner.array == e.array:
            position = owner.position
        elif isinstance(owner, Element) and isinstance(owner.array.recipe, Owners) and owner.array.recipe.offsets == e.array:
            position = owner.index
        if position is not None:
            yield e - position - 1 if after else position - e


# --- guards ------------------------------------------------------------------------------------------------------------


def _guarded(body: tuple[Node, ...], facts: _Facts) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, Bind):
            facts = facts.named(node)
        elif isinstance(node, For):
            node = replace(node, body=_guarded(node.body, facts.and_(Less(node.symbol, node.extent))))
        elif isinstance(node, If):
            node = replace(node, then=_guarded(node.then, facts.and_(*node.guard)), other=_guarded(node.other, facts))
        elif bodies(node):
            node = with_bodies(node, tuple(_guarded(part, facts) for part in bodies(node)))
        elif not isinstance(node, Declare | Prefetch | Attempt):
            node = _statement(node, facts)
        out.append(node)
    return tuple(out)


def _statement(node: Node, facts: _Facts) -> Node:
    """A statement that touches nothing outside. A read with a guard of its own is guarded further; others, with the statement."""
    assert not isinstance(node, For | Bind | Declare | Prefetch | Attempt | If | While)
    here = facts.and_(*node.guard)
    more: dict[Less, None] = {}
    if isinstance(node, Write):
        more.update(dict.fromkeys(_open(node.tensor, node.index, here)))

    def change(v: Value) -> Value | None:
        if not isinstance(v, Load):
            return None
        missing = _open(v.tensor, v.index, here.and_(*v.guard))
        # Products take whole blocks, from their first lane on to the last: what is not there is read as 0.
        within = isinstance(node, Dot) and not all(_ends_lanes(g, node.lanes) for g in missing)
        if (v.guard or within) and missing:
            return load(v.tensor, v.index, (*v.guard, *missing), v.other)
        more.update(dict.fromkeys(missing))
        return None

    node = map_values(node, lambda v: rewrite(v, change))
    return replace(node, guard=(*node.guard, *more)) if more else node


def _ends_lanes(condition: Less, lanes: Lanes) -> bool:
    """Whether a condition is an upper bound of lanes, the same for all of them."""
    symbols = {lane.symbol for lane in lanes}
    terms = _terms(condition.left - condition.right)
    return all(factor > 0 if term in symbols else not term.symbols & symbols for term, factor in terms)


def _open(tensor: Tensor, index: Sequence[Expr], facts: _Facts) -> Guard:
    """The conditions that keep an access inside its tensor and do not follow from what is known."""
    found: list[Less] = []
    for e, size in zip(index, _sizes(tensor), strict=True):
        spelled = facts.spelled_out(e)
        if not any(is_held(a) for x in (spelled, *_near(spelled, facts)) for a in x.arrays):
            # Nothing that a caller holds has a part in this.
            continue
        if not facts.prove(spelled):
            found.append(Less(const(-1), e))
        if not facts.prove(facts.spelled_out(size) - spelled - 1):
            found.append(Less(e, size))
    return tuple(found)


def _near(e: Expr, facts: _Facts) -> Iterable[Expr]:
    """The facts that say something about the symbols of an expression."""
    return (fact for fact in facts.known if fact.symbols & e.symbols)


def _sizes(tensor: Tensor) -> list[Expr]:
    if tensor.role is not Role.PRIVATE or not any(d.is_ragged for d in tensor.logical):
        return [settled(d.extent_expr) for d in tensor.storage]
    row = _row_of(tensor)
    most = longest(row.length, row.component.extent_expr)
    return [most if d.uid == row.uid else d.extent_expr for d in tensor.logical if d.uid != row.component.uid]


# --- expressions -------------------------------------------------------------------------------------------------------


def _mapped(body: tuple[Node, ...], change: Callable[[Expr], Expr]) -> tuple[Node, ...]:
    """Statements with every index expression changed."""
    return tuple(_changed(node, change) for node in body)


def _changed(node: Node, change: Callable[[Expr], Expr]) -> Node:
    def guard(old: Guard) -> Guard:
        return tuple(Less(change(g.left), change(g.right)) for g in old)

    def value(v: Value) -> Value | None:
        if isinstance(v, Load):
            return load(v.tensor, tuple(map(change, v.index)), guard(v.guard), v.other)
        if isinstance(v, Number):
            return number(change(v.expr), v.dtype)
        return existing(v.lanes, guard(v.guard), v.dtype) if isinstance(v, Existing) else None

    if isinstance(node, Declare | Attempt):
        return node
    if isinstance(node, For):
        return replace(
            node, extent=change(node.extent), bound=change(node.bound), body=tuple(_changed(n, change) for n in node.body)
        )
    if isinstance(node, Bind):
        return replace(node, expr=change(node.expr), guard=guard(node.guard))
    if isinstance(node, If | While):
        parts = tuple(_mapped(part, change) for part in bodies(node))
        return with_bodies(replace(node, guard=guard(node.guard)), parts)
    node = replace(node, guard=guard(node.guard))
    if isinstance(node, Write | Prefetch):
        node = replace(node, index=tuple(map(change, node.index)))
    return map_values(node, lambda v: rewrite(v, value))
