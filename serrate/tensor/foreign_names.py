"""What to write instead of attribute names that other libraries have and a ragged tensor does not.

In: the name of a missing attribute. Out: a suggestion for the AttributeError.
"""

from __future__ import annotations

import torch

_INSTEAD = {
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
    "movedim": "torch.movedim(jt, source, destination)",
    "tensor_split": "torch.tensor_split(jt, sections)",
    "nelement": "jt.numel()",
    "ndimension": "jt.dim()",
    "is_nested": (
        "jt.structure.levels, the number of ragged levels. torch's nn.MultiheadAttention and nn.Transformer layers read it and "
        "do not take ragged tensors: serrate.nn.MultiheadAttention and serrate.nn.TransformerEncoderLayer do, with the same "
        "parameters"
    ),
    "is_cuda": "jt.device",
    "is_contiguous": "jt.format, which is 'csr' for rows back to back",
    "type": "jt.to(dtype)",
    "new_empty": "jt.values.new_empty, or torch.empty_like(jt) for the same rows",
    "new_zeros": "jt.values.new_zeros, or torch.zeros_like(jt) for the same rows",
    "masked_select": "jt[mask], with a ragged mask",
}
"""Names from torch.nested, TorchRec and TensorFlow, and those of torch for which the general answer would mislead."""


def instead_of(name: str) -> str:
    """The end of the message about a missing attribute; empty if there is nothing to suggest.

    >>> instead_of("row_splits")
    ': use jt.offsets'
    """
    if name in _INSTEAD:
        return f": use {_INSTEAD[name]}"
    if name.startswith("_") or not hasattr(torch.Tensor, name):
        return ""
    return ": tensors have it; use it on jt.values, on the rows of jt.unbind(), or on jt.to_padded()"
