"""The ways a user may spell offsets or lengths, brought to tensors.

In: a tensor, a sequence of tensors or plain numbers, and the values they describe. Out: one tensor for each spelled level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import DeviceError
from serrate.tensor.validate import check_values_form

Levels = Tensor | Sequence[Any]
"""Offsets or lengths: a tensor, numbers in a list, or for nested rows a sequence of tensors, outermost first."""


def as_tensors(levels: Levels, values: Tensor) -> tuple[Tensor, ...]:
    """Offsets or lengths as tensors: given tensors must be where the values are, plain numbers come out on the CPU.

    >>> as_tensors([0, 2, 3], torch.zeros(3))
    (tensor([0, 2, 3]),)
    """
    check_values_form(values)
    if isinstance(levels, Tensor):
        tensors: tuple[Tensor, ...] = (levels,)
    elif len(levels) and all(isinstance(level, Tensor) for level in levels):
        tensors = tuple(levels)
    else:
        return (torch.tensor(levels, dtype=None if len(levels) else torch.int64),)
    for tensor in tensors:
        if tensor.device != values.device:
            raise DeviceError(f"values are on {values.device}, but offsets or lengths on {tensor.device}: move one of them")
    return tensors
