"""What the holes of an allocated tensor must contain, determined by its readers.

In: a program and one of its tensors, stored with holes. Out: a `Correctness`: weak (holes may contain anything) or strong
(holes contain a given value), with the reason.

A reader is a statement with the loops around it. It depends on the contents of holes only if all of the following hold:

  1. Its loops visit holes: a guard of theirs fails on a domain that the storage was derived from.
  2. The slot exists: the loops run over the storage domains, or over domains derived from them without new holes. Other loops can
     run past the allocation, so they have guards of their own.
  3. It accumulates over an index that the hole is part of. A store goes by address: where the element does not exist, neither
     does the slot that is stored to. An accumulation that keeps the index puts its result for a hole in a hole of its own
     result. Only an accumulation that reduces the index would count the hole.

Then either the reader masks holes, or holes contain a value that is neutral when it is accumulated. For a plain read, that is the
identity of the reduction (0 for a sum, 1 for a product, -inf for a maximum). For softmax it is -inf, because e^(-inf - maximum)
= 0 adds nothing to the total. Moments and arg-reductions have no neutral value, because every element counts. Through
elementwise functions, candidates are tried: a fill value is neutral if the function maps it to the identity. A product of a hole
and another factor is 0 only if that factor is finite. This is known if the factor is a plain read at the same index, which is
out of bounds there too: a guarded read gives 0, and if that tensor is itself stored with holes, this same reader requires 0 in
them or masks the whole statement. All readers must agree on one value. If two need different ones, each masks for itself and
nothing is filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

from serrate.analysis.guards import guards
from serrate.analysis.indices import Indices, ancestry
from serrate.analysis.inspection.allocation import allocation
from serrate.ir import Fusion, TensorView
from serrate.ir.domains import IterDomain
from serrate.ir.expr import symbol
from serrate.ir.tile import Accumulate, Leaf, Library, TileProgram, walk
from serrate.ir.values import Call, Constant, Read, Role, Tensor, Value

Number = float | int | bool


class CorrectnessKind(Enum):
    """The contents of holes."""

    WEAK = "weak"
    """Anything: no reader counts them."""
    STRONG = "strong"
    """The fill value: some reader counts them, and the value is neutral."""


@dataclass(frozen=True)
class Reader:
    """One statement that reads the tensor, and what it requires of the holes."""

    name: str
    counts: bool
    """Whether it would count the contents of holes."""
    fill: Number | None
    """The fill value with which it needs no mask; None if there is none, or if it is irrelevant."""
    why: str


@dataclass(frozen=True)
class Correctness:
    """What the holes of a tensor must contain, and why."""

    kind: CorrectnessKind
    fill: Number | None
    why: str
    readers: tuple[Reader, ...] = ()

    @property
    def masks(self) -> tuple[str, ...]:
        """The readers that count holes and must mask them, because no fill value serves them."""
        return tuple(r.name for r in self.readers if r.counts and self.kind is CorrectnessKind.WEAK)

    def __str__(self) -> str:
        fill = "" if self.fill is None else f", holes hold {self.fill}"
        return "\n  ".join([f"{self.kind.value}{fill}: {self.why}", *(f"{r.name}: {r.why}" for r in self.readers)])


def correctness(source: Fusion | TileProgram, tensor: Tensor | TensorView) -> Correctness:
    """What the holes of `tensor` must contain, from all statements of `source` that read it.

    Takes schedules by hand into account: the tensor's storage (`set_allocation`), and the loops of its readers.

    >>> import torch
    >>> from serrate.ir import IterDomain, split
    >>> from serrate.ir.reductions import reduction
    >>> from serrate.ir.tile import SERIAL, Phase, nest
    >>> from serrate.ir.values import read
    >>> d = IterDomain(6, name="d")
    >>> x = Tensor("x", torch.float32, (d,), split(d, 4))
    >>> y = Tensor("y", torch.float32, (), (), Role.OUTPUT)
    >>> total = Accumulate((y,), (), reduction("sum"), (read(x, (d,)),), (d,))
    >>> tiles = nest(tuple((part, SERIAL) for part in split(d, 4)), total)
    >>> print(correctness(TileProgram("p", (), (y,), (Phase("y", tiles),)), x))
    strong, holes hold 0.0: 0.0 is neutral for every reader that counts holes
      y: sum over d visits the holes of x; 0.0 is its identity
    """
    memory = _as_stored(source, (tensor.tensor if isinstance(tensor, TensorView) else tensor).memory)
    stored = allocation(memory.storage)
    if not stored.guards:
        return Correctness(CorrectnessKind.WEAK, None, f"{memory.name} is stored without holes")
    opened = {g.domain.uid: g.domain for g in stored.guards}
    readers = tuple(
        _reader(name, leaf, loops, memory, opened) for name, leaf, loops in _statements(source) if _reads(leaf, memory)
    )
    return _decided(memory, readers)


def _as_stored(source: Fusion | TileProgram, memory: Tensor) -> Tensor:
    """The tensor with the memory that a schedule has given it: `set_allocation` of a fusion, `allocate` steps of a program."""
    if isinstance(source, Fusion):
        return replace(memory, storage=source.view(memory).domain.allocation)
    own = (t.memory for phase in source.phases for t in (*phase.writes, *phase.reads))
    return next((t for t in own if t.name == memory.name), memory)


def _decided(tensor: Tensor, readers: tuple[Reader, ...]) -> Correctness:
    weak = CorrectnessKind.WEAK
    counting = [r for r in readers if r.counts]
    if not readers:
        return Correctness(weak, None, f"nobody reads {tensor.name}", readers)
    if not counting:
        return Correctness(weak, None, f"no reader of {tensor.name} counts its holes", readers)
    if tensor.role is Role.INPUT:
        return Correctness(weak, None, f"{tensor.name} is the caller's memory and is not filled; readers mask holes", readers)
    if any(r.fill is None for r in counting):
        unserved = ", ".join(r.name for r in counting if r.fill is None)
        return Correctness(weak, None, f"no value is neutral for {unserved}; each reader masks holes", readers)
    fills = {_spelled(r.fill): r.fill for r in counting}
    if len(fills) > 1:
        wanted = ", ".join(f"{r.name} needs {r.fill}" for r in counting)
        return Correctness(weak, None, f"{wanted}; no value suits all readers, so each masks holes", readers)
    fill = counting[0].fill
    return Correctness(CorrectnessKind.STRONG, fill, f"{fill} is neutral for every reader that counts holes", readers)


def _spelled(number: Number | None) -> str:
    """Tells numbers apart as memory does: -0.0 from 0.0, but not 0 from 0.0."""
    return repr(float(number or 0))


def _statements(source: Fusion | TileProgram) -> Iterator[tuple[str, Leaf, tuple[IterDomain, ...]]]:
    """Every statement with its name and the loops around it, as a schedule has left them."""
    if isinstance(source, Fusion):
        for definition in source.definitions:
            if not isinstance(definition.statement, Library):
                target = definition.statement.targets[0]
                yield target.name, definition.statement, source.view(target).domain.loop
        return
    for phase in source.phases:
        for statement, loops in walk(phase.body):
            if isinstance(statement, Leaf):
                yield statement.targets[0].name, statement, tuple(loop.domain for loop in loops)


def _reads(leaf: Leaf, tensor: Tensor) -> bool:
    return any(element.tensor.memory.name == tensor.name for value in leaf.values for element in value.reads)


def _reader(name: str, leaf: Leaf, loops: tuple[IterDomain, ...], tensor: Tensor, opened: dict[int, IterDomain]) -> Reader:
    """What one statement requires of the holes; the rules are numbered as above."""
    visited = {g.domain.uid: g.domain for g in guards((), loops)}
    made_from = {d.uid for t in ancestry(tensor.storage) for d in t.inputs}
    past = [visited[uid] for uid in visited if uid in made_from]
    if not past:
        return Reader(name, False, None, "its loops stay inside the elements")
    if not _inside(loops, tensor, visited.keys()):
        return Reader(name, False, None, f"its loops are not derived from the storage of {tensor.name}, so it has its own guards")
    if not isinstance(leaf, Accumulate):
        return Reader(name, False, None, "it stores by address: nothing is stored where no element exists")
    kept = Indices([(d, symbol(f"@{d.uid}")) for d in leaf.index if d is not None])
    counted = [d for d in past if not kept.knows(d)]
    if not counted:
        return Reader(name, False, None, f"it keeps {', '.join(d.name for d in past)}, so holes stay holes in its result")
    what = f"{leaf.reduction} over {', '.join(d.name for d in leaf.over)} visits the holes of {tensor.name}"
    if any(d.uid not in opened for d in counted):
        return Reader(name, True, None, f"{what}, and runs past the allocation")
    fill = _fill(leaf, tensor, {d.uid for d in counted})
    if fill is None:
        return Reader(name, True, None, f"{what}; any contents would count")
    return Reader(name, True, fill, f"{what}; {_identity_of(leaf, tensor, fill)}")


def _identity_of(leaf: Accumulate, tensor: Tensor, fill: Number) -> str:
    plain = leaf.merge or all(isinstance(_uncast(v), Read) for v in leaf.values)
    return f"{fill} is its identity" if plain else f"{fill} in {tensor.name} makes {leaf.values[0]} its identity"


def _inside(loops: tuple[IterDomain, ...], tensor: Tensor, guarded: Collection[int]) -> bool:
    """Whether the loops reach every storage domain by going back, and nothing they go through can be out of bounds."""
    transforms = ancestry(loops)
    met = {d.uid for d in loops} | {d.uid for t in transforms for d in t.inputs}
    if not all(d.uid in met for d in tensor.storage):
        return False
    made_of: set[int] = {d.uid for d in tensor.storage}
    size = 0
    while size != len(made_of):
        size = len(made_of)
        made_of |= {d.uid for t in transforms if any(s.uid in made_of for s in t.inputs) for d in t.outputs}
    return not any(uid in made_of for uid in guarded)


# --- which value changes nothing -------------------------------------------------------------------------------------------


def _fill(leaf: Accumulate, tensor: Tensor, holes: set[int]) -> Number | None:
    """The fill value that is neutral when a hole is accumulated."""
    if leaf.merge:
        # Whole states are combined: an empty one in every place, each tensor holding its own part of it.
        states = [k for k, value in enumerate(leaf.values) if _is_read(value, tensor)]
        return leaf.reduction.identity(states[0], tensor.dtype) if len(states) == 1 else None
    wanted = leaf.reduction.neutral(leaf.targets[0].dtype)
    if wanted is None:
        return None
    for tried in dict.fromkeys((wanted, 0.0, 1.0, -math.inf, math.inf)):
        candidate = tried if tensor.dtype.is_floating_point else _integer(tried, tensor)
        if candidate is not None and _value_at(leaf.values[0], tensor, candidate, holes) == wanted:
            return candidate
    return None


def _integer(number: Number, tensor: Tensor) -> Number | None:
    """The number in the tensor's own dtype, if it is one."""
    if not math.isfinite(number):
        return None
    return bool(number) if tensor.dtype == torch.bool else int(number)


