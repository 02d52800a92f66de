"""Helpers shared by all operations: operands, dims, dtypes, and checks made at each call.

In: operands of any operation. Out: their fusion, normalised dims, and the checks recorded with the fusion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.errors import CallError, DtypeError, ShapeError, TraceError
from serrate.frontend.shapes import equal_now, shown, size_shown
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr
from serrate.ir.fusion import Equal, Fusion, current_fusion
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine
from serrate.ir.transforms import Known, Merge
from serrate.ir.values import Place, index_of
from serrate.ir.view import Size, TensorView

Number = float | int | bool
Operand = TensorView | Number | Size
Dims = int | Sequence[int]


def fusion_of(*operands: object) -> Fusion:
    for operand in operands:
        if isinstance(operand, TensorView):
            return operand.fusion
    return current_fusion()


class Lifted(TensorView):
    """A Python number that a program reads from memory, so that it may change between calls."""

    __slots__ = ()


def stand_in(operand: Operand) -> Any:
    """A stand-in from which torch computes result dtypes: a tensor of ones with as many dims, or the number itself."""
    if isinstance(operand, Lifted):
        return 1.0 if operand.dtype.is_floating_point else 1
    if isinstance(operand, Size):
        return 1
    if isinstance(operand, torch.Tensor) and not isinstance(operand, TensorView):
        # Its contents would be baked into the program, which would neither see them change nor pass on gradients.
        raise TraceError(
            f"a {operand.dtype} tensor of shape {tuple(operand.shape)} is not an argument of the traced function: "
            "pass it as an argument, or use a plain number"
        )
    if isinstance(operand, TensorView):
        # Not on the meta device, where torch's functions import its compiler, which takes seconds.
        return torch.ones((2,) * operand.ndim, dtype=operand.dtype, device="cpu")
    if isinstance(operand, complex | str) or not hasattr(operand, "__float__") or getattr(operand, "ndim", None):
        raise InvalidOperand(f"an operand must be a tensor or a real number, got {described(operand)}")
    if isinstance(operand, int) and abs(operand) > sys.float_info.max:
        raise DtypeError(f"no dtype can hold an integer of {operand.bit_length()} bits")
    # Integers that torch cannot hold, or cannot divide by, promote like any other.
    odd = isinstance(operand, int) and not isinstance(operand, bool) and (operand == 0 or not fits(operand, torch.int64))
    return 1 if odd else operand


def fits(number: int, dtype: torch.dtype) -> bool:
    """Whether an integer dtype can hold a number."""
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def described(operand: object) -> str:
    """Describes an invalid operand, for a message."""
    if type(operand).__module__ == "numpy":
        return f"a numpy {type(operand).__name__} of {getattr(operand, 'dtype', '?')}; convert it with torch.from_numpy"
    return f"{operand!r} of type {type(operand).__name__}"


def python_number(operand: Any) -> Any:
    """numpy scalars as Python numbers, which promote alike; anything else unchanged."""
    return operand.item() if type(operand).__module__ == "numpy" and getattr(operand, "ndim", None) == 0 else operand


def torch_dtype(function: Callable[..., Any], *operands: Operand) -> torch.dtype:
    """torch's result dtype for such operands; `DtypeError` if torch rejects them."""
    try:
        found = function(*map(stand_in, operands))
    except RuntimeError as error:
        raise DtypeError(f"{function.__name__}: {error}") from None
    return found if isinstance(found, torch.dtype) else found.dtype


def is_number(operand: Operand) -> bool:
    """Whether an operand is a scalar, compiled in or read from memory, that does not affect the result's dtype."""
    return isinstance(operand, Lifted | Size) or not isinstance(operand, TensorView)


class InvalidOperand(CallError):
    """An operand that is neither a tensor nor a number."""


def dim_of(function: str, x: TensorView, dim: int) -> int:
    """A dim counted from the start; `function` names the caller in the message."""
    if not isinstance(dim, int):
        raise CallError(f"{function}: a dim must be an int, got {dim!r} of type {type(dim).__name__}")
    if not -x.ndim <= dim < x.ndim:
        there = f"dims 0 to {x.ndim - 1}, or {-x.ndim} to -1 from the end" if x.ndim else "no dims"
        raise ShapeError(f"{function}: dim {dim} does not exist: a tensor of shape {shown(x)} has {there}")
    return dim % x.ndim


