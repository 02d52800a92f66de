"""Symbolic values of a device loop while it is traced: tiles, tile values, and tensors from outside the loop.

In: index expressions and values of the IR. Out: objects that behave like torch tensors. Like a value of the interpreter, a
`Traced` value has dims (the axis of each), the conditions under which its lanes exist, and the reductions that feed it; it holds
an expression where the interpreter's holds numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from serrate.frontend.kernel.machine import current, refuse
from serrate.frontend.kernel.values import Lanes, Tile, TileValue, TorchLike
from serrate.ir.expr import Element, Expr, Less, as_expr, const
from serrate.ir.loops import Number, existing, number
from serrate.ir.renaming import Swap
from serrate.ir.tile import Axis
from serrate.ir.values import Constant, Tensor, Value, constant

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace

Dims = tuple[Axis | None, ...]


@dataclass(frozen=True)
class Condition:
    """A condition under which lanes exist."""

    holds: Less
    row: bool
    """Whether it compares with the length of a row, rather than with the end of a plain range."""

    def over(self, axes: Sequence[Axis | None]) -> frozenset[Axis]:
        """Which of these axes it mentions."""
        return frozenset(a for a in axes if a is not None and mentions(self.holds, a))


def mentions(what: Less | Expr, axis: Axis) -> bool:
    """Whether something depends on the position along an axis."""
    return bool(what.symbols & {axis.position, axis.lane})


@dataclass(frozen=True)
class Feeder:
    """A reduction that feeds a value: when it ran, over which axes, and under which conditions its lanes existed."""

    time: int
    over: tuple[Axis, ...]
    guard: tuple[Less, ...]

    def count(self) -> Value:
        """The number of its lanes that existed."""
        return existing(tuple(a.block_lane for a in self.over), self.guard, torch.int64)


class Traced(TileValue):
    """A value of a device loop: one number for every lane of its axes."""

    __slots__ = ("axes", "conditions", "fed", "value")

    def __init__(
        self, value: Value, axes: Sequence[Axis | None], conditions: Sequence[Condition] = (), fed: Sequence[Feeder] = ()
    ) -> None:
        self.value = value
        self.axes: Dims = tuple(axes)
        self.conditions = tuple(dict.fromkeys(conditions))
        self.fed = tuple(dict.fromkeys(fed))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the lanes."""
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        """The device of the kernel."""
        return torch.device("cpu")

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.axes)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of lanes of each dim; of a tile's dim its block size."""
        return tuple(1 if a is None else lanes_of(a) for a in self.axes)

    @property
    def expr(self) -> Expr | None:
        """The value as an index expression; None if it is not one."""
        if isinstance(self.value, Number):
            return self.value.expr
        if isinstance(self.value, Constant) and not self.dtype.is_floating_point:
            return const(int(self.value.number))
        return None

    def guard(self, axes: Sequence[Axis] | None = None) -> tuple[Less, ...]:
        """The conditions; or those that mention one of these axes, with the conditions that protect them: the length of a row
        may be read only if the row exists."""
        if axes is None:
            return tuple(c.holds for c in self.conditions)
        kept = [c for c in self.conditions if c.over(axes)]
        looked_up = {s for c in kept for e in c.holds.right.walk() if isinstance(e, Element) for s in e.index.symbols}
        return tuple(c.holds for c in self.conditions if c in kept or (c.holds.left.symbols & looked_up and c not in kept))

    def renamed(self, names: Mapping[Axis, Axis]) -> Traced:
        """Replaces axes by others with the same number of lanes."""
        names = _permutation(names)
        swap = _swaps(names)
        new = Swap(swap, {old.position: axis.position for old, axis in names.items()}).value(self.value)
        conditions = [Condition(c.holds.substitute(swap), c.row) for c in self.conditions]
        fed = [
            Feeder(f.time, tuple(names.get(a, a) for a in f.over), tuple(g.substitute(swap) for g in f.guard)) for f in self.fed
        ]
        return Traced(new, [None if a is None else names.get(a, a) for a in self.axes], conditions, fed)

    def _known(self, what: str) -> Any:
        if isinstance(self.value, Constant):
            return self.value.number
        expr = self.expr
        if expr is not None:
            return current(what).static(expr, what)
        refuse(
            f"{what} a number that is known when the kernel is compiled, but this one is known only when it runs: "
            "use torch.where, an `if` statement, or hl.specialize for a size"
        )

    def __bool__(self) -> bool:
        return bool(self._known("`and`, `or`, `not` and conditional expressions need"))

    def __int__(self) -> int:
        return int(self._known("int() needs"))

    def __float__(self) -> float:
        return float(self._known("float() needs"))

    def __index__(self) -> int:
        return int(self._known("this needs"))

    def item(self) -> Any:
        """The value itself, if it is a scalar."""
        if self.ndim:
            refuse("item() needs a scalar: reduce it first (x.amax(), x.sum())")
        return self

    def __repr__(self) -> str:
        return f"Traced({self.value}, over {list(map(str, self.axes))})"


class LanesOf(int):
    """A block size that a schedule will choose; 0 until then. In shapes it identifies its axis."""

    axis: Axis

    def __new__(cls, axis: Axis, size: int = 0) -> LanesOf:
        made = super().__new__(cls, size)
        made.axis = axis
        return made


