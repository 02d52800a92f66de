"""Peers that pad: torch's NestedTensor, and padded tensors with a mask, both plain and under torch.compile.

In: a task. Out: methods for it, unless padding would need more memory than the machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.data import Ragged, is_element, padded
from benchmarks.methods import Method, both, quiet, too_large
from benchmarks.tasks import Task


def methods(task: Task, compiled: bool) -> list[Method]:
    found: list[Method] = []
    reason = too_large(task.data)
    if task.kind in _NESTED:
        elements = task.kind in ("pointwise", "softmax", "layer norm", "from_padded")
        of = _nested_values if elements else _as_is
        # elementwise operations on a NestedTensor do not pad
        why = "" if task.kind == "pointwise" else reason
        found += both("NestedTensor", _NESTED[task.kind], lambda: _nested_arguments(task), of, why, compiled)
    if task.kind in _MASKED:
        found += both(_name(task), _MASKED[task.kind], lambda: _masked_arguments(task), _unpadded(task), reason, compiled)
    return found


# --- NestedTensor --------------------------------------------------------------------------------------------------------

_NESTED: dict[str, Callable[..., Any]] = {
    "sum": lambda nested: nested.sum(dim=1),
    "mean": lambda nested: nested.mean(dim=1),
    "max": lambda nested: nested.amax(dim=1),
    "pointwise": lambda nested, scale, bias: torch.relu(nested * scale + bias),
    "softmax": lambda nested: torch.softmax(nested, dim=1),
    "logsumexp": lambda nested: torch.logsumexp(nested, dim=1),
    "layer norm": lambda nested, epsilon: functional.layer_norm(nested, nested.shape[1:], eps=epsilon),
    "to_padded": lambda nested: nested.to_padded_tensor(0.0),
    "jagged + dense": lambda nested, dense: nested.to_padded_tensor(0.0) + dense,
    "from_padded": lambda dense, starts, lengths: torch.nested.narrow(
        dense, 1, starts, lengths, layout=torch.jagged
    ).contiguous(),
}


def _nested_arguments(task: Task) -> tuple[Any, ...]:
    data = task.data
    if task.kind == "from_padded":
        return task.operands[0], torch.zeros_like(data.lengths), data.lengths
    return nested(data), *task.operands


def nested(data: Ragged) -> Tensor:
    """The rows as a NestedTensor with its longest row supplied; otherwise it pads every row to the total of all rows."""
    quiet()
    return torch.nested.nested_tensor_from_jagged(data.values, data.offsets, min_seqlen=1, max_seqlen=data.longest)


def _nested_values(result: Tensor) -> Tensor:
    return result.values()


def _as_is(result: Tensor) -> Tensor:
    return result


# --- padded and masked ---------------------------------------------------------------------------------------------------


def _masked_layer_norm(dense: Tensor, mask: Tensor, lengths: Tensor, epsilon: float) -> Tensor:
    counts = (lengths * dense.shape[2]).to(dense.dtype)[:, None, None]
    centred = (dense - dense.sum(dim=(1, 2), keepdim=True) / counts) * mask
    return centred * torch.rsqrt((centred * centred).sum(dim=(1, 2), keepdim=True) / counts + epsilon)


_MASKED: dict[str, Callable[..., Tensor]] = {
    "sum": lambda dense, mask, lengths: dense.sum(dim=1),
    "mean": lambda dense, mask, lengths: dense.sum(dim=1) / lengths[:, None].to(dense.dtype),
    "max": lambda dense, mask, lengths: dense.amax(dim=1),
    "pointwise": lambda dense, mask, lengths, scale, bias: torch.relu(dense * scale + bias),
    "softmax": lambda dense, mask, lengths: torch.softmax(dense, dim=1),
    "logsumexp": lambda dense, mask, lengths: torch.logsumexp(dense, dim=1),
    "layer norm": _masked_layer_norm,
    "from_padded": lambda dense, mask, lengths, same: dense[mask],
    "grouped matmul": lambda dense, mask, lengths, weights: torch.bmm(dense, weights),
}
_FILLER = {"max": float("-inf"), "softmax": float("-inf"), "logsumexp": float("-inf")}


def _name(task: Task) -> str:
    return {"grouped matmul": "padded bmm", "from_padded": "boolean mask"}.get(task.kind, "padded + mask")


def _masked_arguments(task: Task) -> tuple[Any, ...]:
    """The data is padded beforehand, as a user of this peer would keep it: only the task itself is timed."""
    data = task.data
    if task.kind == "from_padded":
        return task.operands[0], is_element(data), data.lengths, *task.operands
    dense = padded(data, _FILLER.get(task.kind, 0.0))
    mask = is_element(data).view(data.rows, data.longest, *(1 for _ in data.values.shape[1:]))
    return dense, mask, data.lengths, *task.operands


def _unpadded(task: Task) -> Callable[[Tensor], Tensor]:
    if task.kind in ("pointwise", "softmax", "layer norm", "grouped matmul"):
        return lambda result: result[is_element(task.data)]
    return _as_is
