"""Reverse mode: a fusion, with the gradients of its inputs appended.

In: a fusion, and which inputs need gradients. Out: a copy of it that takes the gradients of its results as further inputs, and
computes those of the inputs. Definitions are visited from last to first. The gradient of a tensor is the sum of the
contributions of its reads, in the order of the definitions, so the bits of a gradient depend only on the program.

    T2[c, r, d] = mul(T0[c, r, d], T1[d])     ->    g0[c, r, d] = mul(g2[c, r, d], T1[d])
                                                    g1[d] sum= mul(g2[c, r, d], T0[c, r, d]) over c, r
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serrate.analysis.indices import Indices
from serrate.autograd.derivatives import ELEMENTWISE
from serrate.autograd.reductions import CONSTANT, REDUCTIONS, Reduced
from serrate.autograd.scans import LIBRARY, SCANS
from serrate.autograd.transpose import memory_gradient, place_of, transposed
from serrate.errors import GradientError
from serrate.frontend.ops.elementwise import add, typed
from serrate.frontend.ops.movement import pulled
from serrate.ir.domains import IterDomain
from serrate.ir.fusion import Definition, Fusion
from serrate.ir.ragged_transforms import Cover
from serrate.ir.reductions import SUM
from serrate.ir.tile import Accumulate, Library, Scan, Store
from serrate.ir.values import Call, Index, Place, Places, Read, Role, Tensor, Value, call, carried_dtype, index_of, read
from serrate.ir.view import TensorView
from serrate.runtime.results import values_storage


@dataclass(frozen=True)
class Gradients:
    """A fusion with gradients: the definitions of the original come first."""

    fusion: Fusion
    forward: int
    """The number of definitions of the original."""
    given: tuple[int | None, ...]
    """For each result of the original, which input holds its gradient; None if no gradient flows back through it."""
    found: tuple[TensorView | None, ...]
    """The gradient of each wanted input; None if it is zero."""
    connected: tuple[bool, ...]
    """Whether a result depends on each wanted input, though its gradient may be zero, as that of a rounded number is."""


def gradients(fusion: Fusion, wanted: Sequence[int]) -> Gradients:
    """Appends the gradients of these inputs."""
    own = fusion.simplified()
    own.name = f"{fusion.name}_backward"
    own.seeds, own.index_checks, own.schedule = [], [], None
    results, own.outputs = own.outputs, []
    count = len(own.definitions)
    sources = [own.inputs[k].tensor for k in wanted]
    reverse = _Reverse(own, sources)
    given: list[int | None] = []
    for result in results:
        if result.tensor.memory not in reverse.active:
            given.append(None)
            continue
        given.append(len(own.inputs))
        arriving = Tensor(own.fresh("T"), result.dtype, result.domains, values_storage(result), Role.INPUT)
        own.inputs.append(own.view(arriving))
        reverse.add(result.tensor, own.inputs[-1])
    for definition in reversed(own.definitions[:count]):
        reverse.visit(definition)
    found = tuple(reverse.gradient(tensor, tensor.dtype) for tensor in sources)
    reached = [
        any(r.tensor.memory in _Reverse(own, [s], count).active for r in results) if g is None else True
        for s, g in zip(sources, found, strict=True)
    ]
    return Gradients(own, count, tuple(given), found, tuple(reached))


class _Reverse:
    """Gradients of tensors, from the last definition to the first."""

    def __init__(self, fusion: Fusion, sources: Sequence[Tensor], count: int | None = None) -> None:
        self.fusion = fusion
        self.active = set(sources)
        """Tensors that depend on the sources, in a way that has a derivative."""
        for definition in fusion.definitions[:count]:
            statement = definition.statement
            if any(map(self._is_active, statement.values)):
                constant = CONSTANT.get(statement.reduction.name, ()) if isinstance(statement, Accumulate) else ()
                moving = [t for k, t in enumerate(statement.targets) if k not in constant and t.dtype.is_floating_point]
                self.active.update(moving)
        self._contributions: dict[Tensor, list[TensorView]] = {}

    def add(self, tensor: Tensor, contribution: TensorView) -> None:
        """Adds to the gradient of a tensor, or of a view."""
        self._contributions.setdefault(tensor, []).append(contribution)

    def gradient(self, memory: Tensor, dtype: torch.dtype) -> TensorView | None:
        """The gradient of a tensor, in this dtype; None if it is zero. All readers of the tensor have been visited."""
        totals: list[TensorView] = []
        for tensor, contributions in self._contributions.items():
            if tensor.memory is memory:
                total = contributions[0]
                for other in contributions[1:]:
                    total = add(total, other)
                totals.append(total if tensor is memory else memory_gradient(self.fusion, tensor, total, dtype))
        if not totals:
            return None
        total = totals[0]
        for other in totals[1:]:
            total = add(typed(total, carried_dtype(dtype)), typed(other, carried_dtype(dtype)))
        return typed(total, dtype)

    def visit(self, definition: Definition) -> None:
        """Propagates the gradients of a definition's results to the tensors that it reads."""
        statement = definition.statement
        found = [
            self.gradient(t, carried_dtype(t.dtype)) if t in self.active and t.memory is t else None for t in statement.targets
        ]
        if all(g is None for g in found):
            return
        if isinstance(statement, Store):
            self._store(definition, statement, found[0])
        elif isinstance(statement, Accumulate):
            self._accumulate(definition, statement, found)
        elif isinstance(statement, Scan):
            self._scan(definition, statement, found[0])
        elif isinstance(statement, Library):
            self._library(statement, found[0])
        else:
            raise GradientError(f"a {type(statement).__name__} has no gradient: call it with detached tensors")

    def _store(self, definition: Definition, statement: Store, gradient: TensorView | None) -> None:
        assert gradient is not None
        place = _written_at(definition.domains, statement.index)
        self._value(statement.value, gradient.at(place), definition.domains, read(statement.tensor, place))

    def _accumulate(self, definition: Definition, statement: Accumulate, found: Sequence[TensorView | None]) -> None:
        rule = REDUCTIONS.get(statement.reduction.name)
        if rule is None:
            raise GradientError(f"the reduction {statement.reduction} has no gradient: call it with detached tensors")
        domains, place = _uncovered(definition.domains, statement)
        adjoints = tuple(None if g is None else g.at(place) for g in found)
        reduced = Reduced(self.fusion, statement, definition.domains, place)
        for value, adjoint in zip(statement.values, rule(reduced, adjoints, statement.values), strict=True):
            if adjoint is not None and self._is_active(value):
                narrow = _side_dtype(statement, value)
                self._value(value, adjoint if narrow is None else call("cast", adjoint, dtype=narrow), domains)

    def _scan(self, definition: Definition, statement: Scan, gradient: TensorView | None) -> None:
        rule = SCANS.get(statement.reduction.name)
        if rule is None or gradient is None:
            raise GradientError(f"a running {statement.reduction} has no gradient: call it with detached tensors")
        (value,), (target,), domains = statement.values, statement.targets, definition.domains
        dim = [d.uid for d in domains].index(statement.over[0].uid)
        x = pulled(self.fusion, target.dtype, domains, value)
        back = rule(x, self.fusion.view(target), gradient, dim)
        self._value(value, back.at(domains), domains)

    def _library(self, statement: Library, gradient: TensorView | None) -> None:
        rule = LIBRARY.get(statement.function)
        if rule is None or gradient is None:
            raise GradientError(f"{statement.function} has no gradient: call it with detached tensors")
        self.add(*rule(statement, gradient))

    def _value(self, value: Value, adjoint: Value, domains: Sequence[IterDomain], result: Value | None = None) -> None:
        """Reverse mode inside a value; `result` is an element that holds it."""
        order: dict[Value, None] = {}
        self._after_arguments(value, order)
        adjoints: dict[Value, Value] = {value: _in_dtype(adjoint, value)}
        for node in reversed(order):
            g = adjoints.get(node)
            if g is None:
                continue
            if isinstance(node, Read):
                self.add(*transposed(self.fusion, node, g, domains))
                continue
            assert isinstance(node, Call)
            rule = ELEMENTWISE[node.function]
            here = result if node is value and result is not None else node
            for arg, more in zip(node.args, rule(g, here, *node.args), strict=True):
                if more is not None and arg in order:
                    more = _in_dtype(more, arg)
                    adjoints[arg] = call("add", adjoints[arg], more, dtype=more.dtype) if arg in adjoints else more

    def _after_arguments(self, value: Value, order: dict[Value, None]) -> None:
        """Active values, arguments first."""
        if value not in order and self._is_active(value):
            for arg in value.args if isinstance(value, Call) else ():
                self._after_arguments(arg, order)
            order[value] = None

    def _is_active(self, value: Value) -> bool:
        if isinstance(value, Read):
            return value.tensor.memory in self.active
        return isinstance(value, Call) and value.function != "detach" and any(map(self._is_active, value.args))


