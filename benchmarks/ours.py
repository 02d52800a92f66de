"""serrate's own entries in the tables, written as a user would write them.

In: a task. Out: a method for it, with plans chosen by serrate and a new result at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

import serrate
from benchmarks.data import Ragged
from benchmarks.methods import Call, Method
from benchmarks.tasks import PARTS, Task
from serrate import JaggedTensor


@serrate.jit
def sum_rows(jt: Any) -> Any:
    return jt.sum(dim=1)


@serrate.jit
def mean_rows(jt: Any) -> Any:
    return jt.mean(dim=1)


@serrate.jit
def max_rows(jt: Any) -> Any:
    return jt.amax(dim=1)


@serrate.jit
def sum_documents(jt: Any) -> Any:
    return jt.sum(dim=(1, 2))


@serrate.jit
def pointwise(jt: Any, scale: float, bias: Any) -> Any:
    return torch.relu(jt * scale + bias)


@serrate.jit
def softmax(jt: Any) -> Any:
    return torch.softmax(jt, dim=1)


@serrate.jit
def logsumexp(jt: Any) -> Any:
    return torch.logsumexp(jt, dim=1)


@serrate.jit
def layer_norm(jt: Any, epsilon: float) -> Any:
    return serrate.ops.layer_norm(jt, (1, 2), eps=epsilon)


@serrate.jit
def add_dense(jt: Any, dense: Any) -> Any:
    return jt.to_padded() + dense


@serrate.jit
def grouped_matmul(jt: Any, weights: Any) -> Any:
    return jt @ weights


@serrate.jit
def embedding_bag(ids: Any, table: Any) -> Any:
    return functional.embedding_bag(ids, table, mode="sum")


@serrate.jit
def attention(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)


JITTED: dict[str, Callable[..., Any]] = {
    "sum": sum_rows,
    "mean": mean_rows,
    "max": max_rows,
    "pointwise": pointwise,
    "softmax": softmax,
    "logsumexp": logsumexp,
    "layer norm": layer_norm,
    "jagged + dense": add_dense,
    "grouped matmul": grouped_matmul,
    "embedding bag": embedding_bag,
}


def method(task: Task) -> Method:
    """The method for the task; ragged tensors are built before timing starts."""
    return Method("serrate", lambda: prepared(task), values)


def prepared(task: Task) -> Call:
    """The call to time."""
    if task.kind == "from_padded":
        padded, lengths = task.operands[0], task.data.lengths
        return lambda: JaggedTensor.from_padded(padded, lengths)
    if task.kind == "two-level sum":
        documents = JaggedTensor.from_lengths(task.data.values, (task.operands[0].diff(), task.data.lengths))
        return lambda: sum_documents(documents)
    if task.kind == "block permute":
        blocks = JaggedTensor.from_lengths(task.data.values, task.data.lengths.view(PARTS, -1))
        return lambda: blocks.permute(1, 0, 2, 3)
    jt = _ragged(task.data)
    if task.kind.endswith("attention"):
        key, value = (jt.with_values(x) for x in task.operands)
        return lambda: attention(jt, key, value, task.kind == "causal attention")
    if task.kind == "to_padded":
        return lambda: jt.to_padded()
    function = JITTED[task.kind]
    return lambda: function(jt, *task.operands)


def _ragged(data: Ragged) -> JaggedTensor:
    return JaggedTensor.from_csr(data.values, data.offsets)


def values(result: Any) -> Tensor:
    """The values of a result."""
    found = result.values if isinstance(result, JaggedTensor) else result
    assert isinstance(found, Tensor)
    return found
