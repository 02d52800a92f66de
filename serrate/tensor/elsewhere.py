"""Names that torch and other libraries have and a ragged tensor has not: what to write instead.

In: the name of an attribute that does not exist. Out: an AttributeError that says what does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

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
    "movedim": "torch.movedim(jt, source, destination)",
    "tensor_split": "torch.tensor_split(jt, sections)",
    "nelement": "jt.numel()",
    "ndimension": "jt.dim()",
    "is_nested": "jt.structure.levels, the number of ragged levels",
    "is_cuda": "jt.device",
    "is_contiguous": "jt.format, which is 'csr' for rows back to back",
    "type": "jt.to(dtype)",
    "new_zeros": "jt.values.new_zeros, or torch.zeros_like(jt) for the same rows",
    "masked_select": "jt[mask], with a ragged mask",
}
"""What torch.nested, TorchRec and TensorFlow call it, and torch where the general answer would mislead."""


class Elsewhere:
    """What a `JaggedTensor` answers to names it does not have, and to whoever asks whether it is true.

    >>> from serrate import JaggedTensor
    >>> JaggedTensor.from_list([torch.ones(2)]).row_splits
    Traceback (most recent call last):
    AttributeError: JaggedTensor has no attribute 'row_splits': use jt.offsets
    """

    __slots__ = ()

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
    return ": its parts are tensors and have it: jt.values, the rows of jt.unbind(), and jt.to_padded()"
