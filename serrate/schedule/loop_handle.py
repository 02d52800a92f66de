"""Schedules by hand: the implementation of `TensorView.split` and friends, where each method is documented.

In: positions in the current loops of a tensor. Out: the fusion's schedule with one more change. The math never changes:
`Fusion.compile` turns the changes into a plan (`by_hand`) and lowers it like any other. Changes that can never be legal are
refused at once; those that are illegal for the program, when it is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from serrate.errors import DomainError, ScheduleError, choices
from serrate.ir import transforms
from serrate.ir.domains import IterDomain, ParallelType
from serrate.ir.expr import Array
from serrate.ir.partition import Partition
from serrate.ir.ragged_transforms import combine
from serrate.ir.storage import storage_of
from serrate.ir.tensor_domain import TensorDomain, made_from
from serrate.ir.tile import Accumulate
from serrate.ir.values import Role, Tensor
from serrate.ir.view import TensorView
from serrate.schedule import caches, hand, partitions
from serrate.schedule.hand import Change, LoopState, feeds, loop_state, schedule_of


class LoopHandle:
    """The loops of one tensor of a fusion. Axes are positions in `domain.loop`, counted from the end if negative.

    A view (`as_nested` and friends) is not computed: its loops are those of the tensor it views.
    """

    __slots__ = ("fusion", "tensor", "view")

    def __init__(self, view: TensorView) -> None:
        self.view, self.fusion, self.tensor = view, view.fusion, view.tensor

    @property
    def domain(self) -> TensorDomain:
        tensor, memory = self.tensor, self.tensor.memory
        state = loop_state(self.fusion, tensor)
        if state is None:
            return TensorDomain(memory.logical, tensor.logical, memory.storage, tensor.logical)
        return TensorDomain(memory.logical, tensor.logical, state.allocation or memory.storage, state.shown)

    # --- loops ---------------------------------------------------------------------------------------------------------

    def split(self, axis: int, factor: int, inner: bool = True) -> None:
        state, (domain,) = self._loops("split", axis)
        made = transforms.split(domain, factor, inner=inner)
        self._done(state, axis, Change("split", state.phase, (domain,), made, (factor, int(inner))))

    def merge(self, axis: int, other: int | None = None) -> None:
        state, (outer, inner) = self._neighbours("merge", axis, other)
        made = transforms.merge(outer, inner)
        self._done(state, axis, Change("merge", state.phase, (outer, inner), (made,)))

    def reorder(self, order: Mapping[int, int] | Sequence[int]) -> None:
        state = self._own_state("reorder")
        places = _new_order(state, order)
        state, changes = hand.reordered(state, [state.loop[k] for k in places])
        self._record(state, *changes)

    def partition(self, axis: int, offsets: TensorView | Sequence[object] | torch.Tensor) -> None:
        state, (domain,) = self._loops("partition", axis)
        place = hand.axis_of("partition", state, axis)
        args: tuple[str | int, ...]
        if isinstance(offsets, TensorView):
            known = [d.definition for t in self.fusion.every_tensor() for d in t.logical if isinstance(d.definition, Partition)]
            array, args = Array(offsets.tensor.name), (offsets.tensor.name,)
            made = partitions.by_offsets(state.phase, state.loop, place, array, known, self.fusion.identity)
        else:
            made, args = partitions.by_numbers(state.phase, state.loop, place, offsets)
        hand.check_partition(state.phase, domain, made, state.reduces)
        self._done(state, axis, Change("partition", state.phase, (domain,), made, args))

    def combine(self, component: int, ragged: int | None = None) -> None:
        state, (outer, inner) = self._neighbours("combine", component, ragged)
        made = combine(outer, inner)
        self._done(state, component, Change("combine", state.phase, (outer, inner), (made,)))

    def resize(self, axis: int, left: int, right: int) -> None:
        state, (domain,) = self._loops("resize", axis)
        hand.check_resize(state.phase, domain, left, right)
        hand.check_no_rows("resize", state.phase, state.loop, domain)
        made = transforms.resize(domain, left, right)
        self._done(state, axis, Change("resize", state.phase, (domain,), (made,), (left, right)))

    def swizzle(self, axis: int, other: int) -> None:
        state, (by,) = self._loops("swizzle", axis)
        _, (domain,) = self._loops("swizzle", other)
        hand.check_swizzle(state.phase, by, domain, by_is_reduced=state.reduces(by), is_reduced=state.reduces(domain))
        hand.check_no_rows("swizzle", state.phase, state.loop, domain)
        made = transforms.swizzle(by, domain)[1]
        self._done(state, other, Change("swizzle", state.phase, (domain,), (made,), (by.name,)))

    def parallelize(self, axis: int, kind: ParallelType | str) -> None:
        state = self._own_state("parallelize")
        domain = state.loop[hand.axis_of("parallelize", state, axis)]
        try:
            wanted = ParallelType(kind)
        except ValueError:
            known = choices(kind, (k.value for k in ParallelType))
            raise ScheduleError(f"parallelize: {kind!r} is not a parallel type: {known}") from None
        self._record(replace(state, parallel={**state.parallel, domain.uid: wanted}))

    # --- several tensors -------------------------------------------------------------------------------------------------

    def inline_at(self, consumer: TensorView, position: int) -> None:
        theirs = LoopHandle(consumer)
        state, other = self._own_state("inline_at"), theirs._own_state("inline_at")
        depth = position + len(other.loop) + 1 if isinstance(position, int) and position < 0 else position
        if isinstance(position, bool) or not isinstance(position, int) or not 1 <= depth <= len(other.loop):
            raise ScheduleError(f"inline_at: position must name some of the loops {other}, from 1 on, got {position!r}")
        if not feeds(self.fusion, state.phase, other.phase):
            raise ScheduleError(f"inline_at: {other.phase} is not computed from {state.phase}")
        changes: list[Change] = []
        if not any(c.phase == state.phase for c in schedule_of(self.fusion).changes):
            made = [c for c in schedule_of(self.fusion).changes if c.phase == other.phase]
            needed = [c for c in made if any(made_from(d, c.outputs) for d in other.loop[:depth])]
            state, changes = hand.followed(state, needed)
        own = {d.uid: d for d in state.loop if not state.reduces(d)}
        for domain in other.loop[:depth]:
            if domain.uid not in own:
                raise ScheduleError(f"inline_at: {state} has no loop {domain.name} of its own to share with {other}")
        shared = [own[d.uid] for d in other.loop[:depth]]
        rest = [d for d in state.loop if all(d is not s for s in shared)]
        state, moves = hand.reordered(state, [*shared, *rest])
        theirs._record(other)
        self._record(replace(state, inlined=(other.phase, depth)), *changes, *moves)

    def rfactor(self, axes: int | Sequence[int]) -> TensorView:
        state = self._own_state("rfactor")
        places = [hand.axis_of("rfactor", state, a) for a in ([axes] if isinstance(axes, int) else axes)]
        first = [state.loop[k] for k in dict.fromkeys(places)]
        definition = self.fusion.definition_of(self.tensor.memory)
        if state.origin is not None or definition is None or not isinstance(definition.statement, Accumulate):
            raise ScheduleError(f"rfactor: {state.phase} is not a reduction of values; there is nothing to factor")
        for domain in first:
            if not state.reduces(domain):
                raise ScheduleError(f"rfactor: {domain.name} is not reduced in {state}")
        left = tuple(d for d in state.loop if state.reduces(d) and all(d is not f for f in first))
        if not first or not left:
            raise ScheduleError(
                f"rfactor: both stages need something to reduce; name some of the reduced loops of {state}, not "
                f"{'all' if first else 'none'} (split one first)"
            )
        kept = tuple(d for d in state.loop if all(d is not f for f in first))
        target, suffix = definition.statement.targets[0], "_".join(d.name for d in left)
        partial = Tensor(f"{target.name}_{suffix}", target.dtype, kept, storage_of(kept))
        partial_state = LoopState(partial.name, state.loop, tuple(first), state.parallel, origin=state.phase)
        self._record(replace(state, loop=kept, over=left), Change("rfactor", state.phase, left))
        view = self.fusion.view(partial)
        LoopHandle(view)._record(partial_state)
        return view

    def cache_before(self) -> TensorView:
        return caches.cache_before(self.fusion, self.tensor)

    def cache_after(self) -> TensorView:
        return caches.cache_after(self.fusion, self.tensor)

    def set_allocation(self, domains: Sequence[IterDomain]) -> None:
        state, tensor = self._own_state("set_allocation"), self.tensor
        if tensor.role is Role.INPUT or any(v.tensor.memory is tensor.memory for v in self.fusion.outputs):
            what = "an input" if tensor.role is Role.INPUT else "an output"
            raise ScheduleError(
                f"set_allocation: {tensor.name} is {what}, whose memory the caller owns; set the allocation of a cached copy"
            )
        if tensor.base is not None:
            raise ScheduleError(f"set_allocation: {tensor.name} is a view of {tensor.memory.name}; set the allocation of that")
        wanted = tuple(domains)
        if state.allocation is not None:
            raise ScheduleError(f"set_allocation: the memory of {tensor.name} is already {', '.join(map(str, state.allocation))}")
        if not all(isinstance(d, IterDomain) for d in wanted):
            raise DomainError(f"set_allocation: expected domains, got {list(domains)!r}")
        memory, changes = hand.allocation_steps(tensor, wanted)
        self._record(replace(state, allocation=memory), *changes)

    # --- bookkeeping -----------------------------------------------------------------------------------------------------

    def _own_state(self, function: str) -> LoopState:
        state = loop_state(self.fusion, self.tensor)
        if state is None:
            raise ScheduleError(
                f"{function}: {self.tensor.name} is an input, which no loops compute; cache_after() makes a copy that has loops"
            )
        return state

    def _loops(self, function: str, axis: int, count: int = 1) -> tuple[LoopState, tuple[IterDomain, ...]]:
        state = self._own_state(function)
        place = hand.axis_of(function, state, axis)
        found = state.loop[place : place + count]
        hand.check_serial(function, state, found)
        hand.check_alike(function, state, found)
        return state, found

    def _neighbours(self, function: str, axis: int, other: int | None) -> tuple[LoopState, tuple[IterDomain, ...]]:
        state = self._own_state(function)
        first = hand.axis_of(function, state, axis)
        second = first + 1 if other is None else hand.axis_of(function, state, other)
        if second != first + 1 or second >= len(state.loop):
            raise ScheduleError(
                f"{function}: takes a loop and the one inside it, got axes {axis} and {second} of {state}; reorder first"
            )
        return self._loops(function, axis, 2)

    def _done(self, state: LoopState, axis: int, change: Change) -> None:
        place = hand.axis_of(change.primitive, state, axis)
        new = hand.changed(state, place, len(change.inputs), change.outputs)
        hand.check_order(change.primitive, state.phase, new.loop)
        self._record(new, change)

    def _record(self, state: LoopState, *changes: Change) -> None:
        self.fusion.schedule = schedule_of(self.fusion).recorded(state, changes)


def _new_order(state: LoopState, order: Mapping[int, int] | Sequence[int]) -> list[int]:
    """The axis that goes to each place."""
    count = len(state.loop)
    if isinstance(order, Mapping):
        to = {hand.axis_of("reorder", state, new): hand.axis_of("reorder", state, old) for old, new in order.items()}
        if len(to) < len(order) or len(set(to.values())) < len(order):
            raise ScheduleError(f"reorder: two axes of {state} cannot have one place, got {dict(order)}")
        rest = iter(k for k in range(count) if k not in to.values())
        return [to[k] if k in to else next(rest) for k in range(count)]
    places = [hand.axis_of("reorder", state, k) for k in order]
    if sorted(places) != list(range(count)):
        raise ScheduleError(f"reorder: expected each of {count} axes of {state} once, got {list(order)}")
    return places
