"""What all operations share: operands, dims, dtypes, and checks that wait for a call.

In: operands of any operation. Out: their fusion, normalised dims, and the checks recorded with the fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from serrate.errors import CallError, DtypeError, ShapeError, TraceError
from serrate.frontend.shapes import shown, size_shown
from serrate.ir.domains import IterDomain
from serrate.ir.fusion import Equal, Fusion, current_fusion
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reordered import counted_by
from serrate.ir.view import TensorView

Number = float | int | bool
Operand = TensorView | Number
Dims = int | Sequence[int]


def fusion_of(*operands: object) -> Fusion:
    for operand in operands:
        if isinstance(operand, TensorView):
            return operand.fusion
    return current_fusion()


class Lifted(TensorView):
    """A Python number that a program reads from memory, so that it can be another one in the next call."""

    __slots__ = ()


def stand_in(operand: Operand) -> Any:
    """Something torch computes result dtypes from: a tensor of one element, or the number itself."""
    if isinstance(operand, Lifted):
        return 1.0
    if isinstance(operand, torch.Tensor):
        # Its numbers would become part of the program, which would not see them change, nor hand it a gradient.
        raise TraceError(
            f"a {operand.dtype} tensor of shape {tuple(operand.shape)} is used that is no argument of the traced function: "
            "give it as an argument, or use a plain number"
        )
    if not isinstance(operand, TensorView) and (isinstance(operand, complex | str) or not hasattr(operand, "__float__")):
        raise NoOperand(f"ragged tensors meet tensors and real numbers, got {operand!r} of type {type(operand).__name__}")
    # Not on the meta device: torch's functions there import its compiler, which takes seconds.
    return torch.ones((1,), dtype=operand.dtype) if isinstance(operand, TensorView) else operand


class NoOperand(CallError):
    """Something that is neither a tensor nor a number, where an operation takes one of them."""


def dim_of(function: str, x: TensorView, dim: int) -> int:
    """A dim counted from the start; `function` is who asks, for the message."""
    if not isinstance(dim, int):
        raise CallError(f"{function}: a dim is an int, got {dim!r} of type {type(dim).__name__}")
    if not -x.ndim <= dim < x.ndim:
        there = f"dims 0 to {x.ndim - 1}, or {-x.ndim} to -1 from the end" if x.ndim else "no dims"
        raise ShapeError(f"{function}: dim {dim} does not exist: a tensor of shape {shown(x)} has {there}")
    return dim % x.ndim


def dims_of(function: str, x: TensorView, dim: Dims | None) -> tuple[int, ...]:
    """Dims counted from the start, each once; all of them where none is named."""
    if dim is None:
        return tuple(range(x.ndim))
    return tuple(
        dict.fromkeys(dim_of(function, x, d) for d in (dim if isinstance(dim, Sequence) and not isinstance(dim, str) else [dim]))
    )


def floating(name: str, x: TensorView) -> torch.dtype:
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name}: takes floating point, got {x.dtype}; convert it first, with .float()")
    return x.dtype


def require_equal(fusion: Fusion, what: str, a: IterDomain, b: IterDomain, later: str | None = None) -> None:
    """Raises unless two dims have one size; `later` is what messages of later calls say instead of `what`."""
    difference = (a.extent_expr - b.extent_expr).value
    if difference is None:
        fusion.checks.append(Equal(a.extent_expr, b.extent_expr, later or what))
    elif difference != 0:
        raise ShapeError(f"{what} differ: {size_shown(fusion, a)} and {size_shown(fusion, b)}")


def counts_rows(x: TensorView, component: IterDomain) -> bool:
    """Whether a dim of `x` is made of rows of `component`, or of rows that its positions are (sentences of a document)."""
    made = component.definition
    counted = {component.uid, *(d.uid for d in (made.inputs if component.is_ragged and isinstance(made, Partition) else ()))}
    return any(isinstance(d, RaggedIterDomain) and d.component.uid in counted for d in x.domains)


def counting(x: TensorView, rows: IterDomain) -> list[int]:
    """The dims of `x` that count the rows of a ragged one, outermost first."""
    if not isinstance(rows, RaggedIterDomain):
        return []
    places = {d.uid: k for k, d in enumerate(x.domains)}
    owners = counted_by(rows)
    if all(d.uid in places for d in owners):
        return [places[d.uid] for d in owners]
    # Sentences of documents: the rows belong to what the documents' rows are parts of.
    for k, part in enumerate(x.domains):
        made = part.definition
        if isinstance(part, RaggedIterDomain) and isinstance(made, Partition) and made.inputs[0].uid == rows.component.uid:
            outer = counting(x, part)
            return [*outer, k] if outer else []
    return []
