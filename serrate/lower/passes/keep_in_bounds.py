"""Keep in bounds: no access leaves its tensor, whatever the arrays of a program contain.

In: a loop program, and upper bounds for the elements of its arrays. Out: the same program with these elements clamped; an access
that could still leave its tensor is guarded.

Offsets are checked before a program runs, but later writes can go unnoticed: through NumPy memory, through `.data`, in inference
mode. So memory safety relies only on data that the runtime owns: extents, and derived arrays, which it allocates itself. If
offsets change later, rows are wrong, but no access is out of bounds.

    T1[c]       ->   clamp(T1[c], n0)           T1 has the offsets of rows in n0 positions
    T3[c]       ->   clamp(T3[c], n0 - T1[c])   T1 has the starts of rows in n0 positions, T3 their lengths
    T2[c, r]    ->   T2[c, r] where r < n2      the length of row c was all that kept r inside

Starts and ends are scalars of a row, so clamping costs nothing in the loop over its elements, and a guard on a lane only adds a
bound to that loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from serrate.errors import VerificationError
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Element, Expr, Less, Symbol, const, element, minimum
from serrate.ir.loops import Bind, Dot, For, Guard, If, Load, LoopProgram, Write, bodies, expressions_of, load, nodes
from serrate.ir.ragged import RaggedIterDomain, longest
from serrate.ir.solve import loosest
from serrate.ir.storage import row_dims
from serrate.ir.values import Role, Tensor, Value
from serrate.lower.facts import Facts
from serrate.lower.limits import Limits, is_held, settled
from serrate.lower.passes.common import Body, Effect, changed, found_in, inward, kept, mapped, per_kernel, with_values


def keep_in_bounds(program: LoopProgram) -> LoopProgram:
    """Clamps elements of arrays that callers hold, and guards accesses that could still leave their tensors."""
    limits, steps = dict(program.limits), {}
    private = [t for t in program.scratch if t.role is Role.PRIVATE and any(d.is_ragged for d in t.logical)]
    for row in map(_row_of, private):
        # Only rows whose length is an element, or a difference of neighbours, have an end that can be clamped. Guards bound all
        # others, such as the rows of groups.
        most = longest(row.length, row.component.extent_expr)
        for array in {e.array for e in row.length.walk() if isinstance(e, Element) and is_held(e.array)}:
            if row.length is array[COORDINATE]:
                limits[array] = minimum(limits[array], most)
            elif row.length is array[COORDINATE + 1] - array[COORDINATE]:
                # The largest difference of neighbouring offsets, if a worker keeps one of these rows in private memory.
                steps[array] = most
    return per_kernel(program, lambda k: _in_bounds(k.body, limits, steps))


def _in_bounds(body: Body, limits: Limits, steps: Limits) -> Body:
    for e in (e for node in nodes(body) for x in expressions_of(node, numbers=False) for e in x.walk()):
        if isinstance(e, Element) and is_held(e.array) and not e.array.signed and e.array not in limits:
            raise VerificationError(f"elements of {e.array} have no known bound, so accesses through it cannot be kept in bounds")
    return _guarded(mapped(body, _Clamps(limits, steps, set(found_in(body)))), Facts(()))


def _row_of(tensor: Tensor) -> RaggedIterDomain:
    """The rows of which a private tensor holds one."""
    return next(d for d in row_dims(tensor.logical) if isinstance(d, RaggedIterDomain))


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
        limit, step = self(self.limits[e.array].substitute({COORDINATE: e.index})), self.steps.get(e.array)
        if step is None:
            return limit
        before = element(e.array, e.index - 1)
        # Of two neighbours, the second is the end of a row; a single element may be the start of any row.
        return minimum(limit, self(before) + step) if before in self.used else limit


# --- guards ------------------------------------------------------------------------------------------------------------


def _guarded(body: Body, facts: Facts) -> Body:
    out = []
    for node in body:
        if isinstance(node, Bind):
            facts = facts.named(node)
        elif isinstance(node, For):
            node = inward(node, functools.partial(_guarded, facts=facts.and_(Less(node.symbol, node.extent))))
        elif isinstance(node, If):
            then = _guarded(node.then, facts.and_(*node.guard))
            node = changed(node, then=then, other=_guarded(node.other, facts))
        elif bodies(node):
            node = inward(node, functools.partial(_guarded, facts=facts))
        elif isinstance(node, Effect):
            node = _statement(node, facts)
        out.append(node)
    return kept(body, out)


def _statement(node: Effect, facts: Facts) -> Effect:
    """A statement with all accesses in bounds. A read that has its own guard is guarded further; others, with the statement."""
    here = facts.and_(*node.guard)
    more: dict[Less, None] = {}
    if isinstance(node, Write):
        more.update(dict.fromkeys(_open(node.tensor, node.index, here)))
    lanes = {lane.symbol for lane in node.lanes}

    def change(v: Value) -> Value | None:
        if not isinstance(v, Load):
            return None
        missing = _open(v.tensor, v.index, here.and_(*v.guard))
        # Products take whole blocks, from the first lane to the last: missing elements are read as 0.
        within = isinstance(node, Dot) and any(loosest(g, lanes) is None for g in missing)
        if (v.guard or within) and missing:
            return load(v.tensor, v.index, (*v.guard, *missing), v.other)
        more.update(dict.fromkeys(missing))
        return None

    made = with_values(node, change)
    return replace(made, guard=(*node.guard, *more)) if more else made


def _open(tensor: Tensor, index: Sequence[Expr], facts: Facts) -> Guard:
    """The bounds checks of an access that the known facts do not imply."""
    found: list[Less] = []
    for e, size in zip(index, _sizes(tensor), strict=True):
        spelled = facts.spelled_out(e)
        if not any(is_held(a) for x in (spelled, *_near(spelled, facts)) for a in x.arrays):
            # This does not depend on anything that a caller holds.
            continue
        if not facts.prove(spelled):
            found.append(Less(const(-1), e))
        if not facts.prove(facts.spelled_out(size) - spelled - 1):
            found.append(Less(e, size))
    return tuple(found)


def _near(e: Expr, facts: Facts) -> Iterable[Expr]:
    """The facts that mention symbols of an expression, except symbols that only index a derived array: whichever of its elements
    is read, the runtime owns it."""
    own = _symbols_outside_derived(e)
    return (fact for fact in facts.known if fact.symbols & own)


def _symbols_outside_derived(e: Expr) -> frozenset[Symbol]:
    if isinstance(e, Symbol):
        return frozenset((e,))
    if isinstance(e, Element) and e.array.recipe is not None:
        return frozenset()
    return frozenset[Symbol]().union(*map(_symbols_outside_derived, e.operands))


def _sizes(tensor: Tensor) -> list[Expr]:
    if tensor.role is not Role.PRIVATE or not any(d.is_ragged for d in tensor.logical):
        return [settled(d.extent_expr) for d in tensor.storage]
    row = _row_of(tensor)
    most = longest(row.length, row.component.extent_expr)
    return [most if d.uid == row.uid else d.extent_expr for d in row_dims(tensor.logical)]
