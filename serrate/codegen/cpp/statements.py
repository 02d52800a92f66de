"""What a block statement is to the nest of loops it is printed in.

In: statements of a loop program. Out: facts: whether statements share a nest, where a lane runs along memory, in which type
a reduction runs and what it begins with.
"""

from __future__ import annotations

import torch

from serrate.codegen.cpp.values import computed
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, const
from serrate.ir.loops import Assign, Block, Dot, Held, Lane, Lanes, Load, Local, Reduce, Running, Write, values_of
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import reduction
from serrate.ir.values import Call, Tensor, Value

MAX_NUMBER = "max_number"
"""An operator of this backend's own: the largest of finite numbers, whatever else there is."""
CLAUSES = {"sum": "+", "prod": "*", "max": "max_nan", "min": "min_nan", MAX_NUMBER: "max", "any": "||", "all": "&&"}


def along(flat: Expr, lane: Lane) -> Expr | None:
    """Where a lane begins in memory, if its positions lie side by side."""
    start = flat.substitute({lane.symbol: const(0)})
    return start if (flat - start) is lane.symbol else None


def unrounded(node: Assign | Reduce | Running | Write) -> Value:
    """What a statement computes; a result that is rounded as it is stored is not rounded before."""
    value = node.value
    if isinstance(node, Write) and isinstance(value, Call) and value.function == "cast" and value.dtype == node.tensor.dtype:
        (wide,) = value.args
        if value.dtype in (torch.bfloat16, torch.float16) and wide.dtype == torch.float32:
            return wide
    return value


def size_of(lanes: Lanes) -> int:
    """Elements of a block."""
    size = 1
    for lane in lanes:
        size *= lane.size
    return size


def owns(domain: IterDomain, tensor: Tensor) -> bool:
    """Whether a domain counts the components of a tensor's rows."""
    return any(isinstance(d, RaggedIterDomain) and d.component.uid == domain.uid for d in tensor.logical)


def wraps(node: Reduce | Running) -> bool:
    """Whether a reduction is one of integers whose overflow wraps, as in torch."""
    return node.operator in ("sum", "prod") and not node.local.dtype.is_floating_point


def accumulated(node: Reduce) -> str:
    """The type a reduction over the innermost lane runs in."""
    return "unsigned long long" if wraps(node) else computed(node.local.dtype)


def identity(node: Reduce) -> float | int | bool:
    """What a reduction begins with."""
    if node.operator == MAX_NUMBER:
        return torch.finfo(node.local.dtype).min
    return reduction(node.operator).identity(0, node.local.dtype)


def clause(node: Reduce) -> str:
    """OpenMP's name of a reduction."""
    if node.operator in ("max", "min") and not node.local.dtype.is_floating_point:
        return node.operator
    return CLAUSES[node.operator]


def locals_of(node: Block) -> set[Local]:
    """The private blocks a statement reads or writes."""
    found = {v.local for value in values_of(node) for v in value.walk() if isinstance(v, Held)}
    if isinstance(node, Assign | Reduce | Dot | Running):
        found.add(node.local)
    if isinstance(node, Running):
        found.add(node.carry)
    return found


def _loads(node: Block) -> list[Load]:
    return [v for value in values_of(node) for v in value.walk() if isinstance(v, Load)]


def _in_another_order(writer: Block, reader: Block) -> bool:
    """Whether a statement reads a private block along other lanes than another one writes it: then in other iterations too."""
    if not isinstance(writer, Assign | Reduce | Running):
        return False
    return any(x.name == writer.local.name and x != writer.local for x in locals_of(reader))


def joins(group: list[Block], node: Block) -> bool:
    """Whether a statement may run in the same nest as the group before it, lane by lane."""
    first = group[0]
    if isinstance(node, Dot) or isinstance(first, Dot) or node.lanes != first.lanes or node.guard != first.guard:
        return False
    read = {v.local for value in values_of(node) for v in value.walk() if isinstance(v, Held)}
    if any(_in_another_order(one, other) for earlier in group for one, other in ((earlier, node), (node, earlier))):
        return False
    loaded = {v.tensor for value in values_of(node) for v in value.walk() if isinstance(v, Load)}
    for earlier in group:
        if isinstance(earlier, Reduce) and earlier.lanes != earlier.local.lanes:
            written = node.local if isinstance(node, Assign | Reduce) else None
            if earlier.local in read or written == earlier.local:
                return False
        if isinstance(earlier, Write) and earlier.tensor in loaded:
            return False
        # What a lane writes, another one may still have to read.
        if isinstance(node, Write) and any(v.index != node.index for v in _loads(earlier) if v.tensor == node.tensor):
            return False
        # A block that an earlier statement reads must not change before all its lanes were read.
        if isinstance(node, Reduce) and node.lanes != node.local.lanes:
            own = {earlier.local} if isinstance(earlier, Assign | Reduce) else set()
            if node.local in locals_of(earlier) - own:
                return False
    return True
