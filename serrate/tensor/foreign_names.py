"""What to write instead of names that torch and other libraries have and a ragged tensor does not.

In: the name of a missing attribute, or of a torch function that does not take ragged tensors. Out: a suggestion for the message.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from serrate.errors import CallError
from serrate.ir.callers import outside

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
    "mT": "jt.transpose(-1, -2)",
}
"""Names from torch.nested, TorchRec and TensorFlow, and those of torch for which the general answer would mislead."""


class Idiom(NamedTuple):
    """Code that does for rows what a function of torch does for a tensor."""

    code: str
    what: str = ""
    traced: bool = True
    """Whether it works in traced functions."""


_SHIFTED = "jt - jt.amax(1, keepdim=True)"
IDIOMS = {
    "roll": Idiom("torch.cat([jt[:, -1:], jt[:, :-1]], dim=1)", "which rolls every row by 1"),
    "logcumsumexp": Idiom(
        f"torch.exp({_SHIFTED}).cumsum(1).log() + jt.amax(1, keepdim=True)", "unless values of a row are very far apart"
    ),
    "cdist": Idiom("torch.linalg.vector_norm(jt.unsqueeze(2) - jt.unsqueeze(1), dim=-1)", "for all pairs within each row"),
    "searchsorted": Idiom("torch.bucketize(jt, boundaries)"),
    "masked_select": Idiom("jt[mask].values", "with one bool for each position", traced=False),
    "unique": Idiom("[row.unique() for row in jt.unbind()]", "or jt.values.unique()", traced=False),
    "nonzero": Idiom("[row.nonzero() for row in jt.unbind()]", traced=False),
    "argwhere": Idiom("[row.nonzero() for row in jt.unbind()]", traced=False),
    "median": Idiom("torch.stack([row.median(0).values for row in jt.unbind()])", "if no row is empty", traced=False),
    "nanmedian": Idiom("torch.stack([row.nanmedian(0).values for row in jt.unbind()])", "if no row is empty", traced=False),
    "mode": Idiom("torch.stack([row.mode(0).values for row in jt.unbind()])", "if no row is empty", traced=False),
    "quantile": Idiom("torch.stack([row.quantile(q, dim=0) for row in jt.unbind()])", "if no row is empty", traced=False),
    "nanquantile": Idiom("torch.stack([row.nanquantile(q, dim=0) for row in jt.unbind()])", "if no row is empty", traced=False),
    "bincount": Idiom("torch.bincount(jt.values)", traced=False),
    "batch_norm": Idiom("jt.with_values(layer(jt.values))", "with the layer, such as nn.BatchNorm1d", traced=False),
}
_PACKED = "torch.nn.utils.rnn.pack_sequence(jt.unbind(), enforce_sorted=False)"
IDIOMS |= dict.fromkeys(
    ("gru", "lstm", "rnn_tanh", "rnn_relu"),
    Idiom(f"JaggedTensor.from_list(torch.nn.utils.rnn.unpack_sequence(rnn({_PACKED})[0]))", "if no row is empty", traced=False),
)
"""By the names of functions and methods."""


def idiom_of(name: str) -> str:
    """What to write instead of a function of torch, by its name with or without modules; empty if there is nothing to suggest.

    >>> idiom_of("torch.functional.unique")
    'write [row.unique() for row in jt.unbind()], or jt.values.unique()'
    """
    idiom = IDIOMS.get(name.rpartition(".")[2])
    return "" if idiom is None else ", ".join(filter(None, (f"write {idiom.code}", idiom.what)))


def refuse_recurrent(size: object) -> None:
    """Raises if torch's recurrent layers ask for the size of a ragged dim: they would pass it to a function that says less."""
    if outside().f_globals.get("__name__") == "torch.nn.modules.rnn":
        raise CallError(
            f"torch's recurrent layers do not take ragged tensors, whose size {size} differs from row to row: {idiom_of('gru')}"
        )


def instead_of(name: str) -> str:
    """The end of the message about a missing attribute; empty if there is nothing to suggest.

    >>> instead_of("row_splits")
    ': use jt.offsets'
    """
    if name in _INSTEAD:
        return f": use {_INSTEAD[name]}"
    if name in IDIOMS:
        return f": {idiom_of(name)}"
    if name.startswith("_") or not hasattr(torch.Tensor, name):
        return ""
    return ": tensors have it; use it on jt.values, on the rows of jt.unbind(), or on jt.to_padded()"
