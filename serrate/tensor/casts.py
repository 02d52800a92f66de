"""A ragged tensor with another dtype or on another device: `to`, and torch's short names for it.

In: a ragged tensor. Out: the same rows with converted values. A separate class, because its method names shadow Python's types
(`int`, `float`, `bool`) in the signatures of their class.
"""

from __future__ import annotations

import builtins
from typing import Any, Self

import torch
from torch import Tensor

from serrate.tensor.base import JaggedBase


class Casts(JaggedBase):
    """The methods of `JaggedTensor` that convert values and keep the rows."""

    __slots__ = ()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Converts device or dtype; takes the arguments of `torch.Tensor.to`. Offsets change device, never dtype.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(2)]).to(torch.float64).dtype
        torch.float64
        """
        values = self._values.to(*args, **kwargs)
        if values is self._values:
            return self
        return type(self)(values, self._structure.to(values.device), hints=self._hints)

    def cpu(self) -> Self:
        """Moves values and structure to the host; returns the tensor itself if they are already there.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(2)]).cpu().device
        device(type='cpu')
        """
        return self.to("cpu")

    def cuda(self, device: torch.device | builtins.int | str | None = None, non_blocking: builtins.bool = False) -> Self:
        """Moves values and structure to a GPU: the given one, or torch's current one."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def float(self) -> Self:
        """The values as torch.float32, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).float().dtype
        torch.float32
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """The values as torch.float64."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """The values as torch.float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """The values as torch.bfloat16."""
        return self.to(torch.bfloat16)

    def int(self) -> Self:
        """The values as torch.int32."""
        return self.to(torch.int32)

    def long(self) -> Self:
        """The values as torch.int64."""
        return self.to(torch.int64)

    def bool(self) -> Self:
        """The values as torch.bool."""
        return self.to(torch.bool)

    def short(self) -> Self:
        """The values as torch.int16."""
        return self.to(torch.int16)

    def char(self) -> Self:
        """The values as torch.int8."""
        return self.to(torch.int8)

    def byte(self) -> Self:
        """The values as torch.uint8."""
        return self.to(torch.uint8)

    def type_as(self, other: JaggedBase | Tensor) -> Self:
        """The values with the dtype of another tensor, ragged or not, and the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).type_as(torch.tensor(1)).dtype
        torch.int64
        """
        return self.to(other.dtype)

    def is_floating_point(self) -> builtins.bool:
        """Whether the values are of a floating point dtype.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([1, 2])]).is_floating_point()
        False
        """
        return self.dtype.is_floating_point