def lanes_of(axis: Axis) -> Any:
    """The number of lanes of an axis, usable in shapes: an int if it is fixed."""
    fixed = axis.block if axis.looped else axis.size
    return LanesOf(axis, fixed) if fixed is not None else OpenSize(axis)


class OpenSize(Traced):
    """`tile.block_size` if a schedule will choose it; usable as a number and in shapes."""

    __slots__ = ("axis",)

    def __init__(self, axis: Axis) -> None:
        super().__init__(number(axis.lanes), ())
        self.axis = axis


class TracedTile(Tile):
    """The current block of positions of a loop."""

    __slots__ = ("axis", "conditions")

    def __init__(self, axis: Axis, conditions: Sequence[Condition] = ()) -> None:
        self.axis = axis
        self.conditions = tuple(conditions)

    @property
    def index(self) -> Traced:
        """The positions, one for each lane."""
        end = Condition(Less(self.axis.position, self.axis.end), False)
        return Traced(number(self.axis.position), [self.axis], [end, *self.conditions])

    @property
    def begin(self) -> Traced:
        """The first position."""
        return Traced(number(self.axis.first), ())

    @property
    def end(self) -> Traced:
        """One past the last position."""
        return Traced(number(self.axis.last), ())

    @property
    def id(self) -> Traced:
        """The number of the tile in its loop."""
        return Traced(number(self.axis.number), ())

    @property
    def count(self) -> Traced:
        """The number of tiles of the loop."""
        lanes: Expr = self.axis.lanes
        return Traced(number((self.axis.end - self.axis.begin + lanes - 1) // lanes), ())

    @property
    def block_size(self) -> Any:
        """The number of lanes."""
        return lanes_of(self.axis)

    def __eq__(self, other: object) -> Any:
        return self is other if isinstance(other, TracedTile) else self.index == other

    __hash__ = object.__hash__

    def __getitem__(self, key: Any) -> Any:
        return self.index[key]

    def __repr__(self) -> str:
        return f"TracedTile({self.axis})"


class TracedTensor(TorchLike):
    """A tensor from outside the loop."""

    __slots__ = ("name", "sizes", "tensor", "trace")
    KIND = "a tensor of a kernel"

    def __init__(self, trace: Trace, name: str, tensor: Tensor) -> None:
        self.trace, self.name, self.tensor = trace, name, tensor
        self.sizes = tuple(d.extent_expr for d in tensor.storage)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device of the kernel."""
        return torch.device("cpu")

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.sizes)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes: ints if they are compiled in, else scalar values."""
        return tuple(plain(Traced(number(e), ())) for e in self.sizes)

    def numel(self) -> Any:
        """The number of elements."""
        total = const(1)
        for size in self.sizes:
            total = total * size
        return plain(Traced(number(total), ()))

    def __len__(self) -> int:
        return int(self.shape[0])

    def __setitem__(self, key: Any, x: Any) -> None:
        self.trace.store(self, key, x)

    def __repr__(self) -> str:
        return f"TracedTensor({self.name})"


def plain(x: Traced) -> Any:
    """A known integer as an int; anything else unchanged."""
    expr = x.expr
    return expr.value if expr is not None and expr.value is not None and not x.ndim else x


def shown_axes(axes: Sequence[Axis | None]) -> str:
    """The dims of a value, for messages."""
    return "(" + ", ".join("1" if a is None else str(a) for a in axes) + ")"


class Unset(Lanes):
    """A name that only one branch sets: using it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def refused(self) -> NoReturn:
        """Raises with the reason."""
        refuse(
            f"{self._name} may not be set: the condition of the `if` is known only when the kernel runs; "
            "set it before the loop, or in both branches"
        )

    def __getattr__(self, attribute: str) -> Any:
        self.refused()

    def __bool__(self) -> bool:
        self.refused()

    def __index__(self) -> int:
        self.refused()

    def __getitem__(self, key: Any) -> Any:
        self.refused()

    def __setitem__(self, key: Any, x: Any) -> None:
        self.refused()


def as_traced(x: Any) -> Any:
    """A tile as its positions, a number as a scalar value; anything else unchanged."""
    if isinstance(x, Unset):
        x.refused()
    if isinstance(x, TracedTile):
        return x.index
    if isinstance(x, bool):
        return Traced(constant(x, torch.bool), ())
    if isinstance(x, int):
        return Traced(number(as_expr(int(x))), ())
    if isinstance(x, float):
        return Traced(constant(x, torch.get_default_dtype()), ())
    return x


def _permutation(names: Mapping[Axis, Axis]) -> dict[Axis, Axis]:
    """Extends a renaming to a permutation: an axis that becomes a dim swaps with it, because values may be reduced over it."""
    found, old_of = dict(names), {new: old for old, new in names.items()}
    for new in names.values():
        if new not in found:
            old = old_of[new]
            while old in old_of:
                old = old_of[old]
            found[new] = old
    return found


def _swaps(names: Mapping[Axis, Axis]) -> dict[Expr, Expr]:
    found: dict[Expr, Expr] = {}
    for old, new in names.items():
        # Fixed lanes count from 0, like the lanes of a tile.
        if old.looped and not new.looped:
            found |= {old.position: old.first + new.position, old.lane: new.position}
            continue
        at: Expr = new.lane if new.looped and not old.looped else new.position
        found |= {old.position: at, old.lane: new.lane, old.lanes: new.lanes}
    return found
