"""Loops and branches of a traced function: ranges, carried values, and both sides of an `if`.

In: calls of the hooks that `source.py` inserted into the function. Out: statements of a tile program. The body of a loop over
tiles runs once, on symbols; plain Python loops and branches run as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from serrate.frontend.kernel.machine import refuse
from serrate.ir.expr import Expr, Less, Symbol, const
from serrate.ir.loops import Assign, Declare, Local, While, held, number
from serrate.ir.solve import loosest
from serrate.ir.tile import GRID, SERIAL, Axis, Loop, Statement, branch
from serrate.ir.values import Constant, Value, call, constant
from serrate.tiles.carried import Carried, finish
from serrate.tiles.carried import carries as carries_of
from serrate.tiles.containers import Contents, contents_now, require_unchanged
from serrate.tiles.elementwise import block_value, broadcast_dims, cast
from serrate.tiles.values import Condition, Feeder, Traced, TracedTensor, TracedTile, Unset, as_traced, shown_axes

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace


class RetraceNeeded(Exception):
    """The trace must be repeated with the facts it has found."""


class RetraceFacts:
    """Facts that one trace of a loop leaves for the next: sizes to compile in, shapes and dtypes of carried values."""

    def __init__(self) -> None:
        self.static: set[tuple[Any, ...]] = set()
        self.written: set[str] = set()
        """Tensors that are stored to; reads of them must not move."""
        self.carried: dict[tuple[int, str], tuple[torch.dtype, tuple[tuple[str, int | None] | None, ...]]] = {}
        """The dtype of each carried value, and the axis name of each dim, with its size if no loop runs over it."""


class TracedRange:
    """The result of `hl.tile`, `hl.jagged_tile` and `hl.grid`: an iterator that runs the loop's body once, on symbols."""

    def __init__(
        self,
        trace: Trace,
        what: str,
        dims: Sequence[tuple[Axis, Expr | None, int]],
        single: bool,
        conditions: Sequence[Condition] = (),
    ) -> None:
        self.trace, self.what, self.dims, self.single = trace, what, dims, single
        self.conditions = conditions

    def __iter__(self) -> Iterator[Any]:
        trace = self.trace
        if not trace.loops or trace.loops[-1].outer is not None:
            refuse(f"{self.what} must be used in a `for` statement of the kernel, or of a function that it calls")
        axes = [axis for axis, _, _ in self.dims]
        trace.loops[-1].begin(axes)
        made = tuple(
            TracedTile(axis, self.conditions) if low is None else Traced(number(low + axis.position * stride), ())
            for axis, low, stride in self.dims
        )
        yield made[0] if self.single else made


