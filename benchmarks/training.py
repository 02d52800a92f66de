"""Forward and backward together: serrate, and what a user would call instead.

In: a task whose name ends in "+ backward". Out: methods whose results are the gradients of its floating-point inputs, one after
another, and that compute the result of the task first. What autograd records is created in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks import ours
from benchmarks.data import is_element, padded
from benchmarks.methods import Call, Method, quiet, too_large
from benchmarks.peers import padding
from benchmarks.tasks import Task, attend, differentiated, flat, forward, upstream, with_leaves

Function = Callable[..., Any]


def methods(task: Task) -> list[Method]:
    """serrate, and the peers that have gradients."""
    found = [Method("serrate", lambda: _serrate(task), flat)]
    if task.kind in _ALONE:
        found.append(Method(_ALONE[task.kind][0], lambda: _alone(task), flat))
    if task.kind in padding._MASKED:
        found.append(Method(padding._name(task), lambda: _padded(task), _unpadded(task), too_large(task.data)))
    if task.kind in padding._NESTED:
        reason = "" if task.kind == "pointwise" else too_large(task.data)
        found.append(Method("NestedTensor", lambda: _nested(task), flat, reason))
    return found


def _gradients(results: Any, leaves: Sequence[Tensor], given: Any) -> tuple[Tensor, ...]:
    """Gradients in memory of their own, as `.grad` has them: that of a sum is a view of the gradient that arrives."""
    return tuple(g.contiguous() for g in torch.autograd.grad(results, leaves, given))


def _leaves(task: Task) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in differentiated(task))


def _serrate(task: Task) -> Call:
    leaves, given = _leaves(task), upstream(task)
    call = ours.prepared(with_leaves(forward(task), leaves))
    return lambda: torch.autograd.grad(ours.values(call()), leaves, given)


def _padded(task: Task) -> Call:
    """The data is padded beforehand, and so are the gradients that arrive."""
    dense, *others = padding._masked_arguments(forward(task))
    leaves = [dense.detach().requires_grad_(), *_leaves(task)[1:]]
    weights = leaves[1:] or others[2:]
    function, given = padding._MASKED[task.kind], upstream(task)
    if given.shape[0] == task.data.values.shape[0]:
        given = padded(replace(task.data, values=given))

    return lambda: _gradients(function(leaves[0], *others[:2], *weights), leaves, given)


def _unpadded(task: Task) -> Callable[[tuple[Tensor, ...]], Tensor]:
    return lambda found: flat((found[0][is_element(task.data)], *found[1:]))


def _nested(task: Task) -> Call:
    quiet()
    (leaf,), given, data = _leaves(task), upstream(task), task.data
    function, longest = padding._NESTED[task.kind], data.longest

    def call() -> tuple[Tensor, ...]:
        rows = torch.nested.nested_tensor_from_jagged(leaf, data.offsets, min_seqlen=1, max_seqlen=longest)
        result = function(rows, *task.operands)
        return _gradients(result.values() if result.is_nested else result, (leaf,), given)

    return call


def _alone(task: Task) -> Call:
    leaves, given = _leaves(task), upstream(task)
    function = _ALONE[task.kind][1]
    lengths = task.data.lengths.tolist()

    def call() -> tuple[Tensor, ...]:
        results = function(task, lengths, *leaves)
        parts = torch.split(given, lengths) if isinstance(results, list) else [given]
        return _gradients(results, leaves, parts)

    return call


def _per_sequence(task: Task, lengths: list[int], *leaves: Tensor) -> list[Tensor]:
    return [attend(forward(task), *each) for each in zip(*(torch.split(x, lengths) for x in leaves), strict=True)]


def _per_group(task: Task, lengths: list[int], values: Tensor, weights: Tensor) -> list[Tensor]:
    return [row @ weight for row, weight in zip(torch.split(values, lengths), weights, strict=True)]


def _flat_pointwise(task: Task, lengths: list[int], values: Tensor) -> Tensor:
    scale, bias = task.operands
    return torch.relu(values * scale + bias)


def _bags(task: Task, lengths: list[int], table: Tensor) -> Tensor:
    data = task.data
    return functional.embedding_bag(data.values, table, data.offsets, mode="sum", include_last_offset=True)


_ALONE: dict[str, tuple[str, Function]] = {
    "pointwise": ("flat values", _flat_pointwise),
    "attention": ("SDPA per sequence", _per_sequence),
    "causal attention": ("SDPA per sequence", _per_sequence),
    "grouped matmul": ("torch.mm per group", _per_group),
    "embedding bag": ("embedding_bag", _bags),
}
