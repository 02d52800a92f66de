"""The same rows with other values: copies, other dtypes and devices, hints.

In: a ragged tensor. Out: `SameRows`, the part of `JaggedTensor` whose results have the rows of what they are made of.
"""

from __future__ import annotations

import builtins
from typing import Any, Self

import torch
from torch import Tensor

from serrate.tensor.bridges import Bridges
from serrate.tensor.hints import AccessPattern, Distribution, Reuse, more_hints


class SameRows(Bridges):
    """Methods of a `JaggedTensor` that keep its rows."""

    __slots__ = ()

    def with_values(self, values: Tensor) -> Self:
        """Other values with the same structure and hints.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).with_values(torch.zeros(3, 5)).shape
        (2, r0, 5)
        """
        return type(self)(values, self._structure, hints=self._hints)

    def with_hint(
        self,
        *,
        distribution: Distribution | None = None,
        access_pattern: AccessPattern | None = None,
        reuse: Reuse | None = None,
        **unknown: Any,
    ) -> Self:
        """The same tensor with advice for the tuner, beside what was advised before; it never changes a result.

        Hints stay through whatever keeps the rows or takes a part of them; `serrate.tensor.hints` has the words.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(2)]).with_hint(distribution="uniform", reuse="high").hints
        Hints(distribution='uniform', reuse='high')
        """
        told = {"distribution": distribution, "access_pattern": access_pattern, "reuse": reuse, **unknown}
        return type(self)(self._values, self._structure, hints=more_hints(self._hints, told))

    def detach(self) -> Self:
        """The same values, cut off from the gradient's history.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(2, requires_grad=True)]).detach().requires_grad
        False
        """
        return self.with_values(self._values.detach())

    def requires_grad_(self, requires_grad: builtins.bool = True) -> Self:
        """Asks for gradients of the values; the tensor itself.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(2)]).requires_grad_().values.requires_grad
        True
        """
        self._values.requires_grad_(requires_grad)
        return self

    def clone(self) -> Self:
        """A copy of the values with the same structure, which never changes and is shared.

        >>> from serrate import JaggedTensor
        >>> jt = JaggedTensor.from_list([torch.zeros(2)])
        >>> jt.clone().structure is jt.structure
        True
        """
        return self.with_values(self._values.clone())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """On another device or with another dtype: the arguments of `torch.Tensor.to`. Offsets follow the device only.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(2)]).to(torch.float64).dtype
        torch.float64
        """
        values = self._values.to(*args, **kwargs)
        if values is self._values:
            return self
        return type(self)(values, self._structure.to(values.device), hints=self._hints)

    def cpu(self) -> Self:
        """Values and structure on the host; itself if they are there.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(2)]).cpu().device
        device(type='cpu')
        """
        return self.to("cpu")

    def cuda(self, device: torch.device | builtins.int | str | None = None, non_blocking: builtins.bool = False) -> Self:
        """Values and structure on a GPU: this one, or torch's current one."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def float(self) -> Self:
        """The values as torch.float32, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).float().dtype
        torch.float32
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """The values as torch.float64, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).double().dtype
        torch.float64
        """
        return self.to(torch.float64)

    def half(self) -> Self:
        """The values as torch.float16, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).half().dtype
        torch.float16
        """
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """The values as torch.bfloat16, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).bfloat16().dtype
        torch.bfloat16
        """
        return self.to(torch.bfloat16)

    def int(self) -> Self:
        """The values as torch.int32, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).int().dtype
        torch.int32
        """
        return self.to(torch.int32)

    def long(self) -> Self:
        """The values as torch.int64, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).long().dtype
        torch.int64
        """
        return self.to(torch.int64)

    def bool(self) -> Self:
        """The values as torch.bool, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).bool().dtype
        torch.bool
        """
        return self.to(torch.bool)
