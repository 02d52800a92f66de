"""serrate's own entries in the tables, written as a user would write them.

Comes in: values, offsets and the work's parameters. Goes out: a callable that returns the result's values. Plans are the
ones serrate chooses by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import serrate
from serrate import JaggedTensor


@serrate.jit
def _sum(jt: Any) -> Any:
    return jt.sum(1)


@serrate.jit
def _pointwise(jt: Any, scale: float, bias: Any) -> Any:
    return torch.relu(jt * scale + bias)


@serrate.jit
def _softmax(jt: Any) -> Any:
    return torch.softmax(jt, 1)


@serrate.jit
def _layer_norm(jt: Any, epsilon: float) -> Any:
    return serrate.ops.layer_norm(jt, (1, 2), eps=epsilon)


@serrate.jit
def _grouped_matmul(jt: Any, weights: Any) -> Any:
    return jt @ weights


def sum_ragged(values: Tensor, offsets: Tensor) -> Callable[[], Tensor]:
    jt = JaggedTensor.from_csr(values, offsets)
    return lambda: _sum(jt)


def pointwise(values: Tensor, offsets: Tensor, scale: float, bias: Tensor) -> Callable[[], Tensor]:
    jt = JaggedTensor.from_csr(values, offsets)
    return lambda: _pointwise(jt, scale, bias).values


def softmax(values: Tensor, offsets: Tensor) -> Callable[[], Tensor]:
    jt = JaggedTensor.from_csr(values, offsets)
    return lambda: _softmax(jt).values


def layer_norm(values: Tensor, offsets: Tensor, epsilon: float) -> Callable[[], Tensor]:
    jt = JaggedTensor.from_csr(values, offsets)
    return lambda: _layer_norm(jt, epsilon).values


def grouped_matmul(tokens: Tensor, offsets: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    jt = JaggedTensor.from_csr(tokens, offsets)
    return lambda: _grouped_matmul(jt, weights).values
