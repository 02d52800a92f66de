"""Python's operators on a ragged tensor, and names that it does not have: each leads to what runs, or to what to do instead.

In: an operator, or the name of a missing attribute. Out: the torch function of that operator, called; an AttributeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from serrate.errors import CallError

_ELSEWHERE = {
    "flat_values": "jt.values",
    "row_splits": "jt.offsets",
    "nested_row_splits": "jt.structure.offsets",
    "row_lengths": "jt.lengths",
    "value_rowids": "jt.row_ids()",
    "nrows": "len(jt)",
    "ragged_rank": "jt.structure.levels",
    "bounding_shape": "jt.max_length",
    "to_tensor": "jt.to_padded(fill)",
    "to_padded_tensor": "jt.to_padded(fill)",
    "to_padded_dense": "jt.to_padded(fill)",
    "to_dense": "jt.to_list() for the rows, jt.to_padded(fill) for one tensor",
    "merge_dims": "jt.flatten(start_dim, end_dim)",
    "weights": "jt.with_values(weights), a second tensor with the same rows",
    "numpy": "jt.to_numpy() for the rows, jt.values.numpy() for all elements",
    "item": "jt.values.item()",
    "grad": "jt.values.grad: gradients belong to the values",
    "view": "jt.flatten, jt.unsqueeze, or jt.with_values(jt.values.view(...))",
    "reshape": "jt.flatten, jt.unsqueeze, or jt.with_values(jt.values.reshape(...))",
    "unflatten": "jt.with_values(jt.values.unflatten(...))",
    "movedim": "torch.movedim(jt, source, destination)",
    "swapaxes": "jt.transpose(dim0, dim1)",
    "tensor_split": "torch.tensor_split(jt, sections)",
    "nelement": "jt.numel()",
    "ndimension": "jt.dim()",
    "is_nested": "jt.structure.levels, the number of ragged levels",
    "is_cuda": "jt.device",
    "is_contiguous": "jt.format, which is 'csr' for rows back to back",
    "type": "jt.to(dtype)",
    "type_as": "jt.to(other.dtype)",
    "new_zeros": "jt.values.new_zeros, or torch.zeros_like(jt) for the same rows",
    "narrow": "jt[a:b], jt[:, a:b]",
    "masked_select": "jt[mask], with a ragged mask",
    "masked_fill": "jt[mask] = x, with a ragged mask",
}
"""What torch.nested, TorchRec and TensorFlow call it, and torch where the general answer would mislead."""


def _unary(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda self: torch.overrides.handle_torch_function(function, (self,), self)


def _binary(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: torch.overrides.handle_torch_function(function, (self, other), self, other)


def _reflected(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: torch.overrides.handle_torch_function(function, (self, other), other, self)


class Operators:
    """Operators of a `JaggedTensor`: those of torch, by way of `__torch_function__`, which runs or refuses them.

    >>> from serrate import JaggedTensor
    >>> JaggedTensor.from_list([torch.ones(2)]) + 1  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.CallError: torch.add does not take a JaggedTensor outside of serrate.jit: ...
    """

    __slots__ = ()

    __neg__ = _unary(torch.neg)
    __pos__ = _unary(torch.positive)
    __abs__ = _unary(torch.abs)
    __invert__ = _unary(torch.bitwise_not)
    __add__, __radd__ = _binary(torch.add), _reflected(torch.add)
    __sub__, __rsub__ = _binary(torch.sub), _reflected(torch.sub)
    __mul__, __rmul__ = _binary(torch.mul), _reflected(torch.mul)
    __truediv__, __rtruediv__ = _binary(torch.div), _reflected(torch.div)
    __floordiv__, __rfloordiv__ = _binary(torch.floor_divide), _reflected(torch.floor_divide)
    __mod__, __rmod__ = _binary(torch.remainder), _reflected(torch.remainder)
    __pow__, __rpow__ = _binary(torch.pow), _reflected(torch.pow)
    __matmul__, __rmatmul__ = _binary(torch.matmul), _reflected(torch.matmul)
    __and__, __rand__ = _binary(torch.bitwise_and), _reflected(torch.bitwise_and)
    __or__, __ror__ = _binary(torch.bitwise_or), _reflected(torch.bitwise_or)
    __xor__, __rxor__ = _binary(torch.bitwise_xor), _reflected(torch.bitwise_xor)
    __lt__, __le__ = _binary(torch.lt), _binary(torch.le)
    __gt__, __ge__ = _binary(torch.gt), _binary(torch.ge)
    # A tensor's == compares elements: identity, which Python would put here, would be a wrong answer and no error.
    __eq__ = _binary(torch.eq)
    __ne__ = _binary(torch.ne)
    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise CallError("a JaggedTensor is neither true nor false: ask len(jt), jt.numel(), or torch.equal(jt, other)")

    if not TYPE_CHECKING:  # a type checker would take it for every attribute there could be

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"JaggedTensor has no attribute {name!r}{_instead(name)}", name=name, obj=self)


def _instead(name: str) -> str:
    if name in _ELSEWHERE:
        return f": use {_ELSEWHERE[name]}"
    if name.startswith("_") or not hasattr(torch.Tensor, name):
        return ""
    return (
        ": its parts are tensors and have it, jt.values, the rows of jt.unbind() and jt.to_padded(); operations on the whole "
        "are traced, in a function under @serrate.jit"
    )
