"""serrate's own entries in the tables.

Comes in: values, offsets and the work's parameters. Goes out: a callable that returns the result's values, or None where
there is nothing to measure yet.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def sum_ragged(values: Tensor, offsets: Tensor) -> Callable[[], Tensor] | None:
    return None


def pointwise(values: Tensor, offsets: Tensor, scale: float, bias: Tensor) -> Callable[[], Tensor] | None:
    return None


def softmax(values: Tensor, offsets: Tensor) -> Callable[[], Tensor] | None:
    return None


def layer_norm(values: Tensor, offsets: Tensor, epsilon: float) -> Callable[[], Tensor] | None:
    return None


def grouped_matmul(tokens: Tensor, offsets: Tensor, weights: Tensor) -> Callable[[], Tensor] | None:
    return None
