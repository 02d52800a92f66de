"""Prints the values of statements as Triton blocks.

In: values of the loop program. Out: text, and the lines that compute it. A value is computed once in each loop body. If its
contents in lanes that a statement masks off are known, later masks are omitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from serrate.analysis.boxes import MatrixBox, box_of
from serrate.codegen.triton.indices import IndexPrinter
from serrate.codegen.triton.module import Descriptor, descriptor_of
from serrate.codegen.triton.values import (
    DIVISIONS,
    FUNCTIONS,
    LIBDEVICE_BINARY,
    POWERS,
    SPECIAL,
    TYPES,
    kind_of,
    number_text,
    shape_of,
)
from serrate.errors import VerificationError
from serrate.ir.conditions import conditions_of
from serrate.ir.expr import Array, Expr, Less, Symbol
from serrate.ir.loops import Boxed, Existing, Guard, Held, Lane, Lanes, Load, Local, Number
from serrate.ir.solve import end_of, possible
from serrate.ir.values import Call, Constant, Tensor, Value, carried_dtype


class ValuePrinter(IndexPrinter):
    """Prints values. A copy engine reads boxes from `descriptors`; `last_reads` pairs loops, by id, with the inputs that they are
    the last to read."""

    def __init__(
        self,
        names: Mapping[Array, str],
        blocks: Mapping[str, Local],
        descriptors: Mapping[Descriptor, str],
        last_reads: set[tuple[int, Tensor]],
    ) -> None:
        super().__init__(names, blocks)
        self.descriptors, self.last_reads = descriptors, last_reads
        self.loop = 0
        """The id of the innermost loop."""
        self.shared: dict[tuple[int, Lanes, Guard], str] = {}
        self.scalars: dict[int, str] = {}
        """Variables for numbers that are read once, before all loops; by the id of the load."""
        self.kept: list[Value] = []
        self.narrow: set[str] = set()
        """Private blocks that are products of 16-bit blocks."""
        self.preferred: dict[int, float] = {}
        """The value that each load, by id, should give where its statement is masked off."""
        self.others: dict[str, float] = {}
        """The contents of blocks there, by name, if known."""
        self.absent: dict[str, tuple[Guard, float]] = {}
        """The contents of private blocks where a guard fails."""

    def value(self, value: Value, lanes: Lanes, guard: Guard, *, raw: bool = False) -> str:
        """A value as a block that broadcasts over `lanes`; computed once per loop body."""
        if isinstance(value, Constant):
            if value.dtype == torch.int64 and abs(int(value.number)) > 2**31 - 1:
                return f"tl.full([], {int(value.number)}, tl.int64)"
            return number_text(float(value.number) if value.dtype.is_floating_point else value.number)
        if isinstance(value, Held):
            return self.held(value.local, lanes)
        if id(value) in self.scalars:
            return self.scalars[id(value)]
        key = (id(value), lanes, guard)
        if key not in self.shared or raw:
            text = self._load(value, lanes, guard, raw) if isinstance(value, Load) else self._compute(value, lanes, guard)
            name = self.named(text)
            if raw:
                return name
            other = self._other(value, lanes, guard)
            if other is not None:
                self.others[name] = other
            self.shared[key] = name
            self.kept.append(value)
        return self.shared[key]

    def held(self, local: Local, lanes: Lanes) -> str:
        """A private block, broadcast over `lanes`; for a lane that a loop runs over, only its current position."""
        text, own = local.name, local.lanes
        for lane in (each for each in local.lanes if each.symbol in self.single):
            text = f"tl.sum(tl.where({self.at_lane(lane, own)}, {text}, 0), {own.index(lane)})"
            own = tuple(other for other in own if other is not lane)
        if own != local.lanes:
            text = f"{text}.to({TYPES[carried_dtype(local.dtype)]})"
        return self.spread(text, own, lanes)

    def at_lane(self, lane: Lane, lanes: Lanes) -> str:
        """A mask that selects the current position of the loop over a lane."""
        return f"{self.spread(self.single[lane.symbol], (lane,), lanes)} == {self.variables[lane.symbol]}"

    def _load(self, value: Load, lanes: Lanes, guard: Guard, raw: bool) -> str:
        wanted = carried_dtype(value.dtype)
        box = box_of(value, lanes) if self.descriptors and isinstance(value, Boxed) else None
        if box is not None:
            text = self._box(value.tensor, box, lanes)
            return text if raw or wanted == value.dtype else f"{text}.to({TYPES[wanted]})"
        with self.protected(value.guard):
            pointer, own = self.pointer(value.tensor, value.index, lanes)
            mask = self.joined_mask(self.mask(guard, lanes, own), value.guard, lanes)
        masked = {e for g in value.guard for e in self.lanes_in(g.left) | self.lanes_in(g.right)}
        pointer += self.still(masked - own, lanes)
        other = number_text(value.other if value.guard else self.preferred.get(id(value), value.other))
        text = f"tl.load({pointer}{f', mask={mask}, other={other}' if mask else ''}{self._eviction(value)})"
        return text if raw or wanted == value.dtype else f"{text}.to({TYPES[wanted]})"

    def _box(self, tensor: Tensor, box: MatrixBox, lanes: Lanes) -> str:
        """A block that a copy engine reads, with its lanes in this order."""
        name = self.descriptors[descriptor_of(tensor, box)]
        place = ", ".join(f"sr_place({self.index(e)})" for e in box.place)
        return f"{name}.load([{place}]){'' if box.sides == lanes else '.T'}"

    def _eviction(self, value: Load) -> str:
        """The cache hint of a load from rows that several loops read: they stay in the cache until the last loop reads them."""
        if (self.loop, value.tensor) in self.last_reads:
            return ', eviction_policy="evict_first"'
        again = any(tensor is value.tensor for _, tensor in self.last_reads)
        return ', eviction_policy="evict_last"' if again else ""

    def still(self, missing: set[Lane], lanes: Lanes) -> str:
        """Adds lanes to a pointer that its address does not depend on, as a mask or value with these lanes requires."""
        return "".join(f" + {self.index(lane.symbol, lanes)} * 0" for lane in lanes if lane in missing)

    def _compute(self, value: Value, lanes: Lanes, guard: Guard) -> str:
        if isinstance(value, Number):
            text = self.index(value.expr, lanes)
            if not self.lanes_in(value.expr):
                # A lane-invariant value may be a plain integer here.
                text = f"sr_wide({text})"
            return f"({text}).to({TYPES[value.dtype]})"
        if isinstance(value, Existing):
            with self.protected(value.guard):
                return self._existing(value, lanes)
        assert isinstance(value, Call), value
        comparisons, rest = conditions_of(value) if value.function in ("lt", "le", "gt", "ge") else ((), value)
        if comparisons and rest is None:
            # A comparison of positions: lanes have 32 bits.
            return f"({self.condition(comparisons[0], lanes)})"
        args = [self.value(a, lanes, guard) for a in value.args]
        if value.function == "cast":
            return self._cast(value, args[0])
        if value.function not in FUNCTIONS:
            raise VerificationError(f"the triton backend has no function {value.function!r}")
        if value.function in (LIBDEVICE_BINARY if value.dtype.is_floating_point else DIVISIONS):
            # A literal would be float32 or int32, whatever the dtype of the other operand.
            kind = TYPES[carried_dtype(value.dtype)]
            args = [f"tl.full([], {a}, {kind})" if isinstance(v, Constant) else a for a, v in zip(args, value.args, strict=True)]
        if value.function in POWERS and (scaled := self._scaled(value.args[0], lanes, guard)) is not None:
            return f"sr_exp_scaled({', '.join(scaled)}, {args[1]})"
        special = SPECIAL.get((value.function, kind_of(value.dtype)))
        return (special or FUNCTIONS[value.function]).format(*args)

    def _scaled(self, value: Value, lanes: Lanes, guard: Guard) -> tuple[str, str] | None:
        """The block and the scale, if a value is a scaled product of 16-bit blocks (scores), which need no exact subtraction."""
        if not isinstance(value, Call) or value.function != "mul" or self.missing(value, lanes, guard) is not None:
            return None
        block, scale = value.args
        if not isinstance(block, Held) or not isinstance(scale, Constant) or block.local.name not in self.narrow:
            return None
        return self.held(block.local, lanes), self.value(scale, lanes, guard)

    def _cast(self, value: Call, arg: str) -> str:
        if isinstance(value.args[0], Constant):
            return f"tl.full([], {arg}, {TYPES[value.dtype]}).to({TYPES[carried_dtype(value.dtype)]})"
        if isinstance(value.args[0], Number) and value.args[0].expr.value is not None:
            return f"{float(value.args[0].expr.value)}" if value.dtype.is_floating_point else arg
        if value.dtype == torch.bool:
            return f"({arg} != 0)"
        kept = TYPES[carried_dtype(value.dtype)]
        # 16-bit floats are converted through float32, whatever the argument is.
        through = "" if kept == TYPES[value.dtype] else f".to({kept})"
        rounded = f"{arg}{through}.to({TYPES[value.dtype]})"
        return rounded if kept == TYPES[value.dtype] else f"{rounded}.to({kept})"

    def _existing(self, value: Existing, lanes: Lanes) -> str:
        counted = {lane.symbol for lane in value.lanes}
        on_lanes = [g for g in value.guard if g.symbols & counted]
        tests = [self.condition(g, lanes) for g in value.guard if g not in on_lanes]
        if any(len(g.symbols & counted) > 1 or _room(g, counted) is None for g in on_lanes):
            counts = [self._counted(value.lanes, on_lanes, lanes)]
        else:
            counts = [self._width(lane, on_lanes, lanes) for lane in value.lanes]
        counts += [f"({test}).to(tl.int64)" for test in tests]
        total = " * ".join(counts) or "1"
        if not all(c.isdigit() for c in counts):
            return f"({total}).to({TYPES[value.dtype]})"
        return f"({total}) * 1.0" if value.dtype.is_floating_point else f"tl.full([], {total}, {TYPES[value.dtype]})"

    def _width(self, lane: Lane, guard: Sequence[Less], lanes: Lanes) -> str:
        """The number of positions of a lane, each condition on which ends at some position."""
        limit = str(lane.size)
        for room in (_room(g, {lane.symbol}) for g in guard if lane.symbol in g.symbols):
            assert room is not None
            limit = f"tl.minimum({limit}, {self.index(room, lanes)})"
        return limit if limit.isdigit() else f"tl.maximum({limit}, 0)"

    def _counted(self, counted: Lanes, guard: Sequence[Less], lanes: Lanes) -> str:
        """The number of positions of several lanes, counted one by one."""
        every = (*lanes, *counted)
        text = " & ".join(f"({self.condition(g, every)})" for g in guard)
        text = f"tl.broadcast_to({text}, {shape_of(every)}).to(tl.int64)"
        for axis in reversed(range(len(lanes), len(every))):
            text = f"tl.sum({text}, {axis})"
        return text

    def full(self, value: Value, lanes: Lanes, guard: Guard) -> str:
        """A value as a block of exactly these lanes."""
        if isinstance(value, Constant):
            return f"tl.full({shape_of(lanes)}, {number_text(value.number)}, {TYPES[carried_dtype(value.dtype)]})"
        text = self.value(value, lanes, guard)
        return text if self._varies_over(value, lanes) == set(lanes) else f"tl.broadcast_to({text}, {shape_of(lanes)})"

    def _varies_over(self, value: Value, lanes: Lanes) -> set[Lane]:
        """The lanes along which a value may vary."""
        return {lane for each in value.walk() for lane in self._own_lanes(each, lanes)}

    def _own_lanes(self, value: Value, lanes: Lanes) -> Collection[Lane]:
        """The lanes along which a value may vary, whatever its arguments."""
        if isinstance(value, Load):
            return self.pointer(value.tensor, value.index, lanes)[1]
        if isinstance(value, Held) and not self.single:
            return value.local.lanes
        return self.lanes_in(value.expr) if isinstance(value, Number) else ()

    def missing(self, value: Value, lanes: Lanes, guard: Guard) -> float | None:
        """The contents, where the statement is masked off, of a block that holds this value; None if unknown."""
        if isinstance(value, Load) and self.pointer(value.tensor, value.index, lanes)[1] != set(lanes):
            return None
        if isinstance(value, Held):
            filled, number = self.absent.get(value.local.name, ((), None))
            known = value.local.lanes == lanes and all(_is_implied(g, filled, lanes) for g in guard)
            return number if known and not self.single else None
        return self.others.get(self.shared.get((id(value), lanes, guard), ""))

    def _other(self, value: Value, lanes: Lanes, guard: Guard) -> float | None:
        """The value that a newly computed value has where its statement is masked off; None if unknown."""
        if isinstance(value, Load) and not isinstance(value, Boxed):
            return value.other if value.guard else self.preferred.get(id(value), value.other)
        if isinstance(value, Call) and value.function in POWERS:
            x, m = value.args
            is_zero = value.function == "exp_diff" or self._has_terms(m, lanes, guard)
            return 0 if self.missing(x, lanes, guard) == -math.inf and is_zero else None
        if isinstance(value, Call) and value.function == "cast":
            return 0 if self.missing(value.args[0], lanes, guard) == 0 else None
        return None

    def _has_terms(self, maximum: Value, lanes: Lanes, guard: Guard) -> bool:
        """Whether a maximum certainly has a term in each of its lanes: otherwise a row may be empty, its maximum -inf, and
        e^(-inf - -inf) NaN."""
        reduced = {lane.symbol for lane in set(lanes) - self._varies_over(maximum, lanes)}
        return all(g.symbols <= reduced and not g.left.arrays | g.right.arrays for g in guard if g.symbols & reduced)

    def forget(self, local: str) -> None:
        """Invalidates values computed from a private block that changed."""
        self.absent.pop(local, None)
        self._forget_if(lambda v: isinstance(v, Held) and v.local.name == local)

    def forget_memory(self, memory: Tensor) -> None:
        """Invalidates values that were loaded from memory that a store has changed."""
        self._forget_if(lambda v: isinstance(v, Load) and v.tensor.memory is memory)

    def _forget_if(self, changes: Callable[[Value], bool]) -> None:
        stale = {id(v) for v in self.kept if any(map(changes, v.walk()))}
        self.shared = {key: name for key, name in self.shared.items() if key[0] not in stale}


def _room(condition: Less, counted: Collection[Symbol]) -> Expr | None:
    """The first position of the only counted lane at which a condition fails; None if it does not have this form."""
    (lane,) = condition.symbols & set(counted)
    end = end_of(condition, lane)
    return None if end is None or lane in end.symbols else end


def _is_implied(condition: Less, guard: Guard, lanes: Lanes) -> bool:
    """Whether a guard implies a condition: it contains the condition, or one that implies it whatever the other lanes are."""
    others = {lane.symbol for lane in lanes} - condition.symbols
    return any(condition in (g, possible(g, others)) for g in guard)