class TracedLoop:
    """One loop statement: a loop over tiles, a `while` on runtime values, or a plain Python loop, which runs as usual."""

    def __init__(self, trace: Trace, targets: Sequence[str], left: Sequence[str]) -> None:
        self.trace, self.targets, self.left = trace, tuple(targets), frozenset(left)
        self.outer: list[Statement] | None = None
        self.axes: list[Axis] = []
        self.carried: dict[str, tuple[Local, Traced]] = {}
        self.updates: dict[str, Traced] = {}
        self.kept: dict[str, Any] = {}
        """Values that exist before a grid loop; its iterations must not change them."""
        self.conditions: dict[str, list[Condition]] = {}
        self.plain: set[str] = set()
        """Carried values that start as a Python number, and take the dtype of the other operand."""
        self.stepped = False
        self.start = 0
        self.test: tuple[list[Statement], tuple[Less, ...]] | None = None
        self.contents: Contents = []
        self.number = trace._loop_number
        trace._loop_number += 1
        trace.loops.append(self)

    def begin(self, axes: list[Axis]) -> None:
        """Called if the loop turns out to run over tiles."""
        trace = self.trace
        self.outer, trace.block = trace.block, []
        self.contents = contents_now()
        self.axes = axes
        trace.axes += axes
        if not trace.axes_open:
            trace.programs = tuple(axes)
        trace.axes_open += axes
        trace.clock += 1
        self.start = trace.clock

    def continues(self, test: Any) -> bool:
        """Whether a `while` continues: in plain Python as its test says; on a runtime value, for exactly one iteration."""
        trace = self.trace
        if self.test is not None:
            return False
        if not isinstance(test, Traced) or (test.expr is not None and test.expr.value is not None):
            if self.outer is not None:
                self.abandon()
            return bool(test)
        if any(a is not None for a in test.axes):
            refuse("`while` needs a scalar: reduce it first, with x.any() or x.amax()")
        guard = trace.conditions_of(cast(test, torch.bool))
        self.test = (trace.block, guard)
        trace.block = []
        return True

    def prepare(self) -> None:
        """Called before the test of a `while`: if the test is a runtime value, its statements belong to the loop."""
        trace = self.trace
        self.outer, trace.block = trace.block, []
        self.contents = contents_now()
        trace.clock += 1
        self.start = trace.clock

    def abandon(self) -> None:
        """Called if the `while` turns out to be plain Python."""
        assert self.outer is not None
        self.trace.block = [*self.outer, *self.trace.block]
        self.outer = None

    def carry(self, name: str, value: Any) -> Any:
        """Records a carried value, before the first iteration or after an iteration; returns what replaces it."""
        if self.outer is None:
            return value
        if not self.stepped:
            return self._first(name, value)
        if name not in self.carried:
            if name in self.left and name not in self.kept:
                return Unset(name)
            if name in self.kept and name not in self.left and value is not self.kept[name]:
                refuse(
                    f"{name} is carried from one program to the next, but programs run in any order: "
                    "put a loop inside, or use hl.atomic_add"
                )
            return value
        local, before = self.carried[name]
        value = as_traced(value)
        if not isinstance(value, Traced):
            refuse(f"{name} is carried around the loop, but is a {type(value).__name__} at its end")
        value = self._aligned(before, value)
        value = self._checked(name, before, value)
        self.updates[name] = value
        kept = self.conditions.get(name, [])
        since = self._outer_time()
        own = [a for a in before.axes if a is not None]
        return Traced(
            held(local), before.axes, kept, [self._over_all_iterations(f, since, own) for f in value.fed if f.time >= since]
        )

    def _over_all_iterations(self, fed: Feeder, time: int, own: Sequence[Axis]) -> Feeder:
        """The reduction over all iterations. If conditions hold from the first position on, some lane existed iff the first did;
        if they start to hold later (a window that starts before its row), iterations record it."""
        if all(_holds_first(g, a) for g in fed.guard for a in self.axes):
            first: dict[Expr, Expr] = {a.position: a.begin for a in self.axes}
            guard = tuple(g.substitute(first) for g in fed.guard)
            return Feeder(time, tuple(a for a in fed.over if a not in self.axes), tuple(g for g in guard if not g.proven))
        trace = self.trace
        assert self.outer is not None
        local = Local(trace.name_for("seen"), torch.int64, tuple(a.block_lane for a in own))
        self.outer.append(Declare(local, 0))
        trace.emit(Assign(local.lanes, (), local, call("add", held(local), fed.count(), dtype=torch.int64)))
        return Feeder(time, (), (Less(const(0), trace._element(local.name, own)),))

    def _aligned(self, before: Traced, value: Traced) -> Traced:
        """The value in its previous lanes: lanes of a block size that this loop uses are the same in every iteration."""
        pairs = zip(before.axes[before.ndim - value.ndim :] if value.ndim <= before.ndim else (), value.axes, strict=False)
        names = {b: a for a, b in pairs if a is not None and b is not None and b.original in self.axes and not a.looped}
        return value.renamed(names) if names else value

    def _outer_time(self) -> int:
        outer = [loop for loop in self.trace.loops[: self.trace.loops.index(self)] if loop.outer is not None]
        return outer[-1].start if outer else self.start + 10**9

    def _first(self, name: str, value: Any) -> Any:
        trace = self.trace
        if isinstance(value, (TracedTile, TracedTensor)):
            return value
        was = value
        value = as_traced(value)
        if not isinstance(value, Traced):
            return was
        known = trace.known.carried.get((self.number, name))
        axes, dtype = list(value.axes), value.dtype
        if known is not None:
            dtype = known[0]
            axes = [None if dim is None else self._known_axis(name, *dim) for dim in known[1]]
        if trace.programs and self.axes and tuple(self.axes) == trace.programs and trace.axes_open == list(self.axes):
            # Iterations of a grid loop carry nothing.
            self.kept[name] = was
            return was
        assert self.outer is not None
        here, trace.block = trace.block, self.outer
        local = Local(trace.name_for(name), dtype, tuple(a.block_lane for a in axes if a is not None))
        initial = block_value(value, dtype)
        plain = isinstance(initial, Constant)
        trace.block.append(Declare(local, initial.number if plain and isinstance(initial, Constant) else 0))
        if not plain:
            trace.block.append(Assign(local.lanes, (), local, initial))
        trace.block = here
        placeholder = Traced(held(local), axes, value.conditions)
        outer = (loop for loop in trace.loops if name in loop.plain and loop.carried[name][1] is was)
        if isinstance(was, (int, float)) or next(outer, None) is not None:
            self.plain.add(name)
        self.carried[name] = (local, placeholder)
        return placeholder

    def _known_axis(self, name: str, axis: str, size: int | None) -> Axis:
        """An axis that an iteration adds to a carried value; fixed lanes that the loop creates are declared before it."""
        found = next((a for a in self.trace.axes if a.name == axis), None)
        if found is None and size is not None:
            found = self.trace.fixed_axis(size)
        if found is None:
            refuse(f"the carried value {name} gains a dim in the loop: give it its shape before the loop, as in hl.zeros([...])")
        return found

    def _checked(self, name: str, before: Traced, value: Traced) -> Traced:
        """The value after an iteration, broadcast to the dims that it has before; raises if it has others."""
        trace = self.trace
        before_at, value_at = ({a: k - x.ndim for k, a in enumerate(x.axes) if a is not None} for x in (before, value))
        if any(value_at.get(a, k) != k for a, k in before_at.items()):
            self._refuse_shapes(name, before, value)
        axes, (_, value) = broadcast_dims(trace, [before, value], f"the carried value {name}")
        grown = any(a is not None and a not in before.axes for a in axes) or len(axes) != before.ndim
        if grown and any(a.original in self.axes for a in axes if a is not None):
            self._refuse_shapes(name, before, value)
        if value.dtype.is_floating_point and not before.dtype.is_floating_point and name not in self.plain:
            refuse(
                f"the carried value {name} is {before.dtype} before the loop and {value.dtype} after an iteration, "
                "so it would be rounded only when it is stored: "
                f"start with that dtype, or convert what is added, as in x.sum(1).to({before.dtype})"
            )
        if grown or value.dtype != before.dtype:
            key = (self.number, name)
            form = (value.dtype, tuple(None if a is None else (a.name, None if a.looped else a.size) for a in axes))
            if key in trace.known.carried and trace.known.carried[key][1] != form[1]:
                self._refuse_shapes(name, before, value)
            if trace.known.carried.get(key) == form or (value.ndim < before.ndim == len(axes) and value.dtype == before.dtype):
                return value
            trace.known.carried[key] = form
            raise RetraceNeeded
        old = {c.holds for c in before.conditions}
        kept = [c for c in before.conditions if c in value.conditions]
        for c in value.conditions:
            if c.holds in old:
                continue
            changes = any(own & c.holds.symbols for own in self._changing())
            if c.row and changes:
                refuse(
                    f"the carried value {name} exists under a condition on a row length that varies with the loop: "
                    "reduce over that dim first, or make its lanes exist with hl.fill(x, 0)"
                )
            if not changes:
                kept.append(c)
        self.conditions[name] = kept
        return value

    @staticmethod
    def _refuse_shapes(name: str, before: Traced, value: Traced) -> NoReturn:
        refuse(
            f"the carried value {name} has shape {shown_axes(before.axes)} before an iteration and "
            f"{shown_axes(value.axes)} after it"
        )

    def _changing(self) -> list[set[Symbol]]:
        """The symbols that change with every iteration."""
        axes = [a for a in self.trace.axes if a.original in self.axes]
        return [{a.position, a.lane, a.number, a.first, a.last} for a in axes]

    def step(self) -> None:
        """Called at the start of an iteration."""
        self.stepped = True

    def leave(self) -> None:
        """Called after the loop."""
        trace = self.trace
        trace.loops.remove(self)
        if self.outer is None:
            return
        require_unchanged(self.contents, "a `while` on a runtime value" if self.test is not None else "a loop over tiles")
        carried = [
            Carried(
                name,
                self.carried[name][0],
                value,
                () if name in self.left else tuple(f for f in value.fed if f.time >= self.start),
            )
            for name, value in self.updates.items()
            if value.value is not held(self.carried[name][0])
        ]
        for each in carried:
            trace.note_update(each.local, each.value.value)
        body = finish(trace.block, carried, trace.reductions)
        for each in carried:
            what = "the loop" if not self.axes else str(self.axes[0])
            trace.notes.append(f"{each.local.name} around {what}: {each.kind or 'as it is written'}")
        parallel = bool(self.axes) and tuple(self.axes) == trace.programs and trace.axes_open == list(self.axes)
        trace.block = self.outer
        if self.test is not None:
            trace.block.append(While(tuple(self.test[0]), self.test[1], body))  # type: ignore[arg-type]
        elif self.axes:
            trace.axes_open = trace.axes_open[: -len(self.axes)]
            carries = carries_of(carried)
            for axis in reversed(self.axes):
                body = (Loop(axis.domain, GRID if parallel else SERIAL, body, carries),)
            trace.block += body
        else:
            trace.block += body


