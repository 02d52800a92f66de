"""Facts about block statements that decide how their loop nests are printed.

In: statements of a loop program. Out: where a lane is contiguous in memory, the type a reduction runs in, and its initial value.
"""

from __future__ import annotations

import torch

from serrate.codegen.cpp.values import computed
from serrate.ir.expr import Expr, const
from serrate.ir.loops import MAX_NUMBER, Assign, Lane, Lanes, Reduce, Running, Write, identity_of
from serrate.ir.values import Call, Value

CLAUSES = {"sum": "+", "prod": "*", "max": "max_nan", "min": "min_nan", MAX_NUMBER: "max", "any": "||", "all": "&&"}


def along(flat: Expr, lane: Lane) -> Expr | None:
    """The start of a lane in memory, if its positions are contiguous."""
    start = flat.substitute({lane.symbol: const(0)})
    return start if (flat - start) is lane.symbol else None


def unrounded(node: Assign | Reduce | Running | Write) -> Value:
    """The value a statement computes; a result that the store rounds is not rounded first."""
    value = node.value
    if isinstance(node, Write) and isinstance(value, Call) and value.function == "cast" and value.dtype == node.tensor.dtype:
        (wide,) = value.args
        if value.dtype in (torch.bfloat16, torch.float16) and wide.dtype == torch.float32:
            return wide
    return value


def size_of(lanes: Lanes) -> int:
    """The number of elements of a block."""
    size = 1
    for lane in lanes:
        size *= lane.size
    return size


def wraps(node: Reduce | Running) -> bool:
    """Whether a reduction is over integers whose overflow wraps, as in torch."""
    return node.operator in ("sum", "prod") and not node.local.dtype.is_floating_point


def accumulated(node: Reduce) -> str:
    """The type a reduction over the innermost lane runs in."""
    return "unsigned long long" if wraps(node) else computed(node.local.dtype)


def identity(node: Reduce) -> float | int | bool:
    """The initial value of a reduction."""
    return identity_of(node.operator, node.local.dtype)


def clause(node: Reduce) -> str:
    """OpenMP's name of a reduction."""
    if node.operator in ("max", "min") and not node.local.dtype.is_floating_point:
        return node.operator
    return CLAUSES[node.operator]
