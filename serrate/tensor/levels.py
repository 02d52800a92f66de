"""The ways a user may spell offsets or lengths, brought to tensors.

In: a tensor, a sequence of tensors or plain numbers, and the values they describe. Out: one tensor for each spelled level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError
from serrate.tensor.checks.validate import check_values_form

Levels = Tensor | Sequence[Any]
"""Offsets or lengths: a tensor, numbers in a list, or for nested rows a sequence of tensors, outermost first."""


def as_tensors(levels: Levels, values: Tensor) -> tuple[Tensor, ...]:
    """Offsets or lengths as tensors: given tensors must be where the values are, plain numbers come out on the CPU.

    >>> as_tensors([0, 2, 3], torch.zeros(3))
    (tensor([0, 2, 3]),)
    """
    check_values_form(values)
    device = values.device
    if isinstance(levels, Tensor):
        if levels.device != device:
            raise DeviceError(f"values are on {device}, but offsets or lengths on {levels.device}: move one of them")
        return (levels,)
    try:
        tensors = tuple(levels)
    except TypeError:
        raise CallError(f"offsets or lengths must be a tensor, or a sequence; got {type(levels).__name__}") from None
    if not tensors or not isinstance(tensors[0], Tensor):
        return (_numbers(tensors),)
    for level, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise CallError(f"levels of nested rows must all be tensors: level {level} is of type {type(tensor).__name__}")
        if tensor.device != device:
            raise DeviceError(f"values are on {device}, but offsets or lengths on {tensor.device}: move one of them")
    return tensors


def _numbers(given: Sequence[Any]) -> Tensor:
    if not given:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    try:
        return torch.tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CallError(
            f"offsets or lengths given as a list must be ints, or lists of equally many ints for equal parts ({error}); "
            "give levels of varying numbers as one tensor each"
        ) from None