class Branch:
    """An `if` statement: on a plain Python value, one branch is traced; on a runtime value, both."""

    def __init__(self, trace: Trace, test: Any) -> None:
        self.trace = trace
        self.known: bool | None = None
        self.before: dict[str, Any] = {}
        self.sides: list[dict[str, Any]] = [{}, {}]
        self.blocks: list[list[Statement]] = [[], []]
        if (
            isinstance(test, Traced)
            and not isinstance(test.value, Constant)
            and not (test.expr is not None and test.expr.value is not None)
        ):
            if any(a is not None for a in test.axes):
                refuse("`if` needs a scalar: reduce it first (x.amax(), x.any()), or use torch.where")
            self.guard = trace.conditions_of(cast(test, torch.bool))
        else:
            self.known = bool(test)

    def save(self, name: str, value: Any) -> None:
        """Records the value of a name before the branches."""
        self.before[name] = value

    def then(self) -> bool:
        """Whether the first branch is traced."""
        if self.known is not None:
            return self.known
        self.outer, self.trace.block = self.trace.block, []
        self.contents = contents_now()
        return True

    def other(self) -> bool:
        """Whether the second branch is traced."""
        if self.known is not None:
            return not self.known
        self.blocks[0], self.trace.block = self.trace.block, []
        return True

    def keep(self, side: int, name: str, value: Any) -> None:
        """Records the value of a name after a branch."""
        self.sides[side][name] = value

    def restore(self, name: str, value: Any) -> Any:
        """The value of a name at the start of the second branch."""
        return value if self.known is not None else self.before.get(name, Unset(name))

    def close(self) -> None:
        """Called after both branches."""
        if self.known is not None:
            return
        require_unchanged(self.contents, "an `if` on a runtime value")
        self.blocks[1], self.trace.block = self.trace.block, self.outer
        self.merged: dict[str, Any] = {}
        for name in {**self.sides[0], **self.sides[1]}:
            self.merged[name] = self._merge(name)
        self.trace.block.append(branch(self.guard, tuple(self.blocks[0]), tuple(self.blocks[1])))

    def _merge(self, name: str) -> Any:
        trace = self.trace
        sides = [self.sides[k].get(name, self.before.get(name, Unset(name))) for k in (0, 1)]
        if sides[0] is sides[1]:
            return sides[0]
        if any(isinstance(s, Unset) for s in sides):
            return Unset(name)
        values = [as_traced(s) for s in sides]
        if not all(isinstance(v, Traced) for v in values):
            return Unset(name)
        axes, values = broadcast_dims(trace, values, f"{name} after an `if`")
        dtype = torch.promote_types(values[0].dtype, values[1].dtype)
        local = Local(trace.name_for(name), dtype, tuple(a.block_lane for a in axes if a is not None))
        trace.block.append(Declare(local, 0))
        for block, value in zip(self.blocks, values, strict=True):
            block.append(Assign(local.lanes, (), local, block_value(value, dtype)))
        conditions = [c for v in values for c in v.conditions]
        return Traced(held(local), axes, conditions, self._fed(values, axes))

    def _fed(self, values: Sequence[Traced], axes: Sequence[Axis | None]) -> list[Feeder]:
        """The reductions that feed a merged value: those of the branch that ran. Each branch records whether any lane existed."""
        trace = self.trace
        since = next((loop.start for loop in reversed(trace.loops) if loop.outer is not None), 0)
        now = [[f for f in v.fed if f.time >= since] for v in values]
        before = [f for v in values for f in v.fed if f.time < since]
        if not any(now) or now[0] == now[1]:
            return [*before, *now[0]]
        own = [a for a in axes if a is not None]
        local = Local(trace.name_for("seen"), torch.int64, tuple(a.block_lane for a in own))
        trace.block.append(Declare(local, 0))
        for block, feds in zip(self.blocks, now, strict=True):
            total: Value = constant(0 if feds else 1, torch.int64)
            for f in feds:
                total = call("add", total, f.count(), dtype=torch.int64)
            block.append(Assign(local.lanes, (), local, total))
        return [*before, Feeder(trace.clock, (), (Less(const(0), trace._element(local.name, own)),))]

    def result(self, name: str, value: Any) -> Any:
        """The value of a name after both branches."""
        return value if self.known is not None else self.merged.get(name, value)


def _holds_first(condition: Less, axis: Axis) -> bool:
    """Whether a condition holds at the first position of an axis if it holds at any."""
    return axis.lane not in condition.symbols and loosest(condition, (axis.position,)) is not None