def _uncast(value: Value) -> Value:
    while isinstance(value, Call) and value.function == "cast":
        value = value.args[0]
    return value


def _is_read(value: Value, tensor: Tensor) -> bool:
    found = _uncast(value)
    return isinstance(found, Read) and found.tensor.memory.name == tensor.name


UNARY: dict[str, Callable[[Number], Number]] = {
    "cast": lambda x: x,
    "neg": lambda x: -x,
    "abs": abs,
    "exp": lambda x: 0.0 if x == -math.inf else math.exp(x),
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "relu": lambda x: max(x, 0.0),
    "square": lambda x: x * x,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": lambda x: 0.0 if x == -math.inf else 1 / (1 + math.exp(-x)),
    "silu": lambda x: 0.0 if x == 0 else math.nan,
    "gelu": lambda x: 0.0 if x == 0 else math.nan,
    "logical_not": lambda x: float(not x),
}
"""Functions of one number whose value at an identity is known; the rest are taken to give anything."""


def _value_at(value: Value, tensor: Tensor, fill: Number, holes: set[int]) -> Number | None:
    """The value where `tensor` holds `fill`; None where it depends on something else."""
    if isinstance(value, Constant):
        return value.number
    if isinstance(value, Read):
        return fill if value.tensor.memory.name == tensor.name else None
    if not isinstance(value, Call):
        return None
    known = [_value_at(v, tensor, fill, holes) for v in value.args]
    if value.function in UNARY and known[0] is not None:
        try:
            return UNARY[value.function](known[0])
        except OverflowError:
            return None
    if value.function == "mul":
        a, b = known
        if a is not None and b is not None:
            return a * b
        other = value.args[0] if a is None else value.args[1]
        return 0.0 if 0 in (a, b) and _is_outside(other, holes) else None
    return None


def _is_outside(value: Value, holes: set[int]) -> bool:
    """Whether a value is a plain read at an index that is out of bounds where the given tensor has a hole."""
    found = _uncast(value)
    return isinstance(found, Read) and any(isinstance(d, IterDomain) and d.uid in holes for d in found.index)
