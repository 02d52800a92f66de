"""Checks that modules share. In: arguments. Out: errors that say what to pass instead."""

from __future__ import annotations

from typing import Any, TypeAlias

from serrate.errors import CallError, ShapeError
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor

Ragged: TypeAlias = Any
"""A JaggedTensor, or its `TensorView` inside a traced function. Both get their operators when serrate is imported, so type
checkers do not know them."""


def require_rows(module: str, x: Ragged, width: int, name: str = "input") -> None:
    """Raises unless `x` has the dims `[B, r0, width]`."""
    if not isinstance(x, JaggedTensor | TensorView):
        raise CallError(
            f"{module}: {name} must be a JaggedTensor [B, r0, {width}], got a {type(x).__name__}: use "
            "JaggedTensor.from_padded(x, lengths), or torch's own module for dense tensors"
        )
    if len(x.shape) != 3 or x.shape[2] != width:
        raise ShapeError(f"{module}: {name} must have the shape (B, r0, {width}), got {tuple(x.shape)}")


def require_divisible(module: str, name: str, number: int, by_name: str, by: int) -> int:
    """`number // by`; raises unless it is whole and positive."""
    if by <= 0 or number <= 0 or number % by:
        raise ShapeError(f"{module}: {name}={number} must be a positive multiple of {by_name}={by}")
    return number // by