def dims_of(function: str, x: TensorView, dim: Dims | None) -> tuple[int, ...]:
    """Dims counted from the start, without repeats; all dims if none is given."""
    several = isinstance(dim, Sequence) and not isinstance(dim, str)
    if dim is None or (several and not dim):
        return tuple(range(x.ndim))
    named: Any = dim if several else [dim]
    return tuple(dict.fromkeys(dim_of(function, x, d) for d in named))


def refuse_in_place(name: str, inplace: bool) -> None:
    """In-place eager calls never get here; a traced tensor is an immutable value."""
    if inplace:
        raise TraceError(f"{name}: inplace=True cannot be traced; use the result instead")


def floating(name: str, x: TensorView) -> torch.dtype:
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name}: needs a floating-point dtype, got {x.dtype}; convert it first, with .float()")
    return x.dtype


def require_equal(fusion: Fusion, what: str, a: IterDomain, b: IterDomain, later: str | None = None) -> None:
    """Raises unless two dims have equal sizes; `later` replaces `what` in messages of later calls."""
    if not equal_now(fusion, a, b):
        raise ShapeError(f"{what} differ: {size_shown(fusion, a)} and {size_shown(fusion, b)}")
    if a.extent_expr is not b.extent_expr:
        fusion.checks.append(Equal(a.extent_expr, b.extent_expr, later or what))


# --- which dim owns which rows -----------------------------------------------------------------------------------------


def row_of(x: TensorView, dim: int) -> Place | None:
    """The row of ragged dim `dim` that an element of `x` lies in: an expression over the indices of the dims that own the rows.

    This is the one rule of ownership: the index of the component selects the row, and is computed from dims of `x`. Those are the
    component itself, domains it was merged or combined from (experts > ranks > tokens), or the parts that it was partitioned
    into (documents > sentences > words). None if `dim` is regular, or if `x` lacks the dims that own its rows.
    """
    rows = x.domains[dim]
    return _index_of(x, rows.component) if isinstance(rows, RaggedIterDomain) else None


def _index_of(x: TensorView, component: IterDomain) -> Place | None:
    if any(d.uid == component.uid for d in x.domains):
        return Place(index_of(component), (component,))
    made = component.definition
    if isinstance(made, Merge | Combine):
        return _follows([(d, _index_of(x, d)) for d in made.inputs], made.to_outputs)
    # Sentences of documents: the component that indexes words was itself partitioned.
    for part in x.domains:
        made = part.definition
        if isinstance(part, RaggedIterDomain) and isinstance(made, Partition) and made.inputs[0].uid == component.uid:
            outer = [(d, _index_of(x, d)) for d in (*made.outputs[:1], *made.beside)]
            return _follows([*outer, (part, Place(index_of(part), (part,)))], made.to_inputs)
    return None


def _follows(known: Sequence[tuple[IterDomain, Place | None]], rule: Callable[[Known], tuple[Expr, ...]]) -> Place | None:
    places = {d.uid: place for d, place in known if place is not None}
    if len(places) < len({d.uid for d, _ in known}):
        return None
    (expr,) = rule({uid: place.expr for uid, place in places.items()})
    return Place(expr, tuple({d.uid: d for place in places.values() for d in place.domains}.values()))


def counting(x: TensorView, dim: int) -> list[int]:
    """The dims of `x` that own the rows of ragged dim `dim`, outermost first; together they select the row."""
    row = row_of(x, dim)
    places = {d.uid: k for k, d in enumerate(x.domains)}
    return [] if row is None else [places[d.uid] for d in row.domains]


def counted(x: TensorView, dim: int) -> list[int]:
    """The ragged dims of `x` whose rows dim `dim` owns, alone or together with others."""
    return [k for k in range(x.ndim) if dim in counting(x, k)]