def _in_dtype(adjoint: Value, like: Value) -> Value:
    dtype = carried_dtype(like.dtype)
    return adjoint if carried_dtype(adjoint.dtype) == dtype else call("cast", adjoint, dtype=dtype)


def _side_dtype(statement: Accumulate, value: Value) -> torch.dtype | None:
    """The 16-bit dtype of both sides of a product that is summed: its gradient is rounded to it, as the sides are."""
    if statement.reduction is not SUM or not isinstance(value, Call) or value.function != "mul":
        return None
    dtypes = {side.dtype for side in value.args}
    narrow = dtypes.pop()
    return narrow if not dtypes and carried_dtype(narrow) != narrow else None


def _written_at(domains: Sequence[IterDomain], index: Index) -> Places:
    """The index of a write in terms of the domains it runs over: a block permutation runs over the rows in their old order."""
    own = {d.uid for d in domains}
    if all(at is None or at.uid in own for at in index):
        return index
    known = Indices([(d, index_of(d)) for d in domains])
    return tuple(at if at is None or at.uid in own else place_of(known.of(at), domains) for at in index)


def _uncovered(domains: Sequence[IterDomain], statement: Accumulate) -> tuple[tuple[IterDomain, ...], Places]:
    """The domains of a reduction across rows with the rows themselves in place of the dim that covers them, and where results are
    read for a position of them."""
    read_at = {d.uid for v in statement.values for r in v.reads for d in r.index if isinstance(d, IterDomain)}
    found = list(domains)
    places: dict[int, Place] = {}
    for domain in domains:
        made = domain.definition
        if isinstance(made, Cover) and domain.uid not in read_at and made.inputs[0].uid in read_at:
            rows = made.inputs[0]
            found[[d.uid for d in found].index(domain.uid)] = rows
            places[domain.uid] = Place(index_of(rows), (rows,))
    index = tuple(None if d is None else places.get(d.uid, d) for d in statement.index)
    return _owners_first(found), index


def _owners_first(domains: Sequence[IterDomain]) -> tuple[IterDomain, ...]:
    """The domains in an order in which rows come after what counts them."""
    left, found = list(domains), list[IterDomain]()
    while left:
        waiting = {d.uid for d in left}
        chosen = next((k for k, d in enumerate(left) if not any(o.uid in waiting for o in d.owners)), 0)
        found.append(left.pop(chosen))
    return tuple(found)
