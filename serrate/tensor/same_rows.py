"""The same rows with other values: copies, other dtypes and devices, hints; written in place, and compared.

In: a ragged tensor. Out: `SameRows`, the part of `JaggedTensor` whose results have the rows of what they are made of.
"""

from __future__ import annotations

import builtins
from typing import Any, Self

import torch
from torch import Tensor

from serrate.errors import GradientError, StructureMismatch
from serrate.tensor.accessors import Accessors
from serrate.tensor.bridges import Bridges
from serrate.tensor.hints import AccessPattern, Distribution, Reuse, more_hints
from serrate.tensor.indexing.writing import setitem


class SameRows(Bridges):
    """Methods of a `JaggedTensor` that keep its rows."""

    __slots__ = ()

    def with_values(self, values: Tensor) -> Self:
        """Other values with the same structure and hints.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).with_values(torch.zeros(3, 5)).shape
        (2, r0, 5)
        """
        self._structure.check_values(values)
        made = type(self).__new__(type(self))
        made._values, made._structure, made._hints = values, self._structure, self._hints
        return made

    def with_hint(
        self,
        *,
        distribution: Distribution | None = None,
        access_pattern: AccessPattern | None = None,
        reuse: Reuse | None = None,
        **unknown: Any,
    ) -> Self:
        """The same tensor with advice for the tuner, beside what was advised before; it never changes a result.

        Hints are checked and kept, but no plan is chosen by them yet. They stay through whatever keeps the rows or takes a part
        of them; `serrate.tensor.hints` has the words.

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

    def short(self) -> Self:
        """The values as torch.int16, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).short().dtype
        torch.int16
        """
        return self.to(torch.int16)

    def char(self) -> Self:
        """The values as torch.int8, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).char().dtype
        torch.int8
        """
        return self.to(torch.int8)

    def byte(self) -> Self:
        """The values as torch.uint8, with the same rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([0.5, 1])]).byte().dtype
        torch.uint8
        """
        return self.to(torch.uint8)

    def type_as(self, other: Accessors | Tensor) -> Self:
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

    def equal(self, other: Any) -> builtins.bool:
        """Whether another ragged tensor has the same rows and the same elements.

        >>> from serrate import JaggedTensor
        >>> jt = JaggedTensor.from_list([torch.tensor([1, 2])])
        >>> jt.equal(jt.clone())
        True
        """
        same: Any = torch.equal  # torch's own signature knows tensors of its own only
        return builtins.bool(same(self, other))

    def allclose(
        self,
        other: Any,
        rtol: builtins.float = 1e-05,
        atol: builtins.float = 1e-08,
        equal_nan: builtins.bool = False,
    ) -> builtins.bool:
        """Whether another ragged tensor has the same rows and elements that are near.

        >>> from serrate import JaggedTensor
        >>> jt = JaggedTensor.from_list([torch.tensor([1.0, 2.0])])
        >>> jt.allclose(jt.with_values(jt.values + 1e-7))
        True
        """
        near: Any = torch.allclose
        return builtins.bool(near(self, other, rtol, atol, equal_nan))

    def zero_(self) -> Self:
        """Every element 0, in place; what lies between rows is left as it is.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([1, 2])]).zero_().values
        tensor([0, 0])
        """
        return self.fill_(0)

    def fill_(self, value: Any) -> Self:
        """Every element `value`, in place; what lies between rows is left as it is.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.tensor([1, 2])]).fill_(7).values
        tensor([7, 7])
        """
        self._check_writable()
        setitem(self._values, self._structure, ..., value)
        return self

    def copy_(self, src: Any, non_blocking: builtins.bool = False) -> Self:
        """The elements of `src`, which has the same rows or is one tensor for all, in place.

        >>> from serrate import JaggedTensor
        >>> jt = JaggedTensor.from_list([torch.tensor([1, 2])])
        >>> jt.copy_(jt.with_values(torch.tensor([3, 4]))).values
        tensor([3, 4])
        """
        self._check_writable()
        if isinstance(src, SameRows):
            if tuple(map(str, src.shape)) != tuple(map(str, self.shape)) or not src._structure.same_rows(self._structure):
                raise StructureMismatch(f"copy_: the rows of {src._structure} are not those of {self._structure}")
            src = src.to(self.device, self.dtype)
        setitem(self._values, self._structure, ..., src)
        return self

    def _check_writable(self) -> None:
        if self.requires_grad and torch.is_grad_enabled():
            raise GradientError("what requires a gradient cannot be written to in place; do it under torch.no_grad()")
