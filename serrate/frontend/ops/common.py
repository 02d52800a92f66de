"""What all operations share: operands, dims, dtypes, and checks that wait for a call.

In: operands of any operation. Out: their fusion, normalised dims, and the checks recorded with the fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from serrate.errors import DtypeError, ShapeError, TraceError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Environment
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
    # Not on the meta device: torch's functions there import its compiler, which takes seconds.
    return torch.ones((1,), dtype=operand.dtype) if isinstance(operand, TensorView) else operand


def shown(x: TensorView) -> str:
    """The shape of a traced tensor as its user sees it: `(3, r0, 64)`; what only a call tells is shown by name."""
    ragged = iter(range(x.ndim))
    sizes = [f"r{next(ragged)}" if d.is_ragged else size_shown(x.fusion, d) for d in x.domains]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def size_shown(fusion: Fusion, domain: IterDomain) -> str:
    """An extent in the call that is being traced, if it is known by then."""
    extent = domain.extent_expr
    known = not extent.arrays and extent.symbols <= fusion.sizes.keys()
    return str(extent.evaluate(Environment(fusion.sizes)) if known else domain.extent)


def dim_of(function: str, x: TensorView, dim: int) -> int:
    """A dim counted from the start; `function` is who asks, for the message."""
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"{function}: dim {dim} is out of range for a tensor of {x.ndim} dims")
    return dim % x.ndim


def dims_of(function: str, x: TensorView, dim: Dims | None) -> tuple[int, ...]:
    """Dims counted from the start, each once; all of them where none is named."""
    if dim is None:
        return tuple(range(x.ndim))
    return tuple(dict.fromkeys(dim_of(function, x, d) for d in ([dim] if isinstance(dim, int) else dim)))


def floating(name: str, x: TensorView) -> torch.dtype:
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name}: takes floating point, got {x.dtype}; cast first")
    return x.dtype


def require_equal(fusion: Fusion, what: str, a: IterDomain, b: IterDomain) -> None:
    difference = (a.extent_expr - b.extent_expr).value
    if difference is None:
        fusion.checks.append(Equal(a.extent_expr, b.extent_expr, what))
    elif difference != 0:
        raise ShapeError(f"{what}: {a.extent} and {b.extent} differ")


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
